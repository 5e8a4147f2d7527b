"""A whole plan from a configuration: every process, phase, transport and split is there, and settings move what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlpost.config.checks import check
from rlpost.config.load import load_config
from rlpost.planner.coefficients import Calibration, work_seconds
from rlpost.planner.options import PlanOptions, split_words
from rlpost.planner.parts import SyncPlan
from rlpost.planner.plan import Plan, make_plan
from rlpost.types import ConfigError

GIB = 2**30
H100 = PlanOptions(hardware="h100-8")


def plan(*words: str, options: PlanOptions = H100, config: str = "grpo_qwen") -> Plan:
    loaded = load_config([f"config={config}", *words]).config
    check(loaded)
    return make_plan(loaded, options)


def test_the_shipped_config_fits_the_machine_that_it_names() -> None:
    found = plan()
    assert found.memory.fits and not found.warnings
    assert [(one.name, one.count) for one in found.memory.processes] == [("trainer", 4), ("engine", 4)]
    trainer = found.memory.process("trainer")
    assert trainer is not None and trainer.peak[0] == "update"
    # Weights and moments of 4.02 billion parameters over 4 ranks, and in the update gradients and what is gathered.
    assert trainer.phase_bytes("generate") >= found.shape.parameters * 12 / 4
    assert trainer.phase_bytes("update") >= found.shape.parameters * 16 / 4


def test_every_role_of_an_algorithm_is_a_process_of_its_own() -> None:
    found = plan(
        "algorithm.name=ppo", "algorithm.kl_coefficient=0.1", "algorithm.reference=actor", "algorithm.critic.ranks=2",
        "rewards=[{model: org/judge}]", options=PlanOptions(hardware="h100-16"),
    )  # fmt: skip
    assert [(one.name, one.count) for one in found.memory.processes] == [
        ("trainer", 4), ("engine", 4), ("reference", 1), ("critic", 2), ("reward", 1),
    ]  # fmt: skip
    phases = [phase.name for phase in found.step.phases]
    assert {"generate", "reward", "reference", "values", "update", "sync", "wait"} <= set(phases)


def test_colocated_parts_share_gpus_and_a_phase_is_their_sum() -> None:
    found = plan("placement.mode=colocated", "schedule.max_staleness=0", "engine.gpu_memory_utilization=0.6")
    [both] = found.memory.processes
    assert both.roles == ("policy", "engine") and both.count == 4
    parts = {entry.role: entry.bytes for entry in both.table.entries if entry.phase == "update"}
    assert both.table.phase_bytes("update") == sum(parts.values()) and parts["engine"] < parts["policy"]
    assert not found.step.overlap and found.step.seconds == pytest.approx(sum(phase.seconds for phase in found.step.phases))


def test_a_run_ahead_takes_the_longer_side_and_the_sync() -> None:
    found = plan("schedule.max_staleness=1")
    generate, sync = found.step.phase_s("generate"), found.step.phase_s("sync")
    rest = sum(phase.seconds for phase in found.step.phases) - generate - sync
    assert found.step.seconds == pytest.approx(max(generate, rest) + sync)
    assert plan("schedule.max_staleness=0").step.seconds == pytest.approx(generate + rest + sync, rel=1e-6)


def test_offline_runs_have_no_engine_no_sync_and_no_split() -> None:
    found = plan("model.path=Qwen/Qwen3-4B-Base", "placement.device=gpu", "training.ranks=4", config="dpo_tiny")
    assert found.engine is None and found.sync is None and found.split is None and found.prefill is None
    assert found.memory.process("engine") is None and "generate" not in [phase.name for phase in found.step.phases]


@pytest.mark.parametrize(
    ("setting", "saves"),
    [
        ("training.optimizer.name=adamw_8bit", "update"),
        ("training.ranks=8", "update"),
        ("training.lora.rank=16", "generate"),
        ("training.micro_batch_tokens=6000", "update"),
    ],
)
def test_what_is_said_to_save_memory_does(setting: str, saves: str) -> None:
    words = () if "ranks" not in setting else ("schedule.prompts_per_step=128",)
    options = PlanOptions(hardware="h100-16")
    before, after = plan(options=options).memory.process("trainer"), plan(setting, *words, options=options).memory.process("trainer")
    assert before is not None and after is not None
    assert after.phase_bytes(saves) < before.phase_bytes(saves)  # type: ignore[arg-type]


def test_an_update_is_three_products_logits_a_fourth_and_layers_too_when_they_are_computed_again() -> None:
    def amounts(*words: str) -> dict[str, float]:
        found = plan("training.gradient_checkpointing=false", *words)
        [update] = [phase for phase in found.step.phases if phase.name == "update"]
        rate = found.hardware.accelerator.flops_per_second * found.derived.ranks
        return {work.coefficient: work.amount * rate for work in update.works}

    found = plan()
    tokens, answers = found.workload.row_tokens(found.derived.attention == "padded"), found.workload.sampled_tokens
    output = found.shape.vocabulary * found.shape.hidden
    layers = 2.0 * (found.shape.multiplied_parameters - output) * tokens
    kept, again, adapters = amounts(), amounts("training.gradient_checkpointing=true"), amounts("training.lora.rank=16")
    assert kept["train_flops"] == pytest.approx(3 * layers + 4 * 2.0 * output * answers) and "forward_flops" not in kept
    assert again["train_flops"] == pytest.approx(kept["train_flops"]) and again["forward_flops"] == pytest.approx(layers)
    assert again["attention_flops"] == pytest.approx(4 / 3 * kept["attention_flops"])
    assert adapters["train_flops"] == pytest.approx(2 * layers + 3 * 2.0 * output * answers)


def test_a_model_that_is_too_large_does_not_fit_and_the_margin_says_by_how_much() -> None:
    found = plan("model.path=Qwen/Qwen2.5-72B", "engine.tensor_parallel=1")
    assert not found.memory.fits
    assert min(one.margin_bytes for one in found.memory.processes) < -100 * GIB
    assert found.largest_micro_batch_tokens == 0


def test_the_largest_micro_batch_is_the_last_that_fits() -> None:
    largest = plan().largest_micro_batch_tokens
    assert largest > 16384
    # The shipped batch is smaller than that, so it is the limit alone that is looked at.
    assert plan(f"training.micro_batch_tokens={largest}").memory.fits


def test_more_gpus_than_the_machine_has_are_refused_in_words() -> None:
    found = plan("training.ranks=12")
    assert any("asks for 16 GPUs and h100-8 has 8" in warning for warning in found.warnings)


def test_tensor_parallelism_over_nodes_is_warned_of() -> None:
    found = plan("engine.tensor_parallel=16", "model.path=Qwen/Qwen3-32B", options=PlanOptions(hardware="h100-64"))
    assert any("crosses nodes of 8 GPUs" in warning for warning in found.warnings)


def test_the_balance_point_is_on_the_curve_and_the_floor_bounds_generation() -> None:
    split = plan().split
    assert split is not None
    assert split.best in split.curve and split.best.step_s == min(one.step_s for one in split.curve)
    assert all(one.generate_s >= split.floor_s * 0.999 for one in split.curve)
    assert [one.rollout_gpus for one in split.curve] == list(range(1, 8)) and split.present == (4, 4)


def test_a_slower_network_lengthens_the_sync_in_proportion() -> None:
    words = ("training.ranks=8", "engine.count=8")
    fast, slow = (plan(*words, options=PlanOptions(hardware="h100-16", net=net)).sync for net in (50, 5))
    assert fast is not None and slow is not None
    calibration = Calibration(device="gpu")

    def on_the_link(found: SyncPlan) -> float:
        return work_seconds([work for work in found.works["collective"] if work.coefficient == "sync_network"], calibration)

    assert on_the_link(slow) == pytest.approx(10 * on_the_link(fast))
    assert slow.seconds["collective"] - fast.seconds["collective"] == pytest.approx(on_the_link(slow) - on_the_link(fast))
    assert fast.break_even_bytes_per_second == pytest.approx(slow.break_even_bytes_per_second)


def test_a_network_is_no_faster_than_it_is_whatever_one_machine_has_measured() -> None:
    words = ("model.path=embedded:tiny-sort5",)
    alone, apart = (plan(*words, options=PlanOptions(hardware="cpu", net=net)).sync for net in (None, 0.001))
    assert alone is not None and apart is not None
    measured = Calibration(device="cpu").with_values({"sync_collective": 0.1}, "a run on one machine")
    assert work_seconds(apart.works["collective"], measured) > apart.full_gb / 0.001
    assert work_seconds(alone.works["collective"], measured) < work_seconds(alone.works["collective"], Calibration(device="cpu"))


def test_adapters_alone_are_what_a_lora_sync_moves_and_no_delta_of_them() -> None:
    found = plan("training.lora.rank=16").sync
    assert found is not None
    assert found.full_gb < 0.2 and not any("delta" in name for name in found.seconds) and found.break_even_bytes_per_second is None
    assert plan("training.lora.rank=16", "training.lora.sync=merged").sync.full_gb == pytest.approx(8.04, rel=0.01)  # type: ignore[union-attr]


def test_mixtures_have_a_table_of_imbalance_that_begins_at_one() -> None:
    found = plan("model.path=Qwen/Qwen3-30B-A3B", "training.ranks=16", "engine.count=16", options=PlanOptions(hardware="h100-32"))
    assert found.imbalance is not None and found.imbalance[0.0] == pytest.approx(1.0)
    assert sorted(found.imbalance.values()) == list(found.imbalance.values()) and max(found.imbalance.values()) > 1.5
    assert plan().imbalance is None


def test_a_length_file_gives_its_occupancy(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("4\n8\n5\n11\n")
    found = plan(options=PlanOptions(hardware="h100-8", lengths=str(path))).packing
    assert found is not None and found.sequences == 4 and found.padded == pytest.approx(28 / 44) and found.truncated == 0


def test_money_is_gpus_times_hours_times_price_and_none_without_a_price() -> None:
    cost = plan(options=PlanOptions(hardware="h100-8", price=2.5)).cost
    assert cost.money == pytest.approx(cost.gpu_hours * 2.5) and cost.gpu_hours == pytest.approx(8 * cost.hours)
    assert plan().cost.money is None


def test_evaluations_at_both_ends_and_saves_are_in_the_cost() -> None:
    with_both, without = plan(), plan("evaluation.every=0", "data.evaluation=null", "checkpoint.every=0", "checkpoint.at_end=false")
    extra = with_both.cost.hours * 3600 - with_both.step.seconds * 300
    assert extra == pytest.approx(16 * with_both.step.evaluation_s + 16 * with_both.step.checkpoint_s, rel=0.01)
    assert without.cost.hours * 3600 == pytest.approx(without.step.seconds * 300, rel=1e-4)


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_a_gpu_config_without_a_machine_asks_for_one() -> None:
    with pytest.raises(ConfigError, match=r"no machine is named; expected hardware=h100-8"):
        plan(options=PlanOptions())


def test_processes_of_a_cpu_run_share_the_machines_memory() -> None:
    found = plan(config="grpo_tiny", options=PlanOptions())
    assert found.hardware.device == "cpu" and found.memory.shared
    assert found.memory.total_peak_bytes == pytest.approx(sum(one.count * one.peak[1] for one in found.memory.processes))
    assert found.split is None


def test_a_calibration_of_another_device_is_refused_when_named_and_left_out_when_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_text("device: cpu\ncoefficients: {train_flops: {value: 9.0, source: runs/a}}\n")
    with pytest.raises(ConfigError, match=r"was measured on a cpu, and the plan is for h100-8"):
        plan(options=PlanOptions(hardware="h100-8", calibration=str(path)))
    monkeypatch.chdir(tmp_path)
    assert plan(options=H100).calibration.basis("train_flops") == "assumed"
    config = load_config(["config=grpo_tiny"]).config
    assert make_plan(config, PlanOptions()).calibration.basis("train_flops") == "measured (from runs/a)"
    assert make_plan(config, PlanOptions(calibration="none")).calibration.basis("train_flops") == "assumed"


def test_phases_of_measured_coefficients_say_so(tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    names = ("wait_s", "wait_sample_s")
    path.write_text("device: gpu\ncoefficients:\n" + "".join(f"  {name}: {{value: 1.0, source: runs/a}}\n" for name in names))
    found = plan(options=PlanOptions(hardware="h100-8", calibration=str(path)))
    basis = {phase.name: phase.basis for phase in found.step.phases}
    assert basis["wait"] == "measured (from runs/a)" and basis["update"] == "assumed"


# ---- words of the command line ---------------------------------------------------------------------------------------


def test_options_and_settings_are_told_apart() -> None:
    options, others = split_words(["config=grpo_qwen", "hardware=h100-8", "price=2", "training.ranks=2", "seed=3"])
    assert options == PlanOptions(hardware="h100-8", price=2) and others == ["config=grpo_qwen", "training.ranks=2", "seed=3"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hardwere=h100-8", r"unknown option hardwere; did you mean hardware="),
        ("nodes=two", "nodes is 'two'"),
        ("nodes=0", "nodes=0 is impossible"),
        ("changed=2", "changed=2 is no share"),
        ("price=-1", "price=-1 is impossible"),
        ("reuse=all", "expected one of auto, none, turn"),
        ("net=0", "net=0 is impossible"),
    ],
)
def test_slips_of_options_are_named(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_words([word])


def test_adapters_are_counted_where_their_pattern_names_the_module_of_a_layer() -> None:
    both, attention = (
        plan("training.lora.rank=16", f"training.lora.targets='{targets}'") for targets in ("_proj$", r"self_attn\.(q|v)_proj$")
    )
    assert both.sync is not None and attention.sync is not None
    assert 0 < attention.sync.full_gb < both.sync.full_gb / 3
