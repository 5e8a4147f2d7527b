"""Save and load: every field of model, optimizer, schedule and RNG, also on another number of ranks; and the export."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import RankProcesses, Trainers, make_groups, update_requests, worker_settings
from plain_models import logprobs_of, plain_model, untied_model

from rlpost.algorithms.online import PolicyGradient
from rlpost.algorithms.protocol import RunFacts
from rlpost.checkpoint.directory import begin, complete
from rlpost.config.schema import AlgorithmConfig, OptimizerConfig, TrainingConfig
from rlpost.driver.batch import Minibatch, build_minibatch
from rlpost.models.embedded import build
from rlpost.training.optimizer import learning_rate_factor

ALGORITHM = PolicyGradient(AlgorithmConfig(advantage="group_mean"), RunFacts(max_new_tokens=64))
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=5, decay="linear", final_ratio=0.1)
CHANGED = OptimizerConfig(lr=3e-3, beta1=0.8, beta2=0.99, eps=1e-4, weight_decay=0.3, warmup_steps=0, decay="cosine", final_ratio=0.2)
TOTAL, BEFORE, AFTER = 8, 2, 3
"""Updates of the whole run, those before the checkpoint (still in the warm-up: lr differs from initial_lr), those after it."""


def minibatch(seed: int) -> Minibatch:
    return build_minibatch(make_groups(seed=seed), ALGORITHM, version=0, aggregation="token_mean", constant=64, old="current")


def update(trainers: Trainers, seed: int) -> dict[str, float]:
    """One optimizer step on the batch of ``seed``; metrics without the memory."""
    batch = minibatch(seed)
    requests = update_requests(batch.terms, batch.denominator, ALGORITHM.components(), ranks=trainers.ranks, micro_batch_tokens=110)
    metrics: dict[str, float] = trainers.call_each("update", requests)[0]
    return {name: value for name, value in metrics.items() if not name.startswith("memory/")}


def state(worker: Any) -> dict[str, Any]:
    """In a rank: everything that a resume must bring back, whole, by parameter name."""
    worker.model.reshard()
    names = {parameter: name for name, parameter in worker.model.named_parameters()}
    result: dict[str, Any] = {f"weight/{name}": p.detach().full_tensor().clone() for p, name in names.items()}
    for index, group in enumerate(worker.optimizer.param_groups):
        for key in ("lr", "initial_lr", "betas", "eps", "weight_decay"):
            result[f"group/{index}/{key}"] = group[key]
        for parameter in group["params"]:
            for key, value in worker.optimizer.state[parameter].items():
                result[f"{key}/{names[parameter]}"] = value.full_tensor().clone() if hasattr(value, "full_tensor") else value.clone()
    result["schedule"] = {k: v for k, v in worker.schedule.state_dict().items() if k != "lr_lambdas"}
    return result


def draw(worker: Any) -> tuple[list[float], list[float], list[float]]:
    """In a rank: the next random numbers of torch, numpy and Python."""
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(actual) == sorted(expected)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual[key], value), key
        else:
            assert actual[key] == value, key


@pytest.fixture(scope="module", params=[1, 2], ids=["saved-by-1", "saved-by-2"])
def saved(request: pytest.FixtureRequest, processes: RankProcesses, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A checkpoint in the middle of the warm-up, the state at that moment, and what the run did next."""
    directory = tmp_path_factory.mktemp(f"saved-by-{request.param}")
    with processes.trainers(worker_settings(optimizer=OPTIMIZER, total_updates=TOTAL), ranks=request.param) as trainers:
        for seed in range(BEFORE):
            update(trainers, seed)
        trainers.call("logprobs", [], 1.0)
        trainers.call("save", str(directory))
        at_save = trainers.apply(state)[0]
        draws = trainers.apply(draw)
    return {"directory": directory, "ranks": request.param, "state": at_save, "draws": draws}


@pytest.fixture(scope="module")
def uninterrupted(processes: RankProcesses) -> dict[int, list[dict[str, float]]]:
    """Metrics of the updates after the checkpoint, of runs that were never interrupted, by number of ranks."""
    result = {}
    for ranks in (1, 2):
        with processes.trainers(worker_settings(optimizer=OPTIMIZER, total_updates=TOTAL), ranks=ranks) as trainers:
            result[ranks] = [update(trainers, seed) for seed in range(BEFORE + AFTER)][BEFORE:]
    return result


@pytest.mark.parametrize("ranks", [1, 2], ids=["loaded-by-1", "loaded-by-2"])
def test_load_restores_every_field_and_the_next_updates_are_those_of_the_uninterrupted_run(
    processes: RankProcesses, saved: dict[str, Any], uninterrupted: dict[int, list[dict[str, float]]], ranks: int
) -> None:
    """Moments, step, lr, initial_lr, schedule, RNG; 1 and 2 ranks in both directions."""
    assert max(float(value.abs().max()) for key, value in saved["state"].items() if key.startswith("exp_avg/")) > 0
    assert saved["state"]["group/0/lr"] != saved["state"]["group/0/initial_lr"]
    settings = worker_settings(optimizer=OPTIMIZER, total_updates=TOTAL, seed=99)
    with processes.trainers(settings, ranks=ranks) as trainers:
        update(trainers, 77)  # a state of its own that the load must replace entirely
        trainers.call("load", str(saved["directory"]))
        loaded = trainers.apply(state)
        draws = trainers.apply(draw)
        metrics = [update(trainers, seed) for seed in range(BEFORE, BEFORE + AFTER)]
    for one in loaded:
        assert_same_state(one, saved["state"])
    for rank in range(min(ranks, saved["ranks"])):
        assert draws[rank] == saved["draws"][rank]
    for got, expected in zip(metrics, uninterrupted[ranks], strict=True):
        same = ranks == saved["ranks"]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert got[name] == (value if same else pytest.approx(value, rel=1e-4, abs=1e-6)), name


@pytest.mark.parametrize("ranks", [1, 2], ids=["loaded-by-1", "loaded-by-2"])
def test_optimizer_settings_that_were_changed_for_the_resume_hold_from_its_first_step_on(
    processes: RankProcesses, saved: dict[str, Any], ranks: int
) -> None:
    """Weights, moments and the schedule's position are the checkpoint's; each hyperparameter is the present one."""
    with processes.trainers(worker_settings(optimizer=CHANGED, total_updates=TOTAL), ranks=ranks) as trainers:
        trainers.call("load", str(saved["directory"]))
        loaded = trainers.apply(state)
        metrics = [update(trainers, seed) for seed in range(BEFORE, BEFORE + AFTER)]
    rates = [CHANGED.lr * learning_rate_factor(BEFORE + i, total=TOTAL, config=CHANGED) for i in range(AFTER)]
    for one in loaded:
        for index, decay in enumerate([0.3, 0.0]):
            group = {key: one.pop(f"group/{index}/{key}") for key in ("lr", "initial_lr", "betas", "eps", "weight_decay")}
            assert group == {"lr": rates[0], "initial_lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-4, "weight_decay": decay}
        assert one["schedule"].pop("base_lrs") == [3e-3, 3e-3] and one["schedule"].pop("_last_lr") == [rates[0]] * 2
        kept = {key: value for key, value in saved["state"].items() if not key.startswith("group/")}
        kept["schedule"] = {key: value for key, value in kept["schedule"].items() if key not in ("base_lrs", "_last_lr")}
        assert_same_state(one, kept)
    assert [one["train/lr"] for one in metrics] == rates


def test_a_fresh_trainer_loads_before_its_first_step_and_frozen_parameters_too(processes: RankProcesses, tmp_path: Path) -> None:
    """After a real resume no optimizer state exists yet; frozen parameters have none at all."""
    settings = worker_settings(
        optimizer=OPTIMIZER, total_updates=TOTAL, training=TrainingConfig(trainable=r"layers\.1\.|norm"), reference="tiny-random"
    )
    terms = minibatch(0).terms
    with processes.trainers(settings, ranks=2) as trainers:
        update(trainers, 0)
        trainers.call("save", str(tmp_path))
        expected = trainers.apply(state)[0]
        reference = trainers.logprobs("reference_logprobs", terms, 1.0, micro_batch_tokens=110)
        following = update(trainers, 1)
    with processes.trainers(settings, ranks=2) as trainers:
        trainers.call("load", str(tmp_path))
        assert_same_state(trainers.apply(state)[0], expected)
        again = trainers.logprobs("reference_logprobs", terms, 1.0, micro_batch_tokens=110)
        assert update(trainers, 1) == following
    for one, other in zip(reference, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_ranks_draw_different_random_numbers(processes: RankProcesses) -> None:
    with processes.trainers(worker_settings(), ranks=2) as trainers:
        first, second = trainers.apply(draw)
    assert all(mine != theirs for mine, theirs in zip(first, second, strict=True))


# ---- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_exported_directory_has_the_trainers_logits(processes: RankProcesses, tmp_path: Path, tied: bool) -> None:
    """Saved after updates and a forward without backward by two ranks, exported in one process, loaded by transformers."""
    from rlpost.checkpoint.__main__ import main

    source = build("tiny-sort5") if tied else untied_model(tmp_path / "untied")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(f"model:\n  path: {source}\n")
    groups = make_groups()
    terms = build_minibatch(groups, ALGORITHM, version=0, aggregation="token_mean", constant=64, old="current").terms
    settings = worker_settings(source, optimizer=replace(OPTIMIZER, warmup_steps=0), total_updates=TOTAL)
    with processes.trainers(settings, ranks=2) as trainers:
        for seed in range(2):
            update(trainers, seed)
        expected = trainers.logprobs("logprobs", terms, 1.0, micro_batch_tokens=110)
        partial = begin(run_dir, 2)
        trainers.call("save", str(partial))
    complete(partial, {"step": 2})
    assert main(["export", str(run_dir), "--to", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert main(["export", str(run_dir / "checkpoints" / "step_000002"), "--to", str(tmp_path / "half")]) == 0
    model = plain_model(tmp_path / "out")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    moved = logprobs_of(plain_model(source), groups, 1.0)
    exported = logprobs_of(model, groups, 1.0)
    half = logprobs_of(plain_model(tmp_path / "half"), groups, 1.0)
    for term, values in zip(terms, expected, strict=True):
        mask = term.trainable
        np.testing.assert_allclose(exported[term.trajectory_id][mask], values[mask], atol=2e-5)
        assert np.abs(half[term.trajectory_id][mask] - values[mask]).max() < 0.3  # bfloat16
        assert np.abs(moved[term.trajectory_id][mask] - values[mask]).max() > 1e-3
    assert main(["export", str(run_dir), "--to", str(tmp_path / "out")]) == 2, "nothing may be overwritten"
