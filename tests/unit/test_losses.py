"""Loss terms against independent numpy statements of the papers' formulas, values and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlpost.algorithms.grpo import Grpo
from rlpost.algorithms.losses import LOSS_TERMS, Targets, entropy_bonus, kl_to_reference, policy_clip
from rlpost.config.schema import AlgorithmConfig


def targets(
    logprobs: list[float],
    *,
    advantage: list[float] | None = None,
    old: list[float] | None = None,
    reference: list[float] | None = None,
    entropy: list[float] | None = None,
) -> Targets:
    def optional(values: list[float] | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float32)

    return Targets(
        logprobs=torch.tensor(logprobs, dtype=torch.float32, requires_grad=True),
        entropy=torch.tensor(entropy or [1.0] * len(logprobs), requires_grad=True),
        advantage=torch.tensor(advantage or [1.0] * len(logprobs)),
        old_logprobs=optional(old),
        reference_logprobs=optional(reference),
    )


def gradient(loss: torch.Tensor, wrt: torch.Tensor) -> np.ndarray:
    return torch.autograd.grad(loss.sum(), wrt)[0].numpy()


@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28), (1.0, 3.0)])
def test_policy_clip_is_ppos_formula_with_its_gradient(clip: tuple[float, float]) -> None:
    """PPO, eq. 7: per token -min(r A, clip(r) A); the gradient is -A r unless the clipped side is the smaller one."""
    low, high = clip
    differences, advantages = (a.reshape(-1) for a in np.meshgrid([-1.5, -0.3, -0.1, 0.0, 0.1, 0.27, 1.5], [-2.0, 0.0, 0.7]))
    given = targets((differences - 2.0).tolist(), advantage=advantages.tolist(), old=[-2.0] * len(differences))
    term = policy_clip(given, clip_low=low, clip_high=high)
    ratio = np.exp(differences)
    clipped = np.clip(ratio, 1 - low, 1 + high)
    np.testing.assert_allclose(term.loss.detach().numpy(), -np.minimum(ratio * advantages, clipped * advantages), rtol=1e-5, atol=1e-6)
    hit = clipped * advantages < ratio * advantages
    np.testing.assert_allclose(gradient(term.loss, given.logprobs), np.where(hit, 0.0, -advantages * ratio), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(term.means["clip_fraction"].numpy(), hit)
    np.testing.assert_allclose(term.maxima["ratio_max"].numpy(), ratio, rtol=1e-5)


def test_on_policy_ratio_is_exactly_one_with_the_policy_gradient() -> None:
    """No old logprobs: the loss is -A and its gradient -A d log pi, bit for bit."""
    given = targets([-0.1, -30.0, -2.5], advantage=[1.0, -0.5, 0.0])
    term = policy_clip(given, clip_low=0.2, clip_high=0.2)
    assert term.loss.tolist() == [-1.0, 0.5, 0.0]
    assert gradient(term.loss, given.logprobs).tolist() == [-1.0, 0.5, 0.0]


@pytest.mark.parametrize("unknown", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_the_engine_could_not_give_has_ratio_exactly_one_and_no_nan_gradient(unknown: float) -> None:
    """0 would not be neutral, and NaN would end the run. Its neighbours are not touched either."""
    given = targets([-3.0, -1.0], advantage=[2.0, 1.0], old=[unknown, -1.1])
    term = policy_clip(given, clip_low=0.2, clip_high=0.2)
    assert term.maxima["ratio_max"][0] == 1.0
    assert term.loss[0] == -2.0
    np.testing.assert_allclose(gradient(term.loss, given.logprobs), [-2.0, -math.exp(0.1)], rtol=1e-5)


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("logprob", [-1.0, -1000.0])
def test_a_ratio_beyond_float32_makes_no_nan(advantage: float, logprob: float) -> None:
    """exp(999) is inf, and inf * 0 in the backward pass would destroy the gradient of every parameter."""
    given = targets([logprob], advantage=[advantage], old=[-1001.0 - logprob])
    term = policy_clip(given, clip_low=0.2, clip_high=0.2)
    assert math.isfinite(term.loss.item())
    assert np.isfinite(gradient(term.loss, given.logprobs)).all()


def test_ratio_is_one_for_unchanged_weights_at_any_temperature() -> None:
    """The engine's logprobs are of the distribution sampled from; the trainer must scale by the same temperature."""
    from rlpost.training.logprob import target_logprob

    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(11, 8, generator=generator)
    target = torch.tensor([0, 3, 10, 5, 5])
    sampled_from = torch.log_softmax(hidden @ weight.t() / 0.6, -1).gather(1, target[:, None])[:, 0]
    current, entropy = target_logprob(hidden, weight, target, 0.6, 2)
    given = Targets(logprobs=current, entropy=entropy, advantage=torch.ones(5), old_logprobs=sampled_from, reference_logprobs=None)
    torch.testing.assert_close(policy_clip(given, clip_low=0.2, clip_high=0.2).maxima["ratio_max"], torch.ones(5))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_are_schulmans(estimator: str) -> None:
    policy, reference = np.array([-0.5, -2.0, -1.0]), np.array([-1.0, -1.5, -1.0])
    given = targets(policy.tolist(), reference=reference.tolist())
    term = kl_to_reference(given, estimator=estimator)
    difference = reference - policy
    value, slope = {
        "k1": (-difference, np.ones(3)),
        "k2": (difference**2 / 2, -difference),
        "k3": (np.exp(difference) - 1 - difference, 1 - np.exp(difference)),
    }[estimator]
    np.testing.assert_allclose(term.loss.detach().numpy(), value, atol=1e-6)
    np.testing.assert_allclose(gradient(term.loss, given.logprobs), slope, atol=1e-6)
    np.testing.assert_allclose(term.means["kl"].numpy(), value, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimators_are_unbiased_over_the_policy(estimator: str) -> None:
    """Their mean over all tokens, weighted with the policy, is the true KL(policy || reference): the sign and the direction."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.log_softmax(torch.randn(20, generator=generator), 0) for _ in range(2))
    term = kl_to_reference(targets(policy.tolist(), reference=reference.tolist()), estimator=estimator)
    true = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * term.loss).sum(), true)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_an_unknown_reference_logprob_adds_nothing_to_the_kl(estimator: str) -> None:
    term = kl_to_reference(targets([-1.0], reference=[math.nan]), estimator=estimator)
    assert term.loss.item() == 0.0


def test_kl_without_reference_logprobs_is_an_error_and_not_zero() -> None:
    with pytest.raises(AssertionError, match="reference"):
        kl_to_reference(targets([-1.0]), estimator="k3")


def test_entropy_bonus_lowers_the_loss_with_rising_entropy() -> None:
    given = targets([-1.0, -1.0], entropy=[0.5, 2.0])
    term = entropy_bonus(given)
    assert term.loss.tolist() == [-0.5, -2.0]
    assert gradient(term.loss, given.entropy).tolist() == [-1.0, -1.0]


def test_every_component_of_grpo_is_a_known_term_with_parameters_that_it_takes() -> None:
    given = targets([-1.0], old=[-1.0], reference=[-1.0])
    for component in Grpo(AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.1)).components():
        assert LOSS_TERMS[component.term](given, **component.parameters).loss.shape == (1,)
