"""What a forward keeps for its backward pass, and the logits.

Two counts: that of Korthikanti et al. 2022 (arXiv 2205.05198, equations 1 to 6) for GPT layers, which published figures use, and one of
the tensors that rlpost's trainer really saves for gated feed-forward layers, grouped heads and one-pass norms. Checkpointing ``none``
keeps everything, also attention's scores; ``selective`` computes scores again (flash attention does the same); ``full`` keeps each
layer's input; ``offload`` moves that input to host memory too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rlpost.planner.memory import MemoryLine, line
from rlpost.planner.quantities import require_at_least, require_choice, require_divides, require_positive
from rlpost.planner.shapes import ModelShape

Checkpointing = Literal["none", "selective", "full", "offload"]
POLICIES: tuple[Checkpointing, ...] = ("none", "selective", "full", "offload")
LAYER_AT_WORK = "one layer's activations"
"""The line of what is there while a layer is computed (again), and gone after it."""


def gpt_activation_lines(
    *,
    tokens: int,
    batch: int,
    hidden: int,
    heads: int,
    layers: int,
    checkpointing: Checkpointing = "selective",
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    context_parallel: int = 1,
) -> tuple[MemoryLine, ...]:
    """Activations of ``batch`` sequences of ``tokens`` each on one GPU, in 16 bits: a feed-forward part of 4 x hidden, with dropout.

    With context parallelism a GPU has its share of the queries, and all keys.
    """
    require_at_least(1, tokens=tokens, batch=batch, hidden=hidden, layers=layers)
    require_choice("checkpointing", checkpointing, POLICIES)
    require_divides("tensor_parallel", tensor_parallel, heads=heads, hidden=hidden)
    require_divides("context_parallel", context_parallel, tokens=tokens)
    part = tokens // context_parallel * batch * hidden
    linear = 34 / tensor_parallel if sequence_parallel else 10 + 24 / tensor_parallel
    scores = 5 * heads * tokens / (hidden * tensor_parallel)
    share = f"{tokens // context_parallel} tokens x {batch} x {hidden}"
    if checkpointing in ("none", "selective"):
        kept = linear + (scores if checkpointing == "none" else 0)
        return (line("activations", part * layers * kept, f"{share} x {layers} layers x {kept:g}"),)
    return _checkpointed_lines(2 * part * layers, f"{share} x {layers} layers x 2 B", part * linear, f"{share} x {linear:g}", checkpointing)


def _checkpointed_lines(
    inputs: float, inputs_formula: str, layer: float, layer_formula: str, checkpointing: Checkpointing
) -> tuple[MemoryLine, ...]:
    working = line(LAYER_AT_WORK, layer, layer_formula)
    return (working,) if checkpointing == "offload" else (line("layer inputs", inputs, inputs_formula), working)


def attention_elements_per_token(shape: ModelShape, *, padded: bool = False) -> int:
    """Elements of one token that a layer's norm, projections and attention save.

    Input and result of the norm; queries and keys before their norm where there is one; queries, keys, values; attention's result,
    which padded attention has twice (padded, and packed again).
    """
    normed = shape.head_norms * (shape.query_width + shape.kv_width)
    return 2 * shape.hidden + normed + shape.query_width + 2 * shape.kv_width + (2 if padded else 1) * shape.query_width


def feed_forward_elements_per_token(shape: ModelShape, *, sparse: bool) -> int:
    """Elements of one token that a layer's feed-forward part saves: input and result of the norm, gate, its SiLU, up, and their product.

    With experts the four for each chosen one, and beside them what goes into it and comes out.
    """
    if not sparse:
        return 2 * shape.hidden + 4 * shape.feed_forward
    return 2 * shape.hidden + shape.experts + shape.experts_per_token * (4 * shape.expert_feed_forward + 2 * shape.hidden)


def layer_activation_bytes_per_token(
    shape: ModelShape, *, bytes_per_element: float = 2, sparse: bool = False, padded: bool = False
) -> float:
    """Bytes of one token that one layer saves, without attention's scores (no kernel in use keeps them)."""
    require_positive(bytes_per_element=bytes_per_element)
    return (attention_elements_per_token(shape, padded=padded) + feed_forward_elements_per_token(shape, sparse=sparse)) * bytes_per_element


def activation_lines(
    shape: ModelShape, tokens: int, *, checkpointing: Checkpointing = "selective", bytes_per_element: float = 2, padded: bool = False
) -> tuple[MemoryLine, ...]:
    """Activations of one packed row of ``tokens`` in rlpost's trainer; ``padded`` attention is that of CPUs.

    ``none`` is not among what it can do: its attention never keeps scores.
    """
    require_at_least(0, tokens=tokens)
    require_choice("checkpointing", checkpointing, POLICIES[1:])
    dense, sparse = (
        layer_activation_bytes_per_token(shape, bytes_per_element=bytes_per_element, sparse=kind, padded=padded) for kind in (False, True)
    )
    ends = 2 * (shape.hidden + shape.head_dim)
    formula = f"{tokens:,} tokens x 2 x ({shape.hidden} + {shape.head_dim}) x {bytes_per_element:g} B"
    head = line("last hidden states and rotary factors", tokens * ends * bytes_per_element, formula)
    if checkpointing == "selective":
        kept = (shape.layers - shape.sparse_layers) * dense + shape.sparse_layers * sparse
        return (line("activations", tokens * kept, f"{tokens:,} tokens x {kept:g} B in {shape.layers} layers"), head)
    inputs = tokens * shape.layers * shape.hidden * bytes_per_element
    formula = f"{tokens:,} tokens x {shape.layers} layers x {shape.hidden} x {bytes_per_element:g} B"
    largest = sparse if shape.sparse_layers else dense
    return (*_checkpointed_lines(inputs, formula, tokens * largest, f"{tokens:,} tokens x {largest:g} B", checkpointing), head)


# ---- logits ----------------------------------------------------------------------------------------------------------


def full_logits_line(tokens: int, vocabulary: int, bytes_per_element: float, copies: int = 1) -> MemoryLine:
    """All logits of ``tokens`` at once, as frameworks without chunks hold them: verl counts 4 + 2 + 1 bytes an element with entropy."""
    require_at_least(0, tokens=tokens)
    require_at_least(1, vocabulary=vocabulary, copies=copies)
    require_positive(bytes_per_element=bytes_per_element)
    formula = f"{tokens:,} tokens x {vocabulary:,} x {bytes_per_element:g} B" + (f" x {copies} copies" if copies > 1 else "")
    return line("logits", tokens * vocabulary * bytes_per_element * copies, formula)


def chunked_logits_lines(
    shape: ModelShape, tokens: int, chunk: int, *, gradient: bool, output_trained: bool = True, compute_bytes: float = 4
) -> tuple[MemoryLine, ...]:
    """Logits of rlpost's trainer (training/logprob.py): two float32 buffers of a chunk; in the backward pass the output weight's gradient.

    ``tokens`` are those that are trained on. ``gradient``: the update, not a pass for logprobs only. ``output_trained``: the output layer
    gets a gradient (not with LoRA). In 16 bits (``compute_bytes`` 2) a chunk's share of that gradient stands beside its float32 sum.
    """
    require_at_least(0, tokens=tokens)
    require_at_least(1, chunk=chunk)
    rows = min(tokens, chunk)
    chunks = line("logits of a chunk", 2 * rows * shape.vocabulary * 4, f"2 x {rows:,} tokens x {shape.vocabulary:,} x 4 B")
    if not (gradient and output_trained):
        return (chunks,)
    each = 4 + (compute_bytes if compute_bytes < 4 else 0)
    formula = f"{shape.vocabulary:,} x {shape.hidden} x {each:g} B"
    return (chunks, line("output weight's gradient", shape.vocabulary * shape.hidden * each, formula))


# ---- the largest micro-batch -----------------------------------------------------------------------------------------


def largest_tokens(bytes_of: Callable[[int], int], available_bytes: float, most: int = 2**24) -> int:
    """Most tokens whose ``bytes_of`` (growing) fits into ``available_bytes``; 0 when none does."""
    require_at_least(0, available_bytes=available_bytes)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(middle) <= available_bytes else (low, middle - 1)
    return low
