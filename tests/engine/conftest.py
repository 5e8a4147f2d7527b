"""The engine that all tests of a module share; helpers are in engine_process.py and weight_sender.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess, engine_settings
from weight_sender import PlainModel, Sender


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """A started engine with the weights of tiny-sort5, version 0."""
    process = EngineProcess(engine_settings())
    yield process
    process.stop()


@pytest.fixture(scope="module")
def sender(engine: EngineProcess) -> Sender:
    """The other end of the module's engine."""
    return Sender(engine)


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    """What the engine begins with."""
    return PlainModel.load("tiny-sort5")
