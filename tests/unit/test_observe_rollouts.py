"""Trajectories on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlpost.observe import RolloutWriter, read_rollouts
from rlpost.types import ConfigError, Failure, Group, Prompt, Trajectory

ODD_TEXT = 'quote " newline\n line separator\u2028 nul\x00 emoji 🙂 lone surrogate \ud83d end'


def example_groups() -> list[Group]:
    scored = Trajectory(
        trajectory_id="p1/0",
        group_id="g1",
        prompt_id="p1",
        tokens=np.array([5, 6, 7, 8]),
        trainable=np.array([False, True, False, True]),
        logprobs=np.array([np.nan, -0.1, np.nan, -np.inf], dtype=np.float32),
        versions=np.array([-1, 4, -1, 5], dtype=np.int32),
        prompt_length=1,
        turns=2,
        truncated=True,
        completion=ODD_TEXT,
        reward=0.5,
        reward_parts={"exact": 1.0, "judge": None, "broken": float("nan")},
        reward_metrics={"length": 2.0},
    )
    failed = Trajectory(
        trajectory_id="p2/0",
        group_id="g2",
        prompt_id="p2",
        tokens=np.array([], dtype=np.int64),
        trainable=np.array([], dtype=bool),
        logprobs=np.array([]),
        versions=np.array([], dtype=np.int64),
        prompt_length=0,
        failure=Failure(kind="timeout", where="my_reward", message="no answer in 30 s"),
    )
    messages = ({"role": "system", "content": "Sort."}, {"role": "user", "content": [{"type": "text", "text": "3 1"}]})
    return [
        Group(group_id="g1", index=0, prompt=Prompt(prompt_id="p1", messages=messages), trajectories=(scored,)),
        Group(group_id="g2", index=1, prompt=Prompt(prompt_id="p2", text="1+1="), trajectories=(failed,)),
    ]


@pytest.mark.parametrize("fmt", ["jsonl", "parquet"])
def test_rows_come_back_as_they_were(tmp_path: Path, fmt: str) -> None:
    path = RolloutWriter(tmp_path, fmt).write(12, example_groups())
    assert path == tmp_path / "rollouts" / f"step_000012.{fmt}"
    first, second = read_rollouts(path)
    assert (first["step"], first["group_id"], first["trajectory_id"], first["prompt_id"]) == (12, "g1", "p1/0", "p1")
    assert first["prompt"] == 'system: Sort.\nuser: [{"type": "text", "text": "3 1"}]'
    assert first["tokens"] == [5, 6, 7, 8]
    assert first["trainable"] == [False, True, False, True]
    assert first["versions"] == [-1, 4, -1, 5]
    assert first["logprobs"] == [None, float(np.float32(-0.1)), None, None]
    assert (first["reward"], first["truncated"], first["turns"], first["prompt_length"]) == (0.5, True, 2, 1)
    assert first["reward_parts"] == {"exact": 1.0, "judge": None, "broken": None}
    assert first["reward_metrics"] == {"length": 2.0}
    assert first["failure_kind"] is None
    assert second["prompt"] == "1+1="
    assert second["tokens"] == []
    assert second["reward"] is None, "a failed reward is never 0"
    assert (second["failure_kind"], second["failure_message"]) == ("timeout", "my_reward: no answer in 30 s")


def test_both_formats_give_the_same_rows(tmp_path: Path) -> None:
    written = [RolloutWriter(tmp_path, fmt).write(1, example_groups()) for fmt in ("jsonl", "parquet")]
    jsonl, parquet = (read_rollouts(path) for path in written if path is not None)
    assert jsonl == parquet


def test_a_completion_with_odd_characters_costs_neither_the_file_nor_a_line(tmp_path: Path) -> None:
    path = RolloutWriter(tmp_path, "jsonl").write(1, example_groups())
    assert path is not None
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3 and lines[-1] == ""
    assert json.loads(lines[0])["completion"] == ODD_TEXT.replace("\ud83d", "\\ud83d")


@pytest.mark.parametrize("fmt", ["jsonl", "parquet"])
def test_a_failing_write_leaves_the_file_of_the_step_as_it_was(tmp_path: Path, fmt: str) -> None:
    writer = RolloutWriter(tmp_path, fmt)
    path = writer.write(3, example_groups())
    assert path is not None
    before = path.read_bytes()
    broken = Group(group_id="g", index=2, prompt=Prompt(prompt_id="p", text=""), trajectories=(None,))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        writer.write(3, [*example_groups(), broken])
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no temporary file may stay"


def test_a_redone_step_replaces_its_file_and_a_directory_is_read_in_order(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path, "jsonl")
    for step in (2, 10, 1):
        writer.write(step, example_groups())
    writer.write(2, example_groups()[:1])
    (tmp_path / "rollouts" / ".step_000003.jsonl.writing-1").write_text('{"half', encoding="utf-8")
    assert [row["step"] for row in read_rollouts(tmp_path / "rollouts")] == [1, 1, 2, 10, 10]


def test_none_writes_nothing_and_a_wrong_format_is_refused(tmp_path: Path) -> None:
    assert RolloutWriter(tmp_path, "none").write(1, example_groups()) is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"observe.rollouts='csv'.*jsonl"):
        RolloutWriter(tmp_path, "csv")


def test_reading_what_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rollouts at"):
        read_rollouts(tmp_path / "step_000001.jsonl")
    (tmp_path / "x.csv").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ending in .jsonl or .parquet"):
        read_rollouts(tmp_path / "x.csv")
