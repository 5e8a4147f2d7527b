"""Time: FLOPs, decoding with a long tail, collectives, the phases of a step; each against a sum made by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlpost.planner import collectives, timing
from rlpost.planner.seconds import slowest_share
from rlpost.planner.shapes import load_shape, shape_from_config
from rlpost.types import ConfigError

SHAPE = load_shape("150m")
SPEED = timing.EngineSpeed(bytes_per_second=1e12, flops_per_second=1e15, step_overhead_s=1e-3)
MIXTURE = shape_from_config(
    {"model_type": "mixtral", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
     "intermediate_size": 512, "vocab_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}, "x",
)  # fmt: skip


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def test_a_forward_is_two_flops_a_multiplied_parameter_and_token_and_attention() -> None:
    attention = 2 * SHAPE.layers * SHAPE.query_width * (100**2 + 50**2)
    assert timing.forward_flops(SHAPE, [100, 50]) == pytest.approx(2 * SHAPE.multiplied_parameters * 150 + attention)


def test_shared_prompts_and_untrained_tokens_save_all_but_attention() -> None:
    lengths = [1100] * 8
    whole = timing.forward_flops(SHAPE, lengths)
    shared = timing.forward_flops(SHAPE, lengths, row_tokens=1000 + 8 * 100, logit_tokens=800)
    attention = timing.attention_flops(SHAPE, lengths)
    assert (whole - attention) / (shared - attention) > 4.5  # 8,800 tokens against 1,800
    assert shared > attention


def test_a_token_uses_its_own_experts_only() -> None:
    dense = replace(MIXTURE, experts_per_token=8)
    assert timing.forward_flops(MIXTURE, [64]) < timing.forward_flops(dense, [64])


# ---- decoding --------------------------------------------------------------------------------------------------------


def test_one_sequence_reads_the_weights_and_its_own_kv_for_each_token() -> None:
    kv = 2 * SHAPE.layers * SHAPE.kv_width * 2
    expected = sum((SHAPE.multiplied_parameters * 2 + (10 + step) * kv) / 1e12 + 1e-3 for step in range(5))
    generation = timing.generate(SHAPE, SPEED, 10, [5], slots=4)
    assert generation.seconds == pytest.approx(expected) == generation.floor_s
    assert (generation.steps, generation.tokens) == (5, 5)


def test_two_sequences_share_each_step_until_the_shorter_ends() -> None:
    expected = 0.0
    for step in range(5):
        running = 2 if step < 3 else 1
        expected += float(timing.decode_step_seconds(SHAPE, SPEED, running, running * (10 + step)))
    assert timing.generate(SHAPE, SPEED, 10, [3, 5], slots=2).seconds == pytest.approx(expected)


def test_a_free_slot_is_taken_at_once_and_its_sequence_starts_with_its_own_context() -> None:
    expected = 0.0
    for contexts in ([10, 10], [11, 11], [12, 10], [13, 11]):  # lengths 4 and 2, then another 2 in the second slot
        expected += float(timing.decode_step_seconds(SHAPE, SPEED, 2, sum(contexts)))
    generation = timing.generate(SHAPE, SPEED, 10, [4, 2, 2], slots=2)
    assert generation.seconds == pytest.approx(expected)
    assert (generation.steps, generation.tokens) == (4, 8)


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_no_number_of_slots_or_engines_beats_the_longest_sequence_alone(slots: int) -> None:
    lengths = timing.long_tailed_lengths(64, median=20, percentile_99=200, most=256)
    shares = [slowest_share(lengths, engines) for engines in (1, 2, 8, 64, 1000)]
    floor = timing.generate(SHAPE, SPEED, 16, [max(lengths)], 1).seconds
    seconds = [timing.generate(SHAPE, SPEED, 16, share, slots).seconds for share in shares]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(floor)
    assert sorted(shares[0]) == sorted(lengths) and all(max(share) == max(lengths) for share in shares)


def test_a_long_tail_costs_more_than_equal_lengths_of_the_same_tokens() -> None:
    lengths = timing.long_tailed_lengths(64, median=20, percentile_99=200, most=1000)
    equal = [round(sum(lengths) / 64)] * 64
    assert timing.generate(SHAPE, SPEED, 16, lengths, 64).seconds > 2 * timing.generate(SHAPE, SPEED, 16, equal, 64).seconds


def test_many_sequences_are_bound_by_arithmetic_and_few_by_reading() -> None:
    slow = replace(SPEED, flops_per_second=1e12, step_overhead_s=0)
    one, many = (float(timing.decode_step_seconds(SHAPE, slow, count, 0)) for count in (1, 1000))
    assert one == pytest.approx(SHAPE.multiplied_parameters * 2 / 1e12)
    assert many == pytest.approx(SHAPE.multiplied_parameters * 2 * 1000 / 1e12)


def test_a_batch_reads_more_experts_than_a_token_and_never_more_than_there_are() -> None:
    read = [timing.read_parameters(MIXTURE, count) for count in (1, 2, 8, 10_000)]
    assert read[0] == pytest.approx(MIXTURE.multiplied_parameters)
    assert read == sorted(read)
    assert read[-1] == pytest.approx(replace(MIXTURE, experts_per_token=8).multiplied_parameters)


def test_long_tailed_lengths_have_the_median_and_percentile_asked_for_and_are_the_same_each_time() -> None:
    lengths = timing.long_tailed_lengths(1000, median=100, percentile_99=1000, most=4000)
    assert lengths == timing.long_tailed_lengths(1000, median=100, percentile_99=1000, most=4000)
    assert sorted(lengths)[500] == pytest.approx(100, rel=0.02)
    assert sorted(lengths)[989] == pytest.approx(1000, rel=0.05)
    assert max(timing.long_tailed_lengths(1000, median=100, percentile_99=1000, most=500)) == 500


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather_and_one_rank_sends_nothing() -> None:
    assert collectives.all_reduce_seconds(1e9, 8, 1e11) == pytest.approx(2 * collectives.all_gather_seconds(1e9, 8, 1e11))
    assert collectives.all_gather_seconds(1e9, 8, 1e11) == pytest.approx(7 / 8 * 0.01)
    assert collectives.all_reduce_seconds(1e9, 1, 1e11) == 0
    assert collectives.broadcast_seconds(1e9, 1e11) == pytest.approx(0.01)


def test_sharded_updates_gather_for_each_micro_batch_and_reduce_gradients_once_a_step() -> None:
    again = collectives.fsdp_line(10**9, 8, 1e11, micro_batches=3).seconds
    kept = collectives.fsdp_line(10**9, 8, 1e11, micro_batches=3, reshard_after_forward=False).seconds
    assert again == pytest.approx((3 * 2 * 2e9 + 4e9) * 7 / 8 / 1e11)
    assert kept == pytest.approx((3 * 2e9 + 4e9) * 7 / 8 / 1e11)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: timing.forward_flops(SHAPE, []), "lengths is empty"),
        (lambda: timing.forward_flops(SHAPE, [5, -3]), r"lengths\[1\]=-3"),
        (lambda: timing.forward_flops(SHAPE, [5], logit_tokens=-1), "logit_tokens=-1"),
        (lambda: timing.decode_steps_per_second_limit(0, 1), "weight_bytes=0"),
        (lambda: timing.read_parameters(SHAPE, 0), "sequences=0"),
        (lambda: timing.decode_step_seconds(SHAPE, replace(SPEED, bytes_per_second=-1), 1, 0), "bytes_per_second=-1"),
        (lambda: timing.generate(SHAPE, SPEED, 10, [2.5], 4), r"lengths\[0\]=2.5"),  # type: ignore[list-item]
        (lambda: timing.generate(SHAPE, SPEED, -1, [2], 4), "prompt_tokens=-1"),
        (lambda: timing.generate(SHAPE, SPEED, 1, [2], 0), "slots=0"),
        (lambda: timing.throughput_line(1, 1, 0), "tokens_per_second=0"),
        (lambda: timing.long_tailed_lengths(10, median=100, percentile_99=50, most=10), "percentile_99=50"),
        (lambda: timing.long_tailed_lengths(0, median=100, percentile_99=500, most=10), "count=0"),
        (lambda: collectives.all_reduce_seconds(1, 0, 1), "ranks=0"),
        (lambda: collectives.all_gather_seconds(-1, 2, 1), "size_bytes=-1"),
        (lambda: collectives.broadcast_seconds(1, 0), "bus_bytes_per_second=0"),
        (lambda: collectives.fsdp_line(1, 2, 1, micro_batches=0), "micro_batches=0"),
        (lambda: collectives.tensor_parallel_line(SHAPE, 1, 5, 1, training=True), "tensor_parallel=5"),
        (lambda: collectives.zero_traffic_ratio(-1), "stage=-1"),
    ],
)
def test_impossible_inputs_are_refused_with_what_was_found(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()


def test_infinite_bandwidth_is_refused_too() -> None:
    with pytest.raises(ConfigError, match="inf is impossible"):
        collectives.broadcast_seconds(1, math.inf)
