"""Evaluation on held-out prompts, with sampling settings of its own."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from rlpost.rollout.collector import RolloutPlan, first_error, run_group
from rlpost.types import Group, InfrastructureError, Prompt


async def evaluate(
    plan: RolloutPlan,
    prompts: Sequence[Prompt],
    *,
    step: int,
    timeout_s: float,
    lost: asyncio.Event,
    repair: Callable[[], Awaitable[None]],
) -> tuple[dict[str, float], list[Group]]:
    """Play and score every prompt; returns the ``evaluate/*`` metrics and the groups. The same step always draws the same samples.

    A trajectory that failed is not in the mean reward but counted; when none could be scored, the mean is NaN.
    ``repair`` is called whenever ``lost`` is set (an engine is to be replaced), for episodes wait for it. Raises what ended an
    episode, or InfrastructureError after ``timeout_s``.
    """

    async def everything() -> list[Group]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(run_group(plan, prompt, f"evaluate-{step}-{index}", index)) for index, prompt in enumerate(prompts)
            ]
        return [task.result() for task in running]

    playing = asyncio.create_task(everything())
    deadline = time.perf_counter() + timeout_s
    try:
        while not await _ended_or_lost(playing, lost, deadline):
            if not lost.is_set():
                raise InfrastructureError(
                    f"the evaluation at step {step} did not end within {timeout_s:.0f} s (schedule.rollout_timeout_s)"
                )
            await repair()
        groups = playing.result()
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    finally:
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    failed = sum(t.failure is not None and t.failure.is_fault for t in trajectories)
    return {
        "evaluate/reward": sum(rewards) / len(rewards) if rewards else math.nan,
        "evaluate/failed": failed / max(1, len(trajectories)),
        "evaluate/truncated_fraction": sum(t.truncated for t in trajectories) / max(1, len(trajectories)),
    }, groups


async def _ended_or_lost(playing: asyncio.Task[list[Group]], lost: asyncio.Event, deadline: float) -> bool:
    """Wait for the end of ``playing``, for ``lost`` or for the deadline; whether it was the end."""
    losing = asyncio.create_task(lost.wait())
    await asyncio.wait({playing, losing}, timeout=max(0.0, deadline - time.perf_counter()), return_when=asyncio.FIRST_COMPLETED)
    losing.cancel()
    return playing.done()
