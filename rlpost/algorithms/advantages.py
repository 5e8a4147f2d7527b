"""Advantages of the samples of one group. A sample without a reward (None) has no gradient and no part in the baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-6
"""Added to the group's standard deviation; rewards are of order one, so it only guards groups with equal rewards."""


def group_mean(rewards: Sequence[float | None]) -> np.ndarray:
    """``r_i - mean(r)`` over the scored samples (Dr.GRPO, Liu et al. 2025, eq. 3). Unscored: 0. ``[samples]``."""
    values = np.array([np.nan if reward is None else reward for reward in rewards], dtype=np.float64)
    scored = ~np.isnan(values)
    if scored.sum() < 2:
        return np.zeros(len(values))
    return np.where(scored, values - values[scored].mean(), 0.0)


def group_std(rewards: Sequence[float | None]) -> np.ndarray:
    """``(r_i - mean(r)) / (std(r) + eps)`` (GRPO, Shao et al. 2024, section 4.1.2); sample standard deviation. ``[samples]``."""
    centred = group_mean(rewards)
    scored = np.array([reward is not None for reward in rewards])
    if scored.sum() < 2:
        return centred
    return centred / (centred[scored].std(ddof=1) + STD_EPSILON)


ADVANTAGES = {"group_mean": group_mean, "group_std": group_std}
