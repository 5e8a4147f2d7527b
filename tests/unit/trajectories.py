"""Small trajectories and groups for the unit tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpost.types import Failure, Group, Prompt, Trajectory


def trajectory(
    trajectory_id: str = "g.0",
    *,
    spans: Sequence[tuple[bool, int]] = ((False, 2), (True, 3)),
    reward: float | None = 1.0,
    version: int = 0,
    token: int | None = None,
    logprob: float = -1.0,
    failure: Failure | None = None,
) -> Trajectory:
    """``spans`` are (sampled by the engine?, tokens) in order; every token is ``token``, or they count up from 1."""
    trainable = np.concatenate([np.full(length, sampled) for sampled, length in spans]).astype(bool)
    length = len(trainable)
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=trajectory_id.split(".")[0],
        prompt_id="p",
        tokens=np.full(length, token, np.int32) if token is not None else np.arange(1, length + 1, dtype=np.int32),
        trainable=trainable,
        logprobs=np.where(trainable, logprob, np.nan).astype(np.float32),
        versions=np.where(trainable, version, -1).astype(np.int32),
        prompt_length=spans[0][1],
        reward=reward,
        failure=failure,
    )


def group(
    index: int, rewards: Sequence[float | None] = (1.0,), *, version: int = 0, failures: Sequence[Failure | None] | None = None
) -> Group:
    """One trajectory a reward; all sampled by ``version``."""
    kinds = failures or [None] * len(rewards)
    return Group(
        group_id=f"g{index}",
        index=index,
        prompt=Prompt(prompt_id="p", text="x"),
        trajectories=tuple(
            trajectory(f"g{index}.{sample}", reward=reward, version=version, failure=failure)
            for sample, (reward, failure) in enumerate(zip(rewards, kinds, strict=True))
        ),
    )
