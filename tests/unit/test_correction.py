"""Off-policy correction: the weight of engine's samples against an independent statement, and what it must never touch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_targets import close, gradient, targets

from rlpost.algorithms.correction import correction_factor
from rlpost.algorithms.losses import Targets, total_loss
from rlpost.algorithms.policy import policy_clip
from rlpost.types import MAIN_WEIGHT, LossComponent, OffPolicyCorrection

LENGTHS = [3, 1, 4]
LEVELS = ["token", "sequence", "geometric"]
ACTIONS = ["truncate", "mask", "clip"]


def make(level: str, action: str, low: float = 0.0, high: float = 2.0) -> OffPolicyCorrection:
    return OffPolicyCorrection(level=level, action=action, low=low, high=high)  # type: ignore[arg-type]


def given(log_weights: Any, lengths: list[int] = LENGTHS, **more: Any) -> Targets:
    """Targets whose old logprobs are -2 and whose engine was ``log_weights`` below; the current policy is elsewhere."""
    count = len(log_weights)
    columns = {"rollout_logprobs": -2.0 - np.asarray(log_weights, np.float64)}
    return targets(np.full(count, -0.5), lengths=lengths, advantage=np.ones(count), old=np.full(count, -2.0), columns=columns, **more)


def factor(correction: OffPolicyCorrection, one: Targets) -> np.ndarray:
    return correction_factor(correction, one)[0].numpy()


def statement(correction: OffPolicyCorrection, log_weights: np.ndarray) -> np.ndarray:
    """One sequence after the other: product or geometric mean of its tokens' ratios, then the action."""
    found: list[float] = []
    for part in np.split(log_weights, np.cumsum(LENGTHS)[:-1]):
        ratios = [math.exp(one) for one in part]
        if correction.level != "token":
            ratios = [math.prod(ratios) ** (1.0 if correction.level == "sequence" else 1 / len(ratios))] * len(ratios)
        for ratio in ratios:
            if correction.action == "mask":
                found.append(ratio if correction.low <= ratio <= correction.high else 0.0)
            else:
                cut = min(ratio, correction.high)
                found.append(max(cut, correction.low) if correction.action == "clip" else cut)
    return np.array(found)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("bounds", [(0.5, 2.0), (0.9, 1.1), (0.0, 5.0)])
def test_every_level_and_action_is_its_statement(level: str, action: str, bounds: tuple[float, float]) -> None:
    for seed in range(5):
        log_weights = 0.7 * np.random.default_rng(seed).normal(size=sum(LENGTHS))
        correction = make(level, action, *bounds)
        close(factor(correction, given(log_weights)), statement(correction, log_weights))


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (make("token", "truncate", high=2.0), [0.1, 1.0, 2.0, 2.0]),  # TIS
        (make("token", "mask", 0.5, 5.0), [0.0, 1.0, 4.0, 0.0]),  # IcePop
        (make("sequence", "mask", 0.0, 2.0), [0.1, 0.1, 0.0, 0.0]),  # MIS: products 0.1 and 32
        (make("geometric", "mask", 0.3, 2.0), [0.1**0.5, 0.1**0.5, 0.0, 0.0]),
        (make("token", "clip", 0.5, 2.0), [0.5, 1.0, 2.0, 2.0]),
    ],
)
def test_published_corrections_by_hand(correction: OffPolicyCorrection, expected: list[float]) -> None:
    """Two sequences of ratios 0.1, 1 and 4, 8."""
    close(factor(correction, given(np.log([0.1, 1.0, 4.0, 8.0]), [2, 2])), expected)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_a_logprob_that_the_engine_could_not_give_is_neutral(level: str, action: str, unknown: float) -> None:
    """Exactly 1 for a token, also beside extreme neighbours; a sequence has the weight that it has with a ratio of 1 there."""
    log_weights = np.array([0.3, unknown, -0.2, unknown, 0.1, 0.2, unknown, unknown])
    neutral = np.where(np.isfinite(log_weights), log_weights, 0.0)
    correction = make(level, action, 0.5, 2.0)
    found = factor(correction, given(log_weights))
    np.testing.assert_array_equal(found, factor(correction, given(neutral)))
    assert found[3] == 1.0
    assert level != "token" or (found[[1, 3, 6, 7]] == 1.0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_long_sequence_far_off_policy_does_not_overflow(level: str, sign: float) -> None:
    """exp(4,000 * 0.5) is beyond every float; 0 * inf would be NaN."""
    one = given(np.full(4000, 0.5 * sign), [4000], dtype=torch.float32)
    for action, high in itertools.product(ACTIONS, [2.0, math.inf]):
        found, means = correction_factor(make(level, action, 0.5, high), one)
        assert torch.isfinite(found).all()
        assert all(torch.isfinite(values).all() for values in means.values())
    assert factor(make(level, "truncate", high=2.0), one).max() <= 2.0


def test_the_weight_is_of_the_policy_before_the_update_and_carries_no_gradient() -> None:
    """Decoupled: moving the current policy moves the loss's own ratio, never w; so w's gradient is not in the loss."""
    component = LossComponent(
        term="policy_clip", parameters={"clip_low": 0.2, "clip_high": 9.0}, correction=make("token", "truncate", high=10.0)
    )
    one = given(np.log([2.0, 3.0]), [2])
    weight = torch.tensor([1.0, 1.0], dtype=torch.float64)
    loss, _ = total_loss([component], one, weight, {MAIN_WEIGHT: 2.0}, {"policy_clip": policy_clip})
    close(gradient(loss, one.logprobs), -np.array([2.0, 3.0]) * math.exp(1.5) / 2)


def test_without_old_logprobs_the_current_policy_is_the_old_one() -> None:
    one = targets([-1.0, -1.0], columns={"rollout_logprobs": [-1.5, -1.0]})
    found, _ = correction_factor(make("token", "truncate", high=9.0), one)
    assert not found.requires_grad
    close(found.numpy(), [math.exp(0.5), 1.0])


def test_masked_tokens_leave_the_numerator_and_not_the_denominator() -> None:
    """Counted before the update: a token that is left out must not make the others weigh more."""
    component = LossComponent(
        term="policy_clip", parameters={"clip_low": 0.2, "clip_high": 0.2}, correction=make("token", "mask", 0.5, 2.0)
    )
    one = targets([-1.0, -1.0], advantage=[1.0, 1.0], old=[-1.0, -1.0], columns={"rollout_logprobs": [-1.0, -9.0]})
    weight = torch.tensor([1.0, 1.0], dtype=torch.float64)
    loss, parts = total_loss([component], one, weight, {MAIN_WEIGHT: 2.0}, {"policy_clip": policy_clip})
    assert loss.item() == pytest.approx(-0.5)
    assert parts[0].weight.tolist() == [1.0, 1.0], "and what is reported is of all of them"


def test_what_is_reported() -> None:
    """Mean weight, share that was dropped, and the k3 estimate of KL(engine || old policy), token by token."""
    ratios = np.array([0.1, 1.0, 4.0, 8.0])
    _, means = correction_factor(make("token", "mask", 0.5, 5.0), given(np.log(ratios), [2, 2]))
    close(means["correction_mean"].numpy(), [0.0, 1.0, 4.0, 0.0])
    assert means["correction_dropped"].tolist() == [1.0, 0.0, 0.0, 1.0]
    close(means["correction_kl"].numpy(), ratios - 1 - np.log(ratios))
