"""All checks of one machine, in order, each with a deadline: memory, limits, CPUs, clock and environment here, the others by name."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from rlpost.diagnosis import devices, links, software, storage
from rlpost.diagnosis.host import UNLIMITED, Host
from rlpost.diagnosis.needs import Needs
from rlpost.diagnosis.report import Finding, Status
from rlpost.planner.quantities import GIB, MIB

CHECK_TIMEOUT_S = 90.0
"""For any one check. The slowest that is right is a file of 64 MiB on a disk that is far too slow."""

Say = Callable[[str], None]
Check = Callable[[], Finding | Iterable[Finding]]

# ---- memory ----------------------------------------------------------------------------------------------------------

MOST_MEMORY_USED = 0.95
"""Ray ends workers when more of a node's memory is in use (RAY_memory_usage_threshold)."""

LEAST_MEMORY_BYTES = 2 * GIB
"""Less does not hold the processes of one trainer rank and one engine of the smallest model."""

LEAST_SHARED_BYTES = 512 * MIB
"""The object store of a Ray that rlpost starts here (cluster/session.py, which brings Ray with it: it may be what is missing)."""

STORE_SHARE = 0.3
"""Of a node's memory that ``ray start`` takes for its object store, if /dev/shm has it; else the store is on the disk."""


def meminfo_bytes(host: Host) -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    lines = (line.split() for line in (host.read("/proc/meminfo") or "").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}


def _group_directories(host: Host, controller: str) -> Iterator[str]:
    """Directories of this process's control group and its parents (v2, then v1); in a container the first ones may not be visible."""
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = "/sys/fs/cgroup" if controllers == "" else f"/sys/fs/cgroup/{controller}"
            parts = [part for part in path.split("/") if part]
            yield from ("/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1))


def group_memory(host: Host) -> tuple[int, int] | None:
    """Limit and use in bytes of the control group that leaves least; None where none has a limit.

    File pages that the kernel can drop at once do not count as used.
    """
    found = []
    for directory in _group_directories(host, "memory"):
        for limit, used, dropped in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = host.read(f"{directory}/{limit}") or "", host.read(f"{directory}/{used}") or ""
            if most.isdigit() and now.isdigit():
                stat = dict(line.split() for line in (host.read(f"{directory}/memory.stat") or "").splitlines() if len(line.split()) == 2)
                found.append((int(most), max(0, int(now) - int(stat.get(dropped, 0)))))
    return min(found, key=lambda one: one[0] - one[1], default=None)


def check_memory(host: Host) -> Finding:
    """Memory that is free: the smaller of what the host and the control group leave."""
    info, group = meminfo_bytes(host), group_memory(host)
    expected = f"{LEAST_MEMORY_BYTES / GIB:.0f} GiB free, and less than {MOST_MEMORY_USED:.0%} in use (Ray ends workers there)"
    if "MemTotal" not in info or "MemAvailable" not in info:
        return Finding(area="memory", name="memory", status="unknown", found="/proc/meminfo cannot be read", expected=expected)
    total, free = info["MemTotal"], info["MemAvailable"]
    limited = group is not None and group[0] < total
    if group is not None and limited:
        total, free = group[0], min(free, group[0] - group[1])
    status: Status = "failed" if free < (1 - MOST_MEMORY_USED) * total else "warning" if free < LEAST_MEMORY_BYTES else "ok"
    of = (
        f"{total / GIB:.1f} GiB that the control group allows, of {info['MemTotal'] / GIB:.1f} GiB" if limited else f"{total / GIB:.1f} GiB"
    )
    return Finding(
        area="memory", name="memory", status=status, found=f"{free / GIB:.1f} GiB free of {of}", expected=expected,
        fix="" if status == "ok" else "end what uses it, or raise the limit of the container or job",
        values={"free_bytes": free, "total_bytes": total},
    )  # fmt: skip


def check_swap(host: Host) -> Finding:
    """Swap in use: a part of a run that waits for a disk is late at every collective."""
    info = meminfo_bytes(host)
    if "SwapTotal" not in info:
        return Finding(area="memory", name="swap", status="unknown", found="/proc/meminfo cannot be read", expected="none in use")
    used = info["SwapTotal"] - info.get("SwapFree", 0)
    busy = used > GIB
    return Finding(
        area="memory", name="swap", status="warning" if busy else "ok",
        found=f"{used / GIB:.1f} GiB of {info['SwapTotal'] / GIB:.1f} GiB in use", expected="less than 1 GiB in use",
        fix="free memory: what is swapped out makes every rank wait" if busy else "", values={"used_bytes": used},
    )  # fmt: skip


def check_shared_memory(host: Host) -> Finding:
    """/dev/shm: Ray's object store, NCCL and engines of several processes live in it."""
    room, memory = host.room("/dev/shm"), meminfo_bytes(host).get("MemTotal", 0)
    group = group_memory(host)
    wish = STORE_SHARE * min(memory, group[0] if group else memory)
    expected = f"{LEAST_SHARED_BYTES / GIB:.1f} GiB free, for `ray start` {wish / GIB:.1f} GiB ({STORE_SHARE:.0%} of memory)"
    if room is None or "shm" not in host.names("/dev"):
        return Finding(area="memory", name="/dev/shm", status="unknown", found="/dev/shm cannot be looked at", expected=expected)
    _, free = room
    status: Status = "failed" if free < LEAST_SHARED_BYTES else "warning" if free < wish else "ok"
    return Finding(
        area="memory", name="/dev/shm", status=status, found=f"{free / GIB:.2f} GiB free", expected=expected,
        fix="" if status == "ok" else "mount a larger one: docker run --shm-size=16g, or an emptyDir of medium Memory in Kubernetes",
        values={"free_bytes": free},
    )  # fmt: skip


# ---- limits and CPUs -------------------------------------------------------------------------------------------------

GOOD_FILES, LEAST_FILES = 65536, 4096
"""Open files. Ray raises its limit to the first where it may, and warns below the second (ray/_private/worker.py)."""

LEAST_PROCESSES = 4096
"""Threads count as processes, and each worker of Ray has some fifty."""


def check_limits(host: Host) -> Iterator[Finding]:
    """ulimits: open files, processes, locked memory."""
    soft, hard = host.limit("nofile")
    usable = UNLIMITED if UNLIMITED in (soft, hard) else max(soft, min(hard, GOOD_FILES))
    few = usable != UNLIMITED and usable < GOOD_FILES
    status: Status = "ok" if not few else "failed" if usable < LEAST_FILES else "warning"
    yield Finding(
        area="limits", name="open files", status=status, found=f"{_limit(soft)} (hard limit {_limit(hard)})",
        expected=f"{GOOD_FILES}, by the hard limit at least", fix=f"ulimit -n {GOOD_FILES}, or nofile in limits.conf" if few else "",
        values={"files": usable},
    )  # fmt: skip
    soft, _ = host.limit("nproc")
    few = soft != UNLIMITED and soft < LEAST_PROCESSES
    yield Finding(
        area="limits", name="processes", status="warning" if few else "ok", found=_limit(soft), expected=f"{LEAST_PROCESSES} or more",
        fix="ulimit -u unlimited, or nproc in limits.conf" if few else "", values={"processes": soft},
    )  # fmt: skip
    soft, _ = host.limit("memlock")
    needed = bool(host.names(devices.INFINIBAND)) and soft != UNLIMITED
    yield Finding(
        area="limits", name="locked memory", status="warning" if needed else "ok",
        found="unlimited" if soft == UNLIMITED else f"{soft / 1024:.0f} KiB", expected="unlimited where there is InfiniBand",
        fix="ulimit -l unlimited, or memlock in limits.conf: without it NCCL cannot use the InfiniBand cards" if needed else "",
    )  # fmt: skip


def _limit(value: int) -> str:
    return "unlimited" if value == UNLIMITED else str(value)


def usable_cpus(host: Host) -> float:
    """CPUs that this process may run on, or fewer by the quota of its control group."""
    quotas = []
    for directory in _group_directories(host, "cpu"):
        words = (host.read(f"{directory}/cpu.max") or "").split()
        words = words or [(host.read(f"{directory}/cpu.cfs_{part}_us") or "") for part in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min([float(host.cpus()), *quotas])


def check_cpus(host: Host, needs: Needs) -> Iterator[Finding]:
    """CPUs against the threads of all parts; and against what Ray will be asked for, when the run starts it here."""
    cpus = usable_cpus(host)
    crowded = needs.threads > cpus and not needs.ray_address
    yield Finding(
        area="cpu", name="CPUs", status="warning" if crowded else "ok",
        found=f"{cpus:g} CPUs" + (f" for {needs.threads} threads that compute at once" if needs.threads else ""), expected="a CPU a thread",
        fix="lower training.threads or engine.threads: threads that share a CPU take turns" if crowded else "", values={"cpus": cpus},
    )  # fmt: skip
    if needs.ray_address or host.environment.get("RAY_ADDRESS"):
        return  # `doctor cluster` asks the cluster
    have = {"CPU": max(1.0, cpus // 1), "GPU": float(software.nvidia_devices(host))}
    for name, amount in have.items():
        asked = sum(bundle.resources.get(name, 0.0) for bundle in needs.bundles)
        short = asked > amount
        if asked:
            yield Finding(
                area="resources", name=name, status="failed" if short else "ok", found=f"{amount:g} here, {asked:g} asked for",
                expected="all that the parts of the run reserve",
                fix="fewer training.ranks or engine.count, smaller placement.*_cpus, or a cluster (placement.ray_address)" if short else "",
            )  # fmt: skip


# ---- clock and environment -------------------------------------------------------------------------------------------

MOST_CLOCK_ERROR_S = 16.0
"""systemd calls a clock synchronised while the kernel's bound is below this."""

SLOW_SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE")


def check_clock(error_s: float | None) -> Finding:
    """Whether somebody sets this machine's clock; ``error_s`` is Host.clock_error_s."""
    away = error_s is not None and error_s >= MOST_CLOCK_ERROR_S
    return Finding(
        area="clock", name="synchronised", status="unknown" if error_s is None else "warning" if away else "ok",
        found="the kernel does not say" if error_s is None else "nobody sets it" if away else f"at most {error_s:.3f} s off",
        expected="set by NTP or PTP", fix="start chronyd, ntpd or systemd-timesyncd (on the host of a container)" if away else "",
    )  # fmt: skip


def check_environment(host: Host, needs: Needs) -> Iterator[Finding]:
    """Variables that are known to break runs or to make them slow."""
    visible = host.environment.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1") and software.nvidia_devices(host) > 0
    yield Finding(
        area="environment", name="CUDA_VISIBLE_DEVICES", status="ok" if not hidden else "failed" if needs.device == "gpu" else "warning",
        found="not set" if visible is None else repr(visible), expected="not set, or the GPUs to use",
        fix="unset CUDA_VISIBLE_DEVICES: it hides every GPU" if hidden else "",
    )  # fmt: skip
    slow = [name for name in SLOW_SWITCHES if host.environment.get(name, "0") not in ("", "0")]
    yield Finding(
        area="environment", name="NCCL", status="warning" if slow else "ok", found=", ".join(slow) or "no switch that makes it slow",
        expected="none of " + ", ".join(SLOW_SWITCHES), fix=f"unset {' '.join(slow)}, unless this node needs it" if slow else "",
    )  # fmt: skip
    address = needs.ray_address or host.environment.get("RAY_ADDRESS") or ""
    place = links.host_and_port(address)
    if place is not None:
        problem = links.reach(*place)
        yield Finding(
            area="environment", name="Ray's address", status="failed" if problem else "ok", found=f"{address}: {problem or 'it answers'}",
            expected="a Ray cluster that answers", fix="unset RAY_ADDRESS, correct placement.ray_address, or ray start" if problem else "",
        )  # fmt: skip


def check_network(host: Host, address: str, *, several_nodes: bool) -> Iterator[Finding]:
    """Ports can be opened at this node's addresses, and its name leads to it."""
    card = host.environment.get("GLOO_SOCKET_IFNAME", "")
    yield links.check_port("loopback", links.LOOPBACK, links.reach_itself(links.LOOPBACK))
    yield links.check_port("own address", address, links.reach_itself(address))
    name = socket.gethostname()
    found = links.resolve(name)
    yield links.check_hostname(name, found, [links.is_own(one) for one in found], several_nodes=several_nodes, card=card)


# ---- all of them -----------------------------------------------------------------------------------------------------


def machine_findings(needs: Needs, say: Say, *, host: Host | None = None, addresses: Iterable[str] = (), where: str = "") -> list[Finding]:
    """Everything about this machine. ``addresses`` are those of a cluster's nodes, this one's first; none is a machine alone."""
    here = host or Host()
    nodes = list(dict.fromkeys(addresses)) or [links.own_address()]
    checks: dict[str, Check] = {
        "versions": lambda: software.check_versions(here, engines=needs.engines),
        "build of torch": lambda: software.check_torch_build(here, needs.device),
        "GPUs": lambda: devices.check_gpus(here, needs.device),
        "InfiniBand": lambda: devices.check_infiniband(here),
        "network cards": lambda: devices.check_network_cards(here),
        "memory": lambda: [check_memory(here), check_swap(here), check_shared_memory(here)],
        "limits": lambda: check_limits(here),
        "CPUs": lambda: check_cpus(here, needs),
        "room on disk": lambda: storage.check_room(here, needs),
        "disk speed": lambda: storage.check_speed(needs.directory),
        "old Ray sessions": storage.check_sessions,
        "names and ports": lambda: check_network(here, nodes[0], several_nodes=len(nodes) > 1),
        "clock": lambda: check_clock(here.clock_error_s()),
        "environment": lambda: [*check_environment(here, needs), links.check_proxy(here.environment, nodes)],
    }
    return [replace(finding, where=where) for name, check in checks.items() for finding in within_deadline(name, check, say)]


def within_deadline(name: str, check: Check, say: Say, timeout_s: float = CHECK_TIMEOUT_S) -> list[Finding]:
    """What a check found; a check that hangs or breaks is itself a failed finding."""
    say(f"checking {name} ...")
    outcome: list[Any] = []

    def run() -> None:
        try:
            found = check()
            outcome.append([found] if isinstance(found, Finding) else list(found))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on and the user hears of it
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"check {name}")
    thread.start()
    thread.join(timeout_s)
    found = outcome[0] if outcome else TimeoutError(f"no answer within {timeout_s:.0f} s")
    if isinstance(found, Exception):
        return [
            Finding(
                area="check", name=name, status="failed", found=f"{type(found).__name__}: {found}", expected="an answer",
                fix="a system that does not answer (a disk or driver that hangs) shows in dmesg; otherwise please report this",
            )
        ]  # fmt: skip
    return list(found)
