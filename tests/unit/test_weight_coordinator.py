"""The driver's side of a weight sync: what moves over which links, how the two ends meet, what is counted and what is too much."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from virtual_time import play
from weight_fakes import TIMEOUT_S, FakeCore, FakeRank
from weight_world import World, assert_undisturbed, fake_ray, in_world

from rlpost.types import InfrastructureError, SyncRefusedError
from rlpost.weights.links import LinkSettings
from rlpost.weights.receiver import WeightReceiver
from rlpost.weights.sender import WeightSender

FULL_BYTES, TRAINED_BYTES, ELEMENT_BYTES = 48, 32, 8


# ---- what moves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "modes"),
    [
        ({}, ["full", "delta", "delta", "delta"]),
        ({"keyframe_every": 2}, ["full", "delta", "delta", "trained", "delta", "delta", "trained"]),
        ({"keyframe_every": 2, "frozen": False}, ["full", "delta", "delta", "full", "delta"]),
        ({"keyframe_every": 1, "carrier": "disk"}, ["full", "delta", "full", "delta"]),
        ({"deltas": False}, ["full", "trained", "trained"]),
        ({"deltas": False, "frozen": False}, ["full", "full", "full"]),
        ({"deltas": False, "carrier": "disk"}, ["full", "full", "full"]),
        ({"deltas": False, "adapters": True}, ["full", "adapter", "adapter"]),
    ],
)
def test_what_each_sync_moves(options: dict[str, Any], modes: list[str]) -> None:
    sizes = {"full": FULL_BYTES, "trained": TRAINED_BYTES, "delta": ELEMENT_BYTES, "adapter": 8 * ELEMENT_BYTES}

    async def scenario(world: World) -> None:
        reports = [await world.step(version) for version in range(1, len(modes))]
        assert ["full", *(report.mode for report in reports)] == modes
        assert [report.bytes for report in reports] == [sizes[mode] for mode in modes[1:]]
        for engine in world.live:
            assert_undisturbed(world, engine, fulls=modes[-1] == "full")

    in_world(scenario, **options)


def test_a_delta_that_does_not_pay_is_forgotten_and_everything_is_sent() -> None:
    async def scenario(world: World) -> None:
        dense = await world.step(1, changed=5)
        assert (dense.mode, dense.changed_fraction, dense.bytes) == ("trained", 5 / 8, TRAINED_BYTES)
        assert [rank.calls.count("forget_delta") for rank in world.ranks] == [1, 1]
        sparse = await world.step(2, changed=4)
        assert (sparse.mode, sparse.changed_fraction, sparse.bytes) == ("delta", 4 / 8, 4 * ELEMENT_BYTES)

    in_world(scenario, max_changed=0.5)


def test_an_empty_delta_moves_the_version_too() -> None:
    async def scenario(world: World) -> None:
        report = await world.step(1, changed=0)
        assert (report.mode, report.bytes, report.changed_fraction) == ("delta", 0, 0.0)

    in_world(scenario)


@pytest.mark.parametrize(
    ("options", "proven"),
    [
        ({"verify": "every_sync", "deltas": False}, [True, True, True, True, True]),
        ({"verify": "first"}, [True, False, False, False, False]),
        ({"verify": "every_n", "verify_every": 2}, [True, False, True, False, True]),
        ({"verify": "auto", "verify_every": 3}, [True, True, True, True, True]),
        ({"verify": "auto", "verify_every": 3, "deltas": False}, [True, False, False, True, False]),
    ],
)
def test_which_syncs_are_proven(options: dict[str, Any], proven: list[bool]) -> None:
    async def scenario(world: World) -> None:
        assert [True] + [(await world.step(version)).verified for version in range(1, 5)] == proven

    in_world(scenario, **options)


def test_what_a_sync_cost_is_that_of_its_slowest_part() -> None:
    async def scenario(world: World) -> None:
        report = await world.step(1)
        assert (report.version, report.apply_s, report.encode_s) == (1, 0.5, 1.0)
        assert report.seconds >= report.stage_s > 0
        assert report.engine_peak_memory_gib > 0

    in_world(scenario)


def test_the_settings_reach_the_trainer_and_the_links() -> None:
    async def scenario(world: World) -> None:
        assert world.opened == [("bfloat16", 1 << 22, True)] * 2
        link = world.links[0].settings
        assert (link.carrier, link.backend, link.timeout_s, link.directory, link.model_path) == (
            "disk",
            "nccl",
            TIMEOUT_S,
            "s3://here",
            "model",
        )

    options = {"engine_dtype": "bfloat16", "bucket_bytes": 1 << 22, "backend": "nccl", "directory": "s3://here", "model_path": "model"}
    in_world(scenario, carrier="disk", **options)


# ---- links -----------------------------------------------------------------------------------------------------------


def test_a_link_has_the_trainer_and_every_worker_of_every_engine_and_is_used_again() -> None:
    async def scenario(world: World) -> None:
        await world.step(1)
        [link] = world.links
        assert (link.settings.world, link.settings.sender) == (6, 0)
        assert link.members == {0: range(1, 2), 1: range(2, 4), 2: range(4, 6)}

    in_world(scenario, engines=(1, 2, 2))


def test_engines_that_share_gpus_with_trainers_are_linked_pairwise_to_them() -> None:
    async def scenario(world: World) -> None:
        report = await world.step(1)
        assert report.mode == "full", "a sleeping engine has lost its weights"
        assert [(link.settings.sender, link.settings.world, link.members) for link in world.links] == [
            (index, 2, {index: range(1, 2)}) for index in range(3)
        ]
        world.plan(1, "apply", "wrong")
        healed = await world.step(2)
        assert healed.fallbacks == {"wrong_fingerprint": 1}
        assert [(link.settings.sender, link.members) for link in world.links[3:]] == [(1, {1: range(1, 2)})]
        assert_undisturbed(world, 0, fulls=1)

    in_world(scenario, engines=(1, 1, 1), ranks=3, carrier="ipc", deltas=False, shared_gpu=True)


@pytest.mark.parametrize("fault", ["late", "stuck", "lost"])
def test_an_engine_that_does_not_come_to_the_link_is_left_out_and_the_others_get_their_delta(fault: str) -> None:
    async def scenario(world: World) -> None:
        world.plan(1, "stage", "error")  # the link is made anew
        await world.step(1)
        world.plan(1, "enter", fault)
        world.train(2)
        try:
            report = await world.sync.sync(2)
            assert report.mode == "delta"
            assert report.fallbacks == ({} if fault == "lost" else {"timeout": 1})
            world.assert_synced(2, 3)
        except InfrastructureError as error:
            assert fault == "stuck" and "engine-1 did not finish enter_link within 330 s" in str(error)
        assert world.live == [0, 2] if fault == "lost" else [0, 1, 2]
        assert_undisturbed(world, 0)
        assert_undisturbed(world, 2)

    in_world(scenario, engines=(1, 1, 1))


@pytest.mark.parametrize("carrier", ["collective", "ipc"])
def test_a_member_that_never_comes_is_a_broken_link_and_no_dead_trainer(carrier: str) -> None:
    """The real sender: what its join raises decides between healing the engines and ending the run."""
    sender = WeightSender.__new__(WeightSender)
    sender.rank, sender.device, sender.host = 0, torch.device("cpu"), "127.0.0.1"
    sender._doors, sender._outlets = {}, {}
    sender.serve([LinkSettings(name="engines-0", carrier=carrier, world=2, timeout_s=0.3)])
    with pytest.raises(SyncRefusedError, match="engines-0") as refused:
        sender.join("engines-0")
    assert refused.value.reason == "broken"


# ---- counting --------------------------------------------------------------------------------------------------------


def test_fallbacks_in_a_row_are_capped_over_several_syncs_and_a_good_sync_ends_the_row() -> None:
    async def scenario(world: World) -> None:
        for version, faults in enumerate([1, 1, 0, 1, 1], 1):
            world.plan(1, "stage", *["refuse"] * faults)
            assert (await world.step(version)).fallbacks == ({"corrupt": 1} if faults else {})
        world.plan(1, "apply", "wrong")
        world.train(6)
        with pytest.raises(InfrastructureError) as stop:
            await world.sync.sync(6)
        assert re.fullmatch(
            r"engine-1 needed a full weight sync 3 times in a row, more than weights\.max_consecutive_fallbacks=2: "
            r"\(1\) engine-1: .*damaged; \(2\) engine-1: .*damaged; \(3\) engine-1 holds .*",
            str(stop.value),
        )
        world.assert_not_synced(before=5, syncs=6)

    in_world(scenario, max_consecutive_fallbacks=2)


def test_engines_in_a_row_are_counted_each_by_itself() -> None:
    async def scenario(world: World) -> None:
        for version in range(1, 7):
            world.plan(version % 2, "stage", "refuse")
            assert (await world.step(version)).fallbacks == {"corrupt": 1}

    in_world(scenario, max_consecutive_fallbacks=1)


def test_engines_that_fail_together_are_healed_together_and_then_one_by_one() -> None:
    async def scenario(world: World) -> None:
        world.plan(0, "apply", "wrong", "wrong")
        world.plan(1, "stage", "refuse")
        world.plan(1, "apply", "wrong")
        report = await world.step(1)
        assert report.fallbacks == {"wrong_fingerprint": 3, "corrupt": 1}
        assert [sorted(link.members) for link in world.links] == [[0, 1, 2], [0, 1], [0], [1]]
        assert_undisturbed(world, 2)

    in_world(scenario, engines=(1, 1, 1))


# ---- the two ends meet -----------------------------------------------------------------------------------------------


def test_an_engine_whose_weights_cannot_be_changed_in_place_refuses_deltas_at_the_start_with_the_reason() -> None:
    async def scenario(world: World) -> None:
        world.packed[1] = "layers.0.mlp holds its weights packed"
        await world.connect()

    world = World()
    with (
        fake_ray(),
        pytest.raises(
            InfrastructureError,
            match=r"transport=delta.*engine-1 do not: layers\.0\.mlp holds its weights packed; use weights\.transport=collective",
        ),
    ):
        play(world.around(scenario(world)))


def test_such_an_engine_takes_whole_weights_and_says_that_its_proof_is_of_what_it_received() -> None:
    async def scenario(world: World) -> None:
        assert world.sync.proof == "live"
        world.plan(1, "apply", "lost")
        await world.step(1)
        world.packed[1] = "packed"
        await world.repair(1)
        assert world.sync.proof == "received"

    in_world(scenario, deltas=False)


def test_a_successor_with_another_layout_is_proven_by_its_own() -> None:
    async def scenario(world: World) -> None:
        world.plan(1, "apply", "lost")
        await world.step(1)
        world.pool.settings[1] = world.pool.settings[0].__class__(**{**vars(world.pool.settings[1]), "tensor_parallel": 2})
        await world.repair(1)
        world.assert_synced(1, 2)
        world.plan(1, "apply", "wrong")
        assert (await world.step(2)).fallbacks == {"wrong_fingerprint": 1}

    in_world(scenario)


# ---- the fakes -------------------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", [name for name in vars(FakeRank) if not name.startswith("_") and name not in ("call", "changed")])
def test_the_fake_rank_takes_the_calls_of_the_real_sender(name: str) -> None:
    assert parameters(getattr(FakeRank, name)) == parameters(getattr(WeightSender, name))


@pytest.mark.parametrize("name", ["describe", "enter", "begin_stage", "stage_done", "apply", "skip", "tensor_sums"])
def test_the_fake_vllm_takes_the_calls_of_the_real_receiver(name: str) -> None:
    assert parameters(getattr(FakeCore, f"_{name}")) == parameters(getattr(WeightReceiver, name))
