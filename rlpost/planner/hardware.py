"""The machines that a plan is for: data sheets of the GPUs that rlpost runs on, and what is assumed of the nodes around them.

Rates are the data sheets': dense bfloat16 (data sheets print twice that, with sparsity), bandwidths in one direction. What a run reaches
of them is the business of a calibration. Memory is what nvidia-smi prints, which is less than the name says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlpost.planner.quantities import GB, GIB, MIB, require_at_least, require_positive
from rlpost.plugins import nearest
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A GPU, or one core of a CPU (whose memory is then the machine's)."""

    name: str
    memory_bytes: int
    bytes_per_second: float
    """Memory bandwidth."""
    flops_per_second: float
    """Dense bfloat16 with float32 sums."""
    fp8_flops_per_second: float | None
    """None where the hardware has no FP8."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nodes of one kind. On device ``cpu`` the accelerator's rates are one core's."""

    name: str
    accelerator: Accelerator
    nodes: int
    gpus_per_node: int
    node_bus_bytes_per_second: float
    """Bus bandwidth of collectives inside a node, as nccl-tests defines it."""
    network_bytes_per_second: float
    """Of one node to the others, all cards together."""
    disk_write_bytes_per_second: float
    disk_read_bytes_per_second: float
    host_memory_bytes: int
    """Of one node."""
    cores: int = 0
    """Of a node; 0 for GPUs, where no time depends on it."""
    given: frozenset[str] = frozenset()
    """Fields that the user gave, ``memory_bytes`` of the accelerator among them; all others are assumed, but for ``measured``."""
    measured: frozenset[str] = frozenset()
    """Fields that were read from this machine."""
    warnings: tuple[str, ...] = ()
    """What looks like another unit and is not impossible."""

    @property
    def device(self) -> Literal["gpu", "cpu"]:
        """The kind of device that ranks and engines run on."""
        return "cpu" if self.accelerator.name == CPU else "gpu"

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.nodes * self.gpus_per_node

    def bus_bytes_per_second(self, gpus: int) -> float:
        """Bus bandwidth of a collective over ``gpus`` GPUs, nodes filled one by one: a node's own while they fit in one.

        Over several nodes it is about the sum of a node's network cards (nccl-tests issue 119: 96e9 bytes/s over four of 25e9).
        """
        require_at_least(1, gpus=gpus)
        if gpus <= self.gpus_per_node:
            return self.node_bus_bytes_per_second
        return min(self.node_bus_bytes_per_second, self.network_bytes_per_second)


CPU = "cpu"
USUAL_NODE = 8
"""GPUs of a node where a name gives only their number."""
MOST_GPUS_PER_NODE = 16
HOST_BYTES_PER_GPU_BYTE = 2
"""Usual advice for GPU servers: at least twice the memory of its GPUs."""
DISK_BYTES_PER_SECOND = 1.0 * GB
"""Assumed: one client of a shared file system."""


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A GPU and its usual node; bandwidths in GB/s."""

    accelerator: Accelerator
    names: tuple[str, ...]
    """Other names, with nvidia-smi's, without anything but letters and digits."""
    bus: float
    """Assumed inside a node. With NVLink 82 % of the link: what all-gather reaches (nccl-tests issue 212: 370 of 450; eight A100 reach
    230). An all-reduce in the switch shows more (480). PCIe: 35 to 45 of PCIe 5; of PCIe 4 the 10 that NCCL reckons with between sockets
    (nccl-tests issue 307)."""
    link: float
    """Of one GPU to others, in one direction."""
    network: float
    """Assumed of a node: a single card of the usual kind."""
    card: float = 50
    """The fastest card that this generation is sold with."""


def _kind(name: str, mib: int, bandwidth: float, tflops: float, fp8: float | None, bus: float, link: float, network: float, names: str,
          card: float = 50) -> _Kind:  # fmt: skip
    accelerator = Accelerator(
        name=name, memory_bytes=mib * MIB, bytes_per_second=bandwidth * GB, flops_per_second=tflops * 1e12,
        fp8_flops_per_second=None if fp8 is None else fp8 * 1e12,
        source=f"NVIDIA's data sheet, without sparsity; memory: nvidia-smi, {mib} MiB",
    )  # fmt: skip
    return _Kind(accelerator=accelerator, names=tuple(names.split()), bus=bus, link=link, network=network, card=card)


KINDS = (
    # Memory MiB and GB/s, bfloat16 and FP8 TFLOP/s, bus, link and network GB/s.
    _kind("A100-40GB", 40960, 1555, 312, None, 230, 300, 25, "a100sxm440gb"),
    _kind("A100-80GB", 81920, 2039, 312, None, 230, 300, 25, "a100sxm480gb"),
    _kind("H100-80GB", 81559, 3350, 989, 1979, 370, 450, 50, "h100 h100sxm h100sxm5 h10080gbhbm3"),
    _kind("H100-PCIe", 81559, 2000, 756, 1513, 35, 300, 50, "h100pcie80gb h10080gbpcie"),
    _kind("H200-141GB", 143771, 4800, 989, 1979, 370, 450, 50, "h200 h200sxm"),
    _kind("H20-96GB", 97871, 4000, 148, 296, 370, 450, 50, "h20"),
    _kind("B200", 183359, 8000, 2250, 4500, 740, 900, 50, "b200180gb b200192gb", card=100),
    _kind("L40S", 46068, 864, 362, 733, 10, 32, 12.5, "l40s48gb"),
    _kind("L4", 23034, 300, 121, 242, 10, 32, 12.5, "l424gb"),
    _kind("A10G", 23028, 600, 70, None, 10, 32, 12.5, "a10g24gb"),
    # GeForce cards halve the rate of tensor cores where sums are float32.
    _kind("RTX-4090", 24564, 1008, 165, 330, 10, 32, 12.5, "4090 rtx409024gb"),
    _kind("RTX-3090", 24576, 936, 71, None, 10, 56, 12.5, "3090 rtx309024gb"),
)
"""What vLLM for CUDA and bfloat16 run on."""

_BY_NAME = {name: kind for kind in KINDS for name in (re.sub("[^a-z0-9]", "", kind.accelerator.name.lower()), *kind.names)}
SEVERAL_SIZES = {"a100": "A100-40GB or A100-80GB"}


def find_hardware(
    *,
    hardware: str | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    nvlink: float | None = None,
    net: float | None = None,
    disk: float | None = None,
    gpu_memory: float | None = None,
) -> Hardware:
    """The machine by name, or by ``nodes`` (default 1), ``gpus`` of a node and ``gpu``.

    Names are ``h100-8``, ``h100-32`` (nodes of 8), ``cpu`` and ``cpu-2`` (cores). The rest replaces what is assumed: ``nvlink`` bus
    bandwidth inside a node, ``net`` of a node, ``disk`` to write and to read, in GB/s; ``gpu_memory`` in GiB. Raises ConfigError for
    unknown or contradictory names and for values that only another unit explains.
    """
    if hardware is None and gpu == CPU:
        hardware, gpu = CPU, None
    parts = {name: value for name, value in (("nodes", nodes), ("gpus", gpus), ("gpu", gpu)) if value is not None}
    if hardware is not None and parts:
        both = ", ".join(f"{name}={value}" for name, value in parts.items())
        raise ConfigError(
            f"hardware={hardware} and {both} both say what the machine is; expected one way: leave out {', '.join(parts)}, or leave out "
            "hardware and give nodes=N gpus=N gpu=KIND"
        )
    if hardware is not None and hardware.lower().partition("-")[0] == CPU:
        found = _cpu(hardware.lower())
        refused = [name for name, value in (("nvlink", nvlink), ("gpu_memory", gpu_memory)) if value is not None]
        if refused:
            raise ConfigError(f"hardware={hardware} has no GPU, so {refused[0]} says nothing; leave it out, or name a machine with GPUs")
        return _with_network(_with_disk(found, disk), net, None)
    if hardware is not None:
        kind, nodes, gpus = _named(hardware)
        name = hardware.lower()
    else:
        kind, nodes, gpus = _described(nodes, gpus, gpu)
        name = f"{nodes}x{gpus} {kind.accelerator.name}"
    found = _usual(kind, name, nodes, gpus)
    return _with_network(_with_disk(_with_memory(_with_bus(found, nvlink, kind), gpu_memory), disk), net, kind)


# ---- names -----------------------------------------------------------------------------------------------------------


def _compact(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower()).removeprefix("nvidia").removeprefix("geforce")


def _find_kind(text: str, given: str) -> _Kind:
    """The kind called ``text``; ``given`` is what the user wrote. Raises ConfigError with the nearest and all known ones."""
    compact = _compact(text)
    if compact in SEVERAL_SIZES:
        raise ConfigError(f"{given}: {text.upper()} comes in several sizes; expected {SEVERAL_SIZES[compact]}")
    if compact not in _BY_NAME:
        near = list(
            dict.fromkeys(_BY_NAME[one].accelerator.name for one in nearest(compact, [name for name in _BY_NAME if not name.isdecimal()]))
        )
        hint = f" (nearest: {', '.join(near)})" if near else ""
        known = ", ".join(kind.accelerator.name for kind in KINDS)
        raise ConfigError(
            f"{given}: no GPU {text!r} is known{hint}; expected one of {known}, or hardware=cpu: "
            "for another NVIDIA GPU take the one most like it, with gpu_memory=GiB and nvlink=GB/s of yours"
        )
    return _BY_NAME[compact]


def _named(hardware: str) -> tuple[_Kind, int, int]:
    """Kind, nodes and GPUs of a node of ``KIND-GPUS``."""
    given, (stem, _, count) = f"hardware={hardware}", hardware.rpartition("-")
    if _compact(hardware) in {*_BY_NAME, *SEVERAL_SIZES} or not count.isdecimal():
        kind = _find_kind(hardware, given)
        raise ConfigError(f"{given} does not say how many GPUs; expected KIND-GPUS: give hardware={kind.accelerator.name.lower()}-8, say")
    if f"{_compact(stem)}{count}gb" in _BY_NAME:
        raise ConfigError(
            f"{given} may be {count} GPUs or GPUs of {count} GB; expected hardware={stem}-{count}gb-GPUS, or nodes=N gpus=N gpu={stem}"
        )
    kind, total = _find_kind(stem, given), int(count)
    require_at_least(1, **{f"GPUs of {given}": total})
    if total > USUAL_NODE and total % USUAL_NODE:
        raise ConfigError(f"{given}: {total} GPUs are no whole nodes of {USUAL_NODE}; for other nodes give nodes=N gpus=N gpu={stem}")
    return kind, max(1, total // USUAL_NODE), min(total, USUAL_NODE)


def _described(nodes: int | None, gpus: int | None, gpu: str | None) -> tuple[_Kind, int, int]:
    """Kind, nodes and GPUs of a node of ``nodes``, ``gpus`` and ``gpu``."""
    if gpu is None or gpus is None:
        missing = " and ".join(name for name, value in (("gpus", gpus), ("gpu", gpu)) if value is None)
        raise ConfigError(f"the machine has no {missing}; expected hardware=h100-8, hardware=cpu or nodes=N gpus=N gpu=KIND: add {missing}")
    nodes = 1 if nodes is None else nodes
    require_at_least(1, nodes=nodes, gpus=gpus)
    kind = _find_kind(gpu, f"gpu={gpu}")
    if gpus > MOST_GPUS_PER_NODE:
        raise ConfigError(
            f"gpus={gpus} is of one node, and no usual node has more than {MOST_GPUS_PER_NODE}; for {gpus} GPUs in all give "
            f"nodes={-(-gpus // USUAL_NODE)} gpus={USUAL_NODE}"
        )
    return kind, nodes, gpus


# ---- machines --------------------------------------------------------------------------------------------------------


def _usual(kind: _Kind, name: str, nodes: int, gpus: int) -> Hardware:
    return Hardware(
        name=name,
        accelerator=kind.accelerator,
        nodes=nodes,
        gpus_per_node=gpus,
        node_bus_bytes_per_second=kind.bus * GB,
        network_bytes_per_second=kind.network * GB,
        disk_write_bytes_per_second=DISK_BYTES_PER_SECOND,
        disk_read_bytes_per_second=DISK_BYTES_PER_SECOND,
        host_memory_bytes=HOST_BYTES_PER_GPU_BYTE * gpus * kind.accelerator.memory_bytes,
        given=frozenset({"accelerator", "nodes", "gpus_per_node"}),
    )


CORE_BYTES_PER_SECOND = 10.0 * GB
CORE_FLOPS_PER_SECOND = 50e9
CPU_BUS_BYTES_PER_SECOND = 1.0 * GB
CPU_NETWORK_BYTES_PER_SECOND = 1.25 * GB
CORE_MEMORY_BYTES = 4 * GIB
"""Nominal values of a server's core, of gloo between processes of a machine and of a 10 Gbit/s network: nothing but a start for a
calibration, which CPUs need more than GPUs do."""

MEMORY_FILE = Path("/proc/meminfo")
CONTAINER_LIMIT_FILE = Path("/sys/fs/cgroup/memory.max")


def _cpu(hardware: str) -> Hardware:
    """``cpu`` or ``cpu-CORES``, with the memory of the machine that this runs on."""
    match = re.fullmatch(r"cpu(?:-([1-9]\d*))?", hardware)
    if match is None:
        raise ConfigError(f"hardware={hardware} is not known; expected cpu, or cpu-CORES with at least 1 core: cpu-2, say")
    cores = int(match[1]) if match[1] else len(os.sched_getaffinity(0))
    memory = _memory_of_this_machine()
    measured = {"cores": match[1] is None, "host_memory_bytes": memory is not None}
    memory = cores * CORE_MEMORY_BYTES if memory is None else memory
    return Hardware(
        name=f"cpu-{cores}",
        accelerator=Accelerator(
            name=CPU, memory_bytes=memory, bytes_per_second=CORE_BYTES_PER_SECOND, flops_per_second=CORE_FLOPS_PER_SECOND,
            fp8_flops_per_second=None, source="assumed of one core: calibrate",
        ),
        nodes=1,
        gpus_per_node=1,
        node_bus_bytes_per_second=CPU_BUS_BYTES_PER_SECOND,
        network_bytes_per_second=CPU_NETWORK_BYTES_PER_SECOND,
        disk_write_bytes_per_second=DISK_BYTES_PER_SECOND,
        disk_read_bytes_per_second=DISK_BYTES_PER_SECOND,
        host_memory_bytes=memory,
        cores=cores,
        given=frozenset({"cores"} if match[1] else ()),
        measured=frozenset(name for name, was in measured.items() if was),
    )  # fmt: skip


def _memory_of_this_machine() -> int | None:
    """Bytes in all, or of the container that this runs in; None where the system does not tell."""
    try:
        line = re.search(r"^MemTotal:\s+(\d+) kB", MEMORY_FILE.read_text(), re.MULTILINE)
    except OSError:
        return None
    if line is None:
        return None
    try:
        limit = CONTAINER_LIMIT_FILE.read_text().strip()
    except OSError:
        limit = "max"
    total = int(line[1]) * 1024
    return min(total, int(limit)) if limit.isdigit() else total


# ---- what replaces an assumption -------------------------------------------------------------------------------------

MOST_OF_LINK = 1.2
"""Bus bandwidth above the link's own is possible where the switch reduces: 480 GB/s of 450 (nccl-tests issue 212)."""
MOST_DISK_GB = 200
FAST_DISK_GB = 20
MOST_GPU_GIB = 512
GBIT_OF_CARDS = (10, 25, 40, 100, 200, 400, 800, 1600, 3200)
"""Gbit/s that network cards and nodes are sold with: as GB/s they are possible, and more often a slip."""


def _require_possible(name: str, value: float, most: float, why: str, units: Mapping[str, float]) -> None:
    """Raise ConfigError unless ``value`` is above 0 and at most ``most``, with what it would be if it were in another of ``units``."""
    require_positive(**{name: value})
    if value > most:
        read = [
            f"{name}={value * factor:.4g} if {value:g} is {unit}" for unit, factor in units.items() if most / 1000 <= value * factor <= most
        ]
        raise ConfigError(
            f"{name}={value:g} is impossible: {why}; expected at most {most:g}: give {' or '.join(read) or 'what was measured'}"
        )


def _with_bus(hardware: Hardware, nvlink: float | None, kind: _Kind) -> Hardware:
    if nvlink is None:
        return hardware
    name, link = kind.accelerator.name, kind.link
    why = f"it is bus bandwidth in GB/s, and one {name} sends at most {link:g} to others"
    units = {"both directions together, as data sheets add them": 1 / 2, "in Gbit/s": 1 / 8, "in bytes/s": 1 / GB}
    _require_possible("nvlink", nvlink, MOST_OF_LINK * link, why, units)
    slow = f"nvlink={nvlink:g} is read as GB/s, and {name} usually have about {kind.bus:g}; if it is in TB/s, give nvlink={nvlink * 1000:g}"
    warnings = (slow,) if nvlink * 1000 <= MOST_OF_LINK * link else ()
    return replace(
        hardware, node_bus_bytes_per_second=nvlink * GB, given=hardware.given | {"node_bus_bytes_per_second"},
        warnings=hardware.warnings + warnings,
    )  # fmt: skip


def _with_network(hardware: Hardware, net: float | None, kind: _Kind | None) -> Hardware:
    """``kind``: None for a machine without GPUs, which is taken to have at most two cards, as one with a single GPU."""
    if net is None:
        return hardware
    card = kind.card if kind is not None else 50.0
    most = max(2, hardware.gpus_per_node) * card
    why = f"it is in GB/s of a node, and the fastest cards, one a GPU (two at least), bring {most:g}"
    _require_possible("net", net, most, why, {"in Gbit/s": 1 / 8, "in bytes/s": 1 / GB})
    slip = f"net={net:g} is read as GB/s of a node, which is {8 * net:g} Gbit/s; if the node has {net:g} Gbit/s, give net={net / 8:g}"
    warnings = (slip,) if net in GBIT_OF_CARDS else ()
    return replace(
        hardware, network_bytes_per_second=net * GB, given=hardware.given | {"network_bytes_per_second"},
        warnings=hardware.warnings + warnings,
    )  # fmt: skip


def _with_disk(hardware: Hardware, disk: float | None) -> Hardware:
    if disk is None:
        return hardware
    why = "it is in GB/s of one client"
    _require_possible("disk", disk, MOST_DISK_GB, why, {"in MB/s": 1 / 1000, "in bytes/s": 1 / GB})
    fast = f"disk={disk:g} is read as GB/s, more than most file systems give one client; if it is in MB/s, give disk={disk / 1000:g}"
    warnings = (fast,) if disk > FAST_DISK_GB else ()
    return replace(
        hardware, disk_write_bytes_per_second=disk * GB, disk_read_bytes_per_second=disk * GB,
        given=hardware.given | {"disk_write_bytes_per_second", "disk_read_bytes_per_second"}, warnings=hardware.warnings + warnings,
    )  # fmt: skip


def _with_memory(hardware: Hardware, gpu_memory: float | None) -> Hardware:
    if gpu_memory is None:
        return hardware
    _require_possible("gpu_memory", gpu_memory, MOST_GPU_GIB, "it is in GiB of one GPU", {"in MiB": 1 / 1024, "in bytes": 1 / GIB})
    known = hardware.accelerator.memory_bytes / GIB
    more = f"gpu_memory={gpu_memory:g} GiB is more than the {known:.2f} GiB that nvidia-smi shows of a {hardware.accelerator.name}"
    warnings = (more,) if gpu_memory > known else ()
    memory = int(gpu_memory * GIB)
    return replace(
        hardware, accelerator=replace(hardware.accelerator, memory_bytes=memory), given=hardware.given | {"memory_bytes"},
        host_memory_bytes=HOST_BYTES_PER_GPU_BYTE * hardware.gpus_per_node * memory, warnings=hardware.warnings + warnings,
    )  # fmt: skip
