"""Fixtures of the whole runs; helpers are in training_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import Command


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """The train command, run in a fresh directory."""
    return Command(tmp_path)
