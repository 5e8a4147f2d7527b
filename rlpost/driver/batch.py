"""Groups of scored trajectories -> what the trainer needs: token weights, advantages, and one global denominator a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlpost.algorithms.aggregation import token_weights
from rlpost.types import Group, LossTerms, Trajectory


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The trajectories of one optimizer step, and the denominator counted over all of them."""

    terms: tuple[LossTerms, ...]
    denominator: float


def split(groups: Sequence[Group], minibatches: int) -> list[Sequence[Group]]:
    """Whole groups into equal minibatches, in order. The configuration check made sure that they divide."""
    size = len(groups) // minibatches
    return [groups[i * size : (i + 1) * size] for i in range(minibatches)]


def build_minibatch(groups: Sequence[Group], algorithm: Any, *, version: int, aggregation: str, constant: int, old: str) -> Minibatch:
    """Loss terms of the trajectories that the algorithm keeps.

    ``version`` is the trainer's: only its tokens can show whether engine and trainer agree. ``old`` is the denominator of the
    importance ratio: ``current`` (none: ratio 1), ``engine``, or ``recompute`` (filled in later by :func:`with_old_logprobs`).
    """
    kept: list[tuple[Trajectory, float]] = []
    for group in groups:
        advantages = dict(zip((t.trajectory_id for t in group.trajectories), algorithm.advantages(group), strict=True))
        kept += [(trajectory, float(advantages[trajectory.trajectory_id])) for trajectory in algorithm.keep(group)]
    weights, denominator = token_weights([trajectory.trainable for trajectory, _ in kept], aggregation, constant)
    terms = []
    for (trajectory, advantage), weight in zip(kept, weights, strict=True):
        terms.append(
            LossTerms(
                trajectory_id=trajectory.trajectory_id,
                group_id=trajectory.group_id,
                prompt_length=trajectory.prompt_length,
                tokens=trajectory.tokens,
                trainable=trajectory.trainable,
                weight=weight,
                advantage=np.where(trajectory.trainable, advantage, 0.0).astype(np.float32),
                parity_logprobs=np.where(trajectory.versions == version, trajectory.logprobs, np.nan).astype(np.float32),
                old_logprobs=trajectory.logprobs if old == "engine" else None,
            )
        )
    return Minibatch(terms=tuple(terms), denominator=denominator)


def with_old_logprobs(batch: Minibatch, values: Sequence[np.ndarray]) -> Minibatch:
    """The same minibatch with the trainer's logprobs before the update as the ratio's denominator, ``[tokens]`` each."""
    return replace(batch, terms=tuple(replace(term, old_logprobs=value) for term, value in zip(batch.terms, values, strict=True)))


def with_reference_logprobs(batch: Minibatch, values: Sequence[np.ndarray]) -> Minibatch:
    """The same minibatch with the reference model's logprobs, ``[tokens]`` each."""
    return replace(batch, terms=tuple(replace(term, reference_logprobs=value) for term, value in zip(batch.terms, values, strict=True)))
