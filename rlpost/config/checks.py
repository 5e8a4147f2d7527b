"""Do the settings of a config work together? Every contradiction is found before Ray starts, and all are reported at once.

A check is a function that yields problems: what was found, why it cannot work, and what to set instead. A new one
is such a function and its name in ``_CHECKS``. No check changes the config.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

from rlpost.config.algorithm_checks import check_algorithm, warn_algorithm
from rlpost.config.algorithms import is_offline, with_defaults
from rlpost.config.derive import (
    SINGLE_TURN,
    Device,
    longest_continuation,
    micro_batch_problem,
    resolve_device,
    resolve_dtype,
    resolve_engine_process,
    resolve_old_logprobs,
    resolve_weight_transport,
    reward_name,
)
from rlpost.config.fields import joined
from rlpost.config.inputs import check_inputs, out_of_reach, warn_inputs
from rlpost.config.schema import RunConfig
from rlpost.types import ConfigError

TRACKERS = {"console": None, "jsonl": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""The known trackers and the package that each needs."""

CPU_BLOCK_TOKENS = 32
"""vLLM's CPU attention takes KV blocks of a multiple of this many tokens."""

AT_LEAST_ONE = (
    "data.max_prompt_tokens", "data.max_tokens", "data.limit", "environment.max_turns", "algorithm.epochs", "algorithm.kl_horizon",
    "algorithm.critic.ranks", "algorithm.filter.max_resampled", "reward_runner.workers", "algorithm.group_size",
    "algorithm.minibatches", "sampling.max_new_tokens", "schedule.steps", "schedule.prompts_per_step", "training.ranks",
    "training.micro_batch_tokens", "training.logprob_chunk_tokens", "training.threads", "engine.count", "engine.tensor_parallel",
    "engine.max_model_len", "engine.max_num_seqs", "engine.kv_cache_mib", "engine.block_size", "engine.threads", "weights.bucket_mib",
    "weights.verify_every", "weights.keyframe_every",
    "evaluation.prompts", "evaluation.samples", "evaluation.max_new_tokens", "checkpoint.keep", "observe.rollouts_every",
)  # fmt: skip
AT_LEAST_ZERO = (
    "seed", "training.lora.rank", "algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "algorithm.kl_coefficient",
    "algorithm.correction.low", "algorithm.shaping.overlong_buffer", "algorithm.shaping.overlong_penalty",
    "algorithm.shaping.length_penalty", "algorithm.critic.warmup_steps", "algorithm.critic.clip", "algorithm.preference.likelihood",
    "algorithm.preference.centering", "algorithm.preference.desirable", "algorithm.preference.undesirable", "schedule.max_staleness",
    "training.optimizer.weight_decay", "training.optimizer.clip_norm", "training.optimizer.warmup_steps", "engine.max_restarts",
    "placement.trainer_cpus", "placement.engine_cpus", "evaluation.every", "evaluation.temperature", "checkpoint.every",
    "checkpoint.max_restarts", "weights.max_consecutive_fallbacks",
)  # fmt: skip
ABOVE_ZERO = (
    "environment.timeout_s", "reward_runner.timeout_s", "schedule.rollout_timeout_s", "schedule.phase_timeout_s",
    "schedule.start_timeout_s", "training.optimizer.lr", "training.optimizer.eps", "engine.request_timeout_s",
    "weights.timeout_s", "placement.timeout_s", "training.lora.alpha", "algorithm.kl_target", "algorithm.correction.high",
    "algorithm.critic.lr", "algorithm.critic.coefficient", "algorithm.preference.beta",
)  # fmt: skip
SHARES = (
    "reward_runner.max_failed_fraction", "training.optimizer.final_ratio", "algorithm.gamma", "algorithm.gae_lambda",
    "algorithm.preference.label_smoothing",
)  # fmt: skip
SHARES_ABOVE_ZERO = ("engine.gpu_memory_utilization", "evaluation.top_p", "weights.max_changed", "algorithm.filter.top_entropy")
BELOW_ONE = ("training.optimizer.beta1", "training.optimizer.beta2", "algorithm.reference_decay")
TEMPERATURES = ("sampling.temperature", "evaluation.temperature")

MOST_LORA_RANK = 512

MOST_BFLOAT16_BETA2 = 0.99
"""bfloat16 rounds a second moment's decay of 0.996 and more away."""

MOST_TEMPERATURE = 2.0
"""vLLM's SamplingParams refuse a request with a higher one: every request of the run, when Ray and the engines are already up."""

ENGINE_OWNED = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "engine.kv_cache_mib",
    "block_size": "engine.block_size",
    "enable_prefix_caching": "engine.prefix_caching",
    "tensor_parallel_size": "engine.tensor_parallel",
    "distributed_executor_backend": "engine.process",
    "enable_sleep_mode": "placement.mode",
    "weight_transfer_config": "weights.transport",
    "enable_lora": "training.lora.rank",
    "max_loras": None,
    "max_cpu_loras": None,
    "max_lora_rank": "training.lora.rank",
    "lora_dtype": "model.dtype",
    "seed": "seed",
    "logprobs_mode": None,
    "max_logprobs": None,
    "worker_extension_cls": None,
    "skip_tokenizer_init": None,
}
"""vLLM arguments that rlpost sets, and the key that rules each; None is fixed, because training depends on it."""


def check(config: RunConfig, elsewhere: Sequence[str] = ()) -> list[str]:
    """Check all settings together and return warnings: what works, but is probably not meant.

    Raises one :class:`ConfigError` that lists every problem. Reads the file system (model directory, data files), changes nothing.
    ``elsewhere`` are directories of the machines where the run takes place: what it reads below them may be missing here, and a warning
    names it.
    """
    device = resolve_device(config)
    unseen = out_of_reach(config, elsewhere)
    checks = _CHECKS if is_offline(config.algorithm) else (*_CHECKS, *_ENGINE_CHECKS)
    problems = [problem for function in checks for problem in function(config, device)] + list(check_inputs(config, unseen))
    if problems:
        raise ConfigError(joined(problems, lambda count: f"{count} settings cannot work:"))
    own = [] if is_offline(config.algorithm) else [*_warnings(config, device)]
    found = [*warn_algorithm(config), *own, *_common_warnings(config, device), *warn_inputs(config)]
    if unseen:
        found.append("not checked here, only the run sees it: " + ", ".join(f"{key}={path}" for key, path in unseen.items()))
    return found


def _value(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _ranges(config: RunConfig, device: Device) -> Iterator[str]:
    bounds: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
        (AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
        (AT_LEAST_ZERO, lambda v: v >= 0, "0 or more"),
        (ABOVE_ZERO, lambda v: v > 0, "more than 0"),
        (SHARES, lambda v: 0 <= v <= 1, "a share between 0 and 1"),
        (SHARES_ABOVE_ZERO, lambda v: 0 < v <= 1, "more than 0 and at most 1"),
        (BELOW_ONE, lambda v: 0 <= v < 1, "0 or more and below 1"),
        (TEMPERATURES, lambda v: v <= MOST_TEMPERATURE, f"at most {MOST_TEMPERATURE:g}: vLLM refuses every request above it"),
    ]
    for keys, holds, expected in bounds:
        for key in keys:
            value = _value(config, key)
            if value is not None and not holds(value):
                yield f"{key} is {value}, expected {expected}"
    top_k = config.evaluation.top_k
    if top_k != -1 and top_k < 1:
        yield f"evaluation.top_k is {top_k}, expected -1 (off) or at least 1"


def _batch(config: RunConfig, device: Device) -> Iterator[str]:
    schedule, algorithm, ranks = config.schedule, config.algorithm, config.training.ranks
    prompts, parts = schedule.prompts_per_step, algorithm.minibatches
    group_size = 1 if is_offline(algorithm) else algorithm.group_size
    if parts < 1 or prompts < 1 or ranks < 1:
        return  # reported by _ranges
    if prompts % parts:
        below, above = prompts // parts * parts, (prompts // parts + 1) * parts
        nearest = f"{below} or {above}" if below else str(above)
        yield (
            f"schedule.prompts_per_step={prompts} cannot be split into algorithm.minibatches={parts} equal parts of whole groups; "
            f"the nearest that fit are schedule.prompts_per_step={nearest}, or algorithm.minibatches={_nearest_divisor(prompts, parts)}"
        )
    elif prompts // parts * group_size < ranks:
        samples = prompts // parts * group_size
        fitting = -(-ranks // max(1, group_size)) * parts
        yield (
            f"a batch of {prompts} prompts x {group_size} samples in {parts} minibatch(es) gives {samples} trajectories for "
            f"training.ranks={ranks}: some ranks would have nothing to train on; the nearest that fits is "
            f"schedule.prompts_per_step={fitting}, or training.ranks={samples}"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), d))


def _training(config: RunConfig, device: Device) -> Iterator[str]:
    optimizer = config.training.optimizer
    total = config.schedule.steps * max(1, config.algorithm.minibatches * config.algorithm.epochs)
    if optimizer.warmup_steps > total:
        yield (
            f"training.optimizer.warmup_steps={optimizer.warmup_steps} is more than the run's {total} optimizer steps, so the peak "
            f"learning rate is never reached; set it to {total} or less"
        )
    yield from _lora(config)
    yield from _optimizer(config)
    try:
        re.compile(config.training.trainable)
    except re.error as error:
        yield (
            f"training.trainable={config.training.trainable!r} is not a regular expression ({error}); "
            "give `all` or a pattern of parameter names"
        )


def _optimizer(config: RunConfig) -> Iterator[str]:
    optimizer, lora = config.training.optimizer, config.training.lora
    if optimizer.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        yield (
            "training.optimizer.name=adamw_8bit needs torchao, which is not installed here: pip install --no-deps 'torchao==0.18.*' on "
            "every node, or take adamw_bf16"
        )
    if optimizer.name == "adamw_bf16" and optimizer.beta2 > MOST_BFLOAT16_BETA2:
        yield (
            f"training.optimizer.beta2={optimizer.beta2} with training.optimizer.name=adamw_bf16: a second moment in bfloat16 cannot decay "
            f"so slowly and would stay at its highest; set beta2 to at most {MOST_BFLOAT16_BETA2}, or take adamw or adamw_8bit"
        )
    if optimizer.name == "muon" and lora.rank:
        yield (
            f"training.optimizer.name=muon with training.lora.rank={lora.rank}: muon is for the layers' weight matrices, which LoRA does "
            "not train; take adamw"
        )


def _lora(config: RunConfig) -> Iterator[str]:
    lora = config.training.lora
    if not lora.rank:
        return
    if config.training.trainable != "all":
        yield (
            f"training.trainable={config.training.trainable} with training.lora.rank={lora.rank}: only the adapters are trained; "
            "say where they are with training.lora.targets, and set training.trainable=all"
        )
    if lora.sync == "adapter" and config.weights.transport == "delta":
        yield (
            "weights.transport=delta with training.lora.sync=adapter: adapters travel alone already, and there is nothing else to compare; "
            "set another transport, or training.lora.sync=merged"
        )
    if lora.sync == "adapter" and lora.rank > MOST_LORA_RANK:
        yield f"training.lora.rank={lora.rank}: vLLM takes at most {MOST_LORA_RANK}; lower it or set training.lora.sync=merged"
    try:
        re.compile(lora.targets)
    except re.error as error:
        yield f"training.lora.targets={lora.targets!r} is not a regular expression ({error}); give a pattern of layer names"


def _rewards(config: RunConfig, device: Device) -> Iterator[str]:
    judged = with_defaults(config.algorithm).advantage == "teacher"
    if not config.rewards and config.environment.name == SINGLE_TURN and not judged:
        yield (
            "rewards is empty, and environment.name=single_turn gives no reward of its own; "
            "name at least one, for example rewards=[{function: exact_match}]"
        )
    for number, reward in enumerate(config.rewards):
        if (reward.function is None) == (reward.model is None):
            found = "both function and model" if reward.function else "neither function nor model"
            yield f"rewards.{number} names {found}; give exactly one of them"
    names = [reward_name(reward) for reward in config.rewards]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"rewards: {names.count(name)} entries are called {name}, so their metrics would be one; give each its own rewards.N.name"


def _evaluation(config: RunConfig, device: Device) -> Iterator[str]:
    if config.evaluation.every > 0 and config.data.evaluation is None:
        yield (
            f"evaluation.every={config.evaluation.every}, but data.evaluation is not set, so there is nothing to evaluate on; "
            "set data.evaluation to held-out prompts or evaluation.every=0"
        )


def _engine(config: RunConfig, device: Device) -> Iterator[str]:
    engine = config.engine
    for name in engine.extra:
        if name in ENGINE_OWNED:
            key = ENGINE_OWNED[name]
            instead = f"use {key}" if key else "training depends on its value; remove it"
            yield f"engine.extra.{name}: rlpost sets {name} itself; {instead}"
    if device == "cpu" and engine.extra.get("enable_chunked_prefill") and config.sampling.seeded:
        yield (
            "engine.extra.enable_chunked_prefill=true with sampling.seeded=true: a seeded request whose prefill is only partly scheduled "
            "kills vLLM's CPU engine; remove it or set sampling.seeded=false"
        )
    if device == "cpu" and engine.block_size % CPU_BLOCK_TOKENS:
        nearest = max(1, round(engine.block_size / CPU_BLOCK_TOKENS)) * CPU_BLOCK_TOKENS
        yield (
            f"engine.block_size={engine.block_size}: vLLM on CPU needs a multiple of {CPU_BLOCK_TOKENS}; "
            f"the nearest is engine.block_size={nearest}"
        )
    if engine.process == "in_actor" and engine.tensor_parallel > 1:
        yield (
            f"engine.process=in_actor with engine.tensor_parallel={engine.tensor_parallel}: one process cannot be {engine.tensor_parallel} "
            "workers; set engine.process=auto or separate"
        )
    if engine.max_model_len is not None:
        least = config.data.max_prompt_tokens + longest_continuation(config)
        if engine.max_model_len < least:
            yield (
                f"engine.max_model_len={engine.max_model_len} is shorter than the longest prompt and one turn "
                f"({config.data.max_prompt_tokens} + {longest_continuation(config)} tokens), so engines would refuse or cut samples; "
                f"set it to {least} or more, or shorten data.max_prompt_tokens or sampling.max_new_tokens"
            )


def _length(config: RunConfig, device: Device) -> Iterator[str]:
    problem = micro_batch_problem(config)
    if problem:
        yield problem


def _placement(config: RunConfig, device: Device) -> Iterator[str]:
    engine, ranks, colocated = config.engine, config.training.ranks, config.placement.mode == "colocated"
    if colocated and config.schedule.max_staleness > 0:
        yield (
            f"placement.mode=colocated with schedule.max_staleness={config.schedule.max_staleness}: colocated phases never overlap, "
            "so rollouts cannot run ahead; set schedule.max_staleness=0 or placement.mode=split"
        )
    if colocated and device == "gpu":
        if engine.tensor_parallel > 1:
            yield f"placement.mode=colocated with engine.tensor_parallel={engine.tensor_parallel} is not supported; set it to 1, or split"
        elif engine.count != ranks:
            yield f"placement.mode=colocated: {engine.count} engine(s) and {ranks} trainer rank(s) share GPUs; set engine.count={ranks}"
        if config.weights.backend == "nccl":
            yield "weights.backend=nccl with placement.mode=colocated: NCCL refuses two members on one GPU; set weights.backend=auto (gloo)"
        if config.placement.engine_strategy == "spread":
            yield (
                "placement.engine_strategy=spread with placement.mode=colocated: engines stand where the trainer ranks are, which are "
                "packed; set placement.engine_strategy=pack or placement.mode=split"
            )


def _devices(config: RunConfig, device: Device) -> Iterator[str]:
    if device == "gpu":
        return
    auto = " (placement.device=auto found no GPU here)" if config.placement.device == "auto" else ""
    for key in ("placement.trainer_cpus", "placement.engine_cpus"):
        if _value(config, key) == 0:
            yield f"{key} is 0, and the device is cpu{auto}: Ray grants no placement that asks for nothing; set it to 0.1 or more"
    if config.training.attention == "flash":
        yield f"training.attention=flash needs a GPU, and the device is cpu{auto}; set training.attention=auto or padded"
    if config.weights.backend == "nccl":
        yield f"weights.backend=nccl needs GPUs, and the device is cpu{auto}; set weights.backend=auto or gloo"


def _weights(config: RunConfig, device: Device) -> Iterator[str]:
    weights = config.weights
    carrier, deltas, _ = resolve_weight_transport(config, device)
    colocated = device == "gpu" and config.placement.mode == "colocated"
    if weights.carrier != "auto" and weights.transport != "delta":
        yield (
            f"weights.carrier={weights.carrier} is for weights.transport=delta, and that is {weights.transport}; "
            f"set weights.transport={weights.carrier} or delta"
        )
    if weights.directory is not None and carrier != "disk":
        yield (
            f"weights.directory={weights.directory} would not be used: weights travel by {carrier}; "
            "set weights.transport=disk (or weights.carrier=disk with delta), or remove it"
        )
    if deltas and colocated:
        yield (
            "weights.transport=delta with placement.mode=colocated: sleeping engines lose their weights, so there is nothing to change; "
            "set weights.transport=auto"
        )
    if carrier == "ipc" and device == "gpu" and not colocated:
        yield "ipc needs engines and trainers on the same GPUs, and placement.mode is split; set weights.transport=collective or disk"


def _precision(config: RunConfig, device: Device) -> Iterator[str]:
    if device == "gpu" and config.training.attention == "flash" and resolve_dtype(config, device) == "float32":
        yield "training.attention=flash has no float32 kernels; set training.attention=padded or model.dtype=bfloat16"


def _observe(config: RunConfig, device: Device) -> Iterator[str]:
    for name in config.observe.trackers:
        if name not in TRACKERS:
            yield f"observe.trackers: {name!r} is not known; expected any of {', '.join(TRACKERS)}"
        elif config.observe.trackers.count(name) > 1:
            yield f"observe.trackers names {name} twice"
            return


def _algorithm(config: RunConfig, device: Device) -> Iterator[str]:
    yield from check_algorithm(config)


Check = Callable[[RunConfig, Device], Iterator[str]]

_CHECKS: tuple[Check, ...] = (_ranges, _batch, _algorithm, _training, _evaluation, _length, _devices, _precision, _observe)
_ENGINE_CHECKS: tuple[Check, ...] = (_rewards, _engine, _placement, _weights)
"""Of what runs that learn from a data set do not have."""


def _warnings(config: RunConfig, device: Device) -> Iterator[str]:
    """What works but wastes the machine, or is probably not meant."""
    schedule, engine = config.schedule, config.engine
    if device == "gpu" and config.placement.mode == "split" and schedule.max_staleness == 0:
        engines, total = engine.count * engine.tensor_parallel, engine.count * engine.tensor_parallel + config.training.ranks
        yield (
            f"placement.mode=split with schedule.max_staleness=0: engines ({engines} of {total} GPUs) and trainers take turns, so each "
            "part idles while the other works; schedule.max_staleness=1 or placement.mode=colocated uses them better"
        )
    if schedule.prompts_per_step < engine.count:
        idle = (engine.count - schedule.prompts_per_step) / engine.count
        yield (
            f"schedule.prompts_per_step={schedule.prompts_per_step} is less than engine.count={engine.count}, and a group stays on one "
            f"engine: {idle:.0%} of the engines idle in every step"
        )
    elif schedule.prompts_per_step % engine.count:
        most = -(-schedule.prompts_per_step // engine.count)
        idle = 1 - schedule.prompts_per_step / (most * engine.count)
        yield (
            f"schedule.prompts_per_step={schedule.prompts_per_step} is no multiple of engine.count={engine.count}: some engines have "
            f"a group less, about {idle:.0%} of engine time is idle at equal lengths"
        )
    if schedule.max_staleness > 0 and resolve_old_logprobs(config) == "recompute" and config.algorithm.correction.level == "none":
        yield (
            f"algorithm.old_logprobs=recompute with schedule.max_staleness={schedule.max_staleness}: the ratio begins at the policy "
            "before the update, so the samples' own staleness is not corrected; engine corrects it"
        )
    if device == "cpu" and engine.tensor_parallel > 1 and resolve_engine_process(config, device) == "separate":
        yield f"engine.tensor_parallel={engine.tensor_parallel} on CPU is slower than {engine.tensor_parallel} engines (engine.count)"
    evaluation = config.evaluation
    if evaluation.every > 0 and evaluation.samples > 1 and evaluation.temperature == 0:
        yield f"evaluation.samples={evaluation.samples} with evaluation.temperature=0: greedy samples of a prompt are equal"


def _common_warnings(config: RunConfig, device: Device) -> Iterator[str]:
    if device == "cpu" and resolve_dtype(config, device) == "bfloat16":
        yield "model.dtype=bfloat16 on CPU is several times slower than float32 without bfloat16 instructions"
    if config.evaluation.every == 0 and config.data.evaluation is not None:
        yield "data.evaluation is set, but evaluation.every is 0: it is never read"
    if config.checkpoint.every == 0 and not config.checkpoint.at_end:
        yield "checkpoint.every=0 and checkpoint.at_end=false: nothing is saved, a run cannot be resumed or exported"
    for tracker in config.observe.trackers:
        package = TRACKERS[tracker]
        if package is not None and importlib.util.find_spec(package) is None:
            yield f"observe.trackers names {tracker}, whose package is not installed here: pip install {package}"
