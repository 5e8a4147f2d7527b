"""Routing: a session keeps its engine while that lives; load is counted exactly."""

from __future__ import annotations

import random

import pytest

from rlpost.rollout import router as module
from rlpost.rollout.router import Router


def test_a_session_stays_on_its_engine_also_when_another_is_idle() -> None:
    router = Router(2)
    first = router.choose("a")
    assert first is not None
    assert [router.choose("a") for _ in range(3)] == [first] * 3
    assert router.choose("b") == 1 - first


def test_new_sessions_go_to_the_least_loaded_engine() -> None:
    router = Router(3)
    assert [router.choose(f"s{i}") for i in range(6)] == [0, 1, 2, 0, 1, 2]
    router.done(1)
    router.done(1)
    assert [router.choose(f"t{i}") for i in range(2)] == [1, 1]


def test_a_dead_engine_gets_nothing_and_its_sessions_move_once() -> None:
    router = Router(2)
    assert router.choose("a") == 0
    router.alive[0] = False
    assert router.choose("a") == 1
    router.alive[0] = True
    assert router.choose("a") == 1, "its prefix is cached there now"
    assert router.choose("b") == 0, "a replaced engine gets traffic again"


def test_no_living_engine_is_none_and_counts_no_load() -> None:
    router = Router(2)
    router.alive = [False, False]
    assert router.choose("a") is None
    assert router.load == [0, 0]


def test_requests_without_a_session_are_spread() -> None:
    """An empty session is no session: all of them on one engine would leave the others idle."""
    router = Router(2)
    assert sorted(engine for _ in range(4) if (engine := router.choose("")) is not None) == [0, 0, 1, 1]


def test_load_returns_to_zero_when_every_request_is_done_also_across_deaths() -> None:
    router, draw = Router(3), random.Random(0)
    open_requests: list[int] = []
    for turn in range(500):
        if open_requests and draw.random() < 0.5:
            router.done(open_requests.pop(draw.randrange(len(open_requests))))
        elif (engine := router.choose(f"s{draw.randrange(20)}")) is not None:
            open_requests.append(engine)
        if turn % 50 == 0:
            router.alive[turn // 50 % 3] ^= True
    for engine in open_requests:
        router.done(engine)
    assert router.load == [0, 0, 0]


def test_old_sessions_are_forgotten_least_recently_used_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run has millions of groups; their routes must not pile up."""
    monkeypatch.setattr(module, "MOST_SESSIONS", 2)
    router = Router(2)
    router.load = [0, 10]
    assert router.choose("a") == 0
    router.choose("b")
    router.choose("a")
    router.choose("c")  # forgets b
    router.load = [10, 0]
    assert router.choose("a") == 0
    assert router.choose("b") == 1
