"""Resources for all parts of a run, granted together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpost.config.derive import Bundle
from rlpost.types import ConfigError, InfrastructureError


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
    """Whether the bundles can be laid on the nodes at all: largest first, each on the fullest node that still holds it."""
    free = [dict(node["Resources"]) for node in nodes if node.get("Alive", True)]
    for bundle in sorted(bundles, key=lambda b: (-b.resources.get("GPU", 0), -b.resources.get("CPU", 0))):
        needed = {name: amount for name, amount in bundle.resources.items() if amount}
        holding = [node for node in free if all(node.get(name, 0) + 1e-6 >= amount for name, amount in needed.items())]
        if not holding:
            return False
        chosen = min(holding, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
        for name, amount in needed.items():
            chosen[name] -= amount
    return True


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
            await asyncio.wait_for(_resolve(group.ready()), timeout_s)
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


async def _resolve(ref: Any) -> Any:
    return await ref
