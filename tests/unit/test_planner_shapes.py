"""Sizes of models: against transformers' own, against published counts, and everything that is refused instead of guessed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.models.embedded import model_path
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
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, ["layer_types", "mamba"]),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, ["layer_types", "sliding_attention"]),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, ["sliding_window_pattern=6", "window"]),
        ({"model_type": "llama4", "text_config": {"attention_chunk_size": 8192}}, ["text_config"]),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, ["attention_chunk_size=8192"]),
        ({"model_type": "deepseek_v2", "kv_lora_rank": 512, "q_lora_rank": None}, ["kv_lora_rank=512", "MLA"]),
        ({"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 32}}, ["linear_attn_config", "linear-attention"]),
        ({"model_type": "minimax_m1", "attn_type_list": [0, 1]}, ["attn_type_list", "linear attention"]),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096}, ["sliding_window=4096", "null"]),
        ({"model_type": "mistral", "sliding_window": 4096}, ["sliding_window=4096"]),
        ({"model_type": "mistral"}, ["sliding_window=4096"]),
        ({"hidden_size": None}, ["a/config.json has no hidden_size"]),
        ({"num_hidden_layers": -2}, ["num_hidden_layers", "-2"]),
        ({"vocab_size": "32000"}, ["vocab_size", "'32000'"]),
        ({"num_attention_heads": True}, ["num_attention_heads", "True"]),
        ({"num_key_value_heads": 4}, ["num_key_value_heads=4", "num_attention_heads=6", "1, 2, 3, 6"]),
        ({"head_dim": None, "num_attention_heads": 7, "num_key_value_heads": 7}, ["num_attention_heads=7", "hidden_size=96"]),
        ({"model_type": "qwen3", "head_dim": None}, ["no head_dim"]),
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


def test_fields_that_nobody_knows_are_no_reason_to_refuse() -> None:
    assert shape_from_config(config(quantization_config={"bits": 4}, my_field=[1]), "x") == shape_from_config(config(), "x")


# ---- where a shape is found ------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def downloaded(hub: Path, name: str, revision: str, **changes: Any) -> Path:
    """Lay a config.json into the cache as a download of ``revision`` does."""
    file = hub / f"models--{name.replace('/', '--')}" / "snapshots" / revision / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(config(**changes)))
    return file


def set_main(hub: Path, name: str, revision: str) -> None:
    reference = hub / f"models--{name.replace('/', '--')}" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(revision)


def test_a_downloaded_model_is_found_and_keeps_the_name_that_the_user_gave(hub: Path) -> None:
    downloaded(hub, "someone/their-model", "a1", num_hidden_layers=7)
    shape = load_shape("someone/their-model")
    assert (shape.layers, shape.name) == (7, "someone/their-model")


def test_of_several_snapshots_that_of_main_counts_and_without_it_the_latest(hub: Path) -> None:
    for age, (revision, layers) in enumerate([("a1", 5), ("b2", 6), ("c3", 7)]):
        os.utime(downloaded(hub, "someone/model", revision, num_hidden_layers=layers), (1e9 - age, 1e9 - age))
    assert load_shape("someone/model").layers == 5
    set_main(hub, "someone/model", "b2")
    assert load_shape("someone/model").layers == 6


def test_a_main_of_which_only_the_tokenizer_was_downloaded_is_passed_over(hub: Path) -> None:
    downloaded(hub, "someone/model", "a1", num_hidden_layers=5)
    set_main(hub, "someone/model", "b2")
    assert load_shape("someone/model").layers == 5


@pytest.mark.parametrize(
    ("variable", "place"),
    [("HF_HUB_CACHE", "."), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub"), ("HOME", ".cache/huggingface/hub")],
)
def test_the_cache_is_where_hugging_faces_own_variables_put_it(
    variable: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    downloaded(tmp_path / place, "someone/model", "a1", num_hidden_layers=9)
    assert load_shape("someone/model").layers == 9


def test_a_downloaded_model_counts_before_the_known_one_of_its_name_and_a_directory_before_both(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_shape("Qwen/Qwen3-4B").layers == 36
    downloaded(hub, "Qwen/Qwen3-4B", "a1", num_hidden_layers=5)
    assert load_shape("Qwen/Qwen3-4B").layers == 5
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "Qwen" / "Qwen3-4B"
    directory.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no config\.json at 'Qwen/Qwen3-4B'"):
        load_shape("Qwen/Qwen3-4B")
    (directory / "config.json").write_text(json.dumps(config()))
    assert load_shape("Qwen/Qwen3-4B").layers == 4


def test_a_name_with_a_slip_is_answered_with_the_nearest_known_ones(hub: Path) -> None:
    with pytest.raises(ConfigError, match=r"'Qwen/Qwen3-4b-Bass'.*nearest known: Qwen/Qwen3-4B-Base.*hub"):
        load_shape("Qwen/Qwen3-4b-Bass")


@pytest.mark.parametrize("name", ["tiny-sort5", "random-0.6m", "random-25m"])
def test_an_embedded_models_shape_is_that_of_the_model_that_a_build_would_make(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlpost.models.embedded import RECIPES
    from rlpost.models.warm_start import make_model, make_tokenizer

    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path))
    shape = load_shape(f"embedded:{name}")
    assert not list(tmp_path.iterdir()), "planning must build nothing"
    model = make_model(RECIPES[name], make_tokenizer(tmp_path))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.name == f"embedded:{name}"
    model.config.save_pretrained(tmp_path)
    assert load_shape(str(tmp_path)) == replace(shape, name=str(tmp_path))


def test_of_a_built_embedded_model_its_own_config_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path))
    directory = model_path("tiny-random")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config(num_hidden_layers=11)))
    assert load_shape("embedded:tiny-random").layers == 11


def test_a_model_that_is_fetched_and_not_here_yet_has_its_published_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path))
    assert load_shape("embedded:smollm2-135m").parameters == 134_515_008


def test_an_embedded_model_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'tiny-sort6'.*tiny-sort5"):
        load_shape("embedded:tiny-sort6")


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


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
