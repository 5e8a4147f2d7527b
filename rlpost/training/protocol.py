"""What the driver and a trainer rank say to each other. Imports no torch, so the driver stays light."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.schema import TrainingConfig
from rlpost.training.packing import MicroBatch
from rlpost.types import LossComponent


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What a rank needs to know. ``total_updates`` is the number of optimizer steps of the whole run (None: forward only)."""

    model_path: str
    training: TrainingConfig
    dtype: str
    device: str
    attention: str
    total_updates: int | None
    seed: int
    timeout_s: float
    trust_remote_code: bool = False
    keep_reference: bool = False
    """Hold a frozen, sharded copy of the initial weights beside the trained ones."""
    reference_path: str | None = None
    """Where that copy is read from; None is ``model_path``."""


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """One optimizer step for one rank. ``denominator`` is global; ``measure_parity`` compares with the engine's logprobs."""

    micro_batches: Sequence[MicroBatch]
    denominator: float
    components: Sequence[LossComponent]
    temperature: float
    measure_parity: bool = True
