"""The critic's loss."""

from __future__ import annotations

import torch

from rlpost.algorithms.losses import Targets, Term


def value_loss(targets: Targets, *, clip: float) -> Term:
    """``max((V - R)^2, (clip(V, old - clip, old + clip) - R)^2) / 2`` (PPO's value clipping: Schulman et al. 2017, code; ``clip`` 0: none).

    Reads the columns ``returns`` (R) and ``old_values``. The larger error is taken, so that a value which left the range is not pulled
    further, but one outside that is wrong is still corrected. Means: ``value_error`` (squared) and ``value_clip_fraction``.
    """
    if targets.values is None:
        raise AssertionError("the value loss needs a model with a value head")
    values, returns, old = targets.values, targets.columns["returns"], targets.columns["old_values"]
    error = (values - returns).square()
    larger = error
    if clip:
        larger = torch.maximum(error, (old + (values - old).clamp(-clip, clip) - returns).square())
    hit = (larger > error).to(error.dtype)
    return Term(loss=0.5 * larger, means={"value_error": error.detach(), "value_clip_fraction": hit})
