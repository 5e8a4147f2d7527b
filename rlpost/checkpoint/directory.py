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
    _write_durably(partial / DRIVER_STATE, json.dumps(driver_state))
    if final.exists():
        # The same step again (a resumed run that had no mark there): never remove a complete one.
        if (final / MARK).exists():
            shutil.rmtree(partial)
            return final
        shutil.rmtree(final)
    os.rename(partial, final)
    _write_durably(final / MARK, "")
    return final


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name; -1 for another name."""
    match = _NAME.match(directory.name)
    return int(match.group(1)) if match else -1


def find_newest(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, and a warning for each newer one that is incomplete."""
    root = checkpoint_root(run_dir)
    if not root.is_dir():
        return None, []
    warnings = []
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
