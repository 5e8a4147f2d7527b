"""Rewards that fail: counted and left out, never 0; one that hangs costs its deadline; too many failures stop the run loudly.

One run of four steps, one reward function whose behaviour each row chooses.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from training_runs import Command, metrics, rollouts, step_records

from rlpost.driver import evaluate as evaluation
from rlpost.types import Failure, Group, Prompt, Trajectory

PROMPTS, SAMPLES = 8, 4

REWARD = """
import time

def moody(prompt, completion, answer, mood):
    if mood == "raise":
        raise KeyError("no test case for " + prompt)
    if mood == "hang":
        time.sleep(3600)
    if mood == "none":
        return None
    if mood == "nan":
        return float("nan")
    return 1.0 + (completion == answer)
"""

ODD = {1: ["raise"], 2: ["hang", "nan"], 3: ["none"], 4: ["raise"] * PROMPTS}
"""Moods of the first rows of each step; the others are fine. At step 4 the failures of all steps are over the budget."""

KINDS = {"raise": "raised", "hang": "timeout", "nan": "not_a_number", "none": "not_scorable"}


def mood(step: int, place: int) -> str:
    """What the reward does with the row at ``place`` of a step."""
    return ODD[step][place] if place < len(ODD[step]) else "fine"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The run, which ends with exit code 1."""

    output: str
    records: list[dict[str, Any]]
    directory: Path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    command = Command(tmp_path_factory.mktemp("data_failures"))
    (command.directory / "moody.py").write_text(REWARD)
    rows = []
    for step in ODD:
        for place in range(PROMPTS):
            digits = f"{step}{place}{90 - 10 * place + step}3"
            rows.append({"prompt": f"sort {digits}=", "answer": "".join(sorted(digits)), "mood": mood(step, place)})
    (command.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = command.run(
        "config=grpo_tiny", "data={train: rows.jsonl, evaluation: rows.jsonl, shuffle: false}", f"schedule.steps={len(ODD)}",
        f"evaluation={{every: {len(ODD)}, prompts: {len(rows)}}}",
        f"schedule.prompts_per_step={PROMPTS}", f"algorithm.group_size={SAMPLES}", "rewards=[{function: 'moody.py:moody'}]",
        "reward_runner={workers: 1, timeout_s: 1.0, max_failed_fraction: 0.25}", "checkpoint.every=1", "run_dir=run",
        code=1,
    )  # fmt: skip
    directory = command.directory / "run"
    return Ended(output=output, records=step_records(directory), directory=directory)


def test_failures_below_the_budget_are_counted_by_kind_and_the_run_goes_on(run: Ended) -> None:
    assert [record["step"] for record in run.records] == [1, 2, 3]
    assert [record["reward/failed"] for record in run.records] == [SAMPLES, 2 * SAMPLES, 0]
    assert [record["reward/not_scorable"] for record in run.records] == [0, 0, SAMPLES], "None is no failure"


def test_failures_of_an_evaluation_are_counted_and_not_in_its_reward(run: Ended) -> None:
    """On all rows, before the first step: those of each mood but `none`, which is no failure, nor does it count as 0."""
    [record] = [record for record in metrics(run.directory) if "evaluate/failed" in record]
    moods = [mood for odd in ODD.values() for mood in odd]
    assert record["step"] == 0
    assert record["evaluate/failed"] == pytest.approx((len(moods) - moods.count("none")) / (len(ODD) * PROMPTS))
    assert record["evaluate/reward"] >= 1


def test_wholly_failed_evaluation_has_no_reward_and_says_that_all_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes: an evaluation of two groups whose episodes or rewards all failed."""

    async def failed_group(plan: Any, prompt: Prompt, group_id: str, index: int) -> Group:
        failure = Failure(kind="environment" if index else "raised", where="moody", message="")
        nothing = np.empty(0)
        trajectory = Trajectory(
            trajectory_id=f"{group_id}.0", group_id=group_id, prompt_id=prompt.prompt_id, prompt_length=0, tokens=nothing,
            trainable=nothing.astype(bool), logprobs=nothing, versions=nothing, failure=failure,
        )  # fmt: skip
        return Group(group_id=group_id, index=index, prompt=prompt, trajectories=(trajectory,))

    async def repair() -> None:
        raise AssertionError("no engine was lost")

    monkeypatch.setattr(evaluation, "run_group", failed_group)
    plan: Any = None
    prompts = [Prompt(prompt_id=str(index), text="a") for index in range(2)]
    found, _ = asyncio.run(evaluation.evaluate(plan, prompts, step=0, timeout_s=30.0, lost=asyncio.Event(), repair=repair))
    assert found["evaluate/failed"] == 1 and math.isnan(found["evaluate/reward"])


def test_failed_rewards_are_left_out_of_the_mean_and_of_the_gradient(run: Ended) -> None:
    """A fine reward is 1 or 2 here: a failure taken as 0 would show at once."""
    for record in run.records:
        rows = rollouts(run.directory, record["step"])
        scored = [row for row in rows if row["reward"] is not None]
        assert len(rows) == PROMPTS * SAMPLES and len(scored) == len(rows) - SAMPLES * len(ODD[record["step"]])
        assert record["reward/mean"] == pytest.approx(fmean(row["reward"] for row in scored)) and record["reward/mean"] >= 1
        assert record["reward/moody/mean"] == record["reward/mean"]
        assert record["train/tokens"] == sum(sum(row["trainable"]) for row in scored)
        assert record["rollout/tokens"] == sum(sum(row["trainable"]) for row in rows)


def test_rollouts_say_which_reward_failed_on_which_prompt_and_why(run: Ended) -> None:
    for record in run.records:
        step = record["step"]
        for row in rollouts(run.directory, step):
            behaviour = mood(step, int(row["prompt_id"]) - PROMPTS * (step - 1))
            assert (row["failure_kind"], row["reward"] is None) == (KINDS.get(behaviour), behaviour != "fine")
            if behaviour == "raise":
                assert "moody" in row["failure_message"] and "KeyError" in row["failure_message"]
                assert f"prompt {row['prompt_id']}" in row["failure_message"]
            if behaviour == "hang":
                assert "within 1 s" in row["failure_message"]


def test_too_many_failures_stop_the_run_with_function_share_and_traceback(run: Ended) -> None:
    [error] = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert "DataFailureError" in error and "44 of the last 128 trajectories" in error
    assert "reward_runner.max_failed_fraction=0.25" in error
    assert "32 x raised in moody" in error and "KeyError" in error
    assert "moody.py" in run.output.partition("error: ")[2] and 'raise KeyError("no test case for " + prompt)' in run.output
    assert "run: " not in run.output, "a stopped run must not look like a finished one"


def test_steps_before_the_stop_are_saved(run: Ended) -> None:
    assert (run.directory / "checkpoints" / "step_000003" / "COMPLETE").exists()
    assert not (run.directory / "rollouts" / "step_000005.jsonl").exists()
