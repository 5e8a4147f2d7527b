"""The drawings of a plan: memory bars, time by phase, the split curve, sync seconds over bandwidth."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from rlpost.planner.coefficients import Calibration
from rlpost.planner.footprint import Process
from rlpost.planner.lines import StandingLine, standing_lines
from rlpost.planner.parts import SplitPlan, SyncPlan
from rlpost.planner.plan import Plan
from rlpost.planner.quantities import GIB
from rlpost.planner.roles import PHASES
from rlpost.planner.sections import break_even_words
from rlpost.planner.svg import Scale, axes, element, figure, legend, line, log_scale, path, text
from rlpost.planner.tables import digits, gib, percent

COLOURS = (
    "#1f4e9c", "#f2a93b", "#7a1f6b", "#8fd3c8", "#b5391f", "#f5d77a", "#2f6f3a", "#e59ac0", "#4a4f5c", "#a8c66c", "#6b3fb0", "#d9c7b0",
    "#0f6f76", "#ffb6a3", "#5d2f14", "#c7d2f5", "#8c1f3d", "#b9e0a5",
)  # fmt: skip
"""Dark and light in turn, so that neighbours differ without colour too."""

LEFT, RIGHT = 130.0, 800.0
BAR, TOP_BAR = 22.0, 28.0
MOST_CAPACITY = 4
"""A capacity more than this many times the peak is written and not drawn: bars would be slivers."""


def figures(plan: Plan) -> list[str]:
    """All that apply to the run."""
    capacity = plan.memory.shared_bytes if plan.memory.shared else None
    found = [memory_figure(one, plan.calibration, number, shared=capacity) for number, one in enumerate(plan.memory.processes)]
    found.append(time_figure(plan))
    if plan.split:
        found.append(split_figure(plan.split))
    if plan.sync:
        found.append(sync_figure(plan.sync, plan.derived.weight_carrier, plan.calibration))
    return found


# ---- bars ------------------------------------------------------------------------------------------------------------


def memory_figure(process: Process, calibration: Calibration, number: int, *, shared: float | None) -> str:
    """One bar a phase, its lines stacked, and the capacity; ``shared``: bytes of a memory that other processes use too."""
    lines = [(_line_name(one, process), one) for one in standing_lines(process, calibration)]
    names = list(dict.fromkeys(name for name, _ in lines))
    kinds = {name: f"fill{place % len(COLOURS)}" for place, name in enumerate(names)}
    capacity, peak = shared or process.capacity_bytes, process.peak[1]
    drawn = capacity <= MOST_CAPACITY * peak
    scale = Scale(low=0, high=max(peak, capacity if drawn else 0) / GIB * 1.04, start=LEFT, end=RIGHT - 40)
    parts, bottom = [], TOP_BAR + len(PHASES) * (BAR + 8)
    for row, phase in enumerate(PHASES):
        top, reached = TOP_BAR + row * (BAR + 8), 0.0
        parts.append(text(LEFT - 8, top + 15, phase, "end"))
        for name, one in lines:
            if phase in one.phases:
                left, right = scale.at(reached / GIB), scale.at((reached + one.bytes) / GIB)
                reached += one.bytes
                words = element("title", escape(f"{name}: {gib(one.bytes)} GiB"))
                parts.append(element("rect", words, x=left, y=top, width=max(0.0, right - left), height=BAR, class_=kinds[name]))
        parts.append(text(scale.at(reached / GIB) + 6, top + 15, gib(reached)))
    for tick in scale.ticks():
        parts += [
            line(scale.at(tick), bottom, scale.at(tick), bottom + 5, "axis"),
            text(scale.at(tick), bottom + 20, f"{tick:g}", "middle"),
        ]
    whose = "of all processes together" if shared else f"of a {'GPU' if process.count else 'process'}"
    if drawn:
        parts.append(line(scale.at(capacity / GIB), 20, scale.at(capacity / GIB), bottom, "limit"))
    parts.append(text(RIGHT, 14, f"capacity {whose}: {gib(capacity)} GiB" + ("" if drawn else " (beyond the scale)"), "end"))
    parts += legend([(kinds[name], name) for name in names], LEFT, bottom + 34, columns=2, each=340)
    title = f"Memory of {process.name} ({process.count} of them), GiB by phase"
    words = "; ".join(f"{phase} {gib(process.phase_bytes(phase))} GiB" for phase in PHASES)
    return figure(f"memory{number}", title, f"{words}; capacity {gib(capacity)} GiB", bottom + 40 + 20 * math.ceil(len(names) / 2), parts)


def _line_name(line: StandingLine, process: Process) -> str:
    """With its role where several share the process."""
    return f"{line.role} {line.name}" if line.role and len(process.roles) > 1 else line.name


def time_figure(plan: Plan) -> str:
    """One bar a phase."""
    phases = plan.step.phases
    scale = Scale(low=0, high=max(one.seconds for one in phases) or 1, start=LEFT, end=RIGHT - 150)
    parts = []
    for row, one in enumerate(phases):
        top = 10 + row * (BAR + 8)
        parts.append(text(LEFT - 8, top + 15, one.name, "end"))
        parts.append(element("rect", x=LEFT, y=top, width=scale.at(one.seconds) - LEFT, height=BAR, class_=f"fill{row % len(COLOURS)}"))
        parts.append(text(scale.at(one.seconds) + 6, top + 15, f"{digits(one.seconds)} s, {percent(one.seconds / plan.step.seconds)}"))
    words = "; ".join(f"{one.name} {digits(one.seconds)} s" for one in phases)
    side = ", generation beside training" if plan.step.overlap else ""
    return figure("time", f"Time by phase of a step of {digits(plan.step.seconds)} s{side}", words, 20 + len(phases) * (BAR + 8), parts)


# ---- curves ----------------------------------------------------------------------------------------------------------

TOP, BOTTOM = 70.0, 330.0
Curve = Callable[[float], float]


def split_figure(split: SplitPlan) -> str:
    """Seconds over rollout GPUs: of both sides, of the step, colocated, and the longest answer's."""
    rollout = [one.rollout_gpus for one in split.curve]
    horizontal = Scale(low=min(rollout) - 0.5, high=max(rollout) + 0.5, start=LEFT, end=RIGHT)
    sides = [value for one in split.curve for value in (one.generate_s, one.train_s, one.step_s)]
    vertical = log_scale([*sides, split.colocated_s, split.floor_s], BOTTOM, TOP)

    def place(gpus: float, value: float) -> tuple[float, float]:
        return horizontal.at(gpus), vertical.at(value)

    parts = axes(horizontal, vertical, "rollout GPUs, the others train", "seconds")
    curves = (("step", "curve0"), ("generate", "curve1"), ("train", "curve2"))  # where they meet the step, all are seen
    for name, kind in curves:
        parts.append(path([place(one.rollout_gpus, getattr(one, f"{name}_s")) for one in split.curve], kind))
    for kind, value in (("curve3", split.colocated_s), ("curve4", split.floor_s)):
        parts.append(path([place(gpus, value) for gpus in (horizontal.low, horizontal.high)], kind))
    present = next((one for one in split.curve if (one.trainer_gpus, one.rollout_gpus) == split.present), None)
    for name, one, below in (("best", split.best, True), ("present", present, False)):
        if one is not None:
            x, y = place(one.rollout_gpus, one.step_s)
            parts += [element("circle", cx=x, cy=y, r=6, class_="mark"), text(x, y + (24 if below else -12), name, "middle")]
    entries = [(kind, name) for name, kind in curves] + [("curve3", "all GPUs colocated"), ("curve4", "longest answer alone")]
    parts += legend(entries, LEFT, 6)
    words = f"best {split.best.trainer_gpus} + {split.best.rollout_gpus} GPUs with {digits(split.best.step_s)} s a step"
    return figure("split", "Step time over the split into trainer and rollout GPUs", words, BOTTOM + 50, parts)


def sync_figure(sync: SyncPlan, carrier: str, calibration: Calibration) -> str:
    """Seconds of a full sync and of a delta over the bandwidth that a transport reaches."""
    full, delta = full_curve(sync, carrier, calibration), delta_curve(sync, carrier, calibration)
    present = reached(sync, carrier, calibration)
    even = sync.break_even_bytes_per_second
    marks = [(value, words) for value, words in ((present, "present"), (even, "break-even")) if value and math.isfinite(value)]
    around = [value / 1e9 for value, _ in marks] or [1.0]
    horizontal = Scale(low=min(around) / 30, high=max(around) * 30, start=LEFT, end=RIGHT, log=True)
    curves = [("curve0", "in full", full)] + ([("curve1", "as a delta", delta)] if delta else [])
    places = [horizontal.low * (horizontal.high / horizontal.low) ** (number / 60) for number in range(61)]
    vertical = log_scale([curve(place) for _, _, curve in curves for place in places], BOTTOM, TOP)
    parts = axes(horizontal, vertical, "GB/s reached", "seconds")
    for kind, _, curve in curves:
        parts.append(path([(horizontal.at(place), vertical.at(curve(place))) for place in places], kind))
    for number, (value, words) in enumerate(marks):
        x = horizontal.at(value / 1e9)
        parts += [line(x, BOTTOM, x, TOP, "limit"), text(x + 5, TOP + 14 + 16 * number, f"{words} {digits(value / 1e9)} GB/s")]
    parts += legend([(kind, name) for kind, name, _ in curves], LEFT, 6)
    words = f"{sync.full_gb:.4g} GB in full, {sync.delta_gb:.4g} GB as a delta; {break_even_words(sync)}"
    return figure("sync", f"Weight sync over {carrier} by bandwidth", words, BOTTOM + 50, parts)


def _cost(sync: SyncPlan, name: str, coefficient: str, calibration: Calibration) -> float:
    """Seconds of a transport's works with one coefficient."""
    works = sync.works.get(name, ())
    return sum(work.amount * calibration.value(coefficient) for work in works if work.coefficient == coefficient)


def reached(sync: SyncPlan, carrier: str, calibration: Calibration) -> float | None:
    """Bytes a second of a full sync's transfer."""
    transfer = _cost(sync, carrier, f"sync_{carrier}", calibration) + _cost(sync, carrier, "sync_network", calibration)
    return sync.full_gb * 1e9 / transfer if transfer else None


def full_curve(sync: SyncPlan, carrier: str, calibration: Calibration) -> Curve:
    """Seconds of a full sync at a bandwidth that is reached, GB/s."""
    fixed = _cost(sync, carrier, "sync_s", calibration) + _cost(sync, carrier, "sync_read", calibration)
    return lambda bandwidth: sync.full_gb / bandwidth + fixed


def delta_curve(sync: SyncPlan, carrier: str, calibration: Calibration) -> Curve | None:
    """The same of a delta without full syncs between; None where adapters are synced."""
    name = f"delta over {carrier}"
    if name not in sync.works:
        return None
    fixed = sum(_cost(sync, name, coefficient, calibration) for coefficient in ("sync_s", "delta_scan", "delta_s"))
    return lambda bandwidth: sync.delta_gb / bandwidth + fixed
