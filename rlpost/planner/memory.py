"""Bytes of weights, gradients, optimizer states, adapters and KV cache, each as a line with its formula.

Bytes a parameter: Rajbhandari et al. 2020 (ZeRO), section 3.1 and figure 1; QLoRA: Dettmers et al. 2023; LoRA: Hu et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlpost.planner.quantities import Basis, require_at_least, require_choice, require_positive, require_share
from rlpost.planner.shapes import Linear, ModelShape, check_tensor_parallel
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """One thing that occupies memory: ``bytes`` of it on one GPU, and how they were computed."""

    name: str
    bytes: int
    formula: str
    basis: Basis = "assumed"


def line(name: str, size: float, formula: str) -> MemoryLine:
    """A line of ``size`` bytes, rounded up to whole ones."""
    return MemoryLine(name=name, bytes=math.ceil(size), formula=formula)


def total_bytes(lines: Iterable[MemoryLine]) -> int:
    """Sum of lines, bytes."""
    return sum(one.bytes for one in lines)


# ---- model states ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StateRecipe:
    """Bytes a parameter of what training holds. ``optimizer`` includes a float32 master copy where there is one beside the weights."""

    weights: float
    gradients: float
    optimizer: float
    matrix_optimizer: float | None = None
    """Of the layers' matrices, where the optimizer treats them otherwise; None is ``optimizer``."""
    step_shard: float = 0
    """What a step makes beside these for all parameters at once: one float32 number each in torch's foreach AdamW (its denominators)."""
    step_tensor: float = 0
    """The same of optimizers that take one tensor after another: bytes an element of the largest."""
    surplus: float = 0.3
    """Share of what is used that a CPU's trainer holds beside it (roles.SURPLUS): 0.2 to 0.5 in a dozen settings. Steps on one tensor
    after another make more: pieces of every size that come and go."""

    @property
    def total(self) -> float:
        """Bytes a parameter that is no matrix of a layer."""
        return self.weights + self.gradients + self.optimizer


SCALES_8BIT = 2 * 4 / 128
"""Both 8-bit moments have one float32 scale for 128 elements."""

STEP_8BIT = 56
"""Bytes an element of torchao's step on one tensor: both moments in float32, what goes into them, and 64-bit places in the table of 256
values while they are quantised again (counted in its source; it was the peak of no setting that was measured)."""

RECIPES = {
    "adamw": StateRecipe(weights=4, gradients=4, optimizer=8, step_shard=4),
    "adamw_bf16": StateRecipe(weights=4, gradients=4, optimizer=4, step_tensor=12, surplus=0.45),
    "adamw_8bit": StateRecipe(weights=4, gradients=4, optimizer=2 + SCALES_8BIT, step_tensor=STEP_8BIT, surplus=0.7),
    "muon": StateRecipe(weights=4, gradients=4, optimizer=8, matrix_optimizer=4, step_tensor=4),
    "mixed": StateRecipe(weights=2, gradients=2, optimizer=12),
    "mixed_float32_gradients": StateRecipe(weights=2, gradients=4, optimizer=12),
    "pure_bf16": StateRecipe(weights=2, gradients=2, optimizer=4),
}
"""The first four are rlpost's ``training.optimizer.name`` (float32 weights, sharded). ``mixed`` is that of Megatron and DeepSpeed: bfloat16
weights with a float32 master copy; gradients in float32 make it 18 bytes. ``pure_bf16`` has no master copy: a model loaded in bfloat16."""


def find_recipe(name: str) -> StateRecipe:
    """The recipe of that name. Raises ConfigError that lists all."""
    require_choice("recipe", name, RECIPES)
    return RECIPES[name]


STAGES = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "weights")}
"""What each ZeRO stage shares among the ranks; FSDP's full sharding is stage 3."""


def state_lines(
    parameters: int, recipe: StateRecipe, *, stage: int = 3, ranks: int = 1, matrix_parameters: int = 0
) -> tuple[MemoryLine, ...]:
    """Weights, gradients and optimizer states on one of ``ranks`` GPUs (ZeRO, figure 1).

    ``matrix_parameters`` of the parameters are the layers' matrices, of interest to recipes that treat them otherwise.
    """
    require_at_least(1, ranks=ranks)
    require_at_least(0, parameters=parameters, matrix_parameters=matrix_parameters)
    if stage not in STAGES:
        raise ConfigError(f"stage={stage} is no ZeRO stage; expected one of {', '.join(map(str, STAGES))}: change stage")
    lines = []
    for part, each in (("weights", recipe.weights), ("gradients", recipe.gradients), ("optimizer", recipe.optimizer)):
        shards = ranks if part in STAGES[stage] else 1
        size, formula = each * parameters, f"{parameters:,} parameters x {each:g} B"
        if part == "optimizer" and recipe.matrix_optimizer is not None:
            other = parameters - matrix_parameters
            size = recipe.matrix_optimizer * matrix_parameters + each * other
            formula = f"({matrix_parameters:,} of matrices x {recipe.matrix_optimizer:g} B + {other:,} others x {each:g} B)"
        lines.append(line(part, size / shards, f"{formula} / {shards} ranks" if shards > 1 else formula))
    return tuple(lines)


def load_line(parameters: int, bytes_per_parameter: float) -> MemoryLine:
    """A model without gradients or optimizer."""
    require_at_least(0, parameters=parameters)
    require_positive(bytes_per_parameter=bytes_per_parameter)
    return line("weights", parameters * bytes_per_parameter, f"{parameters:,} parameters x {bytes_per_parameter:g} B")


def checkpoint_line(parameters: int, recipe: StateRecipe) -> MemoryLine:
    """What a checkpoint that training can resume from has on disk, all ranks together: weights and optimizer, no gradients."""
    require_at_least(0, parameters=parameters)
    each = recipe.weights + recipe.optimizer
    return line("checkpoint on disk", parameters * each, f"{parameters:,} parameters x ({recipe.weights:g} + {recipe.optimizer:g}) B")


def gpus_for(states_bytes: float, gpu_bytes: float, share: float) -> int:
    """Fewest GPUs whose ``share`` of ``gpu_bytes`` holds evenly sharded states, before activations."""
    require_positive(states_bytes=states_bytes, gpu_bytes=gpu_bytes)
    require_share(share=share)
    require_positive(share=share)
    return math.ceil(states_bytes / (gpu_bytes * share))


# ---- adapters --------------------------------------------------------------------------------------------------------


def adapter_parameters(linears: Sequence[Linear], rank: int) -> int:
    """Parameters of LoRA adapters of these layers: rank x (inputs + outputs) each."""
    require_at_least(1, rank=rank)
    return sum(rank * (one.inputs + one.outputs) * one.count for one in linears)


def chosen_linears(shape: ModelShape, names: Iterable[str]) -> tuple[Linear, ...]:
    """The layers of these names (``q_proj`` ...). Raises ConfigError for one that the model has not."""
    known = {one.name: one for one in shape.linears}
    wanted = tuple(names)
    for name in wanted:
        require_choice("target", name, known)
    return tuple(known[name] for name in wanted)


def lora_lines(
    base_parameters: int, adapters: int, recipe: StateRecipe, *, base_bytes_per_parameter: float = 4, ranks: int = 1
) -> tuple[MemoryLine, ...]:
    """A frozen base and its adapters' states, both sharded over ``ranks``. rlpost keeps the base in float32; others in bfloat16 (2)."""
    require_at_least(1, ranks=ranks)
    base = load_line(base_parameters, base_bytes_per_parameter)
    states = state_lines(adapters, recipe, stage=3, ranks=ranks)
    shared = f"{base.formula} / {ranks} ranks" if ranks > 1 else base.formula
    return (
        line("frozen weights", base.bytes / ranks, shared),
        *(MemoryLine(name=f"adapter {one.name}", bytes=one.bytes, formula=one.formula) for one in states),
    )


NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits of a weight in QLoRA's NF4 with double quantisation: an 8-bit scale for 64 weights, a float32 one for 256 of these: 4.127."""


def qlora_base_lines(quantised_parameters: int, other_parameters: int) -> tuple[MemoryLine, ...]:
    """The frozen base of QLoRA: matrices in NF4, all else (embedding, output layer, norms) in bfloat16."""
    require_at_least(0, quantised_parameters=quantised_parameters, other_parameters=other_parameters)
    quantised = quantised_parameters * NF4_BITS / 8
    return (
        line("quantised weights", quantised, f"{quantised_parameters:,} parameters x {NF4_BITS:.3f} bit"),
        line("other weights", other_parameters * 2, f"{other_parameters:,} parameters x 2 B"),
    )


# ---- KV cache --------------------------------------------------------------------------------------------------------


def kv_bytes_per_token(shape: ModelShape, *, bytes_per_element: float = 2, tensor_parallel: int = 1) -> float:
    """Bytes that one token's keys and values take on one GPU: 2 x layers x key-value heads there x head size x bytes.

    With more GPUs than key-value heads each GPU still holds one.
    """
    require_positive(bytes_per_element=bytes_per_element)
    check_tensor_parallel(shape, tensor_parallel)
    return 2 * shape.layers * max(1, shape.kv_heads // tensor_parallel) * shape.head_dim * bytes_per_element


def kv_line(shape: ModelShape, tokens: int, *, bytes_per_element: float = 2, tensor_parallel: int = 1) -> MemoryLine:
    """KV cache of ``tokens`` on one GPU."""
    require_at_least(0, tokens=tokens)
    each = kv_bytes_per_token(shape, bytes_per_element=bytes_per_element, tensor_parallel=tensor_parallel)
    heads = max(1, shape.kv_heads // tensor_parallel)
    formula = f"{tokens:,} tokens x 2 x {shape.layers} layers x {heads} heads x {shape.head_dim} x {bytes_per_element:g} B"
    return line("KV cache", tokens * each, formula)


def kv_capacity_tokens(
    shape: ModelShape,
    *,
    gpu_bytes: float,
    memory_share: float,
    other_bytes: float = 0,
    tensor_parallel: int = 1,
    weight_bytes_per_parameter: float = 2,
    kv_bytes_per_element: float = 2,
) -> int:
    """Tokens whose KV an engine of ``tensor_parallel`` GPUs can hold: what its share of each GPU leaves beside weights and ``other_bytes``
    (CUDA graphs, activations). Raises ConfigError when not even the weights fit.
    """
    require_positive(gpu_bytes=gpu_bytes, weight_bytes_per_parameter=weight_bytes_per_parameter)
    require_share(memory_share=memory_share)
    require_at_least(0, other_bytes=other_bytes)
    each = kv_bytes_per_token(shape, bytes_per_element=kv_bytes_per_element, tensor_parallel=tensor_parallel)
    weights = shape.parameters * weight_bytes_per_parameter / tensor_parallel
    free = gpu_bytes * memory_share - weights - other_bytes
    if free <= 0:
        raise ConfigError(
            f"an engine's share of a GPU is {gpu_bytes * memory_share / 2**30:.1f} GiB, and {(weights + other_bytes) / 2**30:.1f} GiB go "
            "to weights and graphs; expected room for a KV cache: raise tensor_parallel or the memory share"
        )
    return int(free / each)


def concurrency(capacity_tokens: int, sequence_tokens: int) -> int:
    """Sequences of ``sequence_tokens`` whose KV fits together; vLLM prints the same quotient when it starts."""
    require_at_least(0, capacity_tokens=capacity_tokens)
    require_at_least(1, sequence_tokens=sequence_tokens)
    return capacity_tokens // sequence_tokens
