"""Does a calibrated plan say what a run takes? Runs some settings, fits the plan's coefficients to them, and predicts other ones.

    python -m benchmarks.plan_time [--keep DIR] [--steps 4]

Each setting is a whole run of the train command: real Ray, vLLM and trainer ranks, on models of 3 to 110 M parameters with random
weights. Predicted and measured seconds of each phase of the held-out settings are compared; their lengths and micro-batches are those
that the run recorded. So are peaks of memory. The last printed line is one JSON object: the errors, the worst of them by phase, and
whether all are within the aims: 0.20 of a phase of at least 5 % of its step, and of the step; 0.25 of a sync; 0.10 of a peak. A run
writes one checkpoint, to a disk that others use, so its error is shown and has no aim.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlpost.models.embedded import build
from rlpost.models.shapes import Shape, write_model
from rlpost.observe import read_metrics
from rlpost.planner.calibrate import fit
from rlpost.planner.coefficients import Calibration
from rlpost.planner.hardware import find_hardware
from rlpost.planner.measured import MeasuredRun, compare_run, format_comparisons, read_run

AIM, SYNC_AIM, MEMORY_AIM = 0.20, 0.25, 0.10
LEAST_SHARE = 0.05
"""Of its step: smaller phases are within the aim of the step alone."""
VOCABULARY = 128
"""Covers the embedded tokenizer's characters; outside the layers nothing depends on its size but the output layer."""

SIZES = {
    "3m": (256, 4, 4, 2, 64, 768), "8m": (320, 6, 5, 1, 64, 1152), "14m": (384, 8, 6, 2, 64, 1280), "25m": (512, 8, 8, 4, 64, 1536),
    "48m": (640, 10, 10, 2, 64, 2048), "80m": (768, 12, 12, 4, 64, 2176), "110m": (896, 12, 14, 2, 64, 2560),
}  # fmt: skip
"""Hidden size, layers, heads, key-value heads, size of a head, feed-forward size."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run."""

    name: str
    model: str
    prompts: int
    group: int
    prompt: int
    new: int
    others: tuple[str, ...] = field(default=())


REFERENCE = ("algorithm.kl_coefficient=0.01",)
TWICE = ("algorithm.minibatches=2",)
SMALL_ROWS = ("training.micro_batch_tokens=512",)
CALIBRATION = (
    Setting(name="a", model="3m", prompts=16, group=8, prompt=40, new=64),
    Setting(name="b", model="25m", prompts=8, group=4, prompt=100, new=48, others=(*REFERENCE, *SMALL_ROWS)),
    Setting(name="c", model="14m", prompts=4, group=4, prompt=60, new=160, others=(*REFERENCE, *TWICE)),
    Setting(name="d", model="80m", prompts=4, group=4, prompt=30, new=32),
    Setting(name="e", model="8m", prompts=32, group=4, prompt=20, new=24, others=(*TWICE, *SMALL_ROWS)),
)
HELD_OUT = (
    Setting(name="f", model="8m", prompts=8, group=8, prompt=80, new=96, others=REFERENCE),
    Setting(name="g", model="48m", prompts=4, group=8, prompt=50, new=40, others=(*TWICE, *SMALL_ROWS)),
    Setting(name="h", model="14m", prompts=16, group=4, prompt=30, new=48, others=("training.gradient_checkpointing=true",)),
    Setting(name="i", model="110m", prompts=4, group=2, prompt=90, new=24, others=REFERENCE),
    Setting(name="j", model="25m", prompts=16, group=2, prompt=60, new=64, others=SMALL_ROWS),
    Setting(name="k", model="3m", prompts=8, group=16, prompt=100, new=100, others=TWICE),
)


def make_model(size: str, directory: Path) -> Path:
    """Random weights of that size, with the embedded models' tokenizer."""
    path = directory / f"model-{size}"
    if not path.exists():
        path.mkdir(parents=True)
        hidden, layers, heads, kv_heads, head_dim, feed_forward = SIZES[size]
        write_model(
            Shape(
                hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, feed_forward=feed_forward,
                vocabulary=VOCABULARY,
            ),
            path,
        )  # fmt: skip
        for file in build("tiny-random").glob("*token*"):
            shutil.copy(file, path)
    return path


def make_prompts(length: int, directory: Path) -> Path:
    """Rows of as many random digits; an answer that nothing equals."""
    path = directory / f"prompts-{length}.jsonl"
    digits = random.Random(length)
    rows = [{"prompt": "".join(digits.choices("0123456789", k=length - 1)) + "=", "answer": "none"} for _ in range(512)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_setting(setting: Setting, directory: Path, steps: int) -> Path:
    """The run's directory."""
    run_dir = directory / f"run-{setting.name}"
    settings = {
        "model.path": make_model(setting.model, directory), "data.train": make_prompts(setting.prompt, directory),
        "data.evaluation": "null", "data.max_prompt_tokens": setting.prompt + 8, "evaluation.every": 0, "checkpoint.every": 0,
        "training.ranks": 1, "algorithm.group_size": setting.group, "sampling.max_new_tokens": setting.new,
        "schedule.prompts_per_step": setting.prompts, "schedule.steps": steps, "training.optimizer.lr": 1e-9,
        "engine.kv_cache_mib": 256, "observe.trackers": "[jsonl]", "run_dir": run_dir,
    }  # fmt: skip
    command = [sys.executable, "-m", "rlpost.train", "config=grpo_tiny", *(f"{k}={v}" for k, v in settings.items()), *setting.others]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"setting {setting.name} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return run_dir


def read(run_dir: Path) -> MeasuredRun:
    """What a run measured."""
    return read_run(run_dir, find_hardware(hardware="cpu"), read_metrics(run_dir))


def compare(runs: Sequence[MeasuredRun], calibration: Calibration) -> dict[str, dict[str, float]]:
    """Errors by setting and phase; prints the tables."""
    errors: dict[str, dict[str, float]] = {}
    for run in runs:
        rows = compare_run(run, calibration)
        step = sum(run.phases.values())
        print(f"{Path(run.source).name}\n{format_comparisons(rows, 'calibrated')}\n", flush=True)
        errors[Path(run.source).name] = {
            row.name: round(row.error, 4) for row in rows if row.unit == "B" or row.measured >= LEAST_SHARE * step or row.name == "sync"
        }
    return errors


def aim_of(name: str) -> float:
    """Largest relative error that is aimed at."""
    return {"sync": SYNC_AIM, "checkpoint": float("inf")}.get(name, MEMORY_AIM if name.startswith("memory") else AIM)


def main() -> int:
    """Run, fit, predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs there, and use those that are there already")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run; the first warms up (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.keep or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        runs: dict[str, MeasuredRun] = {}
        # Alternately, so that a machine that gets slower or faster does so for both.
        order = [one for pair in zip(CALIBRATION, HELD_OUT, strict=False) for one in pair] + list(HELD_OUT[len(CALIBRATION) :])
        for setting in order:
            run_dir = directory / f"run-{setting.name}"
            if not (run_dir / "finished").exists():
                shutil.rmtree(run_dir, ignore_errors=True)
                run_setting(setting, directory, options.steps)
                (run_dir / "finished").touch()
            runs[setting.name] = read(run_dir)
            print(
                f"{setting.name}: { ({name: round(s, 3) for name, s in runs[setting.name].phases.items()}) }", file=sys.stderr, flush=True
            )
        calibration = fit([runs[one.name] for one in CALIBRATION], Calibration(device="cpu"))
        for name, one in calibration.measured.items():
            print(f"{name:<22}{one.value:.4g}  (assumed {Calibration(device='cpu').value(name):.4g})")
        fitted = compare([runs[one.name] for one in CALIBRATION], calibration)
        errors = compare([runs[one.name] for one in HELD_OUT], calibration)
    names = sorted({name for one in errors.values() for name in one})
    worst = {name: max(abs(one[name]) for one in errors.values() if name in one) for name in names}
    within = all(value <= aim_of(name) for name, value in worst.items())
    print(json.dumps({"benchmark": "plan_time", "errors": errors, "fitted": fitted, "worst": worst, "all_within": within}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
