"""The failure budget: data failures are counted, and too many of them stop the run loudly."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from rlpost.types import DataFailureError, Group

WINDOW_STEPS = 20
"""The budget is a share of the trajectories of this many last steps."""

MOST_EMPTY_STEPS = 5
"""Steps in a row in which nothing could be trained on, after which the run stops."""


class FailureBudget:
    """Counts failed trajectories over the last steps. A reward function that answers None is no failure."""

    def __init__(self, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        self._steps: deque[tuple[int, int]] = deque(maxlen=WINDOW_STEPS)
        self._empty = 0

    def check(self, groups: Sequence[Group], trained: int) -> None:
        """Count one step, of which ``trained`` trajectories enter the loss. Raises DataFailureError when the budget is spent."""
        trajectories = [t for group in groups for t in group.trajectories]
        failures = [t.failure for t in trajectories if t.failure is not None and t.failure.is_fault]
        self._steps.append((len(failures), len(trajectories)))
        failed, total = (sum(column) for column in zip(*self._steps, strict=True))
        if total and failed / total > self.max_fraction and failures:
            kinds = Counter((f.kind, f.where) for f in failures)
            most = ", ".join(f"{count} x {kind} in {where}" for (kind, where), count in kinds.most_common(3))
            example = failures[0]
            raise DataFailureError(
                f"{failed} of the last {total} trajectories failed, more than reward_runner.max_failed_fraction={self.max_fraction:g} "
                f"allows; in this step: {most}; for example: {example.message}\n{example.traceback}".rstrip()
            )
        self._empty = 0 if trained else self._empty + 1
        if self._empty >= MOST_EMPTY_STEPS:
            raise DataFailureError(
                f"nothing could be trained on in {self._empty} steps in a row: every trajectory was unscorable or filtered out; "
                "look at the rollouts of these steps, and at the reward functions' answers"
            )
