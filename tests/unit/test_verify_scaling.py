"""``doctor verify`` changes how much a run computes, never what: the scaled architecture and the scaled configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.checks import check
from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.diagnosis.verify_config import Change, Machine, Models, fit_lengths, not_checked, scale, setting
from rlpost.diagnosis.verify_model import is_small, local_directory, scaled_architecture
from rlpost.diagnosis.verify_plan import other_data
from rlpost.types import ConfigError

CPU = Machine(device="cpu", gpus=0)
AS_IT_IS = Models(paths={}, random=False)
RANDOM = Models(paths={"model.path": "embedded:tiny-random"}, random=True)

QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_window_layers": 36, "rope_theta": 1e6,
    "layer_types": ["full_attention"] * 36,
}  # fmt: skip
QWEN3_30B_MOE = {
    **QWEN3_8B, "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": [0, 20], "layer_types": None,
}  # fmt: skip
QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip


def changed(words: list[str], models: Models = AS_IT_IS, machine: Machine = CPU) -> tuple[RunConfig, RunConfig, dict[str, Change]]:
    """The user's configuration, the scaled one (which passes the checks of every configuration), and the changes by key."""
    user = load_config(words).config
    changes = scale(user, machine, models, Path("/scratch"))
    scaled = load_config([*words, *(change.word for change in changes)]).config
    for change in changes:
        found: Any = setting(scaled, change.key)
        assert change.key == "rewards" or found == change.value, change
    return user, scaled, {change.key: change for change in changes}


# ---- the architecture --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(32, 8, 128), (28, 4, None), (64, 8, 128), (16, 16, None), (12, 2, None), (71, 1, None), (40, 10, 128), (24, 16, 64)],
)
def test_the_proportion_of_heads_to_key_value_heads_is_kept(heads: int, kv_heads: int, head_dim: int | None) -> None:
    sizes = {**QWEN2_7B, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": heads * 128, "head_dim": head_dim}
    found = scaled_architecture(sizes, "config.json")
    assert found["num_attention_heads"] * kv_heads == found["num_key_value_heads"] * heads
    assert (found["num_key_value_heads"] == 1) == (kv_heads == 1) or found["num_attention_heads"] * 32 > 128
    assert head_dim is not None or found["hidden_size"] == found["num_attention_heads"] * 32, "without head_dim it is hidden_size / heads"
    assert head_dim is None or found["head_dim"] == 32


def test_a_scaled_model_has_the_vocabulary_and_kinds_of_layers_of_its_original_and_is_small() -> None:
    found = scaled_architecture(QWEN3_8B, "config.json")
    assert (found["vocab_size"], found["rope_theta"], found["model_type"]) == (151936, 1e6, "qwen3")
    assert (found["num_hidden_layers"], found["layer_types"], found["max_window_layers"]) == (2, ["full_attention"] * 2, 2)
    assert found["intermediate_size"] * 4096 == 12288 * found["hidden_size"]
    assert found["hidden_size"] <= 256
    mixed = {**QWEN3_8B, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 32}
    assert scaled_architecture(mixed, "config.json")["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]


def test_a_mixture_of_experts_stays_one_with_fewer_experts() -> None:
    found = scaled_architecture(QWEN3_30B_MOE, "config.json")
    assert (found["num_experts"], found["num_experts_per_tok"], found["mlp_only_layers"]) == (4, 2, [0])
    assert found["moe_intermediate_size"] == 32


def test_quantization_of_weights_that_are_not_written_is_left_out() -> None:
    assert "quantization_config" not in scaled_architecture({**QWEN3_8B, "quantization_config": {"quant_method": "fp8"}}, "config.json")


def test_an_architecture_with_other_names_for_its_sizes_is_refused_and_not_guessed() -> None:
    with pytest.raises(ConfigError, match=r"gpt2/config.json cannot be scaled down: it has no num_hidden_layers, hidden_size"):
        scaled_architecture({"n_layer": 12, "n_embd": 768, "vocab_size": 50257}, "gpt2/config.json")


def test_a_hub_model_that_is_not_here_is_refused_with_what_to_fetch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.path=nobody/nothing: its config.json and tokenizer are not .*hf download nobody/nothing"):
        local_directory("nobody/nothing", "model.path")


def test_only_a_directory_with_few_weights_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B))
    assert not is_small(tmp_path), "a directory without weights cannot be loaded"
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    assert is_small(tmp_path)
    with (tmp_path / "model-2.safetensors").open("wb") as file:
        file.truncate(65 << 20)
    assert not is_small(tmp_path)


# ---- the configuration -------------------------------------------------------------------------------------------------

KEPT = (
    "algorithm.name", "algorithm.preference", "algorithm.epochs", "algorithm.kl_coefficient", "algorithm.correction", "environment.name",
    "sampling.temperature", "training.lora", "training.gradient_checkpointing", "training.optimizer.name", "training.optimizer.beta2",
    "training.optimizer.decay", "weights.transport", "data.train", "data.train_on", "seed", "rewards",
)  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["config=grpo_tiny"], ["config=ppo_tiny"], ["config=dpo_tiny"], ["config=kto_tiny"], ["config=orpo_tiny"], ["config=dapo_tiny"],
        ["config=reward_model_tiny"], ["config=grpo_tiny_tools"], ["config=remax_tiny"], ["config=reinforce_pp_tiny"],
        ["config=grpo_tiny_lora", "training.lora.sync=merged", "weights.transport=delta"],
        ["config=grpo_tiny", "schedule.max_staleness=2", "algorithm.correction.level=token"],
        ["config=grpo_tiny", "algorithm.minibatches=16", "training.optimizer.name=muon", "training.gradient_checkpointing=true"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_what_is_computed_stays_and_the_scaled_configuration_passes_every_check(words: list[str]) -> None:
    user, scaled, changes = changed(words)
    check(scaled)
    for key in KEPT:
        assert setting(user, key) == setting(scaled, key), key
    assert scaled.schedule.steps == 4
    assert scaled.schedule.prompts_per_step % user.algorithm.minibatches == 0
    assert all(change.why for change in changes.values())


def test_the_old_policy_stays_what_it_was_when_rollouts_no_longer_run_ahead() -> None:
    _, scaled, _ = changed(["config=grpo_tiny", "schedule.max_staleness=1"])
    assert (scaled.schedule.max_staleness, scaled.algorithm.old_logprobs) == (0, "engine")


def test_filters_that_could_leave_nothing_are_switched_off_and_named() -> None:
    _, scaled, changes = changed(["config=dapo_tiny", "algorithm.filter.least_mean=0.2"])
    assert (scaled.algorithm.filter.zero_variance, scaled.algorithm.filter.least_mean) == ("keep", None)
    assert "may leave no group" in str(changes["algorithm.filter.zero_variance"])


def test_a_random_model_gets_a_reward_that_differs_between_answers_beside_the_users_own() -> None:
    _, scaled, _ = changed(["config=grpo_tiny"], RANDOM)
    assert [reward.name or reward.function for reward in scaled.rewards] == ["exact_match", "verify_spread"]
    assert scaled.model.path == "embedded:tiny-random"
    _, offline, changes = changed(["config=dpo_tiny"], RANDOM)
    assert offline.rewards == [] and "rewards" not in changes


def test_reward_models_are_replaced_and_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    models = Models(paths={"rewards.1.model": "/scaled/judge"}, random=False)
    _, scaled, _ = changed(["config=grpo_tiny", f"rewards=[{{function: exact_match}}, {{model: {tmp_path}/judge, weight: 2.0}}]"], models)
    assert [(one.function, one.model, one.name, one.weight) for one in scaled.rewards] == [
        ("exact_match", None, None, 1.0),
        (None, "/scaled/judge", "judge", 2.0),
    ]


def test_rows_are_cut_to_the_shortest_and_a_pair_fits_into_a_micro_batch() -> None:
    scaled = load_config(["config=dpo_tiny", "training.micro_batch_tokens=100000", "data.max_tokens=9000"]).config
    found = {change.key: change.value for change in fit_lengths(scaled, [*range(10, 74), 8000])}
    assert found["data.max_tokens"] == 25, "the sixteenth shortest"
    assert found["training.micro_batch_tokens"] == 2 * 2 * 25
    few = {change.key: change.value for change in fit_lengths(scaled, [300, 40])}
    assert few["data.max_tokens"] == 300, "two rows are all used"


def test_a_small_learning_rate_is_raised_so_that_weights_move_and_a_large_one_is_kept() -> None:
    assert changed(["config=grpo_tiny", "training.optimizer.lr=1e-6"])[1].training.optimizer.lr == 1e-3
    assert changed(["config=grpo_tiny", "training.optimizer.lr=0.005"])[1].training.optimizer.lr == 0.005


def test_a_pattern_of_trained_parameters_stays_unless_it_names_layers_that_are_gone() -> None:
    models = Models(paths={}, random=True, parameters=("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"))
    assert changed(["config=grpo_tiny", "training.trainable=mlp"], models)[1].training.trainable == "mlp"
    assert changed(["config=grpo_tiny", "training.trainable=layers\\.3[0-5]"], models)[1].training.trainable == "all"


def test_what_this_machine_cannot_run_is_replaced_and_listed_as_not_checked() -> None:
    words = ["config=grpo_qwen", "training.attention=flash", "engine.tensor_parallel=2", "training.ranks=4", "weights.backend=nccl"]
    user, scaled, _ = changed(words, RANDOM)
    check(scaled)
    missing = {one.name: (one.wanted, one.instead, one.because) for one in not_checked(user, scaled, CPU)}
    no_gpu = "this machine has no GPU"
    assert missing == {
        "attention": ("flash", "padded", no_gpu),
        "dtype": ("bfloat16", "float32", no_gpu),
        "transport": ("collective over nccl", "collective over gloo", no_gpu),
        "tensor parallel engines": ("2", "1", no_gpu),
        "rollouts that run ahead": ("1", "0", no_gpu),
    }
    same, tiny, _ = changed(["config=grpo_tiny"])
    assert not_checked(same, tiny, CPU) == []


def test_one_gpu_is_shared_and_the_split_placement_is_not_called_checked() -> None:
    words = ["config=grpo_qwen", "weights.backend=nccl"]
    one_gpu = Machine(device="gpu", gpus=1)
    user, scaled, _ = changed(words, RANDOM, one_gpu)
    check(scaled)
    assert (scaled.placement.mode, scaled.training.ranks, scaled.engine.count) == ("colocated", 1, 1)
    assert {"placement", "ranks", "transport"} <= {one.name for one in not_checked(user, scaled, one_gpu)}
    _, four, _ = changed(words, RANDOM, Machine(device="gpu", gpus=4))
    assert (four.placement.mode, four.training.ranks, four.weights.backend) == ("split", 2, "nccl")


# ---- data ----------------------------------------------------------------------------------------------------------------


def test_a_hub_data_set_that_is_not_here_is_replaced_only_where_the_rewards_can_read_the_embedded_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rlpost.diagnosis.verify_plan._is_here", lambda source: False)
    fits = other_data(load_config(["config=grpo_tiny", "data.train=hf:nobody/rows"]).config)
    assert fits["data.train"] == "embedded:sort5"
    pairs = other_data(load_config(["config=dpo_tiny", "data.train=hf:nobody/pairs", "data.chosen_field=good"]).config)
    assert (pairs["data.train"], pairs["data.chosen_field"]) == ("embedded:sort5-pairs", "chosen")
    (tmp_path / "tests.py").write_text("def reward(prompt, completion, test_cases):\n    return 0.0\n")
    own = load_config(["config=grpo_tiny", "data.train=hf:nobody/rows", f"rewards=[{{function: '{tmp_path}/tests.py:reward'}}]"]).config
    with pytest.raises(ConfigError, match=r"hf:nobody/rows is not on this machine.*test_cases.*data.train=rows.jsonl"):
        other_data(own)
    assert other_data(load_config(["config=grpo_tiny"]).config) == {}
