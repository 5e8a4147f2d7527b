"""Losses of pairs and of labelled answers against independent numpy statements; pairs are found by name, wherever they lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loss_targets import close, gradient, slopes, targets, value

from rlpost.algorithms.losses import Targets, Term
from rlpost.algorithms.preference import kto, likelihood, odds_ratio, preference, score_pairs, simple_preference

LENGTHS = [3, 1, 4, 2, 5, 2]
PAIR = [7, 4, 4, 9, 7, 9]
SIDE = [1, -1, 1, -1, -1, 1]
"""Three pairs: sequences 0 and 4, 2 and 1, 5 and 3 (chosen first)."""
PARTNERS = {0: 4, 2: 1, 5: 3}
TOKENS = sum(LENGTHS)


def numbers(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs of policy and reference ``[targets]``."""
    random = np.random.default_rng(seed)
    policy = -random.exponential(size=TOKENS) - 0.05
    return policy, policy + 0.5 * random.normal(size=TOKENS)


def given(policy: np.ndarray, reference: np.ndarray | None, **more: Any) -> Targets:
    return targets(policy, lengths=LENGTHS, reference=reference, scalars={"pair": PAIR, "side": SIDE, **more.pop("scalars", {})}, **more)


def parts(array: np.ndarray) -> list[np.ndarray]:
    return np.split(array, np.cumsum(LENGTHS)[:-1])


def of_pairs(statement: Callable[[float, float], float], scores: list[float]) -> np.ndarray:
    """The statement's loss of (chosen score, rejected score) at the chosen sequence, 0 at the rejected."""
    found = np.zeros(len(LENGTHS))
    for chosen, rejected in PARTNERS.items():
        found[chosen] = statement(scores[chosen], scores[rejected])
    return found


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def check(term: Term, one: Targets, statement: Callable[[np.ndarray], np.ndarray], at: np.ndarray) -> None:
    """Value and gradient of a term in ``at`` (its logprobs or values) are those of the statement."""
    close(value(term), statement(at))
    wrt = one.logprobs if one.values is None else one.values
    close(gradient(term.loss, wrt), slopes(lambda moved: float(statement(moved).sum()), at), 1e-5)


DPO: dict[tuple[str, float], Callable[[float, float], float]] = {
    ("sigmoid", 0.0): lambda h, beta: -math.log(sigmoid(beta * h)),
    ("sigmoid", 0.2): lambda h, beta: -0.8 * math.log(sigmoid(beta * h)) - 0.2 * math.log(sigmoid(-beta * h)),
    ("robust", 0.2): lambda h, beta: (-0.8 * math.log(sigmoid(beta * h)) + 0.2 * math.log(sigmoid(-beta * h))) / 0.6,
    ("hinge", 0.0): lambda h, beta: max(0.0, 1 - beta * h),
    ("ipo", 0.0): lambda h, beta: (h - 1 / (2 * beta)) ** 2,
}


@pytest.mark.parametrize(("loss", "label_smoothing"), sorted(DPO))
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_and_its_variants_are_their_formulas(loss: str, label_smoothing: float, beta: float) -> None:
    policy, reference = numbers(1)
    total = np.mean if loss == "ipo" else np.sum

    def statement(at: np.ndarray) -> np.ndarray:
        scores = [float(total(a - b)) for a, b in zip(parts(at), parts(reference), strict=True)]
        return of_pairs(lambda chosen, rejected: DPO[loss, label_smoothing](chosen - rejected, beta), scores)

    one = given(policy, reference)
    check(preference(one, loss=loss, beta=beta, label_smoothing=label_smoothing), one, statement, policy)


def test_robust_loss_of_flipped_labels_is_in_the_mean_dpos_loss_of_right_ones() -> None:
    """Chowdhury et al. 2024: with a share e of labels flipped, (1 - e) robust(h) + e robust(-h) = -log sigmoid(beta h)."""
    policy, reference = numbers(2)
    right = given(policy, reference)
    wrong = targets(policy, lengths=LENGTHS, reference=reference, scalars={"pair": PAIR, "side": [-side for side in SIDE]})
    mean = 0.7 * value(preference(right, loss="robust", beta=0.5, label_smoothing=0.3)).sum()
    mean += 0.3 * value(preference(wrong, loss="robust", beta=0.5, label_smoothing=0.3)).sum()
    assert mean == pytest.approx(value(preference(right, loss="sigmoid", beta=0.5)).sum())


def test_simpo_compares_mean_logprobs_with_a_margin_and_no_reference() -> None:
    policy, _ = numbers(3)

    def statement(at: np.ndarray) -> np.ndarray:
        def loss(chosen: float, rejected: float) -> float:
            margin = 2.0 * (chosen - rejected) - 0.5
            return -0.9 * math.log(sigmoid(margin)) - 0.1 * math.log(sigmoid(-margin))

        return of_pairs(loss, [float(np.mean(part)) for part in parts(at)])

    one = given(policy, None)
    check(simple_preference(one, beta=2.0, margin=0.5, label_smoothing=0.1), one, statement, policy)


def test_orpo_compares_odds_of_mean_likelihoods() -> None:
    policy, _ = numbers(4)

    def statement(at: np.ndarray) -> np.ndarray:
        likelihoods = [math.exp(np.mean(part)) for part in parts(at)]
        return of_pairs(lambda chosen, rejected: -math.log(sigmoid(math.log(chosen / rejected))), [p / (1 - p) for p in likelihoods])

    one = given(policy, None)
    check(odds_ratio(one), one, statement, policy)


@pytest.mark.parametrize("policy", [[0.0, 0.0], [-1e-9, -1e-9], [-1e-12, -300.0], [-300.0, 0.0]])
def test_odds_of_an_answer_that_is_certain_are_finite(policy: list[float]) -> None:
    """log(1 - p) is -inf at p = 1, which float32 reaches easily."""
    one = targets(policy, lengths=[1, 1], scalars={"pair": [0, 0], "side": [1, -1]}, dtype=torch.float32)
    term = odds_ratio(one)
    assert np.isfinite(value(term)).all()
    assert np.isfinite(gradient(term.loss, one.logprobs)).all()


@pytest.mark.parametrize("loss", ["sigmoid", "robust", "hinge", "ipo"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_extreme_margins_are_finite(loss: str, gap: float) -> None:
    one = targets([gap, 0.0], lengths=[1, 1], reference=[0.0, gap], scalars={"pair": [0, 0], "side": [1, -1]}, dtype=torch.float32)
    term = preference(one, loss=loss, beta=0.5, label_smoothing=0.1)
    assert np.isfinite(value(term)).all()
    assert np.isfinite(gradient(term.loss, one.logprobs)).all()


def test_likelihood_is_the_negative_logprob_of_each_target() -> None:
    one = targets([-1.0, -0.25])
    assert likelihood(one).loss.tolist() == [1.0, 0.25]


# ---- labelled answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", [0.0, 0.4])
def test_kto_is_its_formula(baseline: float) -> None:
    policy, reference = numbers(5)
    wanted = [1, 0, 0, 1, 1, 0]

    def statement(at: np.ndarray) -> np.ndarray:
        found = []
        for good, a, b in zip(wanted, parts(at), parts(reference), strict=True):
            ratio = math.log(np.prod(np.exp(a)) / np.prod(np.exp(b)))
            found.append(1 - sigmoid(0.3 * (ratio - baseline)) if good else 1 - sigmoid(0.3 * (baseline - ratio)))
        return np.array(found)

    one = targets(policy, lengths=LENGTHS, reference=reference, scalars={"wanted": wanted})
    term = kto(one, beta=0.3, baseline=baseline)
    check(term, one, statement, policy)
    ratios = [float(np.sum(a - b)) for a, b in zip(parts(policy), parts(reference), strict=True)]
    close(term.means["margin"].numpy(), [0.3 * ratio * (1 if good else -1) for ratio, good in zip(ratios, wanted, strict=True)])
    right = [ratio > baseline if good else ratio < baseline for ratio, good in zip(ratios, wanted, strict=True)]
    np.testing.assert_array_equal(term.means["accuracy"].numpy(), right)


# ---- reward models -------------------------------------------------------------------------------------------------


def test_score_pairs_is_bradley_terrys_with_margin_and_centering() -> None:
    scores = np.array([1.2, -0.3, 0.8, 2.0, 0.5, 1.0])
    margins = [0.5, 0.5, 0.0, 0.0, 0.5, 0.0]
    pair, partners = [1, 1, 2, 2, 3, 3], {0: 1, 3: 2, 4: 5}

    def statement(at: np.ndarray) -> np.ndarray:
        found = np.zeros(6)
        for chosen, rejected in partners.items():
            found[chosen] = -math.log(sigmoid(at[chosen] - at[rejected] - margins[chosen])) + 0.1 * (at[chosen] + at[rejected]) ** 2
        return found

    one = targets(np.zeros(6), lengths=[1] * 6, values=scores, scalars={"pair": pair, "side": [1, -1, -1, 1, 1, -1], "margin": margins})
    term = score_pairs(one, centering=0.1)
    check(term, one, statement, scores)
    assert term.means["accuracy"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    close(term.means["margin"].numpy(), [1.5, 0.0, 0.0, 1.2, -0.5, 0.0])


# ---- pairs ---------------------------------------------------------------------------------------------------------


def test_what_is_reported_stands_at_the_chosen_sequence() -> None:
    """So that the loss's weights, which are 0 at the rejected, average over pairs."""
    policy, reference = numbers(6)
    term = preference(given(policy, reference), loss="sigmoid", beta=0.3)
    rewards = [0.3 * float(np.sum(a - b)) for a, b in zip(parts(policy), parts(reference), strict=True)]
    close(term.means["reward_chosen"].numpy(), of_pairs(lambda chosen, rejected: chosen, rewards))
    close(term.means["reward_rejected"].numpy(), of_pairs(lambda chosen, rejected: rejected, rewards))
    close(term.means["margin"].numpy(), of_pairs(lambda chosen, rejected: chosen - rejected, rewards))
    close(term.means["accuracy"].numpy(), of_pairs(lambda chosen, rejected: float(chosen > rejected), rewards))
    assert 0 < term.means["accuracy"].sum() < 3


@pytest.mark.parametrize(
    ("pair", "side"),
    [([0, 1], [1, -1]), ([0, 0], [1, 1]), ([0, 0], [-1, -1]), ([0, 0, 0], [1, -1, -1]), ([0], [1])],
)
def test_half_a_pair_is_an_error_and_never_compared_with_a_stranger(pair: list[int], side: list[int]) -> None:
    """Pairs split at the wrong index, or over two micro-batches, would train on nonsense."""
    one = targets(-np.ones(len(pair)), lengths=[1] * len(pair), scalars={"pair": pair, "side": side})
    with pytest.raises(AssertionError, match="one chosen and one rejected"):
        odds_ratio(one)


def test_unknown_reference_logprobs_are_neutral() -> None:
    """As if the reference agreed with the policy at that token; no NaN in the gradient."""
    policy, reference = numbers(8)
    hole, own = reference.copy(), reference.copy()
    hole[[0, 6]], own[[0, 6]] = math.nan, policy[[0, 6]]
    found = [given(policy, one) for one in (hole, own)]
    losses = [preference(one, loss="sigmoid", beta=0.3).loss for one in found]
    slope = [gradient(loss, one.logprobs) for loss, one in zip(losses, found, strict=True)]
    np.testing.assert_array_equal(losses[0].detach().numpy(), losses[1].detach().numpy())
    np.testing.assert_array_equal(slope[0], slope[1])


def test_losses_without_what_they_need_are_errors_and_not_zero() -> None:
    policy, reference = numbers(9)
    with pytest.raises(AssertionError, match="reference"):
        preference(given(policy, None), loss="sigmoid", beta=0.1)
    with pytest.raises(AssertionError, match="softmax"):
        preference(given(policy, reference), loss="softmax", beta=0.1)
    with pytest.raises(AssertionError, match="value head"):
        score_pairs(given(policy, None), centering=0.0)
