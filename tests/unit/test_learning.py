"""The trainer's side of an online step: which forwards are asked for and when, what each update gets, and when the critic learns alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from loss_targets import close
from trainer_fakes import Asked, FakeTrainers, answer
from trajectories import group as plain_group
from trajectories import trajectory

from rlpost.algorithms.catalogue import make_algorithm
from rlpost.algorithms.protocol import RunFacts, Sample
from rlpost.config.derive import derive
from rlpost.config.schema import RunConfig
from rlpost.driver.batch import high_entropy
from rlpost.driver.learning import CRITIC_METRICS, Learner
from rlpost.observe import PhaseClock
from rlpost.types import MAIN_WEIGHT, Group

STEP = 3
"""Version of the trainer in these tests; also of the engine that sampled, unless a test says otherwise."""


class Stage:
    """A learner among fakes. ``settings`` are keys of the configuration, with ``__`` for dots."""

    def __init__(self, *, world: int = 1, with_reference: bool = False, **settings: Any) -> None:
        config = RunConfig()
        config.schedule.steps, config.schedule.prompts_per_step = 10, 2
        for key, value in settings.items():
            *sections, name = key.split("__")
            target: Any = config
            for section in sections:
                target = getattr(target, section)
            setattr(target, name, value)
        self.log: list[Asked] = []
        clock = PhaseClock()
        derived = derive(config, device="cpu")
        algorithm = make_algorithm(config.algorithm, RunFacts(max_new_tokens=config.sampling.max_new_tokens))
        metrics = {"train__loss": 1.0, "train__lr": 0.5, "train__tokens": 4.0, "train__ratio_max": 2.0, "train__kl": 0.25}
        of_critic = {"train__loss": 10.0, "train__value_error": 3.0, "train__value_clip_fraction": 0.5, "train__tokens": 4.0}
        critic = FakeTrainers("critic", self.log, clock, 1, **of_critic, train__lr=0.125) if derived.critic_ranks else None
        self.learner = Learner(
            config=config,
            derived=derived,
            algorithm=algorithm,
            trainers=FakeTrainers("trainer", self.log, clock, world, **metrics),
            reference=FakeTrainers("reference", self.log, clock) if with_reference else None,
            critic=critic,
            clock=clock,
        )

    def learn(self, groups: Sequence[Group], step: int = STEP) -> dict[str, float]:
        return asyncio.run(self.learner.learn(self.learner.choose(groups), step))

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        return [(one.role, one.method, one.phase) for one in self.log]

    def updates(self, role: str = "trainer") -> list[Asked]:
        return [one for one in self.log if one.method == "update" and one.role == role]


def groups_of(rewards: Sequence[Sequence[float | None]] = ((1.0, 0.0), (0.5, 0.0)), version: int = STEP) -> list[Group]:
    """Token ids are 1000 times the group, 100 times the sample, and the place: nothing can be mixed up unseen. One gap of a tool."""
    groups = []
    for index, row in enumerate(rewards):
        played = []
        for sample, reward in enumerate(row):
            spans = [(False, 2), (True, 1 + sample), (False, 1), (True, 2)]
            one = trajectory(f"g{index}.{sample}", spans=spans, reward=reward, version=version)
            place = np.arange(len(one.tokens))
            tokens = np.where(place < 2, place, 1000 * (index + 1) + 100 * sample + place).astype(np.int32)
            played.append(replace(one, tokens=tokens, logprobs=np.where(one.trainable, -0.5, np.nan).astype(np.float32)))
        groups.append(replace(plain_group(index), trajectories=tuple(played)))
    return groups


def targets_of(group: Group) -> list[int]:
    return [int(token) for one in group.trajectories if one.reward is not None for token in one.tokens[one.trainable]]


# ---- forwards ------------------------------------------------------------------------------------------------------

UPDATE = ("trainer", "update", "update")
OLD = ("trainer", "logprobs", "old_logprob")
ENTROPY = ("trainer", "entropies", "old_logprob")
PPO: dict[str, Any] = {"algorithm__name": "ppo"}
KL: dict[str, Any] = {"algorithm__kl_coefficient": 0.1}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [UPDATE]),
        ({"schedule__max_staleness": 1}, [UPDATE]),
        ({"algorithm__old_logprobs": "recompute"}, [OLD, UPDATE]),
        ({"algorithm__epochs": 2}, [OLD, UPDATE, UPDATE]),
        (KL, [("trainer", "reference_logprobs", "reference"), UPDATE]),
        ({**KL, "with_reference": True, "algorithm__reference": "actor"}, [("reference", "logprobs", "reference"), UPDATE]),
        ({"algorithm__filter__top_entropy": 0.5}, [ENTROPY, UPDATE]),
        (PPO, [("critic", "values", "values"), UPDATE, ("critic", "update", "update")]),
        (
            {**PPO, **KL, "algorithm__minibatches": 2, "algorithm__filter__top_entropy": 0.9},
            [
                OLD,
                ENTROPY,
                ("trainer", "reference_logprobs", "reference"),
                ("critic", "values", "values"),
                *[UPDATE, ("critic", "update", "update")] * 2,
            ],
        ),
    ],
)
def test_forwards_come_before_the_updates_in_their_phases_and_only_those_that_are_read(
    settings: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    stage = Stage(**settings)
    stage.learn(groups_of())
    assert stage.calls == expected


def test_forwards_are_asked_of_trained_tokens_at_the_sampling_temperature() -> None:
    stage = Stage(**PPO, algorithm__old_logprobs="recompute", sampling__temperature=0.7)
    groups = groups_of([[1.0, None], [0.5, 0.0]])
    stage.learn(groups)
    old, values, update, _ = stage.log
    assert old.targets == values.targets == sorted([*targets_of(groups[0]), *targets_of(groups[1])])
    assert [arguments[1:] for arguments in old.arguments] == [(0.7,)]
    assert [arguments[1:] for arguments in values.arguments] == [()], "a critic's values have no temperature"
    assert update.updates[0].temperature == 0.7


@pytest.mark.parametrize("world", [1, 2])
def test_what_forwards_said_reaches_the_update_at_its_own_tokens(world: int) -> None:
    stage = Stage(world=world, **PPO, **KL, algorithm__old_logprobs="recompute", algorithm__kl_in="loss")
    stage.learn(groups_of())
    [update], [critic] = stage.updates(), stage.updates("critic")
    for token, found in update.by_token(lambda micro: micro.old_logprobs).items():
        assert found == answer("logprobs", np.array(token))
    for token, found in update.by_token(lambda micro: micro.reference_logprobs).items():
        assert found == answer("reference_logprobs", np.array(token))
    for token, found in critic.by_token(lambda micro: micro.columns["old_values"]).items():
        assert found == answer("values", np.array(token))
    assert len(update.updates) == world
    assert update.targets == critic.targets == sorted(token for group in groups_of() for token in targets_of(group))


def test_a_sample_that_is_in_the_baseline_only_takes_no_forward_of_its_neighbours() -> None:
    """Truncated samples are not asked about: the answers are those of the others, in order."""
    stage = Stage(**PPO, algorithm__old_logprobs="recompute", algorithm__filter__truncated="drop")
    first, second = groups_of([[1.0, 0.0, 0.5], [0.5, 0.0]])
    cut = replace(first, trajectories=(first.trajectories[0], replace(first.trajectories[1], truncated=True), first.trajectories[2]))
    stage.learn([cut, second])
    old, _, update, critic = stage.log
    left_out = {int(token) for token in first.trajectories[1].tokens[first.trajectories[1].trainable]}
    assert old.targets == update.targets == critic.targets == sorted({*targets_of(first), *targets_of(second)} - left_out)
    for token, found in update.by_token(lambda micro: micro.old_logprobs).items():
        assert found == answer("logprobs", np.array(token))


@pytest.mark.parametrize(("old", "expected"), [("current", None), ("engine", -0.5), ("recompute", "forward")])
def test_the_ratios_denominator_is_what_the_setting_says(old: str, expected: object) -> None:
    stage = Stage(algorithm__old_logprobs=old)
    stage.learn(groups_of())
    [update] = stage.updates()
    if expected is None:
        assert all(micro.old_logprobs is None for micro in update.micros)
        return
    for token, found in update.by_token(lambda micro: micro.old_logprobs).items():
        assert found == (answer("logprobs", np.array(token)) if expected == "forward" else expected)


def test_decoupled_ppo_keeps_the_engines_logprobs_beside_the_recomputed_ones() -> None:
    """The ratio is against the policy before the update; the correction between that and the engine's, which is stale here."""
    stage = Stage(schedule__max_staleness=1, algorithm__correction__level="token")
    stage.learn(groups_of(version=STEP - 1))
    assert [method for _, method, _ in stage.calls] == ["logprobs", "update"]
    [update] = stage.updates()
    for token, found in update.by_token(lambda micro: micro.old_logprobs).items():
        assert found == answer("logprobs", np.array(token))
    assert set(update.by_token(lambda micro: micro.columns["rollout_logprobs"]).values()) == {-0.5}
    correction = update.updates[0].components[0].correction
    assert correction is not None
    assert correction.level == "token"


def test_without_a_correction_no_engine_logprobs_are_sent_along() -> None:
    stage = Stage(schedule__max_staleness=1)
    stage.learn(groups_of())
    assert all(micro.columns == {} for micro in stage.updates()[0].micros)


# ---- updates -------------------------------------------------------------------------------------------------------


def test_epochs_go_over_the_minibatches_in_order_each_with_its_own_denominator() -> None:
    stage = Stage(algorithm__epochs=2, algorithm__minibatches=2)
    groups = groups_of([[1.0, 0.0, 1.0], [0.5, 0.0]])
    stage.learn(groups)
    updates = stage.updates()
    assert [one.targets for one in updates] == [sorted(targets_of(group)) for group in (*groups, *groups)]
    assert [one.updates[0].denominators for one in updates] == [{MAIN_WEIGHT: 12.0}, {MAIN_WEIGHT: 7.0}] * 2


def test_old_logprobs_are_computed_once_and_not_again_in_the_second_epoch() -> None:
    stage = Stage(algorithm__epochs=3)
    stage.learn(groups_of())
    assert [method for _, method, _ in stage.calls] == ["logprobs", "update", "update", "update"]
    first, *later = [one.by_token(lambda micro: micro.old_logprobs) for one in stage.updates()]
    assert all(one == first for one in later)


def test_advantages_are_of_the_batch_and_not_of_a_minibatch() -> None:
    """REINFORCE++: normalised over all tokens. In a minibatch of its own the second group, all 0, would have none."""
    stage = Stage(algorithm__name="reinforce_pp", algorithm__minibatches=2)
    stage.learn(groups_of([[1.0, 1.0], [0.0, 0.0]]))
    first, second = [one.by_token(lambda micro: micro.advantage) for one in stage.updates()]
    close(np.array([*first.values(), *second.values()]), np.array([1.0] * 7 + [-1.0] * 7), 1e-5)


def test_a_minibatch_in_which_nothing_is_trained_makes_no_update() -> None:
    """The optimizer would step on its moments alone."""
    stage = Stage(algorithm__minibatches=2, algorithm__filter__zero_variance="drop")
    groups = groups_of([[1.0, 1.0], [0.5, 0.0]])
    stage.learn(groups)
    [update] = stage.updates()
    assert update.targets == sorted(targets_of(groups[1]))


@pytest.mark.parametrize("rewards", [[[None, None], [None, None]], [[1.0, 1.0], [0.0, 0.0]]])
def test_a_batch_in_which_nothing_can_be_trained_asks_for_nothing_and_reports_nothing(rewards: list[list[float | None]]) -> None:
    stage = Stage(**PPO, algorithm__filter__zero_variance="drop")
    assert stage.learn(groups_of(rewards)) == {}
    assert stage.log == []


def test_parity_is_measured_before_the_first_update_only() -> None:
    """Later the trainer has moved away from what the engine sampled with."""
    stage = Stage(**PPO, algorithm__epochs=2, algorithm__minibatches=2)
    stage.learn(groups_of())
    assert [one.updates[0].measure_parity for one in stage.updates()] == [True, False, False, False]
    assert not any(one.updates[0].measure_parity for one in stage.updates("critic"))


def test_only_tokens_of_the_trainers_version_can_show_parity() -> None:
    stage = Stage(schedule__max_staleness=1)
    fresh, stale = groups_of(), groups_of(version=STEP - 1)
    stage.learn([fresh[0], stale[1]])
    found = stage.updates()[0].by_token(lambda micro: micro.parity_logprobs)
    assert {token for token, value in found.items() if np.isfinite(value)} == set(targets_of(fresh[0]))


def test_metrics_of_several_updates_are_one_record() -> None:
    stage = Stage(algorithm__minibatches=2, **KL)
    found = stage.learn(groups_of())
    assert (found["train/loss"], found["train/lr"], found["train/tokens"], found["train/ratio_max"]) == (1.5, 1.0, 12.0, 4.0)
    assert found["train/kl_coefficient"] == 0.1
    assert not any(name.startswith("critic/") for name in found)


def test_the_measured_kl_steers_the_next_steps_coefficient() -> None:
    stage = Stage(**KL, algorithm__kl_target=0.125, algorithm__kl_horizon=1)
    stage.learn(groups_of())
    stage.learn(groups_of(), STEP + 1)
    first, second = [one.updates[0].components[1].coefficient for one in stage.updates()]
    assert (first, second) == (0.1, pytest.approx(0.1 * np.e))


# ---- the critic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "learners"), [(0, ["critic"]), (1, ["critic"]), (2, ["trainer", "critic"])])
def test_in_the_warm_up_only_the_critic_learns(step: int, learners: list[str]) -> None:
    stage = Stage(**PPO, algorithm__critic__warmup_steps=2)
    found = stage.learn(groups_of(version=step), step)
    assert [one.role for one in stage.log if one.method == "update"] == learners
    assert "critic/loss" in found
    assert ("train/loss" in found) == (step == 2)


def test_the_critic_learns_returns_of_every_sampled_token_whatever_the_policys_weights_are() -> None:
    """Also of tokens that the entropy filter leaves out."""
    stage = Stage(**PPO, algorithm__filter__top_entropy=0.1, algorithm__critic__coefficient=2.0, algorithm__critic__clip=0.3)
    stage.learn(groups_of())
    [critic] = stage.updates("critic")
    assert critic.updates[0].denominators == {MAIN_WEIGHT: 14.0}
    assert set(critic.by_token(lambda micro: micro.weight).values()) == {1.0}
    returns = critic.by_token(lambda micro: micro.columns["returns"])
    rewards = {token: one.reward for group in groups_of() for one in group.trajectories for token in one.tokens[one.trainable].tolist()}
    assert returns == pytest.approx(rewards, abs=1e-6), "lambda 1, gamma 1: the whole reward at each token"
    [component] = critic.updates[0].components
    assert (component.term, component.coefficient, component.parameters) == ("value", 2.0, {"clip": 0.3})


def test_a_critics_metrics_have_names_of_their_own() -> None:
    found = Stage(**PPO).learn(groups_of())
    assert {name: value for name, value in found.items() if name.startswith("critic/")} == {
        "critic/loss": 10.0,
        "critic/value_error": 3.0,
        "critic/value_clip_fraction": 0.5,
        "critic/lr": 0.125,
    }
    assert set(CRITIC_METRICS) >= {name for name in found if name.startswith("critic/")}
    assert (found["train/loss"], found["train/lr"]) == (1.0, 0.5), "the policy's are its own"


# ---- tokens of high entropy ----------------------------------------------------------------------------------------


def samples_of(entropies: Sequence[Sequence[float]]) -> list[Sample]:
    """One trajectory each: a prompt token, sampled tokens of these entropies, and a tool's token at the end."""
    found = []
    for index, row in enumerate(entropies):
        one = trajectory(f"g{index}.0", spans=[(False, 1), (True, len(row)), (False, 1)])
        found.append(Sample(trajectory=one, reward=0.0, entropy=np.array([99.0, *row, 99.0], np.float32)))
    return found


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, [[1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
        (0.2, [[0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]),
        (0.3, [[0, 0, 0, 1], [0, 0, 0, 0, 1, 1]]),
        (0.5, [[0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]),
        (0.001, [[0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]),
    ],
)
def test_the_threshold_is_of_the_whole_batch(share: float, expected: list[list[int]]) -> None:
    """A quantile of each sequence would train as much of a boring one as of an interesting one. At least one token is left."""
    samples = samples_of([[0.1, 0.2, 0.5, 0.7], [0.0, 0.3, 0.4, 0.6, 0.8, 0.9]])
    masks = high_entropy(samples, share)
    assert [mask[1:-1].astype(int).tolist() for mask in masks] == expected
    assert not any(mask[0] or mask[-1] for mask in masks), "only sampled tokens are trained"


def test_ties_are_all_kept() -> None:
    """Which of equal tokens goes must not depend on their order."""
    assert [mask.sum() for mask in high_entropy(samples_of([[0.5, 0.5], [0.5, 0.1]]), 0.25)] == [2, 1]


def test_no_samples_have_no_masks() -> None:
    assert high_entropy([], 0.5) == []


def with_token(group: Group, sample: int, place: int, token: int) -> Group:
    played = list(group.trajectories)
    tokens = played[sample].tokens.copy()
    tokens[place] = token
    played[sample] = replace(played[sample], tokens=tokens)
    return replace(group, trajectories=tuple(played))


@pytest.mark.parametrize(("aggregation", "denominators"), [("token_mean", [1.0, 3.0]), ("sequence_mean", [1.0, 2.0])])
def test_denominators_count_what_the_entropy_filter_left(aggregation: str, denominators: list[float]) -> None:
    """Of 14 tokens the 4 of highest entropy (here: of highest id) are left: one in the first group, two and one in the second."""
    stage = Stage(algorithm__minibatches=2, algorithm__filter__top_entropy=4 / 14, algorithm__loss_aggregation=aggregation)
    first, second = groups_of()
    stage.learn([with_token(first, 0, 2, 9999), with_token(second, 0, 5, 9998)])
    weights = [one.by_token(lambda micro: micro.weight) for one in stage.updates()]
    assert [{token for token, weight in one.items() if weight} for one in weights] == [{9999}, {9998, 2105, 2106}]
    assert [one.updates[0].denominators[MAIN_WEIGHT] for one in stage.updates()] == denominators
    assert [sum(one.values()) for one in weights] == pytest.approx(denominators), "numerator and denominator count the same tokens"
    assert [len(one) for one in weights] == [7, 7], "tokens that are left out still have their place in their sequence's ratio"
