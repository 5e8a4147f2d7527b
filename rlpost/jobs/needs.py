"""From a run's configuration to what a job must hold: equal nodes in groups, each with whole placement bundles.

A bundle (a trainer rank, an engine with all its GPUs) is never split over nodes, so an engine is always whole in one. Nodes are counted
as the largest bundles first, each on the first node with room: engines, then ranks, which therefore stand together. Ray too places
scarce and large bundles first, so a mixture that only a search would find is refused here and not left to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.derive import COLOCATED, ENGINE, Bundle, Device, placement_bundles
from rlpost.config.schema import RunConfig
from rlpost.planner.quantities import require_at_least
from rlpost.types import ConfigError

CPUS_OF_A_GPU = 4
"""CPUs asked for a GPU when the node's are not told. vLLM polls with one process an engine, one for its front end and one a GPU (its
documentation asks for 2 + GPUs physical cores at least), and a trainer rank has its own beside NCCL's."""

HEAD_CPUS = 2
"""One for the driver, one for Ray's own processes on the head."""

TRAINER_GROUP, ROLLOUT_GROUP, SHARED_GROUP = "trainer", "rollout", "shared"

_ROUNDING = 1e-6
"""CPUs are fractions, whose sums are not exact."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """``nodes`` equal nodes that hold ``bundles`` whole. ``gpus``, ``cpus`` and ``memory_gib`` are of each node."""

    role: str
    """``trainer`` (ranks, critic, reference and reward models), ``rollout`` (engines), or ``shared`` (both)."""
    nodes: int
    gpus: int
    cpus: int
    memory_gib: int | None
    """None: as the scheduler has it by default."""
    bundles: tuple[Bundle, ...]


@dataclass(frozen=True, kw_only=True)
class JobNeeds:
    """What the scheduler must grant together. The driver's ``head_cpus`` come on top of the groups' CPUs."""

    groups: tuple[NodeGroup, ...]
    head_cpus: int
    device: Device

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(group.nodes * group.gpus for group in self.groups)

    @property
    def nodes(self) -> int:
        """Nodes of all groups; a head of its own is not among them."""
        return sum(group.nodes for group in self.groups)


def job_needs(
    config: RunConfig,
    *,
    gpus_per_node: int,
    cpus_per_node: int | None = None,
    memory_gib_per_node: int | None = None,
    separate_roles: bool = False,
) -> JobNeeds:
    """The nodes that hold all bundles of ``config``: as few as can be, then as few GPUs of each as that many nodes allow.

    ``gpus_per_node`` is what one node has, 0 for a run on CPUs. ``cpus_per_node`` and ``memory_gib_per_node`` are what to ask of each;
    None asks for the bundles' CPUs, but CPUS_OF_A_GPU a GPU at least. ``separate_roles`` gives trainers and engines nodes of their own.
    The device is ``placement.device``; auto is gpu when nodes have GPUs, whatever the machine that asks has.
    Raises ConfigError when a bundle is larger than a node, when a node's CPUs do not suffice for its GPUs, and for a GPU run without GPUs.
    """
    require_at_least(0, gpus_per_node=gpus_per_node)
    given = {"cpus_per_node": cpus_per_node, "memory_gib_per_node": memory_gib_per_node}
    require_at_least(1, **{name: value for name, value in given.items() if value is not None})
    device = _device(config, gpus_per_node)
    bundles = placement_bundles(config, device)
    groups = []
    for role, members in _by_group(config, bundles, device, separate_roles).items():
        _check_bundles(members, gpus_per_node, cpus_per_node)
        nodes, gpus, cpus = _node_size(members, gpus_per_node if device == "gpu" else 0, cpus_per_node)
        groups.append(NodeGroup(role=role, nodes=nodes, gpus=gpus, cpus=cpus, memory_gib=memory_gib_per_node, bundles=tuple(members)))
    workers = config.reward_runner.workers if config.rewards else 0
    return JobNeeds(groups=tuple(groups), head_cpus=HEAD_CPUS + workers, device=device)


def overrides_in_job(config: RunConfig, device: Device) -> tuple[str, ...]:
    """``key=value`` words that the run's command gets inside a job: join the job's Ray, use its devices, and resume when it is a retry."""
    resume = ("resume=auto",) if config.resume == "never" else ()
    return ("placement.ray_address=auto", f"placement.device={device}", *resume)


def _device(config: RunConfig, gpus_per_node: int) -> Device:
    if config.placement.device == "cpu" or (config.placement.device == "auto" and gpus_per_node == 0):
        return "cpu"
    if gpus_per_node == 0:
        raise ConfigError(
            "placement.device is gpu, but gpus_per_node=0; give the GPUs that one node has as gpus_per_node, or set placement.device=cpu"
        )
    return "gpu"


def _by_group(config: RunConfig, bundles: Sequence[Bundle], device: Device, separate_roles: bool) -> dict[str, list[Bundle]]:
    """Bundles by the group whose nodes hold them; no group is empty."""
    rollouts = [bundle for bundle in bundles if bundle.role in (ENGINE, COLOCATED)]
    others = [bundle for bundle in bundles if bundle.role not in (ENGINE, COLOCATED)]
    if not separate_roles:
        role = SHARED_GROUP if rollouts else TRAINER_GROUP
        return {role: list(bundles)}
    if device == "gpu" and config.placement.mode == COLOCATED and rollouts:
        raise ConfigError(
            "separate_roles=true gives trainers and engines nodes of their own, but with placement.mode=colocated they share GPUs; "
            "set placement.mode=split, or separate_roles=false"
        )
    return {role: members for role, members in ((TRAINER_GROUP, others), (ROLLOUT_GROUP, rollouts)) if members}


def _check_bundles(bundles: Sequence[Bundle], gpus_per_node: int, cpus_per_node: int | None) -> None:
    """Raise ConfigError when one of them is larger than a node."""
    for bundle in bundles:
        gpus, cpus = _amounts(bundle)
        if gpus > gpus_per_node:
            raise ConfigError(
                f"the {bundle.role} bundle needs {gpus:g} GPUs on one node, but gpus_per_node={gpus_per_node}; "
                f"set engine.tensor_parallel={gpus_per_node} or less, or ask for larger nodes"
            )
        if cpus_per_node is not None and cpus > cpus_per_node + _ROUNDING:
            raise ConfigError(
                f"the {bundle.role} bundle needs {cpus:g} CPUs on one node, but cpus_per_node={cpus_per_node}; lower "
                f"placement.trainer_cpus or placement.engine_cpus, or raise cpus_per_node to {math.ceil(cpus)} or more"
            )


def _node_size(bundles: Sequence[Bundle], gpus_per_node: int, cpus_per_node: int | None) -> tuple[int, int, int]:
    """Nodes, and the GPUs and CPUs of each. Raises ConfigError when GPUs would stand idle for want of CPUs."""
    if gpus_per_node == 0:
        nodes = 1 if cpus_per_node is None else _nodes(bundles, 0, cpus_per_node)
        return nodes, 0, cpus_per_node or _least_cpus(bundles, nodes, 0)
    nodes = _nodes(bundles, gpus_per_node, math.inf)
    # Equal nodes: 12 ranks on nodes of 8 are two nodes of 6.
    largest = math.ceil(max(_amounts(bundle)[0] for bundle in bundles))
    gpus = next(size for size in range(largest, gpus_per_node + 1) if _nodes(bundles, size, math.inf) <= nodes)
    least = _least_cpus(bundles, nodes, gpus)
    if cpus_per_node is not None and _nodes(bundles, gpus, cpus_per_node) > nodes:
        raise ConfigError(
            f"{len(bundles)} bundles fill {nodes} node(s) of {gpus} GPUs, where they need {least} CPUs a node, but "
            f"cpus_per_node={cpus_per_node}; lower placement.trainer_cpus or placement.engine_cpus, or raise cpus_per_node"
        )
    return nodes, gpus, cpus_per_node or max(least, CPUS_OF_A_GPU * gpus)


def _least_cpus(bundles: Sequence[Bundle], nodes: int, gpus: int) -> int:
    """Whole CPUs of each of ``nodes`` that hold the bundles."""
    cpus = [_amounts(bundle)[1] for bundle in bundles]
    least = math.ceil(max(sum(cpus) / nodes, *cpus) - _ROUNDING)
    return next(size for size in itertools.count(max(1, least)) if _nodes(bundles, gpus, size) <= nodes)


def _nodes(bundles: Sequence[Bundle], gpus: int, cpus: float) -> int:
    """How many nodes of this size hold the bundles, none of which is larger: largest first, each on the first node with room."""
    free: list[tuple[float, float]] = []
    for need in sorted((_amounts(bundle) for bundle in bundles), reverse=True):
        room = (
            index for index, node in enumerate(free) if all(have + _ROUNDING >= amount for have, amount in zip(node, need, strict=True))
        )
        place = next(room, None)
        if place is None:
            place = len(free)
            free.append((gpus, cpus))
        free[place] = (free[place][0] - need[0], free[place][1] - need[1])
    return len(free)


def _amounts(bundle: Bundle) -> tuple[float, float]:
    """GPUs and CPUs."""
    return bundle.resources.get("GPU", 0.0), bundle.resources.get("CPU", 0.0)
