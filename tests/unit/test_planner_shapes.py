"""Sizes of models: against transformers' own, against published counts, and everything that is refused instead of guessed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.models.shapes import SHAPES
from rlpost.planner.shapes import check_tensor_parallel, load_shape, shape_from_config
from rlpost.types import ConfigError

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "vocab_size": 300,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied, biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3 tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "qwen3_moe some layers dense": {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_that_transformers_makes_is_counted_and_no_other(variant: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(variant.split()[0], **SIZES, **VARIANTS[variant])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # As save_pretrained writes it: what equals a default may be left out or have another name.
    shape = shape_from_config(config.to_diff_dict(), variant)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.root_parameters + sum(p.numel() for p in model.model.layers.parameters()) == shape.parameters
    assert shape.largest_layer_parameters == max(sum(p.numel() for p in layer.parameters()) for layer in model.model.layers)
    linear = {name.split(".")[-1] for name, module in model.model.named_modules() if type(module) is torch.nn.Linear}
    assert {one.name for one in shape.linears} == linear


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_have_the_parameters_of_the_models_that_bench_builds(name: str) -> None:
    assert load_shape(name).parameters == SHAPES[name].parameters


MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
QWEN25_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "use_sliding_window": False, "sliding_window": 131072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "active_billions"),
    [(MIXTRAL_8X7B, 46_702_792_704, 12.9), (QWEN3_30B_A3B, 30_532_122_624, 3.3), (QWEN25_7B, 7_615_616_512, 7.6)],
    ids=["Mixtral-8x7B", "Qwen3-30B-A3B", "Qwen2.5-7B"],
)
def test_published_models_have_their_published_parameters(config: dict[str, Any], parameters: int, active_billions: float) -> None:
    shape = shape_from_config(config, "config.json")
    assert shape.parameters == parameters
    assert shape.active_parameters / 1e9 == pytest.approx(active_billions, abs=0.06)


def test_multiplied_parameters_count_the_output_layer_once_whether_tied_or_not() -> None:
    tied, untied = (shape_from_config({"model_type": "llama", **SIZES, "tie_word_embeddings": flag}, "x") for flag in (True, False))
    assert tied.multiplied_parameters == untied.multiplied_parameters
    assert tied.parameters + 300 * 96 == untied.parameters


# ---- what is refused -------------------------------------------------------------------------------------------------


def config(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **SIZES, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma3"}, ["gemma3", "qwen3_moe"]),
        ({"model_type": None}, ["None", "llama"]),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, ["kv_lora_rank=512", "MLA"]),
        ({"model_type": "jamba", "mamba_d_state": 16}, ["mamba_d_state", "Mamba"]),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, ["M-M*", "hybrid"]),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16}, ["linear-attention"]),
        ({"model_type": "qwen2_5_vl", "text_config": {}}, ["images"]),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, ["linear_attention"]),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}, ["sliding_window=4096", "null"]),
        ({"model_type": "mistral", "sliding_window": 4096}, ["sliding_window=4096"]),
        ({"model_type": "mistral"}, ["sliding_window=4096"]),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
        ({"vocab_size": "32000"}, ["vocab_size", "'32000'"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads=4", "num_attention_heads=6", "1, 2, 3, 6"]),
        ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, ["num_attention_heads=7", "hidden_size=96"]),
        ({"model_type": "qwen3", "head_dim": None}, ["head_dim", "None"]),
        ({"model_type": "mixtral", "num_experts_per_tok": 2}, ["num_local_experts"]),
        ({"model_type": "qwen3_moe", **EXPERTS, "num_experts_per_tok": 9}, ["num_experts_per_tok=9", "8 experts"]),
    ],
)
def test_what_the_formulas_do_not_cover_or_cannot_be_is_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        shape_from_config(config(**changes), "a/config.json")
    assert all(word in str(raised.value) for word in words)


def test_a_window_that_qwen_states_but_does_not_use_is_no_reason_to_refuse() -> None:
    assert shape_from_config(config(model_type="qwen2", use_sliding_window=False, sliding_window=4096), "x").layers == 4


def test_a_directory_and_a_file_give_the_same_shape_and_their_absence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json at .*150m.*download"):
        load_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert load_shape(str(tmp_path)).parameters == load_shape(str(tmp_path / "config.json")).parameters
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_shape(str(tmp_path))


@pytest.mark.parametrize("degree", [1, 2])
def test_a_degree_that_divides_heads_and_widths_is_taken(degree: int) -> None:
    check_tensor_parallel(shape_from_config(config(), "x"), degree)


def test_more_gpus_than_key_value_heads_are_fine_when_they_are_a_multiple() -> None:
    check_tensor_parallel(shape_from_config(config(num_attention_heads=8, num_key_value_heads=2), "x"), 8)


@pytest.mark.parametrize(
    ("changes", "degree", "words"),
    [
        ({}, 4, ["tensor_parallel=4", "attention_heads=6", "1, 2, 3, 6"]),
        ({}, 0, ["tensor_parallel=0"]),
        ({"intermediate_size": 161}, 2, ["feed_forward=161"]),
        ({"intermediate_size": 150}, 3, ["padded_vocabulary=320"]),
        ({"num_attention_heads": 48, "num_key_value_heads": 6, "intermediate_size": 192}, 4, ["6 key-value heads"]),
    ],
)
def test_impossible_tensor_parallel_degrees_are_refused_with_what_they_must_divide(
    changes: dict[str, Any], degree: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_tensor_parallel(shape_from_config(config(**changes), "x"), degree)
    assert all(word in str(raised.value) for word in words)


def test_importing_the_whole_planner_brings_neither_torch_nor_ray_nor_vllm_nor_transformers() -> None:
    """A plan answers at once, on a machine that has none of them."""
    package = Path(sys.modules["rlpost.planner"].__file__ or "").parent
    modules = [f"rlpost.planner.{file.stem}" for file in package.glob("*.py") if file.stem != "__init__"]
    code = f"import sys, {', '.join(modules)}; print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    assert len(modules) > 8
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
