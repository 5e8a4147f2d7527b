"""LoRA on one rank: what a layer computes, which layers get an adapter, and what of it is read for engines and exports."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from rlpost.checkpoint.export import merge_adapters
from rlpost.config.schema import LoraConfig
from rlpost.training.lora import add_adapters
from rlpost.types import ConfigError
from rlpost.weights.adapters import adapter_config, adapter_tensors, find_adapters, hash_adapter
from rlpost.weights.shards import Shard, ShardedWeights

EXACT = 1e-10
"""What float64 leaves of two ways to the same number."""

ALL = LoraConfig().targets
BUCKET_BYTES = 1 << 20


class Block(torch.nn.Module):
    """Two layers with the names of a decoder's, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(7, 11)
        self.up_proj = torch.nn.Linear(11, 5, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """``[..., 7]`` to ``[..., 5]``."""
        result: torch.Tensor = self.up_proj(torch.tanh(self.q_proj(values)))
        return result


class Stack(torch.nn.Module):
    """Blocks between an embedding and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(13, 7)
        self.layers = torch.nn.ModuleList([Block() for _ in range(3)])
        self.norm = torch.nn.LayerNorm(5)
        self.lm_head = torch.nn.Linear(5, 13, bias=False)

    def get_output_embeddings(self) -> torch.nn.Linear:
        """As transformers names it."""
        return self.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[..., tokens]`` to logits ``[..., tokens, 13]``."""
        hidden = self.embed(tokens)
        total = sum(layer(hidden) for layer in self.layers)
        result: torch.Tensor = self.lm_head(self.norm(total))
        return result


def read_rows(shard: Shard, start: int, stop: int) -> torch.Tensor:
    """Rows as a sync reads them."""
    return shard.rows(start, stop).to(shard.dtype)


def make_stack(rank: int = 3, alpha: float = 6.0, targets: str = ALL, *, moved: bool = True) -> Stack:
    """In float64, with adapters that do something (``moved``) or as they start."""
    torch.manual_seed(0)
    model = Stack().double()
    add_adapters(model, LoraConfig(rank=rank, alpha=alpha, targets=targets))
    if moved:
        move(model)
    return model


@torch.no_grad()
def move(model: torch.nn.Module, seed: int = 1) -> None:
    """Give every adapter values as after some training."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("lora_A", "lora_B")):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def dense_weights(model: torch.nn.Module, scaling: float) -> dict[str, torch.Tensor]:
    """W + s B A of every layer, summed over the rank as the paper writes it; other parameters as they are."""
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dense = {}
    for name, tensor in held.items():
        layer = name.removesuffix(".weight")
        if name.endswith(("lora_A", "lora_B")):
            continue
        if f"{layer}.lora_A" in held:
            first, second = held[f"{layer}.lora_A"], held[f"{layer}.lora_B"]
            tensor = tensor + scaling * sum(torch.outer(second[:, r], first[r]) for r in range(first.shape[0]))
        dense[name] = tensor
    return dense


def dense_model(model: Stack, scaling: float) -> Stack:
    """A plain model with these weights."""
    plain = Stack().double()
    plain.load_state_dict(dense_weights(model, scaling))
    return plain


TOKENS = torch.tensor([[1, 5, 12, 0], [3, 3, 7, 9]])


# ---- what a layer computes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rank", "alpha"), [(1, 1.0), (4, 32.0), (9, 2.0)], ids=["rank-1", "usual", "rank-above-both-sizes"])
def test_a_layers_output_is_that_of_the_dense_weight(bias: bool, rank: int, alpha: float) -> None:
    torch.manual_seed(rank)
    layer: Any = torch.nn.Linear(6, 5, bias=bias).double()
    weight, offset = layer.weight.detach().clone(), copy.deepcopy(layer.bias)
    model = torch.nn.ModuleDict({"q_proj": layer})
    add_adapters(model, LoraConfig(rank=rank, alpha=alpha, targets="q_proj"))
    move(model)
    values = torch.randn(2, 8, 6, dtype=torch.float64)
    expected = functional.linear(values, weight + alpha / rank * (layer.lora_B @ layer.lora_A), offset)
    assert (expected - functional.linear(values, weight, offset)).abs().max() > 0.1
    torch.testing.assert_close(layer(values), expected, atol=EXACT, rtol=0)


def test_gradients_of_the_adapters_are_those_of_the_dense_weights_by_the_chain_rule() -> None:
    """dA = s B^T dW and dB = s dW A^T, with dW from a plain model that knows nothing of adapters."""
    model = make_stack()
    plain = dense_model(model, 2.0)
    model(TOKENS).square().mean().backward()
    plain(TOKENS).square().mean().backward()
    dense = dict(plain.named_parameters())
    for adapter in find_adapters(model):
        whole = dense[f"{adapter.layer}.weight"].grad
        assert whole is not None and adapter.first.grad is not None and adapter.second.grad is not None
        assert whole.abs().max() > 1e-4
        torch.testing.assert_close(adapter.first.grad, 2.0 * adapter.second.T @ whole, atol=EXACT, rtol=0)
        torch.testing.assert_close(adapter.second.grad, 2.0 * whole @ adapter.first.T, atol=EXACT, rtol=0)


def test_nothing_but_the_adapters_has_a_gradient() -> None:
    model = make_stack()
    model(TOKENS).square().mean().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert with_gradient == {f"layers.{i}.{layer}.lora_{letter}" for i in range(3) for layer in ("q_proj", "up_proj") for letter in "AB"}


def test_at_the_start_adapters_change_no_bit_and_each_has_its_own_random_a() -> None:
    torch.manual_seed(0)
    before = Stack().double()(TOKENS)
    model = make_stack(moved=False)
    assert torch.equal(model(TOKENS), before)
    adapters = find_adapters(model)
    assert all(not adapter.second.any() for adapter in adapters)
    for adapter in adapters:  # uniform up to 1 / sqrt(in)
        limit = adapter.first.shape[1] ** -0.5
        assert 0.5 * limit < adapter.first.abs().max() <= limit
    assert not torch.equal(adapters[0].first, adapters[2].first)


def test_a_whole_transformer_with_biases_equals_its_dense_self() -> None:
    """transformers calls its layers as this class expects, also where query, key and value have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.5)
    base = copy.deepcopy(model)
    add_adapters(model, LoraConfig(rank=2, alpha=1.0))
    move(model)
    plain = copy.deepcopy(base)
    plain.load_state_dict(dense_weights(model, 0.5), strict=False)  # the tied output layer has no weight of its own
    tokens = torch.randint(0, 31, (2, 9))
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, atol=EXACT, rtol=0)
    assert (model(tokens).logits - base(tokens).logits).abs().max() > 0.1


# ---- which layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (ALL, [f"layers.{i}.{layer}" for i in range(3) for layer in ("q_proj", "up_proj")]),
        (r"q_proj$", [f"layers.{i}.q_proj" for i in range(3)]),
        (r"layers\.1\.", ["layers.1.q_proj", "layers.1.up_proj"]),
        (r"^layers\.2\.up_proj$", ["layers.2.up_proj"]),
    ],
)
def test_only_the_layers_that_are_named_get_an_adapter(targets: str, expected: list[str]) -> None:
    model = make_stack(rank=3, targets=targets)
    assert [adapter.layer for adapter in find_adapters(model)] == expected
    sizes = {"q_proj": 7 + 11, "up_proj": 11 + 5}
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == sum(3 * sizes[name.rsplit(".", 1)[1]] for name in expected)


def test_a_pattern_that_matches_no_linear_layer_is_refused_with_names_to_choose_from() -> None:
    with pytest.raises(ConfigError) as caught:
        make_stack(targets="query")
    assert "training.lora.targets='query' matches no linear layer" in str(caught.value)
    assert "layers.0.q_proj" in str(caught.value) and "layers.2.up_proj" in str(caught.value)
    with pytest.raises(ConfigError, match="matches no linear layer"):
        make_stack(targets="^(embed|norm)$")


@pytest.mark.parametrize("targets", ["lm_head", "."])
def test_the_output_layer_is_refused_for_its_adapter_would_never_be_used(targets: str) -> None:
    """The trainer makes logprobs from lm_head.weight in chunks; engines would apply an adapter that it does not."""
    with pytest.raises(ConfigError, match=r"training\.lora\.targets=.* matches lm_head, the output layer"):
        make_stack(targets=targets)


# ---- what is read for engines ------------------------------------------------------------------------------------------


def test_the_adapters_alone_have_the_names_of_peft_and_their_scaling_in_b() -> None:
    model = make_stack(rank=3, alpha=6.0, targets="q_proj")
    tensors = adapter_tensors(find_adapters(model), torch.float32)
    assert list(tensors) == [f"base_model.model.layers.{i}.q_proj.lora_{letter}.weight" for i in range(3) for letter in "AB"]
    for adapter in find_adapters(model):
        first, second = (tensors[f"base_model.model.{adapter.layer}.lora_{letter}.weight"] for letter in "AB")
        assert torch.equal(first, adapter.first.float())
        assert torch.equal(second, (2.0 * adapter.second).float())
    described = adapter_config(tensors)
    assert (described["peft_type"], described["r"], described["lora_alpha"], described["bias"]) == ("LORA", 3, 3, "none")
    assert described["target_modules"] == ["q_proj"]


def test_b_is_scaled_before_it_is_rounded_to_the_engines_dtype() -> None:
    """The other way round its bits would depend on the scaling being a power of two."""
    model = make_stack(rank=3, alpha=1.0)
    tensors = adapter_tensors(find_adapters(model), torch.bfloat16)
    for adapter in find_adapters(model):
        second = tensors[f"base_model.model.{adapter.layer}.lora_B.weight"]
        assert second.dtype == torch.bfloat16
        assert torch.equal(second, (adapter.second / 3).to(torch.bfloat16))


def test_an_adapters_hash_counts_every_name_shape_and_bit() -> None:
    tensors = {"one": torch.arange(6.0).view(2, 3), "two": torch.zeros(2)}
    hashes = hash_adapter(tensors)
    for changed in (
        {**tensors, "two": torch.tensor([0.0, -0.0])},
        {**tensors, "one": tensors["one"].view(3, 2)},
        {"one": tensors["one"], "three": tensors["two"]},
        {**tensors, "two": torch.zeros(2, dtype=torch.int32)},
    ):
        assert sum(hash_adapter(changed).values()) != sum(hashes.values())
    transposed = tensors["one"].T.contiguous().T
    assert not transposed.is_contiguous() and hash_adapter({**tensors, "one": transposed}) == hashes


def test_engines_that_get_adapters_alone_get_a_model_of_which_nothing_changes() -> None:
    model = make_stack()
    weights = ShardedWeights(model, "float32", BUCKET_BYTES)
    assert weights.manifest.names == tuple(dict(Stack().named_parameters()))
    assert not any(weights.manifest.trained)
    assert [adapter.layer for adapter in weights.adapters] == [adapter.layer for adapter in find_adapters(model)]
    base = dict(model.named_parameters())
    for name, shard in zip(weights.manifest.names, weights.shards, strict=True):
        assert torch.equal(read_rows(shard, shard.start, shard.stop), base[name].float()), name


def test_merged_weights_are_the_dense_ones_by_their_plain_names() -> None:
    model = make_stack(targets="q_proj", alpha=6.0)
    weights = ShardedWeights(model, "float32", BUCKET_BYTES, merge_adapters=True)
    weights.refresh()
    dense = dense_weights(model, 2.0)
    assert weights.adapters == [] and weights.manifest.names == tuple(dense)
    trained = {name for name, is_trained in zip(weights.manifest.names, weights.manifest.trained, strict=True) if is_trained}
    assert trained == {f"layers.{i}.q_proj.weight" for i in range(3)}
    for name, shard in zip(weights.manifest.names, weights.shards, strict=True):
        torch.testing.assert_close(read_rows(shard, shard.start, shard.stop), dense[name].float(), atol=1e-6, rtol=0)


def test_merged_weights_follow_the_adapters_from_sync_to_sync() -> None:
    model = make_stack()
    weights = ShardedWeights(model, "float64", BUCKET_BYTES, merge_adapters=True)
    for seed in (1, 2):
        move(model, seed)
        weights.refresh()
        dense = dense_weights(model, 2.0)
        for name, shard in zip(weights.manifest.names, weights.shards, strict=True):
            torch.testing.assert_close(read_rows(shard, shard.start, shard.stop), dense[name], atol=EXACT, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), [(301, 27), (64, 64), (200, 1000)])
@pytest.mark.parametrize("rank", [1, 8, 33])
def test_a_merged_row_has_the_same_bits_whatever_rows_it_is_read_with(rank: int, rows: int, columns: int) -> None:
    """A full sync reads as many rows as a bucket has room for, a delta's baseline a chunk. A product's rounding depends on its shape:
    a row that differed in its last bit would be what the engine has and what the trainer does not know of."""
    torch.manual_seed(rank)
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(columns, rows, bias=False)})
    add_adapters(model, LoraConfig(rank=rank, alpha=16.0, targets="q_proj"))
    move(model)
    weights = ShardedWeights(model, "float32", BUCKET_BYTES, merge_adapters=True)
    weights.refresh()
    [shard] = weights.shards
    whole = read_rows(shard, 0, rows)
    for size in (1, 2, 3, 7, 63, 64, 65, 150, rows - 1):
        cuts = [*range(0, rows, size), rows]
        parts = torch.cat([read_rows(shard, start, stop) for start, stop in pairwise(cuts)])
        assert torch.equal(parts, whole), f"rows read {size} at a time"


# ---- export ------------------------------------------------------------------------------------------------------------


def test_an_export_has_the_dense_weights_under_the_models_names() -> None:
    model = make_stack(targets="q_proj", alpha=6.0)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    exported = dict(merge_adapters(tensors, 2.0))
    dense = dense_weights(model, 2.0)
    assert list(exported) == list(dense)
    for name, tensor in dense.items():
        torch.testing.assert_close(exported[name], tensor, atol=EXACT, rtol=0)
