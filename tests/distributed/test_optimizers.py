"""Every optimizer on shards: one update for any number of ranks, its formula, and a resume that goes on bit by bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import RankProcesses, Trainers, worker_settings
from policy_updates import step, weights
from torch.distributed.tensor import distribute_tensor

from rlpost.config.schema import LoraConfig, OptimizerConfig, TrainingConfig
from rlpost.types import ConfigError, RlpostError

NAMES = ["adamw", "adamw_8bit", "adamw_bf16", "muon"]
TOTAL, BEFORE = 4, 2
"""Updates of a run, and those before its checkpoint: in the warm-up, so that the learning rate is not the peak's."""
# eps of the size of the gradients: AdamW's first steps are else the gradient's sign, and the sign of a rounding error is no test.
CONFIG = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=0.5, warmup_steps=3, decay="linear")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are whole blocks of 8-bit moments, with a vocabulary that two ranks cannot halve.

    Keys and values have 4,096 weights: a rank's half is below the size that torchao quantises.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=101, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        tie_word_embeddings=False, initializer_range=0.1, max_position_embeddings=256,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("wide")
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def moments(worker: Any) -> dict[str, tuple[str, int]]:
    """In a rank: dtype and bytes of its part of each moment, as they lie in memory."""
    found = {}
    for name, parameter in worker.model.named_parameters():
        for key, value in worker.optimizer.state.get(parameter, {}).items():
            if value.ndim:
                local = value.to_local()
                stored = getattr(local, "codes", local)
                found[f"{name}/{key}"] = (str(stored.dtype), stored.numel() * stored.element_size())
    return found


def step_with_given_gradients(worker: Any, seed: int) -> None:
    """In a rank: one step of optimizer and schedule; the gradients have the same bits on any number of ranks."""
    for name, parameter in worker.model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
            whole = torch.randn(parameter.shape, generator=generator) * 1e-2
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    worker.optimizer.step()
    worker.optimizer.zero_grad(set_to_none=True)
    worker.schedule.step()


def run(trainers: Trainers, seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    """Steps with the gradients of these seeds; rank 0's weights afterwards."""
    for seed in seeds:
        trainers.apply(step_with_given_gradients, seed)
    result: dict[str, torch.Tensor] = trainers.apply(weights)[0]
    return result


def assert_same_bits(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def relative_gap(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of the change, of the tensor where it is largest.

    Not the largest element: a gradient that differs in its last bit may fall on the other side of a rounding to 8 or 16 bits.
    """
    assert got.keys() == expected.keys()
    return max(float((got[n] - expected[n]).norm() / (expected[n] - start[n]).norm()) for n in expected)


def settings(model: Path, name: str, **training: Any) -> Any:
    return worker_settings(model, optimizer=replace(CONFIG, name=name), training=TrainingConfig(**training), total_updates=TOTAL)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_gradients_give_the_same_bits_on_one_and_two_ranks_and_after_a_resume_on_either(
    processes: RankProcesses, wide: Path, tmp_path: Path, name: str
) -> None:
    """Orthogonalised shards instead of matrices, or 8-bit blocks that depend on shards, would give each number of ranks its own run."""
    ended = {}
    for ranks in (1, 2):
        saved = tmp_path / str(ranks)
        saved.mkdir()
        with processes.trainers(settings(wide, name), ranks=ranks) as trainers:
            run(trainers, range(BEFORE))
            trainers.call("save", str(saved))
            ended[ranks] = run(trainers, range(BEFORE, TOTAL))
    assert_same_bits(ended[2], ended[1])
    for saved_by, ranks in ((1, 1), (2, 2), (2, 1), (1, 2)):
        with processes.trainers(settings(wide, name), ranks=ranks) as trainers:
            trainers.call("load", str(tmp_path / str(saved_by)))
            assert_same_bits(run(trainers, range(BEFORE, TOTAL)), ended[1])


@pytest.mark.parametrize(("name", "gap"), [("adamw", 1e-4), ("adamw_8bit", 1e-3), ("adamw_bf16", 1e-3), ("muon", 0.1)])
def test_real_updates_on_two_ranks_are_those_of_one(processes: RankProcesses, wide: Path, name: str, gap: float) -> None:
    """The last bits of gradients differ; Muon gives their smallest components the size of the others, hence its wide bound."""
    ended, metrics, start = {}, {}, {}
    for ranks in (1, 2):
        with processes.trainers(settings(wide, name), ranks=ranks) as trainers:
            start = trainers.apply(weights)[0]
            metrics[ranks] = [step(trainers, seed) for seed in range(TOTAL)]
            ended[ranks] = trainers.apply(weights)[0]
    assert relative_gap(ended[2], ended[1], start) < gap
    for one, two in zip(metrics[1], metrics[2], strict=True):
        assert one["train/lr"] == two["train/lr"]
        assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "dtypes", "share"),
    [
        ("adamw_8bit", {"torch.uint8", "torch.float32"}, 0.26),
        ("adamw_bf16", {"torch.bfloat16"}, 0.51),
        ("muon", {"torch.float32"}, 0.6),
    ],
)
def test_moments_take_the_memory_that_the_name_promises(
    processes: RankProcesses, wide: Path, name: str, dtypes: set[str], share: float
) -> None:
    """Bytes of the moments as a share of AdamW's; small vectors keep float32 among the 8-bit ones, muon has one moment of matrices."""
    held = {}
    for one in ("adamw", name):
        with processes.trainers(settings(wide, one), ranks=2) as trainers:
            run(trainers, range(1))
            held[one] = trainers.apply(moments)
    for ours, plain in zip(held[name], held["adamw"], strict=True):
        assert {dtype for dtype, _ in ours.values()} == dtypes
        assert sum(size for _, size in ours.values()) <= share * sum(size for _, size in plain.values())


def test_a_checkpoint_of_another_optimizer_is_refused_with_the_setting_to_change(
    processes: RankProcesses, wide: Path, tmp_path: Path
) -> None:
    with processes.trainers(settings(wide, "adamw"), ranks=1) as trainers:
        trainers.call("save", str(tmp_path))
    with processes.trainers(settings(wide, "muon"), ranks=1) as trainers:
        with pytest.raises(
            RlpostError, match=r"state of the optimizer AdamW, and this run has MuonAndAdamW: set training\.optimizer\.name"
        ):
            trainers.call("load", str(tmp_path))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saving_before_the_first_step_is_not_a_step(processes: RankProcesses, wide: Path, tmp_path: Path, name: str) -> None:
    """A policy waits while its critic warms up: a step that is counted at the save would change the next one's bias correction."""
    with processes.trainers(settings(wide, name), ranks=2) as trainers:
        uninterrupted = run(trainers, range(2))
    with processes.trainers(settings(wide, name), ranks=2) as trainers:
        trainers.call("save", str(tmp_path))
        assert_same_bits(run(trainers, range(2)), uninterrupted)
    with processes.trainers(settings(wide, name), ranks=2) as trainers:
        trainers.call("load", str(tmp_path))
        assert_same_bits(run(trainers, range(2)), uninterrupted)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bf16"])
def test_only_adapters_have_moments_and_move(processes: RankProcesses, wide: Path, name: str) -> None:
    with processes.trainers(settings(wide, name, lora=LoraConfig(rank=4)), ranks=2) as trainers:
        before = trainers.apply(weights)[0]
        after = run(trainers, range(2))
        held = trainers.apply(moments)[0]
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved == {key for key in before if "lora_" in key}
    assert {key.rpartition("/")[0] for key in held} == moved


def test_muon_without_a_matrix_to_train_is_refused(processes: RankProcesses, wide: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"training\.optimizer\.name=muon works on the layers' weight matrices, and none of them is trained"
    ):
        with processes.trainers(settings(wide, "muon", lora=LoraConfig(rank=4)), ranks=1):
            pass
