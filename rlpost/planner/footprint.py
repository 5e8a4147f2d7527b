"""The memory of every process that a run's configuration asks for: its setup, its table by phase, and whether it fits.

On a GPU machine a process has GPUs of its own, or (colocated) an engine and its trainer ranks share some. On CPU all processes share the
machine's memory, so what must fit is their sum.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from rlpost.config.derive import Derived
from rlpost.config.schema import RunConfig
from rlpost.planner.coefficients import Calibration
from rlpost.planner.hardware import Hardware
from rlpost.planner.memory import adapter_parameters, find_recipe, kv_bytes_per_token
from rlpost.planner.quantities import MIB
from rlpost.planner.roles import (
    PHASES,
    EngineSetup,
    MemoryTable,
    Phase,
    Role,
    TrainerSetup,
    beside,
    engine_table,
    frozen_table,
    trainer_table,
)
from rlpost.planner.shapes import Linear, ModelShape
from rlpost.planner.workload import Workload
from rlpost.types import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Process:
    """``count`` equal GPUs (on CPU: processes). ``base_bytes`` and ``factor`` are what a calibration measures, ``table`` is computed."""

    name: str
    roles: tuple[Role, ...]
    count: int
    table: MemoryTable
    base_bytes: float
    factor: float
    capacity_bytes: float
    basis: str

    def phase_bytes(self, phase: Phase) -> float:
        """Base and all lines of a phase."""
        return self.base_bytes + self.factor * self.table.phase_bytes(phase)

    @property
    def peak(self) -> tuple[Phase, float]:
        """The phase with most bytes, and how many."""
        return max(((phase, self.phase_bytes(phase)) for phase in PHASES), key=lambda one: one[1])

    @property
    def margin_bytes(self) -> float:
        """What is left at the peak; negative when it does not fit."""
        return self.capacity_bytes - self.peak[1]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """All processes of a run. ``shared``: they share one memory (CPU), of ``shared_bytes``."""

    processes: tuple[Process, ...]
    shared: bool
    shared_bytes: float

    @property
    def total_peak_bytes(self) -> float:
        """All processes' peaks together."""
        return sum(one.count * one.peak[1] for one in self.processes)

    @property
    def fits(self) -> bool:
        """Whether everything has room."""
        if self.shared:
            return self.total_peak_bytes <= self.shared_bytes
        return all(one.margin_bytes >= 0 for one in self.processes)

    def process(self, name: str) -> Process | None:
        """The process called ``name``."""
        return next((one for one in self.processes if one.name == name), None)


# ---- setups ----------------------------------------------------------------------------------------------------------


def lora_linears(config: RunConfig, shape: ModelShape) -> tuple[Linear, ...]:
    """The layers that training.lora.targets names. Raises ConfigError when it names none."""
    pattern = re.compile(config.training.lora.targets)
    found = tuple(one for one in shape.linears if pattern.search(f"model.layers.0.{_part(one.name)}.{one.name}"))
    if not found:
        raise ConfigError(f"training.lora.targets={config.training.lora.targets!r} matches none of {[one.name for one in shape.linears]}")
    return found


def _part(name: str) -> str:
    """The module of a layer that has this matrix."""
    return "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"


def trained_parameters(config: RunConfig, shape: ModelShape) -> int:
    """Parameters with an optimizer state: the adapters', or all."""
    rank = config.training.lora.rank
    return adapter_parameters(lora_linears(config, shape), rank) if rank else shape.parameters


def largest_row(config: RunConfig, derived: Derived, workload: Workload) -> int:
    """Tokens of the largest micro-batch: the limit, or all that a rank gets of a minibatch when that is less."""
    share = derived.attention == "padded"
    minibatches = derived.algorithm.minibatches
    micros = workload.micro_batches(share, ranks=derived.ranks, minibatches=minibatches, micro_batch_tokens=derived.micro_batch_tokens)
    each = -(-workload.row_tokens(share) // max(1, round(derived.ranks * micros)))
    return min(derived.micro_batch_tokens, max(each, max(workload.lengths)))


def trainer_setup(
    config: RunConfig, derived: Derived, shape: ModelShape, workload: Workload, row_tokens: int, *, critic: bool = False
) -> TrainerSetup:
    """How a rank of the policy, or of its critic, works."""
    training, minibatches = config.training, derived.algorithm.minibatches
    passes = workload.micro_batches(
        derived.attention == "padded", ranks=derived.ranks, minibatches=minibatches, micro_batch_tokens=derived.micro_batch_tokens
    )
    trained_share = workload.sampled_tokens / max(1, workload.row_tokens(derived.attention == "padded"))
    inside = derived.reference if derived.reference in ("initial", "moving_average") and not critic else "none"
    return TrainerSetup(
        ranks=derived.critic_ranks if critic else derived.ranks,
        recipe=find_recipe(training.optimizer.name),
        micro_batch_tokens=row_tokens,
        target_tokens=min(row_tokens, math.ceil(trained_share * row_tokens)),
        micro_batches=max(1, round(passes / minibatches)),
        logprob_chunk_tokens=training.logprob_chunk_tokens,
        checkpointing="full" if training.gradient_checkpointing else "selective",
        reshard_after_forward=training.reshard_after_forward,
        compute_bytes=DTYPE_BYTES[derived.dtype],
        padded_attention=derived.attention == "padded",
        adapters=0 if critic or not training.lora.rank else trained_parameters(config, shape),
        reference=inside,  # type: ignore[arg-type]
        baseline_bytes_per_parameter=DTYPE_BYTES[derived.dtype] if derived.weight_deltas and not critic else 0,
        bucket_bytes=config.weights.bucket_mib * MIB,
        device=derived.device,
    )


BATCHED_TOKENS = 8192
"""max_num_batched_tokens of an engine (rollout/engine.py), where no sequence is longer."""


def engine_setup(
    config: RunConfig, derived: Derived, shape: ModelShape, hardware: Hardware, calibration: Calibration, workload: Workload
) -> EngineSetup:
    """How one GPU of an engine works: on CPU its KV cache is given, on a GPU it fills engine.gpu_memory_utilization."""
    engine = config.engine
    each_engine = -(-workload.samples // derived.engines)
    setup = EngineSetup(
        kv_tokens=0,
        tensor_parallel=engine.tensor_parallel,
        weight_bytes_per_parameter=DTYPE_BYTES[derived.dtype],
        kv_bytes_per_element=DTYPE_BYTES[derived.dtype],
        max_num_seqs=min(engine.max_num_seqs, each_engine),
        batched_tokens=min(max(BATCHED_TOKENS, derived.max_model_len), max(1, workload.prefill // derived.engines)),
        bucket_bytes=config.weights.bucket_mib * MIB,
        device=derived.device,
    )
    each = kv_bytes_per_token(shape, bytes_per_element=setup.kv_bytes_per_element, tensor_parallel=engine.tensor_parallel)
    if derived.device == "cpu":
        return replace(setup, kv_tokens=int(engine.kv_cache_mib * MIB / each))
    empty = engine_table(shape, setup).role_peak_bytes("engine") + calibration.value("engine_base_bytes")
    room = hardware.accelerator.memory_bytes * engine.gpu_memory_utilization - empty
    return replace(setup, kv_tokens=max(0, int(room / each)))


def footprint(
    config: RunConfig, derived: Derived, shape: ModelShape, hardware: Hardware, calibration: Calibration, workload: Workload
) -> Footprint:
    """Every process of the run, and what it needs. Raises ConfigError for degrees that the model cannot be cut by."""
    colocated = config.placement.mode == "colocated" and derived.device == "gpu" and not derived.offline
    row = largest_row(config, derived, workload)
    capacity = hardware.host_memory_bytes if derived.device == "cpu" else hardware.accelerator.memory_bytes

    def process(name: str, roles: tuple[Role, ...], count: int, table: MemoryTable) -> Process:
        kind = "engine" if roles == ("engine",) else "trainer"
        base = sum(calibration.value(f"{one}_base_bytes") for one in (("trainer", "engine") if len(roles) > 1 else (kind,)))
        return Process(
            name=name, roles=roles, count=count, table=table, base_bytes=base, factor=calibration.value(f"{kind}_memory_factor"),
            capacity_bytes=capacity, basis=calibration.basis(f"{kind}_base_bytes"),
        )  # fmt: skip

    trainer = trainer_table(shape, trainer_setup(config, derived, shape, workload, row), offloaded=colocated)
    processes = []
    if derived.offline:
        processes.append(process("trainer", ("policy",), derived.ranks, trainer))
    else:
        engine = engine_table(shape, engine_setup(config, derived, shape, hardware, calibration, workload), sleeps=colocated)
        engine_gpus = derived.engines * (config.engine.tensor_parallel if derived.device == "gpu" else 1)
        if colocated:
            processes.append(process("trainer and engine", ("policy", "engine"), derived.ranks, beside(trainer, engine)))
        else:
            processes.append(process("trainer", ("policy",), derived.ranks, trainer))
            processes.append(process("engine", ("engine",), engine_gpus, engine))
    if derived.reference == "actor":
        processes.append(process("reference", ("reference",), 1, _frozen(config, derived, shape, row, "reference")))
    if derived.critic_ranks:
        table = trainer_table(shape, trainer_setup(config, derived, shape, workload, row, critic=True), role="critic")
        processes.append(process("critic", ("critic",), derived.critic_ranks, table))
    models = 0 if derived.offline else sum(reward.model is not None for reward in config.rewards)
    if models:
        processes.append(process("reward", ("reward",), models, _frozen(config, derived, shape, row, "reward")))
    return Footprint(processes=tuple(processes), shared=derived.device == "cpu", shared_bytes=float(hardware.host_memory_bytes))


def _frozen(config: RunConfig, derived: Derived, shape: ModelShape, row: int, role: Role) -> MemoryTable:
    return frozen_table(
        shape, row, role=role, logprob_chunk_tokens=config.training.logprob_chunk_tokens, compute_bytes=DTYPE_BYTES[derived.dtype],
        padded_attention=derived.attention == "padded", device=derived.device,
    )  # fmt: skip
