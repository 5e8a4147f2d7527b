"""Which node takes which bundle, and what is said when one finds none. Decided before Ray is asked; tests/cluster/test_gang.py asks it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlpost.cluster import layout, placement
from rlpost.cluster.holders import holders
from rlpost.cluster.layout import ROLE_LABEL, lay_out, living
from rlpost.cluster.placement import NODE_LABEL, fits, selectors, table
from rlpost.config.derive import Bundle
from rlpost.types import ConfigError, InfrastructureError


def node(name: str = "n", *, alive: bool = True, role: str | None = None, **resources: float) -> dict[str, Any]:
    labels = {NODE_LABEL: name, **({ROLE_LABEL: role} if role else {})}
    resources = {"memory": 1e9, f"node:{name}": 1.0, **resources} if alive else {}
    return {"NodeID": name, "Alive": alive, "NodeManagerHostname": name, "Labels": labels, "Resources": resources}


def bundles(role: str, count: int, **resources: float) -> list[Bundle]:
    return [Bundle(role, index, resources) for index in range(count)]


@pytest.mark.parametrize(
    ("asked", "present", "possible"),
    [
        (bundles("engine", 4, GPU=1, CPU=1), [node(GPU=4, CPU=8)], True),
        (bundles("engine", 5, GPU=1, CPU=1), [node(GPU=4, CPU=8)], False),
        (bundles("engine", 4, GPU=1, CPU=3), [node(GPU=4, CPU=8)], False),
        (bundles("engine", 2, GPU=4), [node(GPU=4), node(GPU=4)], True),
        (bundles("engine", 1, GPU=8), [node(GPU=4), node(GPU=4)], False),  # a bundle is never split
        (bundles("engine", 3, GPU=3), [node(GPU=5), node(GPU=5)], False),  # 9 of 10, but no place for the third
        (bundles("engine", 2, GPU=4), [node(GPU=4), node(GPU=4, alive=False)], False),
        (bundles("trainer", 3, CPU=0.5, GPU=0) + bundles("engine", 1, CPU=0.5, GPU=0), [node(CPU=2)], True),
        (bundles("engine", 3, CPU=0.1), [node(CPU=0.3)], True),  # tenths do not add up exactly
        (bundles("driver", 1, CPU=1) + bundles("engine", 1, GPU=4, CPU=4), [node(GPU=4, CPU=4), node(CPU=1)], True),
        (bundles("special", 1, tpu=1), [node(CPU=64)], False),
        ([], [node(CPU=1)], True),
        (bundles("engine", 1, CPU=1), [], False),
    ],
)
def test_what_fits(asked: list[Bundle], present: list[dict[str, Any]], possible: bool) -> None:
    assert fits(asked, present) is possible


def test_a_placement_that_only_another_order_finds_is_not_refused() -> None:
    """3, 3, 2, 2 on nodes of 6 and 4: the first 3 on the smaller node, as best fit has it, leaves no place for the last 2."""
    asked = bundles("trainer", 2, CPU=3) + bundles("engine", 2, CPU=2)
    assert fits(asked, [node(CPU=6), node(CPU=4)])
    assert not fits([*asked, Bundle("extra", 0, {"CPU": 1})], [node(CPU=6), node(CPU=4)])


def test_a_large_cluster_is_answered_and_not_searched_for_ever() -> None:
    nodes = [node(f"n{i}", GPU=8, CPU=96) for i in range(100)]
    assert fits(bundles("trainer", 700, GPU=1, CPU=4) + bundles("engine", 25, GPU=4, CPU=8), nodes)
    assert not fits(bundles("trainer", 801, GPU=1), nodes)
    assert fits(bundles("trainer", 5000, CPU=1), nodes)
    assert not fits(bundles("trainer", 5000, CPU=1) + bundles("engine", 1, GPU=16), nodes)
    fits(bundles("a", 150, GPU=5) + bundles("b", 10, GPU=2), nodes)  # too hard to decide: any answer, but soon


# ---- where each stands -----------------------------------------------------------------------------------------------


def places(asked: list[Bundle], present: list[dict[str, Any]], strategy: str = "pack") -> str:
    """The nodes of the bundles, in their order; ``-`` where none has room."""
    alive = living(present)
    return " ".join("-" if place is None else alive[place]["NodeID"] for place in lay_out(asked, present, strategy).places)


def gpu_nodes(*gpus: int, roles: str = "") -> list[dict[str, Any]]:
    """Nodes a, b, c ... of so many GPUs; ``roles`` has a letter for each: t(rainer), r(ollout), s(hared), ``.`` none."""
    letters = {"t": "trainer", "r": "rollout", "s": "shared", ".": None}
    named = zip("abcdefgh", gpus, roles or "." * len(gpus), strict=False)
    return [node(name, GPU=count, CPU=64, role=letters[role]) for name, count, role in named]


@pytest.mark.parametrize(
    ("asked", "present", "strategy", "expected"),
    [
        # Ranks: whole on one node where one holds them, however many are emptier or fuller.
        (bundles("trainer", 4, GPU=1), gpu_nodes(3, 8, 4), "pack", "c c c c"),
        (bundles("trainer", 6, GPU=1), gpu_nodes(3, 5, 3), "pack", "b b b b b a"),
        # As many a node as fit, although engines are larger: Ray alone would begin with these.
        (bundles("engine", 1, GPU=4, CPU=9) + bundles("trainer", 8, GPU=1, CPU=1), gpu_nodes(8, 8), "pack", "b" + " a" * 8),
        (bundles("trainer", 4, GPU=1) + bundles("engine", 2, GPU=4), gpu_nodes(8, 8), "pack", "a a a a b b"),
        # An engine is whole; what ranks leave beside them is used.
        (bundles("trainer", 6, GPU=1) + bundles("engine", 2, GPU=2), gpu_nodes(8, 4), "pack", "a a a a a a b b"),
        (bundles("trainer", 2, GPU=1) + bundles("engine", 3, GPU=1), gpu_nodes(8, 8, 8), "pack", "a a a a a"),
        (bundles("trainer", 2, GPU=1) + bundles("engine", 3, GPU=1), gpu_nodes(4, 8, 8), "spread", "a a b c a"),
        (bundles("trainer", 2, GPU=1) + bundles("engine", 4, GPU=1), gpu_nodes(2, 8, 8), "spread", "a a b c b c"),
        # A critic's ranks stand together too.
        (bundles("trainer", 4, GPU=1) + bundles("critic", 4, GPU=1), gpu_nodes(6, 6), "pack", "a a a a b b b b"),
        # Labelled nodes are for their role, and are taken before those that are for both.
        (bundles("trainer", 2, GPU=1) + bundles("engine", 2, GPU=1), gpu_nodes(4, 8, 8, roles="srt"), "pack", "c c b b"),
        (bundles("trainer", 2, GPU=1) + bundles("engine", 2, GPU=1), gpu_nodes(2, 1, 1, roles=".rt"), "pack", "c a b a"),
        (bundles("trainer", 2, GPU=1) + bundles("engine", 1, GPU=1), gpu_nodes(8, 8, roles="rr"), "pack", "- - a"),
        (bundles("reference", 1, GPU=1) + bundles("engine", 1, GPU=1), gpu_nodes(8, roles="t"), "pack", "a -"),
        (bundles("colocated", 2, GPU=1), gpu_nodes(1, 1, roles="rt"), "pack", "a b"),
        # What finds no place beside the others is said, and only that.
        (bundles("trainer", 3, GPU=1) + bundles("engine", 2, GPU=4), gpu_nodes(4, 4), "pack", "a a a b -"),
        (bundles("trainer", 2, GPU=1), [node("dead", alive=False), *gpu_nodes(2)], "pack", "a a"),
    ],
)
def test_where_bundles_stand(asked: list[Bundle], present: list[dict[str, Any]], strategy: str, expected: str) -> None:
    assert places(asked, present, strategy) == expected


def test_a_layout_that_only_the_search_finds_is_one() -> None:
    """Both ranks on one node, as they should be, leave no place for an engine."""
    asked, present = bundles("trainer", 2, CPU=2) + bundles("engine", 2, CPU=3), [node("a", CPU=5), node("b", CPU=5)]
    found = lay_out(asked, present)
    assert found.complete
    for place in range(2):
        assert sum(bundle.resources["CPU"] for bundle, where in zip(asked, found.places, strict=True) if where == place) <= 5


def test_a_search_that_becomes_too_long_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, present = bundles("trainer", 2, CPU=2) + bundles("engine", 2, CPU=3), [node("a", CPU=5), node("b", CPU=5)]
    monkeypatch.setattr(layout, "SEARCH_STEPS", 2)
    found = lay_out(asked, present)
    assert not found.complete and not found.decided and fits(asked, present), "Ray decides"
    assert not fits([*asked, *bundles("more", 1, CPU=1)], present), "what is certain is told"


def test_ray_is_bound_where_ranks_stand_and_may_move_engines_elsewhere() -> None:
    """An engine that were bound to its node could not be started again when that is replaced."""
    asked = bundles("trainer", 2, GPU=1) + bundles("engine", 3, GPU=2)
    assert selectors(asked, lay_out(asked, gpu_nodes(4, 4)), ["id-a", "id-b"]) == [
        {NODE_LABEL: "id-a"},
        {NODE_LABEL: "id-a"},
        {NODE_LABEL: "!in(id-a)", ROLE_LABEL: "!trainer"},
        {NODE_LABEL: "!in(id-a)", ROLE_LABEL: "!trainer"},
        {NODE_LABEL: "id-a"},
    ]
    alone = bundles("engine", 1, GPU=1)
    assert selectors(alone, lay_out(alone, gpu_nodes(1)), ["id-a"]) == [{ROLE_LABEL: "!trainer"}]


def test_ranks_are_numbered_by_node_however_ray_has_laid_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Ray decides, it lays equal bundles down in an order of its own."""
    where = dict(enumerate(["b", "a", "b", "c", "a", "a"]))
    monkeypatch.setattr(placement.ray, "nodes", lambda: gpu_nodes(2, 2, 2))
    monkeypatch.setattr(placement, "available_resources_per_node", dict)
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: "group")
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": "CREATED", "bundles_to_node_id": where})
    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", lambda **words: words["placement_group_bundle_index"])
    asked = [*bundles("trainer", 4, GPU=1), *bundles("engine", 2, GPU=1)]
    gang = asyncio.run(placement.Gang.reserve(asked, 1, wait_for_nodes=True))
    given = [gang.options(index)["scheduling_strategy"] for index in range(6)]
    assert [where[index] for index in given] == ["a", "b", "b", "c", "a", "a"]
    assert sorted(given[:4]) == [0, 1, 2, 3], "each has one of its role"


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_the_table_shows_by_node_what_it_has_and_takes_and_what_finds_no_place() -> None:
    asked = bundles("trainer", 3, GPU=1, CPU=0.5) + bundles("engine", 2, GPU=4, CPU=0)
    nodes = [node("big", GPU=4, CPU=8, role="rollout"), node("dead", alive=False), node("small", CPU=2, GPU=2)]
    assert table(asked, nodes).splitlines() == [
        "asked:",
        "  3 x trainer    GPU 1, CPU 0.5 each",
        "  2 x engine     GPU 4 each",
        "present:",
        "  big (rlpost-role=rollout): CPU 8, GPU 4; takes engine 0",
        "  small: CPU 2, GPU 2; takes trainer 0-1",
        "missing: no node has room for trainer 2, engine 1",
        "dead: 1 node(s) that were in the cluster",
    ]


def test_the_table_of_what_is_free_lays_bundles_on_that() -> None:
    nodes = [node("a", CPU=2), node("b", CPU=2)]
    text = table(bundles("trainer", 2, CPU=1), nodes, free={"a": {"CPU": 1.0}, "b": {}})
    assert text.splitlines()[-3:] == [
        "  a: CPU 1 of 2 free; takes trainer 0",
        "  b: CPU 0 of 2 free; takes nothing",
        "missing: no node has room for trainer 1",
    ]


def test_nodes_of_one_host_are_told_apart() -> None:
    nodes = [{**node(name, CPU=1), "NodeID": name, "NodeManagerHostname": "host"} for name in ("abcdefgh", "12345678")]
    assert "  host#abcdef: CPU 1" in table(bundles("trainer", 1, CPU=1), nodes) and "  host#123456: CPU 1" in table([], nodes)


def test_who_holds_what_is_told_by_node_job_and_command() -> None:
    def group(state: str, *where: str) -> dict[str, Any]:
        return {
            "state": state,
            "bundles": {index: {"CPU": 1.5, "GPU": 1.0} for index in range(len(where))},
            "bundles_to_node_id": dict(enumerate(where)),
        }

    groups = {
        "aa01000000": group("CREATED", "a", "a", "b"),
        "bb02000000": group("RESCHEDULING", "", "b"),
        "cc02000000": group("REMOVED", "a"),
        "dd03000000": group("PENDING", "", ""),
    }
    start = {"DriverPid": 7, "DriverIPAddress": "10.0.0.1"}
    jobs = [{"JobID": f"0{job}000000", "Entrypoint": f"/long/way/train.py name=run{job}", **start} for job in range(1, 5)]
    nodes = [node("a", CPU=4, GPU=2), node("b", CPU=4, GPU=2), node("c", CPU=4)]
    free = {"a": {"CPU": 0.5}, "b": {"CPU": 1.0}, "c": {"CPU": 4.0}}
    assert holders(groups, jobs, nodes, free).splitlines() == [
        "held:",
        "  a: CPU 3, GPU 2 by job 01000000; CPU 0.5 by actors and tasks outside placement groups",
        "  b: CPU 1.5, GPU 1 by job 01000000; CPU 1.5, GPU 1 by job 02000000",
        "waiting too:",
        "  job 03000000: 2 bundles",
        "jobs:",
        "  job 01000000: train.py name=run1 (process 7 on 10.0.0.1)",
        "  job 02000000: train.py name=run2 (process 7 on 10.0.0.1)",
        "  job 03000000: train.py name=run3 (process 7 on 10.0.0.1)",
    ]
    assert holders({}, jobs, nodes[2:], free) == ""


def test_asking_for_more_than_there_is_is_refused_with_the_table_before_ray_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for ever for what it cannot get is the alternative."""
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node("only", CPU=2)])
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: pytest.fail("Ray was asked"))
    with pytest.raises(ConfigError, match=r"too small[\s\S]*3 x engine[\s\S]*only: CPU 2[\s\S]*engine\.count"):
        asyncio.run(placement.Gang.reserve(bundles("engine", 3, CPU=1), 1))


@pytest.mark.parametrize(("wait_for_nodes", "nodes"), [(True, []), (False, [node("lost", alive=False)])])
def test_where_nodes_may_still_come_only_the_deadline_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, wait_for_nodes: bool, nodes: list[dict[str, Any]]
) -> None:
    """A node that died may be replaced: a run that starts again from its checkpoint must not take the rest for all there will be."""
    removed: list[object] = []
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node("only", CPU=2), *nodes])
    monkeypatch.setattr(placement, "available_resources_per_node", lambda: {"only": {"CPU": 2.0}})
    monkeypatch.setattr(placement, "jobs", list)
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: "group")
    monkeypatch.setattr(placement, "placement_group_table", lambda group=None: {} if group is None else {"state": "PENDING"})
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    with pytest.raises(InfrastructureError, match=r"within 0 s[\s\S]*missing: no node has room for engine 2"):
        asyncio.run(placement.Gang.reserve(bundles("engine", 3, CPU=1), 0.05, wait_for_nodes=wait_for_nodes))
    assert removed == (["group"] if wait_for_nodes else []), "an autoscaler sees what waits in Ray, and nothing waits on"
