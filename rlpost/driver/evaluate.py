"""Evaluation on held-out prompts, with sampling settings of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from rlpost.rollout.collector import RolloutPlan, first_error, run_group
from rlpost.types import Group, InfrastructureError, Prompt


async def evaluate(plan: RolloutPlan, prompts: Sequence[Prompt], *, step: int, timeout_s: float) -> tuple[dict[str, float], list[Group]]:
    """Play and score every prompt. The same step always draws the same samples."""

    async def everything() -> list[Group]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(run_group(plan, prompt, f"evaluate-{step}-{index}", index)) for index, prompt in enumerate(prompts)
            ]
        return [task.result() for task in running]

    try:
        groups = await asyncio.wait_for(everything(), timeout_s)
    except TimeoutError:
        raise InfrastructureError(
            f"the evaluation at step {step} did not end within {timeout_s:.0f} s (schedule.rollout_timeout_s)"
        ) from None
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return {
        "evaluate/reward": sum(rewards) / len(rewards) if rewards else math.nan,
        "evaluate/truncated_fraction": sum(t.truncated for t in trajectories) / max(1, len(trajectories)),
    }, groups
