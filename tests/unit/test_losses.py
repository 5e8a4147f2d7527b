"""How terms become a loss: weights by name, denominators, corrections; what a term may read; the critic's loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from loss_targets import close, gradient, slopes, targets, value

from rlpost.algorithms.catalogue import LOSS_TERMS, find_term, find_terms
from rlpost.algorithms.estimators import MOST_LOG_RATIO
from rlpost.algorithms.losses import Targets, Term, log_ratio, total_loss
from rlpost.algorithms.value import value_loss
from rlpost.types import MAIN_WEIGHT, LossComponent


def own_logprob(given: Targets, *, factor: float = 1.0) -> Term:
    """A term of a token: minus its logprob."""
    return Term(loss=-factor * given.logprobs)


def own_sequence(given: Targets) -> Term:
    """A term of a sequence: minus the sum of its logprobs."""
    return Term(loss=-given.sequence_sum(given.logprobs))


TERMS: dict[str, Any] = {"token": own_logprob, "sequence": own_sequence}


def loss_of(components: list[LossComponent], given: Targets, weight: list[float], denominators: dict[str, float]) -> torch.Tensor:
    return total_loss(components, given, torch.tensor(weight, dtype=torch.float64), denominators, TERMS)[0]


# ---- the sum -------------------------------------------------------------------------------------------------------


def test_each_component_has_its_coefficient_parameters_weights_and_denominator() -> None:
    """By hand: 2 * 3 * (1*1 + 2*0) / 4 with the main weights, 0.5 * (1*0.5 + 2*2) / 5 with a column, 1 * (3 * 1) / 7 with a scalar."""
    given = targets([-1.0, -2.0], columns={"returns": [9.0, 9.0], "heavy": [0.5, 2.0]}, scalars={"pair_weight": [1.0]})
    components = [
        LossComponent(term="token", coefficient=2.0, parameters={"factor": 3.0}),
        LossComponent(term="token", coefficient=0.5, weight="heavy"),
        LossComponent(term="sequence", weight="pair_weight"),
    ]
    loss = loss_of(components, given, [1.0, 0.0], {MAIN_WEIGHT: 4.0, "heavy": 5.0, "pair_weight": 7.0})
    assert loss.item() == pytest.approx(6 / 4 + 0.5 * 4.5 / 5 + 3 / 7)
    close(gradient(loss, given.logprobs), [-6 / 4 - 0.05 - 1 / 7, -0.2 - 1 / 7])


def test_a_step_without_any_weight_has_a_loss_of_zero_and_not_nan() -> None:
    given = targets([-1.0, -2.0])
    loss = loss_of([LossComponent(term="token")], given, [0.0, 0.0], {MAIN_WEIGHT: 0.0})
    assert loss.item() == 0.0
    assert not gradient(loss, given.logprobs).any()


@pytest.mark.parametrize("weight", ["returns", "typo"])
def test_a_weight_without_a_denominator_or_that_nothing_is_named_is_an_error(weight: str) -> None:
    given = targets([-1.0], columns={"returns": [1.0]})
    with pytest.raises(KeyError, match=weight):
        loss_of([LossComponent(term="token", weight=weight)], given, [1.0], {MAIN_WEIGHT: 1.0})


def test_every_name_of_the_catalogue_is_a_function() -> None:
    assert {name: callable(find_term(name)) for name in LOSS_TERMS} == dict.fromkeys(LOSS_TERMS, True)
    assert set(find_terms([LossComponent(term="kl"), LossComponent(term="gspo")])) == {"kl", "gspo"}


# ---- what a term reads ---------------------------------------------------------------------------------------------


def test_sums_means_and_spreading_are_by_sequence_also_of_one_without_targets() -> None:
    given = targets([-1.0, -2.0, -6.0], lengths=[2, 0, 1])
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    assert given.sequence_sum(values).tolist() == [3.0, 0.0, 6.0]
    assert given.sequence_mean(values).tolist() == [1.5, 0.0, 6.0]
    assert given.spread(torch.tensor([5.0, 7.0, 9.0])).tolist() == [5.0, 5.0, 9.0]


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_an_unknown_logprob_is_the_policys_own_with_the_gradient_of_log_pi(unknown: float) -> None:
    given = targets([-3.0, -1.0], old=[unknown, -1.5])
    ratio = log_ratio(given)
    assert ratio.tolist() == [0.0, 0.5]
    assert gradient(ratio, given.logprobs).tolist() == [1.0, 1.0]


def test_log_ratios_are_cut_either_way() -> None:
    ratio = log_ratio(targets([-1.0, -500.0], old=[-500.0, -1.0]))
    assert ratio.tolist() == [MOST_LOG_RATIO, -MOST_LOG_RATIO]


# ---- the critic's loss ---------------------------------------------------------------------------------------------

VALUES = np.array([0.0, 0.3, 1.0, -1.0, 0.5, 2.0])
OLD = np.array([0.0, 0.0, 0.2, 0.4, 0.9, 0.0])
RETURNS = np.array([1.0, 1.0, 0.0, 2.0, 0.7, 1.9])


def critic(values: np.ndarray = VALUES) -> Targets:
    return targets(np.zeros(len(values)), values=values, columns={"returns": RETURNS, "old_values": OLD})


@pytest.mark.parametrize("clip", [0.0, 0.2, 10.0])
def test_value_loss_is_half_the_larger_squared_error_of_the_value_and_the_clipped_value(clip: float) -> None:
    def statement(at: np.ndarray) -> np.ndarray:
        found = []
        for now, before, goal in zip(at, OLD, RETURNS, strict=True):
            error = (now - goal) ** 2
            if clip > 0:
                error = max(error, (min(max(now, before - clip), before + clip) - goal) ** 2)
            found.append(error / 2)
        return np.array(found)

    given = critic()
    term = value_loss(given, clip=clip)
    close(value(term), statement(VALUES))
    assert given.values is not None
    close(gradient(term.loss, given.values), slopes(lambda at: float(statement(at).sum()), VALUES))
    close(term.means["value_error"].numpy(), (VALUES - RETURNS) ** 2)


def test_value_clipping_stops_a_value_that_moved_far_towards_its_return_and_not_one_that_moved_away() -> None:
    """Clip 0.2. 0 to 0.3 with return 1, and 0 to 2 with 1.9: stopped. 0.2 to 1 with return 0, 0.9 to 0.5 with 0.7: corrected."""
    given = critic()
    term = value_loss(given, clip=0.2)
    assert given.values is not None
    slope = gradient(term.loss, given.values)
    close(slope[[1, 2, 4, 5]], [0.0, 1.0, -0.2, 0.0])
    assert term.means["value_clip_fraction"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_value_loss_without_values_is_an_error_and_not_zero() -> None:
    with pytest.raises(AssertionError, match="value head"):
        value_loss(targets([-1.0], columns={"returns": [1.0], "old_values": [1.0]}), clip=0.2)
