"""Can the bundles be laid on the nodes? Asked before Ray is, so that an impossible placement is a table in a second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlpost.cluster import placement
from rlpost.cluster.placement import fits, table
from rlpost.config.derive import Bundle
from rlpost.types import ConfigError


def node(name: str = "n", *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerHostname": name, "Resources": {"memory": 1e9, f"node:{name}": 1.0, **resources}}


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
        (bundles("engine", 10, CPU=0.1), [node(CPU=1)], True),  # tenths do not add up exactly
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


def test_the_table_shows_each_role_beside_each_living_node() -> None:
    asked = bundles("trainer", 2, GPU=1, CPU=0.5) + bundles("engine", 1, GPU=4, CPU=0)
    text = table(asked, [node("big", GPU=4, CPU=8), node("dead", alive=False, GPU=9), node("small", CPU=2)])
    assert text.splitlines() == [
        "asked:",
        "  2 x trainer    GPU 1, CPU 0.5 each",
        "  1 x engine     GPU 4 each",
        "present:",
        "  big: CPU 8, GPU 4",
        "  small: CPU 2, GPU 0",
    ]


def test_asking_for_more_than_there_is_is_refused_with_the_table_before_ray_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits for ever for what it cannot get is the alternative."""
    monkeypatch.setattr(placement.ray, "nodes", lambda: [node("only", CPU=2)])
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: pytest.fail("Ray was asked"))
    with pytest.raises(ConfigError, match=r"too small[\s\S]*3 x engine[\s\S]*only: CPU 2[\s\S]*engine\.count"):
        asyncio.run(placement.Gang.reserve(bundles("engine", 3, CPU=1), 1))
