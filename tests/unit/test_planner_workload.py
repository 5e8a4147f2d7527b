"""One step as sequences and tokens: from assumptions that are said, from a file, or from what a run recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rlpost.config.derive import Derived, derive
from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.planner.options import PlanOptions
from rlpost.planner.workload import lengths_with_mean, planned_workload, read_lengths, recorded_workload
from rlpost.types import ConfigError


def run(*words: str) -> tuple[RunConfig, Derived]:
    config = load_config(["config=grpo_qwen", *words]).config
    return config, derive(config, device="gpu")


def test_a_planned_step_has_every_sample_of_the_batch_and_each_prompt_once_with_prefix_caching() -> None:
    found = planned_workload(*run(), PlanOptions(prompt_tokens=500, answer_median=800, answer_p99=3000))
    assert found.samples == 128 * 8 and found.groups == 128
    assert max(found.answers) <= 4096 and sorted(found.answers)[len(found.answers) // 2] == pytest.approx(800, rel=0.02)
    assert found.prefill == 128 * 500
    assert planned_workload(*run("engine.prefix_caching=false"), PlanOptions(prompt_tokens=500)).prefill == 128 * 8 * 500


def test_the_trainer_computes_a_shared_prompt_once_and_otherwise_for_each_sample() -> None:
    found = planned_workload(*run(), PlanOptions(prompt_tokens=500))
    assert found.row_tokens(False) == sum(found.answers) + 1024 * 500
    assert found.row_tokens(True) == sum(found.answers) + 128 * 500


def test_turns_multiply_answers_and_add_observations() -> None:
    config, derived = run("environment.name=calc", "environment.max_turns=4", "training.micro_batch_tokens=20000")
    found = planned_workload(config, derived, PlanOptions(prompt_tokens=100, answer_median=50, answer_p99=50, observation=30))
    assert set(found.answers) == {200} and found.observations == 90 and found.lengths[0] == 390
    assert found.prefill == 128 * (100 + 8 * 3 * 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(answer_median=5000), r"answer_median=5000; expected 1 to 4096"),
        (PlanOptions(answer_p99=9000), r"answer_p99=9000; expected 1 to 4096"),
        (PlanOptions(lengths="absent.txt"), r"lengths=absent.txt cannot be read"),
    ],
)
def test_impossible_lengths_are_refused(options: PlanOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned_workload(*run(), options)


def test_pairs_of_an_offline_run_have_two_answers_to_one_prompt() -> None:
    config = load_config(["config=dpo_tiny"]).config
    found = planned_workload(config, derive(config, device="cpu"), PlanOptions(prompt_tokens=10))
    assert found.samples == 2 * config.schedule.prompts_per_step and found.groups == config.schedule.prompts_per_step
    assert found.row_tokens(True) == found.row_tokens(False) - 10 * found.groups


# ---- files -----------------------------------------------------------------------------------------------------------


def test_lengths_come_from_numbers_or_from_a_runs_rollouts(tmp_path: Path) -> None:
    numbers, rollouts = tmp_path / "numbers.txt", tmp_path / "step.jsonl"
    numbers.write_text("12\n\n7\n")
    rollouts.write_text(json.dumps({"prompt_length": 3, "trainable": [False, False, False, True, True], "tokens": [1] * 5}) + "\n")
    assert read_lengths(numbers) == [(0, 12), (0, 7)] and read_lengths(rollouts) == [(3, 2)]
    found = planned_workload(*run(), PlanOptions(lengths=str(numbers)))
    assert set(found.answers) == {12, 7} and found.basis == "given"


@pytest.mark.parametrize("line", ["0", "-3", "2.5", "many", "true", '{"prompt": "x"}', "[3]"])
def test_a_line_that_is_no_length_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(f"5\n{line}\n")
    with pytest.raises(ConfigError, match=r"lengths.txt:2: .*expected a whole number of tokens above 0"):
        read_lengths(path)


def test_an_empty_length_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_lengths(path)


# ---- records ---------------------------------------------------------------------------------------------------------


def record(**values: float) -> dict[str, Any]:
    base = {
        "rollout/tokens": 1024 * 300, "rollout/tokens_max": 4000, "rollout/turns_mean": 1.0, "rollout/prompt_tokens": 1024 * 200,
        "rollout/cached_prompt_tokens": 896 * 192, "train/row_tokens": 340_000, "train/micro_batches": 6, "train/tokens": 1024 * 300,
    }  # fmt: skip
    return {**base, **{name.replace("__", "/"): value for name, value in values.items()}}


def test_a_recorded_step_keeps_the_runs_tokens_rows_and_micro_batches() -> None:
    found = recorded_workload(*run(), [record()])
    assert found.samples == 1024 and found.prompt == 200 and found.prefill == 1024 * 200 - 896 * 192
    assert found.sampled_tokens == pytest.approx(1024 * 300, rel=0.02) and max(found.answers) == 4000
    assert found.row_tokens(True) == 340_000
    assert found.micro_batches(True, ranks=4, minibatches=1, micro_batch_tokens=16384) == 6


def test_passes_over_the_batch_are_not_counted_as_a_larger_batch() -> None:
    found = recorded_workload(*run("algorithm.epochs=2"), [record(train__row_tokens=680_000, train__micro_batches=12)])
    assert found.row_tokens(True) == 340_000 and found.recorded_micro_batches == 6


def test_the_first_prompt_of_several_turns_is_told_from_the_history() -> None:
    """Three turns of 100 tokens after a prompt of 50: prompts of 50, 150 and 250 tokens were sent."""
    config, derived = run("environment.name=calc", "environment.max_turns=3")
    values = record(rollout__turns_mean=3.0, rollout__prompt_tokens=1024 * 450, rollout__cached_prompt_tokens=1024 * 400)
    assert recorded_workload(config, derived, [values]).prompt == 50


def test_records_without_tokens_are_an_error_and_no_guess() -> None:
    values = record()
    del values["rollout/tokens"]
    with pytest.raises(ConfigError, match=r"no rollout/tokens; expected finished steps"):
        recorded_workload(*run(), [values])


@pytest.mark.parametrize(("mean", "longest"), [(64.0, 64), (60.0, 100), (21.0, 139), (300.0, 4000), (1.5, 7)])
def test_lengths_of_a_mean_and_a_longest_have_both(mean: float, longest: int) -> None:
    found = lengths_with_mean(512, mean, longest)
    assert fmean(found) == pytest.approx(mean, rel=0.03, abs=0.5) and max(found) == longest and min(found) >= 1


def test_offline_records_give_rows_and_answers() -> None:
    config = load_config(["config=sft_tiny"]).config
    derived = derive(config, device="cpu")
    rows = config.schedule.prompts_per_step
    found = recorded_workload(config, derived, [{"train/tokens": rows * 6, "train/row_tokens": rows * 20, "train/micro_batches": 2}])
    assert found.prompt == 14 and set(found.answers) == {6}
    assert replace(found, recorded_row_tokens=None).row_tokens(True) == rows * 20


def test_a_step_whose_figure_is_not_a_number_does_not_count() -> None:
    """The newest record has NaN where the file has null."""
    assert recorded_workload(*run(), [record(), record(rollout__turns_mean=float("nan"))]).turns == 1
