"""Whole runs of the scaled configuration, as ``rlpost.train`` does them: one to its end, and the same again from its middle.

Resume: the second, a new process, must report for the remaining steps what the first reported. Sync and parity are read from the first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.checkpoint.directory import checkpoint_root
from rlpost.diagnosis.report import Finding
from rlpost.diagnosis.verify_compare import TOLERANCES, different_prompts, empty_moments, largest_difference, same_tokens
from rlpost.diagnosis.verify_config import RESUMED_STEP, STEPS
from rlpost.diagnosis.verify_guard import AREA, Say, broken
from rlpost.diagnosis.verify_plan import Plan
from rlpost.driver.loop import CRITIC
from rlpost.observe import read_metrics, read_rollouts
from rlpost.types import RlpostError

RUN_S = 400.0
"""Of a run of four steps: engine and trainers take up to half a minute to start on two cores."""
LAST_LINES = 15
RESUMED = ("train/loss", "train/grad_norm", "train/lr", "train/kl", "reward/mean", "rollout/tokens", "critic/loss", "critic/grad_norm")
REPEATABLE = (
    "rewards and environments that judge the same answer otherwise the second time (a judge model, a clock, a counter) make steps differ; "
    "make them repeatable for this check"
)
ENGINELESS = ("train/lr",)
"""What is the same after a resume even where engines sample other tokens."""


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The directories of both runs, and what they reported by step."""

    whole: Path
    resumed: Path
    expected: Mapping[int, dict[str, Any]]
    actual: Mapping[int, dict[str, Any]]


def train(plan: Plan, run_dir: Path, more: Sequence[str] = ()) -> None:
    """One run in a process of its own. Raises RlpostError with the end of its output when it fails or does not end in time."""
    log = plan.directory / f"{run_dir.name}.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("RAY_ADDRESS", None)  # this machine only
    words = [sys.executable, "-m", "rlpost.train", *plan.words, f"run_dir={run_dir}", *more]
    with log.open("w") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                # Ray's processes end with their driver.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        what = f"did not end within {RUN_S:.0f} s" if code is None else f"ended with exit code {code}"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise RlpostError(f"the scaled run {what}; its last lines:\n" + "\n".join(lines[-LAST_LINES:]))


def run_findings(plan: Plan, say: Say) -> list[Finding]:
    """Resume, and with engines sync and parity."""
    online = not plan.derived.offline
    started = time.monotonic()
    whole, resumed = plan.directory / "whole", plan.directory / "resumed"
    try:
        train(plan, whole)
    except (RlpostError, OSError) as error:
        return [broken(name, error) for name in ("resume", *(("sync", "parity") if online else ()))]
    say(f"run of {STEPS} steps ({time.monotonic() - started:.0f} s)")
    records = {record["step"]: record for record in read_metrics(whole)}
    found = []
    for name, judge in {"sync": sync_finding, "parity": parity_finding}.items() if online else ():
        found.append(judge(records, plan))
        say(f"{name}: {found[-1].status}")
    started = time.monotonic()
    try:
        shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns(f"step_{STEPS:06d}", "logs", "weights"))
        train(plan, resumed, ["resume=auto"])
        runs = Runs(whole=whole, resumed=resumed, expected=records, actual={one["step"]: one for one in read_metrics(resumed)})
        finding = resume_finding(runs, plan, largest_moments(checkpoint_root(whole) / f"step_{RESUMED_STEP:06d}"))
    except (RlpostError, OSError) as error:
        finding = broken("resume", error)
    say(f"resume: {finding.status} ({time.monotonic() - started:.0f} s)")
    return [*found, finding]


# ---- resume ------------------------------------------------------------------------------------------------------------


def resume_finding(runs: Runs, plan: Plan, moments: Mapping[str, float]) -> Finding:
    """The steps after the resume: prompts, losses, gradient norms, learning rates; and whether the saved moments are there."""
    tolerance = TOLERANCES[plan.derived.dtype]
    problems, values, unknown = [], {}, ""
    if wrong := empty_moments(moments):
        problems.append(wrong)
    for step in range(RESUMED_STEP + 1, STEPS + 1):
        one, other = runs.expected.get(step), runs.actual.get(step)
        if one is None or other is None:
            problems.append(f"step {step} is missing in the {'whole' if one is None else 'resumed'} run")
            continue
        names: Sequence[str] = RESUMED
        if not plan.derived.offline:
            rows = [read_rollouts(run / "rollouts" / f"step_{step:06d}.jsonl") for run in (runs.whole, runs.resumed)]
            if wrong := different_prompts(*rows):
                problems.append(f"step {step}: {wrong}")
            if plan.machine.device == "gpu" and not wrong and not same_tokens(*rows):
                names = ENGINELESS
                unknown = f"from step {step} on the engine sampled other tokens for the same prompts, so losses were not compared"
        name, worst = largest_difference(one, other, names)
        values[f"difference_step_{step}"] = worst
        if worst > tolerance.relative:
            problems.append(f"step {step}: {name} is {other.get(name)}, without the stop it was {one.get(name)}")
    last = runs.expected.get(STEPS, {})
    worst = max(values.values(), default=0.0)
    good = f"steps {RESUMED_STEP + 1} to {STEPS} as without a stop: differences at most {worst:.1e} (gradient norm of the last "
    good += f"{last.get('train/grad_norm')}), {len(moments)} moments saved"
    return Finding(
        area=AREA,
        name="resume",
        status="failed" if problems else "unknown" if unknown else "ok",
        found="; ".join(problems) or unknown or good,
        expected=f"the same prompts, losses, gradient norms and learning rates within {tolerance.relative:g} relative; moments, not all 0",
        fix=REPEATABLE if problems else "check on a CPU too: placement.device=cpu" if unknown else "",
        values=values,
    )


def largest_moments(checkpoint: Path) -> dict[str, float]:
    """The largest absolute value of each of the optimizer's moments in a checkpoint, by name."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    critic = checkpoint / CRITIC
    found = {f"critic.{name}": value for name, value in largest_moments(critic).items()} if critic.is_dir() else {}
    tensors = checkpoint / "tensors"
    stored = dcp.FileSystemReader(tensors).read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith("optimizer.state.") and not name.endswith(".step")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there is meant
        dcp.load(state, checkpoint_id=tensors, no_dist=True)
    return found | {name: float(tensor.float().abs().max()) for name, tensor in state.items() if tensor.numel()}


# ---- engines -----------------------------------------------------------------------------------------------------------


def sync_finding(records: Mapping[int, Mapping[str, Any]], plan: Plan) -> Finding:
    """Every sync proven by fingerprints, none fallen back to a full one."""
    steps = [records[step] for step in sorted(records) if step > 0]
    verified = sum(record.get("sync/verified") == 1 for record in steps)
    fallbacks = sum(int(record.get("sync/fallbacks") or 0) for record in steps)
    modes = [("full", "trained", "delta", "adapter")[int(record["sync/mode"])] for record in steps]
    carried = f"{'deltas by ' if plan.derived.weight_deltas else ''}{plan.derived.weight_carrier}"
    reasons = sorted({name.rpartition("/")[2] for record in steps for name in record if name.startswith("sync/fallbacks/")})
    good = bool(steps) and verified == len(steps) and fallbacks == 0
    return Finding(
        area=AREA,
        name="sync",
        status="ok" if good else "failed",
        found=f"{verified} of {len(steps)} syncs ({carried}) proven ({', '.join(modes)}), {fallbacks} fallbacks"
        + (f" ({', '.join(reasons)})" if reasons else ""),
        expected="after every sync the engine's fingerprint over all parameters is the trainer's, without fallbacks",
        fix="" if good else "see logs/engine-0.log of the run, and docs/weight-sync.md",
        values={"syncs": float(len(steps)), "verified": float(verified), "fallbacks": float(fallbacks)},
    )


def parity_finding(records: Mapping[int, Mapping[str, Any]], plan: Plan) -> Finding:
    """Engine logprobs against the trainer's on the same tokens, after updates and syncs."""
    tolerance = TOLERANCES[plan.derived.dtype]
    later = [records[step] for step in sorted(records) if step > 1]  # the first step's samples are of the initial weights
    pairs = [(record.get("parity/logprob_abs_mean"), record.get("parity/logprob_abs_max")) for record in later]
    known = [(float(mean), float(most)) for mean, most in pairs if mean is not None and most is not None]
    mean, most = max((one for one, _ in known), default=float("nan")), max((one for _, one in known), default=float("nan"))
    good = bool(known) and mean <= tolerance.parity_mean and most <= tolerance.parity_max
    return Finding(
        area=AREA,
        name="parity",
        status="ok" if good else "failed",
        found=f"{len(known)} of {len(later)} steps compared in {plan.derived.dtype}: |trainer - engine| a token {mean:.1e} on average in "
        f"the worst step, {most:.1e} at most",
        expected=f"at most {tolerance.parity_mean:g} on average and {tolerance.parity_max:g} for a token ({tolerance.why})",
        fix="" if good else "engine and trainer do not compute the same policy: look at model.dtype, engine.extra and the architecture",
        values={"logprob_abs_mean": mean, "logprob_abs_max": most, "steps": float(len(known))},
    )
