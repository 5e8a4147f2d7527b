"""Where a run lives: nothing is ever overwritten, and resume=auto finds this run's newest checkpoint and no other's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlpost.checkpoint.directory import begin, complete
from rlpost.config.schema import RunConfig
from rlpost.driver import run_directory as module
from rlpost.driver.run_directory import CONFIG_FILE, open_run
from rlpost.types import ConfigError


def config(root: Path, **settings: object) -> RunConfig:
    return RunConfig(output_dir=str(root), **settings)  # type: ignore[arg-type]


def a_run(path: Path, *steps: int) -> Path:
    """What a former run left: its config, and complete checkpoints of these steps."""
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).write_text("x")
    for step in steps:
        complete(begin(path, step), {"step": step})
    return path


# ---- fresh runs ----------------------------------------------------------------------------------------------------


def test_two_runs_of_one_name_started_in_the_same_second_get_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20300102-030405")
    paths = [open_run(config(tmp_path, name="exp")).path for _ in range(3)]
    assert [path.name for path in paths] == ["exp-20300102-030405", "exp-20300102-030405-2", "exp-20300102-030405-3"]
    assert all(path.is_dir() for path in paths)


@pytest.mark.parametrize("exists", [False, True])
def test_run_dir_is_taken_when_it_is_new_or_empty(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "a" / "here"
    if exists:
        path.mkdir(parents=True)
    run = open_run(config(tmp_path, run_dir=str(path)))
    assert (run.path, run.checkpoint, run.warnings) == (path, None, ())
    assert path.is_dir()


def test_a_fresh_start_never_writes_into_a_directory_that_holds_something(tmp_path: Path) -> None:
    path = a_run(tmp_path / "here", 3)
    with pytest.raises(ConfigError, match=r"run_dir=.*here.*not empty.*resume=auto"):
        open_run(config(tmp_path, run_dir=str(path)))
    assert (path / CONFIG_FILE).read_text() == "x"


def test_run_dir_that_is_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        open_run(config(tmp_path, run_dir=str(tmp_path / "file")))


# ---- resume=PATH ---------------------------------------------------------------------------------------------------


def test_resuming_a_path_takes_its_newest_complete_checkpoint_and_warns_of_half_ones(tmp_path: Path) -> None:
    path = a_run(tmp_path / "r", 2, 4)
    begin(path, 6)
    run = open_run(config(tmp_path, resume=str(path)))
    assert run.path == path
    assert run.checkpoint is not None
    assert run.checkpoint.name == "step_000004"
    assert len(run.warnings) == 1


def test_resuming_what_is_no_run_or_has_no_checkpoint_is_a_user_error_that_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no run directory.*{CONFIG_FILE}.*nowhere"):
        open_run(config(tmp_path, resume=str(tmp_path / "nowhere")))
    path = a_run(tmp_path / "r")
    begin(path, 6)
    with pytest.raises(ConfigError, match=r"no complete checkpoint.*step_000006"):
        open_run(config(tmp_path, resume=str(path)))


# ---- resume=auto -----------------------------------------------------------------------------------------------------


def test_auto_takes_the_newest_run_of_the_name_that_has_a_complete_checkpoint(tmp_path: Path) -> None:
    """The newest died before its first checkpoint; the oldest was touched last, which does not make it newer."""
    oldest = a_run(tmp_path / "exp-20300101-000000", 8)
    middle = a_run(tmp_path / "exp-20300102-000000", 2, 4)
    half = a_run(tmp_path / "exp-20300103-000000")
    begin(half, 6)
    os.utime(oldest, (2e9, 2e9))
    run = open_run(config(tmp_path, name="exp", resume="auto"))
    assert (run.path, run.checkpoint) == (middle, middle / "checkpoints" / "step_000004")
    assert any("exp-20300103-000000" in warning for warning in run.warnings)


def test_auto_counts_attempts_as_numbers(tmp_path: Path) -> None:
    for attempt in ("", "-2", "-10"):
        a_run(tmp_path / f"exp-20300101-000000{attempt}", 1)
    assert open_run(config(tmp_path, name="exp", resume="auto")).path.name == "exp-20300101-000000-10"


@pytest.mark.parametrize("other", ["exp-big-20300101-000000", "exp-20300101-000000-backup", "exp-old", "experiment-20300101-000000"])
def test_auto_never_resumes_another_runs_checkpoint(tmp_path: Path, other: str) -> None:
    """A run called exp-big is not a run called exp."""
    a_run(tmp_path / other, 5)
    run = open_run(config(tmp_path, name="exp", resume="auto"))
    assert run.checkpoint is None
    assert run.path != tmp_path / other
    assert any("no complete checkpoint" in warning for warning in run.warnings)


def test_auto_with_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    path = a_run(tmp_path / "e[x]p-20300101-000000", 5)
    assert open_run(config(tmp_path, name="e[x]p", resume="auto")).path == path


def test_auto_starts_afresh_when_there_is_nothing(tmp_path: Path) -> None:
    run = open_run(config(tmp_path / "not there", name="exp", resume="auto"))
    assert run.checkpoint is None
    assert run.path.is_dir()


def test_auto_with_run_dir_goes_on_in_it(tmp_path: Path) -> None:
    path = a_run(tmp_path / "here", 3)
    run = open_run(config(tmp_path, run_dir=str(path), resume="auto"))
    assert (run.path, run.checkpoint) == (path, path / "checkpoints" / "step_000003")


def test_auto_with_run_dir_finds_the_attempt_that_it_began_beside_it(tmp_path: Path) -> None:
    """First try: dies before a checkpoint. Second: goes beside it, saves, dies. Third: must go on from the second's."""
    setting = config(tmp_path, run_dir=str(tmp_path / "here"), resume="auto")
    first = open_run(setting)
    assert first.path == tmp_path / "here"
    a_run(first.path)
    second = open_run(setting)
    assert second.path != first.path
    assert (first.path / CONFIG_FILE).read_text() == "x"
    a_run(second.path, 7)
    third = open_run(setting)
    assert (third.path, third.checkpoint) == (second.path, second.path / "checkpoints" / "step_000007")


def test_auto_with_run_dir_does_not_take_a_neighbour(tmp_path: Path) -> None:
    a_run(tmp_path / "here-2", 9)
    run = open_run(config(tmp_path, run_dir=str(tmp_path / "here"), resume="auto"))
    assert (run.path, run.checkpoint) == (tmp_path / "here", None)


def test_a_name_that_is_taken_a_hundred_times_is_an_error_and_no_endless_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "strftime", lambda _: "20300102-030405")
    for _ in range(100):
        open_run(config(tmp_path))
    with pytest.raises(ConfigError, match="99 like it"):
        open_run(config(tmp_path))
