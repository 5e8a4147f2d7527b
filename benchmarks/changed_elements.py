"""Which share of the weights' elements changes in a step of reinforcement learning, by learning rate and dtype.

Runs the embedded default with ``weights.transport=delta`` and reads ``sync/changed_fraction``, the share of elements whose bits changed in
the dtype that engines hold. Every one of these syncs is proven by fingerprints. Prints a table, and as the last line one JSON object;
``--svg FILE`` draws the shares by step.

    python -m benchmarks.changed_elements --rates 1e-3,1e-4,1e-5,1e-6 --steps 20 --svg docs/changed-elements.svg
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlpost.observe import read_metrics

WIDTH, HEIGHT, MARGIN = 720, 360, 60
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8a5a9e", "#b58900", "#555555")
LOWEST = 1e-5
"""The plot's lower end; a step in which nothing changed lies there."""

Series = dict[str, list[float]]


def changed_by_step(dtype: str, rate: str, steps: int) -> tuple[list[float], bool]:
    """Shares of steps 2 to the last, and whether every sync was proven and none needed a fallback."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        settings = {
            "schedule.steps": steps, "run_dir": run_dir, "model.dtype": dtype, "training.optimizer.lr": rate,
            "training.optimizer.decay": "constant", "weights.transport": "delta", "weights.max_changed": 1.0,
            "weights.keyframe_every": 10**6, "evaluation.every": 0, "data.evaluation": "null", "checkpoint.at_end": "false",
            "checkpoint.every": 0, "observe.rollouts": "none",
        }  # fmt: skip
        command = [sys.executable, "-m", "rlpost.train", "config=grpo_tiny", *(f"{key}={value}" for key, value in settings.items())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        records = [record for record in read_metrics(run_dir) if record["step"] >= 1]
    proven = all(record["sync/verified"] == 1 and record["sync/fallbacks"] == 0 for record in records)
    return [record["sync/changed_fraction"] for record in records], proven


def draw(series: Series) -> str:
    """The shares by step as an SVG, on a logarithmic axis."""
    longest = max(len(values) for values in series.values())

    def x(step: float) -> float:
        return MARGIN + step / max(1, longest - 1) * (WIDTH - 2.5 * MARGIN)

    def y(share: float) -> float:
        decades = -math.log10(LOWEST)
        return HEIGHT - MARGIN - (math.log10(max(share, LOWEST)) + decades) / decades * (HEIGHT - 1.5 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="18" font-size="14">Share of elements whose bits changed, by step (learning rate, dtype)</text>',
    ]
    for decade in range(int(math.log10(LOWEST)), 1):
        height = y(10.0**decade)
        parts.append(f'<line x1="{MARGIN}" x2="{x(longest - 1):.0f}" y1="{height:.1f}" y2="{height:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{height + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for number, (name, values) in enumerate(series.items()):
        colour = COLOURS[number // 2 % len(COLOURS)]
        dashes = ' stroke-dasharray="5 3"' if "float32" in name else ""
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>')
        parts.append(f'<text x="{x(longest - 1) + 6:.0f}" y="{y(values[-1]) + 4:.1f}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 20}" text-anchor="middle">step</text></svg>')
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 when a sync was not proven."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="1e-3,1e-4,1e-5,1e-6", help="learning rates, with commas (default: %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="dtypes of the engines (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run (default: %(default)s)")
    parser.add_argument("--svg", type=Path, help="where to draw the shares")
    options = parser.parse_args(arguments)
    series: Series = {}
    proven = True
    print(f"{'learning rate':>14}{'dtype':>10}{'first':>10}{'median':>10}{'last':>10}  all proven")
    for rate in options.rates.split(","):
        for dtype in options.dtypes.split(","):
            values, right = changed_by_step(dtype, rate, options.steps)
            proven &= right
            series[f"{rate} {dtype}"] = values
            middle = sorted(values)[len(values) // 2]
            print(f"{rate:>14}{dtype:>10}{values[0]:>10.5f}{middle:>10.5f}{values[-1]:>10.5f}  {'yes' if right else 'NO'}", flush=True)
    if options.svg:
        options.svg.write_text(draw(series))
    print(json.dumps({"benchmark": "changed_elements", "steps": options.steps, "all_proven": proven, "changed": series}))
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
