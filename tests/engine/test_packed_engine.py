"""An engine that keeps its weights in another form (on a CPU: packed) gets them through vLLM's reload and proves what it received."""

from __future__ import annotations

from collections.abc import Iterator

import broken_syncs
import pytest
from engine_process import EngineProcess, engine_settings
from weight_sender import PlainModel, Sender
from weight_versions import Versions

from rlpost.types import SyncRefusedError


@pytest.fixture(scope="module")
def versions(plain: PlainModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    """The module's engine packs."""
    engine = EngineProcess(engine_settings(live_weights=False))
    yield Versions(engine, Sender(engine, plain.weights, directory=tmp_path_factory.mktemp("weights")), plain)
    engine.stop()


def test_it_says_that_it_can_only_prove_what_it_received_and_why(versions: Versions) -> None:
    [worker] = versions.sender.describe()
    assert worker["proof"] == "received" and "holds its weights packed" in worker["why"]


@pytest.mark.parametrize("carrier", ["collective", "ipc", "disk"])
def test_after_each_of_several_full_syncs_it_equals_a_plain_model_with_these_weights(versions: Versions, carrier: str) -> None:
    """The tied output layer keeps a packed copy of its own, which must be renewed too."""
    versions.sender.join(carrier)
    for _ in range(2):
        versions.check_serves(versions.sync())


def test_a_delta_is_refused_with_the_reason_and_a_full_sync_heals(versions: Versions) -> None:
    version = versions.prepare_sparse()
    versions.sender.load(versions.models[version])
    plan = versions.sender.encode(version)
    with pytest.raises(SyncRefusedError, match=r"single elements cannot be patched: .* holds its weights packed") as caught:
        versions.sender.stage(plan)
        versions.sender.apply(plan)
    assert caught.value.reason == "not_in_place"
    versions.sender.sender.forget_delta()
    versions.sender.join("collective")
    versions.sender.sync(versions.models[version], version)
    versions.check_serves(version)


def test_a_sync_of_only_what_is_trained_is_refused_by_the_names_of_the_rest_and_a_full_sync_heals(versions: Versions) -> None:
    """Its reload needs all parameters, and it cannot prove the bits of those that did not come."""
    frozen = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight")
    sender = Sender(versions.engine, versions.models[versions.current].weights, version=versions.current, frozen=frozen)
    version = versions.prepare()
    sender.join("collective")
    sender.load(versions.models[version])
    with pytest.raises(SyncRefusedError, match=r"2 parameters never came: .*embed_tokens.*layers\.1\.mlp\.down_proj"):
        sender.apply(sender.plan(version, "trained"))
    sender.sync(versions.models[version], version)
    versions.check_serves(version)


@pytest.mark.parametrize(
    "fail",
    [
        broken_syncs.sender_dies,
        broken_syncs.the_link_was_never_joined,
        broken_syncs.file_is_cut,
        broken_syncs.a_parameter_is_missing,
        broken_syncs.a_part_of_a_fused_parameter_is_missing,
        broken_syncs.a_name_is_unknown,
        broken_syncs.a_shape_is_wrong,
    ],
)
def test_a_reload_that_fails_leaves_an_engine_that_the_next_full_sync_heals(versions: Versions, fail: broken_syncs.Failure) -> None:
    """Layers that collected a part of the failed update must not take it for a part of the next."""
    broken_syncs.check_failure_and_healing(versions, fail)


def test_an_engine_that_is_resumed_half_new_refuses_what_it_samples(versions: Versions) -> None:
    broken_syncs.check_refusal_when_resumed_half_new(versions)
