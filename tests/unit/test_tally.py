"""What a step reports of its losses: means over tokens, pairs or rows, whatever number the loss itself is divided by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlpost.algorithms.aggregation import token_weights
from rlpost.algorithms.catalogue import find_terms, make_offline_algorithm
from rlpost.algorithms.losses import Part, Targets, Term, total_loss
from rlpost.algorithms.protocol import OfflineRow, TokenSequence
from rlpost.config.schema import AlgorithmConfig, PreferenceConfig
from rlpost.training.model import TargetOutput
from rlpost.training.worker import _Tally
from rlpost.types import MAIN_WEIGHT, LossComponent


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reported(parts: Sequence[Part], losses: Sequence[float] = ()) -> dict[str, float]:
    tally = _Tally()
    tally.maxima["memory"] = 1.0
    for part in parts:
        tally.add_part(part)
    for loss in losses:
        tally.add_targets(TargetOutput(logprobs=torch.zeros(2), entropy=torch.zeros(2)), torch.tensor(loss), None)
    return tally.reduce()


def part(values: Sequence[float], weight: Sequence[float], denominator: float) -> Part:
    term = Term(loss=torch.zeros(len(values)), means={"measure": torch.tensor(values)})
    return Part(component=LossComponent(term="any"), term=term, weight=torch.tensor(weight), denominator=denominator, means={})


def test_means_of_a_loss_over_a_constant_are_those_of_its_tokens() -> None:
    """40 of 400 possible tokens: divided like the loss, a KL of 0.125 would read 0.0125, and its controller would steer by that."""
    masks = [np.ones(30, bool), np.ones(10, bool)]
    weights, denominator = token_weights(masks, "constant", 400)
    assert denominator > 40
    targets = Targets(
        logprobs=torch.full((40,), -1.0),
        entropy=torch.zeros(40),
        sequence=torch.tensor([0] * 30 + [1] * 10),
        sequences=2,
        reference_logprobs=torch.full((40,), -1.5),
        old_logprobs=torch.tensor([-3.0] * 10 + [-1.0] * 30),
        advantage=torch.ones(40),
    )
    components = [
        LossComponent(term="policy_clip", parameters={"clip_low": 0.2, "clip_high": 0.2}),
        LossComponent(term="kl", parameters={"estimator": "k2"}),
    ]
    weight = torch.tensor(np.concatenate(weights))
    loss, parts = total_loss(components, targets, weight, {MAIN_WEIGHT: denominator}, find_terms(components))
    metrics = reported(parts, [float(loss), 0.5])
    assert metrics["train/kl"] == pytest.approx(0.125)
    for name, values in parts[0].term.means.items():
        assert metrics[f"train/{name}"] == pytest.approx(float(values.mean()), rel=1e-6), name
    assert metrics["train/loss"] == pytest.approx(float(loss) + 0.5), "losses of micro-batches are shares already, and add up"


def test_a_pairs_means_count_it_once_and_tokens_by_their_weights() -> None:
    """A pair stands at its chosen sequence (weight 1), the rejected one has 0; the denominator is another number."""
    assert reported([part([0.25, 99.0, 0.75, 99.0], [1.0, 0.0, 1.0, 0.0], 5.0)])["train/measure"] == pytest.approx(0.5)
    assert reported([part([1.0, 4.0], [0.5, 0.25], 10.0)])["train/measure"] == pytest.approx(2.0)


def test_micro_batches_of_uneven_weight_make_one_mean_and_an_empty_one_adds_nothing() -> None:
    parts = [part([1.0], [1.0], 8.0), part([4.0, 4.0], [2.0, 1.0], 8.0), part([7.0], [0.0], 8.0), part([], [], 8.0)]
    assert reported(parts)["train/measure"] == pytest.approx((1.0 + 8.0 + 4.0) / 4.0)


def test_a_mean_of_nothing_is_not_reported_as_zero() -> None:
    assert "train/measure" not in reported([part([7.0], [0.0], 8.0)])


def labelled(name: str, wanted: bool) -> OfflineRow:
    tokens, trainable = np.arange(5, dtype=np.int32), np.arange(5) > 2
    return OfflineRow(row_id=name, sequences={"answer": TokenSequence(tokens=tokens, trainable=trainable, prompt_length=3)}, wanted=wanted)


@pytest.mark.parametrize(("unwanted_logprob", "accuracy"), [(-3.0, 1.0), (-1.0, 1 / 5)], ids=["all right", "unwanted wrong"])
def test_ktos_accuracy_is_a_share_whatever_unwanted_answers_weigh(unwanted_logprob: float, accuracy: float) -> None:
    """One wanted answer of weight 1 and two unwanted of weight 2; by the number of rows a perfect accuracy would be 5/3."""
    config = AlgorithmConfig(name="kto", preference=PreferenceConfig(desirable=1.0, undesirable=2.0))
    algorithm = make_offline_algorithm(config)
    batch = algorithm.terms([labelled("a", True), labelled("b", False), labelled("c", False)])
    scalars: dict[str, Any] = {name: torch.tensor([term.scalars[name] for term in batch.terms]) for name in batch.terms[0].scalars}
    targets = Targets(
        logprobs=torch.tensor([-1.0] * 2 + [unwanted_logprob] * 4),
        entropy=torch.zeros(6),
        sequence=torch.tensor([0, 0, 1, 1, 2, 2]),
        sequences=3,
        reference_logprobs=torch.full((6,), -2.0),
        scalars=scalars,
    )
    components = algorithm.components(0.0)
    _, parts = total_loss(components, targets, torch.ones(6), batch.denominators, find_terms(components))
    assert reported(parts)["train/accuracy"] == pytest.approx(accuracy)
