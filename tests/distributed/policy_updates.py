"""Updates of trainer ranks with a policy-gradient loss, without a driver: the batch, the step, and the weights it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gloo_ranks import Trainers, make_groups

from rlpost.training.packing import pack
from rlpost.training.protocol import UpdateRequest
from rlpost.types import LossComponent, LossTerms

COMPONENTS = [LossComponent(term="policy_clip", parameters={"clip_low": 0.2, "clip_high": 0.2})]


def terms_of(seed: int) -> list[LossTerms]:
    """A batch: advantage is the reward less one half."""
    return [
        LossTerms(
            trajectory_id=t.trajectory_id,
            group_id=t.group_id,
            prompt_length=t.prompt_length,
            tokens=t.tokens,
            trainable=t.trainable,
            weight=t.trainable.astype(np.float32),
            advantage=np.full(len(t.tokens), t.reward - 0.5, np.float32),
        )
        for group in make_groups(seed=seed)
        for t in group.trajectories
        if t.reward is not None
    ]


def step(trainers: Trainers, seed: int) -> dict[str, float]:
    """One optimizer step on the batch of ``seed``; rank 0's metrics."""
    terms = terms_of(seed)
    requests = [
        (
            UpdateRequest(
                micro_batches=micros,
                denominators={"weight": float(sum(term.weight.sum() for term in terms))},
                components=COMPONENTS,
                temperature=1.0,
                measure_parity=False,
            ),
        )
        for micros in pack(terms, ranks=trainers.ranks, micro_batch_tokens=110)
    ]
    metrics: dict[str, float] = trainers.call_each("update", requests)[0]
    return metrics


def weights(worker: Any) -> dict[str, torch.Tensor]:
    """In a rank: all parameters whole (copies)."""
    worker.model.reshard()
    return {name: parameter.detach().full_tensor().clone() for name, parameter in worker.model.named_parameters()}
