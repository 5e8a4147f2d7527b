"""Sparse deltas into a real engine, in float32 and bfloat16: every bit arrives, and generation goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_process import EngineProcess, engine_settings
from weight_sender import PlainModel, Sender
from weight_versions import Versions, requests_of

from rlpost.types import SyncMode
from rlpost.weights.buckets import total_bytes

CARRIERS = ["collective", "ipc", "disk"]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def versions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    """An engine of each dtype, after its first full sync."""
    engine = EngineProcess(engine_settings(dtype=request.param))
    plain = PlainModel.load("tiny-sort5", request.param)
    history = Versions(engine, Sender(engine, plain.weights, directory=tmp_path_factory.mktemp("weights")), plain)
    history.sync()
    yield history
    engine.stop()


# ---- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_after_each_of_several_deltas_the_engine_equals_a_plain_model_with_these_weights(versions: Versions, carrier: str) -> None:
    """Query, key and value in one tensor, gate and up in one, a tied output layer: all of them follow, and nothing else moves."""
    versions.sender.join(carrier)
    for _ in range(3):
        before = versions.models[versions.current]
        version = versions.prepare_sparse()
        versions.sender.sync(versions.models[version], version, "delta")
        assert versions.sender.report.bytes < 0.15 * total_bytes(versions.sender.sender.manifest)
        requests = requests_of(6, seed=version)
        results = versions.engine.generate(requests)
        for request, result in zip(requests, results, strict=True):
            assert set(result.versions.tolist()) == {version}
            versions.check(request, result)
        gaps = [np.abs(before.logprobs(q, r) - r.logprobs).max() for q, r in zip(requests, results, strict=True)]
        assert max(gaps) > versions.tolerance, "the old weights would not pass for the new ones"
        versions.check_bits(version)


def test_the_first_and_the_last_element_of_every_tensor_arrive_and_no_other_moves(versions: Versions) -> None:
    """An index that is off by one, or by a fused neighbour's size, lands next door."""
    model = versions.models[versions.current].copy()
    for parameter in model.model.parameters():
        parameter.data.view(-1)[[0, -1]] *= -3.0
    version = versions.prepare(model)
    versions.sender.sync(model, version, "delta")
    assert versions.sender.report.changed == 2 * len(list(model.model.parameters()))
    versions.check_bits(version)
    versions.check_serves(version)


VALUES = {
    "NaN with a payload": (1.5, 0x7FC1_2345),
    "NaN with a sign and a payload": (1.5, 0xFF9A_BCDE),
    "minus zero from zero": (0.0, 0x8000_0000),
    "zero from minus zero": (-0.0, 0x0000_0000),
    "sign alone": (2.25, 0xC010_0000),
    "four times as much, whose low bytes are equal": (0.3125, 0x3FA0_0000),
    "infinity": (1.0, 0x7F80_0000),
    "a subnormal": (1.0, 0x0001_0000),
}
"""What an element was, and the float32 bits that it becomes; all but the NaNs have the same value in bfloat16."""


def test_values_that_arithmetic_would_not_tell_apart_arrive_bit_for_bit(versions: Versions) -> None:
    """NaN is not NaN, -0.0 is 0.0, and 4x has the same mantissa: a comparison or a copy by value would lose them."""
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ]
    places = slice(7, 7 + len(VALUES))
    sound = versions.models[versions.current]
    before, after = sound.copy(), sound.copy()
    bits = torch.tensor([new for _, new in VALUES.values()], dtype=torch.int64).to(torch.int32)
    for name in names:
        before.model.get_parameter(name).data.view(-1)[places] = torch.tensor([old for old, _ in VALUES.values()])
        after.model.get_parameter(name).data.view(-1)[places].view(torch.int32).copy_(bits)
    versions.sync(before, "delta")
    versions.check_bits(versions.current)
    versions.sync(after, "delta")
    assert versions.sender.report.changed == len(names) * len(VALUES)
    versions.check_bits(versions.current)
    versions.sync(sound, "delta")
    versions.check_bits(versions.current)
    versions.check_serves(versions.current)


def test_only_what_changed_in_the_engines_dtype_travels(versions: Versions) -> None:
    """Most steps of an optimizer are below bfloat16's resolution; the rest of a step must not be forgotten, but add up."""
    start = versions.models[versions.current]
    dtype = getattr(torch, versions.engine.settings.dtype)
    for steps in (1, 8, 64):
        model = start.copy()
        for parameter in model.model.parameters():
            parameter.data.mul_(1.0 + steps * 2.0**-13)
        held, version = versions.models[versions.current], versions.prepare(model)
        versions.sender.sync(model, version, "delta")
        pairs = zip(held.model.parameters(), model.model.parameters(), strict=True)
        assert versions.sender.report.changed == sum(int((old.to(dtype) != new.to(dtype)).sum()) for old, new in pairs)
        if steps == 1:
            share = versions.sender.report.changed / versions.sender.report.compared
            assert share < 0.2 if dtype == torch.bfloat16 else share > 0.8
        versions.check_bits(version)
    versions.check_serves(versions.current)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_empty_delta_moves_nothing_but_the_version(versions: Versions, carrier: str) -> None:
    versions.sender.join(carrier)
    version = versions.sync(versions.models[versions.current], "delta")
    assert versions.sender.report.changed == 0 and versions.sender.report.bytes < 200
    versions.check_bits(version)
    versions.check_serves(version)


def test_deltas_and_full_syncs_may_follow_each_other_in_any_order(versions: Versions) -> None:
    """The sender's idea of what the engine holds must move with both."""
    modes: tuple[SyncMode, ...] = ("delta", "full", "full", "delta", "delta", "full", "delta")
    for mode in modes:
        version = versions.prepare_sparse()
        versions.sender.sync(versions.models[version], version, mode)
        versions.check_bits(version)


# ---- generation meanwhile ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_generation_goes_on_while_a_delta_is_staged(versions: Versions, carrier: str) -> None:
    """Requests are answered with the old weights before the delta has come, and after it has; a pause is only for the apply."""
    versions.sender.join(carrier)
    old, new = versions.current, versions.prepare_sparse()
    plan = versions.encode(new)
    staging = versions.engine.begin("stage_weights", plan)
    versions.check_serves(old)
    assert not staging.done()
    versions.sender.sender.send_message(plan)
    staging.result(60)
    versions.check_serves(old)
    versions.check_bits(old)
    running = requests_of(8, seed=31, max_new_tokens=60, temperature=2.0)
    versions.engine.call("begin", running, 5)
    versions.sender.check(versions.sender.apply(plan), new)
    versions.sender.commit(new)
    versions.engine.call("free")
    for result in versions.check_all(running, {old, new}):
        assert (result.versions[:5] == old).all() and (result.versions[5:] == new).all()
    versions.check_serves(new)


def test_the_same_delta_twice_is_harmless(versions: Versions) -> None:
    """A driver that missed the answer sends it again: values are absolute."""
    versions.sender.join("collective")
    version = versions.prepare_sparse()
    plan = versions.encode(version)
    for _ in range(2):
        versions.sender.stage(plan)
        versions.sender.check(versions.sender.apply(plan), version)
        versions.engine.call("commit_weights", version)
        versions.check_bits(version)
    versions.sender.advance(version)
    versions.check_serves(version)
