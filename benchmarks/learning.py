"""Does every algorithm learn? Each preset on the embedded model, several seeds.

    python -m benchmarks.learning [--algorithms grpo,dpo,...] [--seeds 3] [--steps 30] [--runs DIRECTORY]

Online presets are cut to ``--steps`` steps; what counts is the sampled reward, mean of the first and the last 5 steps, and the greedy
reward on held-out prompts before and after. Offline presets run as they are; what counts is the loss and the share of held-out pairs
(kto: answers) that are ranked rightly. Runs that DIRECTORY holds already are not made again. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpost.config.algorithms import OFFLINE, ONLINE_DEFAULTS
from rlpost.observe import read_metrics

NEEDS_A_TEACHER = "distillation"
ENDS = 5
"""First and last steps whose mean reward is compared."""
HELD_OUT = 256


def arguments(algorithm: str, seed: int, steps: int, teacher: str | None) -> list[str]:
    """Of ``rlpost.train``, but for the run directory."""
    words = [f"config={algorithm}_tiny", f"seed={seed}", "checkpoint.every=0", "checkpoint.at_end=false"]
    if algorithm in OFFLINE:
        return words
    words += [f"schedule.steps={steps}", f"evaluation.every={steps}", f"evaluation.prompts={HELD_OUT}"]
    return words + ([f"algorithm.reference_path={teacher}", "training.ranks=1"] if algorithm == NEEDS_A_TEACHER else [])


def figures(run: Path) -> dict[str, Any]:
    """What a finished run says of learning."""
    records = read_metrics(run)
    rewards = [record["reward/mean"] for record in records if record.get("reward/mean") is not None]
    found: dict[str, Any] = {}
    if rewards:
        found["reward"] = [fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])]
    for name in ("evaluate/reward", "evaluate/loss", "evaluate/accuracy", "evaluate/margin"):
        values = [record[name] for record in records if record.get(name) is not None]
        if values:
            found[name] = [values[0], values[-1]]
    return found


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Markdown: the means over the seeds, and of what rose the worst seed's end."""
    lines = ["| algorithm | seeds | what | before | after | worst seed after |", "|---|---|---|---|---|---|"]
    for algorithm, runs in results.items():
        for name in runs[0]:
            before, after = (fmean(run[name][place] for run in runs) for place in (0, 1))
            ends = [run[name][1] for run in runs]
            worst = max(ends) if name == "evaluate/loss" else min(ends)
            lines.append(f"| {algorithm} | {len(runs)} | {name} | {before:.3f} | {after:.3f} | {worst:.3f} |")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithms", help="comma-separated (default: all but distillation, which needs --teacher)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 to N - 1 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="steps of online runs (default: %(default)s)")
    parser.add_argument("--teacher", help="model directory of distillation's teacher, an exported run of sft_tiny, say")
    parser.add_argument("--runs", type=Path, help="where run directories are made (default: a temporary directory)")
    options = parser.parse_args(words)
    root = options.runs or Path(tempfile.mkdtemp(prefix="rlpost-learning-"))
    root.mkdir(parents=True, exist_ok=True)
    names = [*ONLINE_DEFAULTS, *OFFLINE]
    chosen = options.algorithms.split(",") if options.algorithms else [n for n in names if n != NEEDS_A_TEACHER or options.teacher]
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"unknown algorithms {', '.join(unknown)}; there are {', '.join(names)}")
    results: dict[str, list[dict[str, Any]]] = {}
    for algorithm in chosen:
        for seed in range(options.seeds):
            run = root / f"{algorithm}_{seed}"
            if not run.exists():
                command = [*arguments(algorithm, seed, options.steps, options.teacher), f"run_dir={run}"]
                done = subprocess.run([sys.executable, "-m", "rlpost.train", *command], capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}", file=sys.stderr)
                    return 1
            results.setdefault(algorithm, []).append(figures(run))
            print(f"{run.name}: {results[algorithm][-1]}", flush=True)
    print("\n".join(table(results)))
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
