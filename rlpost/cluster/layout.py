"""Which node takes which bundle: decided before Ray is asked, and shown in the table of what was asked, is there and is missing. Pure.

Ray knows one strategy for all bundles of a placement group; here every role has its own:

- trainer ranks (and a critic's, and models of their own) are packed: as many on a node as fit, on as few nodes as can be;
- an engine is one bundle, so it is whole in a node; engines are packed too, or spread evenly (``placement.engine_strategy``);
- nodes that carry the Ray label ``rlpost-role`` are kept for it: ``trainer`` takes no engine, ``rollout`` takes nothing else.

A node is a dictionary as ``ray.nodes()`` has it; ``Resources`` are what may be used of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.config.derive import COLOCATED, ENGINE, ROLE_LABEL, Bundle

Node = Mapping[str, Any]

SPREAD = "spread"

SEARCH_BUNDLES = 500
"""The search is as deep as there are bundles, and Python's stack is not endless."""
SEARCH_STEPS = 10_000
"""Bundles laid down in the search for a layout, after which it is left to Ray; role by role nearly always fits."""
ROUNDING = 1e-6
"""Resources are fractions of CPUs and GPUs; Ray counts them in steps of 1e-4."""


@dataclass(frozen=True)
class Layout:
    """``places[i]`` is the living node (its index among them) that takes bundle i; None where no node has room beside the others."""

    places: tuple[int | None, ...]
    decided: bool = True
    """False: whether all bundles have a place is not known, the search for it was ended."""

    @property
    def complete(self) -> bool:
        """Whether every bundle has a place."""
        return None not in self.places


def refused_label(role: str) -> str | None:
    """The value of ROLE_LABEL of nodes that do not take bundles of ``role``."""
    if role == COLOCATED:
        return None
    return "trainer" if role == ENGINE else "rollout"


def living(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that Ray does not call dead."""
    return [node for node in nodes if node.get("Alive", True)]


def lay_out(bundles: Sequence[Bundle], nodes: Sequence[Node], engine_strategy: str = "pack") -> Layout:
    """Each bundle's node. Role by role as the module says; where that leaves bundles over, any layout that a search finds.

    Exact, but for more than SEARCH_BUNDLES bundles or SEARCH_STEPS steps. Without a layout, ``places`` has those that found room.
    """
    asked = {name for bundle in bundles for name, amount in bundle.resources.items() if amount}
    names = sorted(asked, key=lambda name: (name != "GPU", name))
    rooms = [_Room(node.get("Labels", {}).get(ROLE_LABEL), [node["Resources"].get(name, 0.0) for name in names]) for node in living(nodes)]
    needs = [_Need(bundle.role, tuple(bundle.resources.get(name, 0.0) for name in names)) for bundle in bundles]
    places = _by_role(needs, [room.copy() for room in rooms], engine_strategy)
    if None not in places:
        return Layout(tuple(places))
    found, decided = _search(needs, rooms)
    return Layout(tuple(places if found is None else found), decided)


def fits(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> bool:
    """Whether the bundles can be laid on the nodes at all; True when that is too hard to tell."""
    layout = lay_out(bundles, nodes)
    return layout.complete or not layout.decided


@dataclass(frozen=True)
class _Need:
    role: str
    amounts: tuple[float, ...]


@dataclass
class _Room:
    label: str | None
    amounts: list[float]

    def copy(self) -> _Room:
        return _Room(self.label, list(self.amounts))

    def count(self, need: _Need) -> int:
        """How many such bundles find room."""
        if self.label is not None and self.label == refused_label(need.role):
            return 0
        rates = [int((have + ROUNDING) / amount) for have, amount in zip(self.amounts, need.amounts, strict=True) if amount]
        return min(rates, default=SEARCH_BUNDLES)

    def take(self, need: _Need, count: int = 1) -> None:
        self.amounts = [have - count * amount for have, amount in zip(self.amounts, need.amounts, strict=True)]


def _by_role(needs: Sequence[_Need], rooms: Sequence[_Room], engine_strategy: str) -> list[int | None]:
    """Ranks first, so that they stand together; equal bundles at once, in their order. Takes from ``rooms``."""
    places: list[int | None] = [None] * len(needs)
    for need in sorted(dict.fromkeys(needs), key=lambda need: need.role == ENGINE):
        spread = need.role == ENGINE and engine_strategy == SPREAD
        left = [index for index, other in enumerate(needs) if other == need]
        held = [0] * len(rooms)
        while left:
            counts = [room.count(need) for room in rooms]
            possible = [place for place, count in enumerate(counts) if count]
            if not possible:
                break
            # Nodes that are labelled for the role before those that others may need.
            labelled = [room.label not in (None, "shared") for room in rooms]
            if spread:
                best = min(possible, key=lambda place: (not labelled[place], held[place], -counts[place]))
            else:
                best = min(possible, key=lambda place: (not labelled[place], -min(counts[place], len(left)), counts[place]))
            number = 1 if spread else min(counts[best], len(left))
            rooms[best].take(need, number)
            held[best] += number
            for index in left[:number]:
                places[index] = best
            left = left[number:]
    return places


def _search(needs: Sequence[_Need], rooms: Sequence[_Room]) -> tuple[list[int | None] | None, bool]:
    """Any layout of all bundles, None without one, and whether that is certain."""
    columns = range(len(needs[0].amounts))
    if any(sum(need.amounts[i] for need in needs) > sum(room.amounts[i] for room in rooms) + ROUNDING for i in columns):
        return None, True
    if any(not any(room.count(need) for room in rooms) for need in dict.fromkeys(needs)):
        return None, True
    if len(needs) > SEARCH_BUNDLES:
        return None, False
    order = sorted(range(len(needs)), key=lambda index: needs[index].amounts, reverse=True)
    places: list[int | None] = [None] * len(needs)
    steps = iter(range(SEARCH_STEPS))
    ended = False

    def lay(depth: int) -> bool:
        """Largest first, each on the fullest node that still holds it, then on others; nodes that look alike are tried once."""
        nonlocal ended
        if depth == len(needs):
            return True
        index = order[depth]
        tried: set[tuple[str | None, tuple[float, ...]]] = set()
        for place in sorted(range(len(rooms)), key=lambda place: rooms[place].amounts):
            room = rooms[place]
            look = (room.label, tuple(round(amount, 6) for amount in room.amounts))
            if look in tried or not room.count(needs[index]):
                continue
            tried.add(look)
            ended = ended or next(steps, None) is None
            if ended:
                return False
            before = list(room.amounts)
            room.take(needs[index])
            places[index] = place
            if lay(depth + 1):
                return True
            room.amounts = before
        return False

    return (places if lay(0) else None), not ended


# ---- in words --------------------------------------------------------------------------------------------------------


def table(
    bundles: Sequence[Bundle],
    nodes: Sequence[Node],
    *,
    free: Mapping[str, Mapping[str, float]] | None = None,
    engine_strategy: str = "pack",
) -> str:
    """What is asked by role, what each node has (and has ``free``, by its id) and which bundles it takes, and which find no place.

    The places are those on what is free now; without ``free`` those on all that the nodes have.
    """
    usable = nodes if free is None else [{**node, "Resources": free.get(node["NodeID"], {})} for node in nodes]
    layout = lay_out(bundles, usable, engine_strategy)
    lines = ["asked:"]
    for role in dict.fromkeys(bundle.role for bundle in bundles):
        same = [bundle for bundle in bundles if bundle.role == role]
        lines.append(f"  {len(same)} x {role:<10} {amounts(same[0].resources)} each")
    lines.append("present:")
    names = node_names(nodes)
    with_gpus = any(bundle.resources.get("GPU") for bundle in bundles) or any(node["Resources"].get("GPU") for node in living(nodes))
    shown = ("CPU", "GPU") if with_gpus else ("CPU",)
    for place, node in enumerate(living(nodes)):
        have = [_of_node(node, name, free) for name in shown]
        takes = named([bundle for bundle, where in zip(bundles, layout.places, strict=True) if where == place])
        label = node.get("Labels", {}).get(ROLE_LABEL)
        lines.append(f"  {names[place]}{f' ({ROLE_LABEL}={label})' if label else ''}: {', '.join(have)}; takes {takes or 'nothing'}")
    missing = [bundle for bundle, place in zip(bundles, layout.places, strict=True) if place is None]
    if missing:
        lines.append(f"missing: no node has room for {named(missing)}")
    if dead := len(nodes) - len(living(nodes)):
        lines.append(f"dead: {dead} node(s) that were in the cluster")
    return "\n".join(lines)


def node_names(nodes: Sequence[Node]) -> list[str]:
    """A name a person knows for each living node: its host name, with the id's start where two are alike."""
    plain = [(node.get("NodeManagerHostname", "node"), node.get("NodeID", "")[:6]) for node in living(nodes)]
    hosts = [host for host, _ in plain]
    return [f"{host}#{key}" if hosts.count(host) > 1 else host for host, key in plain]


def named(bundles: Sequence[Bundle]) -> str:
    """Bundles by role, rows of numbers drawn together: ``trainer 0-3, engine 0, engine 2``."""
    rows: list[list[Any]] = []
    for bundle in bundles:
        if rows and (rows[-1][0], rows[-1][2] + 1) == (bundle.role, bundle.index):
            rows[-1][2] = bundle.index
        else:
            rows.append([bundle.role, bundle.index, bundle.index])
    return ", ".join(f"{role} {first}" if first == last else f"{role} {first}-{last}" for role, first, last in rows)


def amounts(resources: Mapping[str, float]) -> str:
    """``CPU 0.5, GPU 1``, without what is 0."""
    return ", ".join(f"{name} {amount:g}" for name, amount in resources.items() if amount)


def _of_node(node: Node, name: str, free: Mapping[str, Mapping[str, float]] | None) -> str:
    has = node["Resources"].get(name, 0)
    return f"{name} {has:g}" if free is None else f"{name} {free.get(node['NodeID'], {}).get(name, 0):g} of {has:g} free"
