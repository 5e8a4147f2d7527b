"""What the text and the page of a plan are made of: sections of sentences and tables, and numbers as text."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.planner.quantities import GIB


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells. A column whose name begins with ``>`` holds numbers. ``detail``: of those who ask how a number came about."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    detail: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """A title, what is to be said, and the numbers."""

    title: str
    sentences: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()


# ---- numbers as text -------------------------------------------------------------------------------------------------


SMALLEST_GIB = 0.0001
"""What four decimals can show."""


def gib(size: float) -> str:
    """Bytes in GiB, without the unit."""
    value = size / GIB
    if abs(value) >= 1:
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{value:.4f}" if abs(value) >= SMALLEST_GIB or not value else f"{value:.1e}"


def digits(value: float) -> str:
    """Seconds or GB/s with the digits that matter, without the unit."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def percent(share: float) -> str:
    """0.256 as ``26 %``."""
    return f"{100 * share:.0f} %"


def count(number: float) -> str:
    """4022468096 as ``4.02 billion``, and what is smaller than a million as it is."""
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.2f} {name}"
    return f"{number:,.0f}"
