"""Findings: what a check found, what was expected, what to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Status = Literal["ok", "warning", "failed", "unknown"]

ORDER: tuple[Status, ...] = ("ok", "unknown", "warning", "failed")
"""Of the table: what matters most stands last, where a terminal shows it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found. ``where`` is a node of a cluster; empty is this machine."""

    area: str
    """What the check is about: versions, gpu, memory, disk ..."""
    name: str
    status: Status
    found: str
    """In words, with units."""
    expected: str
    fix: str = ""
    """What to change, when it is not ok."""
    where: str = ""
    values: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Figures for programs; the name ends in the unit (``write_bytes_s``, ``skew_s``)."""


def format_findings(findings: Sequence[Finding]) -> str:
    """A plain-text table in ASCII, failed ones last; what is not ok has its expectation and its fix below.

    What is the same on several nodes is one row, with the first node's name.
    """
    alike: dict[Finding, list[str]] = {}
    for finding in sorted(findings, key=lambda one: ORDER.index(one.status)):
        alike.setdefault(replace(finding, where="", values={}), []).append(finding.where)
    with_nodes = any(finding.where for finding in findings)
    cells = [
        [one.status, *([nodes[0] + (f" and {len(nodes) - 1} more" if nodes[1:] else "")] if with_nodes else []), one.area, one.name]
        for one, nodes in alike.items()
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    lines = []
    for (one, nodes), row in zip(alike.items(), cells, strict=True):
        first, *more = one.found.splitlines() or [""]
        lines.append("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=True)), first]).rstrip())
        lines += [f"{'':10}{text}" for text in more]
        if one.status != "ok":
            notes = (("nodes", ", ".join(nodes) if nodes[1:] else ""), ("expected", one.expected), ("fix", one.fix))
            lines += [f"{'':10}{label}: {text}" for label, text in notes if text]
    counts = [f"{sum(one.status == status for one in findings)} {status}" for status in ORDER]
    lines += ["", f"{len(findings)} checks: {', '.join(counts)}"]
    return "\n".join(lines).encode("ascii", "backslashreplace").decode()


def to_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The findings as JSON types, with the numbers of failures and warnings. A figure that is no finite number becomes null."""
    entries = []
    for one in findings:
        values = {name: value if math.isfinite(value) else None for name, value in one.values.items()}
        entries.append({**asdict(one), "values": values})
    counts = {name: sum(entry["status"] == status for entry in entries) for name, status in (("failed", "failed"), ("warnings", "warning"))}
    return {"findings": entries, **counts}


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when something failed, else 0."""
    return int(any(one.status == "failed" for one in findings))
