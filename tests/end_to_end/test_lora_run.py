"""Whole runs that train LoRA adapters: sent alone, or merged as deltas; the rollouts' policy is the trainer's at every step."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from training_runs import Command, Finished, finished_run, metrics, step_records

from rlpost.checkpoint.__main__ import main as checkpoint_command
from rlpost.config.schema import LoraConfig
from rlpost.models.embedded import build, embedded_rows
from rlpost.observe import read_rollouts
from rlpost.training.lora import add_adapters
from rlpost.weights.adapters import adapter_tensors, find_adapters

STEPS, HELD_OUT, MORE = 12, 64, 2
SETTINGS = (
    "config=grpo_tiny_lora", f"evaluation.every={STEPS}", f"evaluation.prompts={HELD_OUT}", "weights.verify=every_sync",
)  # fmt: skip
MERGED_STEPS = 6
# All elements of a merged float32 weight move with every step: by the usual setting no delta would ever pay.
MERGED = ("training.lora.sync=merged", "weights.transport=delta", "weights.max_changed=1.0")

PARITY = 1e-4
"""Largest |engine logprob - trainer logprob|, float32."""

LEAST_RISE = 0.1
"""Mean reward of the last three steps minus that of the first three."""

DELTA, ADAPTER = 2, 3
"""Values of sync/mode."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The preset, shortened."""
    return finished_run(Command(tmp_path_factory.mktemp("lora_run")), *SETTINGS, steps=STEPS)


@pytest.fixture(scope="module")
def merged_run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same with adapters that are merged on their way, as deltas."""
    command = Command(tmp_path_factory.mktemp("merged_run"))
    return finished_run(command, *SETTINGS, *MERGED, f"evaluation.every={MERGED_STEPS}", steps=MERGED_STEPS)


def base_model() -> Any:
    """What the runs begin with."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(build("tiny-sort5"), dtype=torch.float32)


def export(run_dir: Path, directory: Path) -> Path:
    """The newest checkpoint as a plain model."""
    assert checkpoint_command(["export", str(run_dir), "--to", str(directory), "--dtype", "float32"]) == 0
    return directory


def answers_of(directory: Path) -> dict[str, str]:
    """Greedy answers of an exported model to the held-out prompts, by prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    texts = [row["prompt"] for row in embedded_rows("sort5-heldout")[:HELD_OUT]]
    prompts = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    answers = model.generate(prompts, max_new_tokens=7, do_sample=False)[:, prompts.shape[1] :]
    return dict(zip(texts, tokenizer.batch_decode(answers, skip_special_tokens=True, clean_up_tokenization_spaces=False), strict=True))


def assert_engine_is_policy(records: list[dict[str, Any]]) -> None:
    """The engine sampled from what the trainer trains, at every step, although it moved with each."""
    assert max(record["parity/logprob_abs_max"] for record in records) < PARITY
    assert all(record["train/ratio_max"] == pytest.approx(1.0, abs=1e-5) for record in records)
    assert all(record["train/grad_norm"] > 0 for record in records)
    assert all(record["sync/verified"] == 1 and record["sync/fallbacks"] == 0 for record in records)


# ---- adapters alone ----------------------------------------------------------------------------------------------------


def test_rollouts_come_from_the_trained_policy_at_every_step_and_reward_rises(run: Finished) -> None:
    """With the bare model in the engine, parity would be off from the second step on, and reward would stay."""
    assert_engine_is_policy(run.records)
    rewards = [record["reward/mean"] for record in run.records]
    assert fmean(rewards[-3:]) - fmean(rewards[:3]) >= LEAST_RISE, rewards
    held_out = [record["evaluate/reward"] for record in metrics(run.directory) if "evaluate/reward" in record]
    assert len(held_out) == 2 and held_out[1] > held_out[0]


def test_after_the_first_sync_only_adapters_travel(run: Finished) -> None:
    """The bytes are those of a file with the adapters, to the byte; less than a quarter of the model's."""
    assert {record["sync/mode"] for record in run.records} == {ADAPTER}
    model = base_model()
    size = sum(parameter.nbytes for parameter in model.parameters())
    add_adapters(model, LoraConfig(rank=8))
    expected = len(save(adapter_tensors(find_adapters(model), torch.float32)))
    assert {record["sync/bytes"] for record in run.records} == {expected}
    assert expected < size / 4


def test_exported_model_is_plain_has_moved_in_all_layers_and_answers_as_the_engine_did(run: Finished, tmp_path: Path) -> None:
    exported = export(run.directory, tmp_path / "exported")
    assert_moved_only_in_linear_layers(load_file(exported / "model.safetensors"))
    assert answers_of(exported) == evaluated(run.directory, STEPS)


def assert_moved_only_in_linear_layers(tensors: Mapping[str, torch.Tensor]) -> None:
    start = dict(base_model().named_parameters())
    assert set(tensors) == set(start)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, start[name]) == ("_proj." not in name), name


def evaluated(run_dir: Path, step: int) -> dict[str, str]:
    """What the engine answered greedily in the evaluation after ``step``, by prompt."""
    return {row["prompt"]: row["completion"] for row in read_rollouts(run_dir / "rollouts" / f"evaluation_{step:06d}.jsonl")}


def test_a_resumed_run_goes_on_from_the_adapters(run: Finished, tmp_path: Path) -> None:
    """The engine is new and gets the model and the adapters before its first request."""
    shutil.copytree(run.directory, tmp_path / "run")
    output = Command(tmp_path).run(*SETTINGS, "resume=run", f"schedule.steps={STEPS + MORE}", "evaluation.every=0", "data.evaluation=null")
    assert f"step_{STEPS:06d}" in output
    resumed = step_records(tmp_path / "run")[STEPS:]
    assert [record["step"] for record in resumed] == [STEPS + 1, STEPS + MORE]
    assert_engine_is_policy(resumed)
    assert {record["sync/mode"] for record in resumed} == {ADAPTER}
    assert fmean(record["reward/mean"] for record in resumed) > fmean(record["reward/mean"] for record in run.records[:3]) + LEAST_RISE


# ---- merged ------------------------------------------------------------------------------------------------------------


def test_merged_adapters_travel_as_deltas_of_the_layers_that_they_change(merged_run: Finished) -> None:
    assert_engine_is_policy(merged_run.records)
    assert {record["sync/mode"] for record in merged_run.records} == {DELTA}
    # Nearly every element of the layers moves; the share is of these, for nothing else is compared.
    assert min(record["sync/changed_fraction"] for record in merged_run.records) > 0.9


def test_exported_model_of_a_merged_run_answers_as_the_engine_did(merged_run: Finished, tmp_path: Path) -> None:
    exported = export(merged_run.directory, tmp_path / "exported")
    assert_moved_only_in_linear_layers(load_file(exported / "model.safetensors"))
    assert answers_of(exported) == evaluated(merged_run.directory, MERGED_STEPS)


def test_both_ways_train_the_same_at_the_start(run: Finished, merged_run: Finished) -> None:
    """The first batch is sampled from the same model with the same seeds: how weights travel has no say in what is learnt."""
    for name in ("train/loss", "train/grad_norm", "reward/mean", "rollout/tokens"):
        assert merged_run.records[0][name] == pytest.approx(run.records[0][name], rel=1e-4, abs=1e-6), name
