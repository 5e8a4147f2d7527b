"""Does a plan say what a weight sync takes over a slow network? Two network namespaces are hosts of a trainer rank and of an engine.

    python -m benchmarks.slow_link [--model 25m] [--repeats 2] [--keep DIR]        # as root

``rlpost.bench sync`` measures at each bandwidth. The syncs without a limit calibrate; every other bandwidth is predicted from these and
from ``net=``, as a user would plan for another network. The last printed line is one JSON object: predicted and measured seconds, and the
worst error of the full syncs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlpost.planner.calibrate import fit, read_json, read_sync_bench
from rlpost.planner.coefficients import Calibration, work_seconds
from rlpost.planner.hardware import find_hardware
from rlpost.planner.measured import MeasuredRun

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cluster"))

from network_hosts import RayHosts, missing, ray_hosts

AIM = 0.25
MEGABIT = (50, 100, 200, 400, 1000)
UNLIMITED = 0
TRANSPORTS = ("collective", "delta")
"""Memory and files are common to hosts of one machine, so ipc and disk send nothing over the link."""
MEASURE_TIMEOUT_S = 900.0
BYTES_PER_MEGABIT = 1e6 / 8

HOLD_A_HALF = """
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

class Holder:
    def ready(self):
        pass

ray.init()
for node in ray.nodes():
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    holder = ray.remote(Holder).options(num_cpus=0.5, lifetime="detached", name=node["NodeID"], scheduling_strategy=where).remote()
    ray.get(holder.ready.remote(), timeout=60)
"""
"""Leaves half a CPU on each node of one: rank and engine, which ask for half a CPU each, go to different hosts."""


def bench(ray: RayHosts, megabit: int, model: str, repeats: int, path: Path) -> None:
    """Measure at one bandwidth. Raises RuntimeError when the weights did not cross the link."""
    if megabit:
        ray.hosts.limit(megabit)
    else:
        ray.hosts.unlimit()
    before = [ray.hosts.sent_bytes(host) for host in (0, 1)]
    command = [sys.executable, "-m", "rlpost.bench", "sync", "--model", model, "--transport", ",".join(TRANSPORTS)]
    command += ["--repeats", str(repeats), "--json", str(path)]
    environment = {**ray.environment, "RAY_ADDRESS": ray.address}
    ray.hosts.run(0, *command, env=environment, timeout_s=MEASURE_TIMEOUT_S)
    crossed = max(ray.hosts.sent_bytes(host) - sent for host, sent in zip((0, 1), before, strict=True))
    expected = repeats * int(read_json(path)["full_bytes"])
    if crossed < expected:
        path.unlink()
        raise RuntimeError(f"{crossed:,} bytes went over the link, expected {expected:,} at least: rank and engine are on one host")


def measure(model: str, repeats: int, directory: Path) -> dict[int, dict[str, Any]]:
    """The documents of ``rlpost.bench sync`` by Mbit/s; those that lie in ``directory`` are not measured again."""
    paths = {megabit: directory / f"sync-{model}-{megabit or 'unlimited'}.json" for megabit in (UNLIMITED, *MEGABIT)}
    absent = [megabit for megabit, path in paths.items() if not path.exists()]
    if absent:
        with tempfile.TemporaryDirectory(prefix="hosts-") as sessions, ray_hosts(Path(sessions), [1, 1]) as ray:
            ray.hosts.run(0, sys.executable, "-c", HOLD_A_HALF, env={**ray.environment, "RAY_ADDRESS": ray.address})
            for megabit in absent:
                print(f"measuring at {megabit or 'unlimited'} Mbit/s ...", file=sys.stderr, flush=True)
                bench(ray, megabit, model, repeats, paths[megabit])
    return {megabit: read_json(path) for megabit, path in paths.items()}


def as_runs(document: dict[str, Any], megabit: int) -> list[MeasuredRun]:
    """What was measured, beside the work that the planner sees in it on a network of this bandwidth."""
    net = megabit * BYTES_PER_MEGABIT / 1e9 if megabit else None
    return read_sync_bench(Path(f"{megabit or 'unlimited'}"), document, find_hardware(hardware="cpu", net=net))


def main() -> int:
    """Measure, calibrate, predict, print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_link", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="25m", help="see python -m rlpost.bench sync (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="syncs of each transport at each bandwidth (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the measurements there, and use those that are there already")
    options = parser.parse_args()
    if reason := missing():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        directory = (options.keep or Path(temporary)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        found = measure(options.model, options.repeats, directory)
    calibration = fit(as_runs(found[UNLIMITED], UNLIMITED), Calibration(device="cpu"))
    print(f"{found[UNLIMITED]['parameters']:,} parameters in {found[UNLIMITED]['dtype']}")
    print(f"{'Mbit/s':>9}  {'transport':<12}{'MB':>8}{'predicted s':>13}{'measured s':>12}{'ratio':>7}")
    rows = []
    for megabit, document in found.items():
        for name, run in zip(document["transports"], as_runs(document, megabit), strict=True):
            predicted, measured = work_seconds(run.works["sync"], calibration), run.phases["sync"]
            size = int(document["transports"][name]["bytes"])
            row = {"megabit": megabit or None, "transport": name, "bytes": size, "predicted_s": predicted, "measured_s": measured}
            rows.append(row | {"ratio": predicted / measured})
            figures = f"{size / 1e6:>8.2f}{predicted:>13.3f}{measured:>12.3f}{predicted / measured:>7.2f}"
            print(f"{megabit or 'unlimited':>9}  {name:<12}{figures}" + ("  calibrates" if megabit == UNLIMITED else ""))
    worst = max(abs(row["ratio"] - 1) for row in rows if row["transport"] == "collective" and row["megabit"])
    print(json.dumps({"benchmark": "slow_link", "model": options.model, "rows": rows, "worst": worst, "within_aim": worst <= AIM}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
