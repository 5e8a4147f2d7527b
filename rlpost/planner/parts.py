"""The parts of a plan beside memory: a step's phases, engines, weight sync, splits, reuse, imbalance, packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rlpost.config.schema import RunConfig
from rlpost.planner.coefficients import Calibration, Work, work_seconds
from rlpost.planner.footprint import DTYPE_BYTES, Footprint, engine_setup
from rlpost.planner.memory import concurrency
from rlpost.planner.options import PlanOptions
from rlpost.planner.roles import engine_memory_share, engine_table
from rlpost.planner.seconds import (
    Job,
    checkpoint_works,
    evaluation_works,
    generate_works,
    sync_parameters,
    sync_works,
    training_works,
    update_works,
    wait_works,
)
from rlpost.planner.shapes import ModelShape
from rlpost.planner.split import Placement, Split, best_split, split_curve
from rlpost.planner.sync import RLPOST_DELTA_BYTES, break_even_bytes_per_second, delta_bytes, full_bytes
from rlpost.planner.tokens import REUSES, moe_step_inflation, packed_occupancy, packing_efficiency, padded_occupancy
from rlpost.planner.workload import Workload, prefill_of, read_lengths
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """One phase of a step: its works, and their sum."""

    name: str
    seconds: float
    works: tuple[Work, ...]
    basis: str


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step. ``overlap``: generation goes on beside all else (max_staleness above 0, split)."""

    phases: tuple[PhaseTime, ...]
    overlap: bool
    sampled_tokens: int
    evaluation_s: float
    checkpoint_s: float
    """Each of one evaluation and one checkpoint; they are not in ``seconds``."""

    def phase_s(self, name: str) -> float:
        """Seconds of a phase, 0 when the run has none."""
        return sum(phase.seconds for phase in self.phases if phase.name == name)

    @property
    def seconds(self) -> float:
        """Of a step."""
        total = sum(phase.seconds for phase in self.phases)
        if not self.overlap:
            return total
        generate = self.phase_s("generate")
        return max(generate, total - generate - self.phase_s("sync")) + self.phase_s("sync")

    @property
    def generation_share(self) -> float:
        """Generation over the step, 0 to 1."""
        return min(1.0, self.phase_s("generate") / self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens over the step's seconds."""
        return self.sampled_tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """Seconds of one sync over each transport, and the bandwidth below which a delta is quicker (None: a delta is never smaller)."""

    seconds: Mapping[str, float]
    works: Mapping[str, tuple[Work, ...]]
    chosen: str
    full_gb: float
    delta_gb: float
    break_even_bytes_per_second: float | None


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """Step time over splits of the run's GPUs, the best of them, the present one, and all GPUs colocated."""

    curve: tuple[Split, ...]
    best: Split
    present: tuple[int, int]
    """Trainer and rollout GPUs of the configuration."""
    colocated_s: float
    floor_s: float
    """The longest answer alone: no number of engines is quicker."""

    @property
    def verdict(self) -> Placement:
        """Which placement is quicker."""
        return Placement(
            mode="split" if self.best.step_s < self.colocated_s else "colocated", split=self.best, colocated_step_s=self.colocated_s
        )


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What one engine can hold."""

    kv_tokens: int
    concurrency_mean: int
    """Sequences of mean length whose KV fits at once; ``concurrency_longest`` those of the longest possible length."""
    concurrency_longest: int
    wanted: int
    """Sequences of a step that one engine gets at once."""
    memory_share: float | None
    """engine.gpu_memory_utilization that would hold ``wanted`` mean sequences (GPU only)."""


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """Occupancy (0 to 1) of the length file's sequences, padded as they come, sorted, and packed."""

    sequences: int
    padded: float
    by_length: float
    packed: float
    efficiency: float
    truncated: float
    """Share of sequences longer than a micro-batch, which a run refuses."""


# ---- time ------------------------------------------------------------------------------------------------------------


def phase_times(works: Sequence[Work], calibration: Calibration) -> tuple[PhaseTime, ...]:
    """Works by phase, in their order."""
    phases: dict[str, list[Work]] = {}
    for work in works:
        phases.setdefault(work.phase, []).append(work)
    return tuple(
        PhaseTime(name=name, seconds=work_seconds(some, calibration), works=tuple(some), basis=_basis(some, calibration))
        for name, some in phases.items()
    )


def _basis(works: Sequence[Work], calibration: Calibration) -> str:
    """Measured when all that costs anything is."""
    marks = {calibration.basis(work.coefficient) for work in works if work.amount}
    return "assumed" if "assumed" in marks else ", ".join(sorted(marks))


def plan_step(job: Job, calibration: Calibration, options: PlanOptions) -> StepPlan:
    """All phases of a step."""
    derived, works = job.derived, []
    if not derived.offline:
        works += generate_works(job)
    works += training_works(job)
    if not derived.offline:
        works += sync_works(job, derived.weight_carrier, delta=derived.weight_deltas, changed=options.changed)
    works += wait_works(job)
    colocated = job.config.placement.mode == "colocated"
    return StepPlan(
        phases=phase_times(works, calibration),
        overlap=not derived.offline and not colocated and job.config.schedule.max_staleness > 0,
        sampled_tokens=job.workload.sampled_tokens,
        evaluation_s=work_seconds(evaluation_works(job), calibration) if job.config.evaluation.every else 0.0,
        checkpoint_s=work_seconds(checkpoint_works(job), calibration),
    )


# ---- engines ---------------------------------------------------------------------------------------------------------


def engine_plan(job: Job, memory: Footprint, calibration: Calibration) -> EnginePlan:
    """Room of the KV cache against what a step wants."""
    process = memory.process("engine") or memory.process("trainer and engine")
    assert process is not None, "a run with rollouts has an engine"
    work, derived = job.workload, job.derived
    setup = engine_setup(job.config, derived, job.shape, job.hardware, calibration, work)
    wanted = min(job.config.engine.max_num_seqs, -(-work.samples // derived.engines))
    mean = max(1, round(fmean(work.lengths)))
    share = None
    if job.hardware.device == "gpu":
        enough = engine_table(job.shape, replace(setup, kv_tokens=wanted * mean))
        share = engine_memory_share(enough, job.hardware.accelerator.memory_bytes)
    return EnginePlan(
        kv_tokens=setup.kv_tokens,
        concurrency_mean=concurrency(setup.kv_tokens, mean),
        concurrency_longest=concurrency(setup.kv_tokens, derived.max_model_len),
        wanted=wanted,
        memory_share=share,
    )


# ---- sync, split -----------------------------------------------------------------------------------------------------


def sync_plan(job: Job, calibration: Calibration, options: PlanOptions) -> SyncPlan:
    """The run's own way of syncing and the others."""
    derived, config, each = job.derived, job.config, DTYPE_BYTES[job.derived.dtype]
    one_machine = ["ipc"] if job.hardware.nodes == 1 else []
    carriers = list(dict.fromkeys([derived.weight_carrier, "collective", "disk", *one_machine]))
    works = {carrier: tuple(sync_works(job, carrier, delta=False, changed=options.changed)) for carrier in carriers}
    adapters = config.training.lora.rank > 0 and config.training.lora.sync == "adapter"
    if not adapters and config.placement.mode == "split":
        works[f"delta over {derived.weight_carrier}"] = tuple(sync_works(job, derived.weight_carrier, delta=True, changed=options.changed))
    seconds = {name: work_seconds(some, calibration) for name, some in works.items()}
    parameters = sync_parameters(job)
    full, small = full_bytes(parameters, each), delta_bytes(parameters, options.changed, RLPOST_DELTA_BYTES * each / 2)
    break_even = None
    if small < full and f"delta over {derived.weight_carrier}" in works:
        # A delta is compared, coded and staged where a full sync is only read.
        more = [w for w in works[f"delta over {derived.weight_carrier}"] if w.coefficient in ("delta_scan", "delta_s")]
        less = [w for w in works[derived.weight_carrier] if w.coefficient == "sync_read"]
        scan, read = work_seconds(more, calibration), work_seconds(less, calibration)
        break_even = break_even_bytes_per_second(full, small, max(0.0, scan - read))
    chosen = f"delta over {derived.weight_carrier}" if derived.weight_deltas and not adapters else derived.weight_carrier
    return SyncPlan(
        seconds=seconds, works=works, chosen=chosen, full_gb=full / 1e9, delta_gb=small / 1e9, break_even_bytes_per_second=break_even
    )  # fmt: skip


def split_plan(job: Job, calibration: Calibration, step: StepPlan) -> SplitPlan | None:
    """None for offline runs and on CPU, where processes share cores. Colocated engines have one GPU each."""
    derived, config = job.derived, job.config
    if derived.offline or job.hardware.device == "cpu":
        return None
    degree = config.engine.tensor_parallel
    colocated = config.placement.mode == "colocated"
    rollout = derived.engines * degree
    total = derived.ranks if colocated else derived.ranks + rollout
    if total < degree + 1:
        return None

    def generate(gpus: int) -> float:
        return work_seconds(generate_works(job, max(1, gpus // degree)), calibration)

    other = sum(phase.seconds for phase in step.phases if phase.name not in ("generate", "update", "sync"))

    def train(gpus: int) -> float:
        return other * derived.ranks / gpus + work_seconds(update_works(_on(job, gpus)), calibration)

    sync = step.phase_s("sync")
    curve = split_curve(total, generate, train, sync_s=sync, multiple=degree)
    single = replace(job, config=replace(config, engine=replace(config.engine, tensor_parallel=1)))
    longest = replace(job, workload=replace(job.workload, answers=(max(job.workload.answers),), prefill=0))
    return SplitPlan(
        curve=curve,
        best=best_split(curve),
        present=(derived.ranks, rollout),
        colocated_s=work_seconds(generate_works(single, total), calibration) + train(total) + sync,
        floor_s=work_seconds(generate_works(longest, 1), calibration),
    )


def _on(job: Job, ranks: int) -> Job:
    """The same batch on another number of trainer ranks."""
    return replace(job, derived=replace(job.derived, ranks=ranks))


# ---- tokens, experts, packing ----------------------------------------------------------------------------------------


def prefill_by_reuse(workload: Workload, options: PlanOptions) -> dict[str, int]:
    action = max(1, round(fmean(workload.answers) / workload.turns))
    return {reuse: workload.groups * prefill_of(workload, action, options.observation, reuse) for reuse in REUSES}


IMBALANCES = (0.0, 0.25, 0.5, 1.0, 2.0)
"""MaxVio of ranks that the table shows."""


def imbalance(shape: ModelShape, options: PlanOptions) -> dict[float, float] | None:
    if not shape.experts:
        return None
    experts = shape.sparse_layers * shape.experts_per_token * 3 * shape.hidden * shape.expert_feed_forward
    share = experts / shape.multiplied_parameters
    ranks = options.expert_ranks
    loads = {
        violation: [1 + violation, *([1 - violation / (ranks - 1)] * (ranks - 1))] for violation in IMBALANCES if violation <= ranks - 1
    }
    return {violation: moe_step_inflation(some, ranks, share) for violation, some in loads.items()}


def packing_plan(config: RunConfig, options: PlanOptions) -> PackingPlan | None:
    if options.lengths is None:
        return None
    lengths = [prompt + answer for prompt, answer in read_lengths(Path(options.lengths))]
    limit = config.training.micro_batch_tokens
    fitting = [length for length in lengths if length <= limit]
    if not fitting:
        raise ConfigError(
            f"every sequence of lengths={options.lengths} is longer than training.micro_batch_tokens={limit} "
            f"(the shortest: {min(lengths)}); set training.micro_batch_tokens={max(lengths)} or more"
        )
    rows = max(1, limit // max(fitting))
    return PackingPlan(
        sequences=len(lengths),
        padded=padded_occupancy(fitting, rows),
        by_length=padded_occupancy(fitting, rows, by_length=True),
        packed=packed_occupancy(fitting, limit),
        efficiency=packing_efficiency(fitting, limit),
        truncated=1 - len(fitting) / len(lengths),
    )
