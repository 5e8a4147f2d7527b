"""A run's records beside the plan of the same work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.load import load_config
from rlpost.planner.calibrate import fit
from rlpost.planner.coefficients import Calibration, work_seconds
from rlpost.planner.footprint import footprint
from rlpost.planner.hardware import find_hardware
from rlpost.planner.measured import MeasuredRun, compare_run, format_comparisons, read_run
from rlpost.types import ConfigError

CPU = find_hardware(hardware="cpu")
ASSUMED = Calibration(device="cpu")


def record(step: int, **values: Any) -> dict[str, Any]:
    base = {
        "step": step, "time/step_s": 3.0, "time/generate_s": 1.0, "time/update_s": 1.5, "time/sync_s": 0.2, "time/wait_s": 0.2,
        "time/checkpoint_s": 0.0, "time/reward_s": 0.1, "rollout/tokens": 256 * 6, "rollout/tokens_max": 7, "rollout/tokens_per_s": 1536.0,
        "rollout/turns_mean": 1.0, "rollout/prompt_tokens": 256 * 13, "rollout/cached_prompt_tokens": 0, "train/row_tokens": 2000,
        "train/micro_batches": 1, "train/tokens": 1536, "memory/trainer_peak_gib": 0.6, "memory/engine_peak_gib": 0.8,
    }  # fmt: skip
    return {**base, **{name.replace("__", "/"): value for name, value in values.items()}}


def run_of(tmp_path: Path, records: list[dict[str, Any]], *words: str) -> MeasuredRun:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.yaml").write_text(load_config(["config=grpo_tiny", *words]).yaml)
    return read_run(tmp_path, CPU, records)


def test_the_first_step_is_left_out_and_the_others_medians_count(tmp_path: Path) -> None:
    steps = [record(1, **{"time__update_s": 90.0}), record(2), record(3), record(4, **{"time__update_s": 9.0})]
    assert run_of(tmp_path, steps).phases["update"] == 1.5


def test_a_single_step_is_used_as_it_is(tmp_path: Path) -> None:
    assert run_of(tmp_path, [record(1, **{"time__update_s": 2.5})]).phases["update"] == 2.5


def test_generation_is_taken_from_its_own_clock_where_others_overlap_it(tmp_path: Path) -> None:
    steps = [record(step, **{"time__generate_s": 0.01}) for step in (1, 2)]
    assert run_of(tmp_path, steps, "schedule.max_staleness=1").phases["generate"] == pytest.approx(1.0)


def test_rare_phases_are_measured_in_the_steps_that_have_them(tmp_path: Path) -> None:
    steps = [record(1), record(2, **{"time__checkpoint_s": 0.0}), record(3, **{"time__checkpoint_s": 0.4}), record(4)]
    assert run_of(tmp_path, steps).phases["checkpoint"] == pytest.approx(0.4)


def test_phases_too_short_to_measure_are_not_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path, [record(step, **{"time__sync_s": 0.001}) for step in (1, 2)])
    assert "sync" not in run.phases and "sync" not in [row.name for row in compare_run(run, ASSUMED)]


def test_an_error_is_the_predictions_share_above_the_measurement(tmp_path: Path) -> None:
    run = run_of(tmp_path, [record(1), record(2)])
    rows = {row.name: row for row in compare_run(run, ASSUMED)}
    predicted = work_seconds(run.works["update"], ASSUMED)
    assert rows["update"].error == pytest.approx(predicted / 1.5 - 1)
    assert rows["step"].measured == pytest.approx(1.0 + 1.5 + 0.2 + 0.2 + 0.1)
    assert rows["memory_trainer"].measured == 0.6 * 2**30 and rows["memory_engine"].measured == 0.8 * 2**30


def test_a_run_that_calibrates_is_predicted_by_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, [record(1), record(2)])
    after = fit([run], ASSUMED)
    for row in compare_run(run, after):
        if row.name != "evaluate":
            assert row.error == pytest.approx(0, abs=0.02), row.name


def test_calibrating_with_one_run_does_not_touch_what_it_never_did(tmp_path: Path) -> None:
    after = fit([run_of(tmp_path, [record(1), record(2)])], ASSUMED)
    assert "forward_flops" not in after.measured and "sync_disk" not in after.measured and "train_flops" in after.measured


def test_peaks_are_the_largest_of_all_records(tmp_path: Path) -> None:
    steps = [record(1, **{"memory__trainer_peak_gib": 0.9}), record(2)]
    assert run_of(tmp_path, steps).peaks == {"trainer": 0.9 * 2**30, "engine": 0.8 * 2**30}


def test_a_directory_that_is_no_run_and_a_run_without_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.yaml; expected a run directory"):
        read_run(tmp_path, CPU, [record(1)])
    with pytest.raises(ConfigError, match=r"has no finished step"):
        run_of(tmp_path, [{"step": 0, "evaluate/reward": 0.5}])


def test_the_table_has_a_row_and_a_signed_error_for_each_figure(tmp_path: Path) -> None:
    rows = compare_run(run_of(tmp_path, [record(1), record(2)]), ASSUMED)
    text = format_comparisons(rows, "assumed speeds").splitlines()
    assert len(text) == len(rows) + 1 and all(line.isascii() for line in text)
    assert all(f"{row.error:+.0%}" in line for row, line in zip(rows, text[1:], strict=True))


def test_offline_runs_are_compared_too(tmp_path: Path) -> None:
    values = {name: value for name, value in record(1).items() if not name.startswith(("rollout", "memory/engine", "time/generate"))}
    (tmp_path / "config.yaml").write_text(load_config(["config=sft_tiny"]).yaml)
    run = read_run(tmp_path, CPU, [values, {**values, "step": 2}])
    assert {"update", "wait"} <= set(run.phases) and "generate" not in run.phases and set(run.peaks) == {"trainer"}
    assert json.dumps([row.error for row in compare_run(run, ASSUMED)])


def sized(tmp_path: Path, name: str, words: tuple[str, ...], base: float, factor: float) -> MeasuredRun:
    """A run whose peaks are exactly ``base`` and ``factor`` times its lines."""
    bare = ASSUMED.with_values({f"{kind}_base_bytes": 0.0 for kind in ("trainer", "engine")}, "")
    run = run_of(tmp_path / name, [record(1), record(2)], *words)
    assert run.job is not None
    table = footprint(run.job.config, run.job.derived, run.job.shape, run.job.hardware, bare, run.job.workload)
    return replace(run, peaks={one.name: base + factor * one.peak[1] for one in table.processes})


def test_base_and_factor_of_memory_are_told_apart_by_runs_of_different_sizes(tmp_path: Path) -> None:
    sizes = ("embedded:tiny-sort5", "25m", "100m", "150m")
    runs = [
        sized(tmp_path, str(number), (f"model.path={name}", f"engine.kv_cache_mib={64 * (number + 1)}"), 5e8, 1.2)
        for number, name in enumerate(sizes)
    ]
    after = fit(runs, ASSUMED)
    for kind in ("trainer", "engine"):
        assert after.value(f"{kind}_base_bytes") == pytest.approx(5e8, rel=0.01)
        assert after.value(f"{kind}_memory_factor") == pytest.approx(1.2, rel=0.01)


def test_runs_of_one_size_give_a_base_alone(tmp_path: Path) -> None:
    after = fit([sized(tmp_path, name, (), 7e8, 1.0) for name in ("a", "b", "c")], ASSUMED)
    assert after.value("trainer_base_bytes") == pytest.approx(7e8) and "trainer_memory_factor" not in after.measured
