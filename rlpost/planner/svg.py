"""Small drawings as SVG text: elements, scales with round ticks, a figure that a screen reader can name. They load nothing."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 860
"""Of every figure, in its own units; the page scales it."""


def element(tag: str, content: str = "", **attributes: str | float) -> str:
    """One element. ``content`` is markup; attributes are escaped, ``class_`` and ``text_anchor`` are class and text-anchor."""
    written = "".join(f' {name.strip("_").replace("_", "-")}="{_attribute(value)}"' for name, value in attributes.items())
    return f"<{tag}{written}>{content}</{tag}>" if content else f"<{tag}{written}/>"


def _attribute(value: str | float) -> str:
    return html.escape(value) if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Words at a place, escaped."""
    return element("text", html.escape(words), x=x, y=y, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line of a CSS class."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def path(points: Iterable[tuple[float, float]], kind: str) -> str:
    """A line through points."""
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=kind)


def figure(identity: str, title: str, description: str, height: float, parts: Sequence[str]) -> str:
    """A drawing with its caption. ``identity`` is unique on the page."""
    named = element("title", html.escape(title), id=f"{identity}-title") + element("desc", html.escape(description), id=f"{identity}-words")
    drawing = element(
        "svg", named + "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height:g}", role="img",
        aria_labelledby=f"{identity}-title {identity}-words",
    )  # fmt: skip
    return element("figure", element("figcaption", html.escape(title)) + drawing, id=identity)


# ---- scales ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Values from ``low`` to ``high`` (above it) on places from ``start`` to ``end``; ``log``: both above 0."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The place of a value; one outside is put at the nearer end."""
        bend = math.log if self.log else float
        inside = min(max(value, self.low), self.high)
        return self.start + (bend(inside) - bend(self.low)) / (bend(self.high) - bend(self.low)) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values on it: about six; of a logarithmic one the powers of ten, with 2 and 5 times them where these are few."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            factors = (1, 2, 5) if last - first <= 3 else (1,)
            ticks = [10.0**power * factor for power in range(first, last + 1) for factor in factors]
            found = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(found) > 1:
                return found
        rough = (self.high - self.low) / 6
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
        return [step * number for number in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def log_scale(values: Iterable[float], start: float, end: float) -> Scale:
    """A logarithmic scale with some room around these values above 0."""
    known = [value for value in values if value > 0] or [1.0]
    return Scale(low=min(known) / 1.3, high=max(known) * 1.3, start=start, end=end, log=True)


def axes(horizontal: Scale, vertical: Scale, horizontal_name: str, vertical_name: str) -> list[str]:
    """Both axes with ticks and their numbers, the horizontal one below the drawing."""
    left, bottom = horizontal.start, vertical.start
    parts = [line(left, bottom, horizontal.end, bottom, "axis"), line(left, bottom, left, vertical.end, "axis")]
    for tick in horizontal.ticks():
        parts += [line(horizontal.at(tick), bottom, horizontal.at(tick), bottom + 5, "axis")]
        parts += [text(horizontal.at(tick), bottom + 20, f"{tick:,g}", "middle")]
    for tick in vertical.ticks():
        parts += [line(left, vertical.at(tick), horizontal.end, vertical.at(tick), "grid")]
        parts += [text(left - 8, vertical.at(tick) + 4, f"{tick:,g}", "end")]
    return [*parts, text(horizontal.end, bottom + 40, horizontal_name, "end"), text(left - 50, vertical.end - 14, vertical_name)]


def legend(entries: Sequence[tuple[str, str]], left: float, top: float, *, columns: int = 3, each: float = 210) -> list[str]:
    """Swatches of CSS classes with their words, ``columns`` a row, rows 20 apart."""
    parts = []
    for number, (kind, words) in enumerate(entries):
        x, y = left + number % columns * each, top + number // columns * 20
        swatch = (
            line(x, y + 6, x + 26, y + 6, kind)
            if kind.startswith("curve")
            else element("rect", x=x + 6, y=y, width=14, height=12, class_=kind)
        )
        parts += [swatch, text(x + 32, y + 11, words)]
    return parts
