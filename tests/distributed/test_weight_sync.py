"""The driver's side of a weight sync against fake engines and trainers: what is committed, resumed, repeated, refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.rollout.client import EngineLostError
from rlpost.types import InfrastructureError, SyncAcknowledgement, SyncReport, WeightsManifest
from rlpost.weights.coordinator import ATTEMPTS, WeightSync

RIGHT = "f" * 32
NAMES = ("a", "b", "c")
Fault = Callable[["FakeEngine", WeightsManifest], SyncAcknowledgement]


class FakeEngine:
    """Pauses in stage, resumes in commit; ``faults`` happen one a stage, in order, and then none."""

    def __init__(self, name: str, faults: list[Fault]) -> None:
        self.name, self.faults = name, faults
        self.version, self.paused, self.half_new = 0, False, False
        self.group: int | None = None
        self.generated_half_new = False

    def join_weights(self, _host: str, _port: int, rank: int, *_: Any) -> None:
        self.group = rank

    def stage_weights(self, manifest: WeightsManifest) -> SyncAcknowledgement:
        assert self.group is not None, "a group that broke off cannot be used again"
        self.paused = self.half_new = True
        if self.faults:
            return self.faults.pop(0)(self, manifest)
        return acknowledge(self, manifest)

    def commit_weights(self, version: int) -> None:
        self.version, self.paused, self.half_new = version, False, False

    def resume(self) -> None:
        self.generated_half_new |= self.half_new and self.paused
        self.paused = False


def acknowledge(engine: FakeEngine, manifest: WeightsManifest, **changes: Any) -> SyncAcknowledgement:
    return SyncAcknowledgement(
        **{"engine": engine.name, "version": manifest.version, "fingerprint": RIGHT, "tensors": len(manifest.names), **changes}
    )


def wrong_fingerprint(engine: FakeEngine, manifest: WeightsManifest) -> SyncAcknowledgement:
    return acknowledge(engine, manifest, fingerprint="0" * 32)


def missing_tensor(engine: FakeEngine, manifest: WeightsManifest) -> SyncAcknowledgement:
    return acknowledge(engine, manifest, tensors=len(manifest.names) - 1)


def wrong_version(engine: FakeEngine, manifest: WeightsManifest) -> SyncAcknowledgement:
    return acknowledge(engine, manifest, version=manifest.version - 1)


def refusal(engine: FakeEngine, manifest: WeightsManifest) -> SyncAcknowledgement:
    raise InfrastructureError(f"{engine.name} never received 1 parameters: ['c']")


def broken_connection(engine: FakeEngine, manifest: WeightsManifest) -> SyncAcknowledgement:
    engine.group = None
    raise InfrastructureError(f"{engine.name}: update_weights failed: RuntimeError: connection closed by peer")


def death(engine: FakeEngine, manifest: WeightsManifest) -> SyncAcknowledgement:
    raise EngineLostError(f"{engine.name} died in stage_weights")


FAULTS = [wrong_fingerprint, missing_tensor, wrong_version, refusal, broken_connection]


class FakePool:
    """As EnginePool: one call on every engine; a failure is raised at once, the others go on."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self.engines = engines
        self.settings = [SimpleNamespace(tensor_parallel=2 if index else 1) for index in range(len(engines))]
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        return await self.call_each(method, [args] * len(self.engines), timeout_s=timeout_s)

    async def call_each(self, method: str, arguments: list[Any], *, timeout_s: float) -> list[Any]:
        self.calls.append(method)

        async def one(index: int) -> Any:
            await asyncio.sleep(0)
            return getattr(self.engines[index], method)(*arguments[index])

        return list(await asyncio.gather(*(one(index) for index in range(len(self.engines)))))


class FakeTrainers:
    """As TrainerGroup. ``failures`` are raised one a send, in order; a send is slower than the engines' answers."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.sending = False
        self.connections = 0

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        assert not self.sending, f"{method} while a send is still under way"
        await asyncio.sleep(0)
        if method == "serve_weights":
            self.connections += 1
            self.world = args[0]
            return [("host", 1), ("", 0)]
        if method == "manifest":
            shapes = ((1,),) * len(NAMES)
            return [WeightsManifest(version=0, names=NAMES, shapes=shapes, dtypes=("float32",) * len(NAMES), buckets=((0, len(NAMES)),))]
        if method == "send_weights":
            self.sending = True
            await asyncio.sleep(0.01)
            self.sending = False
            if self.failures:
                raise self.failures.pop(0)
            return [(RIGHT, 12), ("", 12)]
        return [None, None]


class Case:
    """A coordinator over two engines, connected."""

    def __init__(self, faults: list[Fault], failures: list[Exception] | None = None) -> None:
        self.engines = [FakeEngine("engine-0", []), FakeEngine("engine-1", faults)]
        self.pool, self.trainers = FakePool(self.engines), FakeTrainers(failures or [])
        pool: Any = self.pool
        trainers: Any = self.trainers
        self.sync = WeightSync(trainers, pool, backend="gloo", engine_dtype="float32", bucket_bytes=1 << 20, timeout_s=5.0)

    def full(self, version: int) -> SyncReport:
        async def run() -> SyncReport:
            await self.sync.connect()
            return await self.sync.full(version)

        return asyncio.run(run())

    @property
    def versions(self) -> list[int]:
        return [engine.version for engine in self.engines]


def test_a_sync_commits_the_version_on_every_engine_after_all_fingerprints_agree() -> None:
    case = Case([])
    report = case.full(7)
    assert (report.version, report.bytes, report.fingerprint) == (7, 12, RIGHT)
    assert case.versions == [7, 7]
    assert [engine.paused for engine in case.engines] == [False, False]
    assert case.pool.calls == ["join_weights", "stage_weights", "commit_weights"]
    assert case.sync.repeats == 0
    assert case.trainers.world == 4, "trainer rank 0, one worker of engine 0, two of engine 1"
    assert [engine.group for engine in case.engines] == [1, 2], "the first rank of each engine"


@pytest.mark.parametrize("fault", FAULTS)
def test_one_failed_attempt_is_repeated_over_a_new_group_and_counted(fault: Fault) -> None:
    """Also a refusal: the next attempt is a full sync of all engines, not of the one that refused."""
    case = Case([fault])
    assert case.full(3).version == 3
    assert case.versions == [3, 3]
    assert case.sync.repeats == 1
    assert case.trainers.connections == 2
    assert case.pool.calls.count("stage_weights") == 2
    assert case.pool.calls.count("commit_weights") == 1, "nothing may be committed before all engines agree"
    assert not any(engine.generated_half_new for engine in case.engines), "engines went on with half new weights between the attempts"


@pytest.mark.parametrize("fault", FAULTS)
def test_repeated_failures_move_no_version_resume_the_engines_and_say_why(fault: Fault) -> None:
    case = Case([fault] * ATTEMPTS)
    with pytest.raises(
        InfrastructureError, match=rf"weight sync to version 3 failed {ATTEMPTS} times: attempt 1: .*engine-1.*attempt 2:"
    ) as caught:
        case.full(3)
    assert "engine-0" not in str(caught.value), "only the engine at fault is named"
    assert case.versions == [0, 0]
    assert "commit_weights" not in case.pool.calls
    assert [engine.paused for engine in case.engines] == [False, False]
    assert case.sync.repeats == ATTEMPTS - 1
    assert case.full(4).version == 4, "the next full sync heals it"
    assert case.versions == [4, 4]


def test_a_sender_that_fails_in_the_middle_is_repeated_and_then_named() -> None:
    error = InfrastructureError("trainer rank 0 failed in send_weights: boom")
    case = Case([], [error])
    assert case.full(1).version == 1
    assert case.sync.repeats == 1
    case = Case([], [error] * ATTEMPTS)
    with pytest.raises(InfrastructureError, match="attempt 1: trainer rank 0 failed in send_weights: boom"):
        case.full(1)
    assert case.versions == [0, 0]
    assert [engine.paused for engine in case.engines] == [False, False]


def test_an_engine_that_dies_is_raised_as_lost_and_the_others_wait_paused_for_the_next_full_sync() -> None:
    """Its death also breaks the sender: what the driver can repair must come first. The rest must not go on half new."""
    case = Case([death], [InfrastructureError("trainer rank 0 failed in send_weights: connection reset")])
    with pytest.raises(EngineLostError, match="engine-1 died"):
        case.full(1)
    assert case.versions == [0, 0]
    assert not any(engine.generated_half_new for engine in case.engines)
    assert case.full(1).version == 1
    assert [engine.paused for engine in case.engines] == [False, False]


def test_an_engine_that_fails_in_commit_gets_a_full_sync_again() -> None:
    """Half of the engines committed: all must end at the version, by a whole new sync."""
    case = Case([])
    commit = case.engines[1].commit_weights
    failures = [InfrastructureError("engine-1: finish_weight_update failed: boom")]

    def commit_or_fail(version: int) -> None:
        if failures:
            raise failures.pop()
        commit(version)

    case.engines[1].commit_weights = commit_or_fail  # type: ignore[method-assign]
    assert case.full(2).version == 2
    assert case.versions == [2, 2]
    assert case.sync.repeats == 1
    assert case.pool.calls.count("stage_weights") == 2
