"""One training that loses an engine, is told to stop, loses trainer ranks, and still ends as if nothing had been.

Three starts of the same command, each going on from the last:

1. its engine is killed and replaced within the run; a signal then saves and ends it with exit code 75
2. a trainer rank is killed, and everything is started again from the checkpoint; another one is killed, which is one more than
   checkpoint.max_restarts allows: the run ends with an error
3. nothing happens any more
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from training_runs import Command, actors, rollouts, step_records, wait_until_all_ended

from rlpost.driver import evaluate as evaluation
from rlpost.types import Group, InfrastructureError, Prompt

STEPS = 14
SETTINGS = (
    "config=grpo_tiny",
    f"schedule.steps={STEPS}",
    "schedule.prompts_per_step=8",
    "algorithm.group_size=4",
    "evaluation.every=0",
    "checkpoint.every=0",
    "checkpoint.max_restarts=1",
    "run_dir=run",
    "resume=auto",
)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the command: what it printed, and the records that stood in the run directory when it had ended."""

    directory: Path
    output: str
    records: list[dict[str, Any]]
    checkpoints: list[str]


def ended(directory: Path, output: str) -> Attempt:
    names = sorted(path.name for path in (directory / "checkpoints").iterdir())
    return Attempt(directory=directory, output=output, records=step_records(directory), checkpoints=names)


@pytest.fixture(scope="module")
def engine_killed_then_stopped(tmp_path_factory: pytest.TempPathFactory) -> Attempt:
    command = Command(tmp_path_factory.mktemp("lost_processes"))
    directory = command.directory / "run"
    with command.watched(*SETTINGS) as run:
        run.wait_for(f"step 2/{STEPS} ")
        os.kill(actors(directory)["engine-0"], signal.SIGKILL)
        run.wait_for("replaced engine-0")
        run.wait_for(f"step 4/{STEPS} ")
        run.signal(signal.SIGTERM)
        output = run.finish(75)
    wait_until_all_ended(directory)
    return ended(directory, output)


@pytest.fixture(scope="module")
def trainers_killed(engine_killed_then_stopped: Attempt) -> Attempt:
    directory = engine_killed_then_stopped.directory
    two_further = f"step {len(engine_killed_then_stopped.records) + 2}/{STEPS} "
    with Command(directory.parent).watched(*SETTINGS) as run:
        run.wait_for(two_further)
        os.kill(actors(directory)["trainer-1"], signal.SIGKILL)
        run.wait_for("starting again")
        run.wait_for(two_further)
        os.kill(actors(directory)["trainer-0"], signal.SIGKILL)
        output = run.finish(1)
    wait_until_all_ended(directory)
    return ended(directory, output)


@pytest.fixture(scope="module")
def finished(trainers_killed: Attempt) -> Attempt:
    output = Command(trainers_killed.directory.parent).run(*SETTINGS)
    wait_until_all_ended(trainers_killed.directory)
    return ended(trainers_killed.directory, output)


def test_run_goes_on_after_its_engine_was_killed(engine_killed_then_stopped: Attempt) -> None:
    records = engine_killed_then_stopped.records
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= 4
    assert [record["engine/restarts"] for record in records[:2]] == [0, 0]
    assert records[-1]["engine/restarts"] == 1
    assert all(record["reward/failed"] == 0 for record in records), "an engine's loss is no failed episode"


def test_replaced_engine_has_the_present_weights_before_its_first_token(engine_killed_then_stopped: Attempt) -> None:
    for record in engine_killed_then_stopped.records:
        rows = rollouts(engine_killed_then_stopped.directory, record["step"])
        assert len(rows) == 8 * 4
        assert {version for row in rows for version in row["versions"] if version >= 0} == {record["step"] - 1}
        assert record["parity/logprob_abs_mean"] < 1e-4, "the version is not only a label"


def test_signal_ends_the_run_with_a_checkpoint_of_its_last_step(engine_killed_then_stopped: Attempt) -> None:
    attempt = engine_killed_then_stopped
    assert attempt.checkpoints == [f"step_{len(attempt.records):06d}"]
    assert len(attempt.records) < STEPS
    assert "stopping: an update" in attempt.output and "Traceback" not in attempt.output
    assert attempt.output.strip().splitlines()[-1] == "run: run"


def test_dead_trainer_rank_is_named_and_the_run_starts_again_from_its_checkpoint(
    trainers_killed: Attempt, engine_killed_then_stopped: Attempt
) -> None:
    [checkpoint] = engine_killed_then_stopped.checkpoints
    assert f"resuming run from {checkpoint}" in trainers_killed.output
    [warning] = [line for line in trainers_killed.output.splitlines() if "starting again" in line]
    assert "trainer rank 1 died" in warning and checkpoint in warning and "checkpoint.max_restarts=1" in warning
    assert trainers_killed.output.count(f"step {len(engine_killed_then_stopped.records) + 1}/{STEPS} ") == 2, "done again"


def test_one_death_more_than_allowed_ends_the_run_with_an_error_that_names_the_rank(trainers_killed: Attempt) -> None:
    errors = [line for line in trainers_killed.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "trainer rank 0 died" in errors[0], trainers_killed.output[-2000:]
    assert "Traceback" not in trainers_killed.output
    assert "run: " not in trainers_killed.output


def test_resume_after_dead_trainers_finishes_every_step_once(finished: Attempt, engine_killed_then_stopped: Attempt) -> None:
    assert f"resuming run from {engine_killed_then_stopped.checkpoints[-1]}" in finished.output
    assert [record["step"] for record in finished.records] == list(range(1, STEPS + 1))
    assert finished.checkpoints[-1] == f"step_{STEPS:06d}"
    for record in finished.records:
        versions = {v for row in rollouts(finished.directory, record["step"]) for v in row["versions"] if v >= 0}
        assert versions == {record["step"] - 1} and record["parity/logprob_abs_mean"] < 1e-4


def test_steps_done_again_after_a_resume_are_the_same_as_before(finished: Attempt, trainers_killed: Attempt) -> None:
    for before, after in zip(trainers_killed.records, finished.records, strict=False):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "train/lr"):
            assert after[name] == pytest.approx(before[name], abs=1e-6), (before["step"], name)


def test_evaluation_has_its_engine_replaced_instead_of_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes, for a real engine cannot be made to die just then. Episodes wait for what only ``repair`` brings."""
    lost, replaced = asyncio.Event(), asyncio.Event()
    repairs = 0

    async def episodes(*_: Any, **__: Any) -> Group:
        lost.set()
        await replaced.wait()
        return Group(group_id="evaluate-0-0", index=0, prompt=Prompt(prompt_id="0", text="a"), trajectories=())

    async def repair() -> None:
        nonlocal repairs
        repairs += 1
        lost.clear()
        replaced.set()

    monkeypatch.setattr(evaluation, "run_group", episodes)
    plan: Any = None
    prompts = [Prompt(prompt_id="0", text="a")]
    _, groups = asyncio.run(evaluation.evaluate(plan, prompts, step=0, timeout_s=30.0, lost=lost, repair=repair))
    assert repairs == 1 and len(groups) == 1


def test_evaluation_that_never_ends_is_an_error_that_names_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> Group:
        await asyncio.Event().wait()
        raise AssertionError

    async def repair() -> None:
        raise AssertionError("no engine was lost")

    monkeypatch.setattr(evaluation, "run_group", never)
    plan: Any = None
    prompts = [Prompt(prompt_id="0", text="a")]
    with pytest.raises(InfrastructureError, match="evaluation at step 7"):
        asyncio.run(evaluation.evaluate(plan, prompts, step=7, timeout_s=0.05, lost=asyncio.Event(), repair=repair))
