"""The catalogue of metrics, and the ones that are computed from a step's groups.

A metric that is not in :data:`METRICS` does not exist: :func:`validate_record` refuses it, and docs/metrics.md holds the table that
:func:`markdown_table` makes (a test compares them).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.types import ConfigError, Group

METRICS_FILE = "metrics.jsonl"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: its name (``<word>`` stands for any name), its unit, and what it is in one sentence."""

    name: str
    unit: str
    doc: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches the full names of this metric. ``<name>`` is chosen by the user and may hold anything, other words no slash."""
        parts = re.split(r"(<\w+>)", self.name)
        return re.compile("".join(".+" if part == "<name>" else "[^/]+" if part.startswith("<") else re.escape(part) for part in parts))


_PHASE_DOCS = {
    "generate": "Waiting for rollouts: engines sample, environments step.",
    "reward": "Waiting for rewards when nothing else is left to wait for.",
    "reference": "Logprobs of the reference model.",
    "old_logprob": "Forward for the denominator of the importance ratio, before the update.",
    "values": "Forward of the critic.",
    "update": "Forward, backward and optimizer steps.",
    "sync": "Moving the new weights to the engines, from the call to the commit on every live engine.",
    "checkpoint": "Writing what a resume needs.",
    "evaluate": "Evaluation on the held-out prompts.",
    "wait": "Everything in no other phase: batch building, logging, writing rollouts, repairing.",
}


_ROWS = (
    ("step", "count", "Training steps done, this one included; 0 is before the first."),
    ("policy_version", "count", "Version of the weights that every live engine committed last."),
    ("time/step_s", "s", "Wall time of the step, from the end of the one before; the sum of the phases below."),
    *((f"time/{phase}_s", "s", doc) for phase, doc in _PHASE_DOCS.items()),
    ("rollout/tokens", "tokens", "Tokens that the engines sampled for this step's batch."),
    ("rollout/tokens_max", "tokens", "Sampled tokens of the longest trajectory."),
    ("rollout/tokens_per_s", "tokens/s", "rollout/tokens over the seconds that their generation took."),
    ("rollout/prompt_tokens", "tokens", "Prompt tokens sent to the engines, every turn counted."),
    ("rollout/cached_prompt_tokens", "tokens", "Of these, the ones that the engines' prefix cache served."),
    ("rollout/truncated_fraction", "share", "Trajectories cut by a length or turn limit."),
    ("rollout/staleness_max", "versions", "Largest staleness of a sampled token: trainer version minus the sampling version."),
    ("rollout/staleness_mean", "versions", "Mean staleness over the sampled tokens."),
    ("rollout/groups_dropped", "groups", "Groups that taught nothing and were replaced (algorithm.filter.zero_variance=resample)."),
    ("rollout/turns_mean", "turns", "Mean number of assistant turns of a trajectory."),
    ("reward/mean", "reward", "Mean reward of the scored trajectories; null when none was scored."),
    ("reward/std", "reward", "Standard deviation of the reward over the same trajectories (divided by their number)."),
    ("reward/failed", "trajectories", "Trajectories whose reward or episode failed; they have no reward, never 0."),
    ("reward/not_scorable", "trajectories", "Trajectories without reward and without a fault: the function answered None."),
    ("reward/<name>/mean", "reward", "Mean of one reward function, unweighted, over the trajectories that it scored."),
    ("reward_metrics/<name>", "any", "Mean of a figure that a reward function reports besides its reward."),
    ("train/loss", "loss", "Loss of the step: sum over all components, each with its global denominator."),
    ("train/grad_norm", "norm", "Global gradient norm before clipping."),
    ("train/lr", "1", "Learning rate of the last optimizer step."),
    ("train/tokens", "tokens", "Tokens with a weight in the loss, over all ranks."),
    ("train/row_tokens", "tokens", "Tokens of all rows that the update computed: a group's shared prompt once a row."),
    ("train/micro_batches", "count", "Forwards of one rank in the update, over all its optimizer steps."),
    ("train/occupancy", "share", "Real tokens among the token slots of the packed micro-batches."),
    ("train/kl", "nats", "Mean KL to the reference model per trained token (algorithm.kl_estimator); 0 without a reference."),
    ("train/kl_coefficient", "1", "The coefficient that the step used (algorithm.kl_target steers it)."),
    ("train/entropy", "nats", "Mean entropy of the policy per trained token."),
    ("train/ratio_max", "1", "Largest importance ratio of a trained token."),
    ("train/clip_fraction", "share", "Trained tokens whose importance ratio was clipped."),
    ("train/correction_mean", "1", "Mean weight of the off-policy correction (algorithm.correction)."),
    ("train/correction_dropped", "share", "Trained tokens whose correction is 0."),
    ("train/correction_kl", "nats", "KL of the engine's policy to the trainer's, from the same tokens (k3)."),
    ("train/accuracy", "share", "Offline: pairs (kto: answers) that the model ranks rightly."),
    ("train/margin", "1", "Offline: mean by which it ranks them so, in the loss's own rewards."),
    ("train/reward_chosen", "1", "Offline: mean of the loss's own reward of chosen answers."),
    ("train/reward_rejected", "1", "Offline: the same of rejected answers."),
    ("critic/loss", "loss", "Loss of the critic, times algorithm.critic.coefficient."),
    ("critic/value_error", "1", "Mean squared error of the critic's values before the update."),
    ("critic/value_clip_fraction", "share", "Values that moved beyond algorithm.critic.clip."),
    ("critic/grad_norm", "norm", "Global gradient norm of the critic before clipping."),
    ("critic/lr", "1", "Learning rate of the critic's last optimizer step."),
    ("parity/logprob_abs_mean", "nats", "Mean of abs(engine logprob - trainer logprob) on the same sampled tokens, before the update."),
    ("parity/logprob_abs_max", "nats", "Largest such difference."),
    ("sync/bytes", "bytes", "What the sync moved to one engine, single engines' full syncs included."),
    ("sync/seconds", "s", "Duration of the sync, from the encoding to the last acknowledgement."),
    ("sync/paused_s", "s", "Longest time in which an engine could not generate for it."),
    ("sync/stage_s", "s", "Before engines pause: links, a delta on its way, files being written."),
    ("sync/gather_s", "s", "Trainer: collecting tensors from the ranks' shards, cast and hashed."),
    ("sync/encode_s", "s", "Trainer: comparing with what engines hold, and coding what changed."),
    ("sync/transfer_s", "s", "Trainer: waiting for what was sent to leave."),
    ("sync/apply_s", "s", "Engine: bringing the weights in and hashing them; with collective and ipc the wait for them is part of it."),
    ("sync/changed_fraction", "share", "Elements whose bits changed in the engines' dtype; only where a delta was looked for."),
    ("sync/mode", "number", "What moved: 0 everything, 1 everything that training changes, 2 a delta, 3 an adapter."),
    ("sync/verified", "1", "1 when engines proved all their parameters, see weights.verify."),
    ("sync/fallbacks", "count", "Full syncs that single engines needed besides."),
    ("sync/fallbacks/<reason>", "count", "The same by reason: restarted, timeout, wrong_base, wrong_fingerprint, corrupt, broken ..."),
    ("memory/<role>_peak_gib", "GiB", "Peak memory of one process of this role (trainer, engine, driver); the largest of them."),
    ("evaluate/reward", "reward", "Mean reward on the held-out prompts with the sampling of `evaluation`."),
    ("evaluate/<measure>", "as train", "Offline: loss, accuracy, margin ... (see train/*) on the held-out rows."),
    ("evaluate/failed", "share", "Held-out trajectories whose reward or episode failed; they are not in evaluate/reward."),
    ("evaluate/truncated_fraction", "share", "Held-out trajectories cut by a length or turn limit."),
    (
        "plan/error_<phase>",
        "share",
        "Last step only: what the plan says of a phase's seconds (of this run's lengths) over the measured ones, less 1; "
        "memory_trainer and memory_engine are peak bytes, step is the whole step.",
    ),
    ("engine/restarts", "count", "Engines started again since the run began."),
)

METRICS: Mapping[str, Metric] = {name: Metric(name=name, unit=unit, doc=doc) for name, unit, doc in _ROWS}
"""Every metric that may be in a record, by name."""

_PATTERNS = tuple(metric.pattern for metric in METRICS.values() if "<" in metric.name)


def is_documented(name: str) -> bool:
    """Whether ``name`` is in the catalogue, as it stands or by one of the entries with ``<word>``."""
    return name in METRICS or any(pattern.fullmatch(name) for pattern in _PATTERNS)


def validate_record(record: Mapping[str, Any]) -> None:
    """Raise AssertionError naming the metrics of ``record`` that METRICS does not document."""
    unknown = [name for name in record if not is_documented(name)]
    if unknown:
        raise AssertionError(f"undocumented metric {', '.join(map(repr, unknown))}: add it to METRICS in rlpost/observe/metrics.py")


def markdown_table() -> str:
    """The catalogue as a Markdown table; docs/metrics.md holds exactly this text."""
    lines = ["| metric | unit | what it is |", "|---|---|---|"]
    lines += [f"| `{metric.name}` | {metric.unit} | {metric.doc} |" for metric in METRICS.values()]
    return "\n".join(lines) + "\n"


def summarise_rollouts(
    groups: Sequence[Group], *, policy_version: int | None = None, generate_s: float | None = None, groups_dropped: int = 0
) -> dict[str, float]:
    """The ``rollout/*``, ``reward/*`` and ``reward_metrics/*`` values of one step's groups.

    ``policy_version`` is the trainer's version when it trains on them (None: no staleness values), ``generate_s`` the seconds that
    sampling took (None: no tokens_per_s; 0 gives 0), ``groups_dropped`` is passed through. A mean over nothing is NaN.
    Raises AssertionError when a token is newer than ``policy_version``: versions and trainer are out of step.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tokens = sum(trajectory.sampled_tokens for trajectory in trajectories)
    record: dict[str, float] = {
        "rollout/tokens": tokens,
        "rollout/tokens_max": max((trajectory.sampled_tokens for trajectory in trajectories), default=0),
        "rollout/prompt_tokens": sum(trajectory.prompt_tokens_requested for trajectory in trajectories),
        "rollout/cached_prompt_tokens": sum(trajectory.prompt_tokens_cached for trajectory in trajectories),
        "rollout/truncated_fraction": _mean([float(trajectory.truncated) for trajectory in trajectories]),
        "rollout/turns_mean": _mean([trajectory.turns for trajectory in trajectories]),
        "rollout/groups_dropped": groups_dropped,
    }
    if generate_s is not None:
        record["rollout/tokens_per_s"] = tokens / generate_s if generate_s > 0 else 0.0
    if policy_version is not None:
        sampled_by = np.concatenate([np.empty(0, np.int64), *(trajectory.versions[trajectory.trainable] for trajectory in trajectories)])
        staleness = policy_version - sampled_by
        if staleness.size and staleness.min() < 0:
            raise AssertionError(f"a token was sampled by version {sampled_by.max()}, but the trainer is at version {policy_version}")
        record["rollout/staleness_max"] = int(staleness.max()) if staleness.size else 0
        record["rollout/staleness_mean"] = float(staleness.mean()) if staleness.size else 0.0

    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    unscored = [trajectory for trajectory in trajectories if trajectory.reward is None]
    failed = sum(trajectory.failure is not None and trajectory.failure.is_fault for trajectory in unscored)
    record["reward/mean"] = _mean(rewards)
    record["reward/std"] = float(np.std(rewards)) if rewards else float("nan")
    record["reward/failed"] = failed
    record["reward/not_scorable"] = len(unscored) - failed
    for name, values in _by_name(trajectory.reward_parts for trajectory in trajectories).items():
        record[f"reward/{name}/mean"] = _mean(values)
    for name, values in _by_name(trajectory.reward_metrics for trajectory in trajectories).items():
        record[f"reward_metrics/{name}"] = _mean(values)
    return record


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of ``run_dir/metrics.jsonl`` by rising step, one a step.

    Records of the same step are merged, later values win. A line that a killed process left half written is skipped with a warning.
    Raises ConfigError when there is no such file.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise ConfigError(
            f"no {METRICS_FILE} in {run_dir}: expected the directory of a run (the last line that rlpost.train prints is `run: DIRECTORY`) "
            "whose observe.trackers had jsonl"
        )
    merged: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            record = parse_record(line)
            if record is None:
                _log.warning("%s:%d is not a record with a step; skipped", path, number)
            else:
                merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def parse_record(line: str) -> dict[str, Any] | None:
    """The record on one line of metrics.jsonl; None when it is torn or has no integer ``step``."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _by_name(mappings: Iterable[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """The values of each key over all mappings, None left out; a key that is always None has an empty list."""
    values: dict[str, list[float]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            values.setdefault(name, [])
            if value is not None:
                values[name].append(float(value))
    return values
