"""Kill -9 or a signal, and resume: the same prompts and losses as a run that was never interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from training_runs import Command, metrics

from rlpost.observe import read_rollouts

# 11 prompts do not divide into steps of 4: the cursor is inside an epoch at every checkpoint.
SETTINGS = (
    "config=grpo_tiny",
    "schedule.steps=7",
    "schedule.prompts_per_step=4",
    "algorithm.group_size=4",
    "evaluation.every=0",
    "checkpoint.every=2",
    "data.limit=11",
    "training.optimizer.warmup_steps=2",
    "run_dir=run",
)


def kill_after_step(command: Command, step: int) -> str:
    """Start a run and kill its driver as soon as it reported ``step``."""
    process = command.start(*SETTINGS)
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(f"step {step}/"):
            os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, output
    return output


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run that was never interrupted."""
    whole = Command(tmp_path_factory.mktemp("whole"))
    return whole.run_directory(whole.run(*SETTINGS))


def assert_equal_runs(resumed: Path, reference: Path) -> None:
    """Every step of both has the same prompts, tokens and numbers."""
    expected = {record["step"]: record for record in metrics(reference)}
    actual = {record["step"]: record for record in metrics(resumed)}
    assert sorted(actual) == sorted(expected) == [1, 2, 3, 4, 5, 6, 7]
    for step in expected:
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/lr", "reward/mean", "rollout/tokens"):
            assert abs(actual[step][name] - expected[step][name]) <= 1e-6, (step, name)
        before = read_rollouts(reference / "rollouts" / f"step_{step:06d}.jsonl")
        after = read_rollouts(resumed / "rollouts" / f"step_{step:06d}.jsonl")
        assert [(row["prompt_id"], row["tokens"]) for row in before] == [(row["prompt_id"], row["tokens"]) for row in after]


def test_killed_and_resumed_run_gives_the_same_prompts_and_losses(command: Command, reference: Path) -> None:
    kill_after_step(command, 5)
    checkpoints = command.directory / "run" / "checkpoints"
    assert (checkpoints / "step_000004" / "COMPLETE").exists()
    # What a crash in the middle of the next checkpoint leaves: it must be skipped with a warning.
    (checkpoints / "step_000006").mkdir()
    time.sleep(1.0)
    output = command.run(*SETTINGS, "resume=auto")
    assert "resuming" in output and "step_000004" in output
    assert "step_000006" in output and "completion mark" in output
    resumed = command.run_directory(output)
    assert_equal_runs(resumed, reference)
    # The first sync after a resume is full, precedes the first rollout and has the resumed version.
    assert min(min(v for v in row["versions"] if v >= 0) for row in read_rollouts(resumed / "rollouts" / "step_000005.jsonl")) == 4


GATED = """
import time
from pathlib import Path

HERE = Path(__file__).parent

def gated(prompt, completion, answer):
    "Right or wrong; in the fourth step it waits until somebody opens the gate."
    records = HERE / "run" / "metrics.jsonl"
    if records.exists() and len(records.read_text().splitlines()) == 3 and not (HERE / "open").exists():
        (HERE / "waiting").touch()
        while not (HERE / "open").exists():
            time.sleep(0.1)
    return float(completion.strip() == answer)
"""


@pytest.mark.slow
def test_signal_saves_the_last_step_while_rollouts_take_long_and_the_resumed_run_is_the_same(command: Command, reference: Path) -> None:
    here = command.directory
    (here / "gated.py").write_text(GATED)
    settings = (*SETTINGS, "rewards=[{function: gated.py:gated}]", "reward_runner.timeout_s=300")
    with command.watched(*settings) as run:
        run.wait_for("step 3/7 ")
        while not (here / "waiting").exists():
            assert run.process.poll() is None, run.output
            time.sleep(0.1)
        run.signal(signal.SIGTERM)
        # Nobody opens the gate: a run that waited for its fourth step would wait for ever.
        assert "step 4/7" not in run.finish(75)
    assert (here / "run" / "checkpoints" / "step_000003" / "COMPLETE").exists(), "checkpoint.every=2 alone has not saved it"
    (here / "open").touch()
    output = command.run(*settings, "resume=auto")
    assert "step_000003" in output
    assert_equal_runs(command.run_directory(output), reference)
