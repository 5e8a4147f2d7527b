"""Seconds of generation and FLOPs of training.

Decoding reads all weights and the KV of every running sequence for each token, so memory bandwidth bounds it; prefill and training are
bound by arithmetic. All rates are what is *reached* (a spec sheet's times a share), of all GPUs that take part. FLOPs: 2 a multiplied
parameter and token in the forward, 4 in the backward (Kaplan et al. 2020, section 2.1; Narayanan et al. 2021, appendix), and attention.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from rlpost.planner.memory import kv_bytes_per_token
from rlpost.planner.quantities import TimeLine, require_at_least, require_positive
from rlpost.planner.shapes import ModelShape
from rlpost.types import ConfigError

# ---- arithmetic ------------------------------------------------------------------------------------------------------


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise ConfigError unless there are lengths and all are whole numbers above 0."""
    if not len(lengths):
        raise ConfigError("lengths is empty; expected the tokens of at least one sequence")
    for index, length in enumerate(lengths):
        if length != int(length) or length < 1:
            raise ConfigError(f"lengths[{index}]={length} is impossible; expected a whole number of tokens above 0: correct the list")


def attention_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Causal scores and their product with the values in a forward: 2 x layers x query width x length^2 for each sequence."""
    check_lengths(lengths)
    return 2.0 * shape.layers * shape.query_width * float(np.square(np.asarray(lengths, np.float64)).sum())


def forward_flops(shape: ModelShape, lengths: Sequence[int], *, row_tokens: int | None = None, logit_tokens: int | None = None) -> float:
    """One forward over sequences of these lengths.

    ``row_tokens``: tokens outside attention when prompts of a group are computed once (null: all). ``logit_tokens``: those whose
    logits are computed (null: all).
    """
    attention, every = attention_flops(shape, lengths), sum(lengths)
    tokens, logits = every if row_tokens is None else row_tokens, every if logit_tokens is None else logit_tokens
    require_at_least(0, row_tokens=tokens, logit_tokens=logits)
    output = shape.vocabulary * shape.hidden
    return 2.0 * (shape.multiplied_parameters - output) * tokens + 2.0 * output * logits + attention


# ---- decoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineSpeed:
    """What one engine (all its GPUs together) reaches."""

    bytes_per_second: float
    """Memory bandwidth."""
    flops_per_second: float
    step_overhead_s: float = 0.0
    """Of a decoding step: scheduler, kernel launches."""
    weight_bytes_per_parameter: float = 2
    kv_bytes_per_element: float = 2


def decode_steps_per_second_limit(weight_bytes: float, bytes_per_second: float) -> float:
    """Steps a second when nothing but the weights is read: the limit of a single sequence."""
    require_positive(weight_bytes=weight_bytes, bytes_per_second=bytes_per_second)
    return bytes_per_second / weight_bytes


def read_parameters(shape: ModelShape, sequences: int) -> float:
    """Parameters that one decoding step reads: of the experts those that any of ``sequences`` is expected to go to (even routing)."""
    require_at_least(1, sequences=sequences)
    if not shape.sparse_layers:
        return float(shape.multiplied_parameters)
    expert = 3 * shape.hidden * shape.expert_feed_forward * shape.sparse_layers
    touched = shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** sequences)
    return shape.multiplied_parameters + expert * (touched - shape.experts_per_token)


def decode_bounds(
    shape: ModelShape, speed: EngineSpeed, sequences: int, context_tokens: np.ndarray | float
) -> tuple[float, np.ndarray, np.ndarray]:
    """Of decoding steps of ``sequences`` that hold ``context_tokens`` together: seconds of reading weights (each step's), of reading
    KV, and of arithmetic.
    """
    require_positive(bytes_per_second=speed.bytes_per_second, flops_per_second=speed.flops_per_second)
    weights = read_parameters(shape, sequences) * speed.weight_bytes_per_parameter / speed.bytes_per_second
    contexts = np.asarray(context_tokens, np.float64)
    kept = contexts * kv_bytes_per_token(shape, bytes_per_element=speed.kv_bytes_per_element) / speed.bytes_per_second
    flops = 2.0 * shape.multiplied_parameters * sequences + 4.0 * shape.layers * shape.query_width * contexts
    return weights, kept, flops / speed.flops_per_second


def decode_step_seconds(shape: ModelShape, speed: EngineSpeed, sequences: int, context_tokens: np.ndarray | float) -> np.ndarray:
    """Seconds of such steps: reading or arithmetic, whichever takes longer."""
    weights, kept, arithmetic = decode_bounds(shape, speed, sequences, context_tokens)
    return np.maximum(weights + kept, arithmetic) + speed.step_overhead_s


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What one engine's work on a batch comes to. ``floor_s``: the longest sequence alone, which no further engine shortens."""

    seconds: float
    floor_s: float
    steps: int
    tokens: int
    weights_s: float = 0.0
    """Of all steps, reading weights alone; ``kv_s`` KV, ``arithmetic_s`` arithmetic. ``seconds`` has the longer of the two of each step."""
    kv_s: float = 0.0
    arithmetic_s: float = 0.0


def generate(shape: ModelShape, speed: EngineSpeed, prompt_tokens: int, lengths: Sequence[int], slots: int) -> Generation:
    """One engine samples sequences of ``lengths`` new tokens after prompts of ``prompt_tokens``, at most ``slots`` at once.

    Continuous batching: a finished sequence's place goes to the next in order at once. Prefill is not in it.
    """
    check_lengths(lengths)
    require_at_least(1, slots=slots)
    require_at_least(0, prompt_tokens=prompt_tokens)
    waiting, running = list(reversed(lengths)), list[tuple[int, int]]()  # running: step at which it ends, its length
    now, seconds, weights_s, kv_s, arithmetic_s, contexts = 0, 0.0, 0.0, 0.0, 0.0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            length = waiting.pop()
            heapq.heappush(running, (now + length, length))
            contexts += prompt_tokens
        count, steps = len(running), running[0][0] - now
        weights, kept, arithmetic = decode_bounds(shape, speed, count, contexts + count * np.arange(steps))
        seconds += float(np.maximum(weights + kept, arithmetic).sum()) + steps * speed.step_overhead_s
        weights_s, kv_s, arithmetic_s = weights_s + steps * weights, kv_s + float(kept.sum()), arithmetic_s + float(arithmetic.sum())
        contexts += count * steps
        now += steps
        while running and running[0][0] == now:
            contexts -= prompt_tokens + heapq.heappop(running)[1]
    floor = float(decode_step_seconds(shape, speed, 1, prompt_tokens + np.arange(max(lengths))).sum())
    return Generation(
        seconds=seconds, floor_s=floor, steps=now, tokens=sum(lengths), weights_s=weights_s, kv_s=kv_s, arithmetic_s=arithmetic_s
    )  # fmt: skip


def throughput_line(sequences: int, tokens_each: int, tokens_per_second: float) -> TimeLine:
    """Generation by a throughput that was measured."""
    require_at_least(0, sequences=sequences, tokens_each=tokens_each)
    require_positive(tokens_per_second=tokens_per_second)
    formula = f"{sequences:,} sequences x {tokens_each:,} tokens / {tokens_per_second:g} tokens/s"
    return TimeLine(name="generate", seconds=sequences * tokens_each / tokens_per_second, formula=formula)


def long_tailed_lengths(count: int, *, median: float, percentile_99: float, most: int) -> list[int]:
    """``count`` lengths of a lognormal distribution, at its quantiles (so always the same), cut at ``most`` new tokens.

    In no order that matters: short and long are mixed, as engines get them.
    """
    require_at_least(1, count=count, median=median, most=most)
    if not percentile_99 >= median:
        raise ConfigError(f"percentile_99={percentile_99:g} is below median={median:g}; expected at least the median: change percentile_99")
    normal = NormalDist()
    deviation = math.log(percentile_99 / median) / normal.inv_cdf(0.99)
    quantiles = [(index + 0.5) / count for index in range(count)]
    lengths = [min(most, max(1, round(median * math.exp(deviation * normal.inv_cdf(quantile))))) for quantile in quantiles]
    return [lengths[int(index)] for index in np.random.default_rng(0).permutation(count)]
