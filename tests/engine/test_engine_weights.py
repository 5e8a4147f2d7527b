"""Full weight syncs into a real engine: what it samples afterwards, what it proves, and what happens to running requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_process import make_request, random_prompts, succeeded
from weight_sender import TOLERANCE, Sender
from weight_versions import Versions, requests_of

from rlpost.types import GenerateRequest, GenerateResult

CARRIERS = ["collective", "ipc", "disk"]
FROZEN = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight")


def test_before_any_sync_tokens_are_of_version_0(versions: Versions) -> None:
    versions.check_serves(0)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_after_each_of_several_syncs_the_engine_equals_a_plain_model_with_these_weights(versions: Versions, carrier: str) -> None:
    """Transformed kernel layouts and a tied output layer that keeps its old packed weights would show; the bits are right besides."""
    versions.sender.join(carrier)
    for _ in range(3):
        before = versions.models[versions.current]
        version = versions.sync()
        requests = requests_of(6, seed=version)
        for request, result in zip(requests, versions.engine.generate(requests), strict=True):
            assert set(result.versions.tolist()) == {version}
            versions.check(request, result)
            assert np.abs(before.logprobs(request, result) - result.logprobs).max() > 100 * TOLERANCE
        versions.check_bits(version)


def test_a_sync_back_to_old_weights_gives_the_old_result_to_the_bit(versions: Versions) -> None:
    def ask() -> GenerateResult:  # one request: what is in a batch with others rounds as the batch does
        [result] = versions.engine.generate([make_request(random_prompts(1, 30, seed=6)[0], seed=1)])
        return result

    versions.sync(versions.plain)
    before = ask()
    versions.sync()
    between = ask()
    versions.sync(versions.plain)
    after = ask()
    assert before.tokens.tolist() == after.tokens.tolist()
    np.testing.assert_array_equal(before.logprobs, after.logprobs)
    assert before.logprobs.tolist() != between.logprobs.tolist()


@pytest.mark.parametrize("bucket_bytes", [1, 64 << 20])
def test_weights_are_whole_whether_they_come_row_by_row_or_all_at_once(versions: Versions, bucket_bytes: int) -> None:
    sender = Sender(versions.engine, versions.plain.weights, version=versions.current, bucket_bytes=bucket_bytes)
    version = versions.prepare()
    sender.sync(versions.models[version], version)
    versions.check_bits(version)
    versions.check_serves(version)
    versions.sender.describe()
    versions.sender.join("collective")


# ---- the proof ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameter",
    [
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.1.mlp.gate_up_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_one_flipped_bit_in_the_live_weights_changes_the_fingerprint_of_a_sync_that_does_not_touch_it(
    versions: Versions, parameter: str
) -> None:
    """The fingerprint is over what the engine computes with, not over what came: a stray write anywhere shows, and is named."""
    versions.sync()
    versions.engine.call("flip", parameter, 37)
    version = versions.prepare(versions.models[versions.current])
    plan = versions.sender.encode(version)
    versions.sender.stage(plan)
    acknowledgement = versions.sender.apply(plan)
    assert acknowledgement.fingerprints != versions.sender.fingerprints
    [held] = versions.engine.call("tensor_sums")
    right = versions.sender.sender.tensor_sums(0)
    assert len([name for name in right if held[name] != right[name]]) == 1
    versions.sender.sender.forget_delta()
    versions.sender.sync(versions.models[version], version)
    versions.check_serves(version)
    versions.check_bits(version)


def test_a_sync_of_what_is_trained_leaves_the_frozen_alone_and_proves_it_too(versions: Versions) -> None:
    """Only trained tensors travel; a frozen one that is damaged is found all the same, and healed by a full sync."""
    sender = Sender(versions.engine, versions.models[versions.current].weights, version=versions.current, frozen=FROZEN)
    version = versions.prepare(versions.models[versions.current])
    sender.sync(versions.models[version], version)
    full_bytes = sender.report.bytes
    moved = versions.plain.variant(99)
    for name, parameter in moved.model.named_parameters():
        if name in FROZEN:
            parameter.data.copy_(versions.models[version].weights[name])
    version = versions.prepare(moved)
    sender.sync(moved, version, mode="trained")
    frozen_bytes = sum(4 * sender.parameters[name].numel() for name in FROZEN)
    assert full_bytes - sender.report.bytes == frozen_bytes
    versions.check_bits(version)
    versions.check_serves(version)
    versions.engine.call("flip", "model.embed_tokens.weight", 5)
    version = versions.prepare(moved)
    acknowledgement = sender.apply(sender.plan(version, "trained"))
    assert acknowledgement.fingerprints != sender.fingerprints
    sender.sync(moved, version)
    versions.check_bits(version)
    versions.sender.describe()
    versions.sender.join("collective")
    versions.sync()


def test_a_sync_without_verification_proves_nothing_and_is_as_right(versions: Versions) -> None:
    version = versions.prepare()
    versions.sender.load(versions.models[version])
    acknowledgement = versions.sender.apply(versions.sender.plan(version, "full", verify=False))
    assert acknowledgement.fingerprints == () and versions.sender.report.sums == ()
    versions.sender.commit(version)
    versions.check_bits(version)


# ---- requests that a sync meets ----------------------------------------------------------------------------------------


def test_no_kv_of_the_old_weights_is_used_after_a_sync(versions: Versions) -> None:
    """A prefix cache that survives is silent: everything works, and logprobs are tenths off."""
    prompt = random_prompts(1, 100, seed=11)[0]

    def ask() -> tuple[GenerateRequest, GenerateResult]:
        request = make_request(prompt, seed=1)
        return request, versions.engine.generate([request])[0]

    ask()
    assert ask()[1].cached_tokens == 96
    versions.sync()
    request, result = ask()
    assert result.cached_tokens == 0
    versions.check(request, result)
    request, result = ask()
    assert result.cached_tokens == 96
    versions.check(request, result)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_running_requests_freeze_go_on_and_carry_both_versions(versions: Versions, carrier: str) -> None:
    """Between apply and commit nothing is sampled; afterwards the new weights see the whole sequence, not the old KV."""
    versions.sender.join(carrier)
    old = versions.current
    long = requests_of(16, seed=12, max_new_tokens=200, temperature=2.0)
    versions.engine.call("begin", long, 5)
    new = versions.prepare()
    versions.sender.load(versions.models[new])
    versions.sender.check(versions.sender.apply(versions.sender.plan(new, "full")), new)
    queued = requests_of(2, seed=14)
    versions.engine.call("submit", queued)
    versions.engine.call("free")
    versions.engine.call("take", 0.1)  # what ended before the sync
    assert versions.engine.call("take", 0.3) == 0
    versions.sender.commit(new)
    results = versions.check_all(long, {old, new})
    assert all((np.diff(result.versions) >= 0).all() for result in results)
    frozen = [result for result in results if len(result.tokens) > 5]
    assert len(frozen) > 8 and all((result.versions == old).sum() == 5 for result in frozen)
    versions.check_all(queued, {new})


def test_a_flood_of_requests_during_three_syncs_gives_each_exactly_one_right_result(versions: Versions) -> None:
    first = versions.current
    requests = requests_of(200, seed=15, max_new_tokens=60, temperature=2.0)
    for start in range(0, 200, 50):
        versions.engine.call("submit", requests[start : start + 50])
        if start:
            versions.sync()
    results = versions.check_all(requests, set(range(first, first + 4)))
    assert versions.engine.call("take", 0.3) == 0
    assert {int(result.versions[-1]) for result in results[150:]} == {first + 3}


def test_a_sync_that_was_applied_and_not_committed_is_replaced_by_the_next(versions: Versions) -> None:
    """What a driver does when the fingerprint was wrong."""
    plan = versions.sender.plan(1000, "full")
    versions.sender.load(versions.plain.variant(1000))
    versions.sender.apply(plan)
    versions.check_serves(versions.sync())


def test_the_same_full_sync_twice_is_harmless(versions: Versions) -> None:
    """A driver that missed the answer sends it again."""
    version = versions.sync()
    plan = replace(versions.sender.plan(version, "full"), base_version=version - 1)
    versions.sender.check(versions.sender.apply(plan), version)
    versions.sender.commit(version)
    versions.check_serves(version)


def test_resume_is_harmless_when_nothing_is_paused(versions: Versions) -> None:
    versions.engine.call("resume")
    versions.check_serves(versions.current)


def test_syncs_leave_no_old_versions_in_the_directory(versions: Versions, tmp_path: Path) -> None:
    """The newest, which every engine acknowledged, stays, a whole Hugging Face model; what is older would fill the disk."""
    from transformers import AutoModelForCausalLM

    versions.sender.directory = tmp_path / "weights"
    versions.sender.join("disk")
    versions.sync()
    version = versions.sync()
    [left] = versions.sender.directory.iterdir()
    assert left.name == f"version-{version:08d}"
    saved = dict(AutoModelForCausalLM.from_pretrained(left).named_parameters())
    for name, tensor in versions.models[version].weights.items():
        assert saved[name].equal(tensor)
    assert succeeded(versions.engine.outcomes(requests_of(1))[0]).versions[0] == version
