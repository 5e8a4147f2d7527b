"""Optimizer steps: equal to a single process's AdamW, clipped, on the parameters that are trained, and never from a NaN."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import RankProcesses, Trainers, make_groups, update_requests, worker_settings
from plain_models import logprobs_of, plain_model, token_logprobs

from rlpost.algorithms.online import PolicyGradient
from rlpost.algorithms.protocol import RunFacts
from rlpost.config.schema import AlgorithmConfig, OptimizerConfig, TrainingConfig
from rlpost.driver.batch import Minibatch, build_minibatch
from rlpost.models.embedded import build
from rlpost.training.optimizer import learning_rate_factor
from rlpost.types import ConfigError, Group, RlpostError

ALGORITHM = PolicyGradient(AlgorithmConfig(advantage="group_mean"), RunFacts(max_new_tokens=64))
TEMPERATURE = 1.0
UPDATES = 3
# eps of the size of the gradients: AdamW's first steps are else the gradient's sign, and the sign of a rounding error is no test.
ADAM = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=0.05, warmup_steps=2, decay="linear", final_ratio=0.1)


def minibatch(groups: list[Group], old: str = "current") -> Minibatch:
    return build_minibatch(groups, ALGORITHM, version=0, aggregation="token_mean", constant=64, old=old)


def full_weights(worker: Any) -> dict[str, torch.Tensor]:
    """In a rank: all parameters whole (copies)."""
    worker.model.reshard()
    return {name: parameter.detach().full_tensor().clone() for name, parameter in worker.model.named_parameters()}


def step(trainers: Trainers, batch: Minibatch) -> dict[str, float]:
    """One optimizer step; the metrics of rank 0."""
    requests = update_requests(
        batch.terms, batch.denominator, ALGORITHM.components(), ranks=trainers.ranks, micro_batch_tokens=75, temperature=TEMPERATURE
    )
    metrics: dict[str, float] = trainers.call_each("update", requests)[0]
    return metrics


def plain_adamw(batches: list[list[Group]], config: OptimizerConfig) -> tuple[dict[str, torch.Tensor], list[tuple[float, float]]]:
    """Weights after one AdamW step a batch in one process, and each step's gradient norm before clipping and learning rate.

    The loss is the policy gradient of the current policy: ratio 1, whose gradient is that of -advantage * logprob.
    """
    model = plain_model(build("tiny-sort5"))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    steps = []
    for index, groups in enumerate(batches):
        lr = config.lr * learning_rate_factor(index, total=UPDATES, config=config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        parts = []
        for group_of in groups:
            scored = [t for t in group_of.trajectories if t.reward is not None]
            baseline = sum(t.reward or 0.0 for t in scored) / len(scored)
            for t in scored:
                parts.append(-((t.reward or 0.0) - baseline) * token_logprobs(model, t, TEMPERATURE)[torch.tensor(t.trainable[1:])])
        optimizer.zero_grad()
        torch.cat(parts).mean().backward()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm))
        optimizer.step()
        steps.append((norm, lr))
    return {name: p.detach() for name, p in model.named_parameters()}, steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_equal_those_of_adamw_in_one_process(processes: RankProcesses, ranks: int) -> None:
    """Moments, weight decay on matrices only, warm-up, decay and clipping, over several batches."""
    batches = [make_groups(seed=seed) for seed in range(UPDATES)]
    expected, steps = plain_adamw(batches, ADAM)
    assert all(norm > ADAM.clip_norm for norm, _ in steps), "clipping must be at work"
    with processes.trainers(worker_settings(optimizer=ADAM, total_updates=UPDATES), ranks=ranks) as trainers:
        metrics = [step(trainers, minibatch(groups)) for groups in batches]
        weights = trainers.apply(full_weights)
    for got, (norm, lr) in zip(metrics, steps, strict=True):
        assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert got["train/lr"] == pytest.approx(lr, rel=1e-6)
    for name, parameter in expected.items():
        for rank in range(ranks):
            torch.testing.assert_close(weights[rank][name], parameter, atol=2e-6, rtol=0)


def clipped_norm(worker: Any, requests: Any) -> float:
    """In a rank: norm of the full gradients as the optimizer sees them."""
    norms: list[float] = []
    optimizer_step = worker.optimizer.step

    def observed() -> None:
        squares = [p.grad.full_tensor().square().sum() for p in worker.model.parameters() if p.grad is not None]
        norms.append(math.sqrt(float(sum(squares))))
        optimizer_step()

    worker.optimizer.step = observed
    worker.update(requests)
    worker.optimizer.step = optimizer_step
    return norms[0]


def test_clip_norm_bounds_the_norm_over_all_ranks_and_zero_does_not_clip(processes: RankProcesses) -> None:
    """A norm taken over one rank's shards would clip less on more ranks."""
    batch = minibatch(make_groups())
    norms: dict[tuple[float, int], float] = {}
    for limit in (0.05, 0.0):
        for ranks in (1, 2):
            settings = worker_settings(optimizer=OptimizerConfig(lr=0.0, clip_norm=limit))
            with processes.trainers(settings, ranks=ranks) as trainers:
                requests = update_requests(batch.terms, batch.denominator, ALGORITHM.components(), ranks=ranks)
                norms[limit, ranks] = trainers.apply_each(clipped_norm, requests)[0]
    assert norms[0.05, 1] == pytest.approx(0.05, rel=1e-4)
    assert norms[0.05, 2] == pytest.approx(0.05, rel=1e-4)
    assert norms[0.0, 1] == pytest.approx(norms[0.0, 2], rel=1e-4)
    assert norms[0.0, 1] > 0.1


def test_frozen_parameters_stay_bit_identical_and_the_trained_ones_move(processes: RankProcesses) -> None:
    """A tied output layer is the embedding: freezing one freezes both. Weight decay must not touch what is frozen."""
    trainable = r"layers\.1\."
    training = TrainingConfig(trainable=trainable)
    settings = worker_settings(optimizer=replace(ADAM, warmup_steps=0), training=training)
    with processes.trainers(settings, ranks=2) as trainers:
        before = trainers.apply(full_weights)[0]
        report = trainers.reports[0]
        for seed in range(2):
            step(trainers, minibatch(make_groups(seed=seed)))
        after = trainers.apply(full_weights)[0]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if re.search(trainable, name)}
    assert report["parameters"] == sum(tensor.numel() for tensor in before.values())
    assert report["trained"] == sum(before[name].numel() for name in moved)


def test_a_pattern_that_matches_no_parameter_is_refused_with_names_to_choose_from(processes: RankProcesses) -> None:
    settings = worker_settings(training=TrainingConfig(trainable="decoder"))
    with pytest.raises(ConfigError, match=r"training\.trainable='decoder' matches no parameter; names look like 'model\."):
        with processes.trainers(settings, ranks=1):
            pass


def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_step(processes: RankProcesses) -> None:
    """Weights, moments and schedule are those of the last good step, and nothing of the bad one is left behind."""
    good = minibatch(make_groups())
    bad = replace(good, terms=(replace(good.terms[0], advantage=np.full_like(good.terms[0].advantage, np.nan)), *good.terms[1:]))
    config = replace(ADAM, warmup_steps=0)
    with processes.trainers(worker_settings(optimizer=config), ranks=2) as trainers:
        step(trainers, good)
        before = trainers.apply(full_weights)[0]
        requests = update_requests(bad.terms, bad.denominator, ALGORITHM.components(), ranks=2)
        for rank, future in enumerate(trainers.submit_each("update", requests)):
            with pytest.raises(RlpostError, match=r"gradient norm is nan, so no step was taken"):
                future.result(60)
            assert future.done(), rank
        after = trainers.apply(full_weights)[0]
        assert all(torch.equal(before[name], after[name]) for name in before)
        again = step(trainers, good)
        continued = trainers.apply(full_weights)[0]
    with processes.trainers(worker_settings(optimizer=config), ranks=2) as trainers:
        step(trainers, good)
        assert step(trainers, good)["train/loss"] == again["train/loss"]
        expected = trainers.apply(full_weights)[0]
    assert all(torch.equal(continued[name], expected[name]) for name in expected)


def test_second_update_of_a_batch_measures_its_ratio_from_the_logprobs_before_the_first(processes: RankProcesses) -> None:
    """Recomputed old logprobs: ratio exactly the policy before the first update, and after it really moved."""
    groups = make_groups()
    before = logprobs_of(plain_model(build("tiny-sort5")), groups, TEMPERATURE)
    config = OptimizerConfig(lr=1e-3)
    with processes.trainers(worker_settings(optimizer=config), ranks=2) as trainers:
        batch = minibatch(groups, old="recompute")
        old = trainers.logprobs("logprobs", batch.terms, TEMPERATURE, micro_batch_tokens=75)
        for term, values in zip(batch.terms, old, strict=True):
            np.testing.assert_allclose(values[term.trainable], before[term.trajectory_id][term.trainable], atol=2e-5)
            assert np.isnan(values[~term.trainable]).all()
        batch = replace(batch, terms=tuple(replace(term, old_logprobs=value) for term, value in zip(batch.terms, old, strict=True)))
        first, second = step(trainers, batch), step(trainers, batch)
        now = trainers.logprobs("logprobs", batch.terms, TEMPERATURE, micro_batch_tokens=4096)
    assert first["train/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    moved = np.concatenate([(new - start)[term.trainable] for term, new, start in zip(batch.terms, now, old, strict=True)])
    assert np.abs(moved).max() > 1e-3
    assert second["train/ratio_max"] > 1.0 + 1e-3
