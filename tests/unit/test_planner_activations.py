"""The trainer's activations as the planner counts them, against what autograd really saves; logits against the benchmark's figure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlpost.planner import activations, memory
from rlpost.planner.shapes import load_shape, shape_from_config
from rlpost.training import attention
from rlpost.training.model import patch_forward
from rlpost.training.norm import replace_norms
from rlpost.training.packing import build
from rlpost.types import ConfigError, LossTerms

TOKENS = 128
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 512,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
SHAPE = load_shape("150m")


def saved_bytes(model: Any) -> int:
    """Bytes that autograd keeps of a forward of one sequence: each memory once, no parameters or buffers."""
    tokens = np.arange(TOKENS) % 500
    trained = np.arange(TOKENS) > 0
    term = LossTerms(
        trajectory_id="t", group_id="g", prompt_length=1, tokens=tokens, trainable=trained, weight=trained.astype(np.float32)
    )  # fmt: skip
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = model(build([term], [0]), 1.0)
    assert output.logprobs.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_counted_activations_are_those_that_autograd_saves(family: str, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    config = AutoConfig.for_model(family, **SIZES, **(EXPERTS if family == "qwen3_moe" else {}))
    config._attn_implementation = attention.PADDED
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    replace_norms(model)
    patch_forward(model, 64, torch.device("cpu"), "logprob")
    shape = shape_from_config(config.to_diff_dict(), family)
    counted = memory.total_bytes(activations.activation_lines(shape, TOKENS, bytes_per_element=dtype.itemsize, padded=True))
    # What is not counted: indices, the norms' factors, log-sums of attention.
    assert counted == pytest.approx(saved_bytes(model), rel=0.03)


def test_chunked_logits_are_what_the_logprob_benchmark_measured() -> None:
    """docs/benchmarks.md: 4,096 tokens, vocabulary 151,936, hidden 896, float32: 1.76 GiB, of which 0.52 the weight's gradient."""
    config = {**SIZES, "model_type": "llama", "hidden_size": 896, "vocab_size": 151936}
    lines = activations.chunked_logits_lines(shape_from_config(config, "x"), 4096, 1024, gradient=True)
    assert memory.total_bytes(lines) / 2**30 == pytest.approx(1.76, rel=0.1)
    assert lines[1].bytes / 2**30 == pytest.approx(0.52, rel=0.05)


def test_logits_of_a_pass_for_logprobs_or_with_adapters_have_no_weight_gradient() -> None:
    update, scoring, adapters = (
        activations.chunked_logits_lines(SHAPE, 4096, 1024, gradient=gradient, output_trained=trained)
        for gradient, trained in ((True, True), (False, True), (True, False))
    )
    assert len(update) == 2
    assert scoring == adapters == update[:1]


def test_in_16_bits_a_chunks_share_of_the_output_weights_gradient_stands_beside_the_sum() -> None:
    wide, narrow = (activations.chunked_logits_lines(SHAPE, 64, 64, gradient=True, compute_bytes=size)[1].bytes for size in (4, 2))
    assert (wide, narrow) == (SHAPE.vocabulary * SHAPE.hidden * 4, SHAPE.vocabulary * SHAPE.hidden * 6)


def test_logits_stop_growing_at_a_chunk_and_are_smaller_below_it() -> None:
    sizes = [activations.chunked_logits_lines(SHAPE, tokens, 1024, gradient=False)[0].bytes for tokens in (512, 1024, 65536)]
    assert sizes[0] * 2 == sizes[1] == sizes[2]


def test_each_policy_keeps_less_than_the_one_before_it() -> None:
    kept = [
        memory.total_bytes(activations.activation_lines(SHAPE, 8192, checkpointing=policy)) for policy in ("selective", "full", "offload")
    ]
    assert kept[0] > kept[1] > kept[2] > 0
    gpt = [
        memory.total_bytes(activations.gpt_activation_lines(tokens=4096, batch=1, hidden=4096, heads=32, layers=32, checkpointing=policy))
        for policy in activations.POLICIES
    ]
    assert gpt == sorted(gpt, reverse=True)


def test_activations_grow_in_proportion_to_tokens() -> None:
    one, four = (memory.total_bytes(activations.activation_lines(SHAPE, tokens)) for tokens in (1024, 4096))
    assert four == 4 * one


def test_context_parallelism_divides_everything_but_the_keys() -> None:
    whole, part = (
        memory.total_bytes(
            activations.gpt_activation_lines(
                tokens=4096, batch=1, hidden=4096, heads=32, layers=32, checkpointing="none", context_parallel=degree
            )
        )
        for degree in (1, 4)
    )
    assert whole == 4 * part


def test_the_largest_micro_batch_fits_and_one_token_more_does_not() -> None:
    def size(tokens: int) -> int:
        return memory.total_bytes(activations.activation_lines(SHAPE, tokens))

    most = activations.largest_tokens(size, 10**9)
    assert size(most) <= 10**9 < size(most + 1)
    assert activations.largest_tokens(size, 10) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": -1}, "tokens=-1"),
        ({"batch": 0}, "batch=0"),
        ({"checkpointing": "some"}, "none, selective, full, offload"),
        ({"tensor_parallel": 5}, "tensor_parallel=5"),
        ({"context_parallel": 3}, "context_parallel=3"),
    ],
)
def test_impossible_inputs_of_gpt_activations_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        activations.gpt_activation_lines(**{"tokens": 4096, "batch": 1, "hidden": 4096, "heads": 32, "layers": 32, **changes})


def test_a_trainer_that_keeps_scores_is_refused_because_ours_cannot() -> None:
    with pytest.raises(ConfigError, match=r"checkpointing='none'.*selective, full, offload"):
        activations.activation_lines(SHAPE, 10, checkpointing="none")


@pytest.mark.parametrize("values", [(-1, 100, 2.0, 1), (1, 0, 2.0, 1), (1, 100, 0.0, 1), (1, 100, 2.0, 0)])
def test_impossible_logits_are_refused(values: tuple[int, int, float, int]) -> None:
    with pytest.raises(ConfigError, match="impossible"):
        activations.full_logits_line(*values)
