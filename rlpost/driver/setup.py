"""Builds every part of a run from its configuration, in the order in which a mistake is cheapest, and takes it down again.

Before Ray: data, tokenizer, prompts, rewards and environments are loaded and checked. Then the cluster, then all actors at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlpost.algorithms.catalogue import Algorithm, make_algorithm
from rlpost.cluster import actor_logs, session
from rlpost.cluster.placement import Gang
from rlpost.cluster.session import KEEP_FREED_MEMORY
from rlpost.config.derive import Derived, weight_sync_line
from rlpost.config.schema import RunConfig
from rlpost.data.prepare import tokenize_prompts
from rlpost.data.tokenizer import PromptTokenizer
from rlpost.driver.preflight import check_rewards, field_names, read_prompts
from rlpost.environments.catalogue import environment_factory
from rlpost.environments.protocol import Environment
from rlpost.models.embedded import local_model
from rlpost.rewards.runner import RewardRunner
from rlpost.rollout.collector import RolloutPlan
from rlpost.rollout.engine import EngineSettings
from rlpost.rollout.episode import EpisodeLimits
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.training.protocol import WorkerSettings
from rlpost.types import Prompt, SamplingSettings
from rlpost.weights.coordinator import WeightSync
from rlpost.weights.policy import SyncSettings

PROOFS = {"live": "the parameters that they compute with", "received": "what they received (their weights are kept in another form)"}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads, loaded and checked before Ray starts."""

    model_path: str
    reference_path: str
    tokenizer: PromptTokenizer
    prompts: list[Prompt]
    dropped: int
    held_out: list[Prompt]
    algorithm: Algorithm
    make_environment: Callable[[], Environment]


def load_inputs(config: RunConfig) -> Inputs:
    """Load data, tokenizer, algorithm and environment. Raises ConfigError for what a newcomer gets wrong."""
    algorithm = make_algorithm(config.algorithm)
    make_environment = environment_factory(config.environment)
    data = config.data
    raw = read_prompts(config, hub=True)
    check_rewards(config, raw)
    model_path = local_model(config.model.path)
    tokenizer = PromptTokenizer(model_path, config.model.chat_template, config.model.trust_remote_code)
    within_limit = partial(
        tokenize_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,  # type: ignore[arg-type]
    )
    prompts, dropped = within_limit(raw["data.train"])
    held_out, dropped_held_out = within_limit(raw["data.evaluation"]) if "data.evaluation" in raw else ([], 0)
    return Inputs(
        model_path=model_path,
        reference_path=local_model(config.algorithm.reference_path) if config.algorithm.reference_path else model_path,
        tokenizer=tokenizer,
        prompts=prompts,
        dropped=dropped + dropped_held_out,
        held_out=held_out,
        algorithm=algorithm,
        make_environment=make_environment,
    )


@dataclass(kw_only=True)
class Parts:
    """The running parts of a run."""

    trainers: TrainerGroup
    reference: TrainerGroup | None
    engines: EnginePool
    rewards: RewardRunner | None
    weights: WeightSync
    rollout: RolloutPlan
    evaluation: RolloutPlan
    reports: dict[str, Any]


async def start_parts(
    config: RunConfig, derived: Derived, inputs: Inputs, run_dir: Path, stack: AsyncExitStack, say: Callable[[str], None]
) -> Parts:
    """Reserve the placement, start all actors together, connect them. What was started is taken down by ``stack``."""
    gang = await Gang.reserve(derived.bundles, config.placement.timeout_s)
    stack.callback(gang.release)
    say(f"starting {derived.ranks} trainer rank(s) and {derived.engines} engine(s)")
    trainers = TrainerGroup.create(
        "trainer",
        worker_settings(config, derived, inputs.model_path, trains=True),
        options=[trainer_options(config, derived, gang, rank, run_dir) for rank in range(derived.ranks)],
        timeout_s=config.schedule.phase_timeout_s,
    )
    stack.callback(trainers.kill)
    reference = make_reference(config, derived, inputs, gang, run_dir)
    if reference is not None:
        stack.callback(reference.kill)
    engines = EnginePool(
        [engine_settings(config, derived, inputs.model_path, index) for index in range(derived.engines)],
        [engine_options(config, derived, inputs.model_path, gang, index, run_dir) for index in range(derived.engines)],
        request_timeout_s=config.engine.request_timeout_s,
        start_timeout_s=config.schedule.start_timeout_s,
        max_restarts=config.engine.max_restarts,
    )
    stack.push_async_callback(engines.stop)
    rewards = None
    if config.rewards:
        runner = config.reward_runner
        rewards = RewardRunner(
            config.rewards, workers=runner.workers, timeout_s=runner.timeout_s, field_names=field_names(inputs.prompts),
            output=run_dir / "logs" / "rewards.log",
        )  # fmt: skip
        stack.push_async_callback(rewards.close)
    starting: list[Any] = [engines.start(), trainers.setup(config.schedule.start_timeout_s)]
    starting += [rewards.start()] if rewards is not None else []
    starting += [reference.setup(config.schedule.start_timeout_s)] if reference is not None else []
    engine_reports, trainer_report, *_ = await asyncio.gather(*starting)
    weights = WeightSync(trainers, engines, sync_settings(config, derived, inputs.model_path, run_dir))
    await weights.connect()
    say(f"weights travel as {weight_sync_line(derived)}; engines prove {PROOFS[weights.proof]}")
    rollout = rollout_plan(config, derived, inputs, engines, rewards)
    evaluation = replace(
        rollout,
        group_size=config.evaluation.samples,
        sampling=SamplingSettings(
            temperature=config.evaluation.temperature,
            top_p=config.evaluation.top_p,
            top_k=config.evaluation.top_k,
            max_new_tokens=config.evaluation.max_new_tokens or config.sampling.max_new_tokens,
            stop_token_ids=rollout.sampling.stop_token_ids,
        ),
    )
    return Parts(
        trainers=trainers,
        reference=reference,
        engines=engines,
        rewards=rewards,
        weights=weights,
        rollout=rollout,
        evaluation=evaluation,
        reports={"trainer": trainer_report, "engines": engine_reports},
    )


def rollout_plan(config: RunConfig, derived: Derived, inputs: Inputs, engines: EnginePool, rewards: RewardRunner | None) -> RolloutPlan:
    """How training groups are sampled and scored."""
    stops = tuple(dict.fromkeys([*inputs.tokenizer.eos_token_ids, *config.sampling.stop_token_ids]))
    return RolloutPlan(
        group_size=config.algorithm.group_size,
        seed=config.seed if config.sampling.seeded else None,
        sampling=SamplingSettings(
            temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens, stop_token_ids=stops
        ),
        limits=EpisodeLimits(
            max_turns=config.environment.max_turns,
            max_total_tokens=derived.max_model_len,
            environment_timeout_s=config.environment.timeout_s,
        ),
        make_environment=inputs.make_environment,
        generate=engines.generate,
        codec=inputs.tokenizer,
        score=rewards.score if rewards is not None else None,
    )


def sync_settings(config: RunConfig, derived: Derived, model_path: str, run_dir: Path) -> SyncSettings:
    """How weights reach the engines."""
    weights = config.weights
    return SyncSettings(
        carrier=derived.weight_carrier,
        deltas=derived.weight_deltas,
        adapters=config.training.lora.rank > 0 and config.training.lora.sync == "adapter",
        engine_dtype=derived.dtype,
        bucket_bytes=weights.bucket_mib << 20,
        timeout_s=weights.timeout_s,
        drain_s=config.engine.request_timeout_s if weights.pause == "drain" else 0.0,
        backend=derived.weight_backend,
        directory=weights.directory or str((run_dir / "weights").absolute()),
        model_path=model_path,
        verify=weights.verify,
        verify_every=weights.verify_every,
        keyframe_every=weights.keyframe_every,
        max_changed=weights.max_changed,
        max_consecutive_fallbacks=weights.max_consecutive_fallbacks,
        shared_gpu=derived.device == "gpu" and config.placement.mode == "colocated",
    )


# ---- what each actor is told -----------------------------------------------------------------------------------------


def worker_settings(config: RunConfig, derived: Derived, model_path: str, *, trains: bool) -> WorkerSettings:
    """Settings of a trainer rank, or of a forward-only reference."""
    return WorkerSettings(
        model_path=model_path,
        training=config.training,
        dtype=derived.dtype,
        device=derived.device,
        attention=derived.attention,
        total_updates=derived.optimizer_steps if trains else None,
        seed=config.seed,
        timeout_s=config.schedule.phase_timeout_s,
        trust_remote_code=config.model.trust_remote_code,
        keep_reference=trains and derived.reference == "initial",
        reference_path=config.algorithm.reference_path,
    )


def engine_settings(config: RunConfig, derived: Derived, model_path: str, index: int) -> EngineSettings:
    """Settings of engine ``index``."""
    engine = config.engine
    return EngineSettings(
        name=f"engine-{index}",
        model_path=model_path,
        dtype=derived.dtype,
        device=derived.device,
        in_actor=derived.engine_process == "in_actor",
        max_model_len=derived.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        block_size=engine.block_size,
        prefix_caching=engine.prefix_caching,
        tensor_parallel=engine.tensor_parallel,
        kv_cache_mib=engine.kv_cache_mib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        sleep_mode=config.placement.mode == "colocated",
        threads=engine.threads,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=config.training.lora.rank if config.training.lora.sync == "adapter" else 0,
        pause=config.weights.pause,
        extra=dict(engine.extra),
    )


def _environment(run_dir: Path, name: str, variables: dict[str, str]) -> dict[str, Any]:
    log = str((run_dir / "logs" / f"{name}.log").absolute())
    return {"runtime_env": {"env_vars": {**variables, actor_logs.VARIABLE: log}}}


def trainer_options(config: RunConfig, derived: Derived, gang: Gang, rank: int, run_dir: Path, role: str = "trainer") -> dict[str, Any]:
    """Ray options of a trainer rank."""
    shared = derived.device == "gpu" and config.placement.mode == "colocated"
    bundle = rank // config.engine.tensor_parallel if shared else rank
    gpus = {} if derived.device == "cpu" else {"num_gpus": 0.5 if shared else 1}
    variables = {"OMP_NUM_THREADS": str(config.training.threads), "TOKENIZERS_PARALLELISM": "false"}
    if derived.device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", **KEEP_FREED_MEMORY}
    return {
        **gang.options(bundle, num_cpus=config.placement.trainer_cpus, **gpus),
        **_environment(run_dir, f"{role}-{rank}", variables),
    }


def engine_options(config: RunConfig, derived: Derived, model_path: str, gang: Gang, index: int, run_dir: Path) -> dict[str, Any]:
    """Ray options of an engine."""
    shared = derived.device == "gpu" and config.placement.mode == "colocated"
    bundle = index if shared else derived.ranks + index
    gpus = {} if derived.device == "cpu" else {"num_gpus": 0.5 if shared else config.engine.tensor_parallel}
    variables = engine_settings(config, derived, model_path, index).environment()
    return {**gang.options(bundle, num_cpus=config.placement.engine_cpus, **gpus), **_environment(run_dir, f"engine-{index}", variables)}


def make_reference(config: RunConfig, derived: Derived, inputs: Inputs, gang: Gang, run_dir: Path) -> TrainerGroup | None:
    """The reference model's own actor, where the configuration asks for one: the last bundle."""
    if derived.reference != "actor":
        return None
    option = trainer_options(config, derived, gang, 0, run_dir, role="reference")
    option |= gang.options(len(derived.bundles) - 1)
    return TrainerGroup.create(
        "reference",
        worker_settings(config, derived, inputs.reference_path, trains=False),
        options=[option],
        timeout_s=config.schedule.phase_timeout_s,
    )


def connect(config: RunConfig) -> dict[str, Any]:
    """Join or start the Ray cluster (a relative RLPOST_CACHE would mean another place in an actor)."""
    if cache := os.environ.get("RLPOST_CACHE"):
        os.environ["RLPOST_CACHE"] = str(Path(cache).absolute())
    return session.connect(config.placement.ray_address)


def close_session() -> None:
    """Leave the cluster."""
    session.disconnect()
