"""What a run's metrics.jsonl says in one page: where the time went, and whether the reward moved. Printed by ``rlpost.report``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpost.observe import formats
from rlpost.observe.metrics import METRICS_FILE, read_metrics
from rlpost.observe.phases import PHASES
from rlpost.types import ConfigError

SHORTEST_STEP_S = 1e-9
"""Keeps the relative deviation of a step finite."""
END_STEPS = 5
"""First and last steps whose mean reward is compared."""


def summarise_run(run_dir: Path) -> dict[str, Any]:
    """The figures of a run as one JSON-able mapping; a figure that its records do not hold is None.

    ``phases``: mean seconds a step, total seconds and share of the time of each phase. ``phase_sum_deviation``: the largest relative
    difference between a step's phases and its ``time/step_s`` (0.02 is 2 %). ``reward``, ``parity``, ``tokens``, ``evaluation``: see
    :func:`format_summary`. Raises ConfigError when the directory has no metrics.jsonl or that has no record of a step.
    """
    records = read_metrics(run_dir)
    steps = [record for record in records if formats.is_number(record.get("time/step_s"))]
    if not steps:
        raise ConfigError(f"{run_dir / METRICS_FILE} has no record of a finished step yet: wait for the first one, or look into its logs")
    total = sum(record["time/step_s"] for record in steps)
    return {
        "run_dir": str(run_dir),
        "steps": len(steps),
        "first_step": steps[0]["step"],
        "last_step": steps[-1]["step"],
        "seconds": total,
        "seconds_per_step": total / len(steps),
        "phases": {phase: _phase(steps, phase, total) for phase in PHASES},
        "phase_sum_deviation": max(_deviation(record) for record in steps),
        "reward": _reward(records),
        "parity": {"mean": _mean(_values(records, "parity/logprob_abs_mean")), "max": _largest(_values(records, "parity/logprob_abs_max"))},
        "tokens": _tokens(steps, total),
        "evaluation": _evaluation(records),
    }


def format_summary(summary: Mapping[str, Any]) -> str:
    """The summary as text, ASCII only."""
    lines = [
        f"run         {summary['run_dir']}",
        f"steps       {summary['steps']} ({summary['first_step']} to {summary['last_step']}), "
        f"{formats.seconds(summary['seconds'])} in all, {formats.seconds(summary['seconds_per_step'])} a step",
        "",
        f"{'phase':<12}{'mean a step':>12}{'total':>12}{'share':>9}",
    ]
    for name, phase in sorted(summary["phases"].items(), key=lambda item: -item[1]["share"]):
        if phase["total_s"] > 0:
            lines.append(f"{name:<12}{phase['mean_s']:>11.3f}s{formats.seconds(phase['total_s']):>12}{100 * phase['share']:>7.1f} %")
    reward, parity, tokens, evaluation = (summary[name] for name in ("reward", "parity", "tokens", "evaluation"))
    lines += [
        f"the phases add up to the steps within {100 * summary['phase_sum_deviation']:.3f} %",
        "",
        f"reward      {formats.number(reward['first'])} (first {reward['window']} steps) -> "
        f"{formats.number(reward['last'])} (last {reward['window']} steps)",
        f"parity      |engine - trainer logprob| mean {formats.number(parity['mean'], 6)}, max {formats.number(parity['max'], 6)}",
        f"tokens      {formats.count(tokens['sampled'])} sampled ({formats.count(tokens['sampled_per_s'])} tok/s of the whole run, "
        f"{formats.count(tokens['generate_tokens_per_s'])} tok/s while generating), {formats.count(tokens['trained'])} trained",
    ]
    if evaluation is not None:
        lines.append(
            f"evaluation  {formats.number(evaluation['first'])} (step {evaluation['first_step']}) -> "
            f"{formats.number(evaluation['last'])} (step {evaluation['last_step']})"
        )
    return "\n".join(lines)


def _phase(steps: Sequence[Mapping[str, Any]], phase: str, total: float) -> dict[str, float]:
    seconds = sum(_values(steps, f"time/{phase}_s"))
    return {"mean_s": seconds / len(steps), "total_s": seconds, "share": seconds / total if total > 0 else 0.0}


def _deviation(record: Mapping[str, Any]) -> float:
    """How far the phases of a step are from its duration, relative to the duration."""
    difference = abs(sum(_values([record], *(f"time/{phase}_s" for phase in PHASES))) - record["time/step_s"])
    return difference / max(record["time/step_s"], SHORTEST_STEP_S)


def _reward(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rewards = _values(records, "reward/mean")
    window = min(END_STEPS, len(rewards))
    return {"first": _mean(rewards[:window]), "last": _mean(rewards[len(rewards) - window :]), "window": window}


def _tokens(steps: Sequence[Mapping[str, Any]], total: float) -> dict[str, float | None]:
    sampled = sum(_values(steps, "rollout/tokens"))
    return {
        "sampled": sampled,
        "trained": sum(_values(steps, "train/tokens")),
        "sampled_per_s": sampled / total if total > 0 else None,
        "generate_tokens_per_s": _mean(_values(steps, "rollout/tokens_per_s")),
    }


def _evaluation(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    found = [record for record in records if formats.is_number(record.get("evaluate/reward"))]
    if not found:
        return None
    first, last = found[0], found[-1]
    return {
        "first": first["evaluate/reward"],
        "first_step": first["step"],
        "last": last["evaluate/reward"],
        "last_step": last["step"],
    }


def _values(records: Sequence[Mapping[str, Any]], *names: str) -> list[float]:
    """All finite values under ``names``, in the order of the records."""
    return [record[name] for record in records for name in names if formats.is_number(record.get(name))]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)
