"""What is said when a rank does not answer, waits for others in vain, or an engine cannot be replaced: who, in what, by which deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlpost.rollout import pool as pools
from rlpost.rollout.client import EngineLostError
from rlpost.rollout.pool import EnginePool
from rlpost.training import group as groups
from rlpost.training.group import TrainerGroup
from rlpost.types import InfrastructureError

Answer = Callable[[], Coroutine[Any, Any, Any]]
GLOO = "[unbound_buffer.cc:129] Timed out waiting 6000ms for send operation to complete"


def rank(answer: Answer) -> Any:
    return SimpleNamespace(call=SimpleNamespace(remote=lambda method, arguments: answer()))


async def never() -> None:
    await asyncio.Event().wait()


async def done() -> None:
    pass


async def timed_out() -> None:
    raise RuntimeError(GLOO)


@pytest.mark.parametrize(
    ("method", "arguments", "timeout_s", "words"),
    [
        ("update", (), None, "did not finish update within 0 s (schedule.phase_timeout_s)"),
        ("weights", ("join", "engines-0"), 0.02, "did not finish weights join within 0 s (weights.timeout_s)"),
        ("weights", ("advance", 3), None, "did not finish weights advance within 0 s (schedule.phase_timeout_s)"),
        ("setup", ("10.0.0.1", 5), 0.02, "did not finish setup within 0 s (schedule.start_timeout_s)"),
    ],
)
def test_a_late_rank_is_named_with_the_setting_of_its_deadline(method: str, arguments: Any, timeout_s: float | None, words: str) -> None:
    group = TrainerGroup("trainer", [rank(done), rank(never)], 0.01)
    with pytest.raises(InfrastructureError) as caught:
        asyncio.run(group.call(method, *arguments, timeout_s=timeout_s))
    assert str(caught.value) == f"trainer ranks [1] {words}"


def test_a_rank_that_waited_for_others_in_vain_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "DEATH_NOTICE_S", 0.01)
    group = TrainerGroup("trainer", [rank(never), rank(timed_out), rank(never)], 5)
    with pytest.raises(InfrastructureError, match=r"rank 1 failed in update: .*Timed out .* waited for ranks \[0, 2\] \(schedule\.phase_"):
        asyncio.run(group.call("update"))


async def unavailable() -> None:
    raise ray.exceptions.ActorUnavailableError("Connection reset by peer", None)


def test_a_rank_whose_node_is_cut_off_is_not_said_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "DEATH_NOTICE_S", 0.01)
    with pytest.raises(InfrastructureError, match=r"^trainer rank 1 died or is out of reach in update: ActorUnavailableError"):
        asyncio.run(TrainerGroup("trainer", [rank(never), rank(unavailable)], 5).call("update"))


def test_an_engine_that_cannot_be_replaced_says_what_the_lost_one_died_of_and_which_nodes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeManagerAddress": "10.0.0.1", "Alive": True}, {"NodeManagerAddress": "10.0.0.2", "Alive": False}]
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    settings: Any = [SimpleNamespace(name="engine-0")]
    pool = EnginePool(settings, [{}], request_timeout_s=1, start_timeout_s=0.01, max_restarts=3)
    client: Any = SimpleNamespace(lost=EngineLostError("engine-0 is lost: the actor died"), close=done)
    pool.clients, pool.actors = [client], [None]
    monkeypatch.setattr(pools.EnginePool, "_spawn", lambda self, index: SimpleNamespace(start=SimpleNamespace(remote=never)))
    with pytest.raises(
        InfrastructureError, match=r"did not start within 0 s \(schedule\.start_timeout_s\).*the actor died; .* given up: 10\.0\.0\.2$"
    ):
        asyncio.run(pool.repair(lambda gone: done()))
