"""Rewards before they become advantages: bounds and penalties of length. Pure numpy."""

from __future__ import annotations

from rlpost.algorithms.protocol import RunFacts
from rlpost.config.schema import ShapingConfig
from rlpost.types import Trajectory


def shaped_reward(trajectory: Trajectory, config: ShapingConfig, facts: RunFacts) -> float:
    """The trajectory's reward after clipping, less the penalties of its length."""
    return clipped_reward(trajectory, config) - length_penalty(trajectory.sampled_tokens, config, facts.max_new_tokens)


def clipped_reward(trajectory: Trajectory, config: ShapingConfig) -> float:
    """The trajectory's reward within the bounds: what says whether it succeeded, whatever its length."""
    assert trajectory.reward is not None, "only scored trajectories are shaped"
    reward = trajectory.reward
    if config.clip_low is not None:
        reward = max(reward, config.clip_low)
    if config.clip_high is not None:
        reward = min(reward, config.clip_high)
    return reward


def length_penalty(sampled_tokens: int, config: ShapingConfig, max_new_tokens: int) -> float:
    """What a sample of that many tokens loses. Tokens of tools do not count.

    Soft overlong punishment (DAPO, Yu et al. 2025, eq. 13): 0 up to ``max_new_tokens - overlong_buffer``, then growing in
    proportion to ``overlong_penalty`` at ``max_new_tokens``.
    """
    share = min(1.0, sampled_tokens / max_new_tokens)
    penalty = config.length_penalty * share
    if config.overlong_buffer:
        over = sampled_tokens - (max_new_tokens - config.overlong_buffer)
        penalty += config.overlong_penalty * min(1.0, max(0, over) / config.overlong_buffer)
    return penalty
