"""What each rank is told: how many steps its schedule has, which reference it keeps, and where its bundle stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from test_config_checks import clean_config

from rlpost.cluster.placement import Gang
from rlpost.config.derive import Derived, Device, derive
from rlpost.config.schema import RewardConfig, RunConfig
from rlpost.driver.actors import bundle_of, critic_settings, engine_options, forward_settings, trainer_options, worker_settings
from rlpost.training.optimizer import learning_rate_factor

PPO: dict[str, Any] = {
    "algorithm__name": "ppo", "algorithm__minibatches": 2, "algorithm__epochs": 3, "algorithm__critic__warmup_steps": 4,
}  # fmt: skip


def run(device: Device = "cpu", /, **values: Any) -> tuple[RunConfig, Derived]:
    config = clean_config(device, **values)
    return config, derive(config, device=device)


# ---- schedules -----------------------------------------------------------------------------------------------------


def test_the_policys_schedule_leaves_out_the_steps_in_which_only_the_critic_learns() -> None:
    """10 steps of 2 minibatches 3 times, 4 of them the critic's alone: else the learning rate never gets to its end."""
    config, derived = run(**PPO)
    policy, critic = worker_settings(config, derived, "model"), critic_settings(config, derived, "model")
    assert (policy.total_updates, critic.total_updates) == (36, 60)
    assert policy.total_updates is not None
    optimizer = config.training.optimizer
    optimizer.decay, optimizer.final_ratio = "linear", 0.1
    assert learning_rate_factor(36, total=policy.total_updates, config=optimizer) == pytest.approx(0.1)


def test_without_a_critic_its_warm_up_takes_nothing_from_the_schedule() -> None:
    config, derived = run(**{**PPO, "algorithm__name": "grpo"})
    assert worker_settings(config, derived, "model").total_updates == 60


def test_a_model_that_is_only_asked_has_no_schedule_no_adapters_and_no_reference() -> None:
    config, derived = run(**PPO, training__ranks=2, training__lora__rank=4, training__trainable="lm_head", algorithm__kl_coefficient=0.1)
    asked = forward_settings(config, derived, "other", head="value")
    assert (asked.model_path, asked.head, asked.total_updates, asked.reference_mode) == ("other", "value", None, "none")
    assert (asked.training.ranks, asked.training.lora.rank, asked.training.trainable) == (1, 0, "all")
    assert (config.training.ranks, config.training.lora.rank) == (2, 4), "the run's own settings stay as they are"


def test_a_critic_has_a_value_head_ranks_and_a_learning_rate_of_its_own() -> None:
    config, derived = run(**PPO, training__ranks=2, algorithm__critic__ranks=3, algorithm__critic__lr=0.5, algorithm__kl_coefficient=0.1)
    critic = critic_settings(config, derived, "critic")
    assert (critic.model_path, critic.head, critic.reference_mode, critic.reference_path) == ("critic", "value", "none", None)
    assert (critic.training.ranks, critic.training.optimizer.lr) == (3, 0.5)
    policy = worker_settings(config, derived, "model")
    assert (policy.head, policy.training.ranks, policy.training.optimizer.lr) == ("logprob", 2, config.training.optimizer.lr)
    config.algorithm.critic.lr = None
    assert critic_settings(config, derived, "critic").training.optimizer.lr == config.training.optimizer.lr


# ---- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["initial", "actor"])
def test_the_trainer_gets_the_directory_of_its_reference_and_not_the_name_in_the_configuration(mode: str) -> None:
    """``embedded:...`` is no directory, and no rank could load it."""
    config, derived = run(algorithm__kl_coefficient=0.1, algorithm__reference=mode, algorithm__reference_path="embedded:tiny")
    settings = worker_settings(config, derived, "model", reference_path="/local/reference")
    assert settings.reference_path == "/local/reference"
    assert settings.reference_mode == ("initial" if mode == "initial" else "none"), "an actor answers in its place"
    assert worker_settings(config, derived, "model").reference_path is None


@pytest.mark.parametrize("mode", ["initial", "moving_average", "adapters_off"])
def test_no_rank_keeps_a_reference_that_nobody_asks(mode: str) -> None:
    asked, derived = run(algorithm__kl_coefficient=0.1, algorithm__reference=mode)
    assert worker_settings(asked, derived, "model").reference_mode == mode
    unasked, derived = run(algorithm__reference=mode)
    assert worker_settings(unasked, derived, "model").reference_mode == "none"


# ---- bundles -------------------------------------------------------------------------------------------------------


class FakeGang:
    """Says which bundle was asked for."""

    def options(self, bundle: int, **resources: float) -> dict[str, Any]:
        return {"bundle": bundle, **resources}


GANG = cast(Gang, FakeGang())
ALL_ROLES: dict[str, Any] = {
    **PPO, "training__ranks": 2, "engine__count": 2, "algorithm__critic__ranks": 2,
    "algorithm__kl_coefficient": 0.1, "algorithm__reference": "actor",
    "rewards": [RewardConfig(model="embedded:tiny"), RewardConfig(model="embedded:tiny")],
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_rank_of_every_role_has_a_bundle_of_its_own(device: Device) -> None:
    config, derived = run(device, **ALL_ROLES)
    ranks = {"trainer": 2, "reference": 1, "critic": 2, "reward": 2}
    asked = [trainer_options(config, derived, GANG, rank, Path("run"), role) for role, count in ranks.items() for rank in range(count)]
    asked += [engine_options(config, derived, "model", GANG, index, Path("run")) for index in range(2)]
    assert sorted(one["bundle"] for one in asked) == list(range(9)) == list(range(len(derived.bundles)))
    assert [one.get("num_gpus") for one in asked] == ([1] * 9 if device == "gpu" else [None] * 9)
    logs = {str(one["runtime_env"]["env_vars"]) for one in asked}
    assert len(logs) == 9, "no two actors write one log"


def test_colocated_ranks_share_their_engines_bundles_and_other_models_keep_their_own() -> None:
    values: dict[str, Any] = {**ALL_ROLES, **PPO, "algorithm__name": "grpo", "placement__mode": "colocated", "training__ranks": 4}
    config, derived = run("gpu", **values, engine__tensor_parallel=2)
    trainers = [trainer_options(config, derived, GANG, rank, Path("run")) for rank in range(4)]
    engines = [engine_options(config, derived, "model", GANG, index, Path("run")) for index in range(2)]
    assert [one["bundle"] for one in trainers] == [0, 0, 1, 1]
    assert [one["bundle"] for one in engines] == [0, 1]
    assert {one["num_gpus"] for one in (*trainers, *engines)} == {0.5}
    others = [
        trainer_options(config, derived, GANG, rank, Path("run"), role) for role, rank in (("reference", 0), ("reward", 0), ("reward", 1))
    ]
    assert [(one["bundle"], one["num_gpus"]) for one in others] == [(2, 1), (3, 1), (4, 1)]
    assert bundle_of(derived, "reward", 1) == 4
