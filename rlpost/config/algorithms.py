"""What an algorithm's name stands for: the values of ``algorithm.*`` that are ``auto`` or null in the configuration.

docs/algorithms.md gives the sources, and says where a default is not what an algorithm's authors used. Nothing that a user set is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlpost.config.schema import AlgorithmConfig

_GRPO: dict[str, Any] = {
    "advantage": "group_std", "policy_loss": "policy_clip", "loss_aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.2,
}  # fmt: skip

ONLINE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _GRPO,
    "dr_grpo": {**_GRPO, "advantage": "group_mean", "loss_aggregation": "constant"},
    "dapo": {**_GRPO, "clip_high": 0.28},
    "gspo": {**_GRPO, "policy_loss": "gspo", "loss_aggregation": "sequence_mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "gmpo": {**_GRPO, "policy_loss": "gmpo", "loss_aggregation": "sequence_mean", "clip_low": 0.4, "clip_high": 0.4},
    "cispo": {**_GRPO, "policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "sapo": {**_GRPO, "policy_loss": "sapo", "loss_aggregation": "sequence_mean"},
    "rloo": {**_GRPO, "advantage": "leave_one_out", "policy_loss": "reinforce", "loss_aggregation": "constant"},
    "reinforce_pp": {**_GRPO, "advantage": "batch"},
    "reinforce_pp_baseline": {**_GRPO, "advantage": "batch_baseline"},
    "remax": {**_GRPO, "advantage": "greedy", "policy_loss": "reinforce"},
    "maxrl": {**_GRPO, "advantage": "maxrl"},
    "ppo": {**_GRPO, "advantage": "gae"},
    "distillation": {**_GRPO, "advantage": "teacher"},
}

LOSS_OPTIONS: Mapping[str, tuple[str, ...]] = {"sapo": ("temperature_positive", "temperature_negative")}
"""What built-in policy losses read of ``algorithm.options``; one of the user's own gets all of them."""

OFFLINE_DEFAULTS: Mapping[str, Any] = {"loss_aggregation": "token_mean"}

OFFLINE = ("sft", "dpo", "simpo", "orpo", "kto", "reward_model")

PAIRED = ("dpo", "simpo", "orpo", "reward_model")
"""Both answers of a row share a micro-batch."""

WITH_REFERENCE = ("dpo", "kto")


def is_offline(config: AlgorithmConfig) -> bool:
    """Whether the algorithm learns from a data set, without engines."""
    return config.kind == "offline" or (config.kind == "auto" and config.name in OFFLINE)


def reads_reference(config: AlgorithmConfig) -> bool:
    """Whether an offline algorithm's loss reads reference logprobs; a class of the user's own may."""
    return config.name in WITH_REFERENCE or ":" in config.name


def with_defaults(config: AlgorithmConfig) -> AlgorithmConfig:
    """A copy in which nothing is auto or null that the algorithm's name decides. An algorithm by import path gets GRPO's."""
    defaults = OFFLINE_DEFAULTS if is_offline(config) else ONLINE_DEFAULTS.get(config.name, _GRPO)
    found = {name: value for name, value in defaults.items() if getattr(config, name) in ("auto", None)}
    return replace(config, **found)
