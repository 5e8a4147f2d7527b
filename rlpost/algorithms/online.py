"""Online policy gradients: what a sample is worth, and what the loss is made of. Named algorithms are settings of this one class.

A class of your own is best made from it: override :meth:`PolicyGradient.compare` (rewards of a group -> advantages),
:meth:`PolicyGradient.advantages` (of every token of a batch) or :meth:`PolicyGradient.components`, and name it:
``algorithm.name=my_package.my_module:MyClass``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpost.algorithms import advantages as worth
from rlpost.algorithms.estimators import KlController, token_kl
from rlpost.algorithms.protocol import Credit, RunFacts, Sample, SampledGroup
from rlpost.algorithms.shaping import clipped_reward, shaped_reward
from rlpost.config.algorithms import LOSS_OPTIONS, with_defaults
from rlpost.config.schema import AlgorithmConfig
from rlpost.types import Group, LossComponent, OffPolicyCorrection, Trajectory

Worths = list[list[np.ndarray]]
"""For each sample of each group, one number a sampled token."""


class PolicyGradient:
    """See :class:`rlpost.algorithms.protocol.Algorithm`."""

    def __init__(self, config: AlgorithmConfig, facts: RunFacts) -> None:
        self.config, self.facts = with_defaults(config), facts
        self.kl = KlController(config.kl_coefficient, config.kl_target, config.kl_horizon)
        self.greedy_baseline = self.config.advantage == "greedy"
        self._reward_kl = 0.0
        """Mean KL a token in the rewards of the last batch."""

    @property
    def uses_kl(self) -> bool:
        """Whether a KL to the reference stands in the loss or the reward."""
        return self.config.kl_coefficient > 0

    @property
    def forwards(self) -> frozenset[str]:
        """See the protocol."""
        config = self.config
        needed = {"reference"} if self.uses_kl or config.advantage == "teacher" else set()
        return frozenset(needed | ({"values"} if config.advantage == "gae" else set()))

    # ---- who is trained --------------------------------------------------------------------------------------------

    def choose(self, groups: Sequence[Group]) -> list[SampledGroup]:
        """See the protocol. A refused group is left without samples."""
        return [self._sampled(group) for group in groups]

    def refuses(self, group: Group) -> bool:
        """Groups without variance in the rewards, or with a mean outside the bounds (algorithm.filter).

        Not those without any reward: they are failures, which have a budget of their own.
        """
        # Without the penalties of length: DAPO (eq. 11) leaves out groups that are all right or all wrong, however long.
        rewards = [clipped_reward(one, self.config.shaping) for one in group.trajectories if one.reward is not None]
        return self.config.filter.zero_variance != "keep" and bool(rewards) and self._teaches_nothing(rewards)

    def _sampled(self, group: Group) -> SampledGroup:
        samples = self._samples(group)
        if self.refuses(group):
            samples = []
        greedy, baseline = group.baseline, None
        if greedy is not None and greedy.reward is not None:
            baseline = shaped_reward(greedy, self.config.shaping, self.facts)
        if self.greedy_baseline and baseline is None:  # the greedy sample failed, so there is nothing to compare with
            samples = []
        return SampledGroup(group_id=group.group_id, samples=tuple(samples), baseline=baseline)

    def _samples(self, group: Group) -> list[Sample]:
        return [
            Sample(
                trajectory=trajectory,
                reward=shaped_reward(trajectory, self.config.shaping, self.facts) if trajectory.reward is not None else 0.0,
                parts={name: value for name, value in trajectory.reward_parts.items() if value is not None},
                trained=trajectory.sampled_tokens > 0 and not (trajectory.truncated and self.config.filter.truncated == "drop"),
            )
            for trajectory in group.trajectories
            if self._scored(trajectory)
        ]

    def _scored(self, trajectory: Trajectory) -> bool:
        # A teacher judges every token, so no reward is needed.
        return trajectory.reward is not None or (
            self.config.advantage == "teacher" and not (trajectory.failure and trajectory.failure.is_fault)
        )

    def _teaches_nothing(self, rewards: Sequence[float]) -> bool:
        low, high = self.config.filter.least_mean, self.config.filter.most_mean
        if max(rewards) == min(rewards):
            return True
        mean = sum(rewards) / len(rewards)
        return (low is not None and mean < low) or (high is not None and mean > high)

    # ---- what a token is worth -------------------------------------------------------------------------------------

    def advantages(self, batch: Sequence[SampledGroup]) -> list[list[Credit]]:
        """See the protocol."""
        returns: Worths | None = None
        self._measure_kl(batch)
        match self.config.advantage:
            case "teacher":
                found = [[_teacher(sample) for sample in group.samples] for group in batch]
            case "batch" | "batch_baseline":
                found = self._returns_to_go(batch)
            case "gae":
                found, returns = self._gae(batch)
            case _:
                found = self._by_group(batch)
        if self.config.shaping.whiten or self.config.advantage.startswith("batch"):
            found = _whitened(batch, found)
        return [
            [
                Credit(
                    advantage=_on_tokens(sample, found[row][column]),
                    returns=None if returns is None else _on_tokens(sample, returns[row][column]),
                )
                for column, sample in enumerate(group.samples)
            ]
            for row, group in enumerate(batch)
        ]

    def _by_group(self, batch: Sequence[SampledGroup]) -> Worths:
        """One number a sample, from the rewards of its group."""
        if self.config.shaping.combine == "each":
            totals = self._each_reward(batch)
        else:
            totals = [self.compare([self._whole_reward(sample) for sample in group.samples], group.baseline) for group in batch]
        return [
            [np.full(sample.trajectory.sampled_tokens, value) for sample, value in zip(group.samples, values, strict=True)]
            for group, values in zip(batch, totals, strict=True)
        ]

    def compare(self, rewards: Sequence[float], baseline: float | None) -> np.ndarray:
        """Advantages of a group's scored samples ``[samples]`` from their rewards; ``baseline`` is the greedy sample's."""
        if self.config.advantage == "greedy":
            assert baseline is not None or not rewards, "choose() leaves out groups without a greedy reward"
            return worth.greedy(rewards, baseline or 0.0)
        return worth.ADVANTAGES[self.config.advantage](rewards)

    def _each_reward(self, batch: Sequence[SampledGroup]) -> list[np.ndarray]:
        """Each reward compared within its group, then added by weight, then brought to one scale over the batch (GDPO)."""
        totals = []
        for group in batch:
            total = np.zeros(len(group.samples))
            for name in dict.fromkeys(name for sample in group.samples for name in sample.parts):
                weight = self.facts.reward_weights.get(name, 1.0)
                total += weight * self.compare([sample.parts.get(name, 0.0) for sample in group.samples], group.baseline)
            totals.append(total)
        return worth.normalise(totals)

    def _returns_to_go(self, batch: Sequence[SampledGroup]) -> Worths:
        """Later rewards of each token (REINFORCE++), with ``batch_baseline`` less the group's mean reward."""
        found = []
        for group in batch:
            mean = np.mean([sample.reward for sample in group.samples]) if group.samples else 0.0
            less = float(mean) if self.config.advantage == "batch_baseline" else 0.0
            found.append([worth.discounted_returns(self._token_rewards(sample, less), self.config.gamma) for sample in group.samples])
        return found

    def _gae(self, batch: Sequence[SampledGroup]) -> tuple[Worths, Worths]:
        pairs = [
            [
                worth.gae(self._token_rewards(sample, 0.0), _sampled(sample, sample.values), self.config.gamma, self.config.gae_lambda)
                for sample in group.samples
            ]
            for group in batch
        ]
        return [[pair[0] for pair in row] for row in pairs], [[pair[1] for pair in row] for row in pairs]

    # ---- KL in the reward ------------------------------------------------------------------------------------------

    def _kl_of(self, sample: Sample) -> np.ndarray:
        """KL of each sampled token, 0 where it does not stand in the reward."""
        if not self.uses_kl or self.config.kl_in != "reward":
            return np.zeros(sample.trajectory.sampled_tokens)
        return token_kl(_behaviour(sample), _sampled(sample, sample.reference_logprobs), self.config.kl_estimator)

    def _measure_kl(self, batch: Sequence[SampledGroup]) -> None:
        found = [self._kl_of(sample) for group in batch for sample in group.samples if sample.trained]
        self._reward_kl = float(np.concatenate([np.zeros(0), *found]).mean()) if any(len(one) for one in found) else 0.0

    def _whole_reward(self, sample: Sample) -> float:
        return sample.reward - self.kl.coefficient * float(self._kl_of(sample).sum())

    def _token_rewards(self, sample: Sample, less: float) -> np.ndarray:
        """The KL's share at each sampled token, the reward at the last."""
        rewards = -self.kl.coefficient * self._kl_of(sample)
        if len(rewards):
            rewards[-1] += sample.reward - less
        return rewards

    # ---- the loss --------------------------------------------------------------------------------------------------

    def components(self) -> list[LossComponent]:
        """See the protocol."""
        config, correction = self.config, None
        if config.correction.level != "none":
            one = config.correction
            correction = OffPolicyCorrection(level=one.level, action=one.action, low=one.low, high=one.high)  # type: ignore[arg-type]
        assert config.clip_low is not None and config.clip_high is not None, "with_defaults() fills them"
        bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high, "dual_clip": config.dual_clip}
        names = config.options if ":" in config.policy_loss else LOSS_OPTIONS.get(config.policy_loss, ())
        options = {name: value for name, value in config.options.items() if name in names}
        parts = [LossComponent(term=config.policy_loss, parameters={**bounds, **options}, correction=correction)]
        if self.uses_kl and config.kl_in == "loss":
            parts.append(LossComponent(term="kl", coefficient=self.kl.coefficient, parameters={"estimator": config.kl_estimator}))
        if config.entropy_coefficient:
            parts.append(LossComponent(term="entropy", coefficient=config.entropy_coefficient))
        return parts

    def critic_components(self) -> list[LossComponent]:
        """See the protocol."""
        critic = self.config.critic
        return [LossComponent(term="value", coefficient=critic.coefficient, parameters={"clip": critic.clip})]

    # ---- from step to step -----------------------------------------------------------------------------------------

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Steer the KL's coefficient."""
        measured = self._reward_kl if self.config.kl_in == "reward" else metrics.get("train/kl")
        if not self.uses_kl or measured is None or not np.isfinite(measured):
            return {}
        used = self.kl.coefficient
        self.kl.update(measured)
        return {"train/kl": measured, "train/kl_coefficient": used}

    def state(self) -> dict[str, Any]:
        """See the protocol."""
        return {"kl": self.kl.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See the protocol."""
        self.kl.restore(state["kl"])


def _sampled(sample: Sample, values: np.ndarray | None) -> np.ndarray:
    """``values`` at the sampled tokens, in float64."""
    assert values is not None, "the driver computes what `forwards` names"
    return values[sample.trajectory.trainable].astype(np.float64)


def _behaviour(sample: Sample) -> np.ndarray:
    """Logprobs of the sampled tokens under the policy before the update: the trainer's where it computed them, else the engine's."""
    return _sampled(sample, sample.trajectory.logprobs if sample.old_logprobs is None else sample.old_logprobs)


def _teacher(sample: Sample) -> np.ndarray:
    """How much likelier a teacher finds each sampled token: minus the sample of the reverse KL. 0 where a logprob is unknown."""
    return np.nan_to_num(_sampled(sample, sample.reference_logprobs) - _behaviour(sample), nan=0.0)


def _on_tokens(sample: Sample, values: np.ndarray) -> np.ndarray:
    """One number a sampled token -> ``[tokens]`` float32, 0 elsewhere."""
    result = np.zeros(len(sample.trajectory.tokens), np.float32)
    result[sample.trajectory.trainable] = values
    return result


def _whitened(batch: Sequence[SampledGroup], found: Worths) -> Worths:
    """Mean 0 and standard deviation 1 over all trained tokens of the batch."""
    places = [(row, column) for row, group in enumerate(batch) for column, sample in enumerate(group.samples) if sample.trained]
    normal = worth.normalise([found[row][column] for row, column in places])
    result = [list(row) for row in found]
    for (row, column), values in zip(places, normal, strict=True):
        result[row][column] = values
    return result
