"""Weight syncs that fail: an error in time that says what is wrong, and no token of undefined weights.

After a full sync that failed the next one heals; a delta that is refused leaves the engine serving what it has.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import broken_syncs
import numpy as np
import pytest
import torch
from broken_syncs import SHORT_S
from weight_versions import Versions

from rlpost.types import SyncPlan, SyncRefusedError
from rlpost.weights import delta

FAILURES = [
    broken_syncs.sender_dies,
    broken_syncs.sender_with_ipc_dies,
    broken_syncs.sender_is_silent,
    broken_syncs.sender_with_ipc_is_silent,
    broken_syncs.version_never_appears,
    broken_syncs.sender_never_joins,
    broken_syncs.nobody_is_at_the_door,
    broken_syncs.the_link_was_never_joined,
    broken_syncs.file_is_cut,
    broken_syncs.file_is_of_another_model,
    broken_syncs.a_parameter_is_missing,
    broken_syncs.a_part_of_a_fused_parameter_is_missing,
    broken_syncs.a_name_is_unknown,
    broken_syncs.a_shape_is_wrong,
]


@pytest.mark.parametrize("fail", FAILURES)
def test_a_sync_that_fails_is_an_error_in_time_and_the_next_full_sync_heals_the_engine(
    versions: Versions, fail: broken_syncs.Failure
) -> None:
    broken_syncs.check_failure_and_healing(versions, fail)


def test_an_engine_that_is_resumed_half_new_refuses_what_it_samples(versions: Versions) -> None:
    broken_syncs.check_refusal_when_resumed_half_new(versions)


def test_bytes_that_changed_in_a_file_are_found_by_the_fingerprint(versions: Versions) -> None:
    """A file of the right size and header: only what the engine then holds tells that the disk lied."""
    version = versions.prepare()
    file = broken_syncs.written(versions, version)
    versions.sender.report = versions.sender.sender.send_weights(versions.sender.plan(version, "full"))
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    acknowledgement = versions.engine.call("apply_weights", versions.sender.plan(version, "full"))
    assert acknowledgement.fingerprints != versions.sender.fingerprints
    versions.sender.sync(versions.models[version], version)
    versions.check_serves(version)


# ---- deltas ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def synced(versions: Versions) -> Versions:
    """The module's engine, which had a full sync at least, so that there is something to tell a delta from."""
    if versions.current == 0:
        versions.sync()
    return versions


def test_a_delta_for_another_version_than_the_engine_has_is_refused_and_the_engine_serves_on(synced: Versions) -> None:
    """A version was dropped: patched onto older weights, the delta would give a mixture that nobody trained."""
    synced.sender.join("collective")
    held, dropped = synced.current, synced.prepare_sparse()
    synced.encode(dropped)
    synced.sender.advance(dropped)
    plan = synced.encode(synced.prepare_sparse())
    for step in (synced.sender.stage, synced.sender.apply):
        with pytest.raises(
            SyncRefusedError, match=f"has version {held}; the delta to version {plan.version} is for version {dropped}"
        ) as no:
            step(plan)
        assert no.value.reason == "wrong_base"
        synced.check_serves(held)
    synced.check_bits(held)
    synced.sender.sender.forget_delta()
    synced.sender.join("collective")
    synced.sender.sync(synced.models[plan.version], plan.version)
    synced.check_serves(plan.version)


PLACES = {"magic": 0, "format": 4, "digest": 10, "length": 25, "blob": 60, "middle": 0.5, "end": -1}


@pytest.mark.parametrize("place", PLACES)
def test_a_byte_that_flips_on_the_way_is_refused_and_the_engine_serves_on(synced: Versions, place: str) -> None:
    synced.sender.join("collective")
    held, version = synced.current, synced.prepare_sparse()
    plan = synced.encode(version)
    message = synced.sender.sender._message
    assert message is not None
    where = PLACES[place]
    at = int(where * len(message)) if isinstance(where, float) else where
    message[at] ^= 0x10
    check_refused(synced, plan, "corrupt", held)
    message[at] ^= 0x10
    finish(synced, plan)


def test_a_byte_that_flips_on_the_disk_is_refused_and_the_engine_serves_on(synced: Versions) -> None:
    synced.sender.join("disk")
    held, version = synced.current, synced.prepare_sparse()
    plan = synced.encode(version)
    synced.sender.sender.send_message(plan)
    file = Path(str(synced.sender.directory)) / f"version-{version:08d}" / "message.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    check_refused(synced, plan, "corrupt", held, send=False)
    file.write_bytes(content[:-3])
    check_refused(synced, plan, "broken", held, send=False)
    finish(synced, plan)


def test_a_sound_delta_of_another_model_is_refused_and_the_engine_serves_on(synced: Versions) -> None:
    """Its digest is right; its tensors are not the engine's."""
    synced.sender.join("collective")
    held, version = synced.current, synced.prepare_sparse()
    plan = synced.encode(version)
    one = np.zeros(1, np.int32)
    for tensor, numel in ((99, 8), (0, 77)):
        foreign = delta.TensorChange(tensor=tensor, numel=numel, indices=one, values=one.astype(np.uint32))
        blob = delta.join([delta.encode([foreign])])
        synced.sender.sender._message = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        check_refused(synced, replace(plan, message_bytes=len(blob)), "corrupt", held)
    finish(synced, synced.encode(version))


def test_a_sender_that_dies_before_the_delta_has_come_leaves_the_engine_serving(synced: Versions) -> None:
    for carrier in ("collective", "ipc"):
        synced.sender.join(carrier)
        held, version = synced.current, synced.prepare_sparse()
        staging = synced.engine.begin("stage_weights", synced.encode(version))
        synced.check_serves(held)
        synced.sender.close()
        with pytest.raises(SyncRefusedError, match="engine-0: stage_done failed") as caught:
            staging.result(60)
        assert caught.value.reason == "broken"
        synced.check_serves(held)
        synced.check_bits(held)
        synced.sender.join(carrier)
        finish(synced, synced.encode(version))


def test_a_delta_that_never_comes_ends_at_the_links_deadline(synced: Versions) -> None:
    for carrier in ("collective", "ipc", "disk"):
        synced.sender.join(carrier, SHORT_S)
        held, version = synced.current, synced.prepare_sparse()
        plan = synced.encode(version)
        check_refused(synced, plan, "broken", held, send=False)
        synced.sender.join(carrier)
        finish(synced, plan)


def test_what_was_staged_and_never_applied_is_not_taken_for_a_later_delta(synced: Versions) -> None:
    """The trainer died after the stage; a full sync came between. Applying without a stage of its own must not find the old one."""
    synced.sender.join("collective")
    synced.sender.stage(synced.encode(synced.prepare_sparse()))
    synced.sender.sender.forget_delta()
    version = synced.sync(synced.models[synced.current])
    later = synced.prepare_sparse()
    plan = synced.encode(later)
    with pytest.raises(SyncRefusedError, match="nothing is staged"):
        synced.sender.apply(plan)
    assert synced.current == version + 1
    synced.sender.sender.forget_delta()
    synced.sender.sync(synced.models[later], later)
    synced.check_bits(later)


def check_refused(versions: Versions, plan: SyncPlan, reason: str, held: int, *, send: bool = True) -> None:
    """Staging this delta fails for this reason, and the engine goes on with what it has."""
    staging = versions.engine.begin("stage_weights", plan)
    if send:
        versions.sender.sender.send_message(plan)
    with pytest.raises(SyncRefusedError, match="engine-0") as caught:
        staging.result(60)
    assert caught.value.reason == reason
    versions.check_serves(held)
    versions.check_bits(held)


def finish(versions: Versions, plan: SyncPlan) -> None:
    """The same delta, sound, is taken."""
    versions.sender.stage(plan)
    versions.sender.check(versions.sender.apply(plan), plan.version)
    versions.sender.commit(plan.version)
    versions.check_bits(plan.version)
    versions.check_serves(plan.version)
