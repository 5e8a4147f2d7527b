"""A crash at any moment: a directory without its mark is never resumed from, and the checkpoint before it stays whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.checkpoint import directory as module
from rlpost.checkpoint.directory import MARK, begin, checkpoint_root, complete, find_newest, prune, read_driver_state, step_of


def write(run: Path, step: int, content: str = "weights") -> Path:
    partial = begin(run, step)
    (partial / "tensors").mkdir()
    (partial / "tensors" / "shard").write_text(content)
    return complete(partial, {"step": step})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in checkpoint_root(run).iterdir())


class Crash(BaseException):
    """The power goes off."""


def test_a_complete_checkpoint_is_found_with_its_state_and_no_warning(tmp_path: Path) -> None:
    final = write(tmp_path, 40)
    assert final.name == "step_000040"
    assert find_newest(tmp_path) == (final, [])
    assert read_driver_state(final) == {"step": 40}
    assert (final / "tensors" / "shard").read_text() == "weights"
    assert names(tmp_path) == ["step_000040"]


def test_a_run_without_checkpoints_has_none_and_no_warning(tmp_path: Path) -> None:
    assert find_newest(tmp_path) == (None, [])


def test_newest_is_by_number_and_not_by_name_or_time(tmp_path: Path) -> None:
    newest = write(tmp_path, 1_000_000)
    write(tmp_path, 999_999)
    assert find_newest(tmp_path)[0] == newest


@pytest.mark.parametrize("moment", ["begin", "half written", "state", "rename", "mark"])
def test_a_crash_at_any_moment_leaves_the_checkpoint_before_it(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half one is skipped with a warning that names it; writing the same step again works and replaces it."""
    before = write(tmp_path, 20)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        if moment == "state":
            patch.setattr(module, "_make_durable", _raise)
        elif moment == "rename":
            patch.setattr(os, "rename", _raise)
        elif moment == "mark":
            patch.setattr(Path, "touch", _raise)
        partial = begin(tmp_path, 40)
        if moment == "begin":
            raise Crash
        (partial / "shard").write_text("half")
        if moment == "half written":
            raise Crash
        complete(partial, {"step": 40})
    found, warnings = find_newest(tmp_path)
    assert found == before
    assert read_driver_state(before) == {"step": 20}
    assert len(warnings) == 1
    assert "step_000040" in warnings[0]
    assert "no completion mark" in warnings[0]

    again = write(tmp_path, 40, "whole")
    assert find_newest(tmp_path) == (again, [])
    assert not (again / "shard").exists(), "nothing of the half one is left"


def _raise(*args: Any, **kwargs: Any) -> None:
    raise Crash


def test_only_a_half_written_checkpoint_is_none_with_a_warning(tmp_path: Path) -> None:
    begin(tmp_path, 10)
    found, warnings = find_newest(tmp_path)
    assert found is None
    assert len(warnings) == 1


def test_the_mark_is_the_last_thing_that_becomes_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a mark must not be there while shards that the trainer ranks wrote are not."""
    order: list[str] = []
    original = module._make_durable

    def watch(path: Path) -> None:
        order.append(path.name)
        original(path)

    monkeypatch.setattr(module, "_make_durable", watch)
    write(tmp_path, 7)
    mark = order.index(MARK)
    for name in ("shard", "tensors", "driver.json", "step_000007.partial", "checkpoints"):
        assert order.index(name) < mark
    assert order[mark + 1 :] == ["step_000007"]


def test_a_complete_checkpoint_is_never_replaced_by_another_of_the_same_step(tmp_path: Path) -> None:
    first = write(tmp_path, 5, "first")
    assert write(tmp_path, 5, "second") == first
    assert (first / "tensors" / "shard").read_text() == "first"
    assert names(tmp_path) == ["step_000005"]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_prune_keeps_the_newest_complete_checkpoints(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (3, 1, 4, 2):
        write(tmp_path, step)
    prune(tmp_path, keep)
    assert [step_of(checkpoint_root(tmp_path) / name) for name in names(tmp_path)] == left


def test_prune_does_not_count_incomplete_checkpoints_and_leaves_them(tmp_path: Path) -> None:
    """A half checkpoint with a higher number must not push the only whole one out."""
    whole = write(tmp_path, 1)
    unmarked = write(tmp_path, 2)
    (unmarked / MARK).unlink()
    begin(tmp_path, 3)
    prune(tmp_path, 1)
    assert find_newest(tmp_path)[0] == whole


def test_a_crash_in_prune_leaves_no_half_directory_with_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(module.shutil, "rmtree", _raise)
        prune(tmp_path, 1)
    assert not (checkpoint_root(tmp_path) / "step_000001" / MARK).exists()
    assert find_newest(tmp_path) == (checkpoint_root(tmp_path) / "step_000002", [])


def test_other_names_are_not_checkpoints(tmp_path: Path) -> None:
    newest = write(tmp_path, 3)
    for name in ("step_9", "step_000009_backup", "export"):
        (checkpoint_root(tmp_path) / name).mkdir()
        (checkpoint_root(tmp_path) / name / MARK).touch()
    assert find_newest(tmp_path) == (newest, [])
    prune(tmp_path, 1)
    assert "export" in names(tmp_path)
