"""Units, the mark of what a number rests on, and the checks of inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rlpost.types import ConfigError

GB = 10**9
MIB = 2**20
GIB = 2**30
GBIT_BYTES = 10**9 // 8
"""Bytes of a gigabit: networks are sold in Gbit/s."""

Basis = Literal["assumed", "measured"]
"""Whether a number rests on a formula and its inputs as given, or was scaled by what a run measured."""


def require_at_least(least: float, **values: float) -> None:
    """Raise ConfigError unless every value is a finite number of at least ``least``; the keyword is the name that the user sees."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{name}={value:g} is impossible; expected a number of at least {least:g}: change {name}")


def require_positive(**values: float) -> None:
    """Raise ConfigError unless every value is a finite number above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value:g} is impossible; expected a number above 0: change {name}")


def require_share(**values: float) -> None:
    """Raise ConfigError unless every value is between 0 and 1 (a percentage is the usual mistake)."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name}={value:g} is no share; expected 0 to 1: change {name} (for {value:g} % give {value / 100:g})")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if value not in set(choices):
        raise ConfigError(f"{name}={value!r} is not known; expected one of {', '.join(choices)}: change {name}")


def require_divides(degree_name: str, degree: int, **sizes: int) -> None:
    """Raise ConfigError unless ``degree`` divides every size."""
    require_at_least(1, **{degree_name: degree})
    for name, size in sizes.items():
        if size % degree:
            fitting = ", ".join(str(divisor) for divisor in range(1, size + 1) if size % divisor == 0)
            raise ConfigError(f"{degree_name}={degree} does not divide {name}={size}; expected one of {fitting}: change {degree_name}")


@dataclass(frozen=True, kw_only=True)
class TimeLine:
    """One thing that takes ``seconds``, and how they were computed."""

    name: str
    seconds: float
    formula: str
    basis: Basis = "assumed"


def total_seconds(lines: Iterable[TimeLine]) -> float:
    """Sum of lines that follow one another, seconds."""
    return sum(one.seconds for one in lines)
