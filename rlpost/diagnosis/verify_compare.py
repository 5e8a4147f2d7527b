"""When are two results of the same computation equal? Pure. NaN, and what only one side has, is unequal to everything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far results of one dtype may be apart, and still be the same computation. ``why`` is for the reader of a finding."""

    relative: float
    """Of losses and gradient norms."""
    logprob: float
    """Of one token's logprob, between two ways to lay sequences into rows."""
    parity_mean: float
    parity_max: float
    """Between engine and trainer, whose kernels are not the same: the mean over a step's tokens, and the largest."""
    why: str


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(
        relative=1e-5, logprob=1e-4, parity_mean=1e-4, parity_max=1e-3, why="float32 sums in another order differ by about 1e-7 each"
    ),
    "bfloat16": Tolerance(
        relative=2e-2,
        logprob=0.25,
        parity_mean=0.02,
        parity_max=0.5,
        why="bfloat16 keeps 8 bits: a rounding is up to 0.4 % of a value, and kernels round by the length of a row; 0.25 % of a gradient "
        "norm, 0.06 of a token's logprob and 0.09 between engine and trainer were measured, a wrong denominator or mask changes more",
    ),
}
"""By ``Derived.dtype``."""

LOSS_SCALE = 0.1
"""Losses smaller than this are compared as if they were it: a policy-gradient loss is a sum of terms of about 1 that nearly cancel."""


def difference(expected: Any, actual: Any, scale: float = 0.0) -> float:
    """Relative difference of two numbers, as a share of the expected one or of ``scale``, whichever is larger; infinite when they cannot
    be compared (NaN, None, infinite)."""
    numbers = [float(one) if isinstance(one, int | float) else math.nan for one in (expected, actual)]
    if not all(math.isfinite(one) for one in numbers):
        return math.inf
    gap = abs(numbers[0] - numbers[1])
    return 0.0 if gap == 0 else gap / max(abs(numbers[0]), scale) if max(abs(numbers[0]), scale) > 0 else math.inf


def largest_difference(expected: Mapping[str, Any], actual: Mapping[str, Any], names: Iterable[str]) -> tuple[str, float]:
    """The metric among ``names`` that differs most, and by how much; metrics that neither side has are left out."""
    found = [
        (name, difference(expected.get(name), actual.get(name), LOSS_SCALE if name.endswith("/loss") else 0.0))
        for name in names
        if name in expected or name in actual
    ]
    return max(found, key=lambda one: one[1], default=("nothing", math.inf))


def largest_gap(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> float:
    """Largest absolute difference of arrays ``[tokens]`` where ``masks`` hold; infinite when one is no number there, or for nothing."""
    if len(expected) != len(actual) or not any(mask.any() for mask in masks):
        return math.inf
    largest = 0.0
    for one, other, mask in zip(expected, actual, masks, strict=True):
        if one.shape != other.shape:
            return math.inf
        gaps = np.abs(one[mask].astype(np.float64) - other[mask])
        if not np.isfinite(gaps).all():
            return math.inf
        largest = max(largest, float(gaps.max(initial=0.0)))
    return largest


def different_prompts(expected: Sequence[Mapping[str, Any]], actual: Sequence[Mapping[str, Any]]) -> str:
    """The first row of a step's rollouts (see observe.rollouts) whose prompt is another one, in words; empty when all are the same."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=False)):
        if one["prompt_id"] != other["prompt_id"]:
            return f"trajectory {number} is of prompt {other['prompt_id']!r}, expected {one['prompt_id']!r}"
        if one["tokens"][: one["prompt_length"]] != other["tokens"][: other["prompt_length"]]:
            return f"the tokens of prompt {one['prompt_id']!r} differ"
    return "" if len(expected) == len(actual) else f"{len(actual)} trajectories, expected {len(expected)}"


def same_tokens(expected: Sequence[Mapping[str, Any]], actual: Sequence[Mapping[str, Any]]) -> bool:
    """Whether engines sampled the same tokens."""
    return [row["tokens"] for row in expected] == [row["tokens"] for row in actual]


def empty_moments(largest: Mapping[str, float]) -> str:
    """What is wrong with an optimizer's moments, given the largest absolute value of each tensor by name; empty when nothing is.

    After a step every parameter that had a gradient has moments; not one of them that is not 0 means that they were lost.
    """
    if not largest:
        return "the checkpoint holds no moments of the optimizer"
    if any(not math.isfinite(value) for value in largest.values()):
        return f"{sum(not math.isfinite(value) for value in largest.values())} of {len(largest)} moments are no numbers"
    if not any(largest.values()):
        return f"all {len(largest)} moments of the optimizer are 0 after a step"
    return ""
