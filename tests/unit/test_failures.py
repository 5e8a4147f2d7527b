"""The failure budget: failed trajectories are counted, too many stop the run with words that say what failed."""

from __future__ import annotations

from typing import Any

import pytest
from trajectories import group

from rlpost.driver.failures import MOST_EMPTY_STEPS, WINDOW_STEPS, FailureBudget
from rlpost.types import DataFailureError, Failure, Group


def failure(kind: Any = "raised", where: str = "my_reward") -> Failure:
    return Failure(kind=kind, where=where, message="KeyError: 'answer'", traceback="Traceback:\n  line 3")


def step(failed: int, of: int = 10, kind: Any = "raised") -> list[Group]:
    failures = [failure(kind) if i < failed else None for i in range(of)]
    return [group(0, [None if f else 1.0 for f in failures], failures=failures)]


def test_the_budget_is_a_share_of_the_last_steps_and_not_of_one() -> None:
    """Two of ten failed once in a run of clean steps: 2 of 100."""
    budget = FailureBudget(0.1)
    for _ in range(9):
        budget.check(step(0), trained=10)
    budget.check(step(2), trained=8)


def test_more_than_the_budget_stops_the_run_and_says_what_where_and_how() -> None:
    budget = FailureBudget(0.1)
    budget.check(step(1), trained=9)
    with pytest.raises(DataFailureError) as caught:
        budget.check(step(2), trained=8)
    message = str(caught.value)
    for words in ("3 of the last 20", "reward_runner.max_failed_fraction=0.1", "2 x raised in my_reward", "KeyError: 'answer'", "line 3"):
        assert words in message


def test_exactly_the_budget_is_allowed() -> None:
    budget = FailureBudget(0.1)
    for _ in range(50):
        budget.check(step(1), trained=9)


def test_old_failures_leave_the_window() -> None:
    budget = FailureBudget(0.5)
    budget.check(step(5), trained=5)
    for _ in range(WINDOW_STEPS):
        budget.check(step(0), trained=10)
    for _ in range(9):
        budget.check(step(10), trained=1)
    budget.check(step(10), trained=1)
    with pytest.raises(DataFailureError, match="110 of the last 200"):
        budget.check(step(10), trained=1)


def test_a_reward_of_none_is_no_failure() -> None:
    budget = FailureBudget(0.0)
    for _ in range(30):
        budget.check(step(9, kind="not_scorable"), trained=1)


@pytest.mark.parametrize("kind", ["raised", "timeout", "not_a_number", "wrong_type", "worker_died", "environment"])
def test_every_other_kind_is_one(kind: Any) -> None:
    with pytest.raises(DataFailureError, match=f"1 x {kind}"):
        FailureBudget(0.0).check(step(1, kind=kind), trained=9)


def test_a_filter_that_rejects_everything_stops_the_run_loudly() -> None:
    """All groups without variance and skipped, say: nothing fails, and nothing is ever trained."""
    budget = FailureBudget(0.1)
    for _ in range(MOST_EMPTY_STEPS - 1):
        budget.check(step(0), trained=0)
    with pytest.raises(DataFailureError, match=f"{MOST_EMPTY_STEPS} steps in a row"):
        budget.check(step(0), trained=0)


def test_empty_steps_are_counted_in_a_row() -> None:
    budget = FailureBudget(0.1)
    for _ in range(3):
        for _ in range(MOST_EMPTY_STEPS - 1):
            budget.check(step(0), trained=0)
        budget.check(step(0), trained=1)
