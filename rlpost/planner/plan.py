"""A run's configuration, a machine and a calibration in; what the run will need out. ``rlpost.plan`` prints it.

``make_plan`` is pure but for reading the files that the options name (model shape, lengths, calibration).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rlpost.config.derive import Derived, derive
from rlpost.config.schema import RunConfig
from rlpost.planner.coefficients import Calibration, Work, read_calibration, work_seconds
from rlpost.planner.cost import Cost, run_cost
from rlpost.planner.footprint import DTYPE_BYTES, Footprint, footprint
from rlpost.planner.hardware import Hardware, find_hardware
from rlpost.planner.memory import concurrency
from rlpost.planner.options import PlanOptions, given_options
from rlpost.planner.roles import engine_memory_share
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
from rlpost.planner.shapes import ModelShape, load_shape
from rlpost.planner.split import Placement, Split, best_split, split_curve
from rlpost.planner.sync import RLPOST_DELTA_BYTES, break_even_bytes_per_second, delta_bytes, full_bytes
from rlpost.planner.tokens import REUSES, moe_step_inflation, packed_occupancy, packing_efficiency, padded_occupancy
from rlpost.planner.workload import Workload, planned_workload, prefill_of, read_lengths
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Given:
    """One number that the plan rests on, and what it rests on itself: ``assumed``, ``given``, ``config``, or ``measured (from RUN)``."""

    name: str
    value: str
    basis: str


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything."""

    name: str
    shape: ModelShape
    hardware: Hardware
    derived: Derived
    workload: Workload
    calibration: Calibration
    given: tuple[Given, ...]
    memory: Footprint
    largest_micro_batch_tokens: int
    engine: EnginePlan | None
    step: StepPlan
    sync: SyncPlan | None
    split: SplitPlan | None
    prefill: Mapping[str, int] | None
    """Prompt tokens of a step by reuse: none, turn, turn+group."""
    imbalance: Mapping[float, float] | None
    """Of mixtures: MaxVio of the fullest rank -> factor of a step's training time."""
    packing: PackingPlan | None
    cost: Cost
    warnings: tuple[str, ...]


def make_plan(config: RunConfig, options: PlanOptions, *, workload: Workload | None = None, hardware: Hardware | None = None) -> Plan:
    """The plan of a checked config. ``workload``: what a run recorded, in place of assumed lengths.

    Raises ConfigError for unknown models and machines, and impossible degrees, lengths and numbers.
    """
    hardware = hardware or plan_hardware(config, options)
    derived = derive(config, device=hardware.device)
    shape = load_shape(options.shape or config.model.path)
    calibration = plan_calibration(options, hardware)
    workload = workload or planned_workload(config, derived, options)
    job = Job(config=config, derived=derived, shape=shape, hardware=hardware, workload=workload)
    memory = footprint(config, derived, shape, hardware, calibration, workload)
    step = plan_step(job, calibration, options)
    return Plan(
        name=config.name,
        shape=shape,
        hardware=hardware,
        derived=derived,
        workload=workload,
        calibration=calibration,
        given=tuple(_given(config, options, hardware, workload)),
        memory=memory,
        largest_micro_batch_tokens=_largest_micro_batch(config, derived, shape, hardware, calibration, workload),
        engine=None if derived.offline else _engine_plan(job, memory),
        step=step,
        sync=None if derived.offline else _sync_plan(job, calibration, options),
        split=_split_plan(job, calibration, step),
        prefill=None if derived.offline else _prefill(workload, options),
        imbalance=_imbalance(shape, options),
        packing=_packing(config, options),
        cost=_cost(config, derived, hardware, step, options),
        warnings=tuple(_warnings(config, derived, hardware)),
    )


def plan_hardware(config: RunConfig, options: PlanOptions) -> Hardware:
    """The machine that the options name; without any, this one's CPU when the config runs on CPU. Raises ConfigError when none is named."""
    named = options.hardware or options.gpu
    if named is None and options.nodes is None and options.gpus is None and config.placement.device != "gpu":
        named = "cpu"
    if named is None:
        raise ConfigError(
            "the configuration asks for GPUs (placement.device=gpu) and no machine is named; expected hardware=h100-8, or "
            "nodes=N gpus=N gpu=KIND: add one of them"
        )
    return find_hardware(
        hardware=options.hardware or (named if named == "cpu" else None), nodes=options.nodes, gpus=options.gpus, gpu=options.gpu,
        nvlink=options.nvlink, net=options.net, disk=options.disk, gpu_memory=options.gpu_memory,
    )  # fmt: skip


CALIBRATION_FILE = "calibration.yaml"
"""Read from the working directory where no other is named."""
NO_CALIBRATION = "none"


def plan_calibration(options: PlanOptions, hardware: Hardware) -> Calibration:
    """Measured coefficients of the same kind of device: of the file that is named, else of ./calibration.yaml where there is one.

    Raises ConfigError for a named file of another kind; the other file is then left out.
    """
    named = options.calibration
    path = Path(named or CALIBRATION_FILE)
    if named == NO_CALIBRATION or (named is None and not path.is_file()):
        return Calibration(device=hardware.device)
    found = read_calibration(path)
    if found.device == hardware.device:
        return found
    if named is None:
        return Calibration(device=hardware.device)
    raise ConfigError(
        f"calibration={named} was measured on a {found.device}, and the plan is for {hardware.name} ({hardware.device}); "
        "calibrate with a run there, or leave it out: calibration=none"
    )


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


# ---- memory, engines -------------------------------------------------------------------------------------------------


def _largest_micro_batch(
    config: RunConfig, derived: Derived, shape: ModelShape, hardware: Hardware, calibration: Calibration, workload: Workload
) -> int:
    """Most tokens of training.micro_batch_tokens with which everything fits, were a batch as large; 0 when none does."""
    from rlpost.planner.activations import largest_tokens

    def worst(tokens: int) -> int:
        limits = replace(derived, micro_batch_tokens=max(1, tokens))
        full = replace(workload, recorded_row_tokens=float(tokens * derived.ranks), recorded_micro_batches=1.0)
        found = footprint(config, limits, shape, hardware, calibration, full)
        over = found.total_peak_bytes - found.shared_bytes if found.shared else -min(one.margin_bytes for one in found.processes)
        return max(0, round(over))

    return largest_tokens(worst, 0, most=2**22)


def _engine_plan(job: Job, memory: Footprint) -> EnginePlan:
    from rlpost.planner.footprint import engine_setup

    process = memory.process("engine") or memory.process("trainer and engine")
    assert process is not None, "a run with rollouts has an engine"
    work, derived = job.workload, job.derived
    calibration = Calibration(device=job.hardware.device)
    setup = engine_setup(job.config, derived, job.shape, job.hardware, calibration)
    wanted = min(job.config.engine.max_num_seqs, -(-work.samples // derived.engines))
    mean = max(1, round(fmean(work.lengths)))
    share = None
    if job.hardware.device == "gpu":
        from rlpost.planner.roles import engine_table

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


def _sync_plan(job: Job, calibration: Calibration, options: PlanOptions) -> SyncPlan:
    derived, config, each = job.derived, job.config, DTYPE_BYTES[job.derived.dtype]
    carriers = ["collective", "disk"] + (["ipc"] if job.hardware.nodes == 1 else [])
    works = {carrier: tuple(sync_works(job, carrier, delta=False, changed=options.changed)) for carrier in carriers}
    adapters = config.training.lora.rank > 0 and config.training.lora.sync == "adapter"
    if not adapters:
        works[f"delta over {derived.weight_carrier}"] = tuple(sync_works(job, derived.weight_carrier, delta=True, changed=options.changed))
    seconds = {name: work_seconds(some, calibration) for name, some in works.items()}
    parameters = sync_parameters(job)
    full, small = full_bytes(parameters, each), delta_bytes(parameters, options.changed, RLPOST_DELTA_BYTES * each / 2)
    break_even = None
    if small < full and not adapters:
        scan = [work for work in works[f"delta over {derived.weight_carrier}"] if work.coefficient == "delta_scan"]
        break_even = break_even_bytes_per_second(full, small, work_seconds(scan, calibration))
    chosen = f"delta over {derived.weight_carrier}" if derived.weight_deltas and not adapters else derived.weight_carrier
    return SyncPlan(
        seconds=seconds, works=works, chosen=chosen, full_gb=full / 1e9, delta_gb=small / 1e9, break_even_bytes_per_second=break_even
    )  # fmt: skip


def _split_plan(job: Job, calibration: Calibration, step: StepPlan) -> SplitPlan | None:
    """None for offline runs and on CPU, where processes share cores."""
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
    longest = replace(job, workload=replace(job.workload, answers=(max(job.workload.answers),), prefill=0))
    return SplitPlan(
        curve=curve,
        best=best_split(curve),
        present=(derived.ranks, rollout),
        colocated_s=generate(total) + train(total) + sync,
        floor_s=work_seconds(generate_works(longest, 1), calibration),
    )


def _on(job: Job, ranks: int) -> Job:
    """The same batch on another number of trainer ranks."""
    return replace(job, derived=replace(job.derived, ranks=ranks))


# ---- tokens, experts, packing, cost ----------------------------------------------------------------------------------


def _prefill(workload: Workload, options: PlanOptions) -> dict[str, int]:
    action = max(1, round(fmean(workload.answers) / workload.turns))
    return {reuse: workload.groups * prefill_of(workload, action, options.observation, reuse) for reuse in REUSES}


IMBALANCES = (0.0, 0.25, 0.5, 1.0, 2.0)
"""MaxVio of ranks that the table shows."""


def _imbalance(shape: ModelShape, options: PlanOptions) -> dict[float, float] | None:
    if not shape.experts:
        return None
    experts = shape.sparse_layers * shape.experts_per_token * 3 * shape.hidden * shape.expert_feed_forward
    share = experts / shape.multiplied_parameters
    ranks = options.expert_ranks
    loads = {
        violation: [1 + violation, *([1 - violation / (ranks - 1)] * (ranks - 1))] for violation in IMBALANCES if violation <= ranks - 1
    }
    return {violation: moe_step_inflation(some, ranks, share) for violation, some in loads.items()}


def _packing(config: RunConfig, options: PlanOptions) -> PackingPlan | None:
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


def used_gpus(derived: Derived) -> int:
    """GPUs that the run's placement asks for; on CPU one machine."""
    return max(1, round(derived.totals.get("GPU", 1)))


def _cost(config: RunConfig, derived: Derived, hardware: Hardware, step: StepPlan, options: PlanOptions) -> Cost:
    steps = config.schedule.steps
    evaluations = 2 + max(0, steps // config.evaluation.every - 1) if config.evaluation.every else 0
    saves = (steps // config.checkpoint.every if config.checkpoint.every else 0) + config.checkpoint.at_end
    other = evaluations * step.evaluation_s + saves * step.checkpoint_s
    return run_cost(
        gpus=used_gpus(derived), step_s=step.seconds, steps=steps, price_per_gpu_hour=options.price, other_s=round(other, 3)
    )  # fmt: skip


# ---- what it rests on ------------------------------------------------------------------------------------------------


GIVEN_RATES = {
    "node_bus_bytes_per_second": "bus inside a node",
    "network_bytes_per_second": "network of a node",
    "disk_write_bytes_per_second": "disk, writing",
}


def _given(config: RunConfig, options: PlanOptions, hardware: Hardware, workload: Workload) -> list[Given]:
    """The inputs that somebody gave, measured, or nobody did."""
    named = given_options(options)
    measured = workload.basis == "measured"

    def of_hardware(field: str) -> str:
        return "given" if field in hardware.given else "measured (this machine)" if field in hardware.measured else "assumed"

    prompts = "measured" if measured else "given" if "prompt_tokens" in named else "assumed"
    rows = [
        Given(name="prompt tokens", value=f"{workload.prompt:,}", basis=prompts),
        Given(
            name="answer tokens", value=f"mean {fmean(workload.answers):,.0f}, longest {max(workload.answers):,}", basis=workload.basis
        ),
    ]  # fmt: skip
    rows += [
        Given(name=label, value=f"{getattr(hardware, field) / 1e9:g} GB/s", basis=of_hardware(field))
        for field, label in GIVEN_RATES.items()
    ]
    if hardware.device == "cpu":
        memory = f"{hardware.host_memory_bytes / 2**30:.1f} GiB"
        rows.append(Given(name="memory", value=memory, basis=of_hardware("host_memory_bytes")))
        rows.append(Given(name="cores", value=str(hardware.cores), basis=of_hardware("cores")))
    if config.weights.transport == "delta":
        basis = "given" if "changed" in named else "assumed"
        rows.append(Given(name="changed weights", value=f"{options.changed:.3%}", basis=basis))
    return rows


def _warnings(config: RunConfig, derived: Derived, hardware: Hardware) -> list[str]:
    found = list(hardware.warnings)
    if derived.device == "gpu":
        needed = used_gpus(derived)
        if needed > hardware.gpus:
            found.append(
                f"the run asks for {needed} GPUs and {hardware.name} has {hardware.gpus}: it would never be placed; lower "
                "training.ranks or engine.count, or name a larger machine"
            )
        if config.engine.tensor_parallel > hardware.gpus_per_node:
            found.append(
                f"engine.tensor_parallel={config.engine.tensor_parallel} crosses nodes of {hardware.gpus_per_node} GPUs: every token would "
                f"wait for the network; expected at most {hardware.gpus_per_node}"
            )
    return found
