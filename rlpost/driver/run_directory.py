"""Where a run lives, and where it resumes from. Nothing that exists is ever overwritten."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from rlpost.checkpoint.directory import find_newest
from rlpost.config.schema import RunConfig
from rlpost.types import ConfigError

CONFIG_FILE = "config.yaml"
ATTEMPT = ".attempt-"
"""Between run_dir and a number: where resume=auto begins again beside a run_dir that has no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """A run's directory; ``checkpoint`` is what to resume from, None for a fresh start."""

    path: Path
    checkpoint: Path | None
    warnings: tuple[str, ...] = ()


def open_run(config: RunConfig) -> RunDirectory:
    """Find the run to resume, or make a new directory.

    ``resume=auto`` takes the newest run of this name that has a complete checkpoint (or ``run_dir``), and starts afresh when there is
    none; a path must be a run directory. Raises ConfigError when a fresh start would write into an existing directory.
    """
    warnings: list[str] = []
    if config.resume not in ("never", "auto"):
        path = Path(config.resume)
        if not (path / CONFIG_FILE).exists():
            raise ConfigError(f"resume={config.resume!r} is no run directory: there is no {CONFIG_FILE} in {path.resolve()}")
        checkpoint, warnings = find_newest(path)
        if checkpoint is None:
            raise ConfigError(f"{path.resolve()} has no complete checkpoint to resume from; " + "; ".join(warnings))
        return RunDirectory(path=path, checkpoint=checkpoint, warnings=tuple(warnings))
    if config.resume == "auto":
        for path in _candidates(config):
            checkpoint, found = find_newest(path)
            warnings += found
            if checkpoint is not None:
                return RunDirectory(path=path, checkpoint=checkpoint, warnings=tuple(warnings))
        warnings.append("resume=auto found no complete checkpoint of this run; starting from the beginning")
    return RunDirectory(path=_fresh(config), checkpoint=None, warnings=tuple(warnings))


def _candidates(config: RunConfig) -> list[Path]:
    """Directories that may hold this run, newest first: those with a name that :func:`_fresh` gives, to the letter."""
    if config.run_dir is not None:
        root, pattern = Path(config.run_dir).parent, rf"({re.escape(Path(config.run_dir).name)})(?:{re.escape(ATTEMPT)}(\d+))?"
    else:
        # A run called NAME-other is another run.
        root, pattern = Path(config.output_dir), rf"{re.escape(config.name)}-(\d{{8}}-\d{{6}})(?:-(\d+))?"
    matches = [(match, path) for path in (root.iterdir() if root.is_dir() else ()) if (match := re.fullmatch(pattern, path.name))]
    found = [(match[1], int(match[2] or 1), path) for match, path in matches if (path / CONFIG_FILE).exists()]
    # By the date in the name and the attempt: a directory's modification time changes when somebody copies it.
    return [path for _, _, path in sorted(found, reverse=True)]


def _fresh(config: RunConfig) -> Path:
    if config.run_dir is not None:
        path = Path(config.run_dir)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run_dir={config.run_dir!r} is a file; choose another directory")
        if path.exists() and any(path.iterdir()):
            path = _beside(path) if config.resume == "auto" else path
            if path.exists():
                raise ConfigError(
                    f"run_dir={config.run_dir!r} exists and is not empty; resume it with resume=auto, or choose another directory"
                )
        path.mkdir(parents=True, exist_ok=True)
        return path
    base = Path(config.output_dir) / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(100):
        path = base if attempt == 0 else base.with_name(f"{base.name}-{attempt + 1}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise ConfigError(f"{base} and 99 like it exist already")


def _beside(path: Path) -> Path:
    """A run that died before its first checkpoint is kept as it is; the new one goes beside it."""
    return next(p for n in range(2, 1000) if not (p := path.with_name(f"{path.name}{ATTEMPT}{n}")).exists())


def write_config(run: RunDirectory, yaml: str) -> Path:
    """Keep the resolved config: as config.yaml, or beside it for each resume."""
    path = run.path / CONFIG_FILE
    if run.checkpoint is not None:
        name = f"config-resumed-{run.checkpoint.name}"
        path = next(p for n in range(1, 10000) if not (p := run.path / f"{name}-{n}.yaml").exists())
    path.write_text(yaml)
    return path
