"""What the driver and a trainer rank say to each other. Imports no torch, so the driver stays light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rlpost.config.schema import TrainingConfig
from rlpost.training.packing import MicroBatch
from rlpost.types import LossComponent

Head = Literal["logprob", "value"]
"""What a model says of a target: its logprob, or a value (critics and reward models)."""


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
    reference_mode: Literal["none", "initial", "adapters_off", "moving_average"] = "none"
    """Whose logprobs the rank gives as the reference's, of what it can hold itself: ``algorithm.reference``."""
    reference_path: str | None = None
    """initial: where that copy is read from; None is ``model_path``."""
    reference_decay: float = 0.99
    """moving_average: share of the old average that a step keeps."""
    head: Head = "logprob"


@dataclass(frozen=True, kw_only=True)
class UpdateRequest:
    """One optimizer step for one rank. ``denominators`` are global, by the name of their weights; ``measure_parity`` compares with the
    engine's logprobs."""

    micro_batches: Sequence[MicroBatch]
    denominators: Mapping[str, float]
    components: Sequence[LossComponent]
    temperature: float
    measure_parity: bool = True
