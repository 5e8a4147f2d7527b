"""Settings of an algorithm that do not fit together are refused with the setting that mends it, and the nearest neighbour passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_config_checks import clean_config, refusal

from rlpost.algorithms.catalogue import make_algorithm
from rlpost.algorithms.protocol import RunFacts
from rlpost.config.algorithm_checks import warn_algorithm
from rlpost.config.algorithms import OFFLINE, ONLINE_DEFAULTS
from rlpost.config.checks import check
from rlpost.config.load import load_config
from rlpost.config.schema import AlgorithmConfig, RewardConfig, RunConfig
from rlpost.types import ConfigError

Settings = dict[str, Any]
"""Keys of ``algorithm`` with ``__`` for dots; those of other sections begin with a slash."""


def config_of(settings: Settings) -> RunConfig:
    named = {key.removeprefix("/") if key.startswith("/") else f"algorithm__{key}": value for key, value in settings.items()}
    return clean_config(**named)


TEACHER: Settings = {"name": "distillation", "reference_path": "embedded:tiny"}
EACH: Settings = {"shaping__combine": "each"}
KL: Settings = {"kl_coefficient": 0.1}
TOKEN: Settings = {"correction__level": "token"}

CASES: list[tuple[str, Settings, list[str], Settings]] = [
    # sampling
    ("greedy samples", {"/sampling__temperature": 0.0}, ["sampling.temperature is 0.0", "above 0"], {"/sampling__temperature": 0.1}),
    (
        "ratio 1 over several epochs",
        {"old_logprobs": "current", "epochs": 2},
        ["algorithm.epochs=2", "algorithm.old_logprobs=auto, engine or recompute"],
        {"old_logprobs": "auto", "epochs": 2},
    ),
    (
        "ratio 1 over several minibatches",
        {"old_logprobs": "current", "minibatches": 2},
        ["algorithm.minibatches=2", "algorithm.old_logprobs=auto"],
        {"old_logprobs": "current", "minibatches": 1},
    ),
    (
        "ratio 1 of stale samples",
        {"old_logprobs": "current", "/schedule__max_staleness": 1},
        ["schedule.max_staleness=1", "algorithm.old_logprobs=auto"],
        {"old_logprobs": "engine", "/schedule__max_staleness": 1},
    ),
    *[
        (
            f"nothing corrects {cause}",
            {"name": "rloo", **settings},
            [f"algorithm.policy_loss=reinforce with {cause}", "set algorithm.policy_loss=policy_clip, or stay on-policy"],
            {"name": "rloo", "policy_loss": "policy_clip", **settings},
        )
        for cause, settings in (("algorithm.minibatches=2", {"minibatches": 2}), ("algorithm.epochs=3", {"epochs": 3}))
    ],
    (
        "nothing corrects stale samples",
        {"name": "remax", "/schedule__max_staleness": 1},
        ["algorithm.policy_loss=reinforce with schedule.max_staleness=1", "policy_clip or algorithm.correction.level=token"],
        {"name": "remax", "/schedule__max_staleness": 1, **TOKEN},
    ),
    # kind
    ("an online name that is said to be offline", {"kind": "offline"}, ["algorithm.name=grpo, which samples", "kind=auto"], {}),
    (
        "an offline name that is said to be online",
        {"name": "sft", "kind": "online"},
        ["algorithm.name=sft, which learns from data", "set algorithm.kind=auto"],
        {"name": "sft", "kind": "offline"},
    ),
    # options of the loss
    (
        "an option that is misspelt",
        {"name": "sapo", "options": {"temprature_positive": 2.0}},
        ["algorithm.options.temprature_positive is no option of", "sapo", "any of temperature_positive, temperature_negative"],
        {"name": "sapo", "options": {"temperature_positive": 2.0}},
    ),
    (
        "an option of a loss that takes none",
        {"options": {"temperature_positive": 2.0}},
        ["no option of algorithm.policy_loss=policy_clip: it takes none", "remove it"],
        {"policy_loss": "my_losses.py:mine", "options": {"temperature_positive": 2.0}},
    ),
    # advantage
    *[
        (
            f"{name} of one sample",
            {"name": name, "group_size": 1},
            ["algorithm.group_size is 1", "set algorithm.group_size=2"],
            {"name": name},
        )
        for name in ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline")
    ],
    (
        "a group advantage of one sample, by name",
        {"name": "ppo", "advantage": "group_std", "group_size": 1},
        ["algorithm.advantage=group_std"],
        {"name": "ppo", "advantage": "gae", "group_size": 1},
    ),
    (
        "a second bound of a loss that has none",
        {"name": "gspo", "dual_clip": 3.0},
        ["algorithm.dual_clip=3", "policy_clip", "gspo", "set it to 0"],
        {"name": "dapo", "dual_clip": 3.0},
    ),
    ("a second bound inside the first", {"dual_clip": 1.0}, ["algorithm.dual_clip=1", "more than 1"], {"dual_clip": 1.5}),
    ("no teacher", {"name": "distillation"}, ["set algorithm.reference_path"], TEACHER),
    # KL
    ("k1 as a loss", {**KL, "kl_estimator": "k1"}, ["algorithm.kl_in=reward"], {**KL, "kl_estimator": "k1", "kl_in": "reward"}),
    (
        "a weighted estimator in the reward",
        {**KL, "kl_estimator": "k3_unbiased", "kl_in": "reward"},
        ["set k1, k2 or k3"],
        {**KL, "kl_estimator": "k3_unbiased"},
    ),
    (
        "a KL in a reward that nobody reads",
        {**TEACHER, **KL, "kl_in": "reward"},
        ["algorithm.advantage=teacher", "set algorithm.kl_in=loss"],
        {**TEACHER, **KL},
    ),
    (
        "dropped samples whose KL nobody computes",
        {**KL, "kl_in": "reward", "filter__truncated": "drop"},
        ["algorithm.filter.truncated=drop", "set algorithm.kl_in=loss or algorithm.filter.truncated=keep"],
        {**KL, "kl_in": "reward", "filter__truncated": "drop", "name": "reinforce_pp"},
    ),
    ("a target without a start", {"kl_target": 0.1}, ["algorithm.kl_coefficient, which is 0", "start above 0"], {**KL, "kl_target": 0.1}),
    # reference
    *[
        (f"a reference ({name}) that nobody asks", {"reference": name}, [f"algorithm.reference={name}", "kl_coefficient above 0"], after)
        for name, after in (
            ("actor", {**KL, "reference": "actor"}),
            ("moving_average", {**KL, "reference": "moving_average"}),
            ("adapters_off", {**KL, "reference": "adapters_off", "/training__lora__rank": 4}),
            ("precomputed", {"name": "dpo", "reference": "precomputed"}),
        )
    ],
    (
        "a reference model that nobody asks",
        {"reference_path": "embedded:tiny"},
        ["would not be used", "kl_coefficient above 0"],
        {**KL, "reference_path": "embedded:tiny"},
    ),
    (
        "a reference model beside adapters that are the reference",
        {**KL, "reference_path": "embedded:tiny", "reference": "adapters_off", "/training__lora__rank": 4},
        ["initial or actor (found adapters_off)"],
        {**KL, "reference": "adapters_off", "/training__lora__rank": 4},
    ),
    ("adapters off without adapters", {**KL, "reference": "adapters_off"}, ["training.lora.rank is 0", "reference=initial"], KL),
    (
        "references of samples that are not there yet",
        {**KL, "reference": "precomputed"},
        ["offline algorithms", "set algorithm.reference=initial or actor"],
        {**KL, "reference": "initial"},
    ),
    ("a reference of sft", {"name": "sft", "reference": "actor"}, ["algorithm.name=dpo or kto"], {"name": "dpo", "reference": "actor"}),
    # correction
    (
        "a correction that would be 1",
        {**TOKEN, "old_logprobs": "engine"},
        ["correction.level=token", "set algorithm.old_logprobs=auto or recompute"],
        {**TOKEN, "old_logprobs": "recompute"},
    ),
    (
        "a mask of nothing",
        {**TOKEN, "correction__action": "mask", "correction__low": 2.0, "correction__high": 2.0},
        ["correction.low=2 is not below high=2"],
        {**TOKEN, "correction__action": "mask", "correction__low": 1.9, "correction__high": 2.0},
    ),
    (
        "a lower bound that truncation ignores",
        {**TOKEN, "correction__low": 0.5},
        ["correction.low=0.5", "set action=clip or mask"],
        {**TOKEN, "correction__low": 0.5, "correction__action": "clip"},
    ),
    # shaping
    (
        "bounds that leave one reward",
        {"shaping__clip_low": 1.0, "shaping__clip_high": 1.0},
        ["shaping.clip_low=1 is not below clip_high=1"],
        {"shaping__clip_low": 0.0, "shaping__clip_high": 1.0},
    ),
    *[
        (f"each reward of {name}", {"name": name, **EACH}, [f"algorithm.advantage={advantage}", "set combine=sum"], {"name": name})
        for name, advantage in (("reinforce_pp", "batch"), ("ppo", "gae"), ("remax", "greedy"))
    ],
    ("each reward, clipped", {**EACH, "shaping__clip_high": 1.0}, ["shaping.clip_high", "set combine=sum"], EACH),
    (
        "each reward, punished",
        {**EACH, "shaping__overlong_buffer": 8},
        ["shaping.overlong_buffer", "combine=sum"],
        {"name": "rloo", **EACH},
    ),
    ("each reward with a KL", {**EACH, **KL, "kl_in": "reward"}, ["set algorithm.kl_in=loss"], {**EACH, **KL}),
    (
        "negative rewards of maxrl",
        {"name": "maxrl", "shaping__length_penalty": 0.1},
        ["divides by the group's mean reward", "remove them, or take another advantage"],
        {"name": "grpo", "shaping__length_penalty": 0.1},
    ),
    ("a KL in the reward of maxrl", {"name": "maxrl", **KL, "kl_in": "reward"}, ["kl_in=reward", "negative"], {"name": "maxrl", **KL}),
    (
        "a punishment of everything",
        {"shaping__overlong_buffer": 65},
        ["overlong_buffer=65 is more than sampling.max_new_tokens=64", "lower it"],
        {"shaping__overlong_buffer": 64},
    ),
    # filter
    (
        "bounds of a filter that is off",
        {"filter__least_mean": 0.1},
        ["filter.least_mean is not used", "drop or resample"],
        {"filter__least_mean": 0.1, "filter__zero_variance": "resample"},
    ),
    (
        "bounds that refuse everything",
        {"filter__zero_variance": "drop", "filter__least_mean": 0.5, "filter__most_mean": 0.5},
        ["least_mean=0.5 is not below most_mean=0.5"],
        {"filter__zero_variance": "drop", "filter__least_mean": 0.5, "filter__most_mean": 0.6},
    ),
    (
        "a filter of rewards that a teacher does not need",
        {**TEACHER, "filter__zero_variance": "drop"},
        ["filter.zero_variance=drop", "set it to keep"],
        {**TEACHER, "filter__truncated": "drop"},
    ),
    (
        "a filter that refuses every group of one",
        {"name": "ppo", "group_size": 1, "filter__zero_variance": "resample"},
        ["algorithm.group_size=1", "set algorithm.group_size=2 or more, or zero_variance=keep"],
        {"name": "ppo", "group_size": 2, "filter__zero_variance": "resample"},
    ),
    # critic
    (
        "a critic that nobody asks",
        {"critic__path": "embedded:tiny"},
        ["critic.path=embedded:tiny would not be used", "set algorithm.name=ppo"],
        {"name": "ppo", "critic__path": "embedded:tiny"},
    ),
    (
        "a warm-up without an end",
        {"name": "ppo", "critic__warmup_steps": 10},
        ["leaves no step of schedule.steps=10", "lower it"],
        {"name": "ppo", "critic__warmup_steps": 9},
    ),
    (
        "a critic on shared GPUs",
        {"name": "ppo", "/placement__mode": "colocated"},
        ["the critic has GPUs of its own", "set placement.mode=split"],
        {"name": "ppo", "/placement__mode": "split"},
    ),
    # offline
    ("epochs of sft", {"name": "sft", "epochs": 2}, ["algorithm.epochs=2 is for online", "set it to 1"], {"name": "sft", "epochs": 1}),
    ("minibatches of dpo", {"name": "dpo", "minibatches": 2}, ["algorithm.minibatches=2 is for online", "set it to 1"], {"name": "dpo"}),
    *[
        (
            f"robust at {smoothing}",
            {"name": "dpo", "preference__loss": "robust", "preference__label_smoothing": smoothing},
            ["algorithm.preference.label_smoothing is", "above 0 and below 0.5"],
            {"name": "dpo", "preference__loss": "robust", "preference__label_smoothing": 0.49},
        )
        for smoothing in (0.0, 0.5)
    ],
    *[
        (
            f"smoothing of {loss}",
            {"name": "dpo", "preference__loss": loss, "preference__label_smoothing": 0.1},
            [f"is not used by loss={loss}", "set it to 0"],
            {"name": "dpo", "preference__loss": "sigmoid", "preference__label_smoothing": 0.1},
        )
        for loss in ("ipo", "hinge")
    ],
    (
        "precomputed references of pairs that are made anew",
        {"name": "kto", "reference": "precomputed"},
        ["set algorithm.reference=initial, actor or adapters_off"],
        {"name": "kto", "reference": "actor"},
    ),
    (
        "one row of kto",
        {"name": "kto", "/schedule__prompts_per_step": 1},
        ["schedule.prompts_per_step=1", "2 or more"],
        {"name": "kto", "/schedule__prompts_per_step": 2},
    ),
    (
        "one held-out row of kto",
        {"name": "kto", "/evaluation__every": 1, "/data__evaluation": "embedded:sort5", "/evaluation__prompts": 1},
        ["evaluation.prompts=1", "2 or more"],
        {"name": "kto", "/evaluation__every": 1, "/data__evaluation": "embedded:sort5", "/evaluation__prompts": 2},
    ),
]


@pytest.mark.parametrize(("settings", "words", "neighbour"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_does_not_fit_is_refused_with_its_fix_and_the_nearest_neighbour_passes(
    settings: Settings, words: list[str], neighbour: Settings
) -> None:
    message = refusal(config_of(settings))
    for word in words:
        assert word in message
    assert "\n" not in message, "one fault is one problem"
    check(config_of(neighbour))


@pytest.mark.parametrize("name", [*ONLINE_DEFAULTS, *OFFLINE])
def test_every_algorithm_passes_with_its_own_settings(name: str) -> None:
    check(config_of(TEACHER if name == "distillation" else {"name": name}))


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp", "remax", "distillation"])
def test_algorithms_that_compare_no_samples_take_groups_of_one(name: str) -> None:
    check(config_of({**(TEACHER if name == "distillation" else {"name": name}), "group_size": 1}))


def test_a_class_of_the_users_own_may_do_with_one_sample_what_it_likes() -> None:
    check(config_of({"name": "my_pkg.mine:Mine", "group_size": 1, "filter__zero_variance": "drop"}))


@pytest.mark.parametrize("name", OFFLINE)
def test_offline_runs_need_neither_rewards_nor_settings_of_engines(name: str) -> None:
    check(config_of({"name": name, "/rewards": [], "/engine__block_size": 7, "/sampling__temperature": 0.0, "group_size": 1}))


BARE: Settings = {"/rewards": []}
UNREAD: list[tuple[str, str, Any, Settings]] = [
    ("grpo", "gamma", 0.9, {}),
    ("grpo", "gae_lambda", 0.9, {}),
    ("reinforce_pp", "gae_lambda", 0.9, {}),
    ("grpo", "critic__warmup_steps", 5, {}),
    ("grpo", "critic__lr", 1e-5, {}),
    ("grpo", "preference__beta", 3.0, {}),
    ("sft", "clip_high", 0.5, BARE),
    ("sft", "preference__beta", 0.5, BARE),
    ("dpo", "kl_coefficient", 0.1, BARE),
    ("dpo", "shaping__length_penalty", 0.1, BARE),
    ("dpo", "filter__zero_variance", "drop", BARE),
    ("dpo", "correction__high", 3.0, BARE),
    ("simpo", "preference__likelihood", 0.3, BARE),
    ("orpo", "preference__label_smoothing", 0.1, BARE),
    ("kto", "preference__margin", 1.0, BARE),
    ("reward_model", "preference__beta", 0.5, BARE),
]
"""Name, key, a value that is not the default, and what keeps the configuration free of other warnings."""

WARNED: list[tuple[str, Settings, str]] = [
    ("rewards of an offline run", {"name": "sft"}, "rewards are not used: algorithm.name=sft"),
    ("a second copy beside adapters", {**KL, "/training__lora__rank": 4}, "adapters_off gives the same without"),
    ("a critic's advantages at the scale of rewards", {"name": "ppo"}, "algorithm.shaping.whiten=true"),
    *[
        (
            f"{key} of {name}",
            {"name": name, key: value, **extra},
            f"algorithm.{key.replace('__', '.')} is not read by algorithm.name={name}",
        )
        for name, key, value, extra in UNREAD
    ],
]
QUIET: list[Settings] = [
    {"name": "sft", "/rewards": []},
    {**KL, "reference": "adapters_off", "/training__lora__rank": 4},
    {**KL, "reference_path": "embedded:tiny", "/training__lora__rank": 4},
    {"/training__lora__rank": 4},
    {"name": "ppo", "shaping__whiten": True},
    {"name": "ppo", "shaping__whiten": True, "gamma": 0.9, "gae_lambda": 0.9, "critic__warmup_steps": 5, "critic__lr": 1e-5},
    {"name": "reinforce_pp", "gamma": 0.9},
    {"name": "dpo", **BARE, "preference__likelihood": 0.3, "preference__label_smoothing": 0.1},
    {"name": "kto", **BARE, "preference__desirable": 2.0, "preference__undesirable": 2.0, "preference__beta": 0.3},
    {"name": "reward_model", **BARE, "preference__margin": 1.0, "preference__centering": 0.1},
    {"name": "my_pkg.mine:Mine", "gamma": 0.9, "gae_lambda": 0.9, "preference__beta": 3.0},
]


@pytest.mark.parametrize(("settings", "expected"), [case[1:] for case in WARNED], ids=[case[0] for case in WARNED])
def test_what_is_probably_not_meant_is_warned_of(settings: Settings, expected: str) -> None:
    [warning] = check(config_of(settings))
    assert expected in warning


@pytest.mark.parametrize("settings", QUIET)
def test_what_is_meant_is_not_warned_of(settings: Settings) -> None:
    assert check(config_of(settings)) == []


def test_a_teacher_needs_no_reward_and_takes_one() -> None:
    check(config_of({**TEACHER, "/rewards": []}))
    check(config_of({**TEACHER, "/rewards": [RewardConfig(function="exact_match")]}))


@pytest.mark.parametrize("preset", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_preset_is_told_that_a_setting_of_its_own_is_not_read_and_one_more_is_named(preset: Path) -> None:
    def unread() -> list[str]:
        return [warning for warning in warn_algorithm(config) if "is not read" in warning]

    config = load_config([f"config={preset}"]).config
    assert unread() == []
    name = "margin" if config.algorithm.name == "kto" else "desirable"
    setattr(config.algorithm.preference, name, 9.0)
    assert unread() == [f"algorithm.preference.{name} is not read by algorithm.name={config.algorithm.name}"]


@pytest.mark.parametrize("name", ["policy_clipp", "kl", "entropy", "preference"])
def test_a_name_that_no_policy_loss_has_is_refused_before_anything_starts(name: str) -> None:
    """Also the name of another term: a KL as policy loss would train, towards nothing that was asked for."""
    expected = rf"no policy loss is named '{name}' \(algorithm\.policy_loss\); expected policy_clip, .*sapo.* or `package\.module:function`"
    with pytest.raises(ConfigError, match=expected):
        make_algorithm(AlgorithmConfig(policy_loss=name), RunFacts(max_new_tokens=8))


@pytest.mark.parametrize("name", [*sorted({str(one["policy_loss"]) for one in ONLINE_DEFAULTS.values()}), "my_losses.py:mine"])
def test_policy_losses_of_the_catalogue_and_of_the_users_own_are_taken(name: str) -> None:
    make_algorithm(AlgorithmConfig(policy_loss=name), RunFacts(max_new_tokens=8))
