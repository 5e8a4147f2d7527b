"""Checks before anything starts: every other model reads the policy's tokens, and somebody answers what an algorithm asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_config_checks import clean_config

from rlpost.algorithms.online import PolicyGradient
from rlpost.config.checks import check
from rlpost.config.schema import RewardConfig, RunConfig
from rlpost.driver.preflight import check_forwards, check_tokenizers, preflight, run_facts
from rlpost.models.embedded import local_model
from rlpost.types import ConfigError

VOCABULARY = {"a": 0, "b": 1, "c": 2}

ROLES: dict[str, dict[str, Any]] = {
    "algorithm.reference_path": {"algorithm__kl_coefficient": 0.1},
    "algorithm.critic.path": {"algorithm__name": "ppo"},
    "rewards.1.model": {},
}
"""The keys of the models beside the policy, and what makes a run read them."""


def model(directory: Path, vocabulary: dict[str, int]) -> str:
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return str(directory)


def with_model(key: str, path: str, **values: Any) -> RunConfig:
    """A run whose model ``key`` is ``path``."""
    if key.startswith("rewards"):
        return clean_config(rewards=[RewardConfig(function="exact_match"), RewardConfig(model=path)], **values)
    return clean_config(**ROLES[key], **{key.replace(".", "__"): path}, **values)


@pytest.mark.parametrize("key", ROLES)
@pytest.mark.parametrize("hub", [False, True])
def test_a_model_with_another_tokenizer_is_refused_whatever_its_role(tmp_path: Path, key: str, hub: bool) -> None:
    """It gets the policy's token numbers, and would read another text in them: a KL, a value or a score of nothing."""
    policy = model(tmp_path / "policy", VOCABULARY)
    check_tokenizers(with_model(key, model(tmp_path / "same", VOCABULARY), model__path=policy), hub=hub)
    other = model(tmp_path / "other", {"a": 0, "c": 1, "b": 2})
    with pytest.raises(ConfigError, match=rf"^{key}: .*other is not that of the policy .*2 of 3 tokens differ"):
        check_tokenizers(with_model(key, other, model__path=policy), hub=hub)


@pytest.mark.parametrize("key", ROLES)
def test_a_dry_run_compares_with_an_embedded_model_on_either_side(tmp_path: Path, key: str) -> None:
    other = model(tmp_path / "other", VOCABULARY)
    local_model("embedded:tiny-sort5")  # a dry run looks only at what is on this machine
    with pytest.raises(ConfigError, match=rf"^{key}: the tokenizer of .*other is not that of the policy .*tiny-sort5"):
        preflight(with_model(key, other, model__path="embedded:tiny-sort5"))
    with pytest.raises(ConfigError, match=rf"^{key}: the tokenizer of .*tiny-sort5.* is not that of the policy .*other"):
        check_tokenizers(with_model(key, "embedded:tiny-sort5", model__path=other), hub=False)


def test_the_reference_of_an_offline_run_is_compared_and_its_reward_models_are_not_read(tmp_path: Path) -> None:
    policy, other = model(tmp_path / "policy", VOCABULARY), model(tmp_path / "other", {"b": 0})
    offline: dict[str, Any] = {"algorithm__name": "dpo", "model__path": policy}
    check_tokenizers(with_model("rewards.1.model", other, **offline), hub=False)
    with pytest.raises(ConfigError, match=r"^algorithm\.reference_path: "):
        check_tokenizers(clean_config(**offline, algorithm__reference_path=other), hub=False)


@pytest.mark.parametrize("key", ROLES)
def test_a_missing_directory_is_named_with_its_key_before_ray_starts(tmp_path: Path, key: str) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=rf"{key}.*{missing}"):
        check(with_model(key, missing))
    check_tokenizers(with_model(key, missing, model__path=model(tmp_path / "policy", VOCABULARY)), hub=False)


# ---- what a class of the user's own asks for -----------------------------------------------------------------------


class Asking(PolicyGradient):
    """Reads what no setting says that it does."""

    asks = frozenset[str]()

    @property
    def forwards(self) -> frozenset[str]:
        return self.asks


@pytest.mark.parametrize(
    ("forward", "message", "mended"),
    [
        ("values", "reads values, and there is no critic: set algorithm.advantage=gae", {"algorithm__advantage": "gae"}),
        ("reference", "there is no reference: set algorithm.kl_coefficient above 0", {"algorithm__kl_coefficient": 0.1}),
    ],
)
def test_a_class_of_ones_own_that_names_a_forward_nobody_answers_is_refused(forward: str, message: str, mended: dict[str, Any]) -> None:
    """Values would be None in its advantages, after the first rollouts."""
    config = clean_config(algorithm__name="mine.py:Mine")
    algorithm = Asking(config.algorithm, run_facts(config))
    check_forwards(algorithm, config)
    algorithm.asks = frozenset({forward})
    with pytest.raises(ConfigError, match=rf"^mine\.py:Mine .*{message}"):
        check_forwards(algorithm, config)
    check_forwards(algorithm, clean_config(algorithm__name="mine.py:Mine", **mended))


def test_a_dry_run_asks_that_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import test_preflight\nclass Mine(test_preflight.Asking):\n    asks = frozenset({'values'})\n")
    with pytest.raises(ConfigError, match="there is no critic"):
        preflight(clean_config(algorithm__name=f"{file}:Mine"))


@pytest.mark.parametrize(("environment", "tokens"), [("single_turn", 64), ("tests/tools.py:Tools", 5 * 64)])
def test_a_sample_of_several_turns_may_be_as_long_as_all_of_them(environment: str, tokens: int) -> None:
    """Else overlong shaping punishes every long conversation, and a constant denominator is too small for it."""
    config = clean_config(environment__name=environment, environment__max_turns=5, sampling__max_new_tokens=64)
    assert run_facts(config).max_new_tokens == tokens


def test_a_column_that_happens_to_be_named_margin_refuses_a_reward_model_and_not_dpo(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "slightly better"}))
    local_model("embedded:tiny-sort5")
    values: dict[str, Any] = {"model__path": "embedded:tiny-sort5", "data__train": str(file), "rewards": []}
    assert preflight(clean_config(algorithm__name="dpo", **values)) == (1, [])
    with pytest.raises(ConfigError, match=r"column 'margin': found 'slightly better'"):
        preflight(clean_config(algorithm__name="reward_model", **values))


@pytest.mark.parametrize(
    "values",
    [
        {"data__train": "/w/train.jsonl"},
        {"model__path": "/w/model"},
        {"model__chat_template": "/w/t.jinja"},
        {"environment__name": "/w/games.py:Chess"},
        {"algorithm__name": "/w/mine.py:Mine"},
        {"rewards": [RewardConfig(function="exact_match"), RewardConfig(function="/w/reward.py:score")]},
        {"algorithm__name": "sft", "data__train": "/w/train.jsonl", "rewards": []},
        {"algorithm__name": "/w/mine.py:Mine", "algorithm__kind": "offline", "rewards": []},
    ],
    ids=lambda values: " ".join(values),
)
def test_what_only_the_nodes_see_is_left_out_and_looked_for_without_their_directory(tmp_path: Path, values: dict[str, Any]) -> None:
    local_model("embedded:tiny-sort5")
    place = f"{tmp_path}/w/"
    given = {key: value.replace("/w/", place) if isinstance(value, str) else value for key, value in values.items()}
    config = clean_config(**{"model__path": "embedded:tiny-sort5", **given})
    for reward in config.rewards:
        reward.function = reward.function and reward.function.replace("/w/", place)
    preflight(config, [place])
    if "model__path" not in values:  # the preflight does not look for a model, the check does
        with pytest.raises(ConfigError):
            preflight(config)


def test_what_is_here_is_still_checked_beside_what_is_not(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def score(prompt, completion, no_such_column): return 0.0\n")
    config = clean_config(model__path=f"{tmp_path}/w/model", rewards=[RewardConfig(function=f"{file}:score")])
    with pytest.raises(ConfigError, match="no_such_column"):
        preflight(config, [f"{tmp_path}/w"])
