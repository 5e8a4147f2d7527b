"""Where a step's record goes: any of the trackers in :data:`TRACKERS`, behind one ``log``.

A new tracker is one class with ``log``, ``truncate_after`` and ``close``, and one line in the catalogue.
Trackers whose package is missing, or that cannot start, are refused when they are made, before anything dear has started; one that
fails later is reported once and never ends the run. Only ``jsonl`` raises: it is the run's own record.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlpost.observe.console import Console
from rlpost.observe.metrics import METRICS_FILE, parse_record
from rlpost.types import ConfigError

Value = float | int | str

WANDB_FINISH_TIMEOUT_S = 120.0
"""An unreachable server holds the end of a run for no longer; what was not sent stays in the run directory."""
_WANDB_ID_FILE = "wandb-run-id"
_INSTALL = "pip install 'rlpost[trackers]'"

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives one record a step."""

    def log(self, record: Mapping[str, Value], step: int) -> None:
        """Take the record of ``step``; it is safe against a killed process when the call returns."""

    def truncate_after(self, step: int) -> None:
        """A resume continues after ``step``: records of later steps no longer hold. Called before the first ``log``."""

    def close(self) -> None:
        """Flush and let go."""


@dataclass(frozen=True, kw_only=True)
class TrackerContext:
    """What a tracker may need to start. ``config`` is the resolved configuration as plain containers."""

    run_dir: Path
    config: Mapping[str, Any]
    project: str
    run_name: str
    console: Console


class JsonlTracker:
    """Appends to ``run_dir/metrics.jsonl``, one JSON object a line; numbers that are not finite become null (JSON has none)."""

    def __init__(self, context: TrackerContext) -> None:
        self.path = context.run_dir / METRICS_FILE
        context.run_dir.mkdir(parents=True, exist_ok=True)
        self._open()

    def log(self, record: Mapping[str, Value], step: int) -> None:
        """Append and flush. Raises OSError when the file cannot be written."""
        line = {"step": step, **{name: _json_value(value) for name, value in record.items() if name != "step"}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Move the records of later steps, and torn lines, to ``metrics.jsonl.discarded-N`` (N counts up from 1).

        Each of the two files is replaced in one go, the discarded one first: a kill in between loses nothing.
        """
        self._file.close()
        kept: list[str] = []
        discarded: list[str] = []
        with self.path.open(encoding="utf-8") as lines:
            for line in lines:
                record = parse_record(line)
                (kept if record is not None and record["step"] <= step else discarded).append(line)
        if discarded:
            number = 1
            while (target := self.path.with_name(f"{self.path.name}.discarded-{number}")).exists():
                number += 1
            _replace(target, "".join(discarded))
            _replace(self.path, "".join(kept))
        self._open()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._file = self.path.open("a+", encoding="utf-8", newline="\n")
        end = self._file.tell()
        if end > 0:
            with self.path.open("rb") as existing:
                existing.seek(end - 1)
                torn = existing.read(1) != b"\n"
            if torn:  # a killed process's last line: the next record must not be glued to it
                self._file.write("\n")
                self._file.flush()


class ConsoleTracker:
    """Shows each record on the run's console."""

    def __init__(self, context: TrackerContext) -> None:
        self._console = context.console

    def log(self, record: Mapping[str, Value], step: int) -> None:
        """Show the step."""
        self._console.step({**record, "step": step})

    def truncate_after(self, step: int) -> None:
        """Nothing: what was shown was shown."""

    def close(self) -> None:
        """Nothing: the console belongs to the driver, who still has the run directory to print."""


class TensorboardTracker:
    """Scalars in ``run_dir/tensorboard``, written with TensorBoard's own package (no TensorFlow, no torch). Text is left out."""

    def __init__(self, context: TrackerContext) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        self._writer = EventFileWriter(str(context.run_dir / "tensorboard"))

    def log(self, record: Mapping[str, Value], step: int) -> None:
        """Write one event with all numbers and flush."""
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in record.items()
            if not isinstance(value, str) and name != "step"
        ]
        self._add(step, summary=self._summary(value=values))

    def truncate_after(self, step: int) -> None:
        """Write the mark that makes TensorBoard drop what an earlier process wrote for later steps."""
        self._add(step + 1, session_log=self._session(status=self._session.START))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **what))
        self._writer.flush()


class WandbTracker:
    """A wandb run in ``run_dir``; a resumed run continues the same wandb run (its id is kept in ``run_dir/wandb-run-id``).

    WANDB_MODE decides; without it the run is offline unless WANDB_API_KEY is set.
    """

    def __init__(self, context: TrackerContext) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from error
        mode = os.environ.get("WANDB_MODE")
        if not mode and not os.environ.get("WANDB_API_KEY"):
            mode = "offline"
            context.console.message(
                "wandb is offline, WANDB_API_KEY is not set (WANDB_MODE=online uses an earlier `wandb login`); "
                f"upload later: wandb sync {context.run_dir / 'wandb' / 'offline-run-*'}"
            )
        settings: dict[str, Any] = {"console": "off", "silent": True}
        if "finish_timeout" in wandb.Settings.model_fields:
            settings["finish_timeout"] = WANDB_FINISH_TIMEOUT_S
        context.run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=context.project,
                name=context.run_name,
                dir=str(context.run_dir),
                id=_wandb_id(context.run_dir),
                resume="allow",
                config=dict(context.config),
                mode=mode or "online",  # type: ignore[arg-type]  # the user's text: wandb itself refuses a wrong one
                settings=wandb.Settings(**settings),
            )
        except Exception as error:
            raise ConfigError(
                f"wandb could not start ({type(error).__name__}: {' '.join(str(error).split())}); "
                "set WANDB_MODE=offline, or take wandb out of observe.trackers"
            ) from error
        # the x-axis is our step: wandb's own counter only goes up, and would drop the steps that a resume redoes
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Mapping[str, Value], step: int) -> None:
        """Log all values under ``step``."""
        self._run.log({**record, "step": step})

    def truncate_after(self, step: int) -> None:
        """Nothing: wandb's history is append-only; redone steps appear again under the same ``step``."""

    def close(self) -> None:
        """Finish the wandb run, within WANDB_FINISH_TIMEOUT_S where this wandb can."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[TrackerContext], Tracker]] = {
    "console": ConsoleTracker,
    "jsonl": JsonlTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
}
"""The catalogue, by the names in ``observe.trackers``."""


class Trackers:
    """All trackers of a run. A failing one is reported once; ``jsonl`` comes first, so that its record is safe from the others."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None]) -> None:
        self._trackers = dict(sorted(trackers.items(), key=lambda item: item[0] != "jsonl"))
        self._warn = warn
        self._reported: set[str] = set()

    def log(self, record: Mapping[str, Value], step: int) -> None:
        """Give the record to every tracker. Raises only what ``jsonl`` raises."""
        plain = {name: _plain(value) for name, value in record.items()}
        self._each(lambda tracker: tracker.log(plain, step))

    def truncate_after(self, step: int) -> None:
        """Tell every tracker that the run continues after ``step``; before the first ``log`` of a resumed run."""
        self._each(lambda tracker: tracker.truncate_after(step))

    def close(self) -> None:
        """Close every tracker, whatever the others do."""
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        failure: Exception | None = None
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  # reported below; foreign code may raise anything
                if name == "jsonl":
                    failure = error
                elif name not in self._reported:
                    self._reported.add(name)
                    _log.info("traceback of tracker %s", name, exc_info=True)
                    self._warn(f"tracker {name} failed and may miss steps ({type(error).__name__}: {error}); training goes on")
        if failure is not None:
            raise failure


def make_trackers(
    names: Sequence[str], run_dir: Path, *, config: Mapping[str, Any], project: str, run_name: str, console: Console
) -> Trackers:
    """The trackers named, ready to log.

    Raises ConfigError for an unknown name (with the nearest known one), a missing package (with the extra to install), or a tracker
    that cannot start; those made before are closed again.
    """
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"observe.trackers has {name!r}; known are {', '.join(TRACKERS)}{hint}")
    context = TrackerContext(run_dir=run_dir, config=config, project=project, run_name=run_name, console=console)
    made: dict[str, Tracker] = {}
    try:
        for name in dict.fromkeys(names):
            made[name] = TRACKERS[name](context)
    except ConfigError:
        Trackers(made, console.warning).close()
        raise
    return Trackers(made, console.warning)


def _missing(name: str, error: ImportError) -> ConfigError:
    return ConfigError(f"tracker {name!r} needs a package that is not installed ({error}): {_INSTALL}, or take it out of observe.trackers")


def _plain(value: Any) -> Value:
    """A Python number or text; numpy's scalars are unwrapped."""
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def _json_value(value: Any) -> Value | None:
    value = _plain(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    """Make ``path`` hold ``text``, all of it or as it was before."""
    temporary = path.with_name(f".{path.name}.writing-{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _wandb_id(run_dir: Path) -> str:
    """The id of this run directory's wandb run, made on first use."""
    path = run_dir / _WANDB_ID_FILE
    if path.is_file() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    fresh = uuid.uuid4().hex[:16]
    _replace(path, fresh + "\n")
    return fresh
