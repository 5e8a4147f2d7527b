"""Trainer groups that compute nothing: they answer from token ids, and write down what they were asked, and in which phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlpost.observe import PhaseClock
from rlpost.training.packing import MicroBatch
from rlpost.training.protocol import UpdateRequest

SLOPES = {"logprobs": -0.01, "reference_logprobs": -0.02, "values": 0.001, "entropies": 0.1}


def answer(method: str, tokens: np.ndarray) -> np.ndarray:
    """What a fake says of tokens: its method's slope times the token's id."""
    return (SLOPES[method] * tokens).astype(np.float32)


@dataclass
class Asked:
    """One call of one group. ``updates`` are the requests by rank, of update and measure."""

    role: str
    method: str
    phase: str
    arguments: Sequence[Sequence[Any]]
    updates: list[UpdateRequest] = field(default_factory=list)

    @property
    def micros(self) -> list[MicroBatch]:
        """All micro-batches of all ranks."""
        found = [one.micro_batches for one in self.updates] or [arguments[0] for arguments in self.arguments]
        return [micro for micros in found for micro in micros]

    @property
    def targets(self) -> list[int]:
        """The tokens that were trained or asked for, sorted."""
        return sorted(int(token) for micro in self.micros for token in micro.target)

    def by_token(self, read: Callable[[MicroBatch], np.ndarray | None]) -> dict[int, float]:
        """What ``read`` finds in the micro-batches, by token id."""
        found: dict[int, float] = {}
        for micro in self.micros:
            values = read(micro)
            assert values is not None
            found.update(zip(micro.target.tolist(), values.tolist(), strict=True))
        return found


class FakeTrainers:
    """Has what the driver uses of a TrainerGroup."""

    def __init__(self, role: str, log: list[Asked], clock: PhaseClock, world: int = 1, **metrics: float) -> None:
        self.role, self.log, self.clock, self.world, self.metrics = role, log, clock, world, metrics

    async def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Updates give metrics, forwards an answer for each target."""
        assert len(arguments) == self.world
        asked = Asked(self.role, method, self.clock.current, arguments)
        self.log.append(asked)
        if method in ("update", "measure"):
            asked.updates = [one[0] for one in arguments]
            number = sum(one.role == self.role and one.method == method for one in self.log)
            return [{name.replace("__", "/"): value * number for name, value in self.metrics.items()}] * self.world
        return [[answer(method, micro.target) for micro in one[0]] for one in arguments]

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Save and load."""
        self.log.append(Asked(self.role, method, self.clock.current, [args]))
        return [None] * self.world
