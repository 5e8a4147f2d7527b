"""Coefficients from measurements: every phase is linear in them, so a non-negative least-squares fit finds them.

One measurement of a phase scales its assumed coefficients by one factor; several tell them apart. A weak pull towards the scaled
assumptions decides what the measurements leave open (a coefficient that no run has much of).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rlpost.config.schema import RunConfig
from rlpost.observe.metrics import read_metrics
from rlpost.planner.coefficients import Calibration, Work, work_seconds
from rlpost.planner.footprint import footprint
from rlpost.planner.hardware import Hardware
from rlpost.planner.measured import MeasuredRun, read_run, run_config
from rlpost.planner.options import PlanOptions
from rlpost.planner.plan import plan_hardware
from rlpost.planner.seconds import TRAINER_BYTES, link_work, process_rates
from rlpost.types import ConfigError

GROUPS = (
    ("prefill_flops", "decode_bytes", "decode_kv_bytes", "decode_flops", "decode_step_s", "sample_s"),
    (
        "forward_flops", "forward_layer_s", "train_flops", "train_layer_s", "attention_flops", "optimizer_bytes", "update_s", "collectives",
    ),
    ("sync_read", "sync_collective", "sync_network", "sync_ipc", "sync_disk", "delta_scan", "delta_s", "sync_s"),
    ("checkpoint_bytes", "checkpoint_s"),
    ("wait_s", "wait_sample_s"),
    ("reward_sample_s",),
)  # fmt: skip
"""Coefficients that are fitted together: those that stand in the same phases."""

PULL = 0.1
"""Weight of the assumptions: a coefficient twice what was expected counts as much as one measurement that is off by 30 %, so that a few
noisy runs do not give one coefficient what another one costs."""
ROUNDS = 3
"""What was found is what the next round expects: assumptions may be off by a factor of ten."""

Row = tuple[tuple[Work, ...], float]
"""The works of a phase, and its measured seconds."""


def fit(runs: Sequence[MeasuredRun], calibration: Calibration) -> Calibration:
    """``calibration`` with all that these runs measured. Raises ConfigError when they measured nothing."""
    names = ", ".join(run.source for run in runs)
    values: dict[str, float] = {}
    for group in GROUPS:
        rows = [
            (run.works[phase], seconds)
            for run in runs
            for phase, seconds in run.phases.items()
            # An evaluation's lengths are not recorded, so it is compared and not fitted.
            if phase != "evaluate" and any(work.coefficient in group for work in run.works[phase])
        ]
        values.update(fit_group(group, rows, calibration))
    values.update(fit_memory(runs, calibration))
    if not values:
        raise ConfigError(f"{names}: nothing to calibrate with; expected runs with finished steps, or the JSON of rlpost.bench sync")
    return calibration.with_values(values, names)


def fit_group(group: Sequence[str], rows: Sequence[Row], calibration: Calibration) -> dict[str, float]:
    """The group's coefficients; what is in the rows' phases besides (at its present value) is taken off first."""
    used = [name for name in group if any(work.coefficient == name and work.amount > 0 for works, _ in rows for work in works)]
    if not used:
        return {}
    prior = np.array([calibration.value(name) or 1e-9 for name in used])
    amounts = np.array([[sum(w.amount for w in works if w.coefficient == name) for name in used] for works, _ in rows])
    other = np.array([work_seconds([w for w in works if w.coefficient not in used], calibration) for works, _ in rows])
    seconds = np.maximum(np.array([seconds for _, seconds in rows]) - other, 1e-3 * np.array([s for _, s in rows]))
    predicted = amounts @ prior
    scale = median((seconds / np.maximum(predicted, 1e-12)).tolist())
    if len(rows) == 1:
        return dict(zip(used, (prior * scale).tolist(), strict=True))
    found = prior * scale
    for _ in range(ROUNDS):
        # Unknowns are multiples of what is expected, errors relative ones: nothing has a unit.
        matrix, pull = amounts * found / seconds[:, None], np.sqrt(PULL) * np.eye(len(used))
        target = np.concatenate([np.ones(len(rows)), np.full(len(used), np.sqrt(PULL))])
        multiples = non_negative_least_squares(np.vstack([matrix, pull]), target)
        found = np.where(multiples > 0, found * multiples, found)
    return dict(zip(used, np.where(multiples > 0, found, 0.0).tolist(), strict=True))


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """``x >= 0`` that minimises ``|matrix x - target|``, by trying every set of non-zero unknowns: there are a handful."""
    count = matrix.shape[1]
    best, least = np.zeros(count), float(np.square(target).sum())
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            columns = list(chosen)
            solution, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
            error = float(np.square(matrix[:, columns] @ solution - target).sum())
            if (solution >= 0).all() and error < least * (1 - 1e-12):
                best, least = np.zeros(count), error
                best[columns] = solution
    return best


SPREAD = 1.5
"""Runs tell base and factor apart when the largest of their processes has this many times the lines of the smallest."""
LEAST_BASE, LEAST_FACTOR = 1.0, 0.5


def fit_memory(runs: Sequence[MeasuredRun], calibration: Calibration) -> dict[str, float]:
    """What each kind of process has beyond its lines: the base, and where runs of different sizes tell it, a factor of the lines."""
    bare = Calibration(device=calibration.device).with_values(
        {f"{kind}_{what}": value for kind in ("trainer", "engine") for what, value in (("base_bytes", 0.0), ("memory_factor", 1.0))}, ""
    )
    points: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if run.job is None or run.job.hardware.device == "gpu":  # a GPU's own base is in no process's report
            continue
        table = footprint(run.job.config, run.job.derived, run.job.shape, run.job.hardware, bare, run.job.workload)
        for role, measured in run.peaks.items():
            process = table.process(role)
            if process is not None:
                points.setdefault(role, []).append((process.peak[1], measured))
    found: dict[str, float] = {}
    for role, some in points.items():
        lines, peaks = np.array(some).T
        if len(some) > 2 and lines.max() > SPREAD * lines.min():
            # Relative errors count, as everywhere.
            base, factor = non_negative_least_squares(np.stack([1 / peaks, lines / peaks], axis=1), np.ones(len(some)))
            if factor >= LEAST_FACTOR:
                found |= {f"{role}_base_bytes": max(LEAST_BASE, float(base)), f"{role}_memory_factor": float(factor)}
                continue
        present = calibration.value(f"{role}_memory_factor")
        found[f"{role}_base_bytes"] = max(LEAST_BASE, float(np.mean(peaks - present * lines)))
    return found


# ---- benchmarks ------------------------------------------------------------------------------------------------------


def read_sync_bench(path: Path, found: dict[str, Any], hardware: Hardware) -> list[MeasuredRun]:
    """The transports of a ``rlpost.bench sync --json`` file, each as a run of one phase. Raises ConfigError for another document."""
    if found.get("benchmark") != "sync" or not isinstance(found.get("transports"), dict):
        raise ConfigError(f"{path} is not a file of rlpost.bench sync --json; expected one, or a run directory")
    if found.get("device", hardware.device) != hardware.device:
        raise ConfigError(
            f"{path} was measured on a {found['device']}, and {hardware.name} is another kind: name its machine, hardware=..."
        )
    try:
        return [_bench_run(f"{path} {name}", row, found, hardware) for name, row in found["transports"].items()]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} lacks or garbles {error}; expected a file of this version's rlpost.bench sync --json: measure again"
        ) from error


def _bench_run(source: str, row: dict[str, Any], found: dict[str, Any], hardware: Hardware) -> MeasuredRun:
    """One transport."""
    carrier, size, ranks, parameters = row["carrier"], float(row["bytes"]), int(found["ranks"]), float(found["parameters"])
    works = [
        link_work(hardware, carrier, size, ranks + int(found["engines"]), f"{size / 1e9:.4g} GB"),
        Work(phase="sync", coefficient="sync_s", amount=1, formula="one sync"),
    ]
    if row["mode"] == "delta":
        scan = parameters / ranks / 1e9
        works.append(Work(phase="sync", coefficient="delta_scan", amount=scan, formula=f"{scan:.4g} billion parameters a rank"))
        works.append(Work(phase="sync", coefficient="delta_s", amount=1, formula="one delta"))
    else:
        read = TRAINER_BYTES * parameters / ranks / process_rates(hardware, 1, ranks).bytes_per_second
        works.append(Work(phase="sync", coefficient="sync_read", amount=read, formula="float32 weights, read once"))
    return MeasuredRun(
        source=source, phases={"sync": float(row["seconds"])}, works={"sync": tuple(works)}, peaks={}, job=None, device=hardware.device
    )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; expected a run directory or a file of rlpost.bench --json") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds {type(found).__name__}; expected the object of rlpost.bench --json")
    return found


def read_sources(paths: Sequence[Path], options: PlanOptions) -> list[MeasuredRun]:
    """Run directories and benchmark files, of one kind of device. Raises ConfigError for what is neither."""
    runs: list[MeasuredRun] = []
    for path in paths:
        if path.is_dir():
            runs.append(read_run(path, plan_hardware(run_config(path), options), read_metrics(path)))
        else:
            runs += read_sync_bench(path, read_json(path), plan_hardware(RunConfig(), options))
    devices = {run.device for run in runs}
    if len(devices) > 1:
        raise ConfigError("the sources are of CPU and of GPU runs; expected one kind: calibrate each by itself")
    return runs
