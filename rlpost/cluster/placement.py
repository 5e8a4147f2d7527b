"""Resources for all parts of a run, granted together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpost.cluster.references import result_of
from rlpost.config.derive import Bundle
from rlpost.types import ConfigError, InfrastructureError

SEARCH_BUNDLES = 500
"""The search is as deep as there are bundles, and Python's stack is not endless."""
SEARCH_STEPS = 10_000
"""Bundles laid down in the search for a placement, after which it is left to Ray; the first try nearly always fits."""
ROUNDING = 1e-6
"""Resources are fractions of CPUs and GPUs; Ray counts them in steps of 1e-4."""


def table(bundles: Sequence[Bundle], nodes: Sequence[dict[str, Any]]) -> str:
    """What is asked, by role, beside what each node has."""
    lines = ["asked:"]
    for role in dict.fromkeys(bundle.role for bundle in bundles):
        same = [bundle for bundle in bundles if bundle.role == role]
        each = ", ".join(f"{name} {amount:g}" for name, amount in same[0].resources.items() if amount)
        lines.append(f"  {len(same)} x {role:<10} {each} each")
    lines.append("present:")
    for node in nodes:
        if node.get("Alive", True):
            have = ", ".join(f"{name} {node['Resources'].get(name, 0):g}" for name in ("CPU", "GPU"))
            lines.append(f"  {node.get('NodeManagerHostname', 'node')}: {have}")
    return "\n".join(lines)


def fits(bundles: Sequence[Bundle], nodes: Sequence[dict[str, Any]]) -> bool:
    """Whether the bundles can be laid on the nodes at all.

    Exact, but for more than SEARCH_BUNDLES bundles or SEARCH_STEPS steps: then True, and Ray decides.
    """
    asked = {name for bundle in bundles for name, amount in bundle.resources.items() if amount}
    names = sorted(asked, key=lambda name: (name != "GPU", name))
    needs = sorted(([bundle.resources.get(name, 0.0) for name in names] for bundle in bundles), reverse=True)
    free = [[node["Resources"].get(name, 0.0) for name in names] for node in nodes if node.get("Alive", True)]
    if any(sum(need[i] for need in needs) > sum(node[i] for node in free) + ROUNDING for i in range(len(names))):
        return False
    if any(not any(_holds(node, need) for node in free) for need in needs):
        return False
    if len(needs) > SEARCH_BUNDLES:
        return True
    steps = iter(range(SEARCH_STEPS))

    def lay(index: int) -> bool:
        """Largest first, each on the fullest node that still holds it, then on others; nodes that look alike are tried once."""
        if index == len(needs) or next(steps, None) is None:
            return True
        tried: set[tuple[float, ...]] = set()
        for node in sorted(free):
            look = tuple(round(amount, 6) for amount in node)
            if look in tried or not _holds(node, needs[index]):
                continue
            tried.add(look)
            before = list(node)
            node[:] = [have - need for have, need in zip(node, needs[index], strict=True)]
            if lay(index + 1):
                return True
            node[:] = before
        return False

    return lay(0)


def _holds(node: Sequence[float], need: Sequence[float]) -> bool:
    return all(have + ROUNDING >= amount for have, amount in zip(node, need, strict=True))


class Gang:
    """A granted placement group; ``options(i)`` places an actor into bundle i."""

    def __init__(self, group: PlacementGroup) -> None:
        self.group = group

    @classmethod
    async def reserve(cls, bundles: Sequence[Bundle], timeout_s: float) -> Gang:
        """Ask for all bundles at once. Raises ConfigError at once when the cluster cannot ever hold them, and
        InfrastructureError when it does not grant them within ``timeout_s`` (others use the resources)."""
        nodes = ray.nodes()
        if not fits(bundles, nodes):
            raise ConfigError(
                "the cluster is too small for this run\n"
                + table(bundles, nodes)
                + "\nlower training.ranks, engine.count, placement.trainer_cpus or placement.engine_cpus, or use a larger cluster"
            )
        group = placement_group([{k: v for k, v in bundle.resources.items() if v} for bundle in bundles], strategy="PACK")
        try:
            await asyncio.wait_for(result_of(group.ready()), timeout_s)
        except TimeoutError:
            remove_placement_group(group)
            available = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise InfrastructureError(
                f"the cluster did not grant the placement within {timeout_s:.0f} s (placement.timeout_s); free now: {available}\n"
                + table(bundles, nodes)
            ) from None
        return cls(group)

    def options(self, bundle: int, **resources: float) -> dict[str, Any]:
        """Ray options of an actor in this bundle."""
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=bundle)
        return {"scheduling_strategy": strategy, **resources}

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self.group)
