"""What the engine samples: its logprobs, seeds, ends and errors; the prefix cache of groups and turns."""

from __future__ import annotations

import time

import numpy as np
import pytest
from engine_process import END_TOKEN, EngineProcess, engine_settings, make_request, random_prompts, succeeded
from weight_sender import TOLERANCE, PlainModel, Sender

from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_distribution_that_was_sampled(
    engine: EngineProcess, plain: PlainModel, temperature: float
) -> None:
    """Raw logprobs at temperature 0.6 are off by tenths, and every importance ratio with them."""
    requests = [make_request(prompt, temperature=temperature, seed=n) for n, prompt in enumerate(random_prompts(24))]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert len(result.tokens) and result.prompt_tokens == len(request.tokens)
        np.testing.assert_allclose(result.logprobs, plain.logprobs(request, result), atol=TOLERANCE)


def test_greedy_takes_the_most_probable_token_and_gives_its_untempered_logprob(engine: EngineProcess, plain: PlainModel) -> None:
    requests = [make_request(prompt, temperature=0.0) for prompt in random_prompts(12, seed=1)]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        distribution = plain.distribution(request, result, 1.0)
        assert result.tokens.tolist() == distribution.argmax(-1).tolist()
        np.testing.assert_allclose(result.logprobs, distribution.max(-1).values.numpy(), atol=TOLERANCE)


# ---- seeds -------------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(engine: EngineProcess) -> None:
    """Resume depends on it: the neighbours in a batch are never the same twice."""
    prompt = random_prompts(1, 20, seed=2)[0]

    def seeded(seed: int) -> GenerateRequest:
        return make_request(prompt, seed=seed, temperature=1.3)

    alone = [engine.generate([seeded(seed)])[0] for seed in (1, 2, 3)]
    others = [make_request(other, seed=100 + n) for n, other in enumerate(random_prompts(40, seed=3))]
    crowd = engine.generate([*others[:20], seeded(1), seeded(2), *others[20:], seeded(3)])
    beside = [crowd[20], crowd[21], crowd[-1]]
    for one, other in zip(alone, beside, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)
    assert len({tuple(result.tokens.tolist()) for result in alone}) == 3, "another seed is another sample"


# ---- prefix cache ------------------------------------------------------------------------------------------------------


def test_samples_of_a_group_share_the_prompts_kv_and_a_second_turn_reuses_the_first(engine: EngineProcess, plain: PlainModel) -> None:
    """64 prompt tokens are two blocks of 32; the engine computes the last block of a full hit again."""
    engine.call("reset_prefix_cache")
    prompt = random_prompts(1, 64, seed=4)[0]
    group = [make_request(prompt, seed=n, max_new_tokens=40) for n in range(8)]
    first = engine.generate(group)
    assert sorted(result.cached_tokens for result in first) == [0] + [32] * 7
    request, result = max(zip(group, first, strict=True), key=lambda pair: len(pair[1].tokens))
    turn = make_request([*request.tokens, *result.tokens.tolist(), *random_prompts(1, 10, seed=5)[0]], seed=9)
    [second] = engine.generate([turn])
    assert second.cached_tokens >= 64
    assert second.prompt_tokens == len(turn.tokens)
    np.testing.assert_allclose(second.logprobs, plain.logprobs(turn, second), atol=TOLERANCE)
    engine.call("reset_prefix_cache")
    assert engine.generate([make_request(prompt, seed=0)])[0].cached_tokens == 0


# ---- ends and errors ---------------------------------------------------------------------------------------------------


def test_each_of_several_end_tokens_ends_and_is_itself_a_sampled_token(engine: EngineProcess, plain: PlainModel) -> None:
    """Only the first of the declared end tokens known would let samples run on; an end without logprob could not be trained."""
    ends = (END_TOKEN, 40, 60)
    requests = [
        make_request(prompt, seed=n, temperature=2.0, max_new_tokens=200, stop_token_ids=ends)
        for n, prompt in enumerate(random_prompts(60, 5, seed=6))
    ]
    results = engine.generate(requests)
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert {int(result.tokens[-1]) for result in stopped} == set(ends)
    for request, result in zip(requests, results, strict=True):
        assert not set(result.tokens[:-1].tolist()) & set(ends)
        np.testing.assert_allclose(result.logprobs, plain.logprobs(request, result), atol=TOLERANCE)


def test_the_limit_of_new_tokens_is_exact_and_named_length(engine: EngineProcess) -> None:
    requests = [make_request(prompt, seed=3, temperature=2.0, max_new_tokens=limit) for limit, prompt in enumerate(random_prompts(7), 1)]
    results = engine.generate(requests)
    assert any(result.finish_reason == "length" for result in results)
    for request, result in zip(requests, results, strict=True):
        assert len(result.tokens) <= request.sampling.max_new_tokens
        if result.finish_reason == "length":
            assert len(result.tokens) == request.sampling.max_new_tokens
        else:
            assert result.tokens[-1] == END_TOKEN


def test_a_prompt_that_is_too_long_is_the_error_of_that_request_only(engine: EngineProcess) -> None:
    good = [make_request(prompt, seed=1) for prompt in random_prompts(4)]
    bad = make_request([10] * 700)
    outcomes = engine.outcomes([*good[:2], bad, *good[2:]])
    error = outcomes.pop(2)
    assert isinstance(error, InfrastructureError)
    assert bad.request_id in str(error) and "700" in str(error)
    assert all(len(succeeded(outcome).tokens) for outcome in outcomes)
    assert len(engine.generate([make_request([10, 11], seed=1)])[0].tokens)


def test_aborted_requests_give_no_result_and_hold_up_nobody(engine: EngineProcess) -> None:
    keep = [make_request(prompt, seed=n, temperature=2.0, max_new_tokens=60) for n, prompt in enumerate(random_prompts(4, 5, seed=7))]
    drop = [make_request(prompt, seed=n, temperature=2.0, max_new_tokens=600) for n, prompt in enumerate(random_prompts(4, 5, seed=8))]
    engine.call("submit", [*keep, *drop])
    engine.call("abort", [request.request_id for request in drop] + ["never-seen"])
    assert all(len(succeeded(outcome).tokens) for outcome in engine.finish(keep))
    assert engine.call("take", 1.0) == 0
    assert len(engine.generate([make_request([10, 11], seed=1)])[0].tokens)


def test_asleep_it_only_queues_and_awake_it_answers(engine: EngineProcess) -> None:
    """Colocated placement: while the trainer works, no request may run, none may get lost, and sleeping twice is harmless."""
    engine.call("sleep")
    engine.call("sleep")
    requests = [make_request(prompt, seed=5) for prompt in random_prompts(3, seed=9)]
    engine.call("submit", requests)
    assert engine.call("take", 0.3) == 0
    engine.call("wake", ["weights"])
    engine.call("wake", ["kv_cache"])
    woken = [succeeded(outcome) for outcome in engine.finish(requests)]
    again = engine.generate([make_request(request.tokens, seed=5) for request in requests])
    assert [result.tokens.tolist() for result in woken] == [result.tokens.tolist() for result in again]


def test_collect_returns_nothing_after_its_time(engine: EngineProcess) -> None:
    started = time.perf_counter()
    assert engine.call("collect", 0.1) == []
    assert time.perf_counter() - started < 20


# ---- another process ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_core_in_a_process_of_its_own_gives_the_same_tokens_for_the_same_seeds(engine: EngineProcess, plain: PlainModel) -> None:
    """engine.process=separate is the way of GPUs; versions and weight syncs go the same way there."""
    prompts = random_prompts(6, seed=20)

    def ask(where: EngineProcess) -> list[tuple[GenerateRequest, GenerateResult]]:
        requests = [make_request(prompt, seed=n) for n, prompt in enumerate(prompts)]
        return list(zip(requests, where.generate(requests), strict=True))

    separate = EngineProcess(engine_settings(in_actor=False))
    try:
        for (_, one), (_, other) in zip(ask(engine), ask(separate), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.versions.tolist() == other.versions.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)
        model = plain.variant(1)
        Sender(separate, plain.weights).sync(model, 1)
        for request, result in ask(separate):
            assert set(result.versions.tolist()) == {1}
            np.testing.assert_allclose(result.logprobs, model.logprobs(request, result), atol=TOLERANCE)
    finally:
        separate.stop()


def test_a_core_that_fails_reaches_every_request_and_every_later_call_at_once(engine: EngineProcess) -> None:
    """The last test: it ends the module's engine. A core that ends silently would be found by a deadline of minutes."""
    engine.call("sleep")
    requests = [make_request(prompt, seed=n) for n, prompt in enumerate(random_prompts(4, seed=21))]
    engine.call("submit", requests)
    engine.call("break_core")
    started = time.perf_counter()
    waking = [engine.begin("wake", ["scheduling"]), *(engine.begin("reset_prefix_cache") for _ in range(3))]
    with pytest.raises(InfrastructureError, match="core is dead"):
        while True:
            engine.call("take", 0.2)
    for call in waking:
        assert call.exception(20) is None or isinstance(call.exception(), InfrastructureError)
    for method in ("sleep", "reset_prefix_cache", "resume"):
        with pytest.raises(InfrastructureError, match="EngineDeadError"):
            engine.call(method)
    assert time.perf_counter() - started < 60
    engine.call("stop", timeout_s=30.0)
