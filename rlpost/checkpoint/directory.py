"""Checkpoint directories of a run: RUN/checkpoints/step_000040, complete only with its mark."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "COMPLETE"
DRIVER_STATE = "driver.json"
_NAME = re.compile(r"^step_(\d{6,})$")


def checkpoint_root(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def begin(run_dir: Path, step: int) -> Path:
    """An empty directory to write into; :func:`complete` gives it its name. What a crash left of it is removed."""
    partial = checkpoint_root(run_dir) / f"step_{step:06d}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def complete(partial: Path, driver_state: Mapping[str, Any]) -> Path:
    """Write the driver's state, make everything durable, rename, and put the completion mark last."""
    final = partial.with_suffix("")
    (partial / DRIVER_STATE).write_text(json.dumps(driver_state))
    for path in [*partial.rglob("*"), partial]:  # the trainer ranks' files too, or the mark could survive a power cut that they do not
        _make_durable(path)
    if final.exists():
        # The same step again (a resumed run that had no mark there): never remove a complete one.
        if (final / MARK).exists():
            shutil.rmtree(partial)
            return final
        shutil.rmtree(final)
    os.rename(partial, final)
    _make_durable(final.parent)
    (final / MARK).touch()
    _make_durable(final / MARK)
    _make_durable(final)
    return final


def _make_durable(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name; -1 for another name."""
    match = _NAME.match(directory.name)
    return int(match.group(1)) if match else -1


def find_newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and a warning for each newer one that is incomplete."""
    root = checkpoint_root(run_dir)
    if not root.is_dir():
        return None, []
    warnings: list[str] = []
    candidates = [d for d in root.iterdir() if step_of(d) >= 0 or d.suffix == ".partial"]
    for directory in sorted(candidates, key=lambda d: step_of(d.with_suffix("")), reverse=True):
        if directory.suffix != ".partial" and (directory / MARK).exists():
            return directory, warnings
        warnings.append(f"skipped {directory}: it has no completion mark, so the run was stopped while writing it")
    return None, warnings


def read_driver_state(directory: Path) -> dict[str, Any]:
    """The driver's part of a complete checkpoint."""
    state: dict[str, Any] = json.loads((directory / DRIVER_STATE).read_text())
    return state


def prune(run_dir: Path, keep: int) -> None:
    """Remove complete checkpoints but the newest ``keep``; the mark goes first, so a crash leaves no half one behind."""
    root = checkpoint_root(run_dir)
    done = sorted((d for d in root.iterdir() if step_of(d) >= 0 and (d / MARK).exists()), key=step_of)
    for directory in done[: max(0, len(done) - keep)]:
        (directory / MARK).unlink()
        shutil.rmtree(directory)
