"""Whole runs of the command, as a user starts them: real Ray, real vLLM, real trainer ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN_TIMEOUT_S = 400


class Command:
    """``python -m rlpost.train`` in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a run in the background."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "rlpost.train", *arguments], cwd=self.directory, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run to the end; returns the output. Fails when the exit code is another one."""
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == code, f"exit code {process.returncode}, expected {code}:\n{output[-4000:]}"
        return output

    def run_directory(self, output: str) -> Path:
        """The directory that the last line names."""
        last = output.strip().splitlines()[-1]
        assert last.startswith("run: "), output[-2000:]
        return self.directory / last.removeprefix("run: ")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The train command, run in a fresh directory."""
    return Command(tmp_path)
