"""Keeps the buffer full: prompts -> groups of episodes -> rewards -> buffer, in the background.

Ends only by :meth:`close` or with an error, and the error reaches whoever waits for a batch at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rlpost.environments.protocol import Environment
from rlpost.rollout.buffer import StalenessBuffer
from rlpost.rollout.episode import EpisodeLimits, Generate, TokenCodec, run_episode
from rlpost.types import DataFailureError, Group, InfrastructureError, Prompt, RewardItem, RewardOutcome, SamplingSettings, Trajectory

ANSWER_CHARACTERS = 80
"""Of an answer that an error shows."""

Score = Callable[[Sequence[RewardItem]], Awaitable[Sequence[RewardOutcome]]]


class Cursor(Protocol):
    """An endless stream of prompt indices."""

    def next(self) -> tuple[int, int]: ...


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Everything a group needs besides its prompt."""

    group_size: int
    seed: int | None
    sampling: SamplingSettings
    limits: EpisodeLimits
    make_environment: Callable[[], Environment]
    generate: Generate
    codec: TokenCodec
    score: Score | None
    greedy_baseline: bool = False
    """Each group has a greedy sample besides."""


def sample_seed(run_seed: int, group: str, sample: int) -> int:
    """A seed for one sample that depends on nothing but the run's seed, the group and the sample: the same after a resume."""
    digest = hashlib.blake2b(f"{run_seed}/{group}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (1 << 31)


async def run_group(plan: RolloutPlan, prompt: Prompt, group_id: str, index: int, on_generated: Callable[[], None] | None = None) -> Group:
    """Play all episodes of one prompt and score them. Raises only infrastructure errors."""
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(
                run_episode(
                    prompt=prompt,
                    group_id=group_id,
                    sample=sample,
                    seed=None if plan.seed is None else sample_seed(plan.seed, group_id, sample),
                    make_environment=plan.make_environment,
                    generate=plan.generate,
                    codec=plan.codec,
                    sampling=plan.sampling if sample < plan.group_size else replace(plan.sampling, temperature=0.0),
                    limits=plan.limits,
                )
            )
            for sample in range(plan.group_size + plan.greedy_baseline)
        ]
    trajectories = [task.result() for task in running]
    if on_generated is not None:
        on_generated()
    if plan.score is not None:
        trajectories = await _scored(plan.score, plan.codec, prompt, trajectories)
    return Group(
        group_id=group_id,
        index=index,
        prompt=prompt,
        trajectories=tuple(trajectories[: plan.group_size]),
        baseline=trajectories[-1] if plan.greedy_baseline else None,
    )


async def _scored(score: Score, codec: TokenCodec, prompt: Prompt, trajectories: list[Trajectory]) -> list[Trajectory]:
    text = prompt.text if prompt.text is not None else codec.decode(prompt.tokens)
    scorable = [t for t in trajectories if t.failure is None]
    items = [
        RewardItem(
            trajectory_id=t.trajectory_id,
            prompt_id=t.prompt_id,
            prompt=text,
            completion=t.completion,
            fields=prompt.fields,
            tokens=t.sampled_tokens,
            truncated=t.truncated,
            trajectory_tokens=t.tokens,
        )
        for t in scorable
    ]
    outcomes = {outcome.trajectory_id: outcome for outcome in await score(items)}
    return [_with_outcome(t, outcomes[t.trajectory_id]) if t.trajectory_id in outcomes else t for t in trajectories]


def _with_outcome(trajectory: Trajectory, outcome: RewardOutcome) -> Trajectory:
    """The environment's reward, if any, and the functions' are added; a failed function leaves no reward at all."""
    value = outcome.value
    if value is not None and trajectory.reward is not None:
        value += trajectory.reward
    return replace(
        trajectory,
        reward=value,
        reward_parts={**trajectory.reward_parts, **outcome.parts},
        reward_metrics={**trajectory.reward_metrics, **outcome.metrics},
        failure=outcome.failure,
    )


class Collector:
    """Dispatches groups as the buffer allows and puts them in when they are scored.

    A group that ``refuses`` says teaches nothing is replaced by one of the next prompt, under the same index; more than
    ``most_refused`` of them for one batch are a failure of the data.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        prompts: Sequence[Prompt],
        cursor: Cursor,
        buffer: StalenessBuffer,
        *,
        refuses: Callable[[Group], bool] | None = None,
        most_refused: int = 0,
    ) -> None:
        self.plan, self.prompts, self.cursor, self.buffer = plan, prompts, cursor, buffer
        self.refuses, self.most_refused = refuses, most_refused
        self.refused: list[Group] = []
        """Groups that were replaced since the last :meth:`take_refused`."""
        self.rows: dict[int, tuple[int, int]] = {}
        """(epoch, prompt index) of each outstanding group, for the checkpoint."""
        self.generated_at = 0.0
        """When the last group's generation ended (perf_counter); what comes after it is waiting for rewards."""
        self.busy_s = 0.0
        """Seconds, not yet taken, in which at least one group was being generated."""
        self._busy_since: float | None = None
        self._generating = 0
        self._changed = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._closing = False

    def resume(self, rows: dict[int, tuple[int, int]]) -> None:
        """Dispatch groups again that a former run had not finished."""
        for index, row in sorted(rows.items()):
            self.buffer.dispatch(index)
            self._start(index, row)

    def fill(self) -> None:
        """Dispatch as many groups as the staleness bound allows now. Called at the start and after every version."""
        while self._failure is None and self.buffer.may_dispatch():
            row = self.cursor.next()
            self._start(self.buffer.dispatch(), row)

    def _start(self, index: int, row: tuple[int, int]) -> None:
        self.rows[index] = row
        task = asyncio.create_task(self._run(index, row))
        self._groups.add(task)
        task.add_done_callback(self._ended)

    async def _run(self, index: int, row: tuple[int, int]) -> None:
        group = await self._play(index, row)
        while self.refuses is not None and self.refuses(group):
            self.refused.append(group)
            if len(self.refused) > self.most_refused:
                raise DataFailureError(self._taught_nothing(group))
            del self.rows[index]  # rows stay in the order of the cursor
            row = self.rows[index] = self.cursor.next()
            self.buffer.dispatch(index)  # its tokens are of the present version
            group = await self._play(index, row)
        self.buffer.put(group)
        self._changed.set()

    def _taught_nothing(self, last: Group) -> str:
        rewards = [trajectory.reward for trajectory in last.trajectories]
        return (
            f"{len(self.refused)} groups for one step taught nothing (algorithm.filter.max_resampled allows {self.most_refused}): their "
            f"rewards are all equal, or their mean is out of bounds; the last, prompt {last.prompt.prompt_id}, has {rewards}, its first "
            f"answer is {last.trajectories[0].completion[:ANSWER_CHARACTERS]!r}. The task is too hard or too easy, or the reward function "
            "gives one value only (python -m rlpost.rewards check); change the data or algorithm.filter"
        )

    def take_refused(self) -> list[Group]:
        """Groups that were replaced since the last call."""
        refused, self.refused = self.refused, []
        return refused

    async def _play(self, index: int, row: tuple[int, int]) -> Group:
        epoch, prompt_index = row
        if self._generating == 0:
            self._busy_since = time.perf_counter()
        self._generating += 1
        counted = True

        def generated() -> None:
            nonlocal counted
            counted = False
            self._generating -= 1
            self.generated_at = time.perf_counter()
            if self._generating == 0 and self._busy_since is not None:
                self.busy_s += self.generated_at - self._busy_since
                self._busy_since = None

        try:
            return await run_group(self.plan, self.prompts[prompt_index], f"{epoch}-{prompt_index}", index, generated)
        finally:
            if counted:
                generated()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        error: BaseException | None
        if not task.cancelled():
            error = task.exception()
        else:
            # Nobody but close() cancels a group; any other end would leave take() waiting for it.
            error = None if self._closing else InfrastructureError("a group's rollout was cancelled before it was finished")
        if error is not None and self._failure is None:
            self._failure = error
            self._changed.set()

    def take_busy_s(self) -> float:
        """Seconds since the last call in which at least one group was being generated."""
        now = time.perf_counter()
        if self._busy_since is not None:
            self.busy_s += now - self._busy_since
            self._busy_since = now
        seconds, self.busy_s = self.busy_s, 0.0
        return seconds

    async def take(self, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> list[Group] | None:
        """The next batch. None as soon as ``interrupted()`` holds (it is asked whenever something changed, and each second).

        Raises what ended a group, or InfrastructureError after ``timeout_s`` naming the groups that are missing.
        """
        deadline = time.perf_counter() + timeout_s
        while True:
            if self._failure is not None:
                raise first_error(self._failure)
            if self.buffer.ready():
                break
            if interrupted():
                return None
            if time.perf_counter() > deadline:
                missing = sorted(set(self.buffer.outstanding) - set(self.buffer.finished))
                raise InfrastructureError(
                    f"no full batch within {timeout_s:.0f} s (schedule.rollout_timeout_s): {len(self.buffer.finished)} groups finished, "
                    f"waiting for groups {missing[:8]}{' ...' if len(missing) > 8 else ''}"
                )
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(1.0, max(0.01, deadline - time.perf_counter())))
            except TimeoutError:
                continue
        # By the cursor, not by index: which index a replacement has depends on who finished first.
        order = {index: place for place, index in enumerate(self.rows)}
        batch = sorted(self.buffer.take(), key=lambda group: order[group.index])
        for group in batch:
            self.rows.pop(group.index)
        return batch

    async def close(self) -> None:
        """Cancel what is running."""
        self._closing = True
        groups: list[Any] = list(self._groups)
        for task in groups:
            task.cancel()
        await asyncio.gather(*groups, return_exceptions=True)


def first_error(error: BaseException) -> BaseException:
    """The error inside an ExceptionGroup that a task group made of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
