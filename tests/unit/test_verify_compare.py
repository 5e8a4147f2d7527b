"""What ``doctor verify`` calls equal: comparisons that would be blind to a fault are worth nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from rlpost.diagnosis.verify_batch import partitions
from rlpost.diagnosis.verify_compare import TOLERANCES, difference, different_prompts, empty_moments, largest_difference, largest_gap
from rlpost.diagnosis.verify_plan import Plan
from rlpost.diagnosis.verify_run import Runs, parity_finding, resume_finding, sync_finding
from rlpost.driver.updates import Packing
from rlpost.training.packing import pack
from rlpost.types import LossTerms

NAN = float("nan")


def test_a_number_that_is_none_is_unequal_to_everything_even_to_itself() -> None:
    for pair in ((NAN, NAN), (1.0, NAN), (None, 1.0), (None, None), (math.inf, math.inf)):
        assert difference(*pair) == math.inf, pair
    assert difference(2.0, 2.0) == 0.0
    assert difference(0.0, 0.0) == 0.0
    assert difference(0.0, 1e-30) == math.inf, "nothing is close to 0 but 0, unless a scale is given"


def test_a_metric_that_one_side_lacks_differs_and_no_metric_at_all_is_no_agreement() -> None:
    assert largest_difference({"train/loss": 1.0}, {}, ["train/loss", "critic/loss"]) == ("train/loss", math.inf)
    assert largest_difference({}, {}, ["train/loss"])[1] == math.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_denominator_counted_by_micro_batch_is_far_beyond_the_tolerance(dtype: str) -> None:
    """Two micro-batches of 30 and 50 tokens: the mean of their means against the mean."""
    terms = np.random.default_rng(0).normal(0.5, 1.0, 80)
    right, wrong = terms.mean(), (terms[:30].mean() + terms[30:].mean()) / 2
    assert difference(right, wrong, 0.1) > TOLERANCES[dtype].relative
    assert difference(right, right * (1 + 1e-7), 0.1) < TOLERANCES[dtype].relative


def test_a_small_loss_is_compared_on_the_scale_of_its_terms_and_a_gradient_norm_is_not() -> None:
    one, other = {"train/loss": 1e-9, "train/grad_norm": 1e-9}, {"train/loss": 3e-9, "train/grad_norm": 1e-9}
    assert largest_difference(one, other, one)[1] < 1e-7
    assert largest_difference(one, {**other, "train/grad_norm": 1.001e-9}, one) == ("train/grad_norm", pytest.approx(1e-3))


def test_logprobs_are_compared_where_tokens_are_trained_and_only_there() -> None:
    mask = [np.array([False, True, True])]
    assert largest_gap([np.array([NAN, -1.0, -2.0])], [np.array([5.0, -1.0, -2.25])], mask) == 0.25
    assert largest_gap([np.array([0.0, -1.0, NAN])], [np.array([0.0, -1.0, NAN])], mask) == math.inf
    assert largest_gap([np.zeros(3)], [np.zeros(3)], [np.zeros(3, bool)]) == math.inf, "nothing was compared"
    assert largest_gap([np.zeros(3)], [], mask) == math.inf


def row(prompt: str, tokens: list[int]) -> dict[str, Any]:
    return {"prompt_id": prompt, "tokens": tokens, "prompt_length": 2}


def test_another_prompt_or_another_number_of_trajectories_is_found() -> None:
    rows = [row("a", [1, 2, 9]), row("b", [3, 4, 9])]
    assert different_prompts(rows, [row("a", [1, 2, 7]), row("b", [3, 4])]) == "", "answers may differ, prompts not"
    assert "is of prompt 'c', expected 'b'" in different_prompts(rows, [rows[0], row("c", [3, 4, 9])])
    assert "the tokens of prompt 'b' differ" in different_prompts(rows, [rows[0], row("b", [3, 5, 9])])
    assert different_prompts(rows, rows[:1]) == "1 trajectories, expected 2"


def test_lost_moments_are_found() -> None:
    assert empty_moments({}) != ""
    assert empty_moments({"w.exp_avg": 0.0, "w.exp_avg_sq": 0.0}) == "all 2 moments of the optimizer are 0 after a step"
    assert "no numbers" in empty_moments({"w.exp_avg": NAN, "v.exp_avg": 1.0})
    assert empty_moments({"w.exp_avg": 0.0, "v.exp_avg": 1e-9}) == ""


# ---- findings of whole runs ------------------------------------------------------------------------------------------------


class Offline:
    """What the judges read of a plan."""

    class derived:
        offline = True
        dtype = "float32"
        weight_carrier, weight_deltas = "collective", False

    class machine:
        device = "cpu"


PLAN = cast(Plan, Offline())
RECORDS: dict[int, dict[str, Any]] = {
    step: {
        "train/loss": 0.7 - step / 10, "train/grad_norm": 2.0 + step, "train/lr": 1e-3 / step, "sync/verified": 1.0, "sync/fallbacks": 0,
        "sync/mode": 0, "parity/logprob_abs_mean": 1e-6, "parity/logprob_abs_max": 1e-5,
    }
    for step in (1, 2, 3, 4)
}  # fmt: skip
MOMENTS = {"w.exp_avg": 0.1}


def resumed(changes: dict[int, dict[str, Any]]) -> Runs:
    actual = {step: {**record, **changes.get(step, {})} for step, record in RECORDS.items() if changes.get(step) != {}}
    return Runs(whole=Path("whole"), resumed=Path("resumed"), expected=RECORDS, actual=actual)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({4: {"train/loss": 0.3001}}, "step 4: train/loss is 0.3001"),
        ({3: {"train/grad_norm": 5.001}}, "step 3: train/grad_norm"),
        ({3: {"train/lr": 1e-3}}, "step 3: train/lr"),
        ({4: {"train/loss": None}}, "step 4: train/loss is None"),
        ({4: {}}, "step 4 is missing in the resumed run"),
    ],
)
def test_a_resume_that_differs_in_any_measure_fails_and_names_it(changes: dict[int, dict[str, Any]], named: str) -> None:
    finding = resume_finding(resumed(changes), PLAN, MOMENTS)
    assert finding.status == "failed" and named in finding.found


def test_an_exact_resume_passes_but_not_without_moments_in_the_checkpoint() -> None:
    assert resume_finding(resumed({}), PLAN, MOMENTS).status == "ok"
    finding = resume_finding(resumed({}), PLAN, {})
    assert finding.status == "failed" and "no moments" in finding.found


def test_a_sync_that_is_not_proven_or_fell_back_fails() -> None:
    assert sync_finding(RECORDS, PLAN).status == "ok"
    for change in ({"sync/verified": 0.0}, {"sync/fallbacks": 1, "sync/fallbacks/timeout": 1}):
        finding = sync_finding({**RECORDS, 3: {**RECORDS[3], **change}}, PLAN)
        assert finding.status == "failed", change
    assert "1 fallbacks (timeout)" in finding.found
    assert sync_finding({}, PLAN).status == "failed", "no sync is no proof"


def test_parity_is_judged_after_an_update_and_a_run_that_compared_nothing_fails() -> None:
    assert parity_finding(RECORDS, PLAN).status == "ok"
    first_only = {1: RECORDS[1], 2: {**RECORDS[2], "parity/logprob_abs_mean": None, "parity/logprob_abs_max": None}}
    assert parity_finding(first_only, PLAN).status == "failed"
    off = parity_finding({**RECORDS, 4: {**RECORDS[4], "parity/logprob_abs_max": 0.01}}, PLAN)
    assert off.status == "failed" and off.values["logprob_abs_max"] == 0.01
    assert parity_finding({**RECORDS, 1: {**RECORDS[1], "parity/logprob_abs_max": 9.0}}, PLAN).status == "ok", "before any update"


# ---- partitions --------------------------------------------------------------------------------------------------------------


def test_a_batch_is_cut_into_one_two_three_and_as_many_micro_batches_as_its_longest_sequence_permits() -> None:
    terms = [
        LossTerms(
            trajectory_id=str(index),
            group_id=str(index // 4),
            prompt_length=5,
            tokens=np.arange(5 + length),
            trainable=np.arange(5 + length) >= 5,
            weight=np.ones(5 + length, np.float32),
        )
        for index, length in enumerate([3, 1, 7, 2, 5, 5, 1, 4, 6, 2, 7, 1, 3, 3, 2, 6] * 2)
    ]
    for ranks, together in ((1, False), (2, False), (1, True)):
        packing = Packing(micro_batch_tokens=1, share=True, together=together)
        sizes = partitions(terms, packing, ranks)
        counts = [len(pack(terms, ranks=ranks, micro_batch_tokens=size, share=True, together=together)[0]) for size in sizes]
        assert counts[:3] == [1, 2, 3] and counts[3] > 3 and len(counts) == 4, counts
