"""One GPU's memory by role and phase: which lines stand there when, their sum, the peak.

A trainer rank is that of rlpost (FSDP2): float32 shards, one unit after another gathered in the compute dtype. Colocated, trainer and
engine take turns: the trainer's states are in host memory while engines generate, and engines sleep (no weights, no KV) in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from rlpost.planner.activations import Checkpointing, activation_lines, chunked_logits_lines, largest_tokens
from rlpost.planner.memory import MemoryLine, StateRecipe, kv_line, line, load_line, lora_lines, state_lines, total_bytes
from rlpost.planner.quantities import require_at_least, require_choice, require_positive
from rlpost.planner.shapes import ModelShape, check_tensor_parallel

Role = Literal["policy", "critic", "reference", "reward", "engine"]
Phase = Literal["generate", "logprob", "update", "sync", "checkpoint"]
PHASES: tuple[Phase, ...] = ("generate", "logprob", "update", "sync", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """What one role has on one GPU in one phase."""

    role: Role
    phase: Phase
    lines: tuple[MemoryLine, ...]

    @property
    def bytes(self) -> int:
        """Sum of the lines."""
        return total_bytes(self.lines)


@dataclass(frozen=True, kw_only=True)
class MemoryTable:
    """Everything on one GPU: roles that share it, phase by phase."""

    entries: tuple[PhaseMemory, ...]

    def phase_bytes(self, phase: Phase) -> int:
        """All roles together in a phase, bytes."""
        return sum(entry.bytes for entry in self.entries if entry.phase == phase)

    def role_peak_bytes(self, role: Role) -> int:
        """Most bytes that a role has in any phase."""
        return max((entry.bytes for entry in self.entries if entry.role == role), default=0)

    @property
    def peak(self) -> tuple[Phase, int]:
        """The phase with the most bytes, and how many."""
        return max(((phase, self.phase_bytes(phase)) for phase in PHASES), key=lambda one: one[1])


def beside(*tables: MemoryTable) -> MemoryTable:
    """Roles that share a GPU."""
    return MemoryTable(entries=tuple(entry for table in tables for entry in table.entries))


# ---- trainer ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainerSetup:
    """How a trainer rank works; ``adapters`` are parameters of LoRA adapters, 0 trains the model itself."""

    ranks: int
    recipe: StateRecipe
    micro_batch_tokens: int
    logprob_chunk_tokens: int = 1024
    checkpointing: Checkpointing = "selective"
    reshard_after_forward: bool = True
    compute_bytes: float = 2
    """Bytes of an element of the forward: 2 in bfloat16, 4 in float32."""
    padded_attention: bool = False
    adapters: int = 0
    bucket_bytes: int = 8 * 2**20
    """Of a weight sync; two are held."""


def trainer_table(shape: ModelShape, setup: TrainerSetup, *, role: Role = "policy", offloaded: bool = False) -> MemoryTable:
    """A trainer rank's memory, of the policy or of a critic. ``offloaded``: colocated, its states are in host memory while engines
    generate. A critic takes no part in syncs, and has values in place of logits.
    """
    shape = replace(shape, tied=True) if role == "critic" else shape  # a value head is in place of the output layer
    require_at_least(1, ranks=setup.ranks, logprob_chunk_tokens=setup.logprob_chunk_tokens)
    require_at_least(0, micro_batch_tokens=setup.micro_batch_tokens, adapters=setup.adapters)
    states, gathered = _states(shape, setup), _gathered_line(shape, setup)
    buckets = line("sync buckets", 2 * setup.bucket_bytes, f"2 x {setup.bucket_bytes:,} B")
    forward = (gathered, *_forward_lines(shape, setup, logits=role == "policy"))
    phases: dict[Phase, tuple[MemoryLine, ...]] = {
        "generate": () if offloaded else states,
        "logprob": (*states, *forward),
        "update": (*states, gathered, *_update_lines(shape, setup, logits=role == "policy")),
        "sync": (*states, buckets) if role == "policy" else states,
        "checkpoint": states,
    }
    return MemoryTable(entries=tuple(PhaseMemory(role=role, phase=phase, lines=lines) for phase, lines in phases.items()))


def _states(shape: ModelShape, setup: TrainerSetup) -> tuple[MemoryLine, ...]:
    if setup.adapters:
        return lora_lines(shape.parameters, setup.adapters, setup.recipe, base_bytes_per_parameter=setup.recipe.weights, ranks=setup.ranks)
    return state_lines(shape.parameters, setup.recipe, ranks=setup.ranks, matrix_parameters=shape.matrix_parameters)


def _gathered_line(shape: ModelShape, setup: TrainerSetup) -> MemoryLine:
    """What FSDP holds whole: everything, or its root unit (embedding, output layer) and two layers, of which one is on its way."""
    if not setup.reshard_after_forward:
        return line(
            "gathered weights", shape.parameters * setup.compute_bytes, f"{shape.parameters:,} parameters x {setup.compute_bytes:g} B"
        )
    held = shape.root_parameters + 2 * shape.largest_layer_parameters
    formula = f"(root {shape.root_parameters:,} + 2 x layer {shape.largest_layer_parameters:,}) x {setup.compute_bytes:g} B"
    return line("gathered weights", held * setup.compute_bytes, formula)


def _forward_lines(shape: ModelShape, setup: TrainerSetup, *, logits: bool) -> tuple[MemoryLine, ...]:
    """A pass without gradients: one layer at work, and the logits of a chunk."""
    tokens = setup.micro_batch_tokens
    lines = activation_lines(shape, tokens, checkpointing="offload", bytes_per_element=setup.compute_bytes, padded=setup.padded_attention)
    return (*lines, *(chunked_logits_lines(shape, tokens, setup.logprob_chunk_tokens, gradient=False) if logits else ()))


def _update_lines(shape: ModelShape, setup: TrainerSetup, *, logits: bool) -> tuple[MemoryLine, ...]:
    tokens, trained = setup.micro_batch_tokens, not setup.adapters
    unreduced = (shape.root_parameters + shape.largest_layer_parameters) * setup.compute_bytes
    formula = f"(root {shape.root_parameters:,} + layer {shape.largest_layer_parameters:,}) x {setup.compute_bytes:g} B"
    return (
        *activation_lines(
            shape, tokens, checkpointing=setup.checkpointing, bytes_per_element=setup.compute_bytes, padded=setup.padded_attention
        ),
        *((line("gradients before they are reduced", unreduced, formula),) if trained else ()),
        *(
            chunked_logits_lines(shape, tokens, setup.logprob_chunk_tokens, gradient=True, output_trained=trained) if logits else ()
        ),
    )  # fmt: skip


def largest_micro_batch_tokens(table_of: Callable[[int], MemoryTable], gpu_bytes: float) -> int:
    """Most tokens of a micro-batch with which the table's peak fits into ``gpu_bytes``; 0 when not even an empty one does."""
    require_positive(gpu_bytes=gpu_bytes)
    return largest_tokens(lambda tokens: table_of(tokens).peak[1], gpu_bytes)


# ---- frozen models and engines ---------------------------------------------------------------------------------------


def frozen_table(
    shape: ModelShape, tokens: int, *, role: Role, ranks: int = 1, bytes_per_parameter: float = 2, phases: Collection[Phase] = PHASES
) -> MemoryTable:
    """A model that only answers (reference, reward): its weights in ``phases``, and for logprobs one layer at work on ``tokens``."""
    require_at_least(1, ranks=ranks)
    shape = replace(shape, tied=True) if role == "reward" else shape  # as a critic's
    weights = load_line(shape.parameters, bytes_per_parameter)
    shared = line("weights", weights.bytes / ranks, f"{weights.formula} / {ranks} ranks" if ranks > 1 else weights.formula)
    work = activation_lines(shape, tokens, checkpointing="offload")
    return MemoryTable(
        entries=tuple(
            PhaseMemory(role=role, phase=phase, lines=(shared, *work) if phase == "logprob" else (shared,))
            for phase in PHASES
            if phase in phases
        )
    )


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """One GPU of a rollout engine; ``kv_tokens`` are those that the whole engine's cache holds."""

    kv_tokens: int
    tensor_parallel: int = 1
    weight_bytes_per_parameter: float = 2
    kv_bytes_per_element: float = 2
    graphs_bytes: int = 0
    """CUDA graphs and workspace: they stay while the engine sleeps."""
    bucket_bytes: int = 8 * 2**20


def engine_table(shape: ModelShape, setup: EngineSetup, *, sleeps: bool = False) -> MemoryTable:
    """A rollout engine's memory on one of its GPUs. ``sleeps``: colocated, it has weights and KV only while it generates, and takes in
    its weights without a KV cache.
    """
    check_tensor_parallel(shape, setup.tensor_parallel)
    require_at_least(0, kv_tokens=setup.kv_tokens, graphs_bytes=setup.graphs_bytes)
    whole = load_line(shape.parameters, setup.weight_bytes_per_parameter)
    weights = line("weights", whole.bytes / setup.tensor_parallel, f"{whole.formula} / {setup.tensor_parallel} GPUs")
    cache = kv_line(shape, setup.kv_tokens, bytes_per_element=setup.kv_bytes_per_element, tensor_parallel=setup.tensor_parallel)
    graphs = line("CUDA graphs and workspace", setup.graphs_bytes, "as given")
    buckets = line("sync buckets", 2 * setup.bucket_bytes, f"2 x {setup.bucket_bytes:,} B")
    awake = (weights, cache, graphs)

    def lines(phase: Phase) -> tuple[MemoryLine, ...]:
        if phase == "sync":
            return (weights, graphs, buckets) if sleeps else (*awake, buckets)
        return (graphs,) if sleeps and phase != "generate" else awake

    return MemoryTable(entries=tuple(PhaseMemory(role="engine", phase=phase, lines=lines(phase)) for phase in PHASES))


def engine_memory_share(table: MemoryTable, gpu_bytes: float) -> float:
    """``engine.gpu_memory_utilization`` with which the engine gets what its table says; above 1 it does not fit."""
    require_positive(gpu_bytes=gpu_bytes)
    return table.role_peak_bytes("engine") / gpu_bytes


# ---- algorithms ------------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[Role, ...]] = {
    "sft": ("policy",),
    "dpo": ("policy", "reference"),
    "grpo": ("policy", "reference", "engine"),
    "ppo": ("policy", "critic", "reference", "reward", "engine"),
}
"""Models that an algorithm keeps at once. The reference is not needed with kl_coefficient 0, precomputed logprobs or LoRA."""


def resident_lines(
    algorithm: str, parameters: int, recipe: StateRecipe, *, reference: bool = True, copy_bytes: float = 2
) -> tuple[MemoryLine, ...]:
    """States of every model of an algorithm over all GPUs, all of one size, without activations and KV: what methods are compared by."""
    require_choice("algorithm", algorithm, MODELS)
    roles: Iterable[Role] = (role for role in MODELS[algorithm] if reference or role != "reference")
    each = {role: recipe.total if role in ("policy", "critic") else copy_bytes for role in roles}
    return tuple(line(role, parameters * size, f"{parameters:,} parameters x {size:g} B") for role, size in each.items())
