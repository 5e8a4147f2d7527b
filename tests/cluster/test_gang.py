"""One placement for a whole run on real Ray of several nodes: all or nothing, every role where it belongs, a wait that ends."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import placement_group_table
from ray_nodes import Node, RayNodes, ray_nodes
from training_runs import Command

from rlpost.cluster import placement
from rlpost.cluster.layout import ROLE_LABEL
from rlpost.cluster.placement import Gang
from rlpost.config.derive import Bundle
from rlpost.types import ConfigError, InfrastructureError

TIMEOUT_S = 30.0


@contextmanager
def started(nodes: Sequence[Node]) -> Iterator[RayNodes]:
    """Nodes in a directory with a short path, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="gang", dir="/tmp", ignore_cleanup_errors=True) as directory:
        with ray_nodes(Path(directory), nodes) as running:
            yield running


@contextmanager
def joined(running: RayNodes) -> Iterator[None]:
    """This process is a driver of the nodes."""
    ray.init(address=running.address, log_to_driver=False, namespace="rlpost")
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def three() -> Iterator[RayNodes]:
    """Three nodes of two CPUs. Tests leave them as they were."""
    with started([Node(cpus=2)] * 3) as running:
        yield running


@pytest.fixture
def driver(three: RayNodes) -> Iterator[None]:
    """The test is a driver of the three nodes."""
    with joined(three):
        yield


@pytest.fixture
def gangs() -> Iterator[list[Gang]]:
    """Gangs that are released after the test, which ends when their resources are free."""
    granted: list[Gang] = []
    yield granted
    if ray.is_initialized():
        for gang in granted:
            gang.release()
        wait_until(lambda: free() == total())


def bundles(role: str, count: int, cpus: float = 1) -> list[Bundle]:
    return [Bundle(role, index, {"CPU": cpus}) for index in range(count)]


def reserve(gangs: list[Gang], asked: Sequence[Bundle], timeout_s: float = TIMEOUT_S, **settings: object) -> list[str]:
    """Ids of the nodes on which actors of the bundles really start, in the bundles' order."""
    gang = asyncio.run(Gang.reserve(asked, timeout_s, **settings))  # type: ignore[arg-type]
    gangs.append(gang)
    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    return ray.get([where.options(**gang.options(index, num_cpus=1)).remote() for index in range(len(asked))], timeout=TIMEOUT_S)


def free() -> dict[str, float]:
    return {node: amounts.get("CPU", 0.0) for node, amounts in available_resources_per_node().items()}


def total() -> dict[str, float]:
    return {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}


def live_groups() -> int:
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def labels() -> dict[str, str]:
    """The role of each living node."""
    return {node["NodeID"]: node["Labels"].get(ROLE_LABEL, "") for node in ray.nodes() if node["Alive"]}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time; free: {free()}, there are: {total()}"
        time.sleep(0.1)


# ---- layout ----------------------------------------------------------------------------------------------------------


def test_ranks_that_are_neighbours_share_a_node_and_engines_stand_apart(driver: None, gangs: list[Gang]) -> None:
    """Engines are asked for first and are larger, so Ray alone would begin with them."""
    where = reserve(gangs, [*bundles("engine", 1, 1.5), *bundles("trainer", 4)])
    engine, *ranks = where
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    assert engine not in ranks


def test_ranks_are_numbered_by_node_when_ray_places_them(driver: None, gangs: list[Gang], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray lays bundles down in an order of its own where it decides."""
    lay_out = placement.lay_out
    monkeypatch.setattr(placement, "lay_out", lambda asked, nodes, strategy: lay_out([*asked, Bundle("none", 0, {"CPU": 99})], nodes))
    ranks = reserve(gangs, bundles("trainer", 6), wait_for_nodes=True)
    assert ranks[0] == ranks[1] and ranks[2] == ranks[3] and ranks[4] == ranks[5] and len(set(ranks)) == 3


@pytest.mark.parametrize(("strategy", "nodes"), [("pack", 1), ("spread", 2)])
def test_engines_are_packed_or_spread_as_told(driver: None, gangs: list[Gang], strategy: str, nodes: int) -> None:
    where = reserve(gangs, [*bundles("trainer", 2), *bundles("engine", 2)], engine_strategy=strategy)
    assert where[0] == where[1] and where[0] not in where[2:], "ranks are packed whatever engines are"
    assert len(set(where[2:])) == nodes


def test_an_engine_is_whole_in_a_node_and_refused_where_only_two_nodes_together_hold_it(driver: None, gangs: list[Gang]) -> None:
    reserve(gangs, bundles("engine", 3, 2))
    with pytest.raises(ConfigError, match=r"missing: no node has room for engine 0\n"):
        reserve(gangs, bundles("engine", 1, 3))


# ---- all or nothing --------------------------------------------------------------------------------------------------


def test_a_cluster_with_room_for_all_but_one_bundle_holds_nothing_and_says_who_has_the_rest(driver: None, gangs: list[Gang]) -> None:
    reserve(gangs, bundles("trainer", 1))
    before = free()
    with pytest.raises(InfrastructureError) as refused:
        reserve(gangs, bundles("engine", 3, 2), timeout_s=1.0)
    text = str(refused.value)
    assert "placement.timeout_s" in text and "missing: no node has room for engine 2" in text
    assert text.count("CPU 2 of 2 free") == 2 and text.count("CPU 1 of 2 free") == 1
    assert f"CPU 1 by job {ray.get_runtime_context().get_job_id()}" in text
    assert free() == before and live_groups() == 1


def test_what_cannot_ever_fit_is_refused_at_once_though_others_hold_resources_too(driver: None, gangs: list[Gang]) -> None:
    reserve(gangs, bundles("trainer", 1))
    with pytest.raises(ConfigError, match=r"too small[\s\S]*7 x trainer[\s\S]*trainer 6[\s\S]*wait_for_nodes"):
        reserve(gangs, bundles("trainer", 7), timeout_s=3600)
    assert live_groups() == 1


def test_a_wait_is_said_once_and_ends_with_the_other_job(driver: None, gangs: list[Gang], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "SAY_AFTER_S", 0.5)
    reserve(gangs, bundles("trainer", 4))
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        gangs.pop(0).release()

    ranks = reserve(gangs, bundles("trainer", 4), say=say)
    assert ranks[0] == ranks[1] != ranks[2] == ranks[3]
    assert len(lines) == 1 and "trainer 2-3" in lines[0] and "placement.timeout_s=30" in lines[0]


# ---- nodes of a role, nodes that come and go -------------------------------------------------------------------------


def test_labelled_nodes_are_kept_for_their_role_and_a_node_lost_while_waiting_ends_no_wait(
    gangs: list[Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "SAY_AFTER_S", 0.5)
    nodes = [Node(cpus=0), Node(cpus=3, labels={ROLE_LABEL: "trainer"}), Node(cpus=2, labels={ROLE_LABEL: "rollout"})]
    with started(nodes) as running, joined(running):
        with pytest.raises(ConfigError, match=r"no node has room for trainer 3\n"):
            reserve(gangs, bundles("trainer", 4))
        where = reserve(gangs, [*bundles("trainer", 2), *bundles("engine", 2)])
        assert [labels()[node] for node in where] == ["trainer"] * 2 + ["rollout"] * 2
        with pytest.raises(InfrastructureError, match=r"missing: no node has room for trainer 1-2, engine 0\ndead: 1 node"):
            reserve(gangs, [*bundles("trainer", 3), *bundles("engine", 1)], timeout_s=6.0, say=lambda line: running.lose(2))


@pytest.mark.slow
def test_rollout_nodes_may_come_later_and_engines_move_to_the_one_that_replaces_a_lost_one(
    gangs: list[Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under an autoscaler, and where Kubernetes replaces a pod."""
    monkeypatch.setattr(placement, "SAY_AFTER_S", 0.5)
    rollout = Node(cpus=2, labels={ROLE_LABEL: "rollout"})
    with started([Node(cpus=0), Node(cpus=3, labels={ROLE_LABEL: "trainer"}), rollout]) as running, joined(running):
        came: list[int] = []
        asked = [*bundles("trainer", 2), *bundles("engine", 4)]
        where = reserve(gangs, asked, wait_for_nodes=True, say=lambda line: came.append(running.add(rollout)))
        assert came == [3], "it waited, and said so once"
        assert [labels()[node] for node in where] == ["trainer"] * 2 + ["rollout"] * 4

        def state() -> str:
            return placement_group_table(gangs[0].group)["state"]

        gangs.pop().release()
        where = reserve(gangs, asked)  # on nodes that are there: ranks are bound to theirs
        running.lose(3)
        wait_until(lambda: state() == "RESCHEDULING")
        running.add(rollout)
        wait_until(lambda: state() == "CREATED")
        now = placement_group_table(gangs[0].group)["bundles_to_node_id"]
        assert sorted(labels()[node] for node in now.values()) == ["rollout"] * 4 + ["trainer"] * 2


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_two_jobs_that_need_two_thirds_of_the_cluster_one_runs_and_the_other_waits_or_fails_as_told(
    three: RayNodes, command: Command
) -> None:
    words = [
        "config=grpo_tiny", "schedule.steps=1", "schedule.prompts_per_step=8", "evaluation.every=0", "checkpoint.every=0",
        "placement.trainer_cpus=1", "placement.engine_cpus=2", "placement.device=cpu", f"placement.ray_address={three.address}",
    ]  # fmt: skip
    with command.watched("name=first", *words) as first:
        first.wait_for("starting 2 trainer rank(s)")
        with command.watched("name=second", *words, "placement.timeout_s=300") as second:
            refused = command.run("name=third", *words, "placement.timeout_s=2", code=1)
            assert "did not grant the placement within 2 s" in refused and "Traceback" not in refused
            assert "missing: no node has room for engine 0" in refused
            assert refused.count("CPU 0 of 2 free") == 2 and refused.count("CPU 2 of 2 free") == 1
            assert "name=first" in refused.partition("jobs:")[2], "the command of the job that holds the rest"
            second.wait_for("no node has any now for engine 0")
            first.finish(0)
            second.wait_for("starting 2 trainer rank(s)")
            second.finish(0)
