"""Step time over splits of the GPUs into trainer and rollout, the balance point, and the same GPUs colocated.

Generation does not scale to zero: the longest sequence takes its time however many engines there are. Its seconds on n GPUs are
``floor_s + gpu_seconds / n``; two measurements give both. Split and pipelined, a step takes the longer side and what of the sync is
exposed; colocated, both sides have all GPUs, one after the other, and pay for changing over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlpost.planner.quantities import require_at_least, require_positive
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Seconds of a phase on n GPUs: ``floor_s + gpu_seconds / n``."""

    floor_s: float
    gpu_seconds: float

    def seconds(self, gpus: float) -> float:
        """On that many GPUs. Raises ConfigError for none."""
        require_positive(gpus=gpus)
        return self.floor_s + self.gpu_seconds / gpus


def fit_scaling(points: Sequence[tuple[float, float]]) -> Scaling:
    """Least squares through measured ``(gpus, seconds)``; GPUs may be shares of a pool.

    Raises ConfigError when all points have the same number of GPUs, and when more GPUs took longer than this model allows.
    """
    for gpus, seconds in points:
        require_at_least(0, seconds=seconds)
        require_positive(gpus=gpus)
    inverse = [1 / gpus for gpus, _ in points]
    if len(set(inverse)) < 2:
        raise ConfigError(f"{len(points)} measurements, all on the same number of GPUs; expected two numbers at least: measure another one")
    mean_x, mean_y = sum(inverse) / len(points), sum(seconds for _, seconds in points) / len(points)
    covariance = sum((x - mean_x) * (seconds - mean_y) for x, (_, seconds) in zip(inverse, points, strict=True))
    gpu_seconds = covariance / sum((x - mean_x) ** 2 for x in inverse)
    floor = mean_y - gpu_seconds * mean_x
    if gpu_seconds < 0 or floor < 0:
        raise ConfigError(
            f"the measurements give a floor of {floor:.3g} s and {gpu_seconds:.3g} GPU-seconds; expected neither below 0: "
            "seconds must fall with GPUs, and no faster than in proportion. Measure again, with equal work"
        )
    return Scaling(floor_s=floor, gpu_seconds=gpu_seconds)


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split, in seconds. Idle shares are of the step: what a side waits for the other and for the sync."""

    trainer_gpus: int
    rollout_gpus: int
    generate_s: float
    train_s: float
    step_s: float

    @property
    def trainer_idle(self) -> float:
        """Share of the step in which the trainer's GPUs do nothing."""
        return 1 - self.train_s / self.step_s

    @property
    def rollout_idle(self) -> float:
        """Share of the step in which the engines' GPUs do nothing."""
        return 1 - self.generate_s / self.step_s


Seconds = Callable[[int], float]
"""Seconds of a phase on that many GPUs: ``Scaling.seconds``, or a whole simulation."""


def split_curve(total_gpus: int, generate: Seconds, train: Seconds, *, sync_s: float = 0.0, multiple: int = 1) -> tuple[Split, ...]:
    """All splits whose rollout side is a ``multiple`` (an engine's tensor_parallel), pipelined. Raises ConfigError when there is none."""
    require_at_least(1, multiple=multiple)
    require_at_least(0, sync_s=sync_s)
    if total_gpus <= multiple:
        raise ConfigError(
            f"total_gpus={total_gpus} cannot be split into engines of {multiple} GPUs and a trainer; expected at least {multiple + 1}: "
            "take more GPUs, or colocate"
        )
    splits = []
    for rollout in range(multiple, total_gpus, multiple):
        generate_s, train_s = generate(rollout), train(total_gpus - rollout)
        require_at_least(0, generate_s=generate_s, train_s=train_s)
        step = max(generate_s, train_s) + sync_s
        splits.append(
            Split(trainer_gpus=total_gpus - rollout, rollout_gpus=rollout, generate_s=generate_s, train_s=train_s, step_s=step)
        )  # fmt: skip
    return tuple(splits)


def best_split(curve: Sequence[Split]) -> Split:
    """The balance point: the shortest step; of equal ones that with the fewest rollout GPUs."""
    return min(curve, key=lambda split: (split.step_s, split.rollout_gpus))


def colocated_step_seconds(total_gpus: int, generate: Seconds, train: Seconds, *, sync_s: float = 0.0, change_over_s: float = 0.0) -> float:
    """Both sides on all GPUs in turn; ``change_over_s``: sleep, wake, offload and onload."""
    require_at_least(1, total_gpus=total_gpus)
    require_at_least(0, sync_s=sync_s, change_over_s=change_over_s)
    return generate(total_gpus) + train(total_gpus) + sync_s + change_over_s


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The verdict: the quicker placement, and the step time of both."""

    mode: Literal["split", "colocated"]
    split: Split
    colocated_step_s: float

    @property
    def gain(self) -> float:
        """How much longer a step of the other placement takes, as a share of this one's."""
        quick, slow = sorted((self.split.step_s, self.colocated_step_s))
        return slow / quick - 1


def choose_placement(
    total_gpus: int,
    generate: Seconds,
    train: Seconds,
    *,
    split_sync_s: float = 0.0,
    colocated_sync_s: float = 0.0,
    change_over_s: float = 0.0,
    multiple: int = 1,
) -> Placement:
    """The best split (pipelined, so at least one version stale) against colocated (on-policy)."""
    best = best_split(split_curve(total_gpus, generate, train, sync_s=split_sync_s, multiple=multiple))
    together = colocated_step_seconds(total_gpus, generate, train, sync_s=colocated_sync_s, change_over_s=change_over_s)
    return Placement(mode="split" if best.step_s < together else "colocated", split=best, colocated_step_s=together)
