"""Whole runs of the command, as a user starts them: real Ray, real vLLM, real trainer ranks."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.observe import read_rollouts

RUN_TIMEOUT_S = 400


class Command:
    """``python -m rlpost.train`` in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a run in the background."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment.pop("RAY_ADDRESS", None)  # a cluster of the user's is not for tests
        return subprocess.Popen(
            [sys.executable, "-m", "rlpost.train", *arguments], cwd=self.directory, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run to the end; returns the output. Fails when the exit code is another one."""
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        except BaseException:  # too late, or the tests were interrupted: nothing may be left running
            process.kill()
            raise
        assert process.returncode == code, f"exit code {process.returncode}, expected {code}:\n{output[-4000:]}"
        return output

    @contextlib.contextmanager
    def watched(self, *arguments: str) -> Iterator[WatchedRun]:
        """A run in the background that a test follows line by line; it is ended with the block."""
        run = WatchedRun(self.start(*arguments))
        try:
            yield run
        finally:
            run.end()

    def run_directory(self, output: str) -> Path:
        """The directory that the last line names."""
        last = output.strip().splitlines()[-1]
        assert last.startswith("run: "), output[-2000:]
        return self.directory / last.removeprefix("run: ")


class WatchedRun:
    """A running command whose lines a test waits for. Every wait has a deadline."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for(self, text: str, timeout_s: float = RUN_TIMEOUT_S) -> None:
        """Return when a line holds ``text``; fail when the run ends or the time is over before."""
        deadline = time.monotonic() + timeout_s
        while (line := self._next(deadline)) is not None:
            if text in line:
                return
        raise AssertionError(f"the run ended (exit code {self.process.wait()}) without a line with {text!r}:\n{self.output[-4000:]}")

    def finish(self, code: int, timeout_s: float = RUN_TIMEOUT_S) -> str:
        """Wait for the end and return the whole output; fail when the exit code is another one."""
        deadline = time.monotonic() + timeout_s
        while self._next(deadline) is not None:
            continue
        found = self.process.wait(timeout=30)
        assert found == code, f"exit code {found}, expected {code}:\n{self.output[-4000:]}"
        return self.output

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill the driver if it still runs; Ray's processes follow it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _next(self, deadline: float) -> str | None:
        try:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"no line in time; so far:\n{self.output[-4000:]}") from None
        self.output += line or ""
        return line


def actors(run_dir: Path) -> dict[str, int]:
    """The living actors of a run, name (``engine-0``, ``trainer-1``) -> process: Ray's workers whose output goes to its logs."""
    logs = (run_dir / "logs").absolute()
    found: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            log = Path(os.readlink(process / "fd" / "1"))
            if log.parent == logs and (process / "cmdline").read_bytes().startswith(b"ray::"):
                found[log.stem] = int(process.name)
    return found


def wait_until_all_ended(run_dir: Path, timeout_s: float = 60.0) -> None:
    """Return when no actor of the run is left; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while left := actors(run_dir):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.2)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run as they stand in the file."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def step_records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of the training steps, without the evaluation before the first."""
    return [record for record in metrics(run_dir) if record["step"] > 0]


def rollouts(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The trajectories of one step, in whichever format they are."""
    [path] = (run_dir / "rollouts").glob(f"step_{step:06d}.*")
    return read_rollouts(path)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that came to its end, read once."""

    directory: Path
    output: str
    records: list[dict[str, Any]]
    """Of the training steps."""
    rollouts: dict[int, list[dict[str, Any]]]
    """The trajectories of each step."""


def finished_run(command: Command, *arguments: str, steps: int) -> Finished:
    """Run the command with ``arguments`` to its end, which is after ``steps`` steps."""
    output = command.run(*arguments, f"schedule.steps={steps}")
    directory = command.run_directory(output)
    by_step = {step: rollouts(directory, step) for step in range(1, steps + 1)}
    return Finished(directory=directory, output=output, records=step_records(directory), rollouts=by_step)
