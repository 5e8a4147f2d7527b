"""KL to the reference: which estimator is unbiased for what, by summing over a whole vocabulary; the controller."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from loss_targets import close, gradient, targets, value

from rlpost.algorithms.estimators import KlController, token_kl
from rlpost.algorithms.kl import kl_to_reference
from rlpost.algorithms.losses import Targets

ESTIMATORS = ["k1", "k2", "k3", "k3_unbiased"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimators_are_schulmans(estimator: str) -> None:
    policy, reference, old = np.array([-0.5, -2.0, -1.0]), np.array([-1.0, -1.5, -1.0]), np.array([-0.7, -2.0, -3.0])
    given = targets(policy, reference=reference, old=old)
    term = kl_to_reference(given, estimator=estimator)
    d, ratio = reference - policy, np.exp(policy - old)
    k3 = np.exp(d) - 1 - d
    expected, slope = {
        "k1": (-d, np.ones(3)),
        "k2": (d**2 / 2, -d),
        "k3": (k3, 1 - np.exp(d)),
        "k3_unbiased": (ratio * k3, ratio * (k3 + 1 - np.exp(d))),
    }[estimator]
    close(value(term), expected)
    close(gradient(term.loss, given.logprobs), slope)
    np.testing.assert_array_equal(term.means["kl"].numpy(), value(term))


def over_vocabulary(estimator: str, on_policy: bool) -> tuple[float, np.ndarray, dict[str, tuple[float, np.ndarray]]]:
    """Mean value and mean gradient (by the policy's 12 logits) over what a sampler draws, and the true ones in both directions."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    reference, other = (torch.log_softmax(torch.randn(12, generator=generator, dtype=torch.float64), 0) for _ in range(2))
    policy = torch.log_softmax(logits, 0)
    sampler = policy.detach() if on_policy else other
    given = Targets(
        logprobs=policy,
        entropy=torch.zeros(12),
        sequence=torch.zeros(12, dtype=torch.int64),
        sequences=1,
        old_logprobs=sampler,
        reference_logprobs=reference,
    )
    mean = (sampler.exp() * kl_to_reference(given, estimator=estimator).loss).sum()
    forward, backward = (policy.exp() * (policy - reference)).sum(), (reference.exp() * (reference - policy)).sum()
    slope = [torch.autograd.grad(one, logits, retain_graph=True)[0].numpy() for one in (mean, forward, backward)]
    return mean.item(), slope[0], {"forward": (forward.item(), slope[1]), "backward": (backward.item(), slope[2])}


@pytest.mark.parametrize("on_policy", [True, False])
def test_unbiased_k3_has_the_value_and_the_gradient_of_the_kl_whoever_sampled(on_policy: bool) -> None:
    mean, slope, true = over_vocabulary("k3_unbiased", on_policy)
    assert mean == pytest.approx(true["forward"][0])
    close(slope, true["forward"][1])


@pytest.mark.parametrize(("estimator", "gradient_of"), [("k1", None), ("k2", "forward"), ("k3", "backward")])
def test_the_other_estimators_are_what_the_docstring_says(estimator: str, gradient_of: str | None) -> None:
    """k1 teaches nothing; k3's gradient is that of the other direction, KL(ref || pi); k2's is right though its value is not."""
    mean, slope, true = over_vocabulary(estimator, True)
    assert (mean == pytest.approx(true["forward"][0])) == (estimator != "k2")
    close(slope + 1.0, np.ones(12) if gradient_of is None else true[gradient_of][1] + 1.0)
    assert estimator != "k3" or np.abs(slope - true["forward"][1]).max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_without_the_ratio_the_value_is_biased_when_another_policy_sampled(estimator: str) -> None:
    mean, _, true = over_vocabulary(estimator, False)
    assert abs(mean - true["forward"][0]) > 0.1


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_unknown_reference_logprob_adds_nothing_to_the_kl(estimator: str) -> None:
    given = targets([-1.0, -2.0], reference=[math.nan, -2.5], old=[-1.3, math.nan])
    term = kl_to_reference(given, estimator=estimator)
    assert term.loss[0] == 0.0
    assert np.isfinite(gradient(term.loss, given.logprobs)).all()
    assert token_kl(np.array([-1.0, -2.0]), np.array([math.nan, -2.5]), estimator)[0] == 0.0


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("logprob", [-1.0, -1000.0])
def test_a_policy_far_from_its_reference_makes_no_nan(estimator: str, logprob: float) -> None:
    given = targets([logprob], reference=[-1001.0 - logprob], old=[-1.0], dtype=torch.float32)
    term = kl_to_reference(given, estimator=estimator)
    assert np.isfinite(value(term)).all() and np.isfinite(gradient(term.loss, given.logprobs)).all()


def test_kl_without_reference_logprobs_is_an_error_and_not_zero() -> None:
    with pytest.raises(AssertionError, match="reference"):
        kl_to_reference(targets([-1.0]), estimator="k3")
    with pytest.raises(AssertionError, match="k4"):
        kl_to_reference(targets([-1.0], reference=[-1.0]), estimator="k4")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_in_the_reward_is_that_of_the_loss(estimator: str) -> None:
    """For the policy that sampled: the numpy and the torch side agree, with one sign (a cost)."""
    policy, reference = np.array([-0.5, -2.0, -1.0]), np.array([-1.0, -1.5, -0.2])
    close(token_kl(policy, reference, estimator), value(kl_to_reference(targets(policy, reference=reference), estimator=estimator)))


# ---- the controller ------------------------------------------------------------------------------------------------


def test_a_fixed_coefficient_never_moves() -> None:
    controller = KlController(0.1, None, 10)
    controller.update(100.0)
    assert controller.coefficient == 0.1


@pytest.mark.parametrize(("kl", "factor"), [(1e9, math.e), (0.0, 1 / math.e), (0.02, math.e), (0.01, 1.0), (0.015, math.exp(0.5))])
def test_the_coefficient_changes_by_a_factor_of_e_in_a_horizon_at_most(kl: float, factor: float) -> None:
    """Up when the KL is above the target (0.01), down when below, in proportion, cut at once the target's size."""
    controller = KlController(0.3, 0.01, 7)
    for _ in range(7):
        controller.update(kl)
    assert controller.coefficient == pytest.approx(0.3 * factor)


def test_steering_brings_the_kl_to_its_target() -> None:
    """A policy whose KL falls with the coefficient, kl = 0.002 / coefficient: from 5 times too much to the target."""
    controller = KlController(0.04, 0.01, 10)
    for _ in range(200):
        controller.update(0.002 / controller.coefficient)
    assert controller.coefficient == pytest.approx(0.2, rel=0.01)


def test_a_resumed_controller_continues_with_its_coefficient() -> None:
    first, second = KlController(0.3, 0.01, 7), KlController(0.3, 0.01, 7)
    first.update(0.1)
    second.restore(first.state())
    first.update(0.1)
    second.update(0.1)
    assert second.coefficient == first.coefficient > 0.3


@pytest.mark.parametrize(
    ("target", "stored", "present"),
    [(None, 0.0, 0.1), (None, 0.3, 0.1), (0.01, 0.0, 0.1)],
    ids=["fixed, switched on", "fixed, another", "steered from 0"],
)
def test_a_resume_takes_the_configurations_coefficient_unless_it_was_steered(target: float | None, stored: float, present: float) -> None:
    """A fixed one of the checkpoint would undo the user's change without a word; steering multiplies, so from 0 it would stay 0."""
    controller = KlController(present, target, 10)
    controller.restore({"coefficient": stored})
    assert controller.coefficient == present
    controller.update(1.0)
    assert (controller.coefficient > present) == (target is not None)
