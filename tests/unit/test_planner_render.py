"""What a plan says as text and as JSON: the plan's own numbers, where each comes from, and lines that any log can show."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from rlpost.config.checks import check
from rlpost.config.derive import derive
from rlpost.config.load import load_config
from rlpost.planner.advice import Advice
from rlpost.planner.as_json import plan_to_json
from rlpost.planner.coefficients import Calibration
from rlpost.planner.lines import planned_steps, standing_lines, used_coefficients
from rlpost.planner.options import PlanOptions
from rlpost.planner.parts import SplitPlan
from rlpost.planner.plan import Plan, make_plan
from rlpost.planner.quantities import GIB
from rlpost.planner.render import WIDTH, format_plan
from rlpost.planner.roles import PHASES
from rlpost.planner.sections import SHOWN_SPLITS, break_even_words, split_verdict, thinned
from rlpost.planner.split import best_split, split_curve
from rlpost.planner.tables import count, digits, gib, percent

COLOCATED = ("placement.mode=colocated", "training.ranks=8", "engine.count=8", "schedule.max_staleness=0")


def plan_of(*words: str, **options: Any) -> Plan:
    return make_plan(load_config(words).config, PlanOptions(**options))


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Split on GPUs, on CPU, colocated with a mixture that does not fit, several nodes, and offline."""
    return {
        "qwen": plan_of("config=grpo_qwen", hardware="h100-8", price=2.5),
        "tiny": plan_of("config=grpo_tiny"),
        "mixture": plan_of("config=grpo_qwen", *COLOCATED, hardware="h100-8", shape="Qwen/Qwen3-30B-A3B"),
        "nodes": plan_of("config=grpo_qwen_multinode", hardware="h100-64"),
        "offline": plan_of("config=dpo_tiny"),
    }


NAMES = ("qwen", "tiny", "mixture", "nodes", "offline")


def cells(text: str, first: str) -> list[list[str]]:
    """Words of every line that begins with ``first``."""
    return [line.split() for line in text.splitlines() if line.strip().startswith(first)]


def one_line(text: str) -> str:
    return " ".join(text.split())


# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("explain", [False, True])
def test_text_is_ascii_and_no_line_is_wider_than_a_log(plans: dict[str, Plan], name: str, explain: bool) -> None:
    text = format_plan(plans[name], explain=explain)
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_names_and_sources_of_the_user_cannot_steer_the_terminal_or_widen_a_line(plans: dict[str, Plan]) -> None:
    hostile = "r\u00fcn\x1b[31m\r\nfits: yes \u202e" + "x" * 300
    plan = plans["tiny"]
    measured = Calibration(device="cpu").with_values({"train_flops": 2.0, "trainer_base_bytes": 1e9}, hostile)
    plan = replace(plan, name=hostile, shape=replace(plan.shape, name=hostile), calibration=measured, warnings=(hostile,))
    text = format_plan(plan, explain=True)
    assert text.isascii() and all(char.isprintable() or char == "\n" for char in text)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert not any(line.startswith("fits") for line in text.splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_the_first_lines_say_whether_it_fits_how_long_it_takes_and_what_it_costs(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    lines = format_plan(plan).splitlines()
    assert lines[0] == f"plan of {plan.name}"
    assert lines[1].split()[:2] == ["fits", "yes:" if plan.memory.fits else "NO:"]
    assert lines[2].split()[:2] == ["step", digits(plan.step.seconds)]
    assert lines[3].split()[:2] == ["cost", str(planned_steps(plan))]


def test_summary_has_share_tokens_hours_money_and_what_runs_where(plans: dict[str, Plan]) -> None:
    plan = plans["qwen"]
    text = one_line(format_plan(plan))
    assert f"{percent(plan.step.generation_share)} of it generation; {plan.step.tokens_per_second:,.0f} sampled tokens/s" in text
    assert plan.cost.money is not None
    assert f"300 steps in {digits(plan.cost.hours)} h = {digits(plan.cost.gpu_hours)} GPU-hours; {plan.cost.money:,.2f}" in text
    assert "4 x trainer, 4 x engine; engine.count=4 engine.tensor_parallel=1; generation beside training" in text
    assert "h100-8, 8 of 8 GPUs" in text and "grpo, 1,024 samples a step" in text


def test_a_mixture_shows_its_active_parameters_and_a_dense_model_does_not(plans: dict[str, Plan]) -> None:
    shape = plans["mixture"].shape
    assert f"{count(shape.parameters)} parameters, {count(shape.active_parameters)} active" in format_plan(plans["mixture"])
    assert " active" not in format_plan(plans["qwen"])


def test_an_offline_run_has_no_engine_sync_or_generation(plans: dict[str, Plan]) -> None:
    text = format_plan(plans["offline"], explain=True)
    for word in ("sampled tokens/s", "KV cache of an engine", "SYNC", "AGENTS", "SPLIT", "of it generation"):
        assert word not in text


def test_warnings_are_last_and_marked(plans: dict[str, Plan]) -> None:
    text = format_plan(replace(plans["tiny"], warnings=("the first", "the second")))
    assert text.splitlines()[-2:] == ["warning: the first", "warning: the second"]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_memory_table_holds_every_process_and_phase_of_the_plan(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    text = format_plan(plan)
    for process in plan.memory.processes:
        row = [str(process.count), *(gib(process.phase_bytes(phase)) for phase in PHASES), gib(process.peak[1])]
        row += [] if plan.memory.shared else [gib(process.capacity_bytes), gib(process.margin_bytes)]
        assert process.name.split() + row in cells(text, process.name)
    if plan.memory.shared:
        total = plan.memory.total_peak_bytes
        numbers = [gib(total), gib(plan.memory.shared_bytes), gib(plan.memory.shared_bytes - total)]
        assert cells(text, "all processes") == [["all", "processes", *numbers]]


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_a_phase_add_up_to_its_bytes(plans: dict[str, Plan], name: str) -> None:
    for process in plans[name].memory.processes:
        lines = standing_lines(process, plans[name].calibration)
        for phase in PHASES:
            found = sum(line.bytes for line in lines if phase in line.phases)
            assert found == pytest.approx(process.phase_bytes(phase), rel=1e-9)


def test_roles_that_share_a_gpu_are_listed_apart_and_add_up(plans: dict[str, Plan]) -> None:
    plan = plans["mixture"]
    process = plan.memory.process("trainer and engine")
    assert process is not None
    rows = [row for row in cells(format_plan(plan), "of it") if row[2] in ("policy", "engine", "before")]
    assert [row[2] for row in rows] == ["policy", "engine", "before"]
    for column, phase in enumerate(PHASES):
        parts = [float(row[3 if row[2] != "before" else 4 :][column]) for row in rows]
        assert sum(parts) == pytest.approx(process.phase_bytes(phase) / GIB, abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_explain_shows_every_line_and_work_with_its_formula_and_the_plain_text_does_not(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    short, long = format_plan(plan), format_plan(plan, explain=True)
    formulas = [line.formula for process in plan.memory.processes for line in standing_lines(process, plan.calibration)]
    formulas += [work.formula for phase in plan.step.phases for work in phase.works]
    formulas += [work.formula for works in (plan.sync.works.values() if plan.sync else ()) for work in works]
    shown = long.split()
    for formula in formulas:
        assert all(word in shown for word in formula.split()), formula
    assert "formula" in long and "formula" not in short
    assert len(short.splitlines()) < 0.7 * len(long.splitlines())


def test_engine_numbers_stand_in_the_text(plans: dict[str, Plan]) -> None:
    plan = plans["qwen"]
    engine = plan.engine
    assert engine is not None
    text = one_line(format_plan(replace(plan, engine=replace(engine, memory_share=0.6912))))
    for number in (engine.kv_tokens, engine.concurrency_mean, engine.concurrency_longest, engine.wanted):
        assert f"{number:,} " in text
    assert "engine.gpu_memory_utilization=0.70 is enough" in text  # rounded up: what is advised must be enough
    more = one_line(format_plan(replace(plan, engine=replace(engine, memory_share=1.087))))
    assert "would need 1.09 of a GPU" in more and "is enough" not in more


def test_a_kv_cache_that_holds_no_longest_sequence_does_not_fit(plans: dict[str, Plan]) -> None:
    plan = plans["qwen"]
    assert plan.engine is not None and plan.fits
    full = replace(plan, engine=replace(plan.engine, concurrency_longest=0))
    assert not full.fits and plan_to_json(full)["fits"] is False
    assert "NO: an engine's KV cache of" in format_plan(full).splitlines()[1]


def test_what_makes_it_fit_stands_below_the_answer(plans: dict[str, Plan]) -> None:
    checkpointing = ("training.gradient_checkpointing=true",)
    advice = Advice(fits=False, changes=checkpointing, cost="slower", fits_with_changes=True, notes=("mind this",))
    lines = [one_line(line) for line in format_plan(plans["mixture"], advice=advice).splitlines()]
    assert lines[2] == "change smallest one that makes it fit: training.gradient_checkpointing=true (slower)"
    assert "note mind this" in lines
    none = Advice(fits=False, changes=(), cost="", fits_with_changes=False, notes=())
    assert one_line(format_plan(plans["mixture"], advice=none).splitlines()[2]).startswith("change none of those")


# ---- time, sync, split -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_phases_transports_and_prefill_have_the_plans_numbers(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    lines = [one_line(line) for line in format_plan(plan).splitlines()]
    for phase in plan.step.phases:
        assert f"{phase.name} {digits(phase.seconds)} {percent(phase.seconds / plan.step.seconds)} assumed" in lines
    assert any(line.startswith(f"one checkpoint (beside) {digits(plan.step.checkpoint_s)} ") for line in lines)
    for transport, value in (plan.sync.seconds if plan.sync else {}).items():
        mark = " this run's" if plan.sync and transport == plan.sync.chosen else ""
        assert f"{transport} {digits(value)}{mark} assumed" in lines
    for reuse, tokens in (plan.prefill or {}).items():
        assert any(line.startswith(f"{reuse} {tokens:,} ") for line in lines)
    for violation, factor in (plan.imbalance or {}).items():
        assert f"{violation:g} {factor:.3f}" in lines


def test_a_long_curve_is_thinned_around_best_and_present() -> None:
    curve = split_curve(128, lambda gpus: 1 + 100 / gpus, lambda gpus: 60 / gpus)
    split = SplitPlan(curve=curve, best=best_split(curve), present=(28, 100), colocated_s=2.0, floor_s=1.0)
    shown = [one.rollout_gpus for one in thinned(split)]
    best = split.best.rollout_gpus
    assert 8 <= len(shown) <= SHOWN_SPLITS and shown == sorted(set(shown))
    assert {1, best - 1, best, best + 1, 99, 100, 101, 127} <= set(shown)


def test_rows_of_best_and_present_are_marked(plans: dict[str, Plan]) -> None:
    split = plans["qwen"].split
    assert split is not None and split.best.rollout_gpus != split.present[1]
    marked = {
        line.split()[-1]: line.split()[:2] for line in format_plan(plans["qwen"]).splitlines() if line.endswith(("  best", "  present"))
    }
    assert marked == {
        "best": [str(split.best.trainer_gpus), str(split.best.rollout_gpus)],
        "present": [str(gpus) for gpus in split.present],
    }


def settings_of(verdict: str) -> dict[str, str]:
    return dict(word.split("=") for word in verdict.rpartition("set ")[2].partition(",")[0].split())


VERDICTS = {"qwen": ("config=grpo_qwen",), "mixture": ("config=grpo_qwen", *COLOCATED), "nodes": ("config=grpo_qwen_multinode",)}


@pytest.mark.parametrize("name", VERDICTS)
@pytest.mark.parametrize("mode", ["split", "colocated"])
def test_a_run_accepts_what_the_verdict_says_and_uses_all_gpus(plans: dict[str, Plan], name: str, mode: str) -> None:
    plan = plans[name]
    assert plan.split is not None
    split = replace(plan.split, colocated_s=plan.split.best.step_s * (2 if mode == "split" else 0.5))
    if mode == "colocated" and name == "mixture":
        assert split_verdict(plan, split).endswith("the run does so already")
        return
    settings = settings_of(split_verdict(plan, split))
    assert settings["placement.mode"] == mode
    config = load_config([*VERDICTS[name], *(f"{key}={value}" for key, value in settings.items())]).config
    check(config)
    asked = derive(config, device="gpu").totals["GPU"]
    assert asked == plan.split.best.trainer_gpus + plan.split.best.rollout_gpus
    if mode == "split":  # the curve is pipelined
        assert config.schedule.max_staleness > 0 and config.training.ranks == plan.split.best.trainer_gpus


def test_the_verdict_does_not_advise_what_the_run_does_already(plans: dict[str, Plan]) -> None:
    plan = plans["qwen"]
    assert plan.split is not None
    best = replace(plan.split, present=(plan.split.best.trainer_gpus, plan.split.best.rollout_gpus))
    assert split_verdict(plan, best).endswith("the run does so already")


def test_break_even_in_words_and_json_without_infinity(plans: dict[str, Plan]) -> None:
    plan = plans["qwen"]
    assert plan.sync is not None
    for bandwidth, words, pays in (
        (3.2e9, "a delta is quicker below 3.20 GB/s", "below_break_even"),
        (math.inf, "a delta is quicker at every bandwidth", "always"),
        (None, "a delta does not pay at any bandwidth", "never"),
    ):
        sync = replace(plan.sync, break_even_bytes_per_second=bandwidth)
        assert break_even_words(sync) == words and words in one_line(format_plan(replace(plan, sync=sync)))
        found = plan_to_json(replace(plan, sync=sync))["sync"]
        assert (found["delta_pays"], found["break_even_bytes_per_second"]) == (pays, bandwidth if pays == "below_break_even" else None)


def test_packing_of_a_length_file_is_shown(tmp_path: Any) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(length) for length in (3, 5, 7, 2, 6, 9000)))
    plan = plan_of("config=grpo_tiny", lengths=str(path))
    assert plan.packing is not None
    text = format_plan(plan)
    assert f"{plan.packing.packed:.1%}" in text and "16.7% are longer than a micro-batch" in one_line(text)


# ---- what it rests on ------------------------------------------------------------------------------------------------


def test_every_used_coefficient_is_marked_assumed_or_measured_with_its_run(plans: dict[str, Plan]) -> None:
    plan = plans["tiny"]
    text = format_plan(plan)
    assert "calibration=calibration.yaml" in one_line(text)
    used = used_coefficients(plan)
    assert {work.coefficient for phase in plan.step.phases for work in phase.works} <= set(used)
    assert {"trainer_base_bytes", "engine_memory_factor", "checkpoint_bytes", "checkpoint_s", "delta_scan"} <= set(used)
    for name in used:
        assert cells(text, f"{name} ")[0][-1] == "assumed"
    config = load_config(["config=grpo_tiny"]).config
    calibration = Calibration(device="cpu").with_values({"train_flops": 3.25, "engine_base_bytes": 2.0 * GIB}, "runs/first")
    measured = format_plan(replace(make_plan(config, PlanOptions()), calibration=calibration), explain=True)
    assert cells(measured, "train_flops ")[0] == ["train_flops", "3.25", "x", "nominal", "measured", "(from", "runs/first)"]
    assert cells(measured, "engine_base_bytes ")[0] == ["engine_base_bytes", "2.00", "GiB", "measured", "(from", "runs/first)"]
    assert cells(measured, "decode_bytes ")[0][-1] == "assumed"
    work = next(row for row in cells(measured, "update") if "train_flops" in row)
    assert " ".join(work[6:9]) == "measured (from runs/first)"
    assert "sources: runs/first" in measured and "calibration.yaml" not in measured


def test_all_inputs_are_listed_with_what_they_rest_on(plans: dict[str, Plan]) -> None:
    lines = [one_line(line) for line in format_plan(plans["qwen"]).splitlines()]
    assert plans["qwen"].given
    for one in plans["qwen"].given:
        assert f"{one.name} {one.value} {one.basis}" in lines


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_json_is_strict_and_comes_back_equal(plans: dict[str, Plan], name: str) -> None:
    found = plan_to_json(plans[name])
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("name", NAMES)
def test_json_has_the_plans_numbers(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    found = plan_to_json(plan)
    assert found["fits"] == plan.memory.fits and found["time"]["step_s"] == plan.step.seconds
    assert {one["name"]: one["seconds"] for one in found["time"]["phases"]} == {one.name: one.seconds for one in plan.step.phases}
    for phase in found["time"]["phases"]:
        assert sum(work["seconds"] for work in phase["works"]) == pytest.approx(phase["seconds"])
    for process, shown in zip(plan.memory.processes, found["memory"]["processes"], strict=True):
        assert shown["phases_bytes"] == {phase: process.phase_bytes(phase) for phase in PHASES}
        assert shown["margin_bytes"] == (None if plan.memory.shared else process.margin_bytes)
        assert all(line["formula"] and line["basis"] and line["phases"] for line in shown["lines"])
    if plan.sync:
        assert {one["name"]: one["seconds"] for one in found["sync"]["transports"]} == dict(plan.sync.seconds)
        assert [one["name"] for one in found["sync"]["transports"] if one["chosen"]] == [plan.sync.chosen]
    if plan.split:
        assert len(found["split"]["curve"]) == len(plan.split.curve) and found["split"]["best"] in found["split"]["curve"]
    assert found["cost"]["gpu_hours"] == plan.cost.gpu_hours and found["prefill_tokens"] == plan.prefill
    assert [one["name"] for one in found["coefficients"]] == used_coefficients(plan)
