"""A trainer rank that reports the norm of its gradient exactly."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from rlpost.training.worker import TrainerRank


class ExactRank(TrainerRank):
    """The norm is summed in float64, over the whole gradient.

    torch's own, in float32 on a CPU, is off by 4e-5 for a million elements and by half of that for each of two shards of them: more than
    a check of one gradient on one and on two ranks should let pass.
    """

    def _clip(self) -> float:
        total = 0.0
        for parameter in self.model.parameters():
            gradient: torch.Tensor | None = parameter.grad
            if gradient is not None:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                total += float(whole.double().square().sum())
        super()._clip()
        return math.sqrt(total)
