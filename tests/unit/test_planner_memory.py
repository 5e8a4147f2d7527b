"""One GPU's memory by part, role and phase: sums, what sharding and sleeping change, what fits, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rlpost.planner import deepspeed, memory, roles
from rlpost.planner.shapes import load_shape, shape_from_config
from rlpost.types import ConfigError

SHAPE = load_shape("150m")
RECIPE = memory.RECIPES["adamw"]
TRAINER = roles.TrainerSetup(ranks=2, recipe=RECIPE, micro_batch_tokens=8192)
ANSWERING: tuple[roles.Phase, ...] = ("logprob",)
UPDATING: tuple[roles.Phase, ...] = ("update",)
DEVICES: tuple[roles.Device, ...] = ("cpu", "gpu")
VALUED: tuple[roles.Role, ...] = ("policy", "critic")
ANSWERING_ROLES: tuple[roles.Role, ...] = ("reference", "reward")
ENGINE = roles.EngineSetup(kv_tokens=100_000, graphs_bytes=2**28)


def entry(table: roles.MemoryTable, phase: roles.Phase) -> roles.PhaseMemory:
    """The first role's part of a phase."""
    return next(one for one in table.entries if one.phase == phase)


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", memory.RECIPES)
def test_states_of_all_ranks_together_are_those_of_one(recipe: str) -> None:
    one, eight = (memory.state_lines(8_000_000, memory.RECIPES[recipe], ranks=ranks, matrix_parameters=6_000_000) for ranks in (1, 8))
    assert 8 * memory.total_bytes(eight) == memory.total_bytes(one)


def test_a_higher_stage_never_takes_more() -> None:
    sizes = [memory.total_bytes(memory.state_lines(10**9, RECIPE, stage=stage, ranks=8)) for stage in memory.STAGES]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 4


def test_muon_has_one_moment_of_the_matrices_and_two_of_all_else() -> None:
    optimizer = memory.state_lines(1000, memory.RECIPES["muon"], matrix_parameters=900)[2]
    assert optimizer.bytes == 900 * 4 + 100 * 8
    assert "900" in optimizer.formula and "100" in optimizer.formula


def test_8_bit_moments_have_two_bytes_and_two_scales_for_128_elements() -> None:
    assert memory.state_lines(128_000, memory.RECIPES["adamw_8bit"])[2].bytes == 128_000 * 2 + 1000 * 2 * 4


def test_every_optimizer_of_the_configuration_has_a_recipe() -> None:
    from rlpost.config.schema import OptimizerConfig

    choices = OptimizerConfig.__dataclass_fields__["name"].metadata["choices"]
    assert set(choices) <= set(memory.RECIPES)


def test_lines_are_named_carry_their_formula_and_are_assumed_until_measured() -> None:
    for one in entry(roles.trainer_table(SHAPE, TRAINER), "update").lines:
        assert one.name and " x " in one.formula and one.basis == "assumed"


def test_host_memory_of_zero_3_is_bound_by_the_loading_processes_or_by_the_states() -> None:
    """DeepSpeed's memory.rst: parameters x max(4 x GPUs a node, 18 / nodes) x 1.5."""
    assert deepspeed.zero3_host_line(10**9, 8, 1).bytes == 48 * 10**9
    assert deepspeed.zero3_host_line(10**9, 2, 1).bytes == 27 * 10**9


def test_zero_2_with_offload_keeps_16_bit_weights_only() -> None:
    assert deepspeed.zero2_line(10**9, 8, offload=True).bytes == 2 * 10**9


# ---- KV cache --------------------------------------------------------------------------------------------------------


def test_kv_of_a_token_shrinks_with_tensor_parallelism_until_each_gpu_has_one_head() -> None:
    shape = shape_from_config(
        {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 2,
         "intermediate_size": 1024, "vocab_size": 1024}, "x",
    )  # fmt: skip
    assert [memory.kv_bytes_per_token(shape, tensor_parallel=degree) for degree in (1, 2, 4)] == [512, 256, 256]


def test_capacity_is_what_the_share_leaves_beside_the_weights_and_concurrency_its_quotient() -> None:
    weights, each = SHAPE.parameters * 2, memory.kv_bytes_per_token(SHAPE)
    capacity = memory.kv_capacity_tokens(SHAPE, gpu_bytes=2 * (weights + 1010 * each), memory_share=0.5, other_bytes=10 * each)
    assert capacity == 1000
    assert memory.concurrency(capacity, 300) == 3


def test_an_engine_whose_share_does_not_hold_the_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise tensor_parallel or the memory share"):
        memory.kv_capacity_tokens(SHAPE, gpu_bytes=SHAPE.parameters * 2, memory_share=0.9)


# ---- roles and phases ------------------------------------------------------------------------------------------------


def names(table: roles.MemoryTable, phase: roles.Phase) -> list[str]:
    return [one.name for entry in table.entries if entry.phase == phase for one in entry.lines]


def test_phases_sum_their_roles_and_the_peak_is_the_largest_phase() -> None:
    trainer, engine = roles.trainer_table(SHAPE, TRAINER), roles.engine_table(SHAPE, ENGINE)
    both = roles.beside(trainer, engine)
    for phase in roles.PHASES:
        assert both.phase_bytes(phase) == trainer.phase_bytes(phase) + engine.phase_bytes(phase) > 0
        assert both.phase_bytes(phase) == sum(one.bytes for entry in both.entries if entry.phase == phase for one in entry.lines)
    assert both.peak == max(((phase, both.phase_bytes(phase)) for phase in roles.PHASES), key=lambda one: one[1])
    assert both.peak[0] == "update"


def test_colocated_parts_make_room_for_one_another() -> None:
    trainer = roles.trainer_table(SHAPE, TRAINER, offloaded=True)
    engine = roles.engine_table(SHAPE, ENGINE, sleeps=True)
    assert trainer.phase_bytes("generate") == 0
    assert names(engine, "update") == ["CUDA graphs and workspace"]
    assert "KV cache" in names(engine, "generate") and "KV cache" not in names(engine, "sync")
    awake = roles.beside(roles.trainer_table(SHAPE, TRAINER), roles.engine_table(SHAPE, ENGINE))
    assert roles.beside(trainer, engine).peak[1] < awake.peak[1]


def test_keeping_gathered_weights_costs_a_whole_copy_in_the_compute_dtype() -> None:
    def gathered(setup: roles.TrainerSetup) -> int:
        update = entry(roles.trainer_table(SHAPE, setup), "update")
        return next(one.bytes for one in update.lines if one.name == "gathered weights")

    assert gathered(replace(TRAINER, reshard_after_forward=False)) == SHAPE.parameters * 2
    assert gathered(TRAINER) < SHAPE.parameters * 2


def test_adapters_have_no_gradient_of_the_model_and_a_frozen_base() -> None:
    update = names(roles.trainer_table(SHAPE, replace(TRAINER, adapters=1_000_000)), "update")
    assert "frozen weights" in update and "adapter optimizer" in update
    assert not {"output weight's gradient", "gradients before they are reduced", "gradients"} & set(update)


def test_a_critic_has_neither_logits_nor_a_part_in_the_sync() -> None:
    critic = roles.trainer_table(SHAPE, TRAINER, role="critic")
    assert "logits of a chunk" not in names(critic, "update") + names(critic, "logprob")
    assert "sync buckets" not in names(critic, "sync")


def test_models_with_a_value_head_have_no_output_layer() -> None:
    """150m is tied, so there is nothing to save; a model that is not loses its output layer."""
    untied = replace(SHAPE, tied=False)
    states = [roles.trainer_table(untied, TRAINER, role=role).phase_bytes("checkpoint") for role in VALUED]
    assert states[0] - states[1] == untied.vocabulary * untied.hidden * 12 // 2  # gradients are in the update only
    frozen = [roles.frozen_table(untied, 1, role=role).phase_bytes("update") for role in ANSWERING_ROLES]
    assert frozen[0] - frozen[1] == untied.vocabulary * untied.hidden * 4


def test_a_reference_is_there_in_its_phases_only() -> None:
    table = roles.frozen_table(SHAPE, 1024, role="reference", ranks=2, bytes_per_parameter=4, phases=ANSWERING)
    assert table.phase_bytes("logprob") > table.phase_bytes("update") == 0
    assert table.entries[0].lines[0].bytes == SHAPE.parameters * 2


def sizes(table: roles.MemoryTable, phase: roles.Phase) -> dict[str, int]:
    return {one.name: one.bytes for one in entry(table, phase).lines}


def test_gradients_are_there_in_the_update_only() -> None:
    """They are set to None after each step (training/worker.py)."""
    table = roles.trainer_table(SHAPE, replace(TRAINER, micro_batch_tokens=64))
    assert sizes(table, "update")["gradients"] == SHAPE.parameters * 4 // 2
    others: tuple[roles.Phase, ...] = ("load", "generate", "logprob", "sync", "checkpoint")
    assert not any("gradients" in names(table, phase) for phase in others)
    assert table.phase_bytes("checkpoint") == SHAPE.parameters * 12 // 2


def test_the_optimizers_step_is_the_peak_of_small_micro_batches_and_has_a_copy_of_the_shard_but_no_activations() -> None:
    small, large = (entry(roles.trainer_table(SHAPE, replace(TRAINER, micro_batch_tokens=size)), "update") for size in (64, 8192))
    assert (small.moment, large.moment) == ("optimizer step", "logits")
    assert [one.name for one in small.lines] == ["weights", "optimizer", "gradients", "optimizer step"]
    assert small.bytes == SHAPE.parameters * (4 + 8 + 4 + 4) // 2
    assert "activations" in [one.name for one in large.lines] and "optimizer step" not in [one.name for one in large.lines]


def test_checkpointed_layers_are_not_computed_again_beside_the_logits() -> None:
    """Nor is there an unreduced gradient of a layer: the logits' chunk is gone when the first layer's backward begins."""
    setup = replace(TRAINER, checkpointing="full", micro_batch_tokens=32768, logprob_chunk_tokens=64)
    layer = entry(roles.trainer_table(SHAPE, setup), "update")
    assert layer.moment == "backward of a layer"
    assert "logits of a chunk" not in [one.name for one in layer.lines]
    logits = entry(roles.trainer_table(SHAPE, replace(setup, micro_batch_tokens=4096, logprob_chunk_tokens=4096)), "update")
    assert logits.moment == "logits"
    assert "one layer's activations" not in [one.name for one in logits.lines]


def test_a_vocabulary_larger_than_the_layers_peaks_where_embedding_and_output_layer_get_their_gradients() -> None:
    wide = replace(SHAPE, vocabulary=262_144, tied=False)
    setup = replace(TRAINER, ranks=1, micro_batch_tokens=8, compute_bytes=4)
    update = entry(roles.trainer_table(wide, setup), "update")
    assert update.moment == "end of the backward pass"
    assert sizes(roles.trainer_table(wide, setup), "update")["gradients of embedding and output layer"] == wide.root_parameters * 8


def test_gradients_of_earlier_micro_batches_are_shards_unless_gathered_weights_are_kept() -> None:
    name = "gradients of earlier micro-batches"
    several = replace(TRAINER, micro_batches=2, ranks=8)
    shards, whole, adapters = (
        sizes(roles.trainer_table(SHAPE, setup), "update")[name]
        for setup in (several, replace(several, reshard_after_forward=False), replace(several, adapters=8000))
    )
    assert (shards, whole, adapters) == (SHAPE.parameters * 4 // 8, SHAPE.parameters * 4, 4000)
    assert name not in sizes(roles.trainer_table(SHAPE, TRAINER), "update")


def test_at_the_start_a_cpu_holds_the_whole_model_that_is_read_beside_its_shards() -> None:
    cpu, gpu = (roles.trainer_table(SHAPE, replace(TRAINER, device=device)) for device in DEVICES)
    assert sizes(cpu, "load") == {"weights": SHAPE.parameters * 2, "model as it is read": SHAPE.parameters * 4}
    assert sizes(gpu, "load") == {"weights": SHAPE.parameters * 2, "largest tensor as it is read": SHAPE.vocabulary * SHAPE.hidden * 4}
    frozen = roles.frozen_table(SHAPE, 16, role="reference", device="cpu")
    assert frozen.peak == ("load", SHAPE.parameters * 8)


def test_a_copy_of_the_initial_weights_is_in_host_memory_but_for_its_logprobs() -> None:
    name = "copy of the initial weights"
    cpu, gpu = (roles.trainer_table(SHAPE, replace(TRAINER, reference="initial", device=device)) for device in DEVICES)
    assert [phase for phase in roles.PHASES if name in names(gpu, phase)] == ["logprob"]
    assert [phase for phase in roles.PHASES if name in names(cpu, phase)] == list(roles.PHASES)
    assert sizes(gpu, "logprob")[name] == SHAPE.parameters * 4 // 2


def test_an_average_of_past_weights_has_what_is_trained_only() -> None:
    full, lora = (
        roles.trainer_table(SHAPE, replace(TRAINER, reference="moving_average", adapters=adapters)) for adapters in (0, 1_000_000)
    )
    assert sizes(full, "checkpoint")["average of past weights"] == SHAPE.parameters * 4 // 2
    assert sizes(lora, "checkpoint")["average of past weights"] == 2_000_000


def test_what_engines_hold_is_kept_in_host_memory() -> None:
    cpu, gpu = (roles.trainer_table(SHAPE, replace(TRAINER, baseline_bytes_per_parameter=4, device=device)) for device in DEVICES)
    assert sizes(cpu, "sync")["what engines hold, for deltas"] == SHAPE.parameters * 4 // 2
    assert not any("what engines hold, for deltas" in names(gpu, phase) for phase in roles.PHASES)


def test_on_a_cpu_malloc_keeps_a_share_of_what_is_used_and_more_with_steps_on_single_tensors() -> None:
    def kept(optimizer: str) -> float:
        table = roles.trainer_table(SHAPE, replace(TRAINER, recipe=memory.RECIPES[optimizer], device="cpu"))
        assert table.without_surplus().phase_bytes("load") == table.phase_bytes("load")  # nothing was freed yet
        return table.phase_bytes("update") / table.without_surplus().phase_bytes("update") - 1

    assert kept("adamw") == pytest.approx(memory.RECIPES["adamw"].surplus, abs=1e-6)
    assert kept("adamw_8bit") > kept("adamw_bf16") > kept("adamw") > 0
    gpu = roles.trainer_table(SHAPE, TRAINER)
    assert gpu == gpu.without_surplus()


def test_a_reference_in_its_own_process_has_logits_and_a_reward_model_has_none() -> None:
    reference, reward = (roles.frozen_table(SHAPE, 4096, role=role) for role in ANSWERING_ROLES)
    assert "logits of a chunk" in names(reference, "logprob")
    assert "logits of a chunk" not in names(reward, "logprob")
    assert sizes(reference, "update") == {"weights": SHAPE.parameters * 4}


def test_logits_need_rows_only_of_tokens_that_are_trained_on() -> None:
    setup = replace(TRAINER, micro_batch_tokens=2048, target_tokens=1500, logprob_chunk_tokens=4096)
    for phase in (*ANSWERING, *UPDATING):
        assert sizes(roles.trainer_table(SHAPE, setup), phase)["logits of a chunk"] == 2 * 1500 * SHAPE.vocabulary * 4


@pytest.mark.parametrize(("sequences", "tokens", "moment"), [(1024, 64, "sampling"), (16, 8192, "prompts")])
def test_an_engine_generates_with_prompts_in_a_layer_or_logits_whichever_is_more(sequences: int, tokens: int, moment: str) -> None:
    table = roles.engine_table(SHAPE, replace(ENGINE, max_num_seqs=sequences, batched_tokens=tokens))
    assert entry(table, "generate").moment == moment
    extra = table.phase_bytes("generate") - table.phase_bytes("load")
    expected = {"sampling": 5 * 1024 * SHAPE.vocabulary * 4, "prompts": 8192 * 3 * (SHAPE.feed_forward + SHAPE.hidden) * 2}
    assert extra == expected[moment]
    cpu = roles.engine_table(SHAPE, replace(ENGINE, max_num_seqs=sequences, batched_tokens=tokens, device="cpu"))
    assert cpu.phase_bytes("generate") - cpu.phase_bytes("load") == (1 + roles.ENGINE_SURPLUS) * extra


Changed = Callable[[Any], roles.TrainerSetup]


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (lambda value: replace(TRAINER, micro_batch_tokens=value), (1024, 2048, 65536)),
        (lambda value: replace(TRAINER, logprob_chunk_tokens=value), (64, 1024, 4096)),
        (lambda value: replace(TRAINER, compute_bytes=value), (2, 4)),
        (lambda value: replace(TRAINER, ranks=value), (8, 2, 1)),
        (lambda value: replace(TRAINER, checkpointing=value), ("offload", "full", "selective")),
    ],
)
def test_the_update_grows_with_tokens_chunks_dtype_fewer_ranks_and_less_checkpointing(change: Changed, values: tuple[Any, ...]) -> None:
    sizes = [roles.trainer_table(SHAPE, change(value)).phase_bytes("update") for value in values]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)


def test_the_largest_micro_batch_is_the_last_that_fits_beside_the_states() -> None:
    def table(tokens: int) -> roles.MemoryTable:
        return roles.trainer_table(SHAPE, replace(TRAINER, micro_batch_tokens=tokens))

    most = roles.largest_micro_batch_tokens(table, 8 * 2**30)
    assert table(most).peak[1] <= 8 * 2**30 < table(most + 1).peak[1]
    assert roles.largest_micro_batch_tokens(table, 2**20) == 0


def test_the_memory_share_of_an_engine_is_its_peak_over_the_gpu() -> None:
    table = roles.engine_table(SHAPE, ENGINE)
    assert roles.engine_memory_share(table, table.phase_bytes("generate") * 2) == 0.5


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: memory.state_lines(-1, RECIPE), "parameters=-1"),
        (lambda: memory.state_lines(10, RECIPE, ranks=0), "ranks=0"),
        (lambda: memory.state_lines(10, RECIPE, stage=4), "stage=4.*0, 1, 2, 3"),
        (lambda: memory.find_recipe("adam"), "'adam'.*adamw_8bit"),
        (lambda: memory.load_line(10, 0), "bytes_per_parameter=0"),
        (lambda: memory.load_line(10, float("nan")), "bytes_per_parameter=nan"),
        (lambda: memory.gpus_for(10, 10, 90), "share=90 .*0.9"),
        (lambda: memory.gpus_for(10, 10, 0), "share=0"),
        (lambda: memory.adapter_parameters(SHAPE.linears, 0), "rank=0"),
        (lambda: memory.chosen_linears(SHAPE, ["query"]), "'query'.*q_proj"),
        (lambda: memory.lora_lines(10, 1, RECIPE, ranks=0), "ranks=0"),
        (lambda: memory.qlora_base_lines(-1, 0), "quantised_parameters=-1"),
        (lambda: memory.kv_line(SHAPE, -1), "tokens=-1"),
        (lambda: memory.kv_bytes_per_token(SHAPE, tensor_parallel=5), "tensor_parallel=5"),
        (lambda: memory.kv_capacity_tokens(SHAPE, gpu_bytes=10**9, memory_share=85), "memory_share=85"),
        (lambda: memory.concurrency(10, 0), "sequence_tokens=0"),
        (lambda: deepspeed.zero3_line(10, 1, 0), "gpus=0"),
        (lambda: deepspeed.zero3_line(10, 1, 2, "cpu"), "'cpu'.*none, optimizer, all"),
        (lambda: deepspeed.zero2_line(-1, 2), "parameters=-1"),
        (lambda: deepspeed.zero3_host_line(1, 8, 0), "nodes=0"),
        (lambda: roles.trainer_table(SHAPE, replace(TRAINER, ranks=0)), "ranks=0"),
        (lambda: roles.trainer_table(SHAPE, replace(TRAINER, micro_batch_tokens=-5)), "micro_batch_tokens=-5"),
        (lambda: roles.trainer_table(SHAPE, replace(TRAINER, micro_batches=0)), "micro_batches=0"),
        (lambda: roles.trainer_table(SHAPE, replace(TRAINER, target_tokens=-1)), "target_tokens=-1"),
        (lambda: roles.engine_table(SHAPE, replace(ENGINE, max_num_seqs=-1)), "max_num_seqs=-1"),
        (lambda: roles.engine_table(SHAPE, replace(ENGINE, batched_tokens=-1)), "batched_tokens=-1"),
        (lambda: roles.frozen_table(SHAPE, 1, role="reward", ranks=0), "ranks=0"),
        (lambda: roles.engine_table(SHAPE, replace(ENGINE, tensor_parallel=5)), "tensor_parallel=5"),
        (lambda: roles.engine_table(SHAPE, replace(ENGINE, kv_tokens=-1)), "kv_tokens=-1"),
        (lambda: roles.engine_memory_share(roles.engine_table(SHAPE, ENGINE), 0), "gpu_bytes=0"),
        (lambda: roles.resident_lines("a3c", 10, RECIPE), "'a3c'.*grpo"),
    ],
)
def test_impossible_inputs_are_refused_with_what_was_found(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        call()
