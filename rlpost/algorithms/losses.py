"""Per-token loss terms. Each takes the targets of a micro-batch and returns ``[targets]``, to be weighted and summed.

A logprob that the engine could not give (NaN) counts as the current policy's own: ratio exactly 1 on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

MOST_LOG_RATIO = 20.0
"""Log ratios are cut here: exp overflows float32 at 88, and inf * 0 in the backward pass would make every gradient NaN."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a term may read, all ``[targets]`` float32. ``logprobs`` and ``entropy`` carry gradients."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    advantage: torch.Tensor
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term and what to report of it: ``means`` are averaged like the loss, ``maxima`` over all tokens. ``[targets]`` each."""

    loss: torch.Tensor
    means: Mapping[str, torch.Tensor] = field(default_factory=dict)
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)


def log_ratio(targets: Targets) -> torch.Tensor:
    """log pi / pi_old of each token, cut at MOST_LOG_RATIO either way.

    Where the old logprob is unknown it is exactly 0, with the gradient of log pi.
    """
    current = targets.logprobs
    if targets.old_logprobs is None:
        return current - current.detach()
    old = torch.where(torch.isfinite(targets.old_logprobs), targets.old_logprobs, current.detach())
    return (current - old).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def policy_clip(targets: Targets, *, clip_low: float, clip_high: float) -> Term:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` (PPO, Schulman et al. 2017, eq. 7; two bounds as in DAPO)."""
    ratio = log_ratio(targets).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    unclipped_gain, clipped_gain = ratio * targets.advantage, clipped * targets.advantage
    with torch.no_grad():
        hit = (clipped_gain < unclipped_gain).float()
    return Term(loss=-torch.minimum(unclipped_gain, clipped_gain), means={"clip_fraction": hit}, maxima={"ratio_max": ratio.detach()})


def kl_to_reference(targets: Targets, *, estimator: str) -> Term:
    """KL(pi || reference) of each token from its sample, with d = log ref - log pi (Schulman 2020).

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.
    """
    if targets.reference_logprobs is None:
        raise AssertionError("the KL term needs reference logprobs")
    current = targets.logprobs
    reference = torch.where(torch.isfinite(targets.reference_logprobs), targets.reference_logprobs, current.detach())
    delta = reference - current
    value = {"k1": lambda: -delta, "k2": lambda: 0.5 * delta.square(), "k3": lambda: delta.exp() - 1.0 - delta}[estimator]()
    return Term(loss=value, means={"kl": value.detach()})


def entropy_bonus(targets: Targets) -> Term:
    """Minus the entropy of the whole distribution at each target."""
    return Term(loss=-targets.entropy)


LOSS_TERMS: dict[str, Callable[..., Term]] = {"policy_clip": policy_clip, "kl": kl_to_reference, "entropy": entropy_bonus}
