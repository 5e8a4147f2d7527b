"""GRPO: group-relative advantages, clipped importance ratio, optional KL in the loss (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpost.algorithms.advantages import ADVANTAGES
from rlpost.config.schema import AlgorithmConfig
from rlpost.types import Group, LossComponent, Trajectory


class Grpo:
    """Two hooks: what each sample of a group is worth, and what the loss is made of."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    def advantages(self, group: Group) -> np.ndarray:
        """Advantage of each trajectory of the group ``[samples]``; 0 for those without a reward."""
        return ADVANTAGES[self.config.advantage]([trajectory.reward for trajectory in group.trajectories])

    def keep(self, group: Group) -> Sequence[Trajectory]:
        """The trajectories that enter the loss and its denominators: scored ones that sampled something."""
        rewards = {trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None}
        if self.config.skip_zero_variance and len(rewards) < 2:
            return ()
        return [t for t in group.trajectories if t.reward is not None and t.sampled_tokens]

    def components(self) -> list[LossComponent]:
        """The summands of the loss, the same for every step."""
        config = self.config
        parts = [LossComponent(term="policy_clip", parameters={"clip_low": config.clip_low, "clip_high": config.clip_high})]
        if config.kl_coefficient:
            parts.append(LossComponent(term="kl", coefficient=config.kl_coefficient, parameters={"estimator": config.kl_estimator}))
        if config.entropy_coefficient:
            parts.append(LossComponent(term="entropy", coefficient=config.entropy_coefficient))
        return parts
