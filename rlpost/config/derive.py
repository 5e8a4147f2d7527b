"""What follows from a config without being written in it: sizes, resolved ``auto`` values, and the resources to ask Ray for.

Nothing here changes the config; ``--dry-run`` and the start of a run print what was derived. Pure: no torch, ray or
vllm is imported, so a dry run is quick and also works where they are not installed.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

from rlpost.config.algorithms import PAIRED, is_offline, reads_reference, with_defaults
from rlpost.config.schema import AlgorithmConfig, RewardConfig, RunConfig
from rlpost.types import ConfigError

Device = Literal["cpu", "gpu"]

SINGLE_TURN = "single_turn"
OBSERVATION_ALLOWANCE_TOKENS = 64
"""Room for the environment's text between two turns in a derived max_model_len; more is set by engine.max_model_len."""

ENGINE, COLOCATED = "engine", "colocated"
"""Roles of bundles that hold an engine; a colocated one holds its trainer ranks too."""
ROLE_LABEL = "rlpost-role"
"""Ray label of a node: trainer, rollout or shared. A node without it is shared."""

_DEVICE_FILES = Path("/dev")


@dataclass(frozen=True)
class Bundle:
    """One Ray placement bundle: what one part needs on one node. Bundles of one role are equal."""

    role: str
    index: int
    resources: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Derived:
    """Everything that a run takes from its config indirectly. Counts are per step, tokens are tokens."""

    device: Device
    dtype: str
    samples_per_step: int
    minibatch_prompts: tuple[int, ...]
    minibatch_samples: tuple[int, ...]
    """Prompts (groups) and trajectories of each optimizer step of one batch."""
    optimizer_steps: int
    algorithm: AlgorithmConfig
    """Without auto and null: what the algorithm's name stands for is filled in."""
    offline: bool
    warmup_steps: int
    old_logprobs: str
    reference: str
    """``none``, or algorithm.reference."""
    max_new_tokens: int
    max_model_len: int
    max_model_len_reason: str
    micro_batch_tokens: int
    attention: str
    engine_process: str
    weight_carrier: str
    """``collective``, ``ipc`` or ``disk``."""
    weight_deltas: bool
    weight_reason: str
    weight_backend: str
    buffer_slots: int
    engines: int
    ranks: int
    critic_ranks: int
    """0 without a critic."""
    row_count: int | None
    epochs: float | None
    bundles: tuple[Bundle, ...]

    @property
    def totals(self) -> dict[str, float]:
        """The sum of all bundles per resource."""
        names = sorted({name for bundle in self.bundles for name in bundle.resources})
        return {name: sum(bundle.resources.get(name, 0.0) for bundle in self.bundles) for name in names}


def resolve_device(config: RunConfig) -> Device:
    """``placement.device``; auto is gpu when this machine shows an NVIDIA device that CUDA_VISIBLE_DEVICES does not hide."""
    if config.placement.device == "cpu":
        return "cpu"
    if config.placement.device == "gpu":
        return "gpu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
    present = any(_DEVICE_FILES.glob("nvidia[0-9]*"))
    return "gpu" if present and not hidden else "cpu"


def resolve_dtype(config: RunConfig, device: Device) -> str:
    """``model.dtype``; auto is float32 on CPU (bfloat16 is several times slower there) and bfloat16 on GPU."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device == "cpu" else "bfloat16"


def resolve_engine_process(config: RunConfig, device: Device) -> str:
    """``engine.process``; auto is in_actor for a one-process engine on CPU, else separate."""
    if config.engine.process != "auto":
        return config.engine.process
    return "in_actor" if device == "cpu" and config.engine.tensor_parallel == 1 else "separate"


def resolve_attention(config: RunConfig, device: Device) -> str:
    """``training.attention``; auto is flash on a GPU in bfloat16 where the package flash_attn is installed, else padded."""
    if config.training.attention != "auto":
        return config.training.attention
    usable = device == "gpu" and resolve_dtype(config, device) == "bfloat16" and importlib.util.find_spec("flash_attn") is not None
    return "flash" if usable else "padded"


def resolve_weight_transport(config: RunConfig, device: Device) -> tuple[str, bool, str]:
    """What carries weights (collective, ipc or disk), whether deltas are sent, and why, in words."""
    weights = config.weights
    shared = device == "gpu" and config.placement.mode == "colocated"
    automatic = "ipc" if shared else "collective"
    reason = "engines and trainers share GPUs" if shared else "it needs neither a common machine nor a common directory"
    if weights.transport == "auto":
        return automatic, False, f"weights.transport=auto: {reason}"
    if weights.transport != "delta":
        return weights.transport, False, f"weights.transport={weights.transport}"
    carrier = automatic if weights.carrier == "auto" else weights.carrier
    why = f"weights.carrier=auto: {reason}" if weights.carrier == "auto" else f"weights.carrier={weights.carrier}"
    return carrier, True, f"weights.transport=delta, {why}"


def resolve_weight_backend(config: RunConfig, device: Device) -> str:
    """``weights.backend``; auto is gloo on CPU and where trainer and engine share a GPU (NCCL refuses two members on one), else nccl."""
    if config.weights.backend != "auto":
        return config.weights.backend
    return "gloo" if device == "cpu" or config.placement.mode == "colocated" else "nccl"


def resolve_old_logprobs(config: RunConfig) -> str:
    """``algorithm.old_logprobs``; auto is current when the ratio is 1 anyway, recompute at staleness 0, engine beyond it."""
    algorithm = config.algorithm
    if algorithm.old_logprobs != "auto":
        return algorithm.old_logprobs
    if config.schedule.max_staleness > 0:
        # A correction stands beside a ratio whose denominator is the policy before the update (decoupled PPO).
        return "engine" if algorithm.correction.level == "none" else "recompute"
    return "current" if algorithm.minibatches * algorithm.epochs == 1 else "recompute"


def resolve_reference(config: RunConfig) -> str:
    """``algorithm.reference`` where the loss or the reward reads a reference's logprobs, else none."""
    algorithm = config.algorithm
    if is_offline(algorithm):
        return algorithm.reference if reads_reference(algorithm) else "none"
    return algorithm.reference if algorithm.kl_coefficient > 0 or with_defaults(algorithm).advantage == "teacher" else "none"


def needs_critic(config: RunConfig) -> bool:
    """Whether advantages come from a value model."""
    return not is_offline(config.algorithm) and with_defaults(config.algorithm).advantage == "gae"


def reward_name(config: RewardConfig) -> str:
    """The reward's name in metrics and parts: ``name`` of the configuration, else the last part of ``function`` or ``model``."""
    return config.name or PurePath(config.model or config.function or "").name.rpartition(":")[2]


def longest_continuation(config: RunConfig) -> int:
    """The longest turn in tokens that training or evaluation samples."""
    evaluation = config.evaluation.max_new_tokens if config.evaluation.every > 0 else None
    return max(config.sampling.max_new_tokens, evaluation or 0)


def needed_model_len(config: RunConfig) -> tuple[int, str]:
    """The longest sequence in tokens that the prompt and the turns can make, and the sum in words."""
    if is_offline(config.algorithm):
        return config.data.max_tokens, "data.max_tokens"
    prompt, turn = config.data.max_prompt_tokens, longest_continuation(config)
    if config.environment.name == SINGLE_TURN:
        return prompt + turn, f"prompt {prompt} + continuation {turn}"
    turns = config.environment.max_turns
    between = max(0, turns - 1) * OBSERVATION_ALLOWANCE_TOKENS
    return prompt + turns * turn + between, f"prompt {prompt} + {turns} turns of {turn} + {between} for observations"


def longest_sequence(config: RunConfig) -> tuple[int, str]:
    """The longest sequence in tokens that a run can have, and why: ``engine.max_model_len`` of runs with engines, else what is needed."""
    if config.engine.max_model_len and not is_offline(config.algorithm):
        return config.engine.max_model_len, "engine.max_model_len"
    return needed_model_len(config)


def micro_batch_problem(config: RunConfig) -> str | None:
    """Why the longest sequence does not fit in one forward; None when it does."""
    length, reason = longest_sequence(config)
    what = "one sequence"
    if config.algorithm.name in PAIRED:
        length, reason, what = 2 * length, f"twice {reason}", "the two answers of a pair"
    if config.training.micro_batch_tokens >= length:
        return None
    return (
        f"training.micro_batch_tokens is {config.training.micro_batch_tokens}, but {what} may have {length} tokens ({reason}), which are "
        f"never split over forwards; set training.micro_batch_tokens={length} or more, or shorten the sequences"
    )


def placement_bundles(config: RunConfig, device: Device) -> tuple[Bundle, ...]:
    """One bundle a trainer rank, an engine, a critic's rank, a reward model and, if it is an actor, the reference. Offline: no engine.

    Colocated on GPU an engine and its ``tensor_parallel`` trainer ranks share the GPUs of one bundle. On CPU colocated
    only orders the phases, so the bundles are those of split.
    """
    placement, tensor_parallel = config.placement, config.engine.tensor_parallel

    def bundle(role: str, index: int, cpus: float, gpus: int) -> Bundle:
        return Bundle(role, index, {"CPU": cpus, "GPU": float(gpus)} if device == "gpu" else {"CPU": cpus})

    offline = is_offline(config.algorithm)
    if placement.mode == "colocated" and device == "gpu" and not offline:
        cpus = placement.engine_cpus + tensor_parallel * placement.trainer_cpus
        bundles = [bundle("colocated", i, cpus, tensor_parallel) for i in range(config.engine.count)]
    else:
        bundles = [bundle("trainer", i, placement.trainer_cpus, 1) for i in range(config.training.ranks)]
        bundles += [bundle("engine", i, placement.engine_cpus, tensor_parallel) for i in range(0 if offline else config.engine.count)]
    if resolve_reference(config) == "actor":
        bundles.append(bundle("reference", 0, placement.trainer_cpus, 1))
    if needs_critic(config):
        bundles += [bundle("critic", i, placement.trainer_cpus, 1) for i in range(config.algorithm.critic.ranks)]
    models = 0 if offline else sum(reward.model is not None for reward in config.rewards)
    return (*bundles, *(bundle("reward", i, placement.trainer_cpus, 1) for i in range(models)))


def derive(config: RunConfig, *, device: Device, row_count: int | None = None) -> Derived:
    """Work out every derived value; ``row_count`` is the number of training rows where it is known.

    ``config`` should have passed :func:`rlpost.config.checks.check`. Raises :class:`ConfigError` when the longest sequence does not fit
    in one micro-batch.
    """
    max_model_len, reason = longest_sequence(config)
    problem = micro_batch_problem(config)
    if problem:
        raise ConfigError(problem)
    schedule, algorithm = config.schedule, config.algorithm
    carrier, deltas, weight_reason = resolve_weight_transport(config, device)
    prompts = schedule.prompts_per_step // algorithm.minibatches
    offline = is_offline(algorithm)
    samples = 1 if offline else algorithm.group_size
    seen = schedule.steps * schedule.prompts_per_step
    return Derived(
        device=device,
        dtype=resolve_dtype(config, device),
        samples_per_step=schedule.prompts_per_step * samples,
        minibatch_prompts=(prompts,) * algorithm.minibatches,
        minibatch_samples=(prompts * samples,) * algorithm.minibatches,
        optimizer_steps=schedule.steps * algorithm.minibatches * algorithm.epochs,
        algorithm=with_defaults(algorithm),
        offline=offline,
        warmup_steps=config.training.optimizer.warmup_steps,
        old_logprobs=resolve_old_logprobs(config),
        reference=resolve_reference(config),
        max_new_tokens=longest_continuation(config),
        max_model_len=max_model_len,
        max_model_len_reason=reason,
        micro_batch_tokens=config.training.micro_batch_tokens,
        attention=resolve_attention(config, device),
        engine_process=resolve_engine_process(config, device),
        weight_carrier=carrier,
        weight_deltas=deltas,
        weight_reason=weight_reason,
        weight_backend=resolve_weight_backend(config, device),
        buffer_slots=(schedule.max_staleness + 1) * schedule.prompts_per_step,
        engines=0 if offline else config.engine.count,
        ranks=config.training.ranks,
        critic_ranks=algorithm.critic.ranks if needs_critic(config) else 0,
        row_count=row_count,
        epochs=seen / row_count if row_count else None,
        bundles=placement_bundles(config, device),
    )


def format_derived(derived: Derived) -> str:
    """The derived values and the placement as two plain-text tables."""
    d = derived
    unit = "rows" if d.offline else "samples"
    epochs = f", {d.algorithm.epochs} times" if d.algorithm.epochs > 1 else ""
    batch = f"{d.samples_per_step} {unit}, in {len(d.minibatch_samples)} optimizer step(s) of {d.minibatch_samples[0]}{epochs}"
    # Any greedy packing puts at least this many sequences into a row before one does not fit.
    per_forward = d.micro_batch_tokens // d.max_model_len
    forwards = sum(math.ceil(math.ceil(samples / d.ranks) / per_forward) for samples in d.minibatch_samples)
    rows = [
        ("device, dtype", f"{d.device}, {d.dtype}"),
        ("algorithm", _algorithm_line(d)),
        ("batch of a step", batch),
        ("micro-batches", f"{d.micro_batch_tokens} tokens; about {forwards} a rank and step if every sample is as long as it may be"),
        ("optimizer steps", f"{d.optimizer_steps}, warm-up {d.warmup_steps}"),
        ("training data", "rows not counted" if d.epochs is None else f"{d.row_count} rows, {d.epochs:.2f} epochs"),
        ("longest sequence", f"{d.max_model_len} tokens ({d.max_model_len_reason})"),
        ("reference", d.reference),
        ("attention", d.attention),
        ("trainer ranks", str(d.ranks)),
    ]
    if not d.offline:
        rows += [
            ("old logprobs", d.old_logprobs),
            ("rollout buffer", f"{d.buffer_slots} groups"),
            ("engines", f"{d.engines}, vLLM's core {d.engine_process}"),
            ("weight sync", weight_sync_line(d)),
        ]
    lines = ["derived:"] + [f"  {name:<18}{value}" for name, value in rows]
    return "\n".join([*lines, "", *_placement_lines(d)])


def _algorithm_line(derived: Derived) -> str:
    """What the algorithm's name stands for."""
    one = derived.algorithm
    if derived.offline:
        return f"{one.name}, offline"
    bounds = f"clipped at -{one.clip_low:g} and +{one.clip_high:g}"
    return f"{one.name}: advantage {one.advantage}, loss {one.policy_loss} {bounds}, {one.loss_aggregation}"


def weight_sync_line(derived: Derived) -> str:
    """How weights travel, and why so."""
    carrier = f"collective over {derived.weight_backend}" if derived.weight_carrier == "collective" else derived.weight_carrier
    return f"{'deltas by ' if derived.weight_deltas else ''}{carrier} ({derived.weight_reason})"


def _placement_lines(derived: Derived) -> list[str]:
    """One line for each kind of bundle, and the total."""
    kinds: dict[tuple[str, tuple[tuple[str, float], ...]], int] = {}
    for bundle in derived.bundles:
        kind = (bundle.role, tuple(bundle.resources.items()))
        kinds[kind] = kinds.get(kind, 0) + 1
    names = list(derived.totals)
    header = f"  {'part':<18}{'bundles':>8}" + "".join(f"{name + ' each':>12}" for name in names)
    lines = ["placement:", header]
    for (role, resources), count in kinds.items():
        lines.append(f"  {role:<18}{count:>8}" + "".join(f"{dict(resources).get(name, 0.0):>12g}" for name in names))
    total = "".join(f"{derived.totals[name]:>12g}" for name in names)
    return [*lines, f"  {'total':<18}{len(derived.bundles):>8}{total}"]
