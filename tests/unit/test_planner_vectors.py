"""Published numbers that the planner must give, each with its source and tolerance; a test is named after its vector.

Tolerances are the rounding of the printed figure. GB is 1e9 bytes, GiB 2^30.
"""

from __future__ import annotations

from typing import Any

import pytest

from rlpost.planner import activations, collectives, deepspeed, memory, roles, split, sync, timing, tokens
from rlpost.planner.quantities import GB, GBIT_BYTES, GIB, MIB
from rlpost.planner.shapes import Linear, ModelShape, shape_from_config


def llama(**sizes: Any) -> ModelShape:
    return shape_from_config({"model_type": "llama", "vocab_size": 128256, **sizes}, "Llama")


LLAMA_8B = llama(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336)
LLAMA_70B = llama(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672)
MIXED = memory.RECIPES["mixed"]


def near(value: float, decimals: int) -> Any:
    """Equal to a printed figure with that many decimals."""
    return pytest.approx(value, abs=0.5 * 10**-decimals)


# ---- weights and states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parameters", "gigabytes"), [(70e9, 140), (7e9, 14), (8e9, 16)])
def test_fp16_weights_of_70b_7b_8b_are_140_14_16_gb(parameters: float, gigabytes: int) -> None:
    assert memory.load_line(int(parameters), 2).bytes == gigabytes * GB


def test_70b_with_16_bytes_is_1120_gb_and_needs_16_gpus_of_80_gb_at_90_percent() -> None:
    states = memory.total_bytes(memory.state_lines(70 * GB, MIXED))
    assert states == 1120 * GB
    assert memory.gpus_for(states, 80 * GB, 0.9) == 16


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_figure_1_of_7_5b_on_64_gpus(stage: int, gigabytes: float) -> None:
    lines = memory.state_lines(7_500_000_000, MIXED, stage=stage, ranks=64)
    assert memory.total_bytes(lines) / GB == near(gigabytes, 1)


def test_deepspeed_2851m_on_8_gpus_zero_3_is_6_09_and_zero_2_15_93_gib() -> None:
    assert deepspeed.zero3_line(2_851_000_000, 32_000_000, 8).bytes / GIB == near(6.09, 2)
    assert deepspeed.zero2_line(2_851_000_000, 8).bytes / GIB == near(15.93, 2)


@pytest.mark.parametrize(("offload", "mebibytes"), [("none", 3291), ("all", 125), ("optimizer", 477)])
def test_deepspeed_t5_large_on_4_gpus(offload: str, mebibytes: int) -> None:
    embedding = 32128 * 1024
    # DeepSpeed prints whole MiB, cut.
    assert int(deepspeed.zero3_line(737_670_000, embedding, 4, offload).bytes / MIB) == mebibytes


def test_bert_base_fp32_loads_413_mib_and_takes_1_61_gib_with_adam() -> None:
    """accelerate prints MB and GB for powers of 1024. 108,310,272 parameters are those of bert-base-cased."""
    assert memory.load_line(108_310_272, 4).bytes / MIB == near(413, 0)
    assert memory.total_bytes(memory.state_lines(108_310_272, memory.RECIPES["adamw"])) / GIB == near(1.61, 2)


def test_8b_with_16_bytes_is_128_5_gb_and_with_18_144_5() -> None:
    assert memory.total_bytes(memory.state_lines(LLAMA_8B.parameters, MIXED)) / GB == near(128.5, 1)
    assert memory.total_bytes(memory.state_lines(LLAMA_8B.parameters, memory.RECIPES["mixed_float32_gradients"])) / GB == near(144.5, 1)


@pytest.mark.parametrize(
    ("recipe", "bytes_each"),
    [("adamw", 16), ("adamw_bf16", 12), ("mixed", 16), ("mixed_float32_gradients", 18), ("pure_bf16", 8)],
)
def test_bytes_per_parameter_of_each_recipe(recipe: str, bytes_each: float) -> None:
    assert memory.find_recipe(recipe).total == bytes_each


@pytest.mark.parametrize(("parameters", "gigabytes"), [(8 * GB, 112), (70 * GB, 980)])
def test_checkpoints_of_8b_and_70b_are_112_and_980_gb(parameters: int, gigabytes: int) -> None:
    assert memory.checkpoint_line(parameters, MIXED).bytes == gigabytes * GB


@pytest.mark.parametrize(("algorithm", "gigabytes"), [("sft", 112), ("dpo", 126), ("grpo", 140), ("ppo", 266)])
def test_resident_states_of_7b_by_algorithm(algorithm: str, gigabytes: int) -> None:
    assert memory.total_bytes(roles.resident_lines(algorithm, 7 * GB, MIXED)) == gigabytes * GB


def test_dpo_with_precomputed_reference_is_as_large_as_sft() -> None:
    assert memory.total_bytes(roles.resident_lines("dpo", 7 * GB, MIXED, reference=False)) == 112 * GB


# ---- adapters --------------------------------------------------------------------------------------------------------


def test_gpt_3_with_rank_4_on_q_and_v_has_18_874_368_adapter_parameters() -> None:
    square = [Linear(name=name, inputs=12288, outputs=12288, count=96) for name in ("q_proj", "v_proj")]
    assert memory.adapter_parameters(square, 4) == 18_874_368


def test_llama_8b_with_rank_16_has_41_943_040_adapter_parameters_and_6_815_744_on_q_and_v() -> None:
    assert memory.adapter_parameters(LLAMA_8B.linears, 16) == 41_943_040
    assert memory.adapter_parameters(memory.chosen_linears(LLAMA_8B, ["q_proj", "v_proj"]), 16) == 6_815_744


def test_lora_8b_rank_16_is_0_67_gb_of_states_on_16_06_gb_of_base_and_syncs_84_mb() -> None:
    adapters = memory.adapter_parameters(LLAMA_8B.linears, 16)
    base, *states = memory.lora_lines(LLAMA_8B.parameters, adapters, MIXED, base_bytes_per_parameter=2)
    assert base.bytes / GB == near(16.06, 2)
    assert memory.total_bytes(states) / GB == near(0.67, 2)
    assert sync.full_bytes(adapters) / 1e6 == near(84, 0)


def test_qlora_8b_is_4_1_gb_all_quantised_and_5_7_with_bf16_embedding_and_head() -> None:
    quantised = sum(one.elements for one in LLAMA_8B.linears)
    assert memory.total_bytes(memory.qlora_base_lines(LLAMA_8B.parameters, 0)) / GB == near(4.1, 1)
    assert memory.total_bytes(memory.qlora_base_lines(quantised, LLAMA_8B.parameters - quantised)) / GB == near(5.7, 1)
    assert pytest.approx(4.127, abs=5e-4) == memory.NF4_BITS


# ---- activations, logits, KV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "gigabytes", "gibibytes"), [("none", 104.15, 97), ("selective", 18.25, 17), ("full", 1.07, 1), ("offload", 0, 0)]
)
def test_8b_activations_of_4096_tokens_are_97_17_1_gib(policy: activations.Checkpointing, gigabytes: float, gibibytes: int) -> None:
    """Published figures of full checkpointing leave out the one layer at work; it is a line of its own here."""
    lines = activations.gpt_activation_lines(tokens=4096, batch=1, hidden=4096, heads=32, layers=32, checkpointing=policy)
    kept = memory.total_bytes(one for one in lines if one.name != "one layer's activations")
    assert kept / GB == near(gigabytes, 2)
    assert kept / GIB == near(gibibytes, 0)


@pytest.mark.parametrize(("sequence_parallel", "factor"), [(False, 10 + 24 / 8), (True, 34 / 8)])
def test_korthikanti_activations_with_tensor_and_sequence_parallelism(sequence_parallel: bool, factor: float) -> None:
    lines = activations.gpt_activation_lines(
        tokens=2048, batch=4, hidden=6144, heads=64, layers=48, tensor_parallel=8, sequence_parallel=sequence_parallel, checkpointing="none"
    )
    scores = 5 * 64 * 2048 / (6144 * 8)
    assert memory.total_bytes(lines) == pytest.approx(2048 * 4 * 6144 * 48 * (factor + scores))


def test_16384_tokens_of_vocabulary_151936_with_7_bytes_are_17_4_gb_of_logits() -> None:
    assert activations.full_logits_line(16384, 151936, 7).bytes / GB == near(17.4, 1)


def test_unsloth_grpo_logits_of_8_samples_are_78_28_gib() -> None:
    assert activations.full_logits_line(8 * 20480, 128256, 2, copies=2).bytes / GIB == near(78.28, 2)


def test_kv_of_a_token_is_131072_bytes_in_llama_8b_and_327680_in_70b() -> None:
    assert memory.kv_bytes_per_token(LLAMA_8B) == 131_072
    assert memory.kv_bytes_per_token(LLAMA_70B) == 327_680


def test_kv_of_20k_tokens_of_8b_is_2_6_gb() -> None:
    assert memory.kv_line(LLAMA_8B, 20_000).bytes / GB == near(2.6, 1)


# ---- time ------------------------------------------------------------------------------------------------------------


def test_512_rollouts_of_8k_at_6300_tokens_a_second_are_11_1_min_and_32k_at_1200_3_9_h() -> None:
    assert timing.throughput_line(512, 8192, 6300).seconds / 60 == near(11.1, 1)
    assert timing.throughput_line(512, 32768, 1200).seconds / 3600 == near(3.9, 1)


def test_h100_decodes_16_gb_of_weights_at_most_209_times_a_second() -> None:
    assert timing.decode_steps_per_second_limit(16 * GB, 3.35e12) == near(209, 0)


def test_tensor_parallel_8_of_70b_is_320_all_reduces_and_0_084_s_at_450_gb_per_second() -> None:
    fast, slow = (collectives.tensor_parallel_line(LLAMA_70B, 4096, 8, rate * 1e9, training=True) for rate in (450, 50))
    assert "320 all-reduces x 67.1 MB" in fast.formula
    assert fast.seconds == near(0.084, 3)
    assert slow.seconds == near(0.75, 2)
    assert slow.seconds * 50 == near(37.6, 1)  # GB on the wire


def test_full_recompute_makes_four_all_reduces_a_layer_six() -> None:
    plain, again = (
        collectives.tensor_parallel_line(LLAMA_70B, 64, 8, 1e9, training=True, full_recompute=flag).seconds for flag in (False, True)
    )
    assert again / plain == pytest.approx(6 / 4)


def test_zero_3_sends_half_again_as_much_as_replicated_weights() -> None:
    assert collectives.zero_traffic_ratio(3) / collectives.zero_traffic_ratio(2) == 1.5


# ---- sync ------------------------------------------------------------------------------------------------------------


def test_810_gb_at_100_gb_per_second_take_8_1_s_and_14_gb_at_50_0_28() -> None:
    assert sync.link_line("broadcast", 810 * GB, 100 * GB).seconds == near(8.1, 1)
    assert sync.link_line("broadcast", 14 * GB, 50 * GB).seconds == near(0.28, 2)


@pytest.mark.parametrize(("changed", "megabytes"), [(0.0062, 22), (0.01, 36)])
def test_delta_of_596m_with_6_bytes_a_change_is_22_to_36_mb(changed: float, megabytes: int) -> None:
    assert sync.delta_bytes(596_000_000, changed, sync.RAW_DELTA_BYTES) / 1e6 == near(megabytes, 0)


def test_one_full_sync_in_25_of_1024_gib_with_deltas_of_20_3_gib_saves_94_1_percent() -> None:
    assert 1 - sync.mean_bytes_with_keyframes(1024, 20.3, 25) / 1024 == near(0.941, 3)


@pytest.mark.parametrize(("full_s", "gigabits"), [(1.46, 28.9), (1.74, 34.4)])
def test_nemo_delta_over_s3_beats_400_gbit_below_28_9_to_34_4(full_s: float, gigabits: float) -> None:
    full = 400 * GBIT_BYTES * full_s
    assert sync.break_even_bytes_per_second(full, 0, 20.23) / GBIT_BYTES == near(gigabits, 1)


# ---- split -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "floor", "share"), [((247, 458), 177, 0.71), ((162, 501), 49, 0.30)])
def test_verl_tail_floor_of_a_quarter_of_the_pool(seconds: tuple[float, float], floor: float, share: float) -> None:
    fitted = split.fit_scaling([(1, seconds[0]), (0.25, seconds[1])])
    assert fitted.floor_s == near(floor, 0)
    assert fitted.floor_s / seconds[0] == pytest.approx(share, abs=0.01)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reuse", "expected"), [("none", 1_536_000), ("turn", 92_000), ("turn+group", 78_000)])
def test_agents_of_20_turns_prefill_1536000_92000_78000_tokens(reuse: tokens.Reuse, expected: int) -> None:
    assert tokens.prefill_tokens(prompt=2000, action=300, observation=500, turns=20, group=8, reuse=reuse) == expected


@pytest.mark.parametrize(
    ("prompt", "answer", "ratio", "decimals"),
    [(1000, 100, 4.89, 2), (16000, 64, 7.8, 1), (16000, 128, 7.6, 1), (16000, 1000, 5.7, 1), (8000, 4000, 2.4, 1)],
)
def test_shared_prompt_ratio_of_dualkv_and_castform(prompt: int, answer: int, ratio: float, decimals: int) -> None:
    assert tokens.shared_prompt_ratio(prompt=prompt, answer=answer, group=8) == near(ratio, decimals)


def test_a_10k_prompt_with_10_answers_of_1k_is_82_percent_duplicate() -> None:
    assert 1 - 1 / tokens.shared_prompt_ratio(prompt=10_000, answer=1000, group=10) == near(0.82, 2)


def test_a_prompt_shorter_than_a_hybrid_block_of_528_tokens_hits_nothing() -> None:
    assert tokens.prefix_hit_tokens(500, 528) == 0
    assert tokens.prefix_hit_tokens(500, 16) == 496
    assert tokens.prefix_hit_tokens(512, 16) == 496  # the last token is always computed


def test_hugging_face_lengths_4_8_5_11_fill_63_6_percent_and_gain_1_57() -> None:
    occupancy = tokens.padded_occupancy([4, 8, 5, 11], 4)
    assert occupancy == near(0.636, 3)
    assert 1 / occupancy == near(1.57, 2)


@pytest.mark.parametrize(
    ("loads", "violation"),
    [([100] * 8, 0), ([800] + [0] * 7, 7), ([150] + [650 / 7] * 7, 0.5)],
    ids=["even", "all on one", "one at 150 %"],
)
def test_max_violation_of_even_collapsed_and_one_hot_experts(loads: list[float], violation: float) -> None:
    assert tokens.max_violation(loads) == pytest.approx(violation, abs=1e-9)
