"""Settings of LoRA that cannot work are refused with their reason and a fix, before Ray starts; the preset of it is clean."""

from __future__ import annotations

from typing import Any

import pytest

from rlpost.config.checks import check
from rlpost.config.load import load_config
from rlpost.config.schema import LoraConfig, RewardConfig, RunConfig
from rlpost.types import ConfigError


def lora_config(**values: Any) -> RunConfig:
    """A config that trains adapters; ``section__name=value`` changes it."""
    config = RunConfig()
    config.model.path, config.data.train, config.schedule.steps = "embedded:tiny", "embedded:sort5", 10
    config.rewards = [RewardConfig(function="exact_match")]
    config.placement.device = "cpu"
    config.training.lora.rank = 8
    for key, value in values.items():
        *sections, name = key.split("__")
        target: Any = config
        for section in sections:
            target = getattr(target, section)
        setattr(target, name, value)
    return config


REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "a choice of trained parameters beside the adapters",
        {"training__trainable": "layers"},
        ["training.trainable=layers with training.lora.rank=8", "training.lora.targets", "training.trainable=all"],
    ),
    (
        "deltas of weights that never change",
        {"weights__transport": "delta"},
        ["weights.transport=delta with training.lora.sync=adapter", "set another transport", "training.lora.sync=merged"],
    ),
    (
        "a rank that vLLM has no buffers for",
        {"training__lora__rank": 513},
        ["training.lora.rank=513", "at most 512", "training.lora.sync=merged"],
    ),
    ("a negative rank", {"training__lora__rank": -1}, ["training.lora.rank is -1", "0 or more"]),
    ("adapters that are multiplied by 0", {"training__lora__alpha": 0.0}, ["training.lora.alpha is 0.0", "more than 0"]),
    (
        "targets that are no pattern",
        {"training__lora__targets": "(q_proj"},
        ["training.lora.targets='(q_proj'", "is not a regular expression"],
    ),
    ("another rank for the engines", {"engine__extra": {"max_lora_rank": 64}}, ["engine.extra.max_lora_rank", "use training.lora.rank"]),
    ("adapters of the engines' own", {"engine__extra": {"enable_lora": True}}, ["engine.extra.enable_lora", "use training.lora.rank"]),
    ("room for other adapters", {"engine__extra": {"max_loras": 2}}, ["engine.extra.max_loras", "remove it"]),
]


@pytest.mark.parametrize(("values", "parts"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_work_is_refused_with_its_reason_and_a_fix(values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check(lora_config(**values))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"training__lora__rank": 512},
        {"training__lora__rank": 3},
        {"training__lora__sync": "merged", "training__lora__rank": 513},
        {"training__lora__sync": "merged", "weights__transport": "delta"},
        {"weights__transport": "disk"},
        {"weights__transport": "ipc"},
        {"algorithm__kl_coefficient": 0.1, "algorithm__reference": "adapters_off"},
    ],
    ids=str,
)
def test_what_works_passes_without_a_warning(values: dict[str, Any]) -> None:
    assert check(lora_config(**values)) == []


def test_settings_of_adapters_that_are_off_are_not_judged() -> None:
    """``training.lora.rank=0`` is how a config that sets the rest is switched back to training the model."""
    config = lora_config(training__lora__rank=0, training__trainable="layers", weights__transport="delta")
    assert check(config) == []


def test_the_preset_is_the_embedded_default_with_adapters() -> None:
    config = load_config(["config=grpo_tiny_lora"]).config
    check(config)
    assert config.training.lora == LoraConfig(rank=8)
    base = load_config(["config=grpo_tiny"]).config
    config.training.lora, config.training.optimizer.lr, config.name = base.training.lora, base.training.optimizer.lr, base.name
    assert config == base
