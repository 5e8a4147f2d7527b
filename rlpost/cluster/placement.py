"""Resources for all parts of a run, granted together or not at all.

The layout of ``layout.py`` is what Ray is asked for: one placement group whose bundles name their nodes by label selectors. Nothing is
held while a run waits for it. Bound to a node are ranks, models, and engines beside them, which a lost node would end anyway. Engines
on nodes of their own are only kept off the others: when such a node is lost, Ray moves its bundles to another, or to the one that
replaces it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node, jobs  # ray.available_resources() does not tell by node
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlpost.cluster.holders import holders
from rlpost.cluster.layout import SPREAD, Layout, Node, fits, lay_out, living, named, node_names, refused_label, table
from rlpost.config.derive import ENGINE, ROLE_LABEL, Bundle
from rlpost.types import ConfigError, InfrastructureError

NODE_LABEL = "ray.io/node-id"
"""Label that Ray gives every node."""

POLL_S = 0.2
"""Ray knows within a second what is free of each node, and grants what is free in tenths of one."""
GRANT_S = 10.0
"""What Ray has not granted by then, though it was free, another was quicker to get."""
SAY_AFTER_S = 5.0
"""A wait that is longer is told of."""


class Gang:
    """A granted placement group; ``options(i)`` places an actor into bundle i."""

    def __init__(self, group: PlacementGroup, order: Sequence[int]) -> None:
        self.group = group
        self._order = order
        """Ray's bundle for each of ours."""

    @classmethod
    async def reserve(
        cls,
        bundles: Sequence[Bundle],
        timeout_s: float,
        *,
        engine_strategy: str = "pack",
        wait_for_nodes: bool = False,
        say: Callable[[str], None] = lambda line: None,
    ) -> Gang:
        """Ask for all bundles at once. ``say`` is told when that takes a while.

        Raises ConfigError at once when the cluster cannot ever hold them, and InfrastructureError when it does not grant them within
        ``timeout_s``. With ``wait_for_nodes``, and when a node was lost, nodes may still come, so that only the deadline decides.
        """
        nodes = ray.nodes()
        if not (wait_for_nodes or fits(bundles, nodes) or len(living(nodes)) < len(nodes)):
            raise ConfigError(
                f"the cluster is too small for this run\n{table(bundles, nodes, engine_strategy=engine_strategy)}\n"
                "lower training.ranks, engine.count, placement.trainer_cpus or placement.engine_cpus, or use a larger cluster; where nodes "
                "come when they are needed (an autoscaler), set placement.wait_for_nodes=true"
            )
        group = await _Request(bundles, timeout_s, engine_strategy=engine_strategy, wait_for_nodes=wait_for_nodes, say=say).granted()
        return cls(group, _order(bundles, placement_group_table(group)["bundles_to_node_id"], ray.nodes()))

    def options(self, bundle: int, **resources: float) -> dict[str, Any]:
        """Ray options of an actor in this bundle."""
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=self._order[bundle])
        return {"scheduling_strategy": strategy, **resources}

    def release(self) -> None:
        """Give the resources back."""
        remove_placement_group(self.group)


class _Request:
    """Bundles that are asked for until they are granted or the time is over."""

    def __init__(
        self, bundles: Sequence[Bundle], timeout_s: float, *, engine_strategy: str, wait_for_nodes: bool, say: Callable[[str], None]
    ) -> None:
        self.bundles, self.timeout_s, self.engine_strategy = bundles, timeout_s, engine_strategy
        self.wait_for_nodes, self.say = wait_for_nodes, say
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.said = False

    async def granted(self) -> PlacementGroup:
        """The granted group. Asked for again when what is free has changed; raises InfrastructureError at the deadline.

        Bundles that have no room now are asked for only where nodes may still come: an autoscaler looks at what waits in Ray. Elsewhere
        they are not, because what Ray grants later would be laid out its own way.
        """
        while True:
            ids, layout = self._layout()
            if layout.complete:
                strategy = "SPREAD" if self.engine_strategy == SPREAD else "PACK"
                group = await self._ask(selectors(self.bundles, layout, ids), strategy, time.monotonic() + GRANT_S)
            elif self.wait_for_nodes or not layout.decided:
                group = await self._ask([_of_role(bundle.role) for bundle in self.bundles], "PACK", self.deadline)
            else:
                group = None
                await self._pause()
            if group is not None:
                return group
            if time.monotonic() >= self.deadline:
                raise InfrastructureError(self._refusal())

    def _layout(self) -> tuple[list[str], Layout]:
        """Ids of the living nodes, and the layout on what is free of them."""
        nodes, free = living(ray.nodes()), available_resources_per_node()
        usable = [{**node, "Resources": free.get(node["NodeID"], {})} for node in nodes]
        return [node["NodeID"] for node in nodes], lay_out(self.bundles, usable, self.engine_strategy)

    async def _ask(self, labels: list[dict[str, str]], strategy: str, until: float) -> PlacementGroup | None:
        """The group if Ray grants it in time; else it is removed."""
        resources = [{name: amount for name, amount in bundle.resources.items() if amount} for bundle in self.bundles]
        group = placement_group(resources, strategy=strategy, bundle_label_selector=labels)
        created = False
        try:
            while not (created := placement_group_table(group).get("state") == "CREATED") and time.monotonic() < min(until, self.deadline):
                await self._pause()
        finally:
            if not created:
                remove_placement_group(group)
        return group if created else None

    async def _pause(self) -> None:
        now = time.monotonic()
        if not self.said and now - self.started >= SAY_AFTER_S:
            self.said = True
            _, layout = self._layout()
            missing = named([bundle for bundle, place in zip(self.bundles, layout.places, strict=True) if place is None])
            end = time.strftime("%H:%M:%S", time.localtime(time.time() + self.deadline - now))
            self.say(
                f"waiting for room in the cluster until {end} (placement.timeout_s={self.timeout_s:g})"
                + (f"; no node has any now for {missing}" if missing else "")
            )
        await asyncio.sleep(min(POLL_S, max(0.01, self.deadline - now)))

    def _refusal(self) -> str:
        nodes, free = ray.nodes(), available_resources_per_node()
        lines = [
            f"the cluster did not grant the placement within {self.timeout_s:.0f} s (placement.timeout_s)",
            table(self.bundles, nodes, free=free, engine_strategy=self.engine_strategy),
            holders(placement_group_table(), jobs(), nodes, free),
        ]
        return "\n".join(line for line in lines if line)


def selectors(bundles: Sequence[Bundle], layout: Layout, ids: Sequence[str]) -> list[dict[str, str]]:
    """Label selectors that make Ray place each bundle as ``layout`` has it; ``ids`` are the nodes'.

    Engines on nodes without ranks are equal and only kept off nodes with ranks: Ray packs or spreads them, and may move them later.
    """
    places = [ids[place] for place in layout.places if place is not None]
    occupied = {place: None for bundle, place in zip(bundles, places, strict=True) if bundle.role != ENGINE}
    elsewhere = {NODE_LABEL: f"!in({','.join(occupied)})"} if occupied else {}
    return [
        {NODE_LABEL: place} if place in occupied else {**elsewhere, **_of_role(bundle.role)}
        for bundle, place in zip(bundles, places, strict=True)
    ]


def _of_role(role: str) -> dict[str, str]:
    """The label selector that keeps a bundle off nodes of another role."""
    refused = refused_label(role)
    return {} if refused is None else {ROLE_LABEL: f"!{refused}"}


def _order(bundles: Sequence[Bundle], granted: Mapping[int, str], nodes: Sequence[Node]) -> list[int]:
    """Ray's bundle for each of ours: those of a role are equal, and are numbered node by node, so that neighbours share one."""
    rank = {node["NodeID"]: (name, node["NodeID"]) for node, name in zip(living(nodes), node_names(nodes), strict=True)}
    by_role: dict[str, list[int]] = {}
    for index in sorted(range(len(bundles)), key=lambda index: (*rank.get(granted[index], ("", "")), index)):
        by_role.setdefault(bundles[index].role, []).append(index)
    following = {role: iter(indices) for role, indices in by_role.items()}
    return [next(following[bundle.role]) for bundle in bundles]
