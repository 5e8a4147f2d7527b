"""What a step costs: against the limit (bare vLLM + bare PyTorch on the same sequences) and against a peer on the same work.

    python -m benchmarks.step [--cases 25m,25m-tail,0.6m] [--steps 4] [--no-peer] [--overlap]

The work: 8 prompts x 8 samples, natural end, float32, one thread a process, one optimizer step. The limit is measured before and
after our run, and the peer between, because these machines are shared; every figure of a ratio comes from this one run. CPU
seconds of ours are those of *every* process: driver, engine, trainer ranks, reward worker, and Ray itself. The last line printed is
one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Measured, measure_run
from rlpost.models.embedded import build

FIRST = 2
"""Steps that warm up, in ours and in the peer."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a length mix. ``stops`` are token ids that end a sample besides the model's own: they make ends frequent, so
    that the lengths are geometric and the longest of 64 samples is several times the median."""

    model: str
    max_new_tokens: int
    stops: tuple[int, ...] = ()
    steps_factor: int = 1


CASES = {
    "25m": Case(model="random-25m", max_new_tokens=64),
    "25m-tail": Case(model="random-25m", max_new_tokens=256, stops=(20, 40)),
    "0.6m": Case(model="random-0.6m", max_new_tokens=64, steps_factor=6),
}


def bare(what: str, *arguments: str) -> dict[str, Any]:
    """One measurement of the limit in a process of its own."""
    return last_json([sys.executable, "-m", "benchmarks.bare", what, *arguments])


def last_json(command: Sequence[str]) -> dict[str, Any]:
    """Run a command and read the JSON object of its last line."""
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def limit(model: Path, case: Case, run_dir: Path) -> dict[str, float]:
    """Bare generation and bare update of the measured steps of a run, per step."""
    files = sorted(str(file) for file in (run_dir / "rollouts").glob("*.jsonl"))[FIRST - 1 :]
    generated = bare("generate", str(model), str(case.max_new_tokens + 16), "seeded", *files)
    updated = bare("update", str(model), *files)
    return {
        "generate_cpu_s": generated["cpu_s"] / generated["steps"],
        "generate_tokens_per_s": generated["tokens"] / generated["wall_s"],
        "update_cpu_s": updated["cpu_s"] / updated["steps"],
        "update_tokens_per_cpu_s": updated["tokens"] / updated["cpu_s"],
    }


def lengths(run_dir: Path) -> dict[str, float]:
    """Median and longest sample of a run's steps, in tokens."""
    from rlpost.observe import read_rollouts

    median, longest = [], []
    for file in sorted((run_dir / "rollouts").glob("*.jsonl")):
        sampled = sorted(sum(row["trainable"]) for row in read_rollouts(file))
        median.append(sampled[len(sampled) // 2])
        longest.append(sampled[-1])
    return {"median": sum(median) / len(median), "longest": sum(longest) / len(longest)}


def ours(case: Case, run_dir: Path, steps: int, *extra: str) -> Measured:
    """One run of the train command."""
    return measure_run(
        [
            "config=bench_step", f"model.path=embedded:{case.model}", f"sampling.max_new_tokens={case.max_new_tokens}",
            f"sampling.stop_token_ids=[{','.join(map(str, case.stops))}]", f"schedule.steps={FIRST + steps}",
            f"rewards.0.options.limit={case.max_new_tokens}", f"rewards.0.options.span={case.max_new_tokens}", *extra,
        ],
        run_dir,
        FIRST,
    )  # fmt: skip


def measure_case(name: str, steps: int, peer: bool, overlap: bool, keep: Path | None = None) -> dict[str, Any]:
    """All figures of one case; its run directories stay under ``keep``."""
    case = CASES[name]
    steps *= case.steps_factor
    model = build(case.model)
    with tempfile.TemporaryDirectory(prefix="rlpost-bench-") as temporary:
        scratch = Path(temporary) if keep is None else keep.absolute() / name
        run_dir = scratch / "ours"
        run = ours(case, run_dir, steps)
        limits = [limit(model, case, run_dir)]
        trl = None
        if peer:
            command = [
                sys.executable,
                "-m",
                "benchmarks.peer_trl",
                str(model),
                str(case.max_new_tokens),
                str(FIRST + max(2, steps)),
                *map(str, case.stops),
            ]
            trl = last_json(command)
        again = ours(case, scratch / "again", steps)
        limits.append(limit(model, case, scratch / "again"))
        lag = ours(case, scratch / "overlap", steps, "schedule.max_staleness=1") if overlap else None
        mix = lengths(run_dir)
    return summarise(name, [run, again], limits, trl, lag, mix)


def summarise(
    name: str, runs: list[Measured], limits: list[dict[str, float]], trl: dict[str, Any] | None, lag: Measured | None, mix: dict[str, float]
) -> dict[str, Any]:
    """Ratios of means over the runs made alternately."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    limit_cpu = mean([one["generate_cpu_s"] + one["update_cpu_s"] for one in limits])
    cpu = mean([run.cpu_total_s for run in runs])
    trainer = mean([run.cpu_s["trainer"] for run in runs])
    tokens = mean([run.mean("rollout/tokens") + run.mean("rollout/prompt_tokens") for run in runs])
    result: dict[str, Any] = {
        "case": name,
        "lengths": mix,
        "tokens_a_step": tokens,
        "generate_ratio": mean([run.mean("rollout/tokens_per_s") for run in runs]) / mean([one["generate_tokens_per_s"] for one in limits]),
        "update_ratio": tokens / trainer / mean([one["update_tokens_per_cpu_s"] for one in limits]),
        "limit_cpu_s": limit_cpu,
        "cpu_s": cpu,
        "cpu_ratio_to_limit": cpu / limit_cpu,
        "cpu_s_by_role": {role: mean([run.cpu_s.get(role, 0.0) for run in runs]) for role in runs[0].cpu_s},
        "wall_s": mean([run.wall_s for run in runs]),
        "engine_peak_gib": max(run.mean("memory/engine_peak_gib") for run in runs),
        "trainer_peak_gib": max(run.mean("memory/trainer_peak_gib") for run in runs),
        "parity_abs_mean": mean([run.mean("parity/logprob_abs_mean") for run in runs]),
        "peers": {},
    }
    if trl is not None:
        # Per token, because the peer draws its own samples.
        per_token = trl["cpu_s"] / (trl["tokens"] + 11 * 64)
        result["peers"]["trl_hf_generate"] = {
            **trl,
            "ratio_to_limit": per_token * tokens / limit_cpu,
            "times_ours": per_token * tokens / cpu,
        }
    if lag is not None:
        result["overlap"] = {
            "wall_s": lag.wall_s,
            "generate_plus_update_s": mean([run.mean("time/generate_s") + run.mean("time/update_s") for run in runs]),
            "synchronous_wall_s": result["wall_s"],
        }
    return result


def show(result: dict[str, Any]) -> None:
    """One case as lines."""
    lengths = result["lengths"]
    print(
        f"\n{result['case']}: median {lengths['median']:.0f}, longest {lengths['longest']:.0f} tokens; "
        f"{result['tokens_a_step']:.0f} tokens a step"
    )
    print(f"  limit       {result['limit_cpu_s']:7.2f} CPU-s a step")
    roles = ", ".join(f"{role} {seconds:.2f}" for role, seconds in result["cpu_s_by_role"].items())
    print(f"  ours        {result['cpu_s']:7.2f} CPU-s a step, {result['cpu_ratio_to_limit']:.2f} x the limit ({roles})")
    print(
        f"  generation  {result['generate_ratio']:.2f} of bare vLLM's tokens/s; "
        f"update {result['update_ratio']:.2f} of bare PyTorch's tokens a CPU-s"
    )
    for name, peer in result["peers"].items():
        print(f"  {name}  {peer['ratio_to_limit']:.2f} x the limit, {peer['times_ours']:.2f} x ours (same tokens)")
    if "overlap" in result:
        lag = result["overlap"]
        print(
            f"  max_staleness=1: {lag['wall_s']:.2f} s a step; "
            f"generation + update one after the other: {lag['generate_plus_update_s']:.2f} s"
        )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="25m", help=f"comma-separated, of {', '.join(CASES)} (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of one run (default: %(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="leave TRL out (also when it is not installed)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs there, for rlpost.plan calibrate")
    parser.add_argument("--overlap", action="store_true", help="also run with max_staleness=1")
    options = parser.parse_args()
    peer = not options.no_peer and importlib.util.find_spec("trl") is not None
    if not peer and not options.no_peer:
        print("TRL is not installed (.venv/bin/pip install 'trl==1.16.0'): its column is left out")
    results = []
    for name in options.cases.split(","):
        results.append(measure_case(name, options.steps, peer, options.overlap, options.keep))
        show(results[-1])
    first = results[0]
    print(
        json.dumps({name: first[name] for name in ("generate_ratio", "update_ratio", "cpu_ratio_to_limit", "peers")} | {"cases": results})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
