"""What a loss is made of: terms over the targets of a micro-batch, weighted, summed, and divided by global denominators.

A term takes :class:`Targets` and returns one value a target ``[targets]``, or one a sequence ``[sequences]`` where it compares
sequences. A logprob that the engine could not give (NaN) counts as the current policy's own: ratio exactly 1 on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rlpost.algorithms.estimators import MOST_LOG_RATIO
from rlpost.types import MAIN_WEIGHT, LossComponent


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a term may read of one micro-batch, float32, ``[targets]`` unless said otherwise. Sequences are always whole.

    ``logprobs`` and ``entropy`` carry gradients, or ``values`` does, of a model with a value head.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    sequence: torch.Tensor
    """Index of each target's sequence, int64; targets of a sequence are neighbours."""
    sequences: int
    values: torch.Tensor | None = None
    advantage: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """``[sequences]``."""

    def known(self, values: torch.Tensor | None) -> torch.Tensor:
        """``values`` where they are finite, else the current logprobs without their gradient."""
        current = self.logprobs.detach()
        return current if values is None else torch.where(torch.isfinite(values), values, current)

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the targets of each sequence ``[sequences]``."""
        return values.new_zeros(self.sequences).index_add(0, self.sequence, values)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over the targets of each sequence ``[sequences]``; 0 for one without targets."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp(min=1.0)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A value a sequence, repeated for each of its targets."""
        return values.index_select(0, self.sequence)


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term and what to report of it, all ``[targets]`` or all ``[sequences]``.

    ``means`` are averaged like the loss, ``maxima`` are over everything.
    """

    loss: torch.Tensor
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)


TermFunction = Callable[..., Term]


def log_ratio(targets: Targets) -> torch.Tensor:
    """log pi / pi_old of each token, cut at MOST_LOG_RATIO either way.

    Where the old logprob is unknown it is exactly 0, with the gradient of log pi.
    """
    return (targets.logprobs - targets.known(targets.old_logprobs)).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One component's term on one micro-batch, with the weight of each of its values and the denominator."""

    component: LossComponent
    term: Term
    weight: torch.Tensor
    """What the term's and the correction's means are averaged by: not the corrected weight, which may be 0."""
    denominator: float
    means: Mapping[str, torch.Tensor]
    """What the correction reports ``[targets]``."""


def total_loss(
    components: Sequence[LossComponent],
    targets: Targets,
    weight: torch.Tensor,
    denominators: Mapping[str, float],
    terms: Mapping[str, TermFunction],
) -> tuple[torch.Tensor, list[Part]]:
    """The micro-batch's share of the loss, and its parts. ``denominators`` are counted over the whole optimizer step, by weight.

    A denominator of 0 means that all those weights are 0.
    """
    from rlpost.algorithms.correction import correction_factor

    total, parts = weight.new_zeros(()), []
    for component in components:
        term = terms[component.term](targets, **component.parameters)
        own = weight if component.weight == MAIN_WEIGHT else {**targets.columns, **targets.scalars}[component.weight]
        denominator = denominators[component.weight] or 1.0
        means: Mapping[str, torch.Tensor] = {}
        loss = term.loss
        if component.correction is not None:
            factor, means = correction_factor(component.correction, targets)
            loss = factor * loss
        total = total + component.coefficient * (own * loss).sum() / denominator
        parts.append(Part(component=component, term=term, weight=own, denominator=denominator, means=means))
    return total, parts
