"""What a sync benchmark found: medians, as one JSON object for the planner and as a table for people. Pure."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rlpost.weights.buckets import DTYPE_BYTES

if TYPE_CHECKING:
    from rlpost.weights.bench_sync import Measured, Series, Turn

STAGES = ("stage_s", "gather_s", "encode_s", "transfer_s", "apply_s")


def machine() -> dict[str, Any]:
    """What the figures depend on, without the machine's name."""
    model, memory = platform.processor() or platform.machine(), None
    for file, field in ((Path("/proc/cpuinfo"), "model name"), (Path("/proc/meminfo"), "MemTotal")):
        lines = file.read_text().splitlines() if file.exists() else []
        value = next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), None)
        if value is not None and field == "model name":
            model = value
        elif value is not None:
            memory = round(int(value.split()[0]) / 2**20, 1)
    return {"processor": model, "cpus": os.cpu_count(), "memory_gib": memory, "system": platform.system()}


def result(measured: Measured, parameters: int) -> dict[str, Any]:
    """The JSON object. Seconds, bytes and GiB; a value that could not be measured is null."""
    settings = measured.settings
    found: dict[str, Any] = {
        "benchmark": "sync",
        "machine": machine(),
        "device": settings.device,
        "model": settings.model,
        "parameters": parameters,
        "trained_parameters": measured.trained,
        "dtype": settings.dtype,
        "full_bytes": parameters * DTYPE_BYTES[settings.dtype],
        "engines": settings.engines,
        "ranks": settings.ranks,
        "changed": settings.changed,
        "repeats": len(measured.series[0].turns),
        "bucket_mib": settings.bucket_mib,
        "transports": {series.transport: transport_result(series) for series in measured.series},
        "left_out": dict(measured.left_out),
    }
    if settings.checkpoints:
        found["transitions"] = transitions(measured.series)
    return _finite(found)


def transport_result(series: Series) -> dict[str, Any]:
    """One transport: the median of every figure over its turns; the first sync apart."""
    turns = series.turns

    def middle(value: Callable[[Turn], float]) -> float:
        return median(value(turn) for turn in turns)

    found: dict[str, Any] = {"carrier": series.carrier, "mode": turns[-1].report.mode, "verified": turns[-1].report.verified}
    found["bytes"] = round(middle(lambda turn: turn.report.bytes))
    for name in ("seconds", "paused_s", *STAGES, "changed_fraction"):
        found[name] = middle(lambda turn, name=name: getattr(turn.report, name))  # type: ignore[misc]
    found["gbytes_per_s"] = middle(lambda turn: turn.report.bytes / turn.report.seconds / 1e9)
    found["copy_s"] = middle(lambda turn: turn.copy_s)
    found["ratio_to_copy"] = middle(lambda turn: turn.report.seconds / turn.copy_s)
    bare = [turn.bare_s for turn in turns if turn.bare_s is not None]
    if bare:
        found["bare_broadcast_s"] = median(bare)
        # Throughput over throughput: 1 is as fast as the broadcast alone.
        found["ratio_to_bare_broadcast"] = median(turn.bare_s / turn.report.seconds for turn in turns if turn.bare_s is not None)
    found["extra_peak_gib"] = _sum(series.kept_trainer_gib, series.peak_trainer_gib)
    found["engine_extra_peak_gib"] = _sum(series.kept_engine_gib, series.peak_engine_gib)
    found["kept_gib"], found["engine_kept_gib"] = series.kept_trainer_gib, series.kept_engine_gib
    found["connect_s"] = series.connect_s
    found["first_sync_s"] = series.first.seconds
    found["fallbacks"] = sum(sum(turn.report.fallbacks.values()) for turn in turns)
    return found


def transitions(series: Sequence[Series]) -> list[dict[str, Any]]:
    """One entry for each pair of consecutive checkpoints."""
    found = []
    for number, turn in enumerate(series[0].turns):
        reports = {one.transport: one.turns[number].report for one in series}
        entry: dict[str, Any] = {"step": turn.step}
        for name, report in reports.items():
            entry[name] = {
                "mode": report.mode,
                "changed_fraction": report.changed_fraction,
                "bytes": report.bytes,
                "seconds": report.seconds,
                "paused_s": report.paused_s,
            }
        found.append(entry)
    return found


def _sum(*values: float | None) -> float | None:
    known = [max(value, 0.0) for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _finite(value: Any) -> Any:
    """Without NaN, which is no JSON, and with as many digits as mean something."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


# ---- tables ----------------------------------------------------------------------------------------------------------

Cell = Callable[[dict[str, Any]], str]


def _number(name: str, digits: int, scale: float = 1.0) -> Cell:
    def cell(row: dict[str, Any]) -> str:
        value = row.get(name)
        return "-" if value is None else f"{value * scale:.{digits}f}"

    return cell


COLUMNS: list[tuple[str, Cell]] = [
    ("transport", lambda row: f"{row['transport']} ({row['carrier']})" if row["transport"] != row["carrier"] else row["transport"]),
    ("mode", lambda row: row["mode"]),
    ("seconds", _number("seconds", 3)),
    ("paused", _number("paused_s", 3)),
    ("stage", _number("stage_s", 3)),
    ("gather", _number("gather_s", 3)),
    ("encode", _number("encode_s", 3)),
    ("transfer", _number("transfer_s", 3)),
    ("apply", _number("apply_s", 3)),
    ("MB", _number("bytes", 2, 1e-6)),
    ("GB/s", _number("gbytes_per_s", 3)),
    ("x copy", _number("ratio_to_copy", 1)),
    ("of bare", _number("ratio_to_bare_broadcast", 2)),
    ("first", _number("first_sync_s", 2)),
    ("trainer+", _number("extra_peak_gib", 2)),
    ("engine+", _number("engine_extra_peak_gib", 2)),
]

LEGEND = """seconds of a sync, of its longest pause, and of its parts, which overlap; MB and GB/s: what moved, and that over the seconds;
x copy: the seconds over those of a plain memory copy of the same weights; of bare: throughput over that of a bare broadcast of the
same bytes; first: the first sync, full; trainer+, engine+: GiB above what rank 0 (an engine) held before this transport"""


def format_result(found: dict[str, Any]) -> str:
    """The tables."""
    changed = "checkpoints of a run" if found["changed"] is None else f"{found['changed']:.4%} of the elements changed"
    lines = [
        f"{found['model']}: {found['parameters']:,} parameters in {found['dtype']}, {found['ranks']} trainer rank(s), {found['engines']} "
        f"engine(s), {changed}; medians of {found['repeats']}",
        *_table([{"transport": name, **row} for name, row in found["transports"].items()], COLUMNS),
        LEGEND,
    ]
    for name, row in found["transports"].items():
        if row["mode"] == "delta":
            share = row["bytes"] / found["full_bytes"]
            lines.append(f"{name}: {row['changed_fraction']:.4%} of the elements had other bits, {share:.3%} of the bytes of a full sync")
    lines += [f"left out: {name}: {why}" for name, why in found["left_out"].items()]
    if "transitions" in found:
        lines += ["", *_transition_table(found)]
    return "\n".join(lines)


def _transition_table(found: dict[str, Any]) -> list[str]:
    names = list(found["transports"])
    rows = []
    for entry in found["transitions"]:
        fraction = entry.get("delta", {}).get("changed_fraction")
        row: dict[str, Any] = {"step": entry["step"], "changed": "-" if fraction is None else f"{fraction:.4%}"}
        for name in names:
            row[name] = f"{entry[name]['bytes'] / 1e6:.3f} MB, {entry[name]['seconds']:.3f} s"
        rows.append(row)
    columns: list[tuple[str, Cell]] = [(name, lambda row, name=name: str(row[name])) for name in ("step", "changed", *names)]  # type: ignore[misc]
    return _table(rows, columns)


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, Cell]]) -> list[str]:
    """Left-aligned first column, right-aligned others."""
    cells = [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(columns))]
    return [
        "  ".join(
            text.ljust(width) if not column else text.rjust(width) for column, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
