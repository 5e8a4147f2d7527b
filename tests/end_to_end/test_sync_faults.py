"""Faults of a weight sync among real processes: two vLLM engines, two trainer ranks, real Ray; requests run all the time.

After each fault either there is a clear error, or every live engine computes with the trainer's present weights and says so: its
outputs are compared with a plain model that got the weights on another way. Nowhere is a token of wrong weights.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from sync_cluster import ENGINES, NO_VERSION, Cluster, start_ray

from rlpost.cluster import session
from rlpost.types import InfrastructureError
from rlpost.weights import coordinator
from rlpost.weights.coordinator import WeightSync

TEST_TIMEOUT_S = 120.0
SHORT_S = 3.0
"""Deadline of a link whose end is awaited."""


class Shared:
    """The module's cluster and the event loop on which it lives."""

    def __init__(self, cluster: Cluster, runner: asyncio.Runner) -> None:
        self.cluster, self.runner = cluster, runner

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run a test's body, within a deadline."""
        self.runner.run(asyncio.wait_for(test, TEST_TIMEOUT_S))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    start_ray()
    with asyncio.Runner() as runner:
        cluster = Cluster(tmp_path_factory.mktemp("sync_faults"))
        try:
            runner.run(cluster.start())
            yield Shared(cluster, runner)
        finally:
            runner.run(cluster.stop())
            session.disconnect()


# ---- damage on the way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["collective", "ipc", "disk"])
def test_flipped_byte_in_a_delta_is_refused_and_that_engine_alone_gets_a_full_sync(shared: Shared, carrier: str) -> None:
    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(carrier=carrier)
        await cluster.engine(1, "arm", "buffer", "flip")
        async with cluster.traffic() as outcomes:
            report = await weights.sync(await cluster.change())
        assert (report.mode, dict(report.fallbacks)) == ("delta", {"corrupt": 1})
        first, second = [await cluster.engine(index, "take_received") for index in range(ENGINES)]
        assert first.keys() == {"delta"} and second == {"delta": first["delta"], "full": report.bytes - first["delta"]}
        await cluster.check_outcomes(outcomes)
        await cluster.check_synced(weights, cluster.version)

    shared.run(test(shared.cluster))


def test_flipped_byte_in_a_full_sync_is_found_by_the_fingerprint(shared: Shared) -> None:
    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(deltas=False, verify="every_sync")
        await cluster.engine(1, "arm", "buffer", "flip", 1)
        async with cluster.traffic() as outcomes:
            report = await weights.sync(await cluster.change())
        assert (report.mode, dict(report.fallbacks)) == ("full", {"wrong_fingerprint": 1})
        first, second = [await cluster.engine(index, "take_received") for index in range(ENGINES)]
        assert (first, second) == ({"full": report.bytes // 2}, {"full": report.bytes})
        await cluster.check_outcomes(outcomes)
        for index in range(ENGINES):
            await cluster.check_engine(index, cluster.version)

    shared.run(test(shared.cluster))


def test_write_that_is_lost_is_found_and_the_tensor_is_named(shared: Shared) -> None:
    """No fallback is allowed, so the sync stops; the engine without a version then answers nothing rather than something wrong."""

    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(max_consecutive_fallbacks=0)
        await cluster.engine(1, "arm", "piece", "lose", 2)
        version = await cluster.change()
        async with cluster.traffic() as outcomes:
            with pytest.raises(InfrastructureError) as stopped:
                await weights.sync(version)
        message = str(stopped.value)
        assert "engine-1" in message and "weights.max_consecutive_fallbacks=0" in message
        assert "different: 1 tensors, ['model." in message
        assert weights.version == version - 1
        await cluster.check_outcomes(outcomes, refused=True)
        await cluster.check_engine(0, version)
        with pytest.raises(InfrastructureError, match=NO_VERSION):
            await cluster.check_engine(1, version)

    shared.run(test(shared.cluster))


# ---- versions ----------------------------------------------------------------------------------------------------------


def test_engine_that_a_version_passed_by_gets_a_full_sync(shared: Shared) -> None:
    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect()
        cluster.pool.router.alive[1] = False
        await weights.sync(await cluster.change())
        cluster.pool.router.alive[1] = True
        await cluster.check_engine(0, cluster.version)
        await cluster.check_engine(1, cluster.version - 1)
        for index in range(ENGINES):
            await cluster.engine(index, "take_received")
        report = await weights.sync(await cluster.change())
        assert (report.mode, dict(report.fallbacks)) == ("delta", {"wrong_base": 1})
        assert report.seconds < weights.settings.timeout_s, "nobody waits for a deadline"
        first, second = [await cluster.engine(index, "take_received") for index in range(ENGINES)]
        assert first.keys() == {"delta"} and "full" in second
        await cluster.check_synced(weights, cluster.version)

    shared.run(test(shared.cluster))


def test_version_that_is_sent_twice_changes_nothing_the_second_time(shared: Shared) -> None:
    """The driver repeats a sync that one engine acknowledged and the other refused."""

    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(max_consecutive_fallbacks=0)
        await cluster.engine(1, "arm", "buffer", "refuse")
        version = await cluster.change()
        async with cluster.traffic() as outcomes:
            with pytest.raises(InfrastructureError, match=r"engine-1.*told to refuse"):
                await weights.sync(version)
            await cluster.check_engine(0, version)
            await cluster.check_engine(1, version - 1)
            report = await weights.sync(version)
        assert (report.mode, dict(report.fallbacks)) == ("delta", {})
        for index in range(ENGINES):
            assert (await cluster.engine(index, "take_received")) == {"delta": 2 * report.bytes}
        await cluster.check_outcomes(outcomes)
        again = await weights.sync(version)
        assert (again.mode, again.changed_fraction, dict(again.fallbacks)) == ("delta", 0.0, {})
        await cluster.check_synced(weights, version)

    shared.run(test(shared.cluster))


# ---- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", ["collective", "ipc"])
@pytest.mark.parametrize("place", ["buffer", "piece"])
def test_engine_that_refuses_a_delta_gets_a_full_sync_and_the_other_none(shared: Shared, carrier: str, place: str) -> None:
    """``buffer``: while it receives the delta; ``piece``: half way through its application."""

    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(carrier=carrier)
        await cluster.engine(1, "arm", place, "refuse", 0 if place == "buffer" else 5)
        async with cluster.traffic() as outcomes:
            report = await weights.sync(await cluster.change())
        assert (report.mode, dict(report.fallbacks)) == ("delta", {"broken": 1})
        assert report.seconds < weights.settings.timeout_s, "nobody waits for a deadline"
        first, second = [await cluster.engine(index, "take_received") for index in range(ENGINES)]
        assert first.keys() == {"delta"} and second.keys() == {"delta", "full"} and second["delta"] == first["delta"]
        await cluster.check_outcomes(outcomes)
        await cluster.check_synced(weights, cluster.version)

    shared.run(test(shared.cluster))


@pytest.mark.parametrize("carrier", ["collective", "ipc", "disk"])
def test_engine_that_refuses_half_way_through_a_full_sync_gets_another(shared: Shared, carrier: str) -> None:
    """The other engine may hang on the same broken link, but what it got is proven or sent again."""

    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(carrier=carrier, deltas=False, verify="every_sync")
        await cluster.engine(1, "arm", "piece", "refuse", 9)
        async with cluster.traffic() as outcomes:
            report = await weights.sync(await cluster.change())
        assert report.mode == "full" and report.fallbacks.keys() == {"broken"}
        assert report.seconds < weights.settings.timeout_s, "nobody waits for a deadline"
        await cluster.check_outcomes(outcomes)
        for index in range(ENGINES):
            await cluster.check_engine(index, cluster.version)

    shared.run(test(shared.cluster))


@pytest.mark.parametrize("moment", ["between stage and commit", "in mid-apply"])
def test_engine_that_is_killed_does_not_hold_up_the_sync_and_is_replaced(shared: Shared, moment: str) -> None:
    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect()
        if moment == "in mid-apply":
            await cluster.engine(1, "arm", "piece", "die", 5)
        else:
            cluster.pool.before["commit_weights", 1] = lambda: cluster.signal_engine(1)
        version = await cluster.change()
        async with cluster.traffic() as outcomes:
            report = await weights.sync(version)
            assert (report.mode, dict(report.fallbacks), weights.version) == ("delta", {}, version)
            assert cluster.pool.router.alive == [True, False] and cluster.pool.lost.is_set()
            await cluster.check_engine(0, version)
            assert await cluster.repair(weights, version) == (["engine-1"], {"restarted": 1})
        assert await cluster.engine(0, "take_received") == {"delta": report.bytes}
        assert (await cluster.engine(1, "take_received")).keys() == {"full"}
        await cluster.check_outcomes(outcomes)
        await cluster.check_synced(weights, version)

    shared.run(test(shared.cluster))


def test_engine_that_is_killed_in_the_middle_of_a_full_sync_is_replaced(shared: Shared) -> None:
    """The other one may have to be given everything again, for they share the link that broke."""

    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(deltas=False, verify="every_sync")
        await cluster.engine(1, "arm", "piece", "die", 9)
        version = await cluster.change()
        async with cluster.traffic() as outcomes:
            report = await weights.sync(version)
            assert report.mode == "full" and report.fallbacks.keys() <= {"broken"} and weights.version == version
            assert report.seconds < weights.settings.timeout_s, "nobody waits for a deadline"
            assert cluster.pool.router.alive == [True, False]
            await cluster.check_engine(0, version)
            assert await cluster.repair(weights, version) == (["engine-1"], {"restarted": 1})
        await cluster.check_outcomes(outcomes)
        for index in range(ENGINES):
            await cluster.check_engine(index, version)

    shared.run(test(shared.cluster))


# ---- a target that never answers -------------------------------------------------------------------------------------


async def connect_impatiently(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, fallbacks: int) -> WeightSync:
    monkeypatch.setattr(coordinator, "GRACE_S", 1.0)
    return await cluster.connect(timeout_s=SHORT_S, max_consecutive_fallbacks=fallbacks)


@pytest.mark.parametrize("asked", ["stage_weights", "apply_weights"])
def test_engine_that_never_answers_ends_the_sync_at_a_deadline_that_names_it(
    shared: Shared, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Its process stands still, or its apply never ends. The other engine is not harmed: it has the version and goes on."""

    async def test(cluster: Cluster) -> None:
        weights = await connect_impatiently(cluster, monkeypatch, 1)
        if asked == "stage_weights":
            cluster.pool.before[asked, 1] = lambda: cluster.signal_engine(1, signal.SIGSTOP)
        else:
            await cluster.engine(1, "arm", "piece", "hang", 5)
        version = await cluster.change()
        async with cluster.traffic() as outcomes:
            with pytest.raises(InfrastructureError) as stopped:
                await weights.sync(version)
            await cluster.check_engine(0, version)
            await cluster.signal_engine(1)
        message = str(stopped.value)
        assert f"engine-1 did not finish {asked} within 4 s" in message and "engine-0" not in message
        assert "weights.max_consecutive_fallbacks=1" in message
        assert (await cluster.engine(0, "take_received")).keys() == {"delta"}
        await cluster.check_outcomes(outcomes)

    shared.run(test(shared.cluster))


@pytest.mark.parametrize("place", ["buffer", "piece"])
def test_engine_that_answers_too_late_gets_a_full_sync(shared: Shared, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """What it was still staging or applying ends in the middle of its healing, and must not spoil it."""

    async def test(cluster: Cluster) -> None:
        weights = await connect_impatiently(cluster, monkeypatch, 3)
        await cluster.engine(1, "arm", place, "hang", 0 if place == "buffer" else 5)
        version = await cluster.change()
        cluster.pool.before["enter_link", 1] = lambda: cluster.engine(1, "release")
        async with cluster.traffic() as outcomes:
            report = await weights.sync(version)
        assert (report.mode, dict(report.fallbacks)) == ("delta", {"timeout": 1})
        assert (await cluster.engine(0, "take_received")).keys() == {"delta"}
        await cluster.check_outcomes(outcomes)
        await cluster.check_synced(weights, version)

    shared.run(test(shared.cluster))


# ---- the trainer -----------------------------------------------------------------------------------------------------


def test_full_disk_is_told_with_the_directory_and_the_sync_works_when_there_is_room(shared: Shared) -> None:
    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(carrier="disk")
        directory = cluster.directory / "weights"
        before = cluster.version
        await cluster.ranks("limit_files", 2048)
        version = await cluster.change()
        async with cluster.traffic() as outcomes:
            try:
                with pytest.raises(InfrastructureError) as stopped:
                    await weights.sync(version)
            finally:
                await cluster.ranks("limit_files", None)
            assert f"weights of version {version} could not be written to {directory}: File too large" in str(stopped.value)
            assert weights.version == before and [path.name for path in directory.iterdir()] == [f"version-{before:08d}"]
            for index in range(ENGINES):
                await cluster.check_engine(index, before)
            report = await weights.sync(version)
        assert (report.mode, dict(report.fallbacks)) == ("delta", {})
        assert [path.name for path in directory.iterdir()] == [f"version-{version:08d}"]
        await cluster.check_outcomes(outcomes)
        await cluster.check_synced(weights, version)

    shared.run(test(shared.cluster))


def test_trainer_killed_after_the_stage_is_named_and_the_engines_go_on_with_what_it_had_sent(shared: Shared) -> None:
    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect()
        version = await cluster.change()
        cluster.pool.before["apply_weights", 0] = lambda: cluster.kill_rank(1)
        async with cluster.traffic() as outcomes:
            with pytest.raises(InfrastructureError, match="trainer rank 1 died"):
                await weights.sync(version)
            cluster.lose_trainers()
            for index in range(ENGINES):
                await cluster.check_engine(index, version)
        assert weights.version == version - 1, "the policy version does not move without the trainer"
        await cluster.check_outcomes(outcomes)

    shared.run(test(shared.cluster))


def test_trainer_killed_in_the_middle_of_a_full_sync_leaves_an_engine_that_refuses_rather_than_guesses(shared: Shared) -> None:
    async def test(cluster: Cluster) -> None:
        weights = await cluster.connect(deltas=False)
        version = await cluster.change()
        await cluster.engine(0, "arm", "buffer", "hang", 1)
        async with cluster.traffic() as outcomes:
            syncing = asyncio.create_task(weights.sync(version))
            while await cluster.engine(0, "armed"):  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.01)
            await cluster.kill_rank(0)
            await cluster.engine(0, "release")
            with pytest.raises(InfrastructureError, match="trainer rank 0 died"):
                await syncing
            cluster.lose_trainers()
            with pytest.raises(InfrastructureError, match=NO_VERSION):
                await cluster.check_engine(0, version)
        assert weights.version == version - 1
        await cluster.check_outcomes(outcomes, refused=True)

    shared.run(test(shared.cluster))
