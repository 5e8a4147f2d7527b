"""The loss has a global denominator: one gradient for every micro-batch size and rank count, equal to plain autograd's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import RankProcesses, Trainers, make_groups, update_requests, with_logprobs, worker_settings
from plain_models import gradients_of, logprobs_of, plain_model, token_logprobs, written_out_loss
from torch.distributed.tensor import DTensor

from rlpost.algorithms.online import PolicyGradient
from rlpost.algorithms.protocol import RunFacts
from rlpost.config.schema import AlgorithmConfig, OptimizerConfig, TrainingConfig
from rlpost.driver.batch import Minibatch, build_minibatch, split, with_reference_logprobs
from rlpost.models.embedded import build
from rlpost.training.protocol import UpdateRequest
from rlpost.types import Group

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
PARTITIONS = (60, 75, 110, 170, 4096)
"""Values of micro_batch_tokens: from one long sequence a micro-batch to everything in one."""

TEMPERATURE, CONSTANT, CLIP = 0.7, 64, 0.2
KL, ENTROPY = 0.1, 0.05
ALGORITHM = PolicyGradient(
    AlgorithmConfig(advantage="group_mean", kl_coefficient=KL, entropy_coefficient=ENTROPY, clip_low=CLIP, clip_high=CLIP),
    RunFacts(max_new_tokens=64),
)
FROZEN_LR = OptimizerConfig(lr=0.0)
"""Gradients are compared at the same weights, so the optimizer's step must not move them."""


class Case:
    """Groups with noisy engine logprobs (so that ratios are not 1 and some are clipped) and a reference that is another model."""

    def __init__(self) -> None:
        self.model = plain_model(build("tiny-sort5"))
        plain = make_groups()
        noise = np.random.default_rng(1)
        current = logprobs_of(self.model, plain, TEMPERATURE)
        noisy = {name: (values + noise.normal(0, 0.3, len(values))).astype(np.float32) for name, values in current.items()}
        self.groups = with_logprobs(plain, noisy)
        self.reference = logprobs_of(plain_model(build("tiny-random")), plain, TEMPERATURE)

    def minibatch(self, groups: Sequence[Group], aggregation: str) -> Minibatch:
        batch = build_minibatch(groups, ALGORITHM, version=0, aggregation=aggregation, constant=CONSTANT, old="engine")
        values = [self.reference[term.trajectory_id] for term in batch.terms]
        return replace(batch, terms=with_reference_logprobs(batch.terms, values))

    def loss(self, groups: Sequence[Group], aggregation: str) -> torch.Tensor:
        return written_out_loss(
            self.model, groups, aggregation=aggregation, constant=CONSTANT, temperature=TEMPERATURE, clip=CLIP,
            reference=self.reference, kl_coefficient=KL, entropy_coefficient=ENTROPY,
        )  # fmt: skip

    def expected(self, groups: Sequence[Group], aggregation: str) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of plain autograd."""
        self.model.zero_grad()
        loss = self.loss(groups, aggregation)
        loss.backward()
        return float(loss.detach()), {name: grad.clone() for name, grad in gradients_of(self.model).items()}


@pytest.fixture(scope="module")
def case() -> Case:
    """One batch and its plain reference."""
    return Case()


def captured_updates(worker: Any, requests: Sequence[UpdateRequest]) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """In a rank: metrics and full gradients before clipping (empty on all ranks but the first) of several updates."""
    results: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []
    clip = worker._clip
    for request in requests:
        captured: dict[str, torch.Tensor] = {}

        def capture(captured: dict[str, torch.Tensor] = captured) -> float:
            for name, parameter in worker.model.named_parameters():
                if parameter.grad is not None:
                    full = parameter.grad.full_tensor()
                    if worker.rank == 0:
                        captured[name] = full.clone()
            return float(clip())

        worker._clip = capture
        results.append((worker.update(request), captured))
    worker._clip = clip
    return results


def updates(trainers: Trainers, batches: Sequence[tuple[Minibatch, int]]) -> list[list[tuple[dict[str, float], dict[str, torch.Tensor]]]]:
    """``[update][rank]``: each (minibatch, micro_batch_tokens) is one optimizer step."""
    requests = [
        update_requests(
            batch.terms, batch.denominator, ALGORITHM.components(), ranks=trainers.ranks, micro_batch_tokens=tokens, temperature=TEMPERATURE
        )
        for batch, tokens in batches
    ]
    by_rank = trainers.apply_each(captured_updates, [([one[rank][0] for one in requests],) for rank in range(trainers.ranks)])
    return [list(results) for results in zip(*by_rank, strict=True)]


def assert_same_gradient(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert sorted(actual) == sorted(expected), what
    for name, gradient in expected.items():
        error = float((actual[name] - gradient).norm() / gradient.norm())
        assert error < 1e-5, f"{what}: {name} is off by {error:.1e} of its norm"


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_gradient_for_every_partition_rank_count_and_aggregation(processes: RankProcesses, case: Case, ranks: int) -> None:
    """Mean of means, shifted targets, leaks between sequences, masks in one of numerator and denominator: all would show."""
    plan = [(aggregation, tokens) for aggregation in AGGREGATIONS for tokens in PARTITIONS]
    batches = [(case.minibatch(case.groups, aggregation), tokens) for aggregation, tokens in plan]
    assert len({len(update_requests(b.terms, 1.0, [], ranks=ranks, micro_batch_tokens=t)[0][0].micro_batches) for b, t in batches}) >= 3
    with processes.trainers(worker_settings(optimizer=FROZEN_LR, total_updates=len(plan)), ranks=ranks) as trainers:
        results = updates(trainers, batches)
    expected = {aggregation: case.expected(case.groups, aggregation) for aggregation in AGGREGATIONS}
    trained = sum(t.sampled_tokens for group in case.groups for t in group.trajectories if t.reward is not None)
    for (aggregation, tokens), by_rank in zip(plan, results, strict=True):
        what = f"{aggregation}, {tokens} tokens, {ranks} ranks"
        loss, gradient = expected[aggregation]
        assert_same_gradient(by_rank[0][1], gradient, what)
        metrics = by_rank[0][0]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-4), what
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5), what
        assert metrics["train/tokens"] == trained, what
        for other, _ in by_rank[1:]:
            assert {k: v for k, v in other.items() if k != "memory/trainer_peak_gib"} == {
                k: v for k, v in metrics.items() if k != "memory/trainer_peak_gib"
            }, what
    clipped = results[0][0][0]["train/clip_fraction"]
    assert 0.02 < clipped < 0.98, "the batch must have clipped and unclipped tokens, or half of the loss is not tested"


def test_empty_micro_batches_keep_ranks_in_step_and_add_nothing(processes: RankProcesses, case: Case) -> None:
    """One trajectory on two ranks; and three long ones in rounds where one rank has nothing."""
    one = [case.groups[1]]
    few = case.groups[:1]
    batches = [(case.minibatch(one, "token_mean"), 33), (case.minibatch(few, "token_mean"), 60)]
    single = build_minibatch(one, ALGORITHM, version=0, aggregation="token_mean", constant=CONSTANT, old="engine")
    lonely = Minibatch(terms=single.terms[1:], denominators={"weight": float(single.terms[1].trainable.sum())})
    lonely = replace(lonely, terms=with_reference_logprobs(lonely.terms, [case.reference[term.trajectory_id] for term in lonely.terms]))
    batches.append((lonely, 4096))
    requests = update_requests(lonely.terms, 1.0, [], ranks=2)
    assert sorted(len(request.micro_batches[0].members) for (request,) in requests) == [0, 1]
    with processes.trainers(worker_settings(optimizer=FROZEN_LR), ranks=2) as trainers:
        results = updates(trainers, batches)
    for groups, by_rank in zip((one, few), results, strict=False):
        assert_same_gradient(by_rank[0][1], case.expected(groups, "token_mean")[1], groups[0].group_id)
    metrics, gradient = results[2][0]
    with processes.trainers(worker_settings(optimizer=FROZEN_LR), ranks=1) as trainers:
        [[(alone_metrics, alone)]] = updates(trainers, [(lonely, 4096)])
    assert_same_gradient(gradient, alone, "one trajectory, two ranks")
    assert metrics["train/loss"] == pytest.approx(alone_metrics["train/loss"], rel=1e-5)
    assert metrics["train/ratio_max"] == pytest.approx(alone_metrics["train/ratio_max"], rel=1e-5)


def test_each_of_several_updates_has_the_denominator_of_its_own_window(processes: RankProcesses, case: Case) -> None:
    """Two optimizer steps of one generation: the first's gradient and denominator must not reach into the second's."""
    windows = split(case.groups, 2)
    with processes.trainers(worker_settings(optimizer=FROZEN_LR), ranks=2) as trainers:
        for aggregation in AGGREGATIONS:
            results = updates(trainers, [(case.minibatch(window, aggregation), 75) for window in windows])
            for window, by_rank in zip(windows, results, strict=True):
                assert_same_gradient(by_rank[0][1], case.expected(window, aggregation)[1], f"{aggregation} {window[0].group_id}")


def test_gradient_checkpointing_small_logprob_chunks_and_zero2_change_nothing(processes: RankProcesses, case: Case) -> None:
    training = TrainingConfig(gradient_checkpointing=True, logprob_chunk_tokens=7, reshard_after_forward=False)
    with processes.trainers(worker_settings(optimizer=FROZEN_LR, training=training), ranks=2) as trainers:
        [by_rank] = updates(trainers, [(case.minibatch(case.groups, "token_mean"), 110)])
    assert_same_gradient(by_rank[0][1], case.expected(case.groups, "token_mean")[1], "other memory settings")


def reduced_between_micro_batches(worker: Any, request: UpdateRequest) -> list[bool]:
    """In a rank: before each micro-batch but the first, whether all gradients of those before lie in shards already."""
    found: list[bool] = []

    class Watched(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            for micro in super().__iter__():
                found.append(all(isinstance(parameter.grad, DTensor) for parameter in worker.model.parameters()))
                yield micro

    worker.update(replace(request, micro_batches=Watched(request.micro_batches)))
    return found[1:]


@pytest.mark.parametrize("reshard", [True, False])
def test_no_whole_gradient_waits_for_the_last_micro_batch_unless_weights_stay_whole_too(
    processes: RankProcesses, case: Case, reshard: bool
) -> None:
    """A whole float32 gradient on every rank is a hidden copy of the model."""
    batch = case.minibatch(case.groups, "token_mean")
    with processes.trainers(
        worker_settings(optimizer=FROZEN_LR, training=TrainingConfig(reshard_after_forward=reshard)), ranks=2
    ) as trainers:
        requests = update_requests(
            batch.terms, batch.denominator, ALGORITHM.components(), ranks=2, micro_batch_tokens=75, temperature=TEMPERATURE
        )
        by_rank = trainers.apply_each(reduced_between_micro_batches, [(request,) for (request,) in requests])
    assert all(len(found) >= 2 and set(found) == {reshard} for found in by_rank)


def test_engine_logprobs_of_the_present_version_show_as_parity_and_only_those(processes: RankProcesses, case: Case) -> None:
    """Parity is |trainer - engine|, at the sampling temperature, before the update."""
    exact = with_logprobs(case.groups, logprobs_of(case.model, case.groups, TEMPERATURE))
    known = build_minibatch(exact, ALGORITHM, version=0, aggregation="token_mean", constant=CONSTANT, old="current")
    later = build_minibatch(exact, ALGORITHM, version=1, aggregation="token_mean", constant=CONSTANT, old="current")
    fill = [case.reference[term.trajectory_id] for term in known.terms]

    def with_fill(batch: Minibatch) -> Minibatch:
        return replace(batch, terms=with_reference_logprobs(batch.terms, fill))

    noisy = case.minibatch(case.groups, "token_mean")
    batches = [(with_fill(known), 75), (with_fill(later), 75), (noisy, 75)]
    with processes.trainers(worker_settings(optimizer=FROZEN_LR), ranks=2) as trainers:
        first, second, third = [by_rank[0][0] for by_rank in updates(trainers, batches)]
    assert first["parity/logprob_abs_max"] < 1e-5
    assert first["train/ratio_max"] == 1.0
    assert first["train/clip_fraction"] == 0.0
    assert "parity/logprob_abs_max" not in second
    gaps = [
        np.abs(token_logprobs(case.model, t, TEMPERATURE).detach().numpy() - t.logprobs[1:])[t.trainable[1:]]
        for group in case.groups
        for t in group.trajectories
        if t.reward is not None
    ]
    assert third["parity/logprob_abs_mean"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)
    assert third["parity/logprob_abs_max"] == pytest.approx(np.concatenate(gaps).max(), rel=1e-4)
