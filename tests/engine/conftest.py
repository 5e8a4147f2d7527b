"""The engine that all tests of a module share; helpers are in engine_process.py, weight_sender.py and weight_versions.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess, engine_settings
from weight_sender import PlainModel, Sender
from weight_versions import Versions


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    """A started engine with the weights of tiny-sort5, version 0."""
    process = EngineProcess(engine_settings())
    yield process
    process.stop()


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    """What the engine begins with."""
    return PlainModel.load("tiny-sort5")


@pytest.fixture(scope="module")
def versions(engine: EngineProcess, plain: PlainModel, tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """The history of the module's engine, and its sender."""
    return Versions(engine, Sender(engine, plain.weights, directory=tmp_path_factory.mktemp("weights")), plain)


@pytest.fixture(autouse=True)
def _moving(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails may leave the core held or paused; the next one must not wait for it."""
    yield
    if "versions" in request.fixturenames:
        process = request.getfixturevalue("versions").engine
        for method in ("free", "resume") if process.settings.in_actor else ("resume",):
            process.call(method)
