"""From a run's configuration to what a job must hold: equal nodes in groups, each with whole placement bundles.

A bundle (a trainer rank, an engine with all its GPUs) is never split over nodes, so an engine is always whole in one. Nodes are counted
as the largest bundles first, each on the first node with room. What fits so, the driver's own layout (cluster/layout.py) finds a place
for; where it puts each bundle is its matter.
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
    node_gpus: int
    """What such a node has; ``gpus`` of them are needed."""
    cpus: int
    bundle_cpus: int
    """Of ``cpus``, the least of each node that hold the bundles."""
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
    rollout_gpus_per_node: int | None = None,
    nodes: int | None = None,
) -> JobNeeds:
    """The nodes that hold all bundles of ``config``: as few as can be, then as few GPUs of each as that many nodes allow.

    ``gpus_per_node`` is what one node has, 0 for a run on CPUs. ``cpus_per_node`` and ``memory_gib_per_node`` are what to ask of each;
    None asks for the bundles' CPUs, but CPUS_OF_A_GPU a GPU at least. ``separate_roles`` gives trainers and engines nodes of their own;
    those of engines have ``rollout_gpus_per_node``, where it is given. ``nodes`` takes that many of each group instead of the fewest.
    The device is ``placement.device``; auto is gpu when nodes have GPUs, whatever the machine that asks has.
    Raises ConfigError when a bundle is larger than a node, when ``nodes`` do not hold the run, when a node's CPUs do not suffice for its
    GPUs, and for a GPU run without GPUs.
    """
    require_at_least(0, gpus_per_node=gpus_per_node)
    given = {"cpus_per_node": cpus_per_node, "memory_gib_per_node": memory_gib_per_node, "nodes": nodes}
    require_at_least(1, **{name: value for name, value in given.items() if value is not None})
    device = _device(config, gpus_per_node)
    bundles = placement_bundles(config, device)
    groups = []
    for role, members in _by_group(config, bundles, device, separate_roles).items():
        other = rollout_gpus_per_node if role == ROLLOUT_GROUP else None
        size = _Size(
            gpus=(gpus_per_node if other is None else other) if device == "gpu" else 0,
            setting="gpus_per_node" if other is None else "rollout_gpus_per_node",
            cpus=cpus_per_node,
            cpus_of="" if role == SHARED_GROUP or not separate_roles else f" ({role} nodes; cpus_per_node is asked of all nodes alike)",
        )
        _check_bundles(members, size)
        groups.append(_group(role, members, size, nodes, memory_gib_per_node))
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


@dataclass(frozen=True, kw_only=True)
class _Size:
    """What one node of a group may have; ``setting`` is the name of its GPUs, ``cpus_of`` says of which nodes a message speaks."""

    gpus: int
    setting: str
    cpus: int | None
    cpus_of: str


def _check_bundles(bundles: Sequence[Bundle], size: _Size) -> None:
    """Raise ConfigError when one of them is larger than a node."""
    for bundle in bundles:
        gpus, cpus = _amounts(bundle)
        if gpus > size.gpus:
            raise ConfigError(
                f"the {bundle.role} bundle needs {gpus:g} GPUs on one node, but {size.setting}={size.gpus}; "
                f"set engine.tensor_parallel={size.gpus} or less, or ask for larger nodes"
            )
        if size.cpus is not None and cpus > size.cpus + _ROUNDING:
            raise ConfigError(
                f"the {bundle.role} bundle needs {cpus:g} CPUs on one node, but cpus_per_node={size.cpus}{size.cpus_of}; lower "
                f"placement.trainer_cpus or placement.engine_cpus, or raise cpus_per_node to {math.ceil(cpus)} or more"
            )


def _group(role: str, bundles: Sequence[Bundle], size: _Size, nodes: int | None, memory_gib: int | None) -> NodeGroup:
    """The group of ``nodes`` (None: as few as can be). Raises ConfigError when they do not hold the bundles, or would leave GPUs idle."""
    per_node = math.inf if size.gpus or size.cpus is None else size.cpus  # GPUs are scarce; CPUs follow from them
    fewest = _nodes(bundles, size.gpus, per_node)
    if nodes is None:
        nodes = fewest
    elif nodes < fewest:
        homeless = next(bundle for bundle, node in _places(bundles, size.gpus, per_node) if node >= nodes)
        cpus = "" if per_node == math.inf else f" and {per_node} CPUs"
        raise ConfigError(
            f"nodes={nodes} with {size.gpus} GPUs{cpus} each do not hold the run: {_named(homeless)} finds no place beside the others; "
            f"set nodes={fewest}, or lower training.ranks or engine.count"
        )
    gpus = 0
    if size.gpus:  # Equal nodes: 12 ranks on nodes of 8 are two nodes of 6.
        largest = math.ceil(max(_amounts(bundle)[0] for bundle in bundles))
        gpus = next(one for one in range(largest, size.gpus + 1) if _nodes(bundles, one, math.inf) <= nodes)
    least = _least_cpus(bundles, nodes, gpus)
    if size.cpus is not None and _nodes(bundles, gpus, size.cpus) > nodes:
        raise ConfigError(
            f"{len(bundles)} bundles fill {nodes} node(s) of {gpus} GPUs, where they need {least} CPUs a node, but "
            f"cpus_per_node={size.cpus}{size.cpus_of}; lower placement.trainer_cpus or placement.engine_cpus, or raise cpus_per_node"
        )
    return NodeGroup(
        role=role, nodes=nodes, gpus=gpus, node_gpus=size.gpus, cpus=size.cpus or max(least, CPUS_OF_A_GPU * gpus), bundle_cpus=least,
        memory_gib=memory_gib, bundles=tuple(bundles),
    )  # fmt: skip


def _named(bundle: Bundle) -> str:
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.resources.items(), reverse=True) if amount)
    return f"{bundle.role} {bundle.index} ({amounts})"


def _least_cpus(bundles: Sequence[Bundle], nodes: int, gpus: int) -> int:
    """Whole CPUs of each of ``nodes`` that hold the bundles."""
    cpus = [_amounts(bundle)[1] for bundle in bundles]
    least = math.ceil(max(sum(cpus) / nodes, *cpus) - _ROUNDING)
    return next(size for size in itertools.count(max(1, least)) if _nodes(bundles, gpus, size) <= nodes)


def _nodes(bundles: Sequence[Bundle], gpus: int, cpus: float) -> int:
    """How many nodes of this size hold the bundles, none of which is larger."""
    return 1 + max(node for _, node in _places(bundles, gpus, cpus))


def _places(bundles: Sequence[Bundle], gpus: int, cpus: float) -> list[tuple[Bundle, int]]:
    """Each bundle with the number of its node: largest first, each on the first node with room."""
    free: list[tuple[float, float]] = []
    places = []
    for bundle in sorted(bundles, key=_amounts, reverse=True):
        need = _amounts(bundle)
        room = (
            index for index, node in enumerate(free) if all(have + _ROUNDING >= amount for have, amount in zip(node, need, strict=True))
        )
        place = next(room, None)
        if place is None:
            place = len(free)
            free.append((gpus, cpus))
        free[place] = (free[place][0] - need[0], free[place][1] - need[1])
        places.append((bundle, place))
    return places


def _amounts(bundle: Bundle) -> tuple[float, float]:
    """GPUs and CPUs."""
    return bundle.resources.get("GPU", 0.0), bundle.resources.get("CPU", 0.0)
