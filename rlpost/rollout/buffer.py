"""The staleness bound, as bookkeeping without any I/O.

With P prompts a step and at most k versions of staleness, step s (0-based, it trains version s) must not contain a token
sampled before version s - k. Two rules give that:

1. A group may be dispatched at version v only while fewer than (v + k + 1) * P groups were dispatched in all. So at most
   (k + 1) * P groups are unfinished or waiting at any time.
2. Step s takes P finished groups, and for each j from 0 to k leaves at most j * P of those dispatched at version s - k + j or
   earlier, for these can only be taken by it and the next j steps. Within that, groups go in the order in which they finished.

With j = 0 rule 2 leaves none at version s - k or earlier, so no token is too old: its version is at least its group's dispatch
version. And P picks are always enough: for j < k, step s - 1 left at most (j + 1) * P (its rule 2 with j + 1), and for j = k
rule 1 allowed (s + k + 1) * P groups, of which s * P are taken; the sets are nested, so picks for one j count for the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpost.types import Group


class StalenessError(AssertionError):
    """A batch broke the staleness bound: a bug, never a user's fault."""


@dataclass
class StalenessBuffer:
    """Counts dispatched groups, holds finished ones. ``version`` is the committed policy version."""

    prompts_per_step: int
    max_staleness: int
    version: int = 0
    dispatched: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    """Dispatched and not consumed: group index -> version at dispatch."""
    finished: dict[int, Group] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Most groups that can be unfinished or waiting."""
        return (self.max_staleness + 1) * self.prompts_per_step

    def may_dispatch(self) -> bool:
        """Rule 1."""
        return self.dispatched < (self.version + self.max_staleness + 1) * self.prompts_per_step

    def dispatch(self, index: int | None = None) -> int:
        """Count one more group (or, after a resume, an earlier one again) and return its index."""
        if index is None:
            index = self.dispatched
            self.dispatched += 1
        self.outstanding[index] = self.version
        return index

    def put(self, group: Group) -> None:
        """A dispatched group is finished. Each may come exactly once."""
        if group.index not in self.outstanding or group.index in self.finished:
            raise StalenessError(f"group {group.index} was put twice or never dispatched")
        self.finished[group.index] = group

    def _choose(self) -> list[int] | None:
        """The groups of the next batch by rule 2; None while too few of those that it needs are finished."""
        chosen: dict[int, None] = {}
        for later in range(self.max_staleness + 1):
            limit = self.version - self.max_staleness + later
            needed = sum(version <= limit for version in self.outstanding.values()) - later * self.prompts_per_step
            if needed > self.prompts_per_step:
                raise StalenessError(
                    f"step {self.version} would have to take {needed} groups of version {limit} or earlier, more than prompts_per_step="
                    f"{self.prompts_per_step}, to keep max_staleness={self.max_staleness}"
                )
            for index in self.finished:  # in the order in which they finished
                if len(chosen) >= needed:
                    break
                if self.outstanding[index] <= limit:
                    chosen[index] = None
            if len(chosen) < needed:
                return None
        for index in self.finished:
            if len(chosen) < self.prompts_per_step:
                chosen[index] = None
        return list(chosen) if len(chosen) == self.prompts_per_step else None

    def ready(self) -> bool:
        """Whether the next batch can be taken (rule 2)."""
        return self._choose() is not None

    def take(self) -> list[Group]:
        """The next batch, ordered by group index. Only when :meth:`ready`; asserts the bound on every token."""
        chosen = self._choose()
        if chosen is None:
            raise StalenessError(f"take() before ready(): {len(self.finished)} of {len(self.outstanding)} groups are finished")
        batch = [self.finished.pop(index) for index in sorted(chosen)]
        for group in batch:
            del self.outstanding[group.index]
            for trajectory in group.trajectories:
                staleness = self.version - trajectory.oldest_version
                if trajectory.sampled_tokens and not 0 <= staleness <= self.max_staleness:
                    raise StalenessError(
                        f"{trajectory.trajectory_id} has a token of version {trajectory.oldest_version}, trained at {self.version} "
                        f"with max_staleness={self.max_staleness}"
                    )
        return batch
