"""From the ``rewards`` section of the configuration to checked functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpost.config.derive import reward_name
from rlpost.plugins import resolve
from rlpost.rewards.signature import BoundReward, check_signature
from rlpost.types import ConfigError

if TYPE_CHECKING:
    from rlpost.config.schema import RewardConfig

ENTRY_POINT_GROUP = "rlpost.rewards"

CATALOGUE: Mapping[str, str] = {
    "exact_match": "rlpost.rewards.builtin:exact_match",
    "numeric_match": "rlpost.rewards.builtin:numeric_match",
    "regex_match": "rlpost.rewards.builtin:regex_match",
    "format": "rlpost.rewards.builtin:tag_format",
    "length_penalty": "rlpost.rewards.builtin:length_penalty",
    "math_verify": "rlpost.rewards.mathematics:math_verify",
}
"""Built-in rewards: name in the configuration, and where the function is."""


def resolve_reward(spec: str) -> Any:
    """The object that ``spec`` names (see rlpost.plugins); raises ConfigError. Its signature is not checked here."""
    return resolve(spec, kind="reward", group=ENTRY_POINT_GROUP, catalogue=CATALOGUE)


def reward_names(configs: Sequence[RewardConfig]) -> list[str]:
    """Names in order. Raises ConfigError when two rewards have the same one, or one is not exactly one of a function and a model."""
    for position, config in enumerate(configs):
        _check_kind(config, f"rewards[{position}]")
    names = [reward_name(config) for config in configs]
    for position, name in enumerate(names):
        if name in names[:position]:
            first = names.index(name)
            raise ConfigError(f"rewards[{first}] and rewards[{position}] are both named {name!r}; set rewards[{position}].name.")
    return names


def _check_kind(config: RewardConfig, where: str) -> None:
    if (config.function is None) == (config.model is None):
        found = "neither function nor model" if config.function is None else f"function={config.function!r} and model={config.model!r}"
        raise ConfigError(
            f"{where} has {found}; give exactly one: function for a Python function, or model for the directory of a reward model."
        )
    if config.model is not None and config.options:
        raise ConfigError(f"{where}: options {config.options} are given to functions only, and {config.model!r} is a model; remove them.")


def load_rewards(configs: Sequence[RewardConfig], field_names: Collection[str] | None = None) -> list[BoundReward]:
    """Import, check and bind every configured function, in this process, in order; models are not loaded. Raises ConfigError.

    ``field_names`` are the columns of the data besides the prompt (``Prompt.fields``); None skips what needs them.
    """
    names = reward_names(configs)
    rewards = []
    for position, (config, name) in enumerate(zip(configs, names, strict=True)):
        if config.function is None:
            continue
        try:
            rewards.append(check_signature(resolve_reward(config.function), field_names, config.options, name))
        except ConfigError as error:
            raise ConfigError(f"rewards[{position}]: {error}") from error
    return rewards
