"""The comparison's table: published figures of algorithms and methods, what rlpost does not train, impossible rows, nonsense lists."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.planner.compare import NOT_TRAINED, Row, compare, format_comparison, fp8_speedup, variants
from rlpost.planner.memory import find_recipe
from rlpost.planner.options import PlanOptions
from rlpost.planner.plan import make_plan
from rlpost.planner.quantities import GB
from rlpost.planner.roles import resident_lines
from rlpost.planner.shapes import load_shape
from rlpost.types import ConfigError

SMALL = ("config=grpo_qwen", "data.max_prompt_tokens=512", "sampling.max_new_tokens=512", "schedule.prompts_per_step=8")
FOUR = ("sft", "dpo", "grpo", "ppo")
LLAMA_8B = "model.path=meta-llama/Llama-3.1-8B"


def load(*words: str) -> RunConfig:
    return load_config([*SMALL, *words]).config


def gpus(hardware: str = "h100-32", price: float | None = None) -> PlanOptions:
    return PlanOptions(hardware=hardware, price=price)


@pytest.fixture(scope="module")
def seven_billion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """7.00 billion parameters."""
    file: Path = tmp_path_factory.mktemp("shape") / "config.json"
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 12008, "vocab_size": 32000}
    file.write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": True, **sizes}))
    return str(file)


def by_name(rows: list[Row]) -> dict[str, Row]:
    assert [row.problem for row in rows] == [None] * len(rows)
    return {row.name: row for row in rows}


def gigabytes(row: Row) -> float:
    return sum(row.state_bytes.values()) / GB


# ---- model states ----------------------------------------------------------------------------------------------------


def test_7b_is_112_gb_in_sft_126_in_dpo_140_in_grpo_and_266_in_ppo(seven_billion: str) -> None:
    """PLANNER.md, section 10: 16 bytes a trained parameter, 2 a parameter of reference, reward model and rollout copy."""
    options = PlanOptions(hardware="h100-32", shape=seven_billion)
    rows = by_name(variants(load("algorithm.kl_coefficient=0.01"), options, algorithms=FOUR))
    assert {name: round(gigabytes(row)) for name, row in rows.items()} == {"sft": 112, "dpo": 126, "grpo": 140, "ppo": 266}
    assert list(rows["ppo"].state_bytes) == ["policy", "critic", "reference", "reward", "engine"]
    parameters = load_shape(seven_billion).parameters
    for name, row in rows.items():
        published = resident_lines(name, parameters, find_recipe("adamw"))
        assert dict(row.state_bytes) == {one.name: one.bytes for one in published}


def test_without_kl_nobody_keeps_a_reference_but_dpo(seven_billion: str) -> None:
    options = PlanOptions(hardware="h100-32", shape=seven_billion)
    rows = by_name(variants(load(), options, algorithms=("dpo", "grpo")))
    assert list(rows["grpo"].state_bytes) == ["policy", "engine"]
    assert round(gigabytes(rows["grpo"])) == 126
    assert list(rows["dpo"].state_bytes) == ["policy", "reference"]


def test_precomputed_reference_and_adapters_spare_dpo_the_reference() -> None:
    config = load_config(["config=dpo_tiny"]).config
    assert config.algorithm.reference == "precomputed"
    (row,) = variants(config, PlanOptions(), algorithms=("dpo",))
    assert list(row.state_bytes) == ["policy"]
    (row,) = variants(load(), gpus(), algorithms=("dpo",), methods=("lora",))
    assert list(row.state_bytes) == ["policy"]


def test_lora_of_8b_is_67_mb_of_adapters_beside_its_float32_base_and_qlora_5_7_gb() -> None:
    """41,943,040 adapters of rank 16 (PLANNER.md, section 14), 16 bytes each; QLoRA's base with embeddings in bfloat16."""
    adapters = 41_943_040 * 16
    rows = by_name(variants(load(LLAMA_8B), gpus(), algorithms=("sft",), methods=("full", "lora", "qlora")))
    assert gigabytes(rows["sft full"]) == pytest.approx(128.5, abs=0.05)
    assert rows["sft lora"].state_bytes["policy"] - adapters == pytest.approx(4 * 8_030_261_248, abs=64)
    assert (rows["sft qlora"].state_bytes["policy"] - adapters) / GB == pytest.approx(5.7, abs=0.05)
    peaks = [rows[f"sft {method}"].peak_gib["trainer"] for method in ("full", "lora", "qlora")]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def test_the_configurations_own_rank_of_adapters_is_kept() -> None:
    ranks = {rank: variants(load(f"training.lora.rank={rank}"), gpus(), methods=("lora",))[0].state_bytes["policy"] for rank in (0, 16, 64)}
    assert ranks[0] == ranks[16] < ranks[64]


# ---- FLOPs -----------------------------------------------------------------------------------------------------------

MULTIPLIED = load_shape("meta-llama/Llama-3.1-8B").multiplied_parameters


@pytest.mark.parametrize(
    ("words", "algorithm", "factor"),
    [
        ((), "sft", 6),
        ((), "dpo", 6 + 2),
        (("schedule.max_staleness=0",), "grpo", 2 + 6),
        (("schedule.max_staleness=0", "algorithm.kl_coefficient=0.1", "algorithm.epochs=3"), "grpo", 2 + 2 + 2 + 6 * 3),
        (("schedule.max_staleness=0", "algorithm.epochs=3"), "dapo", 2 + 2 + 6 * 3),
        (("schedule.max_staleness=0", "algorithm.kl_coefficient=0.1"), "ppo", 2 + 2 + 6 + 8 + 2),
    ],
)
def test_flops_per_token_of_each_algorithm(words: tuple[str, ...], algorithm: str, factor: int) -> None:
    """PLANNER.md, section 10."""
    (row,) = variants(load(LLAMA_8B, *words), gpus(), algorithms=(algorithm,))
    assert row.flops_per_token == factor * MULTIPLIED


def test_frozen_weights_get_no_gradient() -> None:
    (row,) = variants(load(LLAMA_8B), gpus(), algorithms=("sft",), methods=("lora",))
    assert row.flops_per_token == 4 * MULTIPLIED


def test_a_row_of_dpo_costs_two_sequences_and_a_prompt_of_grpo_a_group() -> None:
    """All of the same lengths."""
    config = load("schedule.max_staleness=0", "sampling.max_new_tokens=4096")
    rows = by_name(variants(config, gpus(), algorithms=("sft", "dpo", "grpo")))
    sft, dpo, grpo = (rows[name].flops_per_prompt or 0 for name in ("sft", "dpo", "grpo"))
    # Lengths are quantiles of one distribution, so means of few and of many differ a little.
    assert dpo / sft == pytest.approx(2 * 8 / 6, rel=0.1)
    assert grpo / sft == pytest.approx(8 * 8 / 6, rel=0.1)


def test_only_online_algorithms_sample() -> None:
    rows = by_name(variants(load(), gpus(), algorithms=FOUR))
    assert [rows[name].sampled_tokens == 0 for name in FOUR] == [True, True, False, False]
    assert [rows[name].generation_share == 0 for name in FOUR] == [True, True, False, False]


# ---- what rlpost does not train --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("billions", "speedup"), [(0.1, 1.05), (1, 1.05), (8, 1.28), (70, 1.43), (400, 1.43)])
def test_fp8_is_as_much_quicker_as_was_measured(billions: float, speedup: float) -> None:
    assert fp8_speedup(billions * 1e9) == pytest.approx(speedup)


def test_fp8_between_measured_sizes_lies_between_them() -> None:
    assert 1.28 < fp8_speedup(30e9) < 1.43


def test_fp8_shortens_training_alone_and_leaves_memory() -> None:
    config = load(LLAMA_8B, "schedule.max_staleness=0", "schedule.prompts_per_step=256", "algorithm.group_size=2")
    rows = by_name(variants(config, gpus(price=2), algorithms=("sft", "grpo"), precisions=("bf16", "fp8")))
    for algorithm in ("sft", "grpo"):
        wide, narrow = rows[f"{algorithm} bf16"], rows[f"{algorithm} fp8"]
        assert wide.step_s and narrow.step_s and wide.gpu_hours and narrow.gpu_hours and narrow.money
        assert narrow.peak_gib == wide.peak_gib and narrow.state_bytes == wide.state_bytes
        assert narrow.gpu_hours < wide.gpu_hours and narrow.money == pytest.approx(2 * narrow.gpu_hours)
        saved = wide.gpu_hours - narrow.gpu_hours
        assert saved == pytest.approx((wide.step_s - narrow.step_s) * 300 * (wide.gpus or 0) / 3600), "checkpoints cost what they did"
    assert (rows["sft bf16"].step_s or 0) / (rows["sft fp8"].step_s or 1) == pytest.approx(1.28, abs=0.03)
    assert rows["grpo fp8"].generation_share > rows["grpo bf16"].generation_share  # type: ignore[operator]


def test_rows_that_rlpost_does_not_train_are_marked() -> None:
    rows = variants(load(), gpus(), algorithms=("sft",), methods=("lora", "qlora"), precisions=("bf16", "fp8"))
    assert {row.name: row.trained for row in rows if row.problem is None} == {
        "sft lora bf16": True, "sft lora fp8": False, "sft qlora bf16": False,
    }  # fmt: skip
    table = format_comparison(rows)
    assert "sft qlora bf16 *" in table and "sft lora bf16 *" not in table and NOT_TRAINED in table
    assert NOT_TRAINED not in format_comparison(rows[:1])


@pytest.mark.parametrize(("hardware", "reason"), [("a100-80gb-8", "A100-80GB"), ("cpu-2", "cpu")])
def test_fp8_on_hardware_without_it_is_a_row_with_the_reason(hardware: str, reason: str) -> None:
    words = ("placement.device=cpu",) if hardware.startswith("cpu") else ()
    rows = variants(load(*words), gpus(hardware), algorithms=("sft",), precisions=("bf16", "fp8"))
    assert rows[0].problem is None
    assert rows[1].problem is not None and reason in rows[1].problem and "no FP8" in rows[1].problem


def test_four_bits_and_eight_bits_at_once_are_refused() -> None:
    (row,) = variants(load(), gpus(), methods=("qlora",), precisions=("fp8",))
    assert row.problem is not None and "qlora" in row.problem


# ---- rows and lists --------------------------------------------------------------------------------------------------


def test_what_cannot_be_combined_is_a_row_and_the_others_are_planned() -> None:
    rows = variants(load("training.optimizer.name=muon"), gpus(), methods=("full", "lora"))
    assert rows[0].problem is None
    assert rows[1].problem is not None and "muon" in rows[1].problem
    table = format_comparison(rows)
    assert "lora: impossible: training.optimizer.name=muon" in table


@pytest.mark.parametrize(
    ("lists", "found", "known"),
    [
        ({"algorithms": ("sft", "gppo")}, "gppo", "grpo"),
        ({"methods": ("full", "dora")}, "dora", "qlora"),
        ({"precisions": ("int4",)}, "int4", "fp8"),
        ({"algorithms": ("sft", "")}, "''", "dpo"),
        ({"algorithms": ("sft", "dpo", "sft")}, "sft 2 times", "once"),
    ],
)
def test_lists_of_nonsense_are_refused_with_what_is_known(lists: Mapping[str, tuple[str, ...]], found: str, known: str) -> None:
    with pytest.raises(ConfigError) as refused:
        variants(load(), gpus(), **lists)
    assert found in str(refused.value) and known in str(refused.value)


def test_every_algorithm_can_be_planned_from_one_configuration() -> None:
    from rlpost.config.algorithms import OFFLINE, ONLINE_DEFAULTS

    names = [name for name in (*ONLINE_DEFAULTS, *OFFLINE) if name != "distillation"]
    rows = variants(load("schedule.max_staleness=0"), gpus(), algorithms=names)
    assert [(row.name, row.problem) for row in rows] == [(name, None) for name in names]
    (teacher,) = variants(load(), gpus(), algorithms=("distillation",))
    assert teacher.problem is not None and "algorithm.reference_path" in teacher.problem


def test_an_offline_configuration_gives_online_plans_of_the_same_length() -> None:
    config = load_config(["config=dpo_tiny"]).config
    rows = by_name(variants(config, PlanOptions(), algorithms=("sft", "dpo", "grpo", "ppo")))
    assert rows["grpo"].sampled_tokens and rows["grpo"].sampled_tokens <= 64 * 8 * 24


def test_the_configuration_is_left_as_it_was() -> None:
    config = load()
    before = copy.deepcopy(config)
    variants(config, gpus(), algorithms=("ppo", "dpo"), methods=("lora",), precisions=("bf16",))
    assert config == before


def test_more_gpus_than_the_machine_has_are_said() -> None:
    rows = variants(load(), gpus("h100-8"), algorithms=("grpo", "ppo"))
    assert rows[0].notes == ()
    assert any("asks for 13 GPUs of 8" in note for note in rows[1].notes)
    assert any("critic of the same size on 4 rank(s)" in note for note in rows[1].notes)


def test_other_configurations_stand_side_by_side_with_their_plans_figures() -> None:
    configs = {str(ranks): load(f"training.ranks={ranks}") for ranks in (2, 4)}
    plans = [(name, config, make_plan(config, gpus(price=3))) for name, config in configs.items()]
    rows = compare(plans)
    for row, (name, _, plan) in zip(rows, plans, strict=True):
        assert (row.name, row.fits, row.step_s, row.gpus) == (name, plan.fits, plan.step.seconds, plan.derived.ranks + 4)
        assert row.peak_gib["trainer"] == plan.memory.processes[0].peak[1] / 2**30
        assert (row.gpu_hours, row.money) == (plan.cost.gpu_hours, plan.cost.money)
    assert rows[0].state_bytes == rows[1].state_bytes, "over all GPUs"


def test_rows_are_json_and_the_table_has_money_only_with_a_price() -> None:
    rows = variants(load(), gpus(price=2), algorithms=("sft", "dpo"), precisions=("fp8",))
    assert json.loads(json.dumps([row.to_json() for row in rows]))[0]["state_bytes"] == rows[0].state_bytes
    assert "money" in format_comparison(rows).splitlines()[0]
    free = variants(load(), gpus(), algorithms=("sft",))
    assert "money" not in format_comparison(free).splitlines()[0]


def test_a_table_without_any_possible_row_is_only_reasons() -> None:
    rows = variants(load(), gpus("a100-80gb-8"), algorithms=("sft",), precisions=("fp8",))
    assert format_comparison(rows).startswith("sft fp8: impossible:")
