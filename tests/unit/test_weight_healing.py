"""Weight syncs fault by fault: an engine fails or dies, or the trainer does. Who is healed, who is left alone, what stops the run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from weight_fakes import TIMEOUT_S, UNDISTURBED_S
from weight_world import World, assert_undisturbed, in_world

from rlpost.types import InfrastructureError
from rlpost.weights.policy import Fallbacks

# ---- one engine fails ------------------------------------------------------------------------------------------------

OWN_FAULTS = [
    ("stage", "refuse", "corrupt", "the delta that came is damaged"),
    ("apply", "refuse", "missing", r"1 parameters never came: \['layer'\]"),
    ("apply", "error", "error", "apply went wrong"),
    ("apply", "late", "timeout", "did not finish apply_weights within 330 s"),
    ("apply", "wrong", "wrong_fingerprint", r"holds \['[0-9a-f]{32}'\] as version 1, .*different: 1 tensors, \['frozen'\]"),
    ("apply", "missing", "wrong_version", "acknowledged 2 tensors of version 1 instead of 3 of 1"),
    ("answer", "version", "wrong_version", "acknowledged 3 tensors of version 0 instead of 3 of 1"),
    ("commit", "error", "error", "commit went wrong"),
    ("commit", "late", "timeout", "did not finish commit_weights within 330 s"),
    ("resume", "error", "error", "resume went wrong"),
]


@pytest.mark.parametrize(("stage", "fault", "reason", "_message"), OWN_FAULTS)
@pytest.mark.parametrize("carrier", ["collective", "disk"])
def test_an_engine_that_fails_in_a_delta_is_healed_and_the_others_are_left_alone(
    stage: str, fault: str, reason: str, _message: str, carrier: str
) -> None:
    async def scenario(world: World) -> None:
        world.plan(1, stage, fault)
        report = await world.step(1)
        assert (report.mode, report.fallbacks) == ("delta", {reason: 1})
        assert world.cores[1].fulls == 1
        assert_undisturbed(world, 0)
        assert (await world.step(2)).fallbacks == {}, "what was healed takes part in the next delta"
        assert world.sync.fallbacks.reasons == {}

    in_world(scenario, carrier=carrier)


@pytest.mark.parametrize(("stage", "fault", "reason", "message"), OWN_FAULTS)
def test_what_an_engine_failed_of_is_told_when_it_may_not_be_healed(stage: str, fault: str, reason: str, message: str) -> None:
    async def scenario(world: World) -> None:
        world.plan(1, stage, fault)
        world.train(1)
        with pytest.raises(
            InfrastructureError, match=rf"^engine-1 needed a full weight sync 1 times in a row.*: \(1\) engine-1.*{message}"
        ) as stop:
            await world.sync.sync(1)
        assert "engine-0" not in str(stop.value), "only the engine at fault is named"
        world.assert_not_synced(before=0, syncs=1)

    in_world(scenario, max_consecutive_fallbacks=0)


@pytest.mark.parametrize("mode", [{}, {"deltas": False}, {"deltas": False, "adapters": True}, {"carrier": "disk"}])
def test_an_engine_that_missed_a_version_refuses_the_next_and_is_healed_alone(mode: dict[str, Any]) -> None:
    """One that was at its start again, and nobody noticed."""

    async def scenario(world: World) -> None:
        await world.step(1)
        world.set_back(1)
        report = await world.step(2)
        assert report.fallbacks == {"wrong_base": 1}
        assert_undisturbed(world, 0)

    in_world(scenario, **mode)


@pytest.mark.parametrize("mode", [{}, {"deltas": False}, {"carrier": "disk"}])
def test_a_version_that_comes_twice_does_no_harm(mode: dict[str, Any]) -> None:
    """What is sent are values, not differences: an engine that has them already takes them again."""

    async def scenario(world: World) -> None:
        world.train(1)
        world.plan(1, "commit", "error", "error")
        with pytest.raises(InfrastructureError, match="engine-1 needed a full weight sync 2 times in a row"):
            await world.sync.sync(1)
        world.assert_not_synced(before=0, syncs=1)
        assert [core.stamp for core in world.cores] == [1, -1], "one engine has the version, the other nothing that can be named"
        world.cores[0].pauses = world.cores[0].fulls = 0
        world.sync.fallbacks = Fallbacks(9)
        assert (await world.sync.sync(1)).fallbacks == {"wrong_base": 1}
        world.assert_synced(1, 2)
        assert_undisturbed(world, 0)

    in_world(scenario, max_consecutive_fallbacks=1, **mode)


@pytest.mark.parametrize("mode", [{}, {"deltas": False}, {"carrier": "disk"}])
@pytest.mark.parametrize(("fault", "counted"), [("error", {"error": 1}), ("late", {"timeout": 1}), ("lost", {})])
def test_an_engine_that_does_not_finish_its_requests_is_waited_for_alone(mode: dict[str, Any], fault: str, counted: dict[str, int]) -> None:
    """With weights.pause=drain."""

    async def scenario(world: World) -> None:
        world.plan(1, "drain", fault)
        assert (await world.step(1)).fallbacks == counted
        assert_undisturbed(world, 0)
        assert world.live == ([0] if fault == "lost" else [0, 1])

    in_world(scenario, drain=True, **mode)


def test_an_engine_that_is_slow_to_say_what_differs_keeps_no_other_paused() -> None:
    async def scenario(world: World) -> None:
        world.plan(1, "apply", "wrong")
        world.plan(1, "sums", "late")
        assert (await world.step(1)).fallbacks == {"wrong_fingerprint": 1}
        assert_undisturbed(world, 0)

    in_world(scenario)


@pytest.mark.parametrize("stage", ["stage", "apply", "commit"])
def test_an_engine_that_never_answers_is_named_within_the_deadlines_and_the_others_have_the_version(stage: str) -> None:
    async def scenario(world: World) -> None:
        world.plan(1, stage, "stuck")
        world.train(1)
        began = asyncio.get_running_loop().time()
        with pytest.raises(
            InfrastructureError, match=rf"^engine-1 .* 2 times in a row.*\(1\) engine-1 did not finish {stage}_weights within 330 s"
        ):
            await world.sync.sync(1)
        assert asyncio.get_running_loop().time() - began < 4 * TIMEOUT_S
        world.assert_not_synced(before=0, syncs=1)
        if stage != "stage":
            assert_undisturbed(world, 0)

    in_world(scenario, carrier="disk", max_consecutive_fallbacks=1)


# ---- engines die -----------------------------------------------------------------------------------------------------

MODES: list[dict[str, Any]] = [
    {},
    {"deltas": False},
    {"deltas": False, "frozen": False},
    {"carrier": "disk"},
    {"deltas": False, "adapters": True},
]


@pytest.mark.parametrize("stage", ["stage", "pause", "apply", "commit"])
@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_that_dies_in_a_sync_is_replaced_and_given_the_version_while_the_others_go_on(
    stage: str, options: dict[str, Any], eager: bool
) -> None:
    """Between stage and apply (as it pauses), in the middle of apply, and at the commit. ``eager``: the others have what it lacks."""

    async def scenario(world: World) -> None:
        world.plan(1, stage, "lost")
        await world.step(1)
        if not world.hits:
            return  # this mode has no such stage
        assert (world.live, world.pool.lost.is_set()) == ([0], True)
        before = (world.cores[0].pauses, world.cores[0].fulls)
        assert await world.repair(1) == {"restarted": 1}
        assert (world.live, world.pool.lost.is_set()) == ([0, 1], False)
        world.assert_synced(1, 2)
        assert (world.cores[0].pauses, world.cores[0].fulls) == before, "engine-0 has nothing to do with it"
        assert (await world.step(2)).fallbacks == {}

    in_world(scenario, eager=eager, **options)


def test_a_sync_goes_on_when_all_engines_died_and_their_successors_get_the_version() -> None:
    async def scenario(world: World) -> None:
        world.plan(0, "pause", "lost")
        world.plan(1, "apply", "lost")
        await world.step(1)
        assert world.live == []
        assert await world.repair(1) == {"restarted": 2}
        world.assert_synced(1, 2)

    in_world(scenario)


@pytest.mark.parametrize("stage", ["describe", "enter", "apply", "commit"])
def test_an_engine_that_dies_again_while_it_is_given_weights_is_still_to_be_replaced(stage: str) -> None:
    async def scenario(world: World) -> None:
        world.plan(1, "apply", "lost")
        await world.step(1)
        world.plan(1, stage, "lost")
        await world.repair(1)
        assert (world.live, world.pool.lost.is_set()) == ([0], True)
        assert await world.repair(1) == {"restarted": 1}
        world.assert_synced(1, 2)
        assert world.live == [0, 1]

    in_world(scenario)


def test_an_engine_that_dies_while_another_is_replaced_is_not_forgotten() -> None:
    async def scenario(world: World) -> None:
        world.plan(1, "apply", "lost")
        await world.step(1)

        async def give(gone: list[int]) -> None:
            await world.sync.give(gone, 1)
            world.kill(0)
            await world.pool.outcomes("resume", {0: ()}, timeout_s=1)

        await world.pool.repair(give)
        assert (world.live, world.pool.lost.is_set()) == ([1], True)
        await world.repair(1)
        assert world.live == [0, 1]
        world.assert_synced(1, 2)

    in_world(scenario)


# ---- the trainer fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODES)
def test_a_trainer_that_dies_in_a_sync_moves_no_version_and_leaves_no_engine_paused(options: dict[str, Any]) -> None:
    """At each of its calls: before anything was sent, in the middle, after every engine has staged, after every engine has committed."""
    calls: list[str] = []

    async def learn(world: World) -> None:
        before = len(world.ranks[0].calls)
        await world.step(1)
        calls.extend(world.ranks[0].calls[before:])

    in_world(learn, **options)
    assert calls[-1] == "advance" and len(calls) >= 2

    async def scenario(world: World) -> None:
        world.train(1)
        with pytest.raises(InfrastructureError, match="trainer rank 0 died in weights"):
            await world.sync.sync(1)
        world.assert_not_synced(before=0, syncs=1)

    for answered in range(len(calls)):

        async def dies(world: World, answered: int = answered) -> None:
            world.calls_to_live = answered
            await scenario(world)

        in_world(dies, **options)


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("eager", [False, True])
def test_a_link_that_breaks_on_the_trainers_side_is_made_again(options: dict[str, Any], eager: bool) -> None:
    async def scenario(world: World) -> None:
        world.broken_sends = 1
        report = await world.step(1)
        assert set(report.fallbacks) <= {"broken"}

    in_world(scenario, eager=eager, **options)


def test_a_link_that_breaks_again_and_again_stops_the_run_with_its_reason() -> None:
    async def scenario(world: World) -> None:
        world.broken_sends = 99
        world.train(1)
        with pytest.raises(InfrastructureError, match=r"engine-\d needed a full weight sync 4 times in a row.*no route to host"):
            await world.sync.sync(1)
        world.assert_not_synced(before=0, syncs=1)

    in_world(scenario)


def test_a_sync_that_is_cancelled_leaves_no_engine_paused() -> None:
    async def scenario(world: World) -> None:
        world.plan(1, "apply", "late")
        world.train(1)
        sync = asyncio.ensure_future(world.sync.sync(1))
        await asyncio.sleep(UNDISTURBED_S)
        assert [core.paused for core in world.cores] == [False, True]
        sync.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sync
        await asyncio.sleep(2 * TIMEOUT_S)
        assert [core.paused for core in world.cores] == [False, False]
        world.assert_not_synced(before=0, syncs=1)

    in_world(scenario)
