"""The staleness bound, as bookkeeping without any I/O.

With P prompts a step and at most k versions of staleness, step s (0-based, it trains version s) must not contain a token
sampled before version s - k. Two rules give that:

1. A group may be dispatched at version v only while fewer than (v + k + 1) * P groups were dispatched in all. So at most
   (k + 1) * P groups are unfinished or waiting at any time.
2. Step s first takes every group dispatched at version s - k or earlier, waiting for those that are not finished, and fills
   up with later ones in the order in which they finished.

By rule 1 at most (s + 1) * P groups were dispatched at version s - k or earlier, and s * P of them are consumed, so those
that rule 2 insists on always fit into the batch. A token's version is at least its group's dispatch version.
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

    def _due(self) -> list[int]:
        return [index for index, version in self.outstanding.items() if version <= self.version - self.max_staleness]

    def ready(self) -> bool:
        """Whether the next batch can be taken (rule 2)."""
        return len(self.finished) >= self.prompts_per_step and all(index in self.finished for index in self._due())

    def take(self) -> list[Group]:
        """The next batch, ordered by group index. Only when :meth:`ready`; asserts the bound on every token."""
        due = self._due()
        if not self.ready() or len(due) > self.prompts_per_step:
            raise StalenessError(f"take() with {len(self.finished)} finished and {len(due)} due groups")
        chosen = set(due)
        for index in self.finished:  # in the order in which they finished
            if len(chosen) == self.prompts_per_step:
                break
            chosen.add(index)
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
