"""Online algorithms as a run meets them: what every token of an uneven batch is worth, against plain statements of the papers' formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from loss_targets import close, targets
from trajectories import group as plain_group
from trajectories import trajectory

from rlpost.algorithms.catalogue import find_terms, make_algorithm
from rlpost.algorithms.losses import total_loss
from rlpost.algorithms.online import PolicyGradient
from rlpost.algorithms.protocol import Credit, RunFacts, Sample, SampledGroup
from rlpost.config.algorithms import ONLINE_DEFAULTS
from rlpost.config.schema import AlgorithmConfig, CorrectionConfig, FilterConfig, ShapingConfig
from rlpost.types import MAIN_WEIGHT, Failure, Group, Trajectory

LONGEST = 10
FACTS = RunFacts(max_new_tokens=LONGEST, reward_weights={"exact": 1.0, "format": 0.25})
KL = 0.3
FAILED = Failure(kind="raised", where="exact", message="boom")

REWARDS: list[list[float | None]] = [[1.0, 0.0, None, 2.0], [0.5, 0.0, 0.25], [0.7, 0.7], [None, 3.0], [None, None]]
"""Uneven groups; one without variance, one with a single scored sample, one with none."""
GREEDY: list[float | None] = [1.5, 0.25, 0.7, None, 0.0]
"""Of the greedy samples; that of the fourth group failed."""


def make(name: str = "grpo", **settings: Any) -> PolicyGradient:
    return PolicyGradient(AlgorithmConfig(name=name, **settings), FACTS)


def episode(name: str, prompt: int, reward: float | None, random: np.random.Generator) -> Trajectory:
    """A prompt, one to three turns of one to three sampled tokens, tool tokens in between."""
    turns = random.integers(1, 4)
    spans = [(False, prompt)]
    for turn in range(turns):
        spans += [(False, int(random.integers(1, 4)))] if turn else []
        spans += [(True, int(random.integers(1, 4)))]
    one = trajectory(name, spans=spans, reward=reward, failure=FAILED if reward is None else None)
    logprobs = np.where(one.trainable, -random.exponential(size=len(one.tokens)), np.nan).astype(np.float32)
    parts = {} if reward is None else {"exact": float(reward), "format": float(random.integers(0, 3))}
    return replace(one, logprobs=logprobs, reward_parts=parts)


def batch_of(rewards: Sequence[Sequence[float | None]] = REWARDS, greedy: Sequence[float | None] | None = None) -> list[Group]:
    random = np.random.default_rng(3)
    groups = []
    for index, row in enumerate(rewards):
        one = plain_group(index, row)
        played = tuple(episode(f"g{index}.{sample}", 2 + index, reward, random) for sample, reward in enumerate(row))
        base = None if greedy is None else episode(f"g{index}.greedy", 2 + index, greedy[index], random)
        groups.append(replace(one, trajectories=played, baseline=base))
    return groups


def forward(sample: Sample, name: str) -> np.ndarray:
    """What a forward would say ``[tokens]``, decided by the trajectory's id; NaN where nothing was sampled."""
    one = sample.trajectory
    random = np.random.default_rng([ord(letter) for letter in name + one.trajectory_id])
    values = random.normal(size=len(one.tokens)) if name == "values" else -random.exponential(size=len(one.tokens))
    return np.where(one.trainable, values, np.nan).astype(np.float32)


def informed(batch: Sequence[SampledGroup], *names: str) -> list[SampledGroup]:
    """As the driver fills in forwards: only trained samples get numbers."""

    def fill(sample: Sample) -> Sample:
        nothing = np.full(len(sample.trajectory.tokens), np.nan, np.float32)
        return replace(sample, **{name: forward(sample, name) if sample.trained else nothing for name in names})  # type: ignore[arg-type]

    return [replace(group, samples=tuple(fill(sample) for sample in group.samples)) for group in batch]


def sampled(sample: Sample, values: np.ndarray | None) -> np.ndarray:
    assert values is not None
    return values[sample.trajectory.trainable].astype(np.float64)


def tokens_of(sample: Sample, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """One number a sampled token -> [tokens], written out with a loop."""
    rest = iter(np.asarray(values, np.float64).tolist())
    return np.array([next(rest) if on else 0.0 for on in sample.trajectory.trainable])


def spread(batch: Sequence[SampledGroup], totals: Sequence[Sequence[float]]) -> list[list[np.ndarray]]:
    """One number a sample, on all its sampled tokens."""
    return [
        [tokens_of(sample, [value] * sample.trajectory.sampled_tokens) for sample, value in zip(group.samples, row, strict=True)]
        for group, row in zip(batch, totals, strict=True)
    ]


def assert_advantages(credits: Sequence[Sequence[Credit]], expected: Sequence[Sequence[np.ndarray]], tolerance: float = 1e-5) -> None:
    assert [len(row) for row in credits] == [len(row) for row in expected]
    largest = max(float(np.abs(one).max(initial=0.0)) for row in expected for one in row)
    for got_row, row in zip(credits, expected, strict=True):
        for got, one in zip(got_row, row, strict=True):
            np.testing.assert_allclose(got.advantage, one, rtol=0, atol=tolerance * largest)


# ---- names ---------------------------------------------------------------------------------------------------------

PAPERS: Mapping[str, tuple[str, str, str]] = {
    "grpo": ("group_std", "policy_clip", "token_mean"),
    "dr_grpo": ("group_mean", "policy_clip", "constant"),
    "dapo": ("group_std", "policy_clip", "token_mean"),
    "gspo": ("group_std", "gspo", "sequence_mean"),
    "gmpo": ("group_std", "gmpo", "sequence_mean"),
    "cispo": ("group_std", "cispo", "token_mean"),
    "sapo": ("group_std", "sapo", "sequence_mean"),
    "rloo": ("leave_one_out", "reinforce", "constant"),
    "reinforce_pp": ("batch", "policy_clip", "token_mean"),
    "reinforce_pp_baseline": ("batch_baseline", "policy_clip", "token_mean"),
    "remax": ("greedy", "reinforce", "token_mean"),
    "maxrl": ("maxrl", "policy_clip", "token_mean"),
    "ppo": ("gae", "policy_clip", "token_mean"),
    "distillation": ("teacher", "policy_clip", "token_mean"),
}
EVERY_NAME = pytest.mark.parametrize("name", sorted(ONLINE_DEFAULTS))


def test_every_online_name_is_tested_here() -> None:
    assert set(PAPERS) == set(ONLINE_DEFAULTS)


@EVERY_NAME
def test_a_name_stands_for_what_its_paper_says(name: str) -> None:
    config = make(name).config
    assert (config.advantage, config.policy_loss, config.loss_aggregation) == PAPERS[name]
    bounds = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "gmpo": (0.4, 0.4), "cispo": (1.0, 4.0)}
    assert (config.clip_low, config.clip_high) == bounds.get(name, (0.2, 0.2))


@EVERY_NAME
def test_what_a_user_sets_wins_over_the_name(name: str) -> None:
    config = make(name, advantage="group_mean", policy_loss="cispo", clip_low=0.0, clip_high=0.7, loss_aggregation="prompt_mean").config
    assert (config.advantage, config.policy_loss, config.loss_aggregation) == ("group_mean", "cispo", "prompt_mean")
    assert (config.clip_low, config.clip_high) == (0.0, 0.7)


@EVERY_NAME
@pytest.mark.parametrize("level", ["none", "token", "sequence", "geometric"])
def test_components_name_terms_that_take_their_parameters_and_give_a_finite_loss(name: str, level: str) -> None:
    """With all that can stand in a loss: a wrong name or parameter would end the run at its first update."""
    algorithm = make_algorithm(
        AlgorithmConfig(
            name=name,
            kl_coefficient=KL,
            entropy_coefficient=0.01,
            correction=CorrectionConfig(level=level, action="clip", low=0.5, high=2.0),
        ),
        FACTS,
    )
    components = algorithm.components()
    one = targets(
        [-1.0, -0.5, -2.0],
        lengths=[2, 1],
        entropy=[1.0, 0.5, 0.2],
        advantage=[1.0, -1.0, 0.5],
        old=[-1.1, -0.5, np.nan],
        reference=[-1.0, -1.0, -1.0],
        values=[0.1, 0.2, 0.3],
        columns={"rollout_logprobs": [-1.0, -0.6, np.nan], "returns": [1.0, 0.0, 1.0], "old_values": [0.0, 0.0, 0.0]},
    )
    weight = one.logprobs.detach() * 0 + 1
    loss, parts = total_loss(components, one, weight, {MAIN_WEIGHT: 3.0}, find_terms(components))
    assert np.isfinite(float(loss.detach()))
    assert [part.component.term for part in parts] == [PAPERS[name][1], "kl", "entropy"]
    assert (components[0].correction is None) == (level == "none")
    critic = algorithm.critic_components()
    value, _ = total_loss(critic, one, weight, {MAIN_WEIGHT: 3.0}, find_terms(critic))
    assert float(value.detach()) == pytest.approx(0.5 * 0.5 * (0.9**2 + 0.2**2 + 0.8**2) / 3)  # the clipped value is the worse one twice


def test_settings_reach_the_components() -> None:
    algorithm = make(
        "sapo", dual_clip=3.0, options={"temperature_positive": 2.0}, kl_coefficient=KL, kl_estimator="k2", entropy_coefficient=0.5
    )
    policy, kl, entropy = algorithm.components()
    assert policy.parameters == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "temperature_positive": 2.0}
    assert (kl.coefficient, kl.parameters) == (KL, {"estimator": "k2"})
    assert entropy.coefficient == 0.5
    corrected = make(correction=CorrectionConfig(level="sequence", action="mask", low=0.25, high=4.0)).components()[0].correction
    assert corrected is not None
    assert (corrected.level, corrected.action, corrected.low, corrected.high) == ("sequence", "mask", 0.25, 4.0)


def test_a_kl_stands_in_the_loss_or_in_the_reward_and_never_in_both() -> None:
    assert [part.term for part in make(kl_coefficient=KL).components()] == ["policy_clip", "kl"]
    assert [part.term for part in make(kl_coefficient=KL, kl_in="reward").components()] == ["policy_clip"]
    assert [part.term for part in make().components()] == ["policy_clip"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, set()),
        ({"kl_coefficient": KL}, {"reference"}),
        ({"name": "ppo"}, {"values"}),
        ({"name": "ppo", "kl_coefficient": KL, "kl_in": "reward"}, {"values", "reference"}),
        ({"name": "distillation"}, {"reference"}),
    ],
)
def test_only_forwards_that_something_reads_are_asked_for(settings: dict[str, Any], expected: set[str]) -> None:
    assert make(**settings).forwards == expected


# ---- advantages of samples -----------------------------------------------------------------------------------------


def worth(name: str, rewards: Sequence[float]) -> list[float]:
    """The papers' formulas over the scored samples of a group; one alone has nothing to be compared with."""
    count, mean = len(rewards), sum(rewards) / max(1, len(rewards))
    if count < 2:
        return [0.0] * count
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / (count - 1)) ** 0.5
    formulas: dict[str, Callable[[float], float]] = {
        "group_std": lambda reward: (reward - mean) / (deviation + 1e-6),
        "group_mean": lambda reward: reward - mean,
        "leave_one_out": lambda reward: reward - (sum(rewards) - reward) / (count - 1),
        "maxrl": lambda reward: (reward - mean) / mean if mean else 0.0,
    }
    return [formulas[name](reward) for reward in rewards]


@pytest.mark.parametrize("name", ["group_std", "group_mean", "leave_one_out", "maxrl"])
def test_group_advantages_are_on_every_sampled_token_and_on_no_other(name: str) -> None:
    algorithm = make(advantage=name)
    batch = algorithm.choose(batch_of())
    assert [len(group.samples) for group in batch] == [3, 3, 2, 1, 0]
    expected = [worth(name, [reward for reward in row if reward is not None]) for row in REWARDS]
    assert_advantages(algorithm.advantages(batch), spread(batch, expected))


def test_remax_compares_with_the_greedy_sample_and_a_failed_one_trains_nobody() -> None:
    algorithm = make("remax")
    assert algorithm.greedy_baseline
    batch = algorithm.choose(batch_of(greedy=GREEDY))
    assert [len(group.samples) for group in batch] == [3, 3, 2, 0, 0]
    expected = [[1.0 - 1.5, 0.0 - 1.5, 2.0 - 1.5], [0.25, -0.25, 0.0], [0.0, 0.0], [], []]
    assert_advantages(algorithm.advantages(batch), spread(batch, expected))


def test_the_greedy_sample_is_shaped_like_those_that_are_compared_with_it() -> None:
    """Clipped samples beside an unclipped baseline would all look bad."""
    groups = batch_of([[5.0, 1.0]], greedy=[5.0])
    algorithm = make("remax", shaping=ShapingConfig(clip_high=2.0))
    batch = algorithm.choose(groups)
    assert batch[0].baseline == 2.0
    assert_advantages(algorithm.advantages(batch), spread(batch, [[0.0, -1.0]]))


def test_no_other_algorithm_asks_for_a_greedy_sample() -> None:
    assert [name for name in ONLINE_DEFAULTS if make(name).greedy_baseline] == ["remax"]


def test_each_reward_is_compared_by_itself_then_weighted_then_normalised_over_the_batch() -> None:
    """GDPO (combine=each): the sum over rewards of weight times advantage, brought to mean 0 and deviation 1 over all samples."""
    algorithm = make("grpo", shaping=ShapingConfig(combine="each"))
    batch = algorithm.choose(batch_of())
    sums = []
    for group in batch:
        rows = [
            [weight * value for value in worth("group_std", [sample.parts[name] for sample in group.samples])]
            for name, weight in FACTS.reward_weights.items()
        ]
        sums.append([sum(parts) for parts in zip(*rows, strict=True)])
    everything = np.array([value for row in sums for value in row])
    normal = [[(value - everything.mean()) / (everything.std() + 1e-6) for value in row] for row in sums]
    assert_advantages(algorithm.advantages(batch), spread(batch, normal))


def test_a_weight_of_zero_takes_a_reward_out_of_each() -> None:
    """And a reward that nobody weighted (an environment's) counts once."""
    groups = batch_of([[1.0, 0.0, 2.0]])
    shaping = ShapingConfig(combine="each")

    def found(weights: Mapping[str, float]) -> np.ndarray:
        algorithm = PolicyGradient(
            AlgorithmConfig(shaping=shaping, advantage="group_mean"), RunFacts(max_new_tokens=9, reward_weights=weights)
        )
        [row] = algorithm.advantages(algorithm.choose(groups))
        return np.array([credit.advantage.sum() / credit.advantage.astype(bool).sum() for credit in row if credit.advantage.any()])

    close(found({"exact": 1.0, "format": 0.0}), np.array([-1.0, 1.0]) * 1.5**0.5, 1e-5)  # that of 1 is exactly the mean
    close(found({"format": 0.5}), found({"exact": 1.0, "format": 0.5}))


# ---- advantages of tokens ------------------------------------------------------------------------------------------


def kl_of(sample: Sample, estimator: str) -> np.ndarray:
    delta = sampled(sample, sample.reference_logprobs) - sampled(sample, sample.old_logprobs)
    return {"k1": -delta, "k2": delta**2 / 2, "k3": np.exp(delta) - 1 - delta}[estimator]


def normalised(rows: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    everything = np.concatenate([one for row in rows for one in row])
    return [[(one - everything.mean()) / (everything.std() + 1e-6) for one in row] for row in rows]


@pytest.mark.parametrize("name", ["batch", "batch_baseline"])
@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("estimator", ["", "k1", "k2"])
def test_returns_of_tokens_are_normalised_over_all_tokens_of_the_batch(name: str, gamma: float, estimator: str) -> None:
    """REINFORCE++: R_t = sum over later sampled tokens k of gamma^(k-t) (-beta KL_k), the reward at the last; less the group's mean."""
    kl: dict[str, Any] = {"kl_coefficient": KL, "kl_in": "reward", "kl_estimator": estimator} if estimator else {}
    algorithm = make(advantage=name, gamma=gamma, **kl)
    batch = informed(algorithm.choose(batch_of()), "reference_logprobs", "old_logprobs")
    rows = []
    for group in batch:
        less = sum(sample.reward for sample in group.samples) / max(1, len(group.samples)) if name == "batch_baseline" else 0.0
        row = []
        for sample in group.samples:
            rewards = -KL * kl_of(sample, estimator) if estimator else np.zeros(sample.trajectory.sampled_tokens)
            rewards[-1] += sample.reward - less
            steps = range(len(rewards))
            row.append(np.array([sum(gamma ** (k - t) * rewards[k] for k in steps if k >= t) for t in steps]))
        rows.append(row)
    expected = [
        [tokens_of(sample, one) for sample, one in zip(group.samples, row, strict=True)]
        for group, row in zip(batch, normalised(rows), strict=True)
    ]
    assert_advantages(algorithm.advantages(batch), expected)


@pytest.mark.parametrize("kl", [0.0, KL])
def test_gae_bootstraps_over_sampled_tokens_only_and_returns_are_what_the_critic_should_have_said(kl: float) -> None:
    """A_t = sum of (gamma lambda)^k delta_(t+k) over the sampled tokens: a tool's tokens are no steps."""
    algorithm = make("ppo", gamma=0.9, gae_lambda=0.8, kl_coefficient=kl, kl_in="reward", kl_estimator="k1")
    batch = informed(algorithm.choose(batch_of()), "values", "reference_logprobs", "old_logprobs")
    credits = algorithm.advantages(batch)
    expected = []
    for group in batch:
        row = []
        for sample in group.samples:
            values = sampled(sample, sample.values)
            rewards = -kl * kl_of(sample, "k1")
            rewards[-1] += sample.reward
            count = len(values)
            deltas = [rewards[t] + (0.9 * values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
            row.append(tokens_of(sample, [sum(0.72**k * deltas[t + k] for k in range(count - t)) for t in range(count)]))
        expected.append(row)
    assert_advantages(credits, expected)
    for group, got_row, row in zip(batch, credits, expected, strict=True):
        for sample, got, one in zip(group.samples, got_row, row, strict=True):
            assert got.returns is not None
            close(got.returns, one + tokens_of(sample, sampled(sample, sample.values)), 1e-5)


def test_gae_by_hand_with_a_tool_between_two_tokens() -> None:
    """Values 0.5 at both, reward 1, lambda 0.9: 0.45 and 0.5, returns 0.95 and 1."""
    one = trajectory("g0.0", spans=[(False, 1), (True, 1), (False, 2), (True, 1)], reward=1.0)
    algorithm = make("ppo", gae_lambda=0.9)
    [chosen] = algorithm.choose([replace(plain_group(0), trajectories=(one,))])
    sample = replace(chosen.samples[0], values=np.where(one.trainable, 0.5, np.nan).astype(np.float32))
    [[credit]] = algorithm.advantages([replace(chosen, samples=(sample,))])
    close(credit.advantage, np.array([0, 0.45, 0, 0, 0.5]))
    assert credit.returns is not None
    close(credit.returns, np.array([0, 0.95, 0, 0, 1.0]))


def test_a_teacher_judges_each_token_and_an_unknown_logprob_is_neutral() -> None:
    """log teacher - log old, minus a sample of the reverse KL; samples need no reward, and unknown logprobs say nothing."""
    algorithm = make("distillation")
    unscored = [replace(group, trajectories=tuple(replace(one, reward=None, failure=None) for one in group.trajectories))
                for group in batch_of()]  # fmt: skip
    batch = informed(algorithm.choose(unscored), "reference_logprobs", "old_logprobs")
    assert [len(group.samples) for group in batch] == [4, 3, 2, 2, 2]
    first = batch[0].samples[0]
    place = int(np.flatnonzero(first.trajectory.trainable)[0])
    for name in ("reference_logprobs", "old_logprobs"):
        values = getattr(first, name).copy()
        values[place] = np.nan
        hidden = replace(first, **{name: values})
        changed = [replace(batch[0], samples=(hidden, *batch[0].samples[1:])), *batch[1:]]
        expected = [
            [tokens_of(one, np.nan_to_num(sampled(one, one.reference_logprobs) - sampled(one, one.old_logprobs))) for one in group.samples]
            for group in changed
        ]
        assert expected[0][0][place] == 0.0
        assert_advantages(algorithm.advantages(changed), expected)


def test_without_a_forward_the_engines_logprobs_are_the_old_ones() -> None:
    algorithm = make("distillation")
    batch = informed(algorithm.choose(batch_of()), "reference_logprobs")
    expected = [
        [tokens_of(one, sampled(one, one.reference_logprobs) - sampled(one, one.trajectory.logprobs)) for one in group.samples]
        for group in batch
    ]
    assert_advantages(algorithm.advantages(batch), expected)


def test_a_failed_episode_is_no_sample_of_a_teacher() -> None:
    chosen = make("distillation").choose(batch_of())
    assert [len(group.samples) for group in chosen] == [3, 3, 2, 1, 0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_reward_of_a_sample_is_the_sum_over_its_tokens(estimator: str) -> None:
    """Before the group is compared, so its mean has the KL too."""
    algorithm = make(advantage="group_mean", kl_coefficient=KL, kl_in="reward", kl_estimator=estimator)
    batch = informed(algorithm.choose(batch_of()), "reference_logprobs", "old_logprobs")
    totals = [worth("group_mean", [sample.reward - KL * kl_of(sample, estimator).sum() for sample in group.samples]) for group in batch]
    assert_advantages(algorithm.advantages(batch), spread(batch, totals))


def test_whitening_is_over_the_trained_tokens_of_the_batch() -> None:
    algorithm = make(advantage="group_mean", shaping=ShapingConfig(whiten=True))
    batch = algorithm.choose(batch_of())
    rows = [
        [np.full(sample.trajectory.sampled_tokens, value) for sample, value in zip(group.samples, row, strict=True)]
        for group, row in zip(batch, [worth("group_mean", [s.reward for s in group.samples]) for group in batch], strict=True)
    ]
    expected = [
        [tokens_of(sample, one) for sample, one in zip(group.samples, row, strict=True)]
        for group, row in zip(batch, normalised(rows), strict=True)
    ]
    assert_advantages(algorithm.advantages(batch), expected)


# ---- shaping -------------------------------------------------------------------------------------------------------


def shaped(reward: float, tokens: int, **settings: Any) -> float:
    one = trajectory("g0.0", spans=[(False, 2), (True, tokens), (False, 30)], reward=reward)
    [chosen] = make(shaping=ShapingConfig(**settings)).choose([replace(plain_group(0), trajectories=(one,))])
    return chosen.samples[0].reward


@pytest.mark.parametrize(("reward", "expected"), [(-3.0, -1.0), (-1.0, -1.0), (0.5, 0.5), (2.0, 2.0), (7.0, 2.0)])
def test_rewards_are_cut_at_both_bounds(reward: float, expected: float) -> None:
    assert shaped(reward, 3, clip_low=-1.0, clip_high=2.0) == expected


@pytest.mark.parametrize(("tokens", "lost"), [(1, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (9, 1.5), (10, 2.0), (11, 2.0), (40, 2.0)])
def test_soft_overlong_punishment_grows_over_the_buffer_and_ends_at_its_penalty(tokens: int, lost: float) -> None:
    """DAPO eq. 13 with max_new_tokens 10 and a buffer of 4; 30 tokens of a tool cost nothing."""
    assert shaped(1.0, tokens, overlong_buffer=4, overlong_penalty=2.0) == pytest.approx(1.0 - lost)


@pytest.mark.parametrize(("tokens", "lost"), [(1, 0.05), (5, 0.25), (10, 0.5), (20, 0.5)])
def test_the_length_penalty_is_in_proportion_and_not_clipped_away(tokens: int, lost: float) -> None:
    assert shaped(5.0, tokens, length_penalty=0.5, clip_high=1.0) == pytest.approx(1.0 - lost)


def test_without_settings_a_reward_stays_what_it_is() -> None:
    assert shaped(123.5, 40) == 123.5


# ---- filters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "left"), [("keep", [3, 3, 2, 1, 0]), ("drop", [3, 3, 0, 0, 0]), ("resample", [3, 3, 0, 0, 0])])
def test_groups_without_variance(setting: str, left: list[int]) -> None:
    """Equal rewards, one scored sample, and none: nothing to compare. Groups that failed are counted as such and not replaced."""
    algorithm = make(filter=FilterConfig(zero_variance=setting))
    groups = batch_of()
    batch = algorithm.choose(groups)
    assert [len(group.samples) for group in batch] == left
    assert [len(row) for row in algorithm.advantages(batch)] == left
    assert [algorithm.refuses(group) for group in groups] == ([False] * 5 if setting == "keep" else [False, False, True, True, False])


@pytest.mark.parametrize(
    ("bounds", "refused"),
    [
        ({}, [False, False]),
        ({"least_mean": 0.25}, [False, False]),
        ({"least_mean": 0.26}, [False, True]),
        ({"most_mean": 1.0}, [False, False]),
        ({"most_mean": 0.99}, [True, False]),
        ({"least_mean": 0.3, "most_mean": 0.9}, [True, True]),
    ],
)
def test_groups_that_are_too_hard_or_too_easy(bounds: dict[str, Any], refused: list[bool]) -> None:
    """Means 1 and 0.25; a bound itself is allowed. Without the filter bounds say nothing."""
    groups = batch_of(REWARDS[:2])
    algorithm = make(filter=FilterConfig(zero_variance="drop", **bounds))
    assert [algorithm.refuses(group) for group in groups] == refused
    off = make(filter=FilterConfig(**bounds))
    assert not any(off.refuses(group) for group in groups)
    assert [len(group.samples) for group in off.choose(groups)] == [3, 3]


def test_the_filter_looks_at_shaped_rewards() -> None:
    algorithm = make(filter=FilterConfig(zero_variance="drop"), shaping=ShapingConfig(clip_high=1.0))
    assert algorithm.refuses(plain_group(0, [1.0, 5.0]))
    assert not make(filter=FilterConfig(zero_variance="drop")).refuses(plain_group(0, [1.0, 5.0]))


@pytest.mark.parametrize("advantage", ["group_mean", "batch_baseline"])
def test_a_truncated_sample_that_is_dropped_stays_in_the_baseline(advantage: str) -> None:
    """[1, 0, 2 (cut)]: the mean is 1 with it, and would be 0.5 without."""
    whole = plain_group(0, [1.0, 0.0, 2.0])
    cut = replace(whole, trajectories=(*whole.trajectories[:2], replace(whole.trajectories[2], truncated=True)))
    algorithm = make(advantage=advantage, filter=FilterConfig(truncated="drop"))
    batch = algorithm.choose([cut])
    assert [sample.trained for sample in batch[0].samples] == [True, True, False]
    [row] = algorithm.advantages(batch)
    # Of the batch: 0 and -1, three tokens each, are brought to mean 0 and deviation 1 without the third.
    expected = [0.0, -1.0] if advantage == "group_mean" else [1.0, -1.0]
    for credit, value in zip(row[:2], expected, strict=True):
        close(credit.advantage[2:], np.full(3, value), 1e-5)
    assert [sample.trained for sample in make(filter=FilterConfig()).choose([cut])[0].samples] == [True] * 3


def test_a_sample_that_sampled_nothing_is_in_the_baseline_only() -> None:
    """Its environment ended the episode at once."""
    nothing = trajectory("g0.1", spans=[(False, 4)], reward=1.0)
    group = replace(plain_group(0), trajectories=(trajectory("g0.0", reward=0.0), nothing))
    algorithm = make(advantage="group_mean")
    batch = algorithm.choose([group])
    assert [sample.trained for sample in batch[0].samples] == [True, False]
    assert_advantages(algorithm.advantages(batch), spread(batch, [[-0.5, 0.5]]))


# ---- nothing to learn from -----------------------------------------------------------------------------------------

EMPTY: list[list[list[float | None]]] = [[[None, None]], [[2.0]], [[None, 2.0]], []]


@EVERY_NAME
@pytest.mark.parametrize("rewards", EMPTY)
@pytest.mark.parametrize("whiten", [False, True])
def test_groups_without_scores_and_of_one_give_finite_advantages(name: str, rewards: list[list[float | None]], whiten: bool) -> None:
    algorithm = make(name, shaping=ShapingConfig(whiten=whiten))
    groups = batch_of(rewards, greedy=[1.0] * len(rewards))
    batch = informed(algorithm.choose(groups), "reference_logprobs", "values")
    credits = algorithm.advantages(batch)
    assert [len(row) for row in credits] == [sum(reward is not None for reward in row) for row in rewards]
    assert all(np.isfinite(credit.advantage).all() for row in credits for credit in row)
    if PAPERS[name][0] not in ("greedy", "batch", "gae", "teacher"):
        assert not any(credit.advantage.any() for row in credits for credit in row), "one sample has nothing to be compared with"


@EVERY_NAME
def test_an_unscored_sample_changes_nothing_for_the_others(name: str) -> None:
    """Taken as 0 it would be in the mean, the deviation and the batch's normalisation."""
    algorithm = make(name, kl_coefficient=KL)

    def found(rewards: list[list[float | None]]) -> dict[str, np.ndarray]:
        batch = informed(algorithm.choose(pick(rewards)), "reference_logprobs", "values")
        credits = algorithm.advantages(batch)
        return {
            sample.trajectory.trajectory_id: credit.advantage
            for group, row in zip(batch, credits, strict=True)
            for sample, credit in zip(group.samples, row, strict=True)
        }

    def pick(rewards: list[list[float | None]]) -> list[Group]:
        groups = batch_of(greedy=[1.0] * len(REWARDS))
        kept = [[one for one in group.trajectories if one.reward is not None or rewards is REWARDS] for group in groups]
        return [replace(group, trajectories=tuple(row)) for group, row in zip(groups, kept, strict=True)]

    with_none, without = found(REWARDS), found([])
    assert with_none.keys() == without.keys()
    assert len(without) == 9
    for trajectory_id, advantage in without.items():
        np.testing.assert_array_equal(with_none[trajectory_id], advantage)


# ---- from step to step ---------------------------------------------------------------------------------------------


def test_an_adaptive_coefficient_is_steered_by_the_losss_kl_and_survives_a_resume() -> None:
    settings: dict[str, Any] = {"kl_coefficient": KL, "kl_target": 0.1, "kl_horizon": 10}
    algorithm = make(**settings)
    assert algorithm.observe({"train/kl": 0.15}) == {"train/kl": 0.15, "train/kl_coefficient": KL}
    steered = KL * np.exp(0.5 / 10)
    assert algorithm.components()[1].coefficient == pytest.approx(steered)
    resumed = make(**settings)
    resumed.restore(algorithm.state())
    assert resumed.observe({"train/kl": 0.1})["train/kl_coefficient"] == pytest.approx(steered)
    assert resumed.state() == algorithm.state()


def test_a_fixed_coefficient_stays_and_a_missing_kl_steers_nothing() -> None:
    fixed = make(kl_coefficient=KL)
    assert fixed.observe({"train/kl": 5.0})["train/kl_coefficient"] == KL
    assert fixed.kl.coefficient == KL
    adaptive = make(kl_coefficient=KL, kl_target=0.1)
    for metrics in ({}, {"train/kl": float("nan")}):
        assert adaptive.observe(metrics) == {}
    assert adaptive.kl.coefficient == KL
    assert make().observe({"train/kl": 5.0}) == {}


def test_a_kl_in_the_reward_is_measured_over_the_trained_tokens_and_steers_the_next_batch() -> None:
    """A truncated sample that is not trained on has no logprobs: counted as 0, it would pull the mean down."""
    algorithm = make(
        advantage="group_mean", kl_coefficient=KL, kl_in="reward", kl_estimator="k2", kl_target=0.1, filter=FilterConfig(truncated="drop")
    )
    first, *rest = batch_of()
    groups = [replace(first, trajectories=(replace(first.trajectories[0], truncated=True), *first.trajectories[1:])), *rest]
    batch = informed(algorithm.choose(groups), "reference_logprobs", "old_logprobs")
    algorithm.advantages(batch)
    trained = [sample for group in batch for sample in group.samples if sample.trained]
    assert len(trained) == 8
    mean = np.concatenate([kl_of(sample, "k2") for sample in trained]).mean()
    found = algorithm.observe({"train/kl": 123.0})
    assert found["train/kl"] == pytest.approx(mean, rel=1e-5)
    assert algorithm.kl.coefficient > KL
    again = algorithm.advantages(batch)
    totals = [
        worth(
            "group_mean",
            [one.reward - (algorithm.kl.coefficient * kl_of(one, "k2").sum() if one.trained else 0.0) for one in group.samples],
        )
        for group in batch
    ]
    assert_advantages(again, spread(batch, totals))
