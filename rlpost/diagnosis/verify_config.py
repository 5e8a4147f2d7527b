"""A user's configuration scaled down: which settings ``doctor verify`` changes, to what, and why. Pure.

What decides *what* is computed stays: algorithm, rewards, environment, data, temperature, corrections, LoRA, optimizer, checkpointing,
weight transport. What decides *how much* is made small; and what this machine has not is replaced, and named as not checked.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from rlpost.config.algorithms import PAIRED, is_offline
from rlpost.config.derive import (
    SINGLE_TURN,
    Device,
    needed_model_len,
    needs_critic,
    resolve_attention,
    resolve_device,
    resolve_dtype,
    resolve_old_logprobs,
    resolve_weight_backend,
    resolve_weight_transport,
    reward_name,
)
from rlpost.config.schema import RunConfig

STEPS, RESUMED_STEP = 4, 2
"""Of the run that is resumed: one step after the resume reads the loaded weights, the next what the loaded moments made of them."""
GROUPS, GROUP_SAMPLES, ROWS = 8, 4, 8
NEW_TOKENS = 16
DATA_ROWS, SHORTEST_ROWS = 64, 16
"""Rows that are read, and of them the shortest that are trained on: more would be the same check, only slower."""
LEAST_LR = 1e-3
"""Four steps with a usual rate of 1e-6 move weights by less than bfloat16 can tell, and nothing would be compared."""
KV_CACHE_MIB = 64
LONGEST_TOKENS = 4096
START_S, PHASE_S = 300.0, 120.0
DEADLINE, BOOKKEEPING = "a check has a deadline", "what the checks read"
"""Why settings change that say nothing of what is computed."""
SPREAD_REWARD = {"function": "rlpost.diagnosis.verify_reward:spread", "name": "verify_spread"}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the scaled run can use."""

    device: Device
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting of the user's that is another in the scaled run."""

    key: str
    found: Any
    value: Any
    why: str

    @property
    def quiet(self) -> bool:
        """Nothing that a reader of the findings needs to know."""
        return self.why in (DEADLINE, BOOKKEEPING)

    @property
    def word(self) -> str:
        """As it stands on a command line."""
        text = self.value if isinstance(self.value, str) else "null" if self.value is None else json.dumps(self.value)
        return f"{self.key}={text}"

    def __str__(self) -> str:
        shown = [one if isinstance(one, str) else json.dumps(one) for one in (self.found, self.value)]
        return f"{self.key}: {shown[0]} -> {shown[1]} ({self.why})"


@dataclass(frozen=True, kw_only=True)
class Models:
    """What stands in for the models of a configuration: their directories, by its keys; absent where they are used as they are."""

    paths: Mapping[str, str]
    random: bool
    """The policy has random weights, so that its answers are no answers."""
    parameters: tuple[str, ...] = ()
    """Names in the scaled policy; empty where it is used as it is."""


def this_machine(config: RunConfig) -> Machine:
    """GPUs that this machine shows, unless the configuration says CPU."""
    if config.placement.device == "cpu" or resolve_device(replace(config, placement=replace(config.placement, device="auto"))) == "cpu":
        return Machine(device="cpu", gpus=0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(visible.split(",")) if visible else len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Machine(device="gpu", gpus=gpus)


def scale(config: RunConfig, machine: Machine, models: Models, directory: Path, *, data: Mapping[str, Any] | None = None) -> list[Change]:
    """Every setting that changes. ``directory`` is where the scaled run writes, ``data`` what replaces the data set (None: nothing)."""
    settings: Iterator[tuple[str, Any, str]] = (
        one
        for rule in (_models(config, models), _data(config, data or {}), _sizes(config, machine), _machine(config, machine),
                     _algorithm(config, models), _optimizer(config, models), _weights(config), _bookkeeping(directory))
        for one in rule
    )  # fmt: skip
    found = []
    for key, value, why in settings:
        present = _plain(setting(config, key))
        if present != value:
            found.append(Change(key=key, found=present, value=value, why=why))
    return found


def fit_lengths(config: RunConfig, lengths: list[int]) -> list[Change]:
    """Limits of length for an otherwise scaled ``config``, from the tokens of its prompts (offline: rows): its shortest ones are used."""
    longest = sorted(lengths)[min(len(lengths), SHORTEST_ROWS) - 1]
    key = "data.max_tokens" if is_offline(config.algorithm) else "data.max_prompt_tokens"
    limited = replace(config, data=replace(config.data, **{key.partition(".")[2]: longest}))  # type: ignore[arg-type]
    model_len = config.engine.max_model_len
    if model_len is not None:
        needed = needed_model_len(limited)[0]
        model_len = None if config.environment.name == SINGLE_TURN else min(model_len, max(needed, LONGEST_TOKENS))
    sequence = model_len or needed_model_len(limited)[0]
    # Room for two of the longest, so that a micro-batch holds several sequences, and a step several micro-batches.
    tokens = min(config.training.micro_batch_tokens, 2 * sequence * (2 if config.algorithm.name in PAIRED else 1))
    wanted: list[tuple[str, Any, str]] = [
        (key, longest, "the shortest rows of those read"),
        ("engine.max_model_len", model_len, "as long as these rows need"),
        ("training.micro_batch_tokens", tokens, "a step of several micro-batches"),
    ]
    changes = []
    for name, value, why in wanted:
        present = setting(config, name)
        if present != value:
            changes.append(Change(key=name, found=present, value=value, why=why))
    return changes


def setting(config: RunConfig, key: str) -> Any:
    """The value of a key such as ``schedule.steps``."""
    return reduce(getattr, key.split("."), config)


def _plain(value: Any) -> Any:
    """Lists of sections as they stand in YAML."""
    if isinstance(value, list):
        return [{name: one for name, one in asdict(entry).items() if one is not None} if hasattr(entry, "__dataclass_fields__") else entry
                for entry in value]  # fmt: skip
    return value


Setting = tuple[str, Any, str]


def _models(config: RunConfig, models: Models) -> Iterator[Setting]:
    why = "the same architecture, small, with random weights"
    for key in ("model.path", "algorithm.reference_path"):
        if key in models.paths:
            yield key, models.paths[key], why
    if config.algorithm.critic.path is not None and "model.path" in models.paths:
        yield "algorithm.critic.path", None, "starts from the scaled model"
    rewards = _plain(config.rewards)
    for number, reward in enumerate(rewards):
        if own := models.paths.get(f"rewards.{number}.model"):
            rewards[number] = {**reward, "model": own, "name": reward_name(config.rewards[number])}
    if models.random and not is_offline(config.algorithm):
        yield "rewards", [*rewards, SPREAD_REWARD], "a random model's answers may all score alike: a number of the answer's text is added"
    else:
        yield "rewards", rewards, why


def _data(config: RunConfig, data: Mapping[str, Any]) -> Iterator[Setting]:
    for key, value in data.items():
        yield key, value, "the data set is not on this machine"
    yield "data.limit", min(config.data.limit or DATA_ROWS, DATA_ROWS), "the first rows"
    yield "data.overlong_prompts", "drop", "the shortest rows of those read"
    yield "data.evaluation", None, "nothing is evaluated"


def _sizes(config: RunConfig, machine: Machine) -> Iterator[Setting]:
    small = "small"
    parts = config.algorithm.minibatches
    least = ROWS if is_offline(config.algorithm) else GROUPS
    yield "schedule.steps", STEPS, small
    yield "schedule.prompts_per_step", parts * -(-least // parts), small
    yield "algorithm.group_size", min(config.algorithm.group_size, GROUP_SAMPLES), small
    yield "sampling.max_new_tokens", min(config.sampling.max_new_tokens, NEW_TOKENS), small
    yield "evaluation.every", 0, "nothing is evaluated"
    yield "environment.max_turns", min(config.environment.max_turns, 4), small
    room = machine.gpus - (1 if config.placement.mode == "split" and not is_offline(config.algorithm) else 0)
    ranks = min(config.training.ranks, 2 if machine.device == "cpu" else max(1, min(2, room)))
    yield "training.ranks", ranks, "2 ranks show what more would" if ranks == 2 else "GPUs of this machine"
    yield "algorithm.critic.ranks", 1, small
    yield "engine.count", ranks if machine.device == "gpu" and _colocated(config, machine) else 1, small
    yield "engine.max_num_seqs", min(config.engine.max_num_seqs, 64), small
    yield "engine.kv_cache_mib", min(config.engine.kv_cache_mib, KV_CACHE_MIB), small
    yield "reward_runner.workers", 1, small
    yield "training.logprob_chunk_tokens", min(config.training.logprob_chunk_tokens, 256), small
    yield "weights.bucket_mib", min(config.weights.bucket_mib, 8), small
    for key in ("schedule.start_timeout_s", "schedule.rollout_timeout_s"):
        yield key, min(setting(config, key), START_S), DEADLINE
    for key in ("schedule.phase_timeout_s", "weights.timeout_s", "engine.request_timeout_s", "placement.timeout_s"):
        yield key, min(setting(config, key), PHASE_S), DEADLINE


def _colocated(config: RunConfig, machine: Machine) -> bool:
    """One GPU is shared, whatever the configuration says of more."""
    return config.placement.mode == "colocated" or (machine.device == "gpu" and machine.gpus == 1 and not needs_critic(config))


def _machine(config: RunConfig, machine: Machine) -> Iterator[Setting]:
    yield "placement.ray_address", None, "this machine only"
    yield "placement.device", machine.device, "what this machine has"
    yield "placement.mode", "colocated" if _colocated(config, machine) else "split", "GPUs of this machine"
    yield "engine.tensor_parallel", 1, "one engine of one worker"
    # A share of a core each, so that Ray also grants two cores to six processes.
    yield "placement.trainer_cpus", 0.1, "Ray grants it on any machine"
    yield "placement.engine_cpus", 0.1, "Ray grants it on any machine"
    if machine.device == "cpu":
        yield "training.threads", 1, "what this machine has"
        yield "engine.threads", 1, "what this machine has"
        if config.training.attention == "flash":
            yield "training.attention", "auto", "flash needs a GPU"
        if config.weights.backend == "nccl":
            yield "weights.backend", "auto", "nccl needs GPUs"
        if config.engine.block_size % 32:
            yield "engine.block_size", 32, "vLLM on a CPU takes multiples of 32"
        if resolve_device(config) == "gpu":
            yield "engine.extra", {}, "arguments of an engine on a GPU"
    elif config.weights.backend == "nccl" and _colocated(config, machine):
        yield "weights.backend", "auto", "NCCL refuses two members on one GPU"


def _algorithm(config: RunConfig, models: Models) -> Iterator[Setting]:
    algorithm = config.algorithm
    yield "schedule.max_staleness", 0, "a resumed run is the same only without rollouts that run ahead"
    if config.schedule.max_staleness:
        yield "algorithm.old_logprobs", resolve_old_logprobs(config), "what auto stands for with the run's own max_staleness"
    if algorithm.filter.zero_variance != "keep":
        why = "a model that has not learnt yet may leave no group to train on"
        yield "algorithm.filter.zero_variance", "keep", why
        yield "algorithm.filter.least_mean", None, why
        yield "algorithm.filter.most_mean", None, why
    if models.random:
        yield "algorithm.filter.truncated", "keep", "a random model hardly ever ends an answer"
    buffer = min(algorithm.shaping.overlong_buffer, min(config.sampling.max_new_tokens, NEW_TOKENS) // 2)
    yield "algorithm.shaping.overlong_buffer", buffer, "in proportion to max_new_tokens"
    yield "algorithm.critic.warmup_steps", min(algorithm.critic.warmup_steps, 1), "so that the policy is trained too"
    yield "sampling.seeded", True, "so that two runs sample the same"


def _optimizer(config: RunConfig, models: Models) -> Iterator[Setting]:
    optimizer, trainable = config.training.optimizer, config.training.trainable
    if trainable != "all" and models.parameters and not any(re.search(trainable, name) for name in models.parameters):
        yield "training.trainable", "all", "the pattern names layers that the scaled model does not have"
    yield "training.optimizer.lr", max(optimizer.lr, LEAST_LR), "so that a few steps move the weights"
    yield "training.optimizer.warmup_steps", min(optimizer.warmup_steps, 1), "small"


def _weights(config: RunConfig) -> Iterator[Setting]:
    yield "weights.verify", "every_sync", "every sync is proven"
    yield "weights.directory", None, "nothing is written outside"
    if config.weights.transport == "delta":
        yield "weights.max_changed", 1.0, "every element of so small a model changes, and deltas are to be tried"


def _bookkeeping(directory: Path) -> Iterator[Setting]:
    why = BOOKKEEPING
    yield "name", "verify", why
    yield "output_dir", str(directory / "runs"), why
    yield "run_dir", None, why
    yield "resume", "never", why
    yield "checkpoint.every", RESUMED_STEP, why
    yield "checkpoint.keep", STEPS, why
    yield "checkpoint.at_end", True, why
    yield "checkpoint.max_restarts", 0, "a failure is what is looked for"
    yield "engine.max_restarts", 0, "a failure is what is looked for"
    yield "observe.trackers", ["jsonl"], why
    yield "observe.rollouts", "jsonl", why
    yield "observe.rollouts_every", 1, why
    yield "observe.print_sample", False, why


@dataclass(frozen=True, kw_only=True)
class NotChecked:
    """What the user's run will do and the scaled one did not."""

    name: str
    wanted: str
    instead: str
    because: str


def not_checked(config: RunConfig, scaled: RunConfig, machine: Machine) -> list[NotChecked]:
    """Paths of the user's run that the scaled run cannot take here: never said to be right."""
    device = resolve_device(config)
    pairs: list[tuple[str, str, str]] = [
        ("attention", resolve_attention(config, device), resolve_attention(scaled, machine.device)),
        ("dtype", resolve_dtype(config, device), resolve_dtype(scaled, machine.device)),
        ("ranks", f"{min(config.training.ranks, 2)} or more ranks", f"{min(scaled.training.ranks, 2)} or more ranks"),
        ("placement", config.placement.mode, scaled.placement.mode),
    ]
    if not is_offline(config.algorithm):
        pairs += [
            ("transport", _transport(config, device), _transport(scaled, machine.device)),
            ("tensor parallel engines", str(config.engine.tensor_parallel), str(scaled.engine.tensor_parallel)),
            ("rollouts that run ahead", str(config.schedule.max_staleness), str(scaled.schedule.max_staleness)),
        ]
    why = "this machine has no GPU" if machine.device == "cpu" and device == "gpu" else "the scaled run has one small engine and few ranks"
    return [NotChecked(name=name, wanted=wanted, instead=instead, because=why) for name, wanted, instead in pairs if wanted != instead]


def _transport(config: RunConfig, device: Device) -> str:
    """What carries weights, in words; memory shared on a GPU is not memory shared on a CPU."""
    carrier, deltas, _ = resolve_weight_transport(config, device)
    by = f"collective over {resolve_weight_backend(config, device)}" if carrier == "collective" else carrier
    by = f"ipc of a {device}" if carrier == "ipc" else by
    return f"deltas by {by}" if deltas else by
