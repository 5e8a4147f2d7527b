"""The smallest change that makes a plan fit: that of each kind of misfit, that it really fits, and that the cheaper one wins."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rlpost.config.checks import check
from rlpost.config.fields import find_field
from rlpost.config.load import load_config, override_value
from rlpost.config.schema import RunConfig
from rlpost.planner.advice import Advice, propose, with_settings
from rlpost.planner.hardware import find_hardware
from rlpost.planner.memory import kv_bytes_per_token
from rlpost.planner.options import PlanOptions
from rlpost.planner.plan import Plan, make_plan
from rlpost.planner.quantities import GIB, MIB

SMALL = ("config=grpo_qwen", "data.max_prompt_tokens=512", "sampling.max_new_tokens=1024", "schedule.prompts_per_step=16")
"""Four trainer ranks and four engines on 8 GPUs; sequences of 1,536 tokens at most."""
M8B, M32B, M72B = "model.path=Qwen/Qwen3-8B", "model.path=Qwen/Qwen3-32B", "model.path=Qwen/Qwen2.5-72B"
ONE_EACH = ("training.ranks=1", "engine.count=1")
COLOCATED = ("placement.mode=colocated", "schedule.max_staleness=0")
NO_CHECKPOINTING = "training.gradient_checkpointing=false"
ONE_GPU = PlanOptions(nodes=1, gpus=1, gpu="H100-80GB")


LEAST = ("weights.bucket_mib=8", "training.logprob_chunk_tokens=128", "training.micro_batch_tokens=1536")
"""Nothing more to gain from these."""


def gpus(hardware: str = "h100-8", memory: float | None = None) -> PlanOptions:
    return PlanOptions(hardware=hardware, gpu_memory=memory)


BASE = load_config(SMALL).config


def load(*words: str) -> RunConfig:
    """``BASE`` with these overrides, quicker than reading it again. Only for words of known keys, which nothing is to check."""
    fields = {key: (find_field(key), text) for key, _, text in (word.partition("=") for word in words)}
    return with_settings(BASE, {key: override_value(text, field.annotation) for key, (field, text) in fields.items() if field})


def fits(words: tuple[str, ...], options: PlanOptions) -> bool:
    return make_plan(load(*words), options).fits


@cache
def trainer_gib(*words: str, hardware: str = "h100-8") -> float:
    """What a trainer rank has at its peak, whatever its GPU."""
    process = make_plan(load(*words), gpus(hardware, 200)).memory.process("trainer")
    assert process is not None
    return process.peak[1] / GIB


def between(words: tuple[str, ...], too_large: tuple[str, ...], small_enough: tuple[str, ...]) -> PlanOptions:
    """GPUs of 8 on which a rank with the second settings fits and with the first does not."""
    large, small = trainer_gib(*words, *too_large), trainer_gib(*words, *small_enough)
    assert small < large
    return gpus(memory=(large + small) / 2)


CHECKPOINTING = "training.gradient_checkpointing=true"
TWO_RANKS, THREE_RANKS = ("training.ranks=2",), ("training.ranks=3",)
MISFITS: list[tuple[str, tuple[str, ...], PlanOptions | tuple[tuple[str, ...], tuple[str, ...]], tuple[str, ...]]] = [
    ("8b_with_adam_on_one_gpu", (M8B, *ONE_EACH, *COLOCATED), ONE_GPU, ("training.lora.rank=16",)),
    ("8b_with_adam_on_one_of_eight_gpus", (M8B, *ONE_EACH), (TWO_RANKS, THREE_RANKS), THREE_RANKS),
    (
        "rows_of_65536_tokens_keep_too_many_activations",
        (M8B, "training.micro_batch_tokens=65536", NO_CHECKPOINTING),
        (("training.micro_batch_tokens=12288",), ("training.micro_batch_tokens=8192",)),
        ("training.micro_batch_tokens=8192",),
    ),
    ("one_sequence_keeps_too_many_activations", (M8B, *LEAST, NO_CHECKPOINTING), ((), (CHECKPOINTING,)), (CHECKPOINTING,)),
    (
        "weights_and_gradients_are_kept_whole",
        (M8B, *LEAST, "training.reshard_after_forward=false"),
        ((), ("training.reshard_after_forward=true",)),
        ("training.reshard_after_forward=true",),
    ),
    ("buffers_of_a_sync_are_larger_than_what_is_left", (M8B, "weights.bucket_mib=32768"), gpus(), ("weights.bucket_mib=16384",)),
    (
        "all_logits_of_a_row_at_once",
        (M8B, "training.micro_batch_tokens=32768", "training.logprob_chunk_tokens=32768"),
        (("training.logprob_chunk_tokens=16384",), ("training.logprob_chunk_tokens=8192",)),
        ("training.logprob_chunk_tokens=8192",),
    ),
    (
        "an_engines_share_has_no_room_for_its_cache",
        ("engine.gpu_memory_utilization=0.1", "weights.bucket_mib=8"),
        gpus(),
        ("engine.gpu_memory_utilization=0.3",),
    ),
    (
        "one_gpu_does_not_hold_an_engines_weights_and_two_do",
        (M32B, "training.ranks=16", "engine.count=8", "training.lora.rank=16"),
        gpus("h100-32", 60),
        ("engine.tensor_parallel=2", "engine.count=4"),
    ),
    (
        "a_single_engine_takes_a_second_gpu_where_there_is_one",
        (M32B, "training.ranks=16", "engine.count=1", "training.lora.rank=16"),
        gpus("h100-32", 60),
        ("engine.tensor_parallel=2",),
    ),
    (
        "optimizer_states_alone_are_too_large",
        (M8B, *LEAST),
        ((), ("training.optimizer.name=adamw_bf16",)),
        ("training.optimizer.name=adamw_bf16",),
    ),
]


@pytest.mark.parametrize(("words", "machine", "changes"), [case[1:] for case in MISFITS], ids=[case[0] for case in MISFITS])
def test_each_misfit_gets_its_change_and_the_change_fits(words: tuple[str, ...], machine: Any, changes: tuple[str, ...]) -> None:
    options = machine if isinstance(machine, PlanOptions) else between(words, *machine)
    config = load(*words)
    before = copy.deepcopy(config)
    plan = make_plan(config, options)
    assert not plan.fits
    advice = propose(config, options, plan)
    assert config == before, "the user's configuration was changed"
    assert (advice.fits, advice.fits_with_changes, advice.changes) == (False, True, changes)
    assert "a step of" in advice.cost
    changed = load_config([*SMALL, *words, *advice.changes]).config
    check(changed)
    assert make_plan(changed, options).fits


def test_a_colocated_engine_gives_back_no_more_than_the_trainers_context_needs() -> None:
    words, options = (*COLOCATED, "engine.gpu_memory_utilization=0.98"), gpus()
    (change,) = propose(load(*words), options).changes
    key, _, share = change.partition("=")
    assert key == "engine.gpu_memory_utilization"
    assert fits((*words, change), options)
    assert not fits((*words, f"{key}={float(share) + 0.05:g}"), options), "a larger share would do"


def test_colocated_ranks_come_with_their_engines() -> None:
    words = (M8B, *ONE_EACH, *COLOCATED)
    changes = propose(load(*words), gpus()).changes
    assert [change.partition("=")[0] for change in changes] == ["training.ranks", "engine.count"]
    assert fits((*words, *changes), gpus())


def test_of_several_changes_none_can_be_left_out() -> None:
    words = (M8B, *LEAST[:2], NO_CHECKPOINTING, "training.micro_batch_tokens=8192")
    least = ("training.micro_batch_tokens=1536", CHECKPOINTING, "training.optimizer.name=adamw_bf16")
    options = gpus(memory=trainer_gib(*words, *least) + 0.1)
    changes = propose(load(*words), options).changes
    assert len(changes) > 1 and fits((*words, *changes), options)
    for left_out in changes:
        assert not fits((*words, *(change for change in changes if change != left_out)), options), left_out


def test_the_quicker_of_two_changes_that_both_fit_is_proposed() -> None:
    """Smaller micro-batches read the weights more often, checkpointing computes a forward more: which is dearer depends on the rows."""
    words, alternatives = (M8B, NO_CHECKPOINTING, "training.micro_batch_tokens=8192"), (CHECKPOINTING, "training.micro_batch_tokens=2048")
    options = gpus(memory=max(trainer_gib(*words, one) for one in alternatives) + 0.1)
    assert not fits(words, options)
    changes = propose(load(*words), options).changes
    seconds = [make_plan(load(*words, *some), options).step.phase_s("update") for some in (changes, *((one,) for one in alternatives))]
    assert len(changes) == 1 and seconds[0] == min(seconds)


def test_a_change_that_rounds_nothing_comes_before_one_that_does() -> None:
    words, rounded = (M8B, *LEAST, NO_CHECKPOINTING), "training.optimizer.name=adamw_bf16"
    options = gpus(memory=max(trainer_gib(*words, one) for one in (CHECKPOINTING, rounded)) + 0.1)
    assert not fits(words, options)
    assert propose(load(*words), options).changes == (CHECKPOINTING,)


def test_the_whole_model_is_trained_as_long_as_several_changes_allow_it() -> None:
    words = (M8B, *LEAST[:2], NO_CHECKPOINTING, "training.micro_batch_tokens=3072")
    several, adapters = (CHECKPOINTING, "training.optimizer.name=adamw_bf16"), "training.lora.rank=16"
    options = gpus(memory=max(trainer_gib(*words, *several), trainer_gib(*words, adapters)) + 0.1)
    others = ("training.optimizer.name=adamw_8bit", "training.micro_batch_tokens=1536", *several)
    assert not any(fits((*words, one), options) for one in others), "only adapters would be enough alone"
    changes = propose(load(*words), options).changes
    assert len(changes) > 1 and adapters not in changes and fits((*words, *changes), options)


def test_ranks_beyond_the_machine_are_not_proposed() -> None:
    words = (M8B, *ONE_EACH)
    memory = between(words, TWO_RANKS, THREE_RANKS).gpu_memory
    on = {count: PlanOptions(nodes=1, gpus=count, gpu="H100-80GB", gpu_memory=memory) for count in (3, 4)}
    assert propose(load(*words), on[3]).changes != THREE_RANKS
    assert propose(load(*words), on[4]).changes == THREE_RANKS


def test_a_second_gpu_for_an_engine_is_not_taken_from_a_full_machine() -> None:
    words = (M8B, *LEAST, "training.lora.rank=16", "training.ranks=7", "engine.count=1")
    advice = propose(load(*words), gpus(memory=16))
    assert advice.changes == () and "engine lacks" in " ".join(advice.notes) and "trainer lacks" not in " ".join(advice.notes)
    assert propose(load(*words), PlanOptions(nodes=2, gpus=8, gpu="H100-80GB", gpu_memory=16)).changes == ("engine.tensor_parallel=2",)


@pytest.mark.parametrize(("memory", "changes"), [(38, ("engine.tensor_parallel=2", "engine.count=3")), (28, ())])
def test_degrees_that_the_model_cannot_be_cut_by_are_not_proposed(memory: float, changes: tuple[str, ...]) -> None:
    """Nodes of 6: 3 GPUs would hold an engine of 64 heads where 2 do not, and neither 3 nor 6 divide them."""
    words = (M32B, *LEAST, "training.lora.rank=16", "training.ranks=32", "engine.count=6")
    advice = propose(load(*words), PlanOptions(nodes=8, gpus=6, gpu="H100-80GB", gpu_memory=memory))
    assert advice.changes == changes
    if not changes:
        assert "engine lacks" in " ".join(advice.notes) and "trainer lacks" not in " ".join(advice.notes)


def test_a_second_moment_that_bfloat16_cannot_hold_is_not_rounded_to_it() -> None:
    """configuration checks refuse beta2=0.999 with adamw_bf16, which would be proposed without."""
    words, rounded = (M8B, *LEAST), "training.optimizer.name=adamw_bf16"
    advice = propose(load(*words, "training.optimizer.beta2=0.999"), between(words, (), (rounded,)))
    assert not advice.fits and rounded not in advice.changes


def test_what_checks_refuse_is_not_proposed() -> None:
    """Adapters and a pattern of trained parameters contradict each other, and nothing else would be enough."""
    words = (M8B, *ONE_EACH, *COLOCATED, "training.trainable=mlp")
    assert propose(load(*words), ONE_GPU).changes == ()


def test_when_nothing_is_enough_the_number_of_gpus_is_said() -> None:
    advice = propose(load(M72B, *ONE_EACH), PlanOptions(nodes=1, gpus=2, gpu="H100-80GB"))
    assert (advice.fits, advice.fits_with_changes, advice.changes, advice.cost) == (False, False, (), "")
    said = " ".join(advice.notes)
    assert "trainer lacks" in said and "engine lacks" in said
    # 72.7 billion parameters x 16 B over 90 % of 79.6 GiB.
    assert "1163.3 GB" in said and "16 GPUs" in said


def test_offline_pairs_stay_in_one_micro_batch() -> None:
    """Down to the two answers of a pair and no further, and nothing of engines."""
    words = ["config=dpo_tiny", M8B, "placement.device=gpu", "data.max_tokens=4096", "training.ranks=16", "schedule.prompts_per_step=512"]
    words += [CHECKPOINTING, "training.logprob_chunk_tokens=128", "training.micro_batch_tokens=30000"]

    def peak(tokens: int) -> float:
        config = load_config([*words, f"training.micro_batch_tokens={tokens}"]).config
        return make_plan(config, gpus("h100-16", 200)).memory.processes[0].peak[1] / GIB

    between_pairs = (peak(30000 * 3 // 8) + peak(8192)) / 2
    advice = propose(load_config(words).config, gpus("h100-16", between_pairs))
    assert advice.changes == ("training.micro_batch_tokens=8192",)
    less = propose(load_config(words).config, gpus("h100-16", peak(8192) - 0.1)).changes
    assert less and not [change for change in less if change.startswith(("engine.", "placement.", "weights."))]


def test_a_critic_that_does_not_fit_gets_more_ranks() -> None:
    words = (M8B, "algorithm.name=ppo", "algorithm.group_size=1", "training.ranks=4", "engine.count=1")
    (change,) = propose(load(*words), gpus()).changes
    assert change.startswith("algorithm.critic.ranks=")
    assert fits((*words, change), gpus())


# ---- CPU -------------------------------------------------------------------------------------------------------------

CPU_WORDS = ("config=grpo_tiny", "engine.kv_cache_mib=512", "engine.count=2", "training.micro_batch_tokens=65536", "weights.bucket_mib=32")


def on_cpu(gibibytes: float, *words: str) -> tuple[RunConfig, Plan]:
    config = load_config([*CPU_WORDS, *words]).config
    hardware = replace(find_hardware(hardware="cpu-2"), host_memory_bytes=int(gibibytes * GIB))
    return config, make_plan(config, PlanOptions(), hardware=hardware)


def total_gib(plan: Plan) -> float:
    return plan.memory.total_peak_bytes / GIB


@pytest.mark.parametrize("short_of", [0.1, 0.9, 1.4])
def test_on_cpu_only_what_a_cpu_has_is_proposed_and_it_fits(short_of: float) -> None:
    _, ample = on_cpu(64)
    memory = total_gib(ample) - short_of
    config, plan = on_cpu(memory)
    advice = propose(config, PlanOptions(), plan)
    assert not advice.fits and advice.fits_with_changes
    gpu_only = ("engine.gpu_memory_utilization", "engine.tensor_parallel", "placement.mode", "training.ranks")
    assert not [change for change in advice.changes if change.startswith(gpu_only)]
    changed, replanned = on_cpu(memory, *advice.changes)
    check(changed)
    assert replanned.fits


def test_on_cpu_a_cache_too_small_for_one_sequence_grows_to_it() -> None:
    words = ("sampling.max_new_tokens=40000", "engine.kv_cache_mib=1", "training.micro_batch_tokens=65536")
    config, plan = on_cpu(64, *words)
    advice = propose(config, PlanOptions(), plan)
    assert plan.memory.fits and not advice.fits, "vLLM would refuse to start"
    each = kv_bytes_per_token(plan.shape, bytes_per_element=4)
    assert advice.changes == (f"engine.kv_cache_mib={math.ceil(40016 * each / MIB)}",)
    assert on_cpu(64, *words, *advice.changes)[1].fits


def test_on_cpu_without_any_change_that_is_enough_the_memory_is_said() -> None:
    config, plan = on_cpu(0.5)
    advice = propose(config, PlanOptions(), plan)
    assert advice.changes == () and not advice.fits_with_changes
    assert f"{total_gib(plan):.1f} GiB together" in advice.notes[-1] and "cpu-2 has 0.5 GiB" in advice.notes[-1]


# ---- what fits -------------------------------------------------------------------------------------------------------


def advice_of(plan_changes: dict[str, Any] | None = None, *words: str, options: PlanOptions | None = None) -> Advice:
    config, options = load(*words), options or gpus()
    plan = make_plan(config, options)
    return propose(config, options, replace(plan, **(plan_changes or {})))


def test_nothing_is_proposed_when_it_fits() -> None:
    advice = advice_of(None)
    assert (advice.fits, advice.fits_with_changes, advice.changes, advice.cost) == (True, True, (), "")


def test_the_given_plan_and_one_of_its_own_give_the_same() -> None:
    config, options = load(M8B, *ONE_EACH), gpus()
    assert propose(config, options) == propose(config, options, make_plan(config, options))


def noted(advice: Advice, start: str) -> list[str]:
    return [note for note in advice.notes if note.startswith(start)]


def test_a_margin_below_five_percent_is_noted_as_near_and_a_larger_one_is_not() -> None:
    assert noted(advice_of(None, "engine.gpu_memory_utilization=0.97"), "near: engine")
    assert not noted(advice_of(None, "engine.gpu_memory_utilization=0.9"), "near:")


def test_an_engine_that_holds_far_fewer_sequences_than_it_gets_is_noted_with_the_remedy() -> None:
    small = ("engine.gpu_memory_utilization=0.25", "weights.bucket_mib=8")
    advice = advice_of(None, M8B, *small, "schedule.prompts_per_step=128", "data.max_prompt_tokens=4096")
    (note,) = noted(advice, "an engine gets 256 sequences at once")
    assert "engine.max_num_seqs=" in note or "engine.gpu_memory_utilization=" in note
    assert not noted(advice_of(None, M8B), "an engine gets")


def test_rows_far_below_the_largest_are_noted_with_its_tokens() -> None:
    config, options = load("schedule.prompts_per_step=128", "training.micro_batch_tokens=2048"), gpus()
    plan = make_plan(config, options)
    (note,) = noted(propose(config, options, plan), "training.micro_batch_tokens=2048 makes")
    assert f"up to {plan.largest_micro_batch_tokens} tokens" in note
    one_row = replace(plan, largest_micro_batch_tokens=3000)
    assert not noted(propose(config, options, one_row), "training.micro_batch_tokens"), "2,048 of 3,000 is not far below"


def test_one_micro_batch_is_never_too_small() -> None:
    assert not noted(advice_of(None, "training.micro_batch_tokens=131072"), "training.micro_batch_tokens")


def test_a_side_of_a_split_that_waits_most_of_the_step_is_noted_with_the_best_split() -> None:
    config, options = load(M8B), gpus()
    plan = make_plan(config, options)
    assert plan.split is not None
    (note,) = noted(propose(config, options, plan), "trainers idle")
    best = plan.split.best
    assert f"{best.trainer_gpus} trainer and {best.rollout_gpus} rollout" in note
    colocated = advice_of(None, M8B, *COLOCATED, "training.ranks=8", "engine.count=8")
    assert not noted(colocated, "trainers idle") and not noted(colocated, "engines idle")
