"""Policy losses against independent numpy statements of the papers' formulas: values, gradients, what is reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loss_targets import close, gradient, slopes, targets, value

from rlpost.algorithms.losses import Term
from rlpost.algorithms.policy import cispo, entropy_bonus, gmpo, gspo, policy_clip, reinforce, sapo

LENGTHS = [5, 1, 4, 2]
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES: dict[str, Callable[..., Term]] = {
    "policy_clip": policy_clip,
    "reinforce": reinforce,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
}
EVERY = pytest.mark.parametrize("name", sorted(LOSSES))


def batch(seed: int, spread: float = 0.4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logprobs, old logprobs and advantages (one a sequence, of both signs) of four sequences ``[targets]``."""
    random = np.random.default_rng(seed)
    logprobs = -random.exponential(size=sum(LENGTHS)) - 0.05
    old = logprobs + spread * random.normal(size=len(logprobs))
    return logprobs, old, np.repeat(random.permutation([1.5, -0.7, 0.4, -2.0]), LENGTHS)


def by_sequence(array: np.ndarray) -> list[np.ndarray]:
    return np.split(array, np.cumsum(LENGTHS)[:-1])


# ---- formulas of a token -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (1.0, 3.0)])
def test_policy_clip_is_ppos_formula_with_its_gradient(clip: tuple[float, float]) -> None:
    """PPO, eq. 7: per token -min(r A, clip(r) A); the gradient is -A r unless the clipped side is the smaller one."""
    low, high = clip
    differences, advantages = (a.reshape(-1) for a in np.meshgrid([-1.5, -0.3, -0.1, 0.0, 0.1, 0.27, 1.5], [-2.0, 0.0, 0.7]))
    given = targets(differences - 2.0, advantage=advantages, old=np.full(len(differences), -2.0))
    term = policy_clip(given, clip_low=low, clip_high=high)
    ratio = np.exp(differences)
    clipped = np.clip(ratio, 1 - low, 1 + high)
    close(value(term), -np.minimum(ratio * advantages, clipped * advantages))
    hit = clipped * advantages < ratio * advantages
    close(gradient(term.loss, given.logprobs), np.where(hit, 0.0, -advantages * ratio))
    np.testing.assert_array_equal(term.means["clip_fraction"].numpy(), hit)
    close(term.maxima["ratio_max"].numpy(), ratio)


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    """Ye et al. 2020, eq. 5: with A < 0 the gain is max(min(r A, clip(r) A), c A); A > 0 is as before."""
    ratios, advantages = np.array([0.5, 1.0, 2.9, 3.1, 9.0, 9.0]), np.array([-1.0, -1.0, -1.0, -1.0, -2.0, 2.0])
    given = targets(np.log(ratios) - 1.0, advantage=advantages, old=np.full(6, -1.0))
    term = policy_clip(given, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    close(value(term), [0.8, 1.0, 2.9, 3.0, 6.0, -2.4])
    close(gradient(term.loss, given.logprobs), [0.0, 1.0, 2.9, 0.0, 0.0, 0.0])


def test_reinforce_is_minus_advantage_times_logprob_and_reports_the_ratio_only() -> None:
    logprobs, old, advantages = batch(0)
    given = targets(logprobs, lengths=LENGTHS, advantage=advantages, old=old)
    term = reinforce(given, **BOUNDS)
    close(value(term), -advantages * logprobs)
    close(gradient(term.loss, given.logprobs), -advantages)
    close(term.maxima["ratio_max"].numpy(), np.exp(logprobs - old))


@pytest.mark.parametrize("bounds", [(1.0, 0.3), (0.2, 0.2)])
def test_cispo_weights_every_token_by_its_clipped_ratio_without_a_gradient_through_it(bounds: tuple[float, float]) -> None:
    """MiniMax-M1, eq. 4 and 5: clipped tokens keep their gradient, which PPO's lose."""
    logprobs, old, advantages = batch(1)
    given = targets(logprobs, lengths=LENGTHS, advantage=advantages, old=old)
    term = cispo(given, clip_low=bounds[0], clip_high=bounds[1])
    ratio = np.exp(logprobs - old)
    weight = np.minimum(np.maximum(ratio, 1 - bounds[0]), 1 + bounds[1])
    close(value(term), -weight * advantages * logprobs)
    close(gradient(term.loss, given.logprobs), -weight * advantages)
    assert 0 < term.means["clip_fraction"].sum() < len(logprobs)
    np.testing.assert_array_equal(term.means["clip_fraction"].numpy(), weight != ratio)


@pytest.mark.parametrize("temperatures", [{}, {"temperature_positive": 2.0, "temperature_negative": 5.0}])
def test_sapo_is_a_sigmoid_gate_with_a_temperature_by_the_sign_of_the_advantage(temperatures: dict[str, float]) -> None:
    logprobs, old, advantages = batch(2)

    def statement(at: np.ndarray) -> np.ndarray:
        ratio, found = np.exp(at - old), []
        for r, a in zip(ratio, advantages, strict=True):
            tau = temperatures.get("temperature_positive", 1.0) if a > 0 else temperatures.get("temperature_negative", 1.05)
            found.append(-a * 4 / tau / (1 + math.exp(-tau * (r - 1))))
        return np.array(found)

    given = targets(logprobs, lengths=LENGTHS, advantage=advantages, old=old)
    term = sapo(given, **BOUNDS, **temperatures)
    close(value(term), statement(logprobs))
    close(gradient(term.loss, given.logprobs), slopes(lambda at: statement(at).sum(), logprobs))


# ---- formulas of a sequence ----------------------------------------------------------------------------------------


def gspo_statement(logprobs: np.ndarray, old: np.ndarray, advantages: np.ndarray, low: float, high: float) -> float:
    """GSPO, eq. 5: the sum over sequences of -min(s A, clip(s) A)."""
    total = 0.0
    for new, before, advantage in zip(by_sequence(logprobs), by_sequence(old), by_sequence(advantages), strict=True):
        s = (np.prod(np.exp(new)) / np.prod(np.exp(before))) ** (1 / len(new))
        total -= min(s * advantage[0], min(max(s, 1 - low), 1 + high) * advantage[0])
    return float(total)


def gmpo_statement(logprobs: np.ndarray, old: np.ndarray, advantages: np.ndarray, low: float, high: float) -> float:
    """GMPO: the sum over sequences of -A (prod of token ratios, each clipped against A)^(1 / tokens)."""
    total = 0.0
    for new, before, advantage in zip(by_sequence(logprobs), by_sequence(old), by_sequence(advantages), strict=True):
        sign = math.copysign(1.0, advantage[0])
        product = 1.0
        for ratio in np.exp(new - before):
            clipped = min(max(ratio, math.exp(-low)), math.exp(high))
            product *= min(ratio**sign, clipped**sign) ** sign
        total -= advantage[0] * product ** (1 / len(new))
    return float(total)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("loss", "statement", "bounds"),
    [
        (gspo, gspo_statement, (0.1, 0.15)),
        (gspo, gspo_statement, (3e-4, 4e-4)),
        (gmpo, gmpo_statement, (0.4, 0.4)),
        (gmpo, gmpo_statement, (0.1, 0.3)),
    ],
)
def test_losses_of_a_sequence_sum_to_the_papers_with_sequence_mean_weights(
    seed: int, loss: Callable[..., Term], statement: Callable[..., float], bounds: tuple[float, float]
) -> None:
    logprobs, old, advantages = batch(seed)
    given = targets(logprobs, lengths=LENGTHS, advantage=advantages, old=old)
    term = loss(given, clip_low=bounds[0], clip_high=bounds[1])
    weighted = term.loss * torch.tensor(np.repeat(1 / np.array(LENGTHS), LENGTHS))
    assert float(weighted.sum().detach()) == pytest.approx(statement(logprobs, old, advantages, *bounds))
    close(gradient(weighted, given.logprobs), slopes(lambda at: statement(at, old, advantages, *bounds), logprobs), 1e-5)


def test_gspo_clips_whole_sequences_and_reports_their_ratio() -> None:
    """Token ratios 4 and 1/4 are a sequence ratio of 1: nothing is clipped. Two of 2 are one of 2: both tokens are."""
    ratios = np.array([4.0, 0.25, 2.0, 2.0])
    given = targets(np.log(ratios) - 3.0, lengths=[2, 2], advantage=np.ones(4), old=np.full(4, -3.0))
    term = gspo(given, clip_low=0.2, clip_high=0.2)
    assert term.means["clip_fraction"].tolist() == [0.0, 0.0, 1.0, 1.0]
    close(term.maxima["ratio_max"].numpy(), [1.0, 1.0, 2.0, 2.0])
    close(gradient(term.loss, given.logprobs), [-1.0, -1.0, 0.0, 0.0])


def test_gspo_gives_each_token_its_own_advantage() -> None:
    """GSPO-token, eq. 13: with advantages that differ within a sequence, each token's gradient is -s A of its own."""
    given = targets([-1.0, -1.0], advantage=[1.0, -3.0], old=[-1.05, -1.05])
    term = gspo(given, clip_low=0.2, clip_high=0.2)
    close(gradient(term.loss, given.logprobs), -math.exp(0.05) * np.array([1.0, -3.0]))


def test_gmpo_clips_only_what_the_advantage_would_push_further() -> None:
    """A > 0: a ratio above the bound is cut, one far below is not; A < 0 the reverse."""
    ratios = np.array([9.0, 1 / 9, 9.0, 1 / 9])
    given = targets(np.log(ratios) - 3.0, lengths=[2, 2], advantage=[1.0, 1.0, -1.0, -1.0], old=np.full(4, -3.0))
    term = gmpo(given, clip_low=0.4, clip_high=0.4)
    assert term.means["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert gradient(term.loss, given.logprobs)[[0, 3]].tolist() == [0.0, 0.0]


# ---- what all of them keep -----------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("known", [True, False])
def test_unchanged_policy_has_ratio_exactly_one_and_reinforces_gradient(name: str, known: bool) -> None:
    """Without old logprobs, or with those of the same weights. A sequence's gradient is compared as a sum of equal weights."""
    logprobs, _, advantages = batch(3)
    given = targets(logprobs, lengths=LENGTHS, advantage=advantages, old=logprobs if known else None, dtype=torch.float32)
    term = LOSSES[name](given, **BOUNDS)
    assert (term.maxima["ratio_max"] == 1.0).all()
    assert not any(means.any() for means in term.means.values())
    close(gradient(term.loss, given.logprobs), -advantages, 1e-6)


@pytest.mark.parametrize("name", ["policy_clip", "gspo", "cispo"])
def test_on_policy_gradient_is_minus_the_advantage_bit_for_bit(name: str) -> None:
    given = targets([-0.1, -30.0, -2.5], advantage=[1.0, -0.5, 0.0], dtype=torch.float32)
    assert gradient(LOSSES[name](given, **BOUNDS).loss, given.logprobs).tolist() == [-1.0, 0.5, 0.0]


@EVERY
@pytest.mark.parametrize("unknown", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_the_engine_could_not_give_counts_as_the_policys_own(name: str, unknown: float) -> None:
    """0 would not be neutral, and NaN would end the run: the loss is the same as with the current logprob as the old one."""
    logprobs, old, advantages = batch(4)
    with_hole, with_own = old.copy(), old.copy()
    with_hole[[1, 5, 7]], with_own[[1, 5, 7]] = unknown, logprobs[[1, 5, 7]]
    found = []
    for before in (with_hole, with_own):
        given = targets(logprobs, lengths=LENGTHS, advantage=advantages, old=before)
        term = LOSSES[name](given, **BOUNDS)
        found.append((value(term), gradient(term.loss, given.logprobs), term.maxima["ratio_max"].numpy()))
    for hole, own in zip(*found, strict=True):
        assert np.isfinite(hole).all()
        np.testing.assert_array_equal(hole, own)
    assert name == "gspo" or (found[0][2][[1, 5, 7]] == 1.0).all()


@EVERY
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("logprob", [-1.0, -1000.0])
def test_a_ratio_beyond_float32_makes_no_nan(name: str, advantage: float, logprob: float) -> None:
    """exp(999) is inf, and inf * 0 in the backward pass would destroy the gradient of every parameter."""
    given = targets([logprob, -1.0], advantage=[advantage] * 2, old=[-1001.0 - logprob, -1.0], dtype=torch.float32)
    term = LOSSES[name](given, **BOUNDS, dual_clip=3.0)
    assert np.isfinite(value(term)).all()
    assert np.isfinite(gradient(term.loss, given.logprobs)).all()


@EVERY
def test_zero_advantages_give_no_loss_and_no_gradient(name: str) -> None:
    logprobs, old, _ = batch(5)
    given = targets(logprobs, lengths=LENGTHS, advantage=np.zeros(len(logprobs)), old=old)
    term = LOSSES[name](given, **BOUNDS)
    assert not value(term).any()
    assert not gradient(term.loss, given.logprobs).any()


@EVERY
def test_a_policy_loss_without_advantages_is_an_error_and_not_zero(name: str) -> None:
    with pytest.raises(AssertionError, match="advantages"):
        LOSSES[name](targets([-1.0]), **BOUNDS)


def test_entropy_bonus_lowers_the_loss_with_rising_entropy() -> None:
    given = targets([-1.0, -1.0], entropy=[0.5, 2.0])
    term = entropy_bonus(given)
    assert term.loss.tolist() == [-0.5, -2.0]
    assert gradient(term.loss, given.entropy).tolist() == [-1.0, -1.0]


def test_policy_losses_take_the_same_settings() -> None:
    """The configuration names any of them without knowing which of the bounds it uses."""
    given: dict[str, Any] = {**BOUNDS, "dual_clip": 3.0}
    one = targets([-1.0], advantage=[1.0], old=[-1.1])
    assert {name: loss(one, **given).loss.shape for name, loss in LOSSES.items()} == dict.fromkeys(LOSSES, (1,))
