"""One batch of groups -> optimizer steps: the forwards that the algorithm asks for, advantages, minibatches, policy and critic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlpost.algorithms.protocol import Algorithm, SampledGroup
from rlpost.config.derive import Derived
from rlpost.config.schema import RunConfig
from rlpost.driver.batch import Minibatch, bare_terms, high_entropy, make_minibatch, split, trained, with_forward
from rlpost.driver.updates import Packing, forward, merge, update
from rlpost.observe import PhaseClock
from rlpost.types import Group

if TYPE_CHECKING:
    from rlpost.training.group import TrainerGroup


@dataclass(kw_only=True)
class Learner:
    """The trainer's side of an online run."""

    config: RunConfig
    derived: Derived
    algorithm: Algorithm
    trainers: TrainerGroup
    reference: TrainerGroup | None
    """An actor of its own; None: the trainers compute reference logprobs themselves."""
    critic: TrainerGroup | None
    clock: PhaseClock

    def __post_init__(self) -> None:
        self.packing = Packing(
            micro_batch_tokens=self.config.training.micro_batch_tokens,
            # Variable-length kernels take sequences that lie end to end, so there a prompt is computed for each sample.
            share=self.derived.attention == "padded",
            temperature=self.config.sampling.temperature,
        )

    def choose(self, groups: Sequence[Group]) -> list[SampledGroup]:
        """What can be trained on."""
        return self.algorithm.choose(groups)

    async def learn(self, batch: list[SampledGroup], step: int) -> dict[str, float]:
        """All optimizer steps of one batch; the metrics of the policy's and the critic's updates. Empty when nothing can be trained on."""
        if not trained(batch):
            return {}
        batch = await self._forwards(batch)
        minibatches = self._minibatches(batch, step)
        critic_only = self.critic is not None and step < self.config.algorithm.critic.warmup_steps
        policy, critic = [], []
        with self.clock.phase("update"):
            for epoch in range(self.config.algorithm.epochs):
                for number, one in enumerate(minibatches):
                    if not critic_only:
                        first = epoch == number == 0
                        policy.append(
                            await update(
                                self.trainers, one.terms, one.denominators, self.algorithm.components(), self.packing, measure_parity=first
                            )
                        )
                    if self.critic is not None:
                        critic.append(
                            await update(
                                self.critic, one.critic_terms, one.critic_denominators, self.algorithm.critic_components(), self.packing
                            )
                        )
        metrics = merge(policy)
        metrics |= self.algorithm.observe(metrics)
        found = {f"critic/{name.split('/')[-1]}": value for name, value in merge(critic).items()}
        return {**metrics, **{name: value for name, value in found.items() if name in CRITIC_METRICS}}

    async def _forwards(self, batch: list[SampledGroup]) -> list[SampledGroup]:
        """Add what the algorithm and the loss need and only a forward gives."""
        terms, forwards = bare_terms(trained(batch)), self.algorithm.forwards
        if self.derived.old_logprobs == "recompute":
            with self.clock.phase("old_logprob"):
                batch = with_forward(batch, "old_logprobs", await forward(self.trainers, "logprobs", terms, self.packing))
        if self.config.algorithm.filter.top_entropy < 1:
            with self.clock.phase("old_logprob"):
                batch = with_forward(batch, "entropy", await forward(self.trainers, "entropies", terms, self.packing))
        if "reference" in forwards:
            with self.clock.phase("reference"):
                group = self.reference or self.trainers
                method = "logprobs" if self.reference else "reference_logprobs"
                batch = with_forward(batch, "reference_logprobs", await forward(group, method, terms, self.packing))
        if "values" in forwards:
            assert self.critic is not None, "an algorithm with values has a critic"
            with self.clock.phase("values"):
                batch = with_forward(batch, "values", await forward(self.critic, "values", terms, self.packing))
        return batch

    def _minibatches(self, batch: list[SampledGroup], step: int) -> list[Minibatch]:
        """Advantages are of the whole batch, denominators of each optimizer step."""
        settings = self.derived.algorithm
        credits = self.algorithm.advantages(batch)
        samples = trained(batch)
        masks = dict(
            zip((one.trajectory.trajectory_id for one in samples), high_entropy(samples, settings.filter.top_entropy), strict=True)
        )
        parts = [
            make_minibatch(
                [group for group, _ in part],
                [row for _, row in part],
                masks,
                version=step,
                aggregation=settings.loss_aggregation,
                constant=self.config.sampling.max_new_tokens,
                old=self.derived.old_logprobs,
                correct=settings.correction.level != "none",
            )
            for part in split(list(zip(batch, credits, strict=True)), settings.minibatches)
        ]
        return [part for part in parts if part.terms]


CRITIC_METRICS = ("critic/loss", "critic/value_error", "critic/value_clip_fraction", "critic/grad_norm", "critic/lr")
"""What is reported of a critic's update."""
