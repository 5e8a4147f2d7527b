"""Who the reference is: the initial weights, the policy without its adapters, or an average of its past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import RankProcesses, Trainers, make_groups, worker_settings
from plain_models import logprobs_of, plain_model, untied_model
from policy_updates import step, terms_of, weights
from torch.distributed.tensor import DTensor

from rlpost.config.schema import LoraConfig, OptimizerConfig, TrainingConfig
from rlpost.types import ConfigError, RlpostError
from rlpost.weights.shards import ShardedWeights

DECAY = 0.75
STEPS = 3
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two ranks cannot halve."""
    return untied_model(tmp_path_factory.mktemp("model") / "untied")


def settings(source: Path, mode: str, *, adapters: int = 0, reshard: bool = True) -> Any:
    training = TrainingConfig(lora=LoraConfig(rank=adapters), reshard_after_forward=reshard)
    optimizer = OptimizerConfig(lr=2e-2, eps=1e-3)
    return replace(worker_settings(source, optimizer=optimizer, training=training), reference_mode=mode, reference_decay=DECAY)


def logprobs(trainers: Trainers, method: str) -> np.ndarray:
    """Of the sampled tokens of one batch, one after the other."""
    terms = terms_of(0)
    values = trainers.logprobs(method, terms, TEMPERATURE, micro_batch_tokens=110)
    return np.concatenate([value[term.trainable] for value, term in zip(values, terms, strict=True)])


def train(trainers: Trainers, seeds: Sequence[int]) -> None:
    for seed in seeds:
        step(trainers, seed)


def averages(worker: Any) -> dict[str, torch.Tensor]:
    """In a rank: the averages whole (copies)."""
    return {name: tensor.full_tensor().clone() for name, tensor in worker.reference.state().items()}


def sent(worker: Any) -> dict[str, torch.Tensor]:
    """In a rank: name and rows of all that engines would get from it."""
    worker.model.reshard()
    found = ShardedWeights(worker.model, "float32", 1 << 20)
    assert worker.open_weights("float32", 1 << 20, False) == found.manifest
    return {found.manifest.names[shard.tensor]: shard.rows(shard.start, shard.stop).clone() for shard in found.shards}


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_its_adapters_a_trained_policy_gives_the_base_models_logprobs_bit_by_bit(
    processes: RankProcesses, source: Path, ranks: int
) -> None:
    with processes.trainers(settings(source, "none"), ranks=ranks) as trainers:
        base = logprobs(trainers, "logprobs")
    with processes.trainers(settings(source, "adapters_off", adapters=3), ranks=ranks) as trainers:
        train(trainers, range(STEPS))
        before = logprobs(trainers, "logprobs")
        np.testing.assert_array_equal(logprobs(trainers, "reference_logprobs"), base)
        np.testing.assert_array_equal(logprobs(trainers, "logprobs"), before, err_msg="the adapters must be on again")
    assert np.abs(before - base).max() > 1e-2


def test_adapters_cannot_be_switched_off_where_there_are_none(processes: RankProcesses, source: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.reference=adapters_off .* has none; set training\.lora\.rank"):
        with processes.trainers(settings(source, "adapters_off"), ranks=1):
            pass


def test_initial_weights_stay_the_reference_while_the_policy_moves(processes: RankProcesses, source: Path) -> None:
    with processes.trainers(settings(source, "initial"), ranks=2) as trainers:
        start = logprobs(trainers, "logprobs")
        train(trainers, range(STEPS))
        np.testing.assert_array_equal(logprobs(trainers, "reference_logprobs"), start)
        assert np.abs(logprobs(trainers, "logprobs") - start).max() > 1e-2


def whole_parameters(worker: Any) -> list[str]:
    """In a rank: names of parameters that are gathered."""
    return [name for name, parameter in worker.model.named_parameters() if not isinstance(parameter, DTensor)]


@pytest.mark.parametrize("mode", ["initial", "moving_average"])
def test_forwards_leave_no_gathered_layer_behind_where_weights_stay_whole_until_the_backward(
    processes: RankProcesses, source: Path, mode: str
) -> None:
    """FSDP's own reshard reaches the root only: layers would be a hidden copy of the model, and an average could not be taken."""
    with processes.trainers(settings(source, mode, reshard=False), ranks=2) as trainers:
        logprobs(trainers, "logprobs")
        assert trainers.apply(whole_parameters) == [[], []]
        train(trainers, [0])
        kept = logprobs(trainers, "reference_logprobs")
        assert trainers.apply(whole_parameters) == [[], []]
    with processes.trainers(settings(source, mode), ranks=2) as trainers:
        logprobs(trainers, "logprobs")
        train(trainers, [0])
        np.testing.assert_allclose(kept, logprobs(trainers, "reference_logprobs"), atol=1e-5)


@pytest.mark.parametrize("adapters", [0, 3], ids=["whole", "adapters"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_moving_average_follows_its_formula_and_gives_the_logprobs_of_the_averaged_weights(
    processes: RankProcesses, source: Path, ranks: int, adapters: int
) -> None:
    with processes.trainers(settings(source, "moving_average", adapters=adapters), ranks=ranks) as trainers:
        start = trainers.apply(weights)[0]
        expected = dict(start)
        for seed in range(STEPS):
            train(trainers, [seed])
            logprobs(trainers, "reference_logprobs")  # in between: using it must not change it
            now = trainers.apply(weights)[0]
            expected = {name: DECAY * expected[name] + (1 - DECAY) * now[name] for name in now}
        found = trainers.apply(averages)[0]
        reference = logprobs(trainers, "reference_logprobs")
        after = trainers.apply(weights)[0]
    assert set(found) == {name for name in start if not adapters or "lora_" in name}
    for name, value in found.items():
        assert float((value - expected[name]).abs().max()) <= 1e-6 * float(expected[name].abs().max())
        assert float((value - now[name]).abs().max()) > 0
    assert all(torch.equal(after[name], now[name]) for name in now), "the weights themselves must be back"
    if not adapters:
        model = plain_model(source)
        model.load_state_dict(expected)
        plain = logprobs_of(model, make_groups(seed=0), TEMPERATURE)
        terms = terms_of(0)
        np.testing.assert_allclose(reference, np.concatenate([plain[term.trajectory_id][term.trainable] for term in terms]), atol=5e-5)


def test_moving_average_goes_on_after_a_resume_bit_by_bit_and_on_other_ranks(
    processes: RankProcesses, source: Path, tmp_path: Path
) -> None:
    with processes.trainers(settings(source, "moving_average"), ranks=2) as trainers:
        train(trainers, range(STEPS))
        trainers.call("save", str(tmp_path))
        saved = trainers.apply(averages)[0]
        train(trainers, range(STEPS, 2 * STEPS))
        ended = trainers.apply(averages)[0]
    for ranks in (1, 2):
        with processes.trainers(settings(source, "moving_average"), ranks=ranks) as trainers:
            trainers.call("load", str(tmp_path))
            restored = trainers.apply(averages)[0]
            assert all(torch.equal(restored[name], saved[name]) for name in saved)
            train(trainers, range(STEPS, 2 * STEPS))
            again = trainers.apply(averages)[0]
    assert all(torch.equal(again[name], ended[name]) for name in ended)
    assert not all(torch.equal(saved[name], ended[name]) for name in ended)


def test_a_checkpoint_without_an_average_is_refused_with_the_setting_to_change(
    processes: RankProcesses, source: Path, tmp_path: Path
) -> None:
    with processes.trainers(settings(source, "initial"), ranks=1) as trainers:
        trainers.call("save", str(tmp_path))
    with processes.trainers(settings(source, "moving_average"), ranks=1) as trainers:
        with pytest.raises(RlpostError, match=r"holds no moving average of the weights: .* algorithm\.reference"):
            trainers.call("load", str(tmp_path))


@pytest.mark.parametrize("mode", ["initial", "moving_average"])
def test_engines_get_the_policys_weights_and_nothing_of_the_reference(processes: RankProcesses, source: Path, mode: str) -> None:
    with processes.trainers(settings(source, mode), ranks=1) as trainers:
        train(trainers, range(STEPS))
        logprobs(trainers, "reference_logprobs")
        engines = trainers.apply(sent)[0]
        policy = trainers.apply(weights)[0]
    assert list(engines) == list(policy)
    assert all(torch.equal(engines[name].reshape(policy[name].shape), policy[name]) for name in policy)
