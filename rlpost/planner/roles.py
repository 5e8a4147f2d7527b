"""One GPU's memory by role and phase: which lines stand there when, their sum, the peak.

A trainer rank is that of rlpost (FSDP2): float32 shards, one unit after another gathered in the compute dtype; gradients exist in the
update only. A phase's lines are those of its heaviest moment: an update has four (see trainer_table), which do not need the most of
everything at once. The phase ``load`` is the start: on a CPU the first rank holds the whole model that it has read beside the shards
(on a GPU it does so in host memory). Colocated, trainer and engine take turns: the trainer's states are in host memory while engines
generate, and engines sleep (no weights, no KV) in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlpost.config.derive import Device
from rlpost.planner.activations import LAYER_AT_WORK, Checkpointing, activation_lines, chunked_logits_lines, largest_tokens
from rlpost.planner.memory import RECIPES, MemoryLine, StateRecipe, kv_line, line, load_line, lora_lines, state_lines, total_bytes
from rlpost.planner.quantities import require_at_least, require_choice, require_positive
from rlpost.planner.shapes import ModelShape, check_tensor_parallel

Role = Literal["policy", "critic", "reference", "reward", "engine"]
Phase = Literal["load", "generate", "logprob", "update", "sync", "checkpoint"]
PHASES: tuple[Phase, ...] = ("load", "generate", "logprob", "update", "sync", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """What one role has on one GPU in one phase."""

    role: Role
    phase: Phase
    lines: tuple[MemoryLine, ...]
    moment: str = ""
    """The heaviest moment of the phase, where it has several."""

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

    def without_surplus(self) -> MemoryTable:
        """What is in use, without what malloc keeps on a CPU."""
        entries = (replace(entry, lines=tuple(one for one in entry.lines if one.name != SURPLUS)) for entry in self.entries)
        return MemoryTable(entries=tuple(entries))


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
    target_tokens: int | None = None
    """Those of a micro-batch that are trained on, whose logits are needed; None is all."""
    micro_batches: int = 1
    """Of one rank in one optimizer step. With more than one, the sum of their gradients stands beside the last one's activations: shards,
    or with ``reshard_after_forward`` false whole gradients."""
    logprob_chunk_tokens: int = 1024
    checkpointing: Checkpointing = "selective"
    reshard_after_forward: bool = True
    compute_bytes: float = 2
    """Bytes of an element of the forward: 2 in bfloat16, 4 in float32."""
    padded_attention: bool = False
    adapters: int = 0
    reference: Literal["none", "initial", "moving_average"] = "none"
    """A reference inside of the rank. ``initial`` is a float32 copy of the shards, on a GPU in host memory but for its own logprobs;
    ``moving_average`` has one of what is trained. (Adapters that are switched off cost nothing.)"""
    baseline_bytes_per_parameter: float = 0
    """What the engines hold, kept for deltas (weights.transport=delta): always in host memory, so only a CPU's rank counts it."""
    bucket_bytes: int = 8 * 2**20
    """Of a weight sync; two are held."""
    device: Device = "gpu"

    @property
    def rows(self) -> int:
        """Tokens whose logits a micro-batch needs."""
        return self.micro_batch_tokens if self.target_tokens is None else self.target_tokens


def trainer_table(shape: ModelShape, setup: TrainerSetup, *, role: Role = "policy", offloaded: bool = False) -> MemoryTable:
    """A trainer rank's memory, of the policy or of a critic. ``offloaded``: colocated, its states are in host memory while engines
    generate. A critic takes no part in syncs, and has values in place of logits.

    Moments of an update: the first logits' gradient, when all activations are there and no layer has a gradient yet; a layer's backward;
    the end of the backward pass, when embedding and output layer get theirs; the optimizer's step, when all activations are gone.
    """
    shape = replace(shape, tied=True) if role == "critic" else shape  # a value head is in place of the output layer
    require_at_least(1, ranks=setup.ranks, logprob_chunk_tokens=setup.logprob_chunk_tokens, micro_batches=setup.micro_batches)
    require_at_least(0, micro_batch_tokens=setup.micro_batch_tokens, target_tokens=setup.rows, adapters=setup.adapters)
    weights, gradients, optimizer = _states(shape, setup)
    kept = _kept_lines(shape, setup)
    states = (*weights, *optimizer, *kept)
    buckets = line("sync buckets", 2 * setup.bucket_bytes, f"2 x {setup.bucket_bytes:,} B")
    copy = _reference_lines(shape, setup) if setup.device == "gpu" else ()
    logits = role == "policy"
    moments: dict[Phase, dict[str, tuple[MemoryLine, ...]]] = {
        "load": {"": (*weights, *kept, _read_line(shape, setup))},
        "generate": {"": () if offloaded else states},
        "logprob": {what: (*states, *copy, *lines) for what, lines in _forward_moments(shape, setup, logits).items()},
        "update": {what: (*states, *lines) for what, lines in _update_moments(shape, setup, gradients, logits).items()},
        "sync": {"": (*states, buckets) if role == "policy" else states},
        "checkpoint": {"": states},
    }
    return _heaviest(role, moments, setup.recipe.surplus if setup.device == "cpu" else 0)


SURPLUS = "freed pieces that malloc keeps"
"""On a CPU only: pieces below 32 MiB that are freed stay with glibc's malloc, which is told so for speed (KEEP_FREED_MEMORY), and they
are used again with gaps between. What a trainer has of them is a share of what it uses, by its optimizer (StateRecipe.surplus); an
engine has them of what comes and goes while it generates (ENGINE_SURPLUS). Both are measured (benchmarks.plan_memory)."""


def _surplus_line(share: float, used: int) -> MemoryLine:
    return line(SURPLUS, share * used, f"{share:g} x {used:,} B")


def _heaviest(role: Role, moments: Mapping[Phase, Mapping[str, tuple[MemoryLine, ...]]], surplus: float = 0) -> MemoryTable:
    """Of each phase the moment with most bytes, and beside it what malloc keeps (at the start nothing was freed yet)."""
    entries = []
    for phase, choices in moments.items():
        moment, lines = max(choices.items(), key=lambda one: total_bytes(one[1]))
        kept = (_surplus_line(surplus, total_bytes(lines)),) if surplus and phase != "load" else ()
        entries.append(PhaseMemory(role=role, phase=phase, lines=(*lines, *kept), moment=moment))
    return MemoryTable(entries=tuple(entries))


def _states(shape: ModelShape, setup: TrainerSetup) -> tuple[tuple[MemoryLine, ...], ...]:
    """Weights, gradients, optimizer."""
    if setup.adapters:
        each = setup.recipe.weights
        base, weights, gradients, optimizer = lora_lines(
            shape.parameters, setup.adapters, setup.recipe, base_bytes_per_parameter=each, ranks=setup.ranks
        )
        return (base, weights), (gradients,), (optimizer,)
    states = state_lines(shape.parameters, setup.recipe, ranks=setup.ranks, matrix_parameters=shape.matrix_parameters)
    return states[:1], states[1:2], states[2:]


def _shard_line(name: str, parameters: int, each: float, ranks: int) -> MemoryLine:
    return line(name, parameters * each / ranks, f"{parameters:,} parameters x {each:g} B" + (f" / {ranks} ranks" if ranks > 1 else ""))


def _reference_lines(shape: ModelShape, setup: TrainerSetup) -> tuple[MemoryLine, ...]:
    return (_shard_line("copy of the initial weights", shape.parameters, 4, setup.ranks),) if setup.reference == "initial" else ()


def _kept_lines(shape: ModelShape, setup: TrainerSetup) -> tuple[MemoryLine, ...]:
    """What stands beside weights and optimizer all the time."""
    trained = setup.adapters or shape.parameters
    average = (_shard_line("average of past weights", trained, 4, setup.ranks),) if setup.reference == "moving_average" else ()
    if setup.device == "gpu":
        return average
    each = setup.baseline_bytes_per_parameter
    return (
        *average,
        *_reference_lines(shape, setup),
        *((_shard_line("what engines hold, for deltas", shape.parameters, each, setup.ranks),) if each else ()),
    )


def _read_line(shape: ModelShape, setup: TrainerSetup) -> MemoryLine:
    """The model as it is read: all of it on a CPU, a tensor at a time where it lies in host memory."""
    if setup.device == "cpu":
        return line("model as it is read", shape.parameters * 4, f"{shape.parameters:,} parameters x 4 B")
    return line("largest tensor as it is read", _largest_tensor(shape) * 4, f"{_largest_tensor(shape):,} elements x 4 B")


def _largest_tensor(shape: ModelShape) -> int:
    experts = shape.experts * 2 * shape.expert_feed_forward * shape.hidden  # gate and up of all experts are one tensor
    return max(shape.vocabulary * shape.hidden, shape.feed_forward * shape.hidden, experts)


def _gathered_line(shape: ModelShape, setup: TrainerSetup) -> MemoryLine:
    """What FSDP holds whole: everything, or its root unit (embedding, output layer) and two layers, of which one is on its way; a rank
    alone copies its own shards, a layer at a time."""
    if not setup.reshard_after_forward:
        return line(
            "gathered weights", shape.parameters * setup.compute_bytes, f"{shape.parameters:,} parameters x {setup.compute_bytes:g} B"
        )
    layers = 1 if setup.ranks == 1 else 2
    held = shape.root_parameters + layers * shape.largest_layer_parameters
    formula = f"(root {shape.root_parameters:,} + {layers} x layer {shape.largest_layer_parameters:,}) x {setup.compute_bytes:g} B"
    return line("gathered weights", held * setup.compute_bytes, formula)


def _activations(shape: ModelShape, setup: TrainerSetup, checkpointing: Checkpointing) -> tuple[tuple[MemoryLine, ...], ...]:
    """What is kept of a forward, and the one layer at work (nothing where all layers are kept)."""
    lines = activation_lines(
        shape, setup.micro_batch_tokens, checkpointing=checkpointing, bytes_per_element=setup.compute_bytes, padded=setup.padded_attention
    )
    working = tuple(one for one in lines if one.name == LAYER_AT_WORK)
    return tuple(one for one in lines if one not in working), working


def _forward_moments(shape: ModelShape, setup: TrainerSetup, logits: bool) -> dict[str, tuple[MemoryLine, ...]]:
    """A pass without gradients: one layer at work, then the logits of a chunk."""
    gathered, (kept, working) = _gathered_line(shape, setup), _activations(shape, setup, "offload")
    chunk = chunked_logits_lines(shape, setup.rows, setup.logprob_chunk_tokens, gradient=False) if logits else ()
    return {"a layer": (gathered, *kept, *working), "logits": (gathered, *kept, *chunk)}


def _update_moments(
    shape: ModelShape, setup: TrainerSetup, gradients: tuple[MemoryLine, ...], logits: bool
) -> dict[str, tuple[MemoryLine, ...]]:
    trained, each = setup.adapters or shape.parameters, setup.compute_bytes
    gathered, (kept, working) = _gathered_line(shape, setup), _activations(shape, setup, setup.checkpointing)
    if setup.micro_batches > 1:
        shards = setup.ranks if setup.reshard_after_forward else 1
        kept = (*kept, _shard_line("gradients of earlier micro-batches", trained, 4, shards))
    chunk, *output = (
        chunked_logits_lines(
            shape, setup.rows, setup.logprob_chunk_tokens, gradient=True, output_trained=not setup.adapters, compute_bytes=each
        )
        if logits
        else (line("values", setup.rows * 4, f"{setup.rows:,} tokens x 4 B"),)
    )
    moments = {
        "logits": (gathered, *kept, chunk, *output),
        "backward of a layer": (gathered, *kept, *working, *output, *_layer_gradients(shape, setup)),
        "optimizer step": (*gradients, _step_line(shape, setup)),
    }
    if not setup.adapters:
        moments["end of the backward pass"] = (*gradients, _root_gradients_line(shape, setup))
    return moments


def _earlier_gradients_line(setup: TrainerSetup, trained: int) -> MemoryLine:
    """Reduced after each micro-batch; kept whole until the last where weights stay whole too."""
    if setup.reshard_after_forward:
        return _shard_line("gradients of earlier micro-batches", trained, 4, setup.ranks)
    return line("gradients of earlier micro-batches", trained * 4, f"{trained:,} parameters x 4 B, not sharded")


def _layer_gradients(shape: ModelShape, setup: TrainerSetup) -> tuple[MemoryLine, ...]:
    """Of a layer's backward: gradients to its gate, up and product; to its weights, before, while and after they are reduced."""
    width = shape.experts_per_token * shape.expert_feed_forward if shape.sparse_layers else shape.feed_forward
    tokens, each = setup.micro_batch_tokens, setup.compute_bytes
    inside = line("gradients inside of a layer", tokens * 3 * width * each, f"{tokens:,} tokens x 3 x {width} x {each:g} B")
    if setup.adapters:
        return (inside,)
    size, reduced = shape.largest_layer_parameters, 4 + 4 / setup.ranks
    formula = f"{size:,} parameters of a layer x ({each:g} + {reduced:g}) B"
    return inside, line("gradients that are being reduced", size * (each + reduced), formula)


def _root_gradients_line(shape: ModelShape, setup: TrainerSetup) -> MemoryLine:
    """Embedding and output layer, which FSDP reduces last and together: their gradients and the buffer that is sent."""
    size, each = shape.root_parameters, setup.compute_bytes + 4
    return line("gradients of embedding and output layer", size * each, f"{size:,} parameters x ({setup.compute_bytes:g} + 4) B")


def _step_line(shape: ModelShape, setup: TrainerSetup) -> MemoryLine:
    """What the optimizer's step makes beside its states."""
    trained, recipe = setup.adapters or shape.parameters, setup.recipe
    largest = trained if setup.adapters else _largest_tensor(shape)
    if recipe.step_tensor:
        formula = f"{largest:,} elements of the largest tensor x {recipe.step_tensor:g} B / {setup.ranks} ranks"
        return line("optimizer step", largest * recipe.step_tensor / setup.ranks, formula)
    return _shard_line("optimizer step", trained, recipe.step_shard, setup.ranks)


def largest_micro_batch_tokens(table_of: Callable[[int], MemoryTable], gpu_bytes: float) -> int:
    """Most tokens of a micro-batch with which the table's peak fits into ``gpu_bytes``; 0 when not even an empty one does."""
    require_positive(gpu_bytes=gpu_bytes)
    return largest_tokens(lambda tokens: table_of(tokens).peak[1], gpu_bytes)


# ---- frozen models and engines ---------------------------------------------------------------------------------------


def frozen_table(
    shape: ModelShape,
    tokens: int,
    *,
    role: Role,
    ranks: int = 1,
    bytes_per_parameter: float = 4,
    phases: Collection[Phase] = PHASES,
    logprob_chunk_tokens: int = 1024,
    compute_bytes: float = 2,
    padded_attention: bool = False,
    device: Device = "gpu",
) -> MemoryTable:
    """A model in a process of its own that only answers (reference, reward): its weights in ``phases``, in rlpost float32 shards as a
    trainer's; and while it answers what a trainer has in a pass for logprobs on ``tokens``. A reward model has no logits.
    """
    shape = replace(shape, tied=True) if role == "reward" else shape  # as a critic's
    require_at_least(1, ranks=ranks)
    require_positive(bytes_per_parameter=bytes_per_parameter)
    setup = TrainerSetup(
        ranks=ranks, recipe=RECIPES["adamw"], micro_batch_tokens=tokens, logprob_chunk_tokens=logprob_chunk_tokens,
        compute_bytes=compute_bytes, padded_attention=padded_attention, device=device,
    )  # fmt: skip
    weights = _shard_line("weights", shape.parameters, bytes_per_parameter, ranks)
    moments: dict[Phase, dict[str, tuple[MemoryLine, ...]]] = {phase: {"": (weights,)} for phase in PHASES if phase in phases}
    if "load" in phases:
        moments["load"] = {"": (weights, _read_line(shape, setup))}
    if "logprob" in phases:
        work = _forward_moments(shape, setup, logits=role != "reward")
        moments["logprob"] = {what: (weights, *lines) for what, lines in work.items()}
    return _heaviest(role, moments, setup.recipe.surplus if device == "cpu" else 0)


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """One GPU of a rollout engine; ``kv_tokens`` are those that the whole engine's cache holds."""

    kv_tokens: int
    tensor_parallel: int = 1
    weight_bytes_per_parameter: float = 2
    """Also of an element of its activations."""
    kv_bytes_per_element: float = 2
    max_num_seqs: int = 256
    """Sequences that are sampled at once: the engine's limit, or fewer where a run has fewer samples."""
    batched_tokens: int = 8192
    """Prompt tokens that one step computes: the engine's limit, or fewer where a batch's prompts have fewer."""
    graphs_bytes: int = 0
    """CUDA graphs and workspace: they stay while the engine sleeps."""
    bucket_bytes: int = 8 * 2**20
    device: Device = "gpu"


ENGINE_SURPLUS = 1.5
"""See SURPLUS: steps with one number of prompt tokens after another leave pieces that the next do not fit into."""

SAMPLING_COPIES = 5
"""Of ``[sequences, vocabulary]`` in float32 while an engine samples: logits, their log-softmax, probabilities, random numbers, and what
makes one of the other."""


def engine_table(shape: ModelShape, setup: EngineSetup, *, sleeps: bool = False) -> MemoryTable:
    """A rollout engine's memory on one of its GPUs. ``sleeps``: colocated, it has weights and KV only while it generates, and takes in
    its weights without a KV cache; it is up and asleep before trainers load. The cache is filled with zeros at the start, also on a CPU,
    so all of it counts from then on.
    """
    check_tensor_parallel(shape, setup.tensor_parallel)
    require_at_least(0, kv_tokens=setup.kv_tokens, graphs_bytes=setup.graphs_bytes, batched_tokens=setup.batched_tokens)
    require_at_least(0, max_num_seqs=setup.max_num_seqs)
    whole = load_line(shape.parameters, setup.weight_bytes_per_parameter)
    weights = line("weights", whole.bytes / setup.tensor_parallel, f"{whole.formula} / {setup.tensor_parallel} GPUs")
    cache = kv_line(shape, setup.kv_tokens, bytes_per_element=setup.kv_bytes_per_element, tensor_parallel=setup.tensor_parallel)
    graphs = line("CUDA graphs and workspace", setup.graphs_bytes, "as given")
    buckets = line("sync buckets", 2 * setup.bucket_bytes, f"2 x {setup.bucket_bytes:,} B")
    awake = (weights, cache, graphs)
    asleep = (graphs,) if sleeps else awake
    moments: dict[Phase, dict[str, tuple[MemoryLine, ...]]] = {
        "load": {"": asleep},
        "generate": {
            what: (*awake, one, *((_surplus_line(ENGINE_SURPLUS, one.bytes),) if setup.device == "cpu" else ()))
            for what, one in _generation_lines(shape, setup).items()
        },
        "logprob": {"": asleep},
        "update": {"": asleep},
        "sync": {"": (weights, graphs, buckets) if sleeps else (*awake, buckets)},
        "checkpoint": {"": asleep},
    }
    return _heaviest("engine", moments)


def _generation_lines(shape: ModelShape, setup: EngineSetup) -> dict[str, MemoryLine]:
    """By moment: prompts on their way through a layer's feed-forward part (gate, up, their product; residual, input, output), sampling."""
    width = shape.experts_per_token * shape.expert_feed_forward if shape.sparse_layers else shape.feed_forward
    tokens, each, degree = setup.batched_tokens, setup.weight_bytes_per_parameter, setup.tensor_parallel
    prompts = tokens * (3 * width / degree + 3 * shape.hidden) * each
    formula = f"{tokens:,} tokens x 3 x ({width}{f' / {degree} GPUs' if degree > 1 else ''} + {shape.hidden}) x {each:g} B"
    logits = SAMPLING_COPIES * setup.max_num_seqs * shape.vocabulary * 4
    sampled = f"{SAMPLING_COPIES} x {setup.max_num_seqs} sequences x {shape.vocabulary:,} x 4 B"
    return {"prompts": line("prompts in a layer", prompts, formula), "sampling": line("logits and sampling", logits, sampled)}


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
