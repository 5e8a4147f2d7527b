"""Coefficients from measurements: what is fitted comes back, and what nobody measured stays assumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlpost.planner.calibrate import GROUPS, fit, fit_group, non_negative_least_squares, read_sync_bench
from rlpost.planner.coefficients import (
    COEFFICIENTS,
    Calibration,
    Work,
    read_calibration,
    work_seconds,
    write_calibration,
)
from rlpost.planner.hardware import find_hardware
from rlpost.planner.measured import MeasuredRun
from rlpost.types import ConfigError

ASSUMED = Calibration(device="cpu")
UPDATE = ("train_flops", "train_layer_s", "optimizer_bytes", "update_s", "collectives")


def works(**amounts: float) -> tuple[Work, ...]:
    return tuple(Work(phase="update", coefficient=name, amount=amount, formula="") for name, amount in amounts.items())


def run_of(amounts: tuple[Work, ...], seconds: float, source: str = "run") -> MeasuredRun:
    return MeasuredRun(source=source, phases={"update": seconds}, works={"update": amounts}, peaks={}, job=None, device="cpu")


def test_every_coefficient_of_time_is_fitted_in_exactly_one_group() -> None:
    timed = [name for name in COEFFICIENTS if not name.startswith(("trainer_", "engine_"))]
    assert sorted(name for group in GROUPS for name in group) == sorted(timed)


def test_known_coefficients_come_back_from_runs_of_different_work() -> None:
    """Twice and four times what is assumed."""
    known = {"train_flops": 2 * ASSUMED.value("train_flops"), "train_layer_s": 4 * ASSUMED.value("train_layer_s")}
    truth = ASSUMED.with_values(known, "x")
    amounts = [works(train_flops=f, train_layer_s=n) for f, n in ((1.0, 10.0), (4.0, 80.0), (0.2, 400.0), (9.0, 1000.0), (0.1, 900.0))]
    rows = [(one, work_seconds(one, truth)) for one in amounts]
    found = fit_group(UPDATE, rows, ASSUMED)
    for row, seconds in rows:
        assert work_seconds(row, ASSUMED.with_values(found, "runs")) == pytest.approx(seconds, rel=0.03)
    assert found == pytest.approx(known, rel=0.05)


def test_two_coefficients_that_no_run_tells_apart_keep_the_proportion_that_is_assumed() -> None:
    rows = [(works(train_flops=n, update_s=n), 3.0 * n) for n in (1.0, 2.0, 4.0)]
    found = fit_group(UPDATE, rows, ASSUMED)
    assert found["train_flops"] + found["update_s"] == pytest.approx(3.0, rel=0.01)
    assert found["train_flops"] / found["update_s"] == pytest.approx(ASSUMED.value("train_flops") / ASSUMED.value("update_s"), rel=0.3)


def test_one_run_scales_all_of_a_phase_so_that_it_is_met_exactly() -> None:
    only = works(train_flops=2.0, train_layer_s=30.0, update_s=1.0)
    found = fit_group(UPDATE, [(only, 7.0)], ASSUMED)
    assert work_seconds(only, ASSUMED.with_values(found, "run")) == pytest.approx(7.0)
    assert found["train_flops"] / found["update_s"] == pytest.approx(ASSUMED.value("train_flops") / ASSUMED.value("update_s"))


def test_no_coefficient_becomes_negative_when_more_work_took_less_time() -> None:
    rows = [(works(train_flops=1.0, train_layer_s=10.0), 2.0), (works(train_flops=1.0, train_layer_s=100.0), 1.0)]
    assert all(value >= 0 for value in fit_group(UPDATE, rows, ASSUMED).values())


def test_work_that_no_run_had_is_not_called_measured() -> None:
    after = fit([run_of(works(train_flops=2.0, update_s=1.0), 3.0, "runs/a")], ASSUMED)
    assert after.basis("train_flops") == "measured (from runs/a)"
    assert after.basis("collectives") == "assumed" and after.value("collectives") == ASSUMED.value("collectives")
    assert after.basis("decode_step_s") == "assumed"


def test_the_fit_is_least_squares_where_nothing_binds() -> None:
    rng = np.random.default_rng(0)
    matrix, truth = rng.random((12, 3)), np.array([0.5, 2.0, 1.5])
    assert non_negative_least_squares(matrix, matrix @ truth) == pytest.approx(truth)
    bound = non_negative_least_squares(matrix, matrix @ np.array([1.0, -3.0, 1.0]))
    assert (bound >= 0).all() and bound[1] == 0


def test_nothing_measured_is_an_error_that_says_what_would_do() -> None:
    empty = MeasuredRun(source="runs/a", phases={}, works={}, peaks={}, job=None, device="cpu")
    with pytest.raises(ConfigError, match=r"runs/a: nothing to calibrate with.*rlpost.bench sync"):
        fit([empty], ASSUMED)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_calibration_is_read_as_it_was_written_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    written = ASSUMED.with_values({"train_flops": 3.25, "sync_s": 0.0}, "runs/a")
    write_calibration(written, path)
    assert read_calibration(path) == written
    with pytest.raises(ConfigError, match=r"exists already; move it away, or name another file with out="):
        write_calibration(ASSUMED, path)
    assert read_calibration(path) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: cpu\n", "no mapping `coefficients`"),
        ("[1, 2", "cannot be read"),
        ("device: tpu\ncoefficients: {}\n", r"device='tpu' is not known; expected one of cpu, gpu"),
        ("device: cpu\ncoefficients: {train_flop: {value: 1}}\n", "'train_flop' is not known"),
        ("device: cpu\ncoefficients: {train_flops: {value: fast}}\n", "expected a mapping with a number"),
        ("device: cpu\ncoefficients: {train_flops: 2}\n", "expected a mapping with a number"),
        ("device: cpu\ncoefficients: {train_flops: {value: -2}}\n", "train_flops=-2 is impossible"),
        ("device: cpu\ncoefficients: {trainer_base_bytes: {value: 0}}\n", "trainer_base_bytes=0 is impossible"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_calibration(path)


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def bench(**transports: dict[str, object]) -> dict[str, object]:
    return {"benchmark": "sync", "full_bytes": 2e9, "parameters": 10**9, "ranks": 2, "engines": 1, "transports": transports}


def test_a_sync_benchmark_calibrates_the_transports_that_it_has(tmp_path: Path) -> None:
    hardware = find_hardware(hardware="cpu")
    full = {"carrier": "collective", "mode": "full", "bytes": 2e9, "seconds": 8.0}
    delta = {"carrier": "disk", "mode": "delta", "bytes": 3e7, "seconds": 2.0}
    runs = read_sync_bench(tmp_path / "sync.json", bench(collective=full, delta=delta), hardware)
    after = fit(runs, ASSUMED)
    assert {"sync_collective", "sync_disk", "delta_scan", "sync_s"} <= set(after.measured) and "sync_ipc" not in after.measured
    for run, seconds in zip(runs, (8.0, 2.0), strict=True):
        assert work_seconds(run.works["sync"], after) == pytest.approx(seconds, rel=0.1)


def test_another_benchmark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a file of rlpost.bench sync"):
        read_sync_bench(tmp_path / "x.json", json.loads('{"benchmark": "step"}'), find_hardware(hardware="cpu"))


def test_a_benchmark_of_a_gpu_is_not_taken_for_one_of_this_cpu(tmp_path: Path) -> None:
    row = {"carrier": "collective", "mode": "full", "bytes": 2e9, "seconds": 8.0}
    with pytest.raises(ConfigError, match=r"was measured on a gpu, and cpu.* is another kind"):
        read_sync_bench(tmp_path / "x.json", {**bench(collective=row), "device": "gpu"}, find_hardware(hardware="cpu"))


def test_a_benchmark_without_a_field_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks or garbles 'seconds'.*measure again"):
        read_sync_bench(
            tmp_path / "x.json", bench(collective={"carrier": "ipc", "mode": "full", "bytes": 1}), find_hardware(hardware="cpu")
        )
