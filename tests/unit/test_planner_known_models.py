"""Known models: their parameters against published counts, and that only names whose sizes are these are taken."""

from __future__ import annotations

import pytest

from rlpost.planner.known_models import MODELS, find_known, known_names
from rlpost.planner.shapes import shape_from_config

HUB = "Hugging Face hub, api/models/NAME, safetensors.total"
KERAS = "keras-hub, keras_hub/src/models/*/*_presets.py, params"

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": (494_032_768, HUB),
    "Qwen/Qwen2.5-1.5B": (1_543_714_304, HUB),
    "Qwen/Qwen2.5-3B": (3_085_938_688, KERAS),
    "Qwen/Qwen2.5-7B": (7_615_616_512, HUB),
    "Qwen/Qwen2.5-14B": (14_770_033_664, "llama.cpp server, n_params of its GGUF file"),
    "Qwen/Qwen2.5-32B": (32_763_876_352, HUB),
    "Qwen/Qwen2.5-72B": (72_706_203_648, KERAS),
    # The hub's totals of Qwen3-0.6B and 1.7B count the tied output layer that their files repeat.
    "Qwen/Qwen3-0.6B": (596_049_920, "sum over transformers' parameters()"),
    "Qwen/Qwen3-1.7B": (1_720_574_976, KERAS),
    "Qwen/Qwen3-4B": (4_022_468_096, HUB),
    "Qwen/Qwen3-8B": (8_190_735_360, HUB),
    "Qwen/Qwen3-14B": (14_768_307_200, KERAS),
    "Qwen/Qwen3-32B": (32_762_123_264, HUB),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, HUB),
    "Qwen/Qwen3-235B-A22B": (235_093_634_560, HUB),
    "meta-llama/Llama-3.1-8B": (8_030_261_248, HUB),
    "meta-llama/Llama-3.1-70B": (70_553_706_496, HUB),
    "meta-llama/Llama-3.2-1B": (1_235_814_400, HUB),
    "meta-llama/Llama-3.2-3B": (3_212_749_824, HUB),
    "meta-llama/Llama-3.3-70B-Instruct": (70_553_706_496, HUB),
    "mistralai/Mistral-7B-v0.3": (7_248_023_552, HUB),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, HUB),
    "HuggingFaceTB/SmolLM2-135M": (134_515_008, HUB),
    "HuggingFaceTB/SmolLM2-360M": (361_821_120, HUB),
    "HuggingFaceTB/SmolLM2-1.7B": (1_711_376_384, "sum over transformers' parameters()"),
}

KV_BYTES_PER_TOKEN = {
    "Qwen/Qwen2.5-7B": 57_344, "Qwen/Qwen3-8B": 147_456, "meta-llama/Llama-3.1-8B": 131_072, "meta-llama/Llama-3.1-70B": 327_680,
    "Qwen/Qwen3-32B": 262_144,
}  # fmt: skip
"""bfloat16, published sizing tables: the parameter count does not tell heads and key-value heads of other sizes apart."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_known_model_comes_to_the_parameters_that_others_count(name: str) -> None:
    config = find_known(name)
    assert config is not None
    assert shape_from_config(config, name).parameters == PUBLISHED[name][0]


def test_no_row_is_without_a_published_count() -> None:
    counted = [find_known(name) for name in PUBLISHED]
    assert all(config in counted for config in MODELS.values())


@pytest.mark.parametrize("name", KV_BYTES_PER_TOKEN)
def test_a_known_models_cache_has_its_published_size(name: str) -> None:
    shape = shape_from_config(find_known(name) or {}, name)
    assert 2 * 2 * shape.layers * shape.kv_width == KV_BYTES_PER_TOKEN[name]


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("qwen3-4b", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B"),
        ("qwen/qwen3-4b-instruct-2507", "Qwen/Qwen3-4B"),
        ("Qwen2.5-Coder-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen2.5-1.5B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
    ],
)
def test_names_of_the_hub_are_taken_with_or_without_owner_in_any_case(name: str, same: str) -> None:
    assert find_known(name) is not None
    assert find_known(name) == find_known(same)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-32B-Base",  # there is none
        "Qwen/Qwen2.5-Math-14B",  # nor this
        "someone/Qwen3-4B",
        "Qwen/Qwen3-4",
        "qwen3-4b-my-tune",
        "mistralai/Mistral-7B-v0.1",  # a sliding window
        "/models/Qwen3-4B",
        "",
    ],
)
def test_a_name_that_only_looks_like_a_known_one_is_not_given_its_sizes(name: str) -> None:
    assert find_known(name) is None


def test_what_a_caller_changes_stays_with_the_caller() -> None:
    first = find_known("Qwen/Qwen3-4B")
    assert first is not None
    first["hidden_size"] = 1
    assert (find_known("qwen3-4b-base") or {})["hidden_size"] == 2560


def test_no_name_stands_for_two_models() -> None:
    names = [name.lower() for name in known_names()]
    assert len(names) == len(set(names))
    assert len({name.partition("/")[2] for name in names}) == len(names)
