"""Whole runs over data sets, and a reward model from its training to a PPO run that it judges."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from training_runs import Command, metrics, step_records

from rlpost.checkpoint.__main__ import main as checkpoint_command

SHORT = ("schedule.prompts_per_step=16", "data.limit=200", "evaluation.prompts=64", "training.optimizer.warmup_steps=2")
EXACT = ("train/loss", "train/grad_norm", "train/lr")
"""What a resumed run must repeat."""


def resumed(command: Command, finished: Path, step: int, *settings: str) -> Path:
    """The run of ``finished`` once more from its checkpoint of ``step``: a copy without what came later."""
    copy = finished.with_name(f"{finished.name}-again")
    shutil.copytree(finished, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)
    output = command.run(*settings, f"resume={copy}")
    assert f"from step_{step:06d}" in output
    return command.run_directory(output)


def assert_same_steps(again: Path, first: Path, names: tuple[str, ...], tolerance: float = 1e-6) -> None:
    expected, actual = ({record["step"]: record for record in metrics(run)} for run in (first, again))
    assert sorted(actual) == sorted(expected)
    for step, record in expected.items():
        for name in names:
            if record.get(name) is not None:
                assert actual[step][name] == pytest.approx(record[name], rel=tolerance, abs=tolerance), (step, name)


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Those of a run, in order."""
    return [record for record in metrics(run) if "evaluate/loss" in record]


def test_a_preference_run_learns_without_an_engine_and_goes_on_exactly_after_a_resume(tmp_path: Path) -> None:
    """With reference logprobs that only the untrained model could give: a resume must read them, not make them anew."""
    command = Command(tmp_path)
    settings = ("config=dpo_tiny", *SHORT, "schedule.steps=8", "checkpoint.every=4", "evaluation.every=8", "training.ranks=2")
    first = command.run_directory(command.run(*settings, "run_dir=run"))
    assert sorted(path.name for path in (first / "logs").glob("*-*.log")) == ["trainer-0.log", "trainer-1.log"]
    before, after = evaluations(first)
    assert before["evaluate/margin"] == 0.0 and before["evaluate/accuracy"] == 0.0, "policy and reference are the same model"
    assert after["evaluate/accuracy"] > 0.55 and after["evaluate/margin"] > 0
    assert_same_steps(resumed(command, first, 4, *settings), first, (*EXACT, "train/margin", "evaluate/margin", "evaluate/loss"))


def test_supervised_runs_learn_and_a_changed_data_set_is_no_resume(tmp_path: Path) -> None:
    command = Command(tmp_path)
    settings = ("config=sft_tiny", *SHORT, "schedule.steps=6", "checkpoint.every=3", "evaluation.every=6")
    first = command.run_directory(command.run(*settings, "run_dir=run"))
    before, after = evaluations(first)
    assert after["evaluate/loss"] < before["evaluate/loss"]
    assert [record["train/tokens"] > 0 for record in step_records(first)] == [True] * 6
    message = command.run(*settings, "data.limit=150", f"resume={first}", "schedule.steps=9", code=2)
    assert "cannot resume the data order" in message and "data.limit" in message


def test_a_reward_model_is_trained_exported_and_judges_a_run_with_a_critic_that_resumes_exactly(tmp_path: Path) -> None:
    command = Command(tmp_path)
    rewarding = command.run_directory(command.run("config=reward_model_tiny", *SHORT, "schedule.steps=30", "run_dir=reward"))
    before, after = (record["evaluate/loss"] for record in (evaluations(rewarding)[0], evaluations(rewarding)[-1]))
    assert after < before
    model = tmp_path / "judge"
    assert checkpoint_command(["export", str(rewarding), "--to", str(model)]) == 0
    settings = (
        "config=ppo_tiny", f"rewards=[{{model: {model}, name: judge}}, {{function: exact_match, weight: 0}}]", "schedule.steps=4",
        "schedule.prompts_per_step=4", f"algorithm.critic.path={model}", "algorithm.critic.warmup_steps=1", "algorithm.kl_coefficient=0.02",
        "training.ranks=1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k1", "checkpoint.every=2", "evaluation.every=0",
    )  # fmt: skip
    first = command.run_directory(command.run(*settings, "run_dir=ppo"))
    records = step_records(first)
    assert records[0]["train/loss"] is None, "only the critic is trained in the first step"
    assert all(record["critic/grad_norm"] > 0 for record in records)
    for record in records:
        assert record["reward/mean"] == pytest.approx(record["reward/judge/mean"]), "exact_match has no weight"
        assert 0 <= record["reward/exact_match/mean"] <= 1
    assert (first / "checkpoints" / "step_000002" / "critic").is_dir()
    names = (*EXACT, "critic/loss", "critic/grad_norm", "reward/mean", "train/kl", "train/kl_coefficient", "rollout/tokens")
    assert_same_steps(resumed(command, first, 2, *settings), first, names, tolerance=1e-5)
