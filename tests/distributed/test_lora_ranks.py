"""LoRA on sharded trainer ranks: the same adapters as one process trains, whole after a resume, and right on their way to engines.

The model's sizes divide by no number of ranks used here, and one case has fewer rows of A than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_ranks import RankProcesses, Trainers, make_groups, update_requests, worker_settings
from omegaconf import OmegaConf
from plain_models import logprobs_of, plain_model, token_logprobs, untied_model
from safetensors.torch import load
from torch.func import functional_call
from weight_links import Received, link, same_bits, total

from rlpost.algorithms.online import PolicyGradient
from rlpost.algorithms.protocol import RunFacts
from rlpost.checkpoint.__main__ import main as checkpoint_command
from rlpost.checkpoint.directory import begin, complete
from rlpost.config.schema import AlgorithmConfig, LoraConfig, OptimizerConfig, TrainingConfig
from rlpost.driver.batch import Minibatch, build_minibatch
from rlpost.models.embedded import build
from rlpost.training.optimizer import learning_rate_factor
from rlpost.types import WeightsManifest
from rlpost.weights import delta
from rlpost.weights.adapters import hash_adapter
from rlpost.weights.fingerprint import MODULUS, TensorHashes

ALGORITHM = PolicyGradient(AlgorithmConfig(advantage="group_mean"), RunFacts(max_new_tokens=64))
# eps of the size of the gradients: AdamW's first steps are else the gradient's sign, and the sign of a rounding error is no test.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=0.02, warmup_steps=2, decay="linear", final_ratio=0.1)
TOTAL, BEFORE, AFTER = 8, 2, 2
"""Updates of the whole run, those before its checkpoint, and those that are compared after it."""

SHARDINGS = pytest.mark.parametrize(("ranks", "rank"), [(2, 3), (3, 2)], ids=["2-ranks", "3-ranks-and-2-rows-of-a"])
ONE_ROW = 1
"""Bytes of a bucket that has room for one row, whatever its size."""

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases whose layers are 12, 4 and 27 rows high."""
    return untied_model(tmp_path_factory.mktemp("model") / "untied")


@contextmanager
def lora_trainers(
    processes: RankProcesses, source: Path, *, ranks: int, rank: int = 3, sync: str = "adapter", alpha: float = 6.0, seed: int = 0
) -> Iterator[Trainers]:
    """Trainer ranks with adapters on all layers that have some by default."""
    training = TrainingConfig(lora=LoraConfig(rank=rank, alpha=alpha, sync=sync))
    settings = worker_settings(source, optimizer=OPTIMIZER, training=training, total_updates=TOTAL, seed=seed)
    with processes.trainers(settings, ranks=ranks) as trainers:
        yield trainers


def minibatch(seed: int) -> Minibatch:
    return build_minibatch(make_groups(seed=seed), ALGORITHM, version=0, aggregation="token_mean", constant=64, old="current")


def update(trainers: Trainers, seed: int) -> dict[str, float]:
    """One optimizer step on the batch of ``seed``; metrics without the memory."""
    batch = minibatch(seed)
    requests = update_requests(batch.terms, batch.denominator, ALGORITHM.components(), ranks=trainers.ranks, micro_batch_tokens=110)
    metrics: dict[str, float] = trainers.call_each("update", requests)[0]
    return {name: value for name, value in metrics.items() if not name.startswith("memory/")}


def full_weights(worker: Any) -> Weights:
    """In a rank: all parameters whole, read without the code under test."""
    worker.model.reshard()
    return {name: parameter.detach().full_tensor().clone() for name, parameter in worker.model.named_parameters()}


def is_adapter(name: str) -> bool:
    return name.endswith(("lora_A", "lora_B"))


def dense(weights: Mapping[str, torch.Tensor], scaling: float) -> Weights:
    """W + s B A by the plain model's names."""
    result = {}
    for name, tensor in weights.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A" in weights:
            tensor = tensor + scaling * (weights[f"{layer}.lora_B"] @ weights[f"{layer}.lora_A"])
        if not is_adapter(name):
            result[name] = tensor
    return result


# ---- training ----------------------------------------------------------------------------------------------------------


def plain_steps(path: Path, start: Weights, scaling: float, count: int) -> tuple[Weights, list[float]]:
    """Adapters after AdamW steps in one process on a model whose weights are W + s B A, and each step's gradient norm."""
    model = plain_model(path)
    adapters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in start.items() if is_adapter(name)}
    base = {name: tensor for name, tensor in start.items() if not is_adapter(name)}
    optimizer = torch.optim.AdamW(
        adapters.values(), betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )

    def forward(**inputs: Any) -> Any:
        return functional_call(model, dense({**base, **adapters}, scaling), kwargs=inputs)

    norms = []
    for index in range(count):
        optimizer.param_groups[0]["lr"] = OPTIMIZER.lr * learning_rate_factor(index, total=TOTAL, config=OPTIMIZER)
        parts = []
        for group in make_groups(seed=index):
            scored = [t for t in group.trajectories if t.reward is not None]
            baseline = sum(t.reward or 0.0 for t in scored) / len(scored)
            parts += [-((t.reward or 0.0) - baseline) * token_logprobs(forward, t, 1.0)[torch.tensor(t.trainable[1:])] for t in scored]
        optimizer.zero_grad()
        torch.cat(parts).mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(adapters.values(), OPTIMIZER.clip_norm)))
        optimizer.step()
    return {name: parameter.detach() for name, parameter in adapters.items()}, norms


@pytest.mark.parametrize(("ranks", "rank"), [(1, 3), (2, 3), (3, 2)], ids=["1-rank", "2-ranks", "3-ranks-and-2-rows-of-a"])
def test_adapters_are_trained_as_in_one_process_and_the_model_under_them_keeps_its_bits(
    processes: RankProcesses, source: Path, ranks: int, rank: int
) -> None:
    with lora_trainers(processes, source, ranks=ranks, rank=rank) as trainers:
        start = trainers.apply(full_weights)[0]
        metrics = [update(trainers, seed) for seed in range(4)]
        weights = trainers.apply(full_weights)
        report = trainers.reports[0]
    expected, norms = plain_steps(source, start, 6.0 / rank, 4)
    original = dict(plain_model(source).named_parameters())
    assert set(start) == set(original) | set(expected) and len(expected) == 2 * 7 * 3
    assert report["trained"] == sum(tensor.numel() for tensor in expected.values())
    assert [one["train/grad_norm"] for one in metrics] == pytest.approx(norms, rel=1e-4)
    assert min(norms) > OPTIMIZER.clip_norm, "clipping must be at work"
    for held in weights:
        for name, tensor in held.items():
            if is_adapter(name):
                assert not torch.equal(tensor, start[name]), name
                torch.testing.assert_close(tensor, expected[name], atol=2e-6, rtol=0)
            else:
                assert torch.equal(tensor, original[name]), name


def test_all_ranks_begin_with_the_same_adapters_and_another_seed_with_others(processes: RankProcesses, source: Path) -> None:
    starts = []
    for ranks, seed in ((1, 0), (2, 0), (2, 1)):
        with lora_trainers(processes, source, ranks=ranks, seed=seed) as trainers:
            starts.append(trainers.apply(full_weights)[0])
    one, two, other = starts
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if name.endswith("lora_A"))
    assert not any(one[name].any() for name in one if name.endswith("lora_B"))


def test_logprobs_are_those_of_the_merged_model(processes: RankProcesses, source: Path) -> None:
    """At the start the model's own, afterwards those of W + s B A, which differ."""
    groups = make_groups()
    terms = minibatch(0).terms
    with lora_trainers(processes, source, ranks=2) as trainers:
        before = trainers.logprobs("logprobs", terms, 0.7, micro_batch_tokens=110)
        for seed in range(3):
            update(trainers, seed)
        after = trainers.logprobs("logprobs", terms, 0.7, micro_batch_tokens=110)
        weights = trainers.apply(full_weights)[0]
    model = plain_model(source)
    original = logprobs_of(model, groups, 0.7)
    model.load_state_dict(dense(weights, 2.0))
    merged = logprobs_of(model, groups, 0.7)
    for term, start, end in zip(terms, before, after, strict=True):
        mask = term.trainable
        np.testing.assert_allclose(start[mask], original[term.trajectory_id][mask], atol=2e-5)
        np.testing.assert_allclose(end[mask], merged[term.trajectory_id][mask], atol=2e-5)
    assert max(np.abs(end - start)[term.trainable].max() for term, start, end in zip(terms, before, after, strict=True)) > 1e-3


def test_the_reference_is_the_model_without_adapters(processes: RankProcesses) -> None:
    """A KL to a reference that moves with the policy would always be 0."""
    terms = minibatch(0).terms
    settings = worker_settings(optimizer=OPTIMIZER, training=TrainingConfig(lora=LoraConfig(rank=3)), reference="tiny-sort5")
    with processes.trainers(settings, ranks=2) as trainers:
        for seed in range(3):
            update(trainers, seed)
        reference = trainers.logprobs("reference_logprobs", terms, 1.0, micro_batch_tokens=110)
        policy = trainers.logprobs("logprobs", terms, 1.0, micro_batch_tokens=110)
    original = logprobs_of(plain_model(build("tiny-sort5")), make_groups(), 1.0)
    for term, values in zip(terms, reference, strict=True):
        np.testing.assert_allclose(values[term.trainable], original[term.trajectory_id][term.trainable], atol=2e-5)
    moved = [np.abs(mine - frozen)[term.trainable].max() for term, mine, frozen in zip(terms, policy, reference, strict=True)]
    assert max(moved) > 1e-3


# ---- checkpoints -------------------------------------------------------------------------------------------------------


def optimizer_state(worker: Any) -> Weights:
    """In a rank: moments and step counts whole, by parameter name."""
    names = {parameter: name for name, parameter in worker.model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for parameter, state in worker.optimizer.state.items()
        for key, value in state.items()
    }


@pytest.fixture(scope="module")
def saved(processes: RankProcesses, source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run directory with a checkpoint of two ranks, what the trainer held then, and what it did next."""
    run_dir = tmp_path_factory.mktemp("run")
    lora = {"rank": 3, "alpha": 6.0}
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml({"model": {"path": str(source)}, "training": {"lora": lora}}))
    partial = begin(run_dir, BEFORE)
    with lora_trainers(processes, source, ranks=2) as trainers:
        for seed in range(BEFORE):
            update(trainers, seed)
        logprobs = trainers.logprobs("logprobs", minibatch(0).terms, 1.0, micro_batch_tokens=110)
        trainers.call("save", str(partial))
        weights, moments = trainers.apply(full_weights)[0], trainers.apply(optimizer_state)[0]
        following = [update(trainers, BEFORE + index) for index in range(AFTER)]
    complete(partial, {"step": BEFORE})
    directory = run_dir / "checkpoints" / f"step_{BEFORE:06d}"
    return {
        "run": run_dir, "directory": directory, "weights": weights, "moments": moments, "logprobs": logprobs, "following": following,
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 1, 3])
def test_a_resume_brings_back_adapters_and_moments_and_goes_on_as_the_uninterrupted_run(
    processes: RankProcesses, source: Path, saved: dict[str, Any], ranks: int
) -> None:
    """Also on another number of ranks. The resumed trainer began with other adapters, which must be replaced entirely."""
    with lora_trainers(processes, source, ranks=ranks, seed=99) as trainers:
        update(trainers, 77)
        trainers.call("load", str(saved["directory"]))
        weights, moments = trainers.apply(full_weights), trainers.apply(optimizer_state)
        following = [update(trainers, BEFORE + index) for index in range(AFTER)]
    assert max(float(value.abs().max()) for key, value in saved["moments"].items() if key.endswith("lora_A/exp_avg")) > 0
    for held, expected in [*((one, saved["weights"]) for one in weights), *((one, saved["moments"]) for one in moments)]:
        assert sorted(held) == sorted(expected)
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    for got, metrics in zip(following, saved["following"], strict=True):
        assert got == (metrics if ranks == 2 else pytest.approx(metrics, rel=1e-4, abs=1e-6))


def test_a_checkpoint_of_adapters_of_another_rank_is_refused(processes: RankProcesses, source: Path, saved: dict[str, Any]) -> None:
    with lora_trainers(processes, source, ranks=1, rank=5) as trainers:
        with pytest.raises(BaseException, match=r"Size mismatch .*lora_A"):  # torch derives its CheckpointException from it
            trainers.call("load", str(saved["directory"]))


def test_an_exported_checkpoint_is_a_plain_model_with_the_trainers_logprobs(saved: dict[str, Any], source: Path, tmp_path: Path) -> None:
    assert checkpoint_command(["export", str(saved["run"]), "--to", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    model = plain_model(tmp_path / "out")
    assert dict(model.named_parameters()).keys() == dict(plain_model(source).named_parameters()).keys()
    found, original = logprobs_of(model, make_groups(), 1.0), logprobs_of(plain_model(source), make_groups(), 1.0)
    moved = []
    for term, expected in zip(minibatch(0).terms, saved["logprobs"], strict=True):
        mask = term.trainable
        np.testing.assert_allclose(found[term.trajectory_id][mask], expected[mask], atol=2e-5)
        moved.append(np.abs(original[term.trajectory_id][mask] - expected[mask]).max())
    assert max(moved) > 1e-3


# ---- to the engines ----------------------------------------------------------------------------------------------------


def receive_weights(trainers: Trainers, manifest: WeightsManifest, mode: str = "full") -> tuple[str, Received]:
    """One sync of whole tensors: the trainer's fingerprint, what a receiver has."""
    sync = link(trainers, manifest)
    reports, [received] = sync.run(sync.plan(mode))
    return total(reports), received


def receive_message(trainers: Trainers, manifest: WeightsManifest, mode: str, method: str) -> tuple[list[Any], bytes]:
    """One sync of an encoded message: each rank's report of ``method``, which encodes it, and what a receiver has."""
    reports = trainers.call("weights", method, True)
    sync = link(trainers, manifest)
    plan = sync.plan(mode, message_bytes=reports[0].bytes)
    receiving = sync.receiving([replace(plan, mode="delta")])  # to a receiver a message is a message
    sync.join()
    trainers.call("weights", "send_message", plan)
    [[received]] = receiving.result(30)
    return reports, received.message


def patched(held: Weights, manifest: WeightsManifest, message: bytes) -> tuple[Weights, int]:
    """The tensors with a delta's elements overwritten, and how many these are."""
    result, count = {name: tensor.clone() for name, tensor in held.items()}, 0
    for part in delta.split(message):
        for change in delta.decode(part):
            flat = result[manifest.names[change.tensor]].view(-1).numpy()
            flat.view(change.values.dtype)[change.indices] = change.values
            count += len(change.indices)
    return result, count


def fingerprint(manifest: WeightsManifest, tensors: Weights) -> int:
    """Over whole tensors, segment by segment."""
    hashes = TensorHashes(manifest)
    for tensor, (name, cuts) in enumerate(zip(manifest.names, manifest.cuts, strict=True)):
        for owner in range(len(cuts) - 1):
            if cuts[owner] < cuts[owner + 1]:
                hashes.add(tensor, owner, cuts[owner], tensors[name][cuts[owner] : cuts[owner + 1]])
    return hashes.total()


def assert_merged(tensors: Weights | None, weights: Weights, scaling: float) -> None:
    """Close to W + s B A; what has no adapter has its own bits."""
    expected = dense(weights, scaling)
    assert tensors is not None and list(tensors) == list(expected)
    for name, tensor in expected.items():
        if f"{name.removesuffix('.weight')}.lora_A" in weights:
            torch.testing.assert_close(tensors[name], tensor, atol=1e-6, rtol=1e-6)
            assert not torch.equal(tensors[name], weights[name]), name
        else:
            assert same_bits(tensors[name], weights[name]), name


def forward_only(trainers: Trainers) -> None:
    """Afterwards FSDP's root may still be gathered, and its parameters plain tensors."""
    trainers.logprobs("logprobs", minibatch(0).terms, 1.0, micro_batch_tokens=110)


@SHARDINGS
@pytest.mark.parametrize("bucket_bytes", [ONE_ROW, 700])
def test_merged_weights_arrive_as_the_sum_of_model_and_adapter_however_ranks_and_buckets_cut_them(
    processes: RankProcesses, source: Path, ranks: int, rank: int, bucket_bytes: int
) -> None:
    with lora_trainers(processes, source, ranks=ranks, rank=rank, sync="merged") as trainers:
        manifest = trainers.call("open_weights", "float32", bucket_bytes, False)[0]
        for seed in range(2):
            update(trainers, seed)
            forward_only(trainers)
            sent, received = receive_weights(trainers, manifest)
            weights = trainers.apply(full_weights)[0]
            assert received.fingerprint == sent
            assert_merged(received.tensors, weights, 6.0 / rank)
            before = received.tensors
        trained = dict(zip(manifest.names, manifest.trained, strict=True))
        assert {name for name in trained if trained[name]} == {name for name in trained if "_proj.weight" in name}
        update(trainers, 2)
        sync = link(trainers, manifest)
        receiving = sync.receiving([sync.plan("full"), sync.plan("trained")])
        sync.join()
        trainers.call("weights", "send_weights", sync.plan("full"))
        update(trainers, 3)
        reports = trainers.call("weights", "send_weights", sync.plan("trained"))
        [[_, last]] = receiving.result(30)
        assert last.fingerprint == total(reports)
        assert_merged(last.tensors, trainers.apply(full_weights)[0], 6.0 / rank)
        assert before is not None and any(not torch.equal(before[name], last.tensors[name]) for name in before)


@SHARDINGS
def test_a_delta_of_merged_weights_brings_what_moved_and_its_proof_holds_to_the_bit(
    processes: RankProcesses, source: Path, ranks: int, rank: int
) -> None:
    with lora_trainers(processes, source, ranks=ranks, rank=rank, sync="merged") as trainers:
        manifest = trainers.call("open_weights", "float32", 700, True)[0]
        _, received = receive_weights(trainers, manifest)
        trainers.call("weights", "advance", 1)
        held = received.tensors or {}
        for seed in range(3):
            update(trainers, seed)
            forward_only(trainers)
            reports, message = receive_message(trainers, manifest, "delta", "encode_delta")
            held, changed = patched(held, manifest, message)
            assert changed == sum(report.changed for report in reports) > 0
            assert sum(report.compared for report in reports) == sum(tensor.numel() for name, tensor in held.items() if "_proj.w" in name)
            assert total(reports) == f"{fingerprint(manifest, held):032x}"
            assert_merged(held, trainers.apply(full_weights)[0], 6.0 / rank)
            trainers.call("weights", "advance", 2 + seed)


@pytest.mark.parametrize("bucket_bytes", [ONE_ROW, 700])
def test_a_delta_right_after_a_full_sync_of_merged_weights_is_empty(processes: RankProcesses, bucket_bytes: int) -> None:
    """A bucket ends where a chunk of the comparison does not. If the rounding of a row depended on the rows beside it, the trainer would
    take engines to hold other bits than they do, and each delta after it would fail its proof."""
    with lora_trainers(processes, build("tiny-sort5"), ranks=2, rank=8, alpha=16.0, sync="merged") as trainers:
        manifest = trainers.call("open_weights", "float32", bucket_bytes, True)[0]
        update(trainers, 0)
        sent, received = receive_weights(trainers, manifest)
        trainers.call("weights", "advance", 1)
        reports, message = receive_message(trainers, manifest, "delta", "encode_delta")
        assert patched(received.tensors or {}, manifest, message)[1] == sum(report.changed for report in reports) == 0
        assert total(reports) == sent == received.fingerprint


@SHARDINGS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_arrive_with_peft_names_and_their_scaling_in_b(
    processes: RankProcesses, source: Path, ranks: int, rank: int, dtype: str
) -> None:
    """The message has nothing else, and the proof covers the adapters and the model under them."""
    engine_dtype: torch.dtype = getattr(torch, dtype)
    with lora_trainers(processes, source, ranks=ranks, rank=rank) as trainers:
        manifest = trainers.call("open_weights", dtype, 700, False)[0]
        assert not any(manifest.trained) and not any(is_adapter(name) for name in manifest.names)
        totals = []
        for seed in range(2):
            update(trainers, seed)
            forward_only(trainers)
            reports, message = receive_message(trainers, manifest, "adapter", "encode_adapter")
            weights = trainers.apply(full_weights)[0]
            expected = {}
            for name, tensor in weights.items():
                if is_adapter(name):
                    scaled = tensor if name.endswith("lora_A") else 6.0 / rank * tensor
                    expected[f"base_model.model.{name}.weight"] = scaled.to(engine_dtype)
            tensors = load(message)
            assert sorted(tensors) == sorted(expected)
            assert all(same_bits(tensors[name], tensor) for name, tensor in expected.items())
            base = {name: tensor.to(engine_dtype) for name, tensor in weights.items() if not is_adapter(name)}
            proof = (fingerprint(manifest, base) + sum(hash_adapter(expected).values())) % MODULUS
            assert total(reports) == f"{proof:032x}"
            totals.append(proof)
        assert totals[0] != totals[1]


def test_an_adapter_message_has_the_bytes_of_the_adapters(processes: RankProcesses) -> None:
    """Not those of the model: 60,000 of 430,000 bytes for rank 8 in the tiny model, and a header."""
    with lora_trainers(processes, build("tiny-sort5"), ranks=2, rank=8) as trainers:
        trainers.call("open_weights", "float32", 1 << 20, False)
        [report, other] = trainers.call("weights", "encode_adapter", True)
        weights = trainers.apply(full_weights)[0]
    size = sum(tensor.nbytes for name, tensor in weights.items() if is_adapter(name))
    names = sum(len(name) for name in weights if is_adapter(name))
    assert size <= report.bytes <= size + 4 * names + 4096
    assert other.bytes == 0
    assert report.bytes < 0.25 * sum(tensor.nbytes for name, tensor in weights.items() if not is_adapter(name))
