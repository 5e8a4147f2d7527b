"""Starts every part of a run together, and takes it down again. What each is told stands in actors.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlpost.cluster import session
from rlpost.cluster.placement import Gang
from rlpost.config.derive import Derived, weight_sync_line
from rlpost.config.schema import RunConfig
from rlpost.driver.actors import (
    critic_settings,
    engine_options,
    engine_settings,
    forward_settings,
    sync_settings,
    trainer_options,
    worker_settings,
)
from rlpost.driver.inputs import Inputs, OfflineInputs
from rlpost.driver.preflight import field_names
from rlpost.driver.reward_models import make_score
from rlpost.rewards.runner import RewardRunner
from rlpost.rollout.collector import RolloutPlan
from rlpost.rollout.episode import EpisodeLimits
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.training.protocol import Head, WorkerSettings
from rlpost.types import SamplingSettings
from rlpost.weights.coordinator import WeightSync

PROOFS = {"live": "the parameters that they compute with", "received": "what they received (their weights are kept in another form)"}


class Starter:
    """Makes actors within one granted placement, each taken down by ``stack``."""

    def __init__(self, config: RunConfig, derived: Derived, gang: Gang, run_dir: Path, stack: AsyncExitStack) -> None:
        self.config, self.derived, self.gang, self.run_dir, self.stack = config, derived, gang, run_dir, stack

    @classmethod
    async def reserve(
        cls, config: RunConfig, derived: Derived, run_dir: Path, stack: AsyncExitStack, say: Callable[[str], None]
    ) -> Starter:
        """With everything that the run needs, or not at all."""
        placement = config.placement
        gang = await Gang.reserve(
            derived.bundles,
            placement.timeout_s,
            engine_strategy=placement.engine_strategy,
            wait_for_nodes=placement.wait_for_nodes,
            say=say,
        )
        stack.callback(gang.release)
        return cls(config, derived, gang, run_dir, stack)

    def group(self, role: str, settings: WorkerSettings, ranks: Sequence[int]) -> TrainerGroup:
        """The ranks of a model, at the bundles ``ranks`` of its role."""
        group = TrainerGroup.create(
            role,
            settings,
            options=[trainer_options(self.config, self.derived, self.gang, rank, self.run_dir, role) for rank in ranks],
            timeout_s=self.config.schedule.phase_timeout_s,
        )
        self.stack.callback(group.kill)
        return group

    def reference(self, path: str) -> TrainerGroup | None:
        """The reference model's own actor, where the configuration asks for one."""
        if self.derived.reference != "actor":
            return None
        return self.group("reference", forward_settings(self.config, self.derived, path), [0])

    def engines(self, model_path: str) -> EnginePool:
        """All engines."""
        config, derived, every = self.config, self.derived, range(self.derived.engines)
        pool = EnginePool(
            [engine_settings(config, derived, model_path, index) for index in every],
            [engine_options(config, derived, model_path, self.gang, index, self.run_dir) for index in every],
            request_timeout_s=config.engine.request_timeout_s,
            start_timeout_s=config.schedule.start_timeout_s,
            max_restarts=config.engine.max_restarts,
        )
        self.stack.push_async_callback(pool.stop)
        return pool


@dataclass(kw_only=True)
class Parts:
    """The running parts of a run."""

    trainers: TrainerGroup
    reference: TrainerGroup | None
    critic: TrainerGroup | None
    engines: EnginePool
    weights: WeightSync
    rollout: RolloutPlan
    evaluation: RolloutPlan
    reports: dict[str, Any]


async def start_parts(
    config: RunConfig, derived: Derived, inputs: Inputs, run_dir: Path, stack: AsyncExitStack, say: Callable[[str], None]
) -> Parts:
    """Reserve the placement, start all actors together, connect them. What was started is taken down by ``stack``."""
    starter = await Starter.reserve(config, derived, run_dir, stack, say)
    say(f"starting {derived.ranks} trainer rank(s) and {derived.engines} engine(s)")
    trainers = starter.group(
        "trainer", worker_settings(config, derived, inputs.model_path, reference_path=inputs.reference_path), range(derived.ranks)
    )
    reference = starter.reference(inputs.reference_path)
    critic = None
    if derived.critic_ranks:
        critic = starter.group("critic", critic_settings(config, derived, inputs.critic_path), range(derived.critic_ranks))
    engines = starter.engines(inputs.model_path)
    starting: list[Any] = [start_engines_and_trainers(config, engines, trainers)]
    starting += [group.setup(config.schedule.start_timeout_s) for group in (reference, critic) if group is not None]
    scorer: RewardRunner | None = None
    models: list[TrainerGroup] = []
    if any(reward.function is not None for reward in config.rewards):
        runner = config.reward_runner
        scorer = RewardRunner(
            config.rewards, workers=runner.workers, timeout_s=runner.timeout_s, field_names=field_names(inputs.prompts),
            output=run_dir / "logs" / "rewards.log",
        )  # fmt: skip
        stack.push_async_callback(scorer.close)
        starting.append(scorer.start())
    for number, path in enumerate(inputs.reward_models):
        models.append(starter.group("reward", forward_settings(config, derived, path, head="value"), [number]))
        starting.append(models[-1].setup(config.schedule.start_timeout_s))
    (engine_reports, trainer_report), *_ = await asyncio.gather(*starting)
    weights = WeightSync(trainers, engines, sync_settings(config, derived, inputs.model_path, run_dir))
    await weights.connect()
    say(f"weights travel as {weight_sync_line(derived)}; engines prove {PROOFS[weights.proof]}")
    rollout = rollout_plan(config, derived, inputs, engines)
    rollout = replace(rollout, score=make_score(config, scorer, models))
    evaluation = replace(
        rollout,
        group_size=config.evaluation.samples,
        greedy_baseline=False,
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
        critic=critic,
        engines=engines,
        weights=weights,
        rollout=rollout,
        evaluation=evaluation,
        reports={"trainer": trainer_report, "engines": engine_reports},
    )


async def start_engines_and_trainers(config: RunConfig, engines: EnginePool, trainers: TrainerGroup) -> tuple[Any, Any]:
    """Their reports. At once; colocated, trainers when engines are up and asleep: awake they have their whole share of the GPU."""
    if config.placement.mode == "split":
        return await asyncio.gather(engines.start(), trainers.setup(config.schedule.start_timeout_s))
    reports = await engines.start()
    await engines.call("sleep", timeout_s=config.weights.timeout_s)
    return reports, await trainers.setup(config.schedule.start_timeout_s)


@dataclass(kw_only=True)
class OfflineParts:
    """The running parts of a run without engines."""

    trainers: TrainerGroup
    reference: TrainerGroup | None
    reports: dict[str, Any]


async def start_offline_parts(
    config: RunConfig, derived: Derived, inputs: OfflineInputs, run_dir: Path, stack: AsyncExitStack, say: Callable[[str], None]
) -> OfflineParts:
    """The same without engines, rewards and weight sync."""
    starter = await Starter.reserve(config, derived, run_dir, stack, say)
    say(f"starting {derived.ranks} trainer rank(s)")
    head: Head = "value" if inputs.algorithm.score_head else "logprob"
    settings = worker_settings(config, derived, inputs.model_path, head=head, reference_path=inputs.reference_path)
    trainers = starter.group("trainer", settings, range(derived.ranks))
    reference = starter.reference(inputs.reference_path)
    starting = [group.setup(config.schedule.start_timeout_s) for group in (trainers, reference) if group is not None]
    report, *_ = await asyncio.gather(*starting)
    return OfflineParts(trainers=trainers, reference=reference, reports={"trainer": report})


def rollout_plan(config: RunConfig, derived: Derived, inputs: Inputs, engines: EnginePool) -> RolloutPlan:
    """How training groups are sampled; nothing scores them yet."""
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
        score=None,
        greedy_baseline=inputs.algorithm.greedy_baseline,
    )


def connect(config: RunConfig) -> dict[str, Any]:
    """Join or start the Ray cluster (a relative RLPOST_CACHE would mean another place in an actor)."""
    if cache := os.environ.get("RLPOST_CACHE"):
        os.environ["RLPOST_CACHE"] = str(Path(cache).absolute())
    return session.connect(config.placement.ray_address)


def close_session() -> None:
    """Leave the cluster."""
    session.disconnect()
