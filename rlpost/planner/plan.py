"""A run's configuration, a machine and a calibration in; what the run will need out. ``rlpost.plan`` prints it.

``make_plan`` is pure but for reading the files that the options name (model shape, lengths, calibration).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rlpost.config.derive import Derived, derive
from rlpost.config.schema import RunConfig
from rlpost.planner.coefficients import Calibration, read_calibration
from rlpost.planner.cost import Cost, run_cost
from rlpost.planner.footprint import Footprint, footprint
from rlpost.planner.hardware import Hardware, find_hardware
from rlpost.planner.options import PlanOptions, given_options
from rlpost.planner.parts import (
    EnginePlan,
    PackingPlan,
    SplitPlan,
    StepPlan,
    SyncPlan,
    engine_plan,
    imbalance,
    packing_plan,
    plan_step,
    prefill_by_reuse,
    split_plan,
    sync_plan,
)
from rlpost.planner.seconds import (
    Job,
)
from rlpost.planner.shapes import ModelShape, load_shape
from rlpost.planner.workload import Workload, planned_workload
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Given:
    """One number that the plan rests on, and what it rests on itself: ``assumed``, ``given``, ``config``, or ``measured (from RUN)``."""

    name: str
    value: str
    basis: str


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

    @property
    def fits(self) -> bool:
        """Whether every process has room, and an engine's KV cache holds a sequence of the longest kind (vLLM refuses less)."""
        return self.memory.fits and (self.engine is None or self.engine.concurrency_longest >= 1)


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
        engine=None if derived.offline else engine_plan(job, memory, calibration),
        step=step,
        sync=None if derived.offline else sync_plan(job, calibration, options),
        split=split_plan(job, calibration, step),
        prefill=None if derived.offline else prefill_by_reuse(workload, options),
        imbalance=imbalance(shape, options),
        packing=packing_plan(config, options),
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


# ---- memory, cost ----------------------------------------------------------------------------------


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


def used_gpus(derived: Derived) -> int:
    """GPUs that the run's placement asks for; on CPU one machine."""
    return max(1, round(derived.totals.get("GPU", 1)))


def _cost(config: RunConfig, derived: Derived, hardware: Hardware, step: StepPlan, options: PlanOptions) -> Cost:
    steps = config.schedule.steps
    evaluations = 2 + max(0, steps // config.evaluation.every - 1) if config.evaluation.every else 0
    saves = (steps // config.checkpoint.every if config.checkpoint.every else 0) + config.checkpoint.at_end
    other = evaluations * step.evaluation_s + saves * step.checkpoint_s
    return run_cost(
        gpus=used_gpus(derived), step_s=step.seconds, steps=steps, price_per_gpu_hour=options.price, other_s=round(other, 3),
        unit="GPUs" if hardware.device == "gpu" else "machine",
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
