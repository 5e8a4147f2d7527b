"""A plan as plain text: ASCII, at most ``WIDTH`` columns, for a terminal or a job's log. Its first lines say what most people ask."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlpost.planner.lines import engine_gpus, planned_steps
from rlpost.planner.plan import Plan, used_gpus
from rlpost.planner.sections import sections
from rlpost.planner.tables import Section, Table, count, digits, gib, percent

if TYPE_CHECKING:
    from rlpost.planner.advice import Advice

WIDTH = 120
CELL_WIDTH = 28
"""Of columns but the last, which takes what is left."""


def format_plan(plan: Plan, *, explain: bool = False, advice: Advice | None = None) -> str:
    """The whole plan; ``explain``: with every line's formula. ``advice``: what would make it fit, where it does not."""
    lines = [*_wrapped(f"plan of {plan.name}"), *_table_lines(Table(columns=(), rows=summary(plan, advice)))]
    for section in sections(plan):
        word, _, rest = section.title.partition(" ")
        lines += ["", f"{word.upper()} {rest}".rstrip(), *_section_lines(section, explain=explain)]
    lines += [line for number, warning in enumerate(plan.warnings) for line in ([""] * (not number)) + _wrapped(f"warning: {warning}")]
    return "\n".join(lines)


def ascii_text(text: str) -> str:
    """With everything but printable ASCII escaped: names are the user's, and must not steer a terminal."""
    return "".join(char if " " <= char <= "~" else char.encode("unicode_escape").decode("ascii") for char in text)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(ascii_text(text), WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _section_lines(section: Section, *, explain: bool) -> list[str]:
    lines = [line for sentence in section.sentences for line in _wrapped(sentence, "  ")]
    for table in section.tables:
        if explain or not table.detail:
            lines += [*([f"  -- {table.caption}"] if table.caption else []), *_table_lines(table)]
    return lines


def _table_lines(table: Table) -> list[str]:
    """Aligned columns two spaces apart; cells too wide for their column go on in the next line."""
    header = tuple(name.removeprefix(">") for name in table.columns)
    rows = [tuple(ascii_text(cell) for cell in row) for row in ([header] if header else []) + list(table.rows)]
    widths = [min(CELL_WIDTH, max(len(cell) for cell in column)) for column in zip(*rows, strict=True)]
    widths[-1] = WIDTH - sum(2 + width for width in widths[:-1]) - 2
    last_numbers = bool(table.columns) and table.columns[-1].startswith(">")
    if last_numbers:
        widths[-1] = min(widths[-1], max(len(row[-1]) for row in rows))
    right = [name.startswith(">") for name in table.columns] or [False] * len(widths)
    return [line for row in rows for line in _row_lines(row, widths, right)]


def _row_lines(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> list[str]:
    cells = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    found = []
    for parts in itertools.zip_longest(*cells, fillvalue=""):
        aligned = (part.rjust(width) if end else part.ljust(width) for part, width, end in zip(parts, widths, right, strict=True))
        found.append(("  " + "  ".join(aligned)).rstrip())
    return found


# ---- the first lines -------------------------------------------------------------------------------------------------


def summary(plan: Plan, advice: Advice | None = None) -> tuple[tuple[str, str], ...]:
    """Pairs of a word and its answer, the most important ones first."""
    shape, derived, gpu = plan.shape, plan.derived, plan.derived.device == "gpu"
    active = f", {count(shape.active_parameters)} active" if shape.experts else ""
    return (
        ("fits", _fits(plan)),
        *((("change", _change(advice)),) if advice and not advice.fits else ()),
        ("step", _step(plan)),
        ("cost", _cost(plan)),
        ("model", f"{shape.name}: {count(shape.parameters)} parameters{active}; computes in {derived.dtype}"),
        ("machine", plan.hardware.name + (f", {used_gpus(derived)} of {plan.hardware.gpus} GPUs" if gpu else "")),
        ("algorithm", f"{derived.algorithm.name}, {plan.workload.samples:,} samples a step" + (", offline" if derived.offline else "")),
        ("processes", _processes(plan)),
        *(("note", note) for note in (advice.notes if advice else ())),
    )


def _fits(plan: Plan) -> str:
    memory, engine = plan.memory, plan.engine
    answer = "yes" if plan.fits else "NO"
    if memory.fits and engine is not None and not engine.concurrency_longest:
        longest = plan.derived.max_model_len
        return f"{answer}: an engine's KV cache of {engine.kv_tokens:,} tokens does not hold the longest sequence, {longest:,} tokens"
    if memory.shared:
        return f"{answer}: all processes take {gib(memory.total_peak_bytes)} of the machine's {gib(memory.shared_bytes)} GiB"
    tightest = min(memory.processes, key=lambda one: one.margin_bytes)
    phase, size = tightest.peak
    return f"{answer}: fullest is {tightest.name} ({phase}) with {gib(size)} of {gib(tightest.capacity_bytes)} GiB a GPU"


def _change(advice: Advice) -> str:
    if not advice.changes:
        return "none of those that were tried makes it fit"
    return f"smallest one that makes it fit: {' '.join(advice.changes)} ({advice.cost})"


def _step(plan: Plan) -> str:
    step = plan.step
    if plan.derived.offline:
        return f"{digits(step.seconds)} s"
    share = f"{percent(step.generation_share)} of it generation"
    return f"{digits(step.seconds)} s, {share}; {step.tokens_per_second:,.0f} sampled tokens/s"


def _cost(plan: Plan) -> str:
    cost = plan.cost
    unit = "GPU-hours" if plan.derived.device == "gpu" else "machine-hours"
    money = "no price given" if cost.money is None else f"{cost.money:,.2f} in the currency of the price"
    return f"{planned_steps(plan):,} steps in {digits(cost.hours)} h = {digits(cost.gpu_hours)} {unit}; {money}"


def _processes(plan: Plan) -> str:
    names = ", ".join(f"{one.count} x {one.name}" for one in plan.memory.processes)
    if plan.engine is None:
        return names
    how = "beside" if plan.step.overlap else "in turn with"
    return f"{names}; engine.count={plan.derived.engines} engine.tensor_parallel={engine_gpus(plan)}; generation {how} training"
