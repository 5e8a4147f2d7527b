"""Weight sync, splits of the GPUs, tokens with reuse and packing, money: limits, orders, sums, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlpost.planner import cost, split, sync, timing, tokens
from rlpost.types import ConfigError

GENERATE = split.Scaling(floor_s=20, gpu_seconds=400)
TRAIN = split.Scaling(floor_s=0, gpu_seconds=300)


# ---- sync ------------------------------------------------------------------------------------------------------------


def test_at_the_break_even_bandwidth_both_take_as_long_and_below_it_the_delta_is_quicker() -> None:
    full, delta = 16e9, 0.5e9
    even = sync.break_even_bytes_per_second(full, delta, 2.0)
    for factor, delta_wins in ((0.5, True), (2.0, False)):
        whole = sync.link_line("full", full, even * factor).seconds
        part = sync.link_line("delta", delta, even * factor, overhead_s=2.0).seconds
        assert (part < whole) is delta_wins
    assert sync.link_line("full", full, even).seconds == pytest.approx(sync.link_line("delta", delta, even, 2.0).seconds)


def test_a_free_delta_always_pays_and_one_as_large_as_the_model_is_refused() -> None:
    assert sync.break_even_bytes_per_second(10, 1, 0) == float("inf")
    with pytest.raises(ConfigError, match=r"pays at no bandwidth.*lower the changed share"):
        sync.break_even_bytes_per_second(10, 10, 1)


def test_disk_writes_reads_and_loads() -> None:
    line = sync.disk_line(10e9, 1e9, 2e9, load_s=3)
    assert line.seconds == 10 + 5 + 3
    assert "10 GB / 1 GB/s + the same / 2 GB/s + 3 s" in line.formula


def test_keyframes_lie_between_all_full_and_all_deltas() -> None:
    means = [sync.mean_bytes_with_keyframes(100, 4, every) for every in (1, 2, 25, 10**6)]
    assert means[0] == 100 and means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(4, rel=1e-3)


# ---- split -----------------------------------------------------------------------------------------------------------


def test_a_fit_finds_the_scaling_that_made_the_measurements() -> None:
    fitted = split.fit_scaling([(gpus, GENERATE.seconds(gpus)) for gpus in (1, 2, 4, 8)])
    assert fitted.floor_s == pytest.approx(20)
    assert fitted.gpu_seconds == pytest.approx(400)


def test_the_balance_point_is_where_no_other_split_is_shorter_and_the_sides_cross() -> None:
    curve = split.split_curve(16, GENERATE.seconds, TRAIN.seconds, sync_s=2)
    assert [one.rollout_gpus for one in curve] == list(range(1, 16))
    best = split.best_split(curve)
    assert best.step_s == min(one.step_s for one in curve)
    assert all(one.step_s == max(one.generate_s, one.train_s) + 2 for one in curve)
    before = next(one for one in curve if one.rollout_gpus == best.rollout_gpus - 1)
    after = next(one for one in curve if one.rollout_gpus == best.rollout_gpus + 1)
    assert before.generate_s > before.train_s
    assert after.train_s > after.generate_s


def test_idle_shares_are_what_a_side_waits() -> None:
    one = split.split_curve(8, lambda gpus: 30.0, lambda gpus: 45.0, sync_s=5)[0]
    assert (one.rollout_idle, one.trainer_idle) == (pytest.approx(0.4), pytest.approx(0.1))


def test_engines_of_several_gpus_are_not_cut() -> None:
    assert [one.rollout_gpus for one in split.split_curve(16, GENERATE.seconds, TRAIN.seconds, multiple=4)] == [4, 8, 12]


def test_without_a_floor_and_costs_no_split_beats_colocated_by_arithmetic() -> None:
    """GPU-seconds are the same: a + b on n GPUs is at most the longer side of any split."""
    no_floor = split.Scaling(floor_s=0, gpu_seconds=400)
    verdict = split.choose_placement(16, no_floor.seconds, TRAIN.seconds)
    assert verdict.mode == "colocated"
    assert verdict.colocated_step_s <= verdict.split.step_s


def test_a_long_tail_makes_split_win() -> None:
    tail = split.Scaling(floor_s=60, gpu_seconds=400)
    verdict = split.choose_placement(16, tail.seconds, TRAIN.seconds)
    assert verdict.mode == "split"
    assert verdict.gain == pytest.approx(verdict.colocated_step_s / verdict.split.step_s - 1)
    assert verdict.gain > 0


def test_changing_over_and_syncs_count_on_their_side() -> None:
    base = split.choose_placement(16, GENERATE.seconds, TRAIN.seconds)
    dear = split.choose_placement(16, GENERATE.seconds, TRAIN.seconds, change_over_s=7, colocated_sync_s=1, split_sync_s=3)
    assert dear.colocated_step_s == pytest.approx(base.colocated_step_s + 8)
    assert dear.split.step_s == pytest.approx(base.split.step_s + 3)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_more_reuse_never_prefills_more_and_one_turn_alone_has_nothing_to_reuse() -> None:
    for turns in (1, 2, 20):
        counts = [
            tokens.prefill_tokens(prompt=100, action=30, observation=50, turns=turns, group=4, reuse=reuse) for reuse in tokens.REUSES
        ]
        assert counts == sorted(counts, reverse=True)
    assert tokens.prefill_tokens(prompt=100, action=30, observation=50, turns=1, group=4, reuse="none") == 400
    assert tokens.prefill_tokens(prompt=100, action=30, observation=50, turns=1, group=4, reuse="turn") == 400


def test_prefill_without_reuse_is_the_sum_of_all_histories() -> None:
    history, total = 100, 0
    for _ in range(5):
        total += history
        history += 30 + 50
    assert tokens.prefill_tokens(prompt=100, action=30, observation=50, turns=5, group=3, reuse="none") == 3 * total


def test_packing_keeps_every_sequence_and_overfills_no_row() -> None:
    lengths = [700, 300, 20, 512, 512, 999, 25, 1]
    rows = tokens.pack_lengths(lengths, 1024)
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    assert max(map(sum, rows)) <= 1024
    assert tokens.packed_occupancy(lengths, 1024) == sum(lengths) / (len(rows) * 1024)
    assert tokens.packing_efficiency(lengths, 1024) == 1.0


def test_sorting_and_packing_each_fill_more_than_mixed_batches() -> None:
    lengths = timing.long_tailed_lengths(200, median=50, percentile_99=300, most=500)
    assert tokens.padded_occupancy(lengths, 8) < 0.6
    assert tokens.padded_occupancy(lengths, 8, by_length=True) > 0.8
    assert tokens.packed_occupancy(lengths, 1024) > 0.9
    assert tokens.padded_occupancy([7] * 9, 4) == 1.0


def test_uneven_experts_that_share_a_rank_slow_a_step_less() -> None:
    loads = [150, 50, 100, 100]
    assert tokens.moe_step_inflation(loads, 4, 1.0) == pytest.approx(1.5)
    assert tokens.moe_step_inflation(loads, 2, 1.0) == pytest.approx(1.0)
    assert tokens.moe_step_inflation(loads, 4, 0.5) == pytest.approx(1.25)


# ---- cost ------------------------------------------------------------------------------------------------------------


def test_all_gpus_are_paid_for_the_whole_time_and_without_a_price_there_is_no_money() -> None:
    run = cost.run_cost(gpus=16, step_s=90, steps=200, start_s=600, other_s=1200, price_per_gpu_hour=2.5)
    assert run.hours == pytest.approx(5.5)
    assert run.gpu_hours == pytest.approx(88)
    assert run.money == pytest.approx(220)
    assert "x 2.5" in run.formula
    assert cost.run_cost(gpus=16, step_s=90, steps=200).money is None


# ---- what is refused -------------------------------------------------------------------------------------------------

AGENT = {"prompt": 10, "action": 1, "observation": 1, "turns": 2, "group": 2, "reuse": "none"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sync.full_bytes(-1), "parameters=-1"),
        (lambda: sync.full_bytes(1, 0), "bytes_per_parameter=0"),
        (lambda: sync.delta_bytes(1, 3), "changed_share=3 .*give 0.03"),
        (lambda: sync.delta_bytes(1, 0.1, 0), "bytes_per_change=0"),
        (lambda: sync.mean_bytes_with_keyframes(1, 1, 0), "keyframe_every=0"),
        (lambda: sync.link_line("x", 1, 0), "bytes_per_second=0"),
        (lambda: sync.link_line("x", float("inf"), 1), "size_bytes=inf"),
        (lambda: sync.link_line("x", 1, 1, -1), "overhead_s=-1"),
        (lambda: sync.disk_line(1, 1, 0), "read_bytes_per_second=0"),
        (lambda: sync.break_even_bytes_per_second(2, 1, -1), "delta_overhead_s=-1"),
        (lambda: split.fit_scaling([(4, 10), (4, 12)]), "same number of GPUs"),
        (lambda: split.fit_scaling([]), "0 measurements"),
        (lambda: split.fit_scaling([(0, 10), (4, 12)]), "gpus=0"),
        (lambda: split.fit_scaling([(1, -10), (4, 12)]), "seconds=-10"),
        (lambda: split.fit_scaling([(1, 10), (4, 12)]), "seconds must fall with GPUs"),
        (lambda: split.fit_scaling([(1, 100), (4, 10)]), "no faster than in proportion"),
        (lambda: GENERATE.seconds(0), "gpus=0"),
        (lambda: split.split_curve(1, GENERATE.seconds, TRAIN.seconds), "total_gpus=1.*at least 2"),
        (lambda: split.split_curve(4, GENERATE.seconds, TRAIN.seconds, multiple=4), "at least 5"),
        (lambda: split.split_curve(4, GENERATE.seconds, TRAIN.seconds, sync_s=-1), "sync_s=-1"),
        (lambda: split.split_curve(4, lambda gpus: -1.0, TRAIN.seconds), "generate_s=-1"),
        (lambda: split.colocated_step_seconds(0, GENERATE.seconds, TRAIN.seconds), "total_gpus=0"),
        (lambda: tokens.prefill_tokens(**{**AGENT, "turns": 0}), "turns=0"),  # type: ignore[arg-type]
        (lambda: tokens.prefill_tokens(**{**AGENT, "observation": -1}), "observation=-1"),  # type: ignore[arg-type]
        (lambda: tokens.prefill_tokens(**{**AGENT, "reuse": "group"}), "'group'.*turn\\+group"),  # type: ignore[arg-type]
        (lambda: tokens.prefix_hit_tokens(10, 0), "block=0"),
        (lambda: tokens.shared_prompt_ratio(prompt=0, answer=0, group=1), "prompt_and_answer=0"),
        (lambda: tokens.padded_occupancy([1, 0], 2), r"lengths\[1\]=0"),
        (lambda: tokens.padded_occupancy([1], 0), "rows=0"),
        (lambda: tokens.pack_lengths([10, 2000], 1024), "row_tokens=1024.*2000"),
        (lambda: tokens.max_violation([]), "empty"),
        (lambda: tokens.max_violation([0, 0]), "all 0"),
        (lambda: tokens.max_violation([1, -1]), r"tokens_per_expert\[1\]=-1"),
        (lambda: tokens.moe_step_inflation([1, 1, 1], 2, 0.5), "ranks=2 does not divide experts=3"),
        (lambda: tokens.moe_step_inflation([1, 1], 2, 50), "experts_share=50"),
        (lambda: cost.run_cost(gpus=0, step_s=1, steps=1), "gpus=0"),
        (lambda: cost.run_cost(gpus=1, step_s=-1, steps=1), "step_s=-1"),
        (lambda: cost.run_cost(gpus=1, step_s=1, steps=1, price_per_gpu_hour=-2), "price_per_gpu_hour=-2"),
    ],
)
def test_impossible_inputs_are_refused_with_what_was_found(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()
