"""One step's work for the trainer checks, done by the driver's own code on ranks in plain processes.

Online: the user's prompts with made-up answers of very unequal lengths, made-up rewards and engine logprobs that are off a little, so
that advantages, ratios and clips are not trivial. Offline: the user's rows.
"""

from __future__ import annotations

import asyncio
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlpost.algorithms.catalogue import make_algorithm, make_offline_algorithm
from rlpost.config.derive import SINGLE_TURN, reward_name
from rlpost.diagnosis.verify_plan import Plan
from rlpost.driver.batch import bare_terms, trained
from rlpost.driver.inputs import Inputs, OfflineInputs
from rlpost.driver.learning import Learner
from rlpost.driver.offline import OfflineRun
from rlpost.driver.preflight import run_facts
from rlpost.driver.updates import Packing
from rlpost.observe import Console, PhaseClock, Trackers
from rlpost.training.packing import MicroBatch, build, pack
from rlpost.types import ConfigError, Group, LossTerms, Prompt, Trajectory

if TYPE_CHECKING:
    from rlpost.diagnosis.verify_ranks import LocalGroup
    from rlpost.training.group import TrainerGroup

SEED = 5
ENGINE_NOISE = 0.1
"""Standard deviation of what engine and trainer are apart in the made-up batch: ratios around 1, some clipped."""


WHOLE = 1 << 30
"""micro_batch_tokens that put everything into one micro-batch."""
PARTS = (1, 2, 3)
"""Micro-batches of a rank, besides as many as the longest sequence permits."""


@dataclass(frozen=True, kw_only=True)
class Alone(Packing):
    """Each sequence (or the two of a pair) in a micro-batch of its own, nothing shared: what all other packings must equal."""

    def pack(self, group: TrainerGroup, terms: Sequence[LossTerms]) -> list[list[MicroBatch]]:
        """For each rank of ``group``; an empty micro-batch where one has less to do."""
        units: dict[str, list[int]] = {}
        for item, term in enumerate(terms):
            units.setdefault(term.group_id if self.together else str(item), []).append(item)
        micros = [build(terms, members, share=False) for members in units.values()]
        while not micros or len(micros) % group.world:
            micros.append(build(terms, [], share=False))
        return [micros[rank :: group.world] for rank in range(group.world)]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The models of a step."""

    policy: LocalGroup
    critic: LocalGroup | None = None
    reference: LocalGroup | None = None


class Batch(ABC):
    """One batch that can be trained on again and again."""

    plan: Plan
    together = False
    method = "logprobs"
    """What a forward of the policy says of a token."""

    @abstractmethod
    def terms(self) -> list[LossTerms]:
        """Its sequences, for a forward."""

    @abstractmethod
    async def learn(self, parts: Parts, packing: Packing) -> dict[str, float]:
        """All optimizer steps of the batch; what they measured."""

    def packing(self, micro_batch_tokens: int) -> Packing:
        """As the run would pack it."""
        share = self.plan.derived.attention == "padded"
        return Packing(micro_batch_tokens=micro_batch_tokens, share=share, together=self.together, temperature=self.temperature)

    def alone(self) -> Alone:
        """The plain way."""
        return Alone(micro_batch_tokens=0, share=False, together=self.together, temperature=self.temperature)

    @property
    def temperature(self) -> float:
        """Of the policy's distribution."""
        return 1.0


class OnlineBatch(Batch):
    """Made-up samples of the user's prompts, under the user's algorithm."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        assert isinstance(plan.inputs, Inputs), "an online plan has prompts"
        self.groups = made_up_groups(plan, plan.inputs)

    @property
    def temperature(self) -> float:
        """Of the policy's distribution."""
        return self.plan.config.sampling.temperature

    def terms(self) -> list[LossTerms]:
        """See Batch."""
        return bare_terms(trained(self._algorithm().choose(self.groups)))

    def _algorithm(self) -> Any:
        return make_algorithm(self.plan.config.algorithm, run_facts(self.plan.config))

    def set_engine_logprobs(self, values: Sequence[np.ndarray]) -> None:
        """Engine logprobs near the trainer's ``values`` (of :meth:`terms`, in order)."""
        noise = np.random.default_rng(SEED)
        found = {
            term.trajectory_id: (one + noise.normal(0.0, ENGINE_NOISE, len(one))).astype(np.float32)
            for term, one in zip(self.terms(), values, strict=True)
        }
        self.groups = [
            replace(
                group, trajectories=tuple(replace(one, logprobs=found.get(one.trajectory_id, one.logprobs)) for one in group.trajectories)
            )
            for group in self.groups
        ]

    async def learn(self, parts: Parts, packing: Packing) -> dict[str, float]:
        """See Batch. The algorithm is a new one each time: some learn from what a step measured."""
        step = self.plan.config.algorithm.critic.warmup_steps  # the first in which policy and critic are trained
        learner = Learner(
            config=self.plan.config,
            derived=self.plan.derived,
            algorithm=self._algorithm(),
            trainers=cast("TrainerGroup", parts.policy),
            reference=cast("TrainerGroup | None", parts.reference),
            critic=cast("TrainerGroup | None", parts.critic),
            clock=PhaseClock(),
        )
        learner.packing = packing
        return await learner.learn(learner.choose(self.groups), step)


class OfflineBatch(Batch):
    """The first rows of the user's data set, under the user's algorithm."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        assert isinstance(plan.inputs, OfflineInputs), "an offline plan has rows"
        self.inputs = plan.inputs
        self.together = plan.inputs.algorithm.together
        self.method = "values" if plan.inputs.algorithm.score_head else "logprobs"
        self.config = replace(
            plan.config,
            schedule=replace(plan.config.schedule, steps=1),
            checkpoint=replace(plan.config.checkpoint, every=0, at_end=False),
        )
        self.run_dir = plan.directory / "trainer"
        self.run_dir.mkdir()

    def terms(self) -> list[LossTerms]:
        """See Batch."""
        rows = [self.inputs.rows[index % len(self.inputs.rows)] for index in range(self.config.schedule.prompts_per_step)]
        return list(make_offline_algorithm(self.config.algorithm).terms(rows).terms)

    async def learn(self, parts: Parts, packing: Packing) -> dict[str, float]:
        """See Batch. Precomputed reference logprobs stay those of the first call, as in a run."""
        records = _Records()
        run = OfflineRun(
            config=self.config,
            derived=self.plan.derived,
            run_dir=self.run_dir,
            clock=PhaseClock(),
            console=Console(steps=1, stream=io.StringIO(), live=False),
            trackers=cast(Trackers, records),
            stop=asyncio.Event(),
            trainers=cast("TrainerGroup", parts.policy),
            inputs=self.inputs,
            reference=cast("TrainerGroup | None", parts.reference),
        )
        run.packing = packing
        await run.run(None)
        return records.last


class _Records:
    """Keeps the last record of a run."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Take a record."""
        self.last = dict(record)


def partitions(terms: Sequence[LossTerms], packing: Packing, ranks: int) -> list[int]:
    """Values of micro_batch_tokens that cut these sequences into 1, 2, 3 and as many micro-batches a rank as there can be."""
    counts = {1: WHOLE}
    tokens = sum(len(term.tokens) for term in terms)
    while True:
        try:
            packed = pack(terms, ranks=ranks, micro_batch_tokens=tokens, share=packing.share, together=packing.together)
        except ConfigError:  # shorter than the longest sequence
            return [counts[count] for count in sorted({*PARTS, max(counts)} & set(counts))]
        counts.setdefault(len(packed[0]), tokens)
        tokens = min(int(tokens * 0.95), tokens - 1)


# ---- made-up samples -------------------------------------------------------------------------------------------------


def made_up_groups(plan: Plan, inputs: Inputs) -> list[Group]:
    """A group for each prompt of a step: random tokens and rewards, lengths from 1 to the longest."""
    random = np.random.default_rng(SEED)
    vocabulary = int(json.loads((Path(inputs.model_path) / "config.json").read_text())["vocab_size"])
    groups = []
    for index in range(plan.config.schedule.prompts_per_step):
        prompt = inputs.prompts[index % len(inputs.prompts)]
        made = [
            _trajectory(plan, prompt, index, sample, random, vocabulary)
            for sample in range(plan.config.algorithm.group_size + int(inputs.algorithm.greedy_baseline))
        ]
        greedy = made.pop() if inputs.algorithm.greedy_baseline else None
        groups.append(Group(group_id=f"g{index}", index=index, prompt=prompt, trajectories=tuple(made), baseline=greedy))
    return groups


def _trajectory(plan: Plan, prompt: Prompt, index: int, sample: int, random: np.random.Generator, vocabulary: int) -> Trajectory:
    """One answer; of several turns where the environment has them: the middle was observed, not sampled."""
    longest, config = plan.config.sampling.max_new_tokens, plan.config
    length = longest if index == sample == 0 else int(random.integers(1, longest + 1))
    sampled = np.ones(length, bool)
    if config.environment.name != SINGLE_TURN and length > 2:
        sampled[length // 3 : 2 * length // 3] = False
    assert prompt.tokens is not None, "prompts of a plan have tokens"
    trainable = np.concatenate([np.zeros(len(prompt.tokens), bool), sampled])
    parts = {reward_name(reward): float(random.random()) for reward in config.rewards} or {"environment": float(random.random())}
    return Trajectory(
        trajectory_id=f"g{index}.{sample}",
        group_id=f"g{index}",
        prompt_id=prompt.prompt_id,
        tokens=np.concatenate([prompt.tokens, random.integers(0, vocabulary, length)]).astype(np.int32),
        trainable=trainable,
        logprobs=np.where(trainable, -1.0, np.nan).astype(np.float32),
        versions=np.where(trainable, config.algorithm.critic.warmup_steps, -1).astype(np.int32),
        prompt_length=len(prompt.tokens),
        reward=sum(parts.values()),
        reward_parts=parts,
    )
