"""What a sample or a token is worth. Pure numpy, float64.

Of a group: one number a sample; a sample without a reward (None) has no gradient and no part in the baseline. Of a trajectory: one number a
sampled token; the caller gives arrays of sampled tokens only, so tokens of tools and prompts cannot discount, bootstrap or leak.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpost.types import RlpostError

STD_EPSILON = 1e-6
"""Added to a standard deviation; rewards are of order one, so it only guards groups with equal rewards."""


def _scored(rewards: Sequence[float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards ``[samples]`` with NaN where unscored, and which are scored."""
    values = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    return values, ~np.isnan(values)


def group_mean(rewards: Sequence[float | None]) -> np.ndarray:
    """``r_i - mean(r)`` over the scored samples (Dr.GRPO, Liu et al. 2025, eq. 3). Unscored: 0. ``[samples]``."""
    values, scored = _scored(rewards)
    if scored.sum() < 2:
        return np.zeros(len(values))
    return np.where(scored, values - values[scored].mean(), 0.0)


def group_std(rewards: Sequence[float | None]) -> np.ndarray:
    """``(r_i - mean(r)) / (std(r) + eps)`` (GRPO, Shao et al. 2024, section 4.1.2); sample standard deviation. ``[samples]``."""
    centred, scored = group_mean(rewards), _scored(rewards)[1]
    if scored.sum() < 2:
        return centred
    return centred / (centred[scored].std(ddof=1) + STD_EPSILON)


def leave_one_out(rewards: Sequence[float | None]) -> np.ndarray:
    """``r_i - mean of the other scored rewards`` (RLOO, Kool et al. 2019; Ahmadian et al. 2024). One sample: 0. ``[samples]``."""
    count = int(_scored(rewards)[1].sum())
    return group_mean(rewards) * (count / (count - 1) if count > 1 else 0.0)


def maxrl(rewards: Sequence[float | None]) -> np.ndarray:
    """``(r_i - mean(r)) / mean(r)``, 0 where nothing succeeded (MaxRL, Tajwar et al. 2026). ``[samples]``.

    Its mean gradient is that of a truncated ``log p(success)``. Raises RlpostError for a reward below 0, which counts no successes.
    """
    values, scored = _scored(rewards)
    if scored.any() and values[scored].min() < 0:
        raise RlpostError(
            f"algorithm.advantage=maxrl divides by a group's mean reward, so rewards must be at least 0; found {values[scored].min():g}. "
            "Take another algorithm.advantage, or leave out what makes rewards negative (penalties under algorithm.shaping, reward weights)"
        )
    mean = values[scored].mean() if scored.any() else 0.0
    return group_mean(rewards) / mean if mean > 0 else np.zeros(len(values))


def greedy(rewards: Sequence[float | None], baseline: float) -> np.ndarray:
    """``r_i - baseline``, the reward of the prompt's greedy sample (ReMax, Li et al. 2023). Unscored: 0. ``[samples]``."""
    values, scored = _scored(rewards)
    return np.where(scored, values - baseline, 0.0)


ADVANTAGES = {"group_mean": group_mean, "group_std": group_std, "leave_one_out": leave_one_out, "maxrl": maxrl}
"""Those that need nothing but the rewards of a group."""


def discounted_returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """``R_t = r_t + gamma R_{t+1}`` over the sampled tokens of one trajectory ``[n]``."""
    returns, later = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        later = returns[t] = rewards[t] + gamma * later
    return returns


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimates (Schulman et al. 2016, eq. 16) and the returns ``A + V`` that the critic should have said ``[n]``.

    Over the sampled tokens of one trajectory: after the last one there is no value, and a step from one sampled token to the next is one
    step, whatever a tool said in between.
    """
    following = np.append(values[1:], 0.0) if len(values) else values
    deltas = rewards + gamma * following - values
    advantages = discounted_returns(deltas, gamma * lam)
    return advantages, advantages + values


def normalise(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Mean 0 and standard deviation 1 over all entries of all arrays; 0 where all are equal. Each keeps its shape."""
    if not sum(len(one) for one in values):
        return list(values)
    together = np.concatenate([np.asarray(one, np.float64) for one in values])
    mean, scale = together.mean(), together.std() + STD_EPSILON
    return [(one - mean) / scale for one in values]
