"""NVIDIA GPUs, the links between them, InfiniBand and network cards: what can be seen of them without CUDA."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlpost.config.derive import Device
from rlpost.diagnosis.host import COMMAND_TIMEOUT_S, Answer, Host
from rlpost.diagnosis.report import Finding, Status
from rlpost.diagnosis.software import nvidia_devices, torch_cuda
from rlpost.planner.quantities import GBIT_BYTES, MIB

AREA = "gpu"

BASIC = ("index", "name", "driver_version", "memory.total", "memory.used")
HEALTH = ("index", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")

LEAST_DRIVER = {"12": 525, "13": 580}
"""First driver branch that runs programs of a CUDA version (CUDA release notes, minor version compatibility)."""

FREE_MEMORY_MIB = 1024
"""A GPU that nobody uses holds some hundred MiB of the driver's own."""

SLOWED_BY = {0x08: "hardware slowdown", 0x20: "temperature (software)", 0x40: "temperature (hardware)", 0x80: "power brake"}
"""Bits of clocks_throttle_reasons.active that tell of trouble (nvml.h, nvmlClocksThrottleReasons); idleness and power caps are none."""


def check_gpus(host: Host, device: Device | None) -> Iterator[Finding]:
    """Driver, memory, who holds it, errors and links of the NVIDIA GPUs. ``device`` is the configuration's, None without one."""
    present = nvidia_devices(host)
    basic = _query(host, BASIC)
    if basic.kind != "ok":
        yield _no_answer(basic, present, device)
        return
    rows = _rows(basic.text)
    yield _driver(rows, present, torch_cuda(host))
    for row in rows:
        yield _memory(row, host)
    yield from _health(_query(host, HEALTH))
    if len(rows) > 1:
        yield _topology(host.run("nvidia-smi", "topo", "-m"))
        yield _nvlink(host.run("nvidia-smi", "nvlink", "-s"))


def _query(host: Host, fields: tuple[str, ...]) -> Answer:
    return host.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]


def _no_answer(answer: Answer, present: int, device: Device | None) -> Finding:
    """nvidia-smi is not there, broken or late: right only where there are no GPUs and none are asked for."""
    said = {
        "missing": "there is no nvidia-smi",
        "failed": f"nvidia-smi failed: {answer.text.splitlines()[0] if answer.text else 'it says nothing'}",
        "late": f"nvidia-smi did not answer within {COMMAND_TIMEOUT_S:.0f} s",
    }[answer.kind]
    wanted = present > 0 or device == "gpu"
    status: Status = "failed" if wanted or answer.kind == "late" else "ok" if answer.kind == "missing" else "unknown"
    return Finding(
        area=AREA, name="driver", status=status, found=f"{present} NVIDIA devices; {said}",
        expected="a working NVIDIA driver" if wanted else "no GPU, or a working NVIDIA driver",
        fix="" if status == "ok" else "install or restart the driver (containers: --gpus all); placement.device=cpu trains without GPUs",
    )  # fmt: skip


def _driver(rows: list[list[str]], present: int, cuda: str | None) -> Finding:
    version = rows[0][2] if rows else "?"
    least = LEAST_DRIVER.get((cuda or "").partition(".")[0])
    major = re.match(r"\d+", version)
    old = least is not None and major is not None and int(major[0]) < least
    # MIG and devices that a container does not show make the counts differ; a device that the driver lost does too.
    lost = len(rows) < present
    status: Status = "failed" if old or not rows else "warning" if lost else "unknown" if major is None else "ok"
    names = ", ".join(sorted({row[1] for row in rows})) or "no GPU"
    return Finding(
        area=AREA, name="driver", status=status, found=f"{len(rows)} x {names}, driver {version}; {present} NVIDIA devices",
        expected=f"every device answers{f', driver {least} or newer for CUDA {cuda}' if least else ''}",
        fix="" if status == "ok" else "update the driver" if old else "look at dmesg for Xid errors of the missing GPU; reset or reboot",
        values={"gpus": len(rows)},
    )  # fmt: skip


def _memory(row: list[str], host: Host) -> Finding:
    """Memory of one GPU; what is held before a run starts is missing to it."""
    name = f"memory of GPU {row[0]}"
    try:
        total, used = float(row[3]), float(row[4])
    except ValueError:
        return Finding(area=AREA, name=name, status="unknown", found=f"{row[3]} total, {row[4]} used", expected="a free GPU")
    busy = used > FREE_MEMORY_MIB
    holders = ""
    if busy:
        answer = host.run("nvidia-smi", f"--id={row[0]}", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
        # A container does not see the processes of others.
        pids = [cells[0] for cells in _rows(answer.text)] if answer.kind == "ok" else []
        holders = f" by processes {', '.join(pids)}" if pids else " by processes that are not visible from here"
    return Finding(
        area=AREA, name=name, status="warning" if busy else "ok",
        found=f"{total / 1024:.1f} GiB, {used / 1024:.1f} GiB in use{holders}", expected=f"at most {FREE_MEMORY_MIB / 1024:g} GiB in use",
        fix="end what holds it (a run that was killed?), or give the run other GPUs" if busy else "",
        values={"total_bytes": total * MIB, "used_bytes": used * MIB},
    )  # fmt: skip


def _health(answer: Answer) -> Iterator[Finding]:
    """Uncorrected memory errors since the last reset, and whether a GPU is slowed down at present."""
    expected = "no uncorrected memory errors, no slowdown by heat or power"
    if answer.kind != "ok":
        yield Finding(area=AREA, name="health", status="unknown", found="this driver does not report it", expected=expected)
        return
    for index, errors, reasons in _rows(answer.text):
        name = f"health of GPU {index}"
        slowed = [text for bit, text in SLOWED_BY.items() if reasons.startswith("0x") and int(reasons, 16) & bit]
        broken = errors.isdigit() and int(errors) > 0
        silent = not errors.isdigit() and not reasons.startswith("0x")
        status: Status = "failed" if broken else "warning" if slowed else "unknown" if silent else "ok"
        found = f"uncorrected errors: {errors}; slowed by {', '.join(slowed) or 'nothing'}"
        fix = "reset the GPU or take the node out of service" if broken else "look at cooling and power of the node" if slowed else ""
        yield Finding(area=AREA, name=name, status=status, found=found, expected=expected, fix=fix)


def _topology(answer: Answer) -> Finding:
    """How each pair of GPUs is connected, from the matrix of ``nvidia-smi topo -m``: NV# is NVLink, all else PCIe."""
    expected = "all pairs connected in the same way"
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in answer.text.splitlines()]
    rows = [line for line in lines if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line]
    if answer.kind != "ok" or not rows:
        return Finding(area=AREA, name="links", status="unknown", found="nvidia-smi topo -m gives no matrix", expected=expected)
    pairs = [row[1 + other] for index, row in enumerate(rows) for other in range(index + 1, len(rows))]
    counts = {kind: pairs.count(kind) for kind in sorted(set(pairs))}
    linked = sum(count for kind, count in counts.items() if kind.startswith("NV"))
    mixed = 0 < linked < len(pairs)
    found = ", ".join(f"{count} pairs by {kind}" for kind, count in counts.items())
    return Finding(
        area=AREA, name="links", status="warning" if mixed else "ok", found=found + ("" if linked else " (PCIe: no NVLink)"),
        expected=expected, values={"pairs": len(pairs), "nvlink_pairs": linked},
        fix="put the ranks of one model on GPUs that NVLink connects, and look for a broken bridge or switch" if mixed else "",
    )  # fmt: skip


def _nvlink(answer: Answer) -> Finding:
    """State of each link, from ``nvidia-smi nvlink -s``."""
    expected = "every NVLink active"
    up, down = len(re.findall(r"GB/s", answer.text)), len(re.findall(r"inactive", answer.text))
    if answer.kind != "ok":
        return Finding(area=AREA, name="NVLink", status="unknown", found="nvidia-smi nvlink -s gives no answer", expected=expected)
    return Finding(
        area=AREA, name="NVLink", status="warning" if up and down else "ok", found=f"{up} links active, {down} inactive", expected=expected,
        fix="look for a broken bridge or switch, and at the fabric manager" if up and down else "", values={"active": up, "inactive": down},
    )  # fmt: skip


# ---- network cards ---------------------------------------------------------------------------------------------------

INFINIBAND, NETWORK = "/sys/class/infiniband", "/sys/class/net"


def check_infiniband(host: Host) -> Iterator[Finding]:
    """InfiniBand and RoCE cards with the state and rate of their ports; a machine without any is ok."""
    cards = host.names(INFINIBAND)
    if not cards:
        yield Finding(area="network", name="InfiniBand", status="ok", found="no card", expected="every card has an active port")
    for card in cards:
        ports = {port: f"{INFINIBAND}/{card}/ports/{port}" for port in host.names(f"{INFINIBAND}/{card}/ports")}
        states = {port: host.read(f"{place}/state") or "" for port, place in ports.items()}
        rates = [float(match[0]) for place in ports.values() if (match := re.match(r"[\d.]+", host.read(f"{place}/rate") or ""))]
        said = [f"port {port}: {states[port] or '?'}, {host.read(f'{place}/rate') or '?'}" for port, place in ports.items()]
        up, known = any("ACTIVE" in state for state in states.values()), any(states.values())
        yield Finding(
            area="network", name=card, status="ok" if up else "warning" if known else "unknown", found="; ".join(said) or "no port",
            expected="an active port", fix="" if up else "look at cable and subnet manager; NCCL_IB_HCA chooses the cards that work",
            values={"rate_bytes_s": max(rates, default=0) * GBIT_BYTES},
        )  # fmt: skip


def check_network_cards(host: Host) -> Finding:
    """Network cards that are up, with the speed that they say."""
    speeds: dict[str, int] = {}
    for card in host.names(NETWORK):
        if card != "lo" and host.read(f"{NETWORK}/{card}/operstate") in ("up", "unknown"):
            speed = host.read(f"{NETWORK}/{card}/speed") or ""
            speeds[card] = int(speed) if speed.isdigit() else 0  # -1: a virtual card
    told = {card: f"{speed / 1000:g} Gbit/s" if speed else "speed not told" for card, speed in speeds.items()}
    status: Status = "ok" if any(speeds.values()) else "unknown" if speeds else "warning"
    return Finding(
        area="network", name="cards", status=status, found=", ".join(f"{card} {text}" for card, text in told.items()) or "none is up",
        expected="a card that is up and tells its speed", values={"fastest_bytes_s": max(speeds.values(), default=0) / 1000 * GBIT_BYTES},
        fix="bring the network up; without it only this machine can be used" if not speeds else "",
    )  # fmt: skip
