"""What a reward function may return besides a number and None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RewardResult:
    """A reward with named side figures: ``RewardResult(1.0, {"steps": 3})``.

    ``value`` None means "not scorable": the trajectory gets no gradient and is not in its group's baseline. ``metrics`` are
    finite numbers; they are logged as ``reward/<name of the reward>/<metric>`` and do not change the reward.
    """

    value: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
