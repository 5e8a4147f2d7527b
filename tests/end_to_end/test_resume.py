"""Kill -9 and resume: the same prompts and losses as a run that was never interrupted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

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


def test_killed_and_resumed_run_gives_the_same_prompts_and_losses(tmp_path: Path) -> None:
    whole, broken = Command(tmp_path / "whole"), Command(tmp_path / "broken")
    whole.directory.mkdir()
    broken.directory.mkdir()
    reference = whole.run_directory(whole.run(*SETTINGS))

    kill_after_step(broken, 5)
    checkpoints = broken.directory / "run" / "checkpoints"
    assert (checkpoints / "step_000004" / "COMPLETE").exists()
    # What a crash in the middle of the next checkpoint leaves: it must be skipped with a warning.
    (checkpoints / "step_000006").mkdir()
    time.sleep(1.0)
    output = broken.run(*SETTINGS, "resume=auto")
    assert "resuming" in output and "step_000004" in output
    assert "step_000006" in output and "completion mark" in output
    resumed = broken.run_directory(output)

    expected = {record["step"]: record for record in metrics(reference)}
    actual = {record["step"]: record for record in metrics(resumed)}
    assert sorted(actual) == sorted(expected) == [1, 2, 3, 4, 5, 6, 7]
    for step in expected:
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/lr", "reward/mean", "rollout/tokens"):
            assert abs(actual[step][name] - expected[step][name]) <= 1e-6, (step, name)
        before = read_rollouts(reference / "rollouts" / f"step_{step:06d}.jsonl")
        after = read_rollouts(resumed / "rollouts" / f"step_{step:06d}.jsonl")
        assert [(row["prompt_id"], row["tokens"]) for row in before] == [(row["prompt_id"], row["tokens"]) for row in after]
    # The first sync after a resume is full, precedes the first rollout and has the resumed version.
    assert min(min(v for v in row["versions"] if v >= 0) for row in read_rollouts(resumed / "rollouts" / "step_000005.jsonl")) == 4
