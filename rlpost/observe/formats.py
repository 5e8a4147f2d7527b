"""Numbers, durations and series as short text, and the line of a step. Pure functions; the plain line is ASCII only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

BLOCKS = "▁▂▃▄▅▆▇█"
MISSING = "-"

_LINE_PHASES = (("generate", "gen"), ("reward", "rew"), ("reference", "ref"), ("old_logprob", "old"), ("update", "upd"), ("sync", "sync"))
_OPTIONAL_PHASES = ("reward", "reference", "old_logprob")
SHORTEST_SHOWN_S = 0.005
"""Optional phases shorter than this are left out of the step line: they would read 0.00s."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a finite number (None, NaN and text are not; a metric may be any of them)."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def number(value: Any, digits: int = 3) -> str:
    """``value`` with ``digits`` decimals, in scientific form when that would show only zeros; ``-`` when it is no finite number."""
    if not is_number(value):
        return MISSING
    if value != 0 and abs(value) < 0.5 * 10**-digits:
        return f"{value:.1e}"
    return f"{value:.{digits}f}"


def count(value: Any) -> str:
    """1234567 as ``1.2M``; whole numbers below 1000 as they are."""
    if not is_number(value):
        return MISSING
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # 999.95 and not 1000: what rounds up to the next unit is shown in it
        if abs(value) >= 0.99995 * unit:
            return f"{value / unit:.1f}{letter}"
    return f"{value:.0f}"


def seconds(value: Any) -> str:
    """A short duration: ``0.02s``, ``4.2s``, and from one minute on like :func:`duration`."""
    if not is_number(value):
        return MISSING
    if value >= 59.95:
        return duration(value)
    return f"{value:.1f}s" if value >= 0.095 else f"{value:.2f}s"


def duration(value: Any) -> str:
    """Whole seconds as ``45s``, ``1m40s``, ``2h05m``, ``3d04h``."""
    if not is_number(value):
        return MISSING
    whole = max(round(value), 0)
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    if minutes == 0:
        return f"{whole}s"
    if hours == 0:
        return f"{minutes}m{rest:02d}s"
    days, hours_left = divmod(hours, 24)
    return f"{hours}h{minutes_left:02d}m" if days == 0 else f"{days}d{hours_left:02d}h"


def sparkline(values: Sequence[Any]) -> str:
    """One block character a value, from the lowest to the highest of them; a space where there is no finite number."""
    known = [value for value in values if is_number(value)]
    if not known:
        return " " * len(values)
    low, span = min(known), max(known) - min(known)
    top = len(BLOCKS) - 1
    return "".join((BLOCKS[round((value - low) / span * top)] if span else BLOCKS[0]) if is_number(value) else " " for value in values)


def printable(text: str) -> str:
    """``text`` with every control character but newline and tab escaped: a model's output must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode("ascii") for char in text)


def shorten(text: str, limit: int) -> str:
    """At most about ``limit`` characters of ``text``: its beginning and its end, and between them how many were left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def step_line(record: Mapping[str, Any], *, steps: int, reward_before: float | None, seconds_left: float | None) -> str:
    """The line of one step. ``reward_before`` is what the change of the reward in parentheses is measured against."""
    reward = record.get("reward/mean")
    parts = [f"step {record.get('step', MISSING)}/{steps}"]
    if "reward/mean" in record or not {"train/loss", "evaluate/loss"} & set(record):
        parts.append(f"reward {number(reward, 2)}")
    if is_number(reward) and reward_before is not None:
        parts.append(f"({reward - reward_before:+.2f})")
    for label, name in (("loss", "train/loss"), ("accuracy", "train/accuracy"), ("margin", "train/margin"), ("kl", "train/kl")):
        if name in record:
            parts.append(f"{label} {number(record[name])}")
    if "rollout/tokens_per_s" in record:
        parts.append(f"{count(record['rollout/tokens_per_s'])} tok/s")
    for phase, label in _LINE_PHASES:
        value = record.get(f"time/{phase}_s")
        if value and (phase not in _OPTIONAL_PHASES or value >= SHORTEST_SHOWN_S):
            parts.append(f"{label} {seconds(value)}")
    for label, name in (("stale", "rollout/staleness_max"), ("failed", "reward/failed"), ("dropped", "rollout/groups_dropped")):
        if record.get(name):
            parts.append(f"{label} {count(record[name])}")
    for name in ("reward", "accuracy", "loss"):  # of an offline run the loss, or better, the share that is ranked rightly
        if f"evaluate/{name}" in record:
            parts.append(f"eval {number(record[f'evaluate/{name}'])}")
            break
    if seconds_left is not None:
        parts.append(f"eta {duration(seconds_left)}")
    return " ".join(parts)
