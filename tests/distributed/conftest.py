"""The processes that all tests of this folder share; helpers are in gloo_ranks.py and plain_models.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gloo_ranks import RankProcesses


@pytest.fixture(scope="session")
def processes() -> Iterator[RankProcesses]:
    """Long-lived processes for trainer ranks and a receiver; they end with the session."""
    started = RankProcesses()
    yield started
    started.close()
