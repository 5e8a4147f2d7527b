"""Tests of several nodes: a real Slurm, several raylets, network namespaces. Whole runs are started as in tests/end_to_end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# tests/ are no packages; this file is read before the tests that import from there.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "end_to_end"))

from training_runs import Command


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The train command, run in a fresh directory."""
    return Command(tmp_path)
