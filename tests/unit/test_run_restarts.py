"""When a run is started again after a failure, and when not. Without Ray: an attempt is a function, or fails before any actor."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.checkpoint.directory import begin, complete
from rlpost.config.schema import RunConfig
from rlpost.driver import run as driver
from rlpost.driver.run import RunContext, run_with_restarts
from rlpost.types import InfrastructureError

Attempt = Callable[[RunContext], bool]


class Run:
    """A run directory, the attempts that are planned, and what came of them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.planned: list[Attempt] = []
        self.given: list[Path | None] = []
        """The checkpoint that each attempt was to go on from."""
        self.warnings: list[str] = []

    def context(self, *, max_restarts: int = 1) -> RunContext:
        config, unused = RunConfig(), SimpleNamespace()
        config.checkpoint.max_restarts = max_restarts
        console = SimpleNamespace(warning=self.warnings.append, message=lambda text: None, phase=lambda name: None)
        parts: Any = {"derived": unused, "inputs": unused, "trackers": unused, "console": console}
        return RunContext(config=config, run_dir=self.run_dir, **parts)

    def save(self, step: int) -> Path:
        return complete(begin(self.run_dir, step), {"step": step})

    async def attempt(self, context: RunContext, checkpoint: Path | None) -> bool:
        self.given.append(checkpoint)
        return self.planned[len(self.given) - 1](context)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose attempts are the planned functions."""
    run = Run(tmp_path)
    monkeypatch.setattr(driver, "run_once", run.attempt)
    return run


def dies(context: RunContext) -> bool:
    raise InfrastructureError("trainer rank 1 died")


def is_told_to_stop_and_dies(context: RunContext) -> bool:
    context.stop_requested.set()
    raise InfrastructureError("trainer rank 1 died")


def ends(context: RunContext) -> bool:
    return False


def test_dead_attempt_is_started_again_from_the_newest_checkpoint(run: Run) -> None:
    run.planned = [dies, ends]
    run.save(2)
    newest = run.save(4)
    assert run_with_restarts(run.context(), None) is False
    assert run.given == [None, newest]
    [warning] = run.warnings
    assert "trainer rank 1 died" in warning and "starting again from step_000004" in warning


@pytest.mark.parametrize(("before", "max_restarts"), [([], 1), ([dies], 1), ([], 0)], ids=["at-first", "after-a-restart", "none-allowed"])
def test_signal_in_an_attempt_that_then_dies_ends_the_run_as_a_stopped_one(run: Run, before: list[Attempt], max_restarts: int) -> None:
    """Also when no restart would be left: what was saved is there, and `resume=auto` goes on from it."""
    run.planned = [*before, is_told_to_stop_and_dies, ends]
    run.save(4)
    assert run_with_restarts(run.context(max_restarts=max_restarts), None) is True
    assert len(run.given) == len(before) + 1
    assert "trainer rank 1 died" in run.warnings[-1] and "asked to stop" in run.warnings[-1] and "step_000004" in run.warnings[-1]


@pytest.mark.parametrize("dead", [dies, is_told_to_stop_and_dies])
def test_dead_attempt_with_nothing_saved_is_an_error(run: Run, dead: Attempt) -> None:
    run.planned = [dead, ends]
    with pytest.raises(InfrastructureError, match="rank 1 died"):
        run_with_restarts(run.context(), None)
    assert run.given == [None]


def test_one_death_more_than_allowed_is_an_error(run: Run) -> None:
    run.planned = [dies, dies, ends]
    run.save(4)
    with pytest.raises(InfrastructureError, match="rank 1 died"):
        run_with_restarts(run.context(), None)
    assert len(run.given) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("fails", [False, True])
def test_signal_while_parts_start_or_wait_for_room_ends_the_run_as_a_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, fails: bool
) -> None:
    """The real attempt up to the start of its actors: there the signal comes, and then nothing more, or a failure."""
    run = Run(tmp_path)
    starts = 0
    taken_down = []

    async def start_parts(config: Any, derived: Any, inputs: Any, run_dir: Any, stack: AsyncExitStack, say: Any) -> Any:
        nonlocal starts
        starts += 1
        stack.callback(lambda: taken_down.append("what was started"))
        os.kill(os.getpid(), number)
        if fails:
            await asyncio.sleep(0)
            raise InfrastructureError("engine-0 did not come up")
        await asyncio.sleep(0.05)
        if number == signal.SIGTERM:  # schedulers repeat it, and mean no more by it
            os.kill(os.getpid(), number)
        await asyncio.sleep(1000)

    monkeypatch.setattr(driver.setup, "connect", lambda config: {"where": "nowhere"})
    monkeypatch.setattr(driver.setup, "close_session", lambda: None)
    monkeypatch.setattr(driver.setup, "start_parts", start_parts)
    run.save(4)
    context = run.context()
    monkeypatch.setattr(context.console, "warning", run.warnings.append)
    assert run_with_restarts(context, None) is True
    assert starts == 1 and taken_down == ["what was started"]
    assert "a second Ctrl-C ends at once" in run.warnings[0]
