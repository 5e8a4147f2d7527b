"""What a run measured, beside what the planner says of the same work: the table at a run's end, and what ``calibrate`` fits to.

Lengths and micro-batches are those that the run recorded, so an error is the model's and not that of a guess at lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rlpost.config.derive import Derived, Device, derive
from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.observe.formats import is_number
from rlpost.observe.metrics import METRICS_FILE
from rlpost.planner.coefficients import Calibration, Work, work_seconds
from rlpost.planner.footprint import footprint
from rlpost.planner.hardware import Hardware
from rlpost.planner.options import PlanOptions
from rlpost.planner.seconds import (
    Job,
    checkpoint_works,
    evaluation_works,
    generate_works,
    sync_works,
    training_works,
    wait_works,
)
from rlpost.planner.shapes import load_shape
from rlpost.planner.workload import recorded_workload
from rlpost.types import ConfigError

CONFIG_FILE = "config.yaml"
WARM_UP_STEPS = 1
"""Steps that are left out when there are others: caches and kernels are cold in them."""
RARE = ("evaluate", "checkpoint")
"""Phases that are not in every step; they are measured where they are."""
SHORTEST_PHASE_S = 0.005
"""Shorter phases are noise: they are neither compared nor fitted."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run, or a benchmark that looks like one."""

    source: str
    phases: Mapping[str, float]
    """Median seconds by phase."""
    works: Mapping[str, tuple[Work, ...]]
    """The works of the same phases."""
    peaks: Mapping[str, float]
    """Peak bytes of a process, by the name that the footprint gives it."""
    job: Job | None
    """None of a benchmark."""
    device: Device


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One figure, predicted and measured."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement: 0.1 is 10 % too much."""
        return self.predicted / self.measured - 1


def run_config(run_dir: Path) -> RunConfig:
    """The configuration of a run directory. Raises ConfigError when it is none."""
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {CONFIG_FILE}; expected a run directory, as `run:` names it at a run's end, or a bench.json")
    return load_config([f"config={path.absolute()}"]).config


def read_run(run_dir: Path, hardware: Hardware, records: Sequence[Mapping[str, Any]]) -> MeasuredRun:
    """A run directory: its config.yaml, and these records of its metrics.jsonl. Raises ConfigError when something is missing."""
    config = run_config(run_dir)
    return measure(config, derive(config, device=hardware.device), hardware, records, source=str(run_dir))


def measure(config: RunConfig, derived: Derived, hardware: Hardware, records: Sequence[Mapping[str, Any]], *, source: str) -> MeasuredRun:
    """The same of a run at its end. Raises ConfigError when no step is finished, or the model is not covered."""
    steps = [record for record in records if is_number(record.get("time/step_s")) and record["step"] > 0]
    if not steps:
        raise ConfigError(f"{source} has no finished step in {METRICS_FILE}; expected one at least: wait for the first")
    steps = steps[WARM_UP_STEPS:] or steps
    job = Job(
        config=config, derived=derived, shape=load_shape(config.model.path), hardware=hardware,
        workload=recorded_workload(config, derived, steps),
    )  # fmt: skip
    works = works_by_phase(job, _changed(steps))
    found = {name: seconds for name in works if (seconds := _phase_seconds(name, steps)) >= SHORTEST_PHASE_S}
    return MeasuredRun(
        source=source, phases=found, works={name: works[name] for name in found}, peaks=_peaks(records, derived), job=job,
        device=hardware.device,
    )  # fmt: skip


def works_by_phase(job: Job, changed: float) -> dict[str, tuple[Work, ...]]:
    """Everything that a run of this job measures."""
    derived = job.derived
    works = [*training_works(job), *wait_works(job), *checkpoint_works(job)]
    if not derived.offline:
        works += generate_works(job)
        works += sync_works(job, derived.weight_carrier, delta=derived.weight_deltas, changed=changed)
        if job.config.evaluation.every:
            works += evaluation_works(job)
    return {name: tuple(work for work in works if work.phase == name) for name in dict.fromkeys(work.phase for work in works)}


def _phase_seconds(name: str, steps: Sequence[Mapping[str, Any]]) -> float:
    """Median of a phase over these steps. Generation that others overlap is not what was waited for, so it is taken from its own clock."""
    if name == "generate":
        sampled = [record["rollout/tokens"] / record["rollout/tokens_per_s"] for record in steps if record.get("rollout/tokens_per_s")]
        return median(sampled) if sampled else 0.0
    values = _values(steps, f"time/{name}_s")
    if name in RARE:
        values = [value for value in values if value >= SHORTEST_PHASE_S]
    return median(values) if values else 0.0


def _changed(steps: Sequence[Mapping[str, Any]]) -> float:
    values = _values(steps, "sync/changed_fraction")
    return median(values) if values else PlanOptions().changed


def _peaks(records: Sequence[Mapping[str, Any]], derived: Derived) -> dict[str, float]:
    """Peaks over all records. Of colocated parts each reports its own, and no process has both."""
    found = {}
    for role in ("trainer",) if derived.offline else ("trainer", "engine"):
        values = _values(records, f"memory/{role}_peak_gib")
        if values:
            found[role] = max(values) * 2**30
    return found


def _values(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """All numbers under a name."""
    return [record[name] for record in records if is_number(record.get(name))]


# ---- comparison ------------------------------------------------------------------------------------------------------


def compare_run(run: MeasuredRun, calibration: Calibration) -> list[Comparison]:
    """Seconds of each phase and of a step, and peak memory of each process, where both sides are known."""
    rows = [
        Comparison(name=name, predicted=work_seconds(run.works[name], calibration), measured=seconds, unit="s")
        for name, seconds in run.phases.items()
    ]
    every = [row for row in rows if row.name not in RARE]
    if run.job is not None and len(every) > 1 and not (run.job.config.schedule.max_staleness and not run.job.derived.offline):
        total = Comparison(name="step", predicted=sum(r.predicted for r in every), measured=sum(r.measured for r in every), unit="s")
        rows.append(total)
    return rows + compare_memory(run, calibration)


def compare_memory(run: MeasuredRun, calibration: Calibration) -> list[Comparison]:
    """Peak bytes of each process. On a GPU a process reports what it allocated, without the base that it has before."""
    job = run.job
    if job is None:
        return []
    table = footprint(job.config, job.derived, job.shape, job.hardware, calibration, job.workload)
    rows = []
    for role, measured in run.peaks.items():
        process = table.process(role)
        if process is not None:
            base = process.base_bytes if job.hardware.device == "gpu" else 0.0
            rows.append(Comparison(name=f"memory_{role}", predicted=process.peak[1] - base, measured=measured, unit="B"))
    return rows


def format_comparisons(rows: Sequence[Comparison], basis: str) -> str:
    """A table: what was predicted, measured, and how far off that is."""
    lines = [f"{'plan against run':<18}{'predicted':>12}{'measured':>12}{'error':>9}   ({basis})"]
    for row in rows:
        one, other = (f"{value / 2**30:.3f} GiB" if row.unit == "B" else f"{value:.4g} s" for value in (row.predicted, row.measured))
        lines.append(f"{row.name:<18}{one:>12}{other:>12}{row.error:>+8.0%}")
    return "\n".join(lines)
