"""How the driver has a reward model score sequences: by the ranks of a TrainerGroup with a value head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from rlpost.config.derive import reward_name
from rlpost.config.schema import RunConfig
from rlpost.driver.updates import Packing, forward
from rlpost.rewards.model_reward import CombinedRewards, ModelReward
from rlpost.rewards.runner import RewardRunner
from rlpost.rollout.collector import Score
from rlpost.training.group import TrainerGroup
from rlpost.types import LossTerms


def reward_terms(sequences: Sequence[np.ndarray]) -> list[LossTerms]:
    """What a forward needs of token sequences ``[tokens]`` each to score them at their last token."""
    return [
        LossTerms(
            trajectory_id=f"sequence {index}",
            group_id=str(index),
            prompt_length=0,
            tokens=tokens,
            trainable=np.arange(len(tokens)) == len(tokens) - 1,
            weight=np.zeros(len(tokens), np.float32),
            scored=True,
        )
        for index, tokens in enumerate(sequences)
    ]


async def score_sequences(group: TrainerGroup, sequences: Sequence[np.ndarray], *, micro_batch_tokens: int) -> list[float]:
    """The score of each sequence by the reward model that ``group`` holds (``WorkerSettings.head`` value)."""
    packing = Packing(micro_batch_tokens=micro_batch_tokens, share=False)
    return [float(values[-1]) for values in await forward(group, "values", reward_terms(sequences), packing)]


def make_score(config: RunConfig, functions: RewardRunner | None, models: Sequence[TrainerGroup]) -> Score | None:
    """How trajectories are scored: by functions, by ``models`` (in the order of the configuration), or by both. None: by neither."""
    if not models:
        return functions.score if functions is not None else None
    timeout_s, tokens = config.schedule.phase_timeout_s, config.training.micro_batch_tokens
    named = [reward for reward in config.rewards if reward.model is not None]
    served = [
        ModelReward(
            name=reward_name(reward),
            weight=reward.weight,
            score_batch=partial(score_sequences, model, micro_batch_tokens=tokens),
            max_tokens=tokens,
            timeout_s=timeout_s,
        )
        for reward, model in zip(named, models, strict=True)
    ]
    return CombinedRewards(functions=functions.score if functions is not None else None, models=served).score
