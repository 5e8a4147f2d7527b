"""Does a calibrated plan say what a weight sync takes? ``rlpost.bench sync`` on some models calibrates, on others it is predicted.

    python -m benchmarks.plan_sync [--keep DIR] [--repeats 3]

The last printed line is one JSON object: the error of each transport of each held-out model, and whether all are within 0.25.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rlpost.planner.calibrate import fit, read_json, read_sync_bench
from rlpost.planner.coefficients import Calibration, work_seconds
from rlpost.planner.hardware import find_hardware
from rlpost.planner.measured import MeasuredRun

AIM = 0.25
CALIBRATION = (("25m", "bfloat16"), ("300m", "bfloat16"), ("100m", "float32"))
HELD_OUT = (("100m", "bfloat16"), ("25m", "float32"), ("150m", "bfloat16"))
"""Sizes between those that calibrate: a disk takes some 400 MB at the speed of memory, and more than that at its own."""


def measure(model: str, dtype: str, directory: Path, repeats: int) -> list[MeasuredRun]:
    """Every transport with one model. One rank, one engine, 1 % of the elements changed."""
    path = directory / f"sync-{model}-{dtype}.json"
    if not path.exists():
        command = [sys.executable, "-m", "rlpost.bench", "sync", "--model", model, "--dtype", dtype, "--repeats", str(repeats)]
        done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return read_sync_bench(path, read_json(path), find_hardware(hardware="cpu"))


def main() -> int:
    """Measure alternately, fit, predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the measurements there, and use those that are there already")
    parser.add_argument("--repeats", type=int, default=3, help="syncs of each transport (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        found = {case: measure(*case, directory, options.repeats) for pair in zip(CALIBRATION, HELD_OUT, strict=True) for case in pair}
    calibration = fit([run for case in CALIBRATION for run in found[case]], Calibration(device="cpu"))
    for name, one in calibration.measured.items():
        print(f"{name:<22}{one.value:.4g}  (assumed {Calibration(device='cpu').value(name):.4g})")
    errors = {}
    for case in (*CALIBRATION, *HELD_OUT):
        for run in found[case]:
            predicted, measured = work_seconds(run.works["sync"], calibration), run.phases["sync"]
            name = Path(run.source).name.replace(".json", "")
            kind = "held out" if case in HELD_OUT else "fitted"
            print(f"{name:<32}{predicted:>8.3f} s predicted{measured:>8.3f} s measured{predicted / measured - 1:>+8.0%}  {kind}")
            if case in HELD_OUT:
                errors[name] = round(predicted / measured - 1, 4)
    worst = max(abs(error) for error in errors.values())
    print(json.dumps({"benchmark": "plan_sync", "errors": errors, "worst": worst, "all_within": worst <= AIM}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
