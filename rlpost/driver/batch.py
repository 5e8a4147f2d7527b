"""Groups of scored trajectories -> what the trainer needs: token weights, advantages, and global denominators of a step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlpost.algorithms.aggregation import token_weights
from rlpost.algorithms.protocol import Algorithm, Credit, Sample, SampledGroup
from rlpost.types import MAIN_WEIGHT, Group, LossTerms


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The sequences of one optimizer step, and the denominators counted over all of them, by the name of their weights."""

    terms: tuple[LossTerms, ...]
    denominators: Mapping[str, float]
    critic_terms: tuple[LossTerms, ...] = ()
    """The same tokens as a critic sees them; empty without one."""
    critic_denominators: Mapping[str, float] = field(default_factory=dict)

    @property
    def denominator(self) -> float:
        """That of LossTerms.weight."""
        return self.denominators[MAIN_WEIGHT]


def split(groups: Sequence[Any], minibatches: int) -> list[Sequence[Any]]:
    """Whole groups into equal minibatches, in order. The configuration check made sure that they divide."""
    size = len(groups) // minibatches
    return [groups[i * size : (i + 1) * size] for i in range(minibatches)]


def trained(batch: Sequence[SampledGroup]) -> list[Sample]:
    """The samples that enter the loss, in order."""
    return [sample for group in batch for sample in group.samples if sample.trained]


def bare_terms(samples: Sequence[Sample]) -> list[LossTerms]:
    """What a forward needs of these samples; no loss is made of it."""
    return [
        LossTerms(
            trajectory_id=sample.trajectory.trajectory_id,
            group_id=sample.trajectory.group_id,
            prompt_length=sample.trajectory.prompt_length,
            tokens=sample.trajectory.tokens,
            trainable=sample.trajectory.trainable,
            weight=np.zeros(len(sample.trajectory.tokens), np.float32),
        )
        for sample in samples
    ]


def with_forward(batch: Sequence[SampledGroup], name: str, values: Sequence[np.ndarray]) -> list[SampledGroup]:
    """The same groups with ``values`` (of the trained samples, in order) as their ``name``; of the others it is NaN."""
    rest = iter(values)

    def fill(sample: Sample) -> Sample:
        own = next(rest) if sample.trained else np.full(len(sample.trajectory.tokens), np.nan, np.float32)
        return replace(sample, **{name: own})  # type: ignore[arg-type]

    return [replace(group, samples=tuple(fill(sample) for sample in group.samples)) for group in batch]


def high_entropy(samples: Sequence[Sample], share: float) -> list[np.ndarray]:
    """Masks ``[tokens]`` of the sampled tokens; below 1, only the ``share`` of them where the policy's entropy is highest (at least one).

    Over the whole batch (Wang et al. 2025, "Beyond the 80/20 rule", section 4).
    """
    masks = [sample.trajectory.trainable for sample in samples]
    if share >= 1.0 or not samples:
        return masks
    found = [np.where(mask, sample.entropy, -np.inf) for mask, sample in zip(masks, samples, strict=True)]  # type: ignore[arg-type]
    values = np.sort(np.concatenate([one[mask] for one, mask in zip(found, masks, strict=True)]))
    threshold = values[-max(1, round(share * len(values)))]
    return [one >= threshold for one in found]


def make_minibatch(
    batch: Sequence[SampledGroup],
    credits: Sequence[Sequence[Credit]],
    masks: Mapping[str, np.ndarray],
    *,
    version: int,
    aggregation: str,
    constant: int,
    old: str,
    correct: bool = False,
) -> Minibatch:
    """Loss terms of the trained samples of these groups.

    ``masks`` by trajectory say which tokens count. ``version`` is the trainer's: only its tokens can show whether engine and trainer
    agree. ``old`` is the denominator of the importance ratio: ``current`` (none: ratio 1), ``engine``, or ``recompute`` (a forward's).
    ``correct`` gives the engine's logprobs along, for an off-policy correction.
    """
    kept = [
        (sample, credit)
        for group, row in zip(batch, credits, strict=True)
        for sample, credit in zip(group.samples, row, strict=True)
        if sample.trained
    ]
    own_masks = [masks[sample.trajectory.trajectory_id] for sample, _ in kept]
    weights, denominator = token_weights(own_masks, aggregation, constant, groups=[sample.trajectory.group_id for sample, _ in kept])
    terms, critic = [], []
    for (sample, credit), weight in zip(kept, weights, strict=True):
        trajectory = sample.trajectory
        [bare] = bare_terms([sample])
        terms.append(
            replace(
                bare,
                weight=weight,
                advantage=credit.advantage,
                parity_logprobs=np.where(trajectory.versions == version, trajectory.logprobs, np.nan).astype(np.float32),
                old_logprobs={"current": None, "engine": trajectory.logprobs, "recompute": sample.old_logprobs}[old],
                reference_logprobs=sample.reference_logprobs,
                columns={"rollout_logprobs": trajectory.logprobs} if correct else {},
            )
        )
        if credit.returns is not None and sample.values is not None:
            columns = {"returns": credit.returns, "old_values": sample.values}
            critic.append(replace(bare, weight=trajectory.trainable.astype(np.float32), columns=columns))
    return Minibatch(
        terms=tuple(terms),
        denominators={MAIN_WEIGHT: denominator},
        critic_terms=tuple(critic),
        critic_denominators={MAIN_WEIGHT: float(sum(term.weight.sum() for term in critic))},
    )


def build_minibatch(groups: Sequence[Group], algorithm: Algorithm, *, version: int, aggregation: str, constant: int, old: str) -> Minibatch:
    """One minibatch of groups whose algorithm needs no forward."""
    batch = algorithm.choose(groups)
    masks = {sample.trajectory.trajectory_id: sample.trajectory.trainable for sample in trained(batch)}
    return make_minibatch(batch, algorithm.advantages(batch), masks, version=version, aggregation=aggregation, constant=constant, old=old)


def with_reference_logprobs(terms: Sequence[LossTerms], values: Sequence[np.ndarray]) -> tuple[LossTerms, ...]:
    """The same sequences with the reference model's logprobs, ``[tokens]`` each."""
    return tuple(replace(term, reference_logprobs=value) for term, value in zip(terms, values, strict=True))
