"""A plan as one HTML file: its first lines, drawings, and all tables. No script, no network, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from rlpost.planner.figures import COLOURS, figures
from rlpost.planner.plan import Plan
from rlpost.planner.render import summary
from rlpost.planner.sections import sections
from rlpost.planner.svg import element
from rlpost.planner.tables import Section, Table

if TYPE_CHECKING:
    from rlpost.planner.advice import Advice

STYLE = """
:root { color-scheme: light dark; --ink: #1a1c20; --paper: #ffffff; --faint: #d5d8de; --warm: #b5391f; --cold: #1f4e9c; --grey: #6d7480; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --paper: #15171b; --faint: #3a3e46; --warm: #f2a93b; --cold: #7fb0ff; --grey: #9aa1ad; }
}
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 64rem; margin: 1.5rem auto; }
body { padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: 0.6rem 0; }
th, td { padding: 0.15rem 0.7rem 0.15rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { border-bottom: 1px solid var(--ink); } td:first-child { white-space: pre-wrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; } .warning { border-left: 4px solid var(--warm); padding-left: 0.6rem; } summary { cursor: pointer; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); stroke: var(--paper); stroke-width: 3; paint-order: stroke; }
svg rect { stroke: var(--ink); stroke-width: 0.5; } svg .axis { stroke: var(--ink); } svg .grid { stroke: var(--faint); }
svg .limit { stroke: var(--ink); stroke-width: 2; stroke-dasharray: 2 3; } svg .mark { fill: none; stroke: var(--ink); stroke-width: 2; }
svg .curve0 { fill: none; stroke: var(--ink); stroke-width: 5; }
svg .curve1 { fill: none; stroke: var(--warm); stroke-width: 2; stroke-dasharray: 8 3; }
svg .curve2 { fill: none; stroke: var(--cold); stroke-width: 2; stroke-dasharray: 3 3; }
svg .curve3 { fill: none; stroke: var(--grey); stroke-width: 2; }
svg .curve4 { fill: none; stroke: var(--grey); stroke-width: 2; stroke-dasharray: 1 4; }
"""


def plan_to_html(plan: Plan, *, advice: Advice | None = None) -> str:
    """The whole page."""
    fills = "\n".join(f"svg .fill{number} {{ fill: {colour}; }}" for number, colour in enumerate(COLOURS))
    title = escape(f"Plan of {plan.name}")
    head = '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
    body = [
        element("h1", title),
        _table(Table(columns=("", ""), rows=summary(plan, advice))),
        *(element("p", escape(f"warning: {warning}"), class_="warning") for warning in plan.warnings),
        *figures(plan),
        *(_section(section) for section in sections(plan)),
    ]
    style = element("style", STYLE + fills)
    page = element("head", head + element("title", title) + style) + element("body", element("main", "\n".join(body)))
    return "<!DOCTYPE html>\n" + element("html", page, lang="en")


def _section(section: Section) -> str:
    parts = [element("h2", escape(section.title[0].upper() + section.title[1:]))]
    parts += [element("p", escape(sentence)) for sentence in section.sentences]
    for table in section.tables:
        shown = _table(table)
        parts.append(element("details", element("summary", escape(table.caption or "more")) + shown) if table.detail else shown)
    return element("section", "\n".join(parts))


def _table(table: Table) -> str:
    kinds = ["number" if name.startswith(">") else "words" for name in table.columns]
    rows = [_row("td", row, kinds) for row in table.rows]
    if any(table.columns):
        rows.insert(0, _row("th", [name.removeprefix(">") for name in table.columns], kinds))
    return element("div", element("table", "\n".join(rows)), class_="wide")


def _row(tag: str, cells: Sequence[str], kinds: Sequence[str]) -> str:
    return element("tr", "".join(element(tag, escape(cell) or "&#160;", class_=kind) for cell, kind in zip(cells, kinds, strict=True)))
