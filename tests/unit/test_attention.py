"""Attention over packed rows: a packed sequence equals itself alone, values and gradients, whatever lies beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlpost.training import attention
from rlpost.training.attention import PackedLayout, padded_attention
from rlpost.types import ConfigError

CPU = torch.device("cpu")
HEAD = 4
LENGTHS = [[1], [40], [1, 40], [5, 40, 1, 17, 2, 39, 8], [7, 7, 7], list(range(1, 41, 3))]


def layout_of(lengths: Sequence[int]) -> PackedLayout:
    """Sequences end to end that share nothing."""
    return PackedLayout.of(np.array(lengths), np.arange(sum(lengths)), CPU)


def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scaling: float) -> torch.Tensor:
    """Causal softmax attention of one sequence, written out. ``[heads, length, head]`` -> ``[length, heads, head]``."""
    repeat = q.size(0) // k.size(0)
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    index = torch.arange(q.size(1))
    seen = index[:, None] >= index[None, :]
    if window is not None:
        seen &= index[:, None] - index[None, :] < window
    scores = (q @ k.transpose(1, 2) * scaling).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def random_row(lengths: list[int], heads: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, count, sum(lengths), HEAD, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_equals_each_sequence_alone_with_gradients(lengths: list[int], heads: tuple[int, int], window: int | None) -> None:
    """Padding or a neighbour that leaks in changes values or gradients; grouped heads and sliding windows too."""
    q, k, v = random_row(lengths, heads)
    scaling = 0.3
    got, weights = padded_attention(nn.Identity(), q, k, v, None, scaling=scaling, sliding_window=window, packed_layout=layout_of(lengths))
    assert weights is None
    expected = torch.cat(
        [
            alone(q_one[0], k_one[0], v_one[0], window, scaling)
            for q_one, k_one, v_one in zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
        ]
    )[None]
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for mine, theirs in zip(torch.autograd.grad(got, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_default_scaling_is_one_over_the_root_of_the_head_size() -> None:
    q, k, v = random_row([5, 3], (2, 2))
    layout = layout_of([5, 3])
    plain, _ = padded_attention(nn.Identity(), q, k, v, None, packed_layout=layout)
    scaled, _ = padded_attention(nn.Identity(), q, k, v, None, scaling=1 / math.sqrt(HEAD), packed_layout=layout)
    torch.testing.assert_close(plain, scaled)


def test_one_sequence_gets_no_gradient_from_another() -> None:
    q, k, v = random_row([4, 30, 2], (2, 1))
    got, _ = padded_attention(nn.Identity(), q, k, v, None, packed_layout=layout_of([4, 30, 2]))
    for gradient in torch.autograd.grad(got[:, 4:34].square().sum(), (q, k, v)):
        assert gradient[:, :, :4].abs().max() == 0
        assert gradient[:, :, 34:].abs().max() == 0
        assert gradient[:, :, 4:34].abs().max() > 0


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_layout_reads_each_token_once_and_pads_less_than_half(lengths: list[int]) -> None:
    layout = layout_of(lengths)
    order = torch.cat([bucket.gather[bucket.real] for bucket in layout.buckets])
    assert order[layout.scatter].tolist() == list(range(sum(lengths)))
    assert sum(bucket.sequences * bucket.longest for bucket in layout.buckets) <= 2 * sum(lengths)


@pytest.mark.parametrize("feature", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
def test_a_model_whose_attention_has_more_than_we_compute_is_refused(feature: dict[str, object]) -> None:
    """transformers hands these over as keyword arguments: ignored, every logprob would be slightly wrong."""
    q, k, v = random_row([3], (2, 2))
    with pytest.raises(ConfigError, match=r"training\.attention=padded"):
        padded_attention(nn.Identity(), q, k, v, None, packed_layout=layout_of([3]), **feature)  # type: ignore[arg-type]


def test_attention_without_boundaries_is_an_error_and_not_one_long_sequence() -> None:
    q, k, v = random_row([3], (2, 2))
    with pytest.raises(AssertionError, match="packed_layout"):
        padded_attention(nn.Identity(), q, k, v, None)


def tiny_models() -> Iterator[tuple[Any, Any]]:
    from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

    size = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    yield Qwen3ForCausalLM, Qwen3Config(**size, num_key_value_heads=2, head_dim=4)
    yield MistralForCausalLM, MistralConfig(**size, num_key_value_heads=2, head_dim=4, sliding_window=6)


def test_a_whole_model_on_a_packed_row_equals_each_sequence_alone() -> None:
    """Positions, transformers' own masks and our attention together, for a full and for a sliding-window model."""
    attention.register()
    lengths = [3, 20, 1, 9]
    for model_class, config in tiny_models():
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model = model_class(config).double()
        tokens = torch.randint(0, 31, (1, sum(lengths)))
        expected = torch.cat([model.model(input_ids=part, use_cache=False).last_hidden_state for part in tokens.split(lengths, 1)], 1)
        upstream = torch.randn(expected.shape, dtype=torch.float64)
        (expected * upstream).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model.config._attn_implementation = attention.PADDED
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        got = model.model(input_ids=tokens, position_ids=positions, use_cache=False, packed_layout=layout_of(lengths)).last_hidden_state
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)  # the models' norms are in float32
        (got * upstream).sum().backward()
        for name, parameter in model.named_parameters():
            if name in gradients:
                torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-5)


def test_a_shared_prompt_gives_the_outputs_and_gradients_of_repeated_ones() -> None:
    """Rows 0-3 are the prompt of three sequences; their own tokens follow. The same as attention over each sequence alone."""
    torch.manual_seed(0)
    own, prompt = [3, 1, 6], 4
    ends = np.cumsum(own)
    index = np.concatenate(
        [np.concatenate([np.arange(prompt), prompt + np.arange(end - n, end)]) for n, end in zip(own, ends, strict=True)]
    )
    lengths = np.array(own) + prompt
    row = torch.randn(1, 2, prompt + sum(own), 8, requires_grad=True)
    got, _ = padded_attention(nn.Identity(), row, row, row, None, packed_layout=PackedLayout.of(lengths, index, CPU))
    weight = torch.randn_like(got)
    (got * weight).sum().backward()
    shared_gradient = row.grad

    row.grad = None
    total = torch.zeros(())
    for number, piece in enumerate(np.split(index, np.cumsum(lengths)[:-1])):
        alone = row[:, :, torch.from_numpy(piece)]
        out = torch.nn.functional.scaled_dot_product_attention(alone, alone, alone, is_causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(got[0, torch.from_numpy(piece)], out)
        first = 0 if number == 0 else prompt  # the prompt's outputs are used once
        total = total + (out[first:] * weight[0, torch.from_numpy(piece)][first:]).sum()
    total.backward()
    torch.testing.assert_close(shared_gradient, row.grad)
