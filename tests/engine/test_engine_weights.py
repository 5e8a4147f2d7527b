"""Weight syncs into a real engine: what it samples afterwards, what happens to running requests, and to syncs that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from engine_process import EngineProcess, make_request, random_prompts, succeeded
from weight_sender import TOLERANCE, PlainModel, Sender

from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError
from rlpost.weights import collective

SHORT_S = 2.0
SLACK_S = 30.0
"""Far more than the deadline, far less than gloo's half-hour default."""


class Versions:
    """The module's engine, its next version, and the model of each version that it ever had."""

    def __init__(self, engine: EngineProcess, sender: Sender, plain: PlainModel) -> None:
        self.engine, self.sender, self.plain = engine, sender, plain
        self.models: dict[int, PlainModel] = {0: plain}

    @property
    def current(self) -> int:
        return max(self.models)

    def prepare(self, model: PlainModel | None = None) -> int:
        """Note the next version's weights: a new variant of the start, unless given."""
        version = self.current + 1
        self.models[version] = model or self.plain.variant(version)
        return version

    def sync(self, model: PlainModel | None = None) -> int:
        version = self.prepare(model)
        self.sender.sync(self.models[version], version)
        return version

    def check(self, request: GenerateRequest, result: GenerateResult) -> None:
        """Every token has the logprob that the model of its stamped version gives to the whole sequence before it."""
        for version in np.unique(result.versions):
            mine = result.versions == version
            expected = self.models[int(version)].logprobs(request, result)
            np.testing.assert_allclose(result.logprobs[mine], expected[mine], atol=TOLERANCE, err_msg=f"tokens of version {version}")


@pytest.fixture(scope="module")
def versions(engine: EngineProcess, sender: Sender, plain: PlainModel) -> Versions:
    """The history of the module's engine."""
    return Versions(engine, sender, plain)


def requests_of(count: int, *, seed: int = 0, max_new_tokens: int = 12, temperature: float = 1.0) -> list[GenerateRequest]:
    prompts = random_prompts(count, seed=seed)
    return [make_request(p, seed=n, max_new_tokens=max_new_tokens, temperature=temperature) for n, p in enumerate(prompts)]


# ---- what comes after a sync -------------------------------------------------------------------------------------------


def test_before_any_sync_tokens_are_of_version_0(versions: Versions) -> None:
    requests = requests_of(4)
    for request, result in zip(requests, versions.engine.generate(requests), strict=True):
        assert set(result.versions.tolist()) == {0}
        versions.check(request, result)


def test_after_each_of_several_syncs_the_engine_equals_a_plain_model_with_these_weights(versions: Versions) -> None:
    """Transformed kernel layouts and a tied output layer that keeps its old packed weights would show; several bucket sizes."""
    before = versions.engine.generate(requests_of(6))
    for bucket_bytes in (64 << 20, 1, 100_000):
        versions.sender.bucket_bytes = bucket_bytes
        version = versions.sync()
        requests = requests_of(6, seed=version)
        for request, result in zip(requests, versions.engine.generate(requests), strict=True):
            assert set(result.versions.tolist()) == {version}
            versions.check(request, result)
            assert np.abs(versions.plain.logprobs(request, result) - result.logprobs).max() > 100 * TOLERANCE
    versions.sync(versions.plain)
    after = versions.engine.generate(requests_of(6))
    for one, other in zip(before, after, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


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


def test_running_requests_freeze_go_on_and_carry_both_versions(versions: Versions) -> None:
    """Between stage and commit nothing is sampled; afterwards the new weights see the whole sequence, not the old KV."""
    old = versions.current
    long = requests_of(16, seed=12, max_new_tokens=400, temperature=2.0)
    versions.engine.call("submit", long)
    marker = requests_of(1, seed=13, max_new_tokens=4, temperature=2.0)
    versions.engine.generate(marker)  # when it is done, the long ones have begun
    new = versions.prepare()
    versions.sender.stage(versions.models[new].weights, new)
    queued = requests_of(2, seed=14)
    versions.engine.call("submit", queued)
    versions.engine.call("drain", 0.1)  # what ended before the stage
    assert versions.engine.call("drain", 0.3) == 0
    versions.engine.call("commit_weights", new)
    results = [succeeded(outcome) for outcome in versions.engine.finish(long)]
    for request, result in zip(long, results, strict=True):
        assert (np.diff(result.versions) >= 0).all()
        assert set(result.versions.tolist()) <= {old, new}
        versions.check(request, result)
    assert any(set(result.versions.tolist()) == {old, new} for result in results)
    for request, outcome in zip(queued, versions.engine.finish(queued), strict=True):
        assert set(succeeded(outcome).versions.tolist()) == {new}
        versions.check(request, succeeded(outcome))


def test_a_flood_of_requests_during_three_syncs_gives_each_exactly_one_right_result(versions: Versions) -> None:
    first = versions.current
    requests = requests_of(200, seed=15, max_new_tokens=60, temperature=2.0)
    for start in range(0, 200, 50):
        versions.engine.call("submit", requests[start : start + 50])
        if start:
            versions.sync()
    results = [succeeded(outcome) for outcome in versions.engine.finish(requests)]
    assert versions.engine.call("drain", 0.3) == 0
    seen = set[int]()
    for request, result in zip(requests, results, strict=True):
        assert len(result.tokens)
        versions.check(request, result)
        seen |= set(result.versions.tolist())
    assert seen <= set(range(first, first + 4)) and first + 3 in seen and len(seen) > 1


# ---- syncs that fail ---------------------------------------------------------------------------------------------------


def sender_dies(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """The sender is gone after some of the buckets."""
    sender = versions.sender
    sender.bucket_bytes = 1
    sender.join()
    manifest = sender.manifest(weights, version)
    staging = versions.engine.begin("stage_weights", manifest)
    names = list(weights)
    for bucket in manifest.buckets[:5]:
        buffer = torch.zeros(collective.bucket_bytes(manifest, bucket), dtype=torch.uint8)
        for index, (_, view) in zip(range(*bucket), collective.views(buffer, manifest, bucket), strict=True):
            view.copy_(weights[names[index]])
        collective.broadcast(sender.group, buffer)
    sender.group = None
    staging.result(SLACK_S)


def sender_is_silent(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """The group is formed and nothing is ever sent."""
    versions.sender.join(SHORT_S)
    versions.engine.call("stage_weights", versions.sender.manifest(weights, version), timeout_s=SHORT_S + SLACK_S)


def sender_never_joins(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """The store is there, its other member never comes."""
    store = collective.serve_store("127.0.0.1", 2, SHORT_S)
    versions.engine.call("join_weights", "127.0.0.1", store.port, 1, 2, "gloo", SHORT_S, timeout_s=SHORT_S + SLACK_S)


def the_group_was_never_joined(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """A stage right after a join that failed."""
    with pytest.raises(InfrastructureError):
        sender_never_joins(versions, weights, version)
    versions.engine.call("stage_weights", versions.sender.manifest(weights, version))


def a_parameter_is_missing(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """All that is sent arrives; it is not all that the engine has."""
    versions.sender.join()
    versions.sender.stage({name: tensor for name, tensor in weights.items() if "layers.1.mlp" not in name}, version)


def a_part_of_a_fused_parameter_is_missing(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """The engine keeps query, key and value in one tensor: two thirds of it are not all of it."""
    versions.sender.join()
    versions.sender.stage({name: tensor for name, tensor in weights.items() if "layers.0.self_attn.k_proj" not in name}, version)


def a_name_is_unknown(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """A tensor that the engine's model does not have."""
    versions.sender.join()
    versions.sender.stage({"model.layers.7.mlp.down_proj.weight": torch.zeros(3), **weights}, version)


def a_shape_is_wrong(versions: Versions, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """A tensor of another size than the engine's."""
    versions.sender.join()
    versions.sender.stage({**weights, "model.norm.weight": torch.zeros(63)}, version)


FAILURES = [
    sender_dies,
    sender_is_silent,
    sender_never_joins,
    the_group_was_never_joined,
    a_parameter_is_missing,
    a_part_of_a_fused_parameter_is_missing,
    a_name_is_unknown,
    a_shape_is_wrong,
]


@pytest.mark.parametrize("fail", FAILURES)
def test_a_sync_that_fails_is_an_error_in_time_and_the_next_full_sync_heals_the_engine(
    versions: Versions, fail: Callable[[Versions, Mapping[str, torch.Tensor], int], None]
) -> None:
    """Running requests survive it; no token that half new weights sampled is handed out as one of a known version."""
    old, new = versions.current, versions.prepare()
    running = requests_of(8, seed=16, max_new_tokens=400, temperature=2.0)
    versions.engine.call("submit", running)
    versions.engine.generate(requests_of(1, seed=17, max_new_tokens=2))
    started = time.perf_counter()
    with pytest.raises(InfrastructureError, match="engine-0"):
        fail(versions, versions.models[new].weights, new)
    assert time.perf_counter() - started < SHORT_S + SLACK_S
    versions.sender.group, versions.sender.bucket_bytes = None, 64 << 20
    versions.sender.sync(versions.models[new], new)
    for request, outcome in zip(running, versions.engine.finish(running), strict=True):
        result = succeeded(outcome)
        assert set(result.versions.tolist()) <= {old, new}
        versions.check(request, result)
    fresh = requests_of(4, seed=18)
    for request, result in zip(fresh, versions.engine.generate(fresh), strict=True):
        assert set(result.versions.tolist()) == {new}
        versions.check(request, result)


def test_an_engine_that_is_resumed_half_new_refuses_what_it_samples(versions: Versions) -> None:
    """After a failed sync a driver may resume it to end; tokens of undefined weights must not look like the old version's."""
    new = versions.prepare()
    with pytest.raises(InfrastructureError):
        sender_dies(versions, versions.models[new].weights, new)
    versions.engine.call("resume")
    outcomes = versions.engine.outcomes(requests_of(3, seed=19))
    assert all(isinstance(outcome, InfrastructureError) for outcome in outcomes)
    versions.sender.group, versions.sender.bucket_bytes = None, 64 << 20
    versions.sender.sync(versions.models[new], new)
    fresh = requests_of(3, seed=20)
    for request, result in zip(fresh, versions.engine.generate(fresh), strict=True):
        versions.check(request, result)


def test_staged_weights_that_were_not_committed_are_replaced_by_the_next_sync(versions: Versions) -> None:
    """What a coordinator does when another engine's fingerprint was wrong."""
    versions.sender.stage(versions.plain.variant(1000).weights, 1000)
    version = versions.sync()
    requests = requests_of(3, seed=22)
    for request, result in zip(requests, versions.engine.generate(requests), strict=True):
        assert set(result.versions.tolist()) == {version}
        versions.check(request, result)


def test_resume_is_harmless_when_nothing_is_paused(versions: Versions) -> None:
    versions.engine.call("resume")
    request = requests_of(1, seed=21)
    versions.check(request[0], versions.engine.generate(request)[0])
