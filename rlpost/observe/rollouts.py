"""The trajectories of a step on disk: ``RUN/rollouts/step_000012.jsonl`` or ``.parquet``, one row a trajectory.

Those of an evaluation stand beside them as ``evaluation_000040.jsonl``.

A row (the same in both formats once read by :func:`read_rollouts`):

    step, group_id, trajectory_id, prompt_id     who it is
    prompt, completion                           text; chat messages as ``role: content`` lines
    tokens, trainable, logprobs, versions        lists ``[tokens]`` as in types.Trajectory; logprobs that are not finite are null
    prompt_length, turns, truncated
    reward, reward_parts, reward_metrics         null where not scored; the parts a mapping (in Parquet: JSON text)
    failure_kind, failure_message                null without a failure
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpost.types import ConfigError, Group, Prompt, Trajectory

if TYPE_CHECKING:
    import pyarrow

ROLLOUTS_DIR = "rollouts"
FORMATS = ("jsonl", "parquet", "none")

_JSON_COLUMNS = ("reward_parts", "reward_metrics")


class RolloutWriter:
    """Writes a step's groups below ``run_dir``. ``fmt`` ``none`` writes nothing. Raises ConfigError for an unknown format."""

    def __init__(self, run_dir: Path, fmt: str) -> None:
        if fmt not in FORMATS:
            raise ConfigError(f"observe.rollouts={fmt!r}: expected one of {', '.join(FORMATS)}")
        self._dir = run_dir / ROLLOUTS_DIR
        self._fmt = fmt

    def write(self, step: int, groups: Sequence[Group], kind: str = "step") -> Path | None:
        """Write the trajectories of ``step`` (or, as ``kind``, of the ``evaluation`` after it); returns the file (None: format ``none``).

        The file appears complete or not at all; a file of the same step (redone after a resume) is replaced.
        """
        if self._fmt == "none":
            return None
        self._dir.mkdir(parents=True, exist_ok=True)
        path = self._dir / f"{kind}_{step:06d}.{self._fmt}"
        temporary = self._dir / f".{path.name}.writing-{os.getpid()}"
        rows = (_row(step, group, trajectory) for group in groups for trajectory in group.trajectories)
        try:
            if self._fmt == "jsonl":
                _write_jsonl(temporary, rows)
            else:
                _write_parquet(temporary, rows)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path


def read_rollouts(path: Path) -> list[dict[str, Any]]:
    """The rows of one rollout file, or of all files of a directory in the order of their steps.

    Raises ConfigError when ``path`` does not exist or has another ending than .jsonl and .parquet.
    """
    if path.is_dir():
        files = sorted(file for file in path.glob("step_*") if file.suffix in (".jsonl", ".parquet"))
        return [row for file in files for row in read_rollouts(file)]
    if not path.is_file():
        raise ConfigError(f"no rollouts at {path}: expected a file RUN/{ROLLOUTS_DIR}/step_NNNNNN.jsonl or .parquet, or that directory")
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    if path.suffix == ".parquet":
        from pyarrow import parquet

        rows = parquet.read_table(path).to_pylist()
        return [{**row, **{name: json.loads(row[name]) for name in _JSON_COLUMNS}} for row in rows]
    raise ConfigError(f"cannot read rollouts from {path}: expected a name ending in .jsonl or .parquet")


def prompt_text(prompt: Prompt) -> str:
    """The prompt as one readable text; content of a message that is no text is shown as JSON."""
    if prompt.messages is None:
        return prompt.text or ""
    lines = []
    for message in prompt.messages:
        content = message.get("content")
        shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        lines.append(f"{message.get('role', '?')}: {shown}")
    return "\n".join(lines)


def _row(step: int, group: Group, trajectory: Trajectory) -> dict[str, Any]:
    finite = np.isfinite(trajectory.logprobs)
    failure = trajectory.failure
    return {
        "step": step,
        "group_id": group.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "prompt_id": trajectory.prompt_id,
        "prompt": _storable(prompt_text(group.prompt)),
        "completion": _storable(trajectory.completion),
        "tokens": trajectory.tokens.tolist(),
        "trainable": trajectory.trainable.astype(bool).tolist(),
        "logprobs": [value if known else None for value, known in zip(trajectory.logprobs.tolist(), finite.tolist(), strict=True)],
        "versions": trajectory.versions.tolist(),
        "prompt_length": trajectory.prompt_length,
        "turns": trajectory.turns,
        "truncated": trajectory.truncated,
        "reward": _finite(trajectory.reward),
        "reward_parts": _finite_values(trajectory.reward_parts),
        "reward_metrics": _finite_values(trajectory.reward_metrics),
        "failure_kind": failure.kind if failure else None,
        "failure_message": _storable(f"{failure.where}: {failure.message}") if failure else None,
    }


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    stored = [{**row, **{name: json.dumps(row[name], allow_nan=False) for name in _JSON_COLUMNS}} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(stored, schema=_schema()), path, compression="zstd")


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    text, whole = pa.string(), pa.int64()
    return pa.schema(
        [
            ("step", whole),
            ("group_id", text),
            ("trajectory_id", text),
            ("prompt_id", text),
            ("prompt", text),
            ("completion", text),
            ("tokens", pa.list_(whole)),
            ("trainable", pa.list_(pa.bool_())),
            ("logprobs", pa.list_(pa.float64())),
            ("versions", pa.list_(whole)),
            ("prompt_length", whole),
            ("turns", whole),
            ("truncated", pa.bool_()),
            ("reward", pa.float64()),
            ("reward_parts", text),
            ("reward_metrics", text),
            ("failure_kind", text),
            ("failure_message", text),
        ]
    )


def _storable(text: str) -> str:
    """``text`` with lone surrogates escaped; UTF-8 cannot hold them, and one odd completion must not cost a step's file."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _finite_values(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in values.items()}
