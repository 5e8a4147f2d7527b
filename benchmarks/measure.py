"""Runs of the train command with the CPU seconds of every process, by role, between two steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.05
ROLES = {"ray::RankActor": "trainer", "ray::VllmEngine": "engine", "rlpost.train": "driver", "rlpost.rewards": "rewards"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run cost between the end of step ``first`` and its last step, per step."""

    run_dir: Path
    steps: int
    cpu_s: dict[str, float]
    """CPU seconds a step by role; ``ray`` is everything that Ray itself runs."""
    wall_s: float
    records: list[dict[str, Any]]

    @property
    def cpu_total_s(self) -> float:
        """CPU seconds a step of all processes."""
        return sum(self.cpu_s.values())

    def mean(self, name: str) -> float:
        """Mean of a metric over the measured steps."""
        return sum(record[name] for record in self.records) / len(self.records)


def role_of(process: psutil.Process) -> str:
    """The role of a process by its command line."""
    line = " ".join(process.cmdline())
    return next((role for mark, role in ROLES.items() if mark in line), "ray")


def cpu_by_process(root: psutil.Process, roles: dict[int, str]) -> dict[int, float]:
    """CPU seconds so far of every process below ``root``."""
    result = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
            # A worker gets its role's name only when its actor starts.
            if roles.get(process.pid, "ray") == "ray":
                roles[process.pid] = role_of(process)
            result[process.pid] = times.user + times.system
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return result


def measure_run(arguments: Sequence[str], run_dir: Path, first: int) -> Measured:
    """Run ``python -m rlpost.train`` and measure it from the end of step ``first`` on."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rlpost.train", *arguments, f"run_dir={run_dir}"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    root = psutil.Process(process.pid)
    roles: dict[int, str] = {}
    snapshots: list[tuple[float, dict[int, float]]] = []
    metrics = run_dir / "metrics.jsonl"
    seen = 0
    while process.poll() is None:
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        if lines > seen:
            seen = lines
            snapshots.append((time.perf_counter(), cpu_by_process(root, roles)))
        time.sleep(POLL_S)
    output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise RuntimeError(f"the run failed with exit code {process.returncode}:\n{output[-3000:]}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    (start, before), (end, after) = snapshots[first - 1], snapshots[-1]
    steps = len(snapshots) - first
    cpu: dict[str, float] = {}
    for pid, seconds in after.items():
        cpu[roles[pid]] = cpu.get(roles[pid], 0.0) + (seconds - before.get(pid, 0.0)) / steps
    return Measured(run_dir=run_dir, steps=steps, cpu_s=cpu, wall_s=(end - start) / steps, records=records[first:])
