"""What a weight sync does to requests that it meets (weights.pause), to the token: keep, drain and abort.

The core is held after a known number of steps, so each test knows what the sync finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from engine_process import END_TOKEN, make_request, random_prompts, succeeded
from weight_sender import TOLERANCE
from weight_versions import Versions, requests_of

from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, SyncMode

STEPS = 5
"""Tokens of a request before a sync meets it."""


def long_requests(count: int, *, seed: int, stop_token_ids: tuple[int, ...] = ()) -> list[GenerateRequest]:
    """Requests of up to 20 or 60 tokens, which mostly outlast the held steps."""
    return [
        make_request(prompt, seed=n, temperature=2.0, max_new_tokens=60 if n % 2 else 20, stop_token_ids=stop_token_ids)
        for n, prompt in enumerate(random_prompts(count, seed=seed))
    ]


def begin_sync(versions: Versions, pause: str, *, same: bool = False) -> tuple[int, Future[Any]]:
    """The next version is loaded at the sender, and the engine has begun to pause for it in mode ``pause``."""
    versions.engine.call("set_pause", pause)
    version = versions.prepare(versions.models[versions.current] if same else None)
    versions.sender.load(versions.models[version])
    if not versions.sender.carrier:
        versions.sender.join("collective")
    return version, versions.engine.begin("apply_weights", versions.sender.plan(version, "full"))


def end_sync(versions: Versions, version: int, applying: Future[Any], *, commit: bool = True) -> None:
    """The weights are sent, proven, and committed."""
    versions.sender.report = versions.sender.sender.send_weights(versions.sender.plan(version, "full"))
    versions.sender.check(applying.result(60), version)
    if commit:
        versions.sender.commit(version)


def check_ends(requests: Sequence[GenerateRequest], results: Sequence[GenerateResult], ends: set[int]) -> None:
    """Each ended by a stop token, which is its only one and its last, or has exactly as many tokens as it may."""
    for request, result in zip(requests, results, strict=True):
        stops = [place for place, token in enumerate(result.tokens.tolist()) if token in ends]
        if result.finish_reason == "stop":
            assert stops == [len(result.tokens) - 1]
        else:
            assert result.finish_reason == "length" and not stops
            assert len(result.tokens) == request.sampling.max_new_tokens


def outlasting(results: Sequence[GenerateResult], least: int = 4) -> list[GenerateResult]:
    """Those that a sync after ``STEPS`` steps met."""
    found = [result for result in results if len(result.tokens) > STEPS]
    assert len(found) >= least
    return found


# ---- keep --------------------------------------------------------------------------------------------------------------


def test_keep_freezes_requests_and_they_go_on_with_the_new_weights(versions: Versions) -> None:
    old = versions.current
    requests = long_requests(16, seed=1, stop_token_ids=(40, 60))
    versions.engine.call("begin", requests, STEPS)
    new, applying = begin_sync(versions, "keep")
    end_sync(versions, new, applying)
    assert versions.engine.call("settled") >= 4, "none was ended"
    versions.engine.call("free")
    results = versions.check_all(requests, {old, new})
    check_ends(requests, results, {END_TOKEN, 40, 60})
    for result in outlasting(results):
        assert result.versions.tolist() == [old] * STEPS + [new] * (len(result.tokens) - STEPS)


# ---- drain -------------------------------------------------------------------------------------------------------------


def test_drain_lets_running_requests_finish_with_the_old_weights_and_queues_new_ones(versions: Versions) -> None:
    old = versions.current
    running = long_requests(8, seed=2)
    versions.engine.call("begin", running, STEPS)
    new, applying = begin_sync(versions, "drain")
    queued = long_requests(4, seed=3)
    versions.engine.call("submit", queued)
    assert versions.engine.call("scheduled") <= len(running) and not applying.done()
    versions.engine.call("free")
    results = versions.check_all(running, {old})  # though the weights have not even been sent
    check_ends(running, results, {END_TOKEN})
    outlasting(results)
    end_sync(versions, new, applying)
    check_ends(queued, versions.check_all(queued, {new}), {END_TOKEN})


def test_drain_does_not_wait_for_requests_that_were_given_up(versions: Versions) -> None:
    """The core stands still: only their end can let the sync go on."""
    running = long_requests(4, seed=4)
    versions.engine.call("begin", running, 1)
    new, applying = begin_sync(versions, "drain")
    versions.engine.call("abort", [request.request_id for request in running])
    end_sync(versions, new, applying)
    versions.engine.call("free")
    versions.check_serves(new)
    assert versions.engine.call("settled") == 0


def test_a_drain_that_the_driver_gives_up_lets_new_requests_in_again(versions: Versions) -> None:
    """Another engine failed while this one waited for its requests."""
    old = versions.current
    versions.engine.call("set_pause", "drain")
    running, queued = long_requests(4, seed=5), long_requests(4, seed=6)
    versions.engine.call("begin", running, 1)
    draining = versions.engine.begin("drain")
    versions.engine.call("submit", queued)
    versions.engine.call("resume")
    versions.engine.call("free")
    versions.check_all([*running, *queued], {old})
    draining.result(60)
    versions.check_serves(old)


# ---- abort -------------------------------------------------------------------------------------------------------------


def test_abort_ends_requests_and_continues_them_from_their_tokens_with_the_new_weights(versions: Versions) -> None:
    """One result each, joined to the token: logprobs of the whole sequence, limits and stop tokens as if nothing had happened."""
    old, ends = versions.current, (40, 60)
    requests = long_requests(24, seed=7, stop_token_ids=ends)
    versions.engine.call("begin", requests, STEPS)
    new, applying = begin_sync(versions, "abort")
    end_sync(versions, new, applying, commit=False)
    assert versions.engine.call("scheduled") == 0, "all were ended"
    versions.engine.call("free")
    versions.sender.commit(new)
    results = versions.check_all(requests, {old, new})
    check_ends(requests, results, {END_TOKEN, *ends})
    for result, request in zip(results, requests, strict=True):
        assert result.prompt_tokens == len(request.tokens)
    later = outlasting(results)
    assert {result.finish_reason for result in later} == {"stop", "length"}
    for result in later:
        assert result.versions.tolist() == [old] * STEPS + [new] * (len(result.tokens) - STEPS)
    assert versions.engine.call("take", 0.3) == 0


def test_a_request_may_be_aborted_by_several_syncs_and_at_its_first_and_last_token(versions: Versions) -> None:
    """Limits from 1 to 12 around syncs after 2, 4, 6, 8 and 10 tokens; one sync finds requests that have no token yet."""
    first = versions.current
    requests = [
        make_request(prompt, seed=limit, temperature=2.0, max_new_tokens=limit)
        for limit, prompt in enumerate(random_prompts(12, seed=8), start=1)
    ]
    versions.engine.call("hold")
    versions.engine.call("submit", requests)
    versions.engine.call("settled")
    for _ in range(6):
        new, applying = begin_sync(versions, "abort")
        end_sync(versions, new, applying)
        versions.engine.call("hold", 2)
    versions.engine.call("free")
    results = versions.check_all(requests, set(range(first + 1, first + 7)))
    check_ends(requests, results, {END_TOKEN})
    for result in results:
        assert result.versions.tolist() == [first + 1 + place // 2 for place in range(len(result.tokens))]
    assert max(len(result.tokens) for result in results) > 6, "some were aborted more than twice"


@pytest.mark.parametrize("pause", ["keep", "abort"])
def test_greedy_output_is_that_of_an_uninterrupted_request_when_the_weights_stay_the_same(versions: Versions, pause: str) -> None:
    """Continuing loses no token and repeats none."""
    prompts = random_prompts(6, seed=9)

    def ask() -> list[GenerateRequest]:
        return [make_request(prompt, temperature=0.0, max_new_tokens=30) for prompt in prompts]

    uninterrupted = versions.engine.generate(ask())
    old, requests = versions.current, ask()
    versions.engine.call("begin", requests, 2)
    new, applying = begin_sync(versions, pause, same=True)
    end_sync(versions, new, applying)
    versions.engine.call("free")
    interrupted = versions.check_all(requests, {old, new})
    assert any(set(result.versions.tolist()) == {old, new} for result in interrupted)
    for one, other in zip(uninterrupted, interrupted, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=TOLERANCE)


def test_a_request_that_arrives_while_others_are_aborted_holds_up_nothing(versions: Versions) -> None:
    """It is the engine's already, and vLLM does not know it yet: nobody could abort it, and paused it would never end by itself."""
    old = versions.current
    running = long_requests(4, seed=10)
    versions.engine.call("begin", running, STEPS)
    versions.engine.call("hold_arrivals")
    arriving = requests_of(4, seed=11)
    versions.engine.call("submit", arriving)
    new, applying = begin_sync(versions, "abort")
    versions.engine.call("scheduled")  # the sync has had its turn
    versions.engine.call("free_arrivals")
    end_sync(versions, new, applying)
    versions.engine.call("free")
    versions.check_all(running, {old, new})
    versions.check_all(arriving, {new})


# ---- all modes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pause", ["keep", "drain", "abort"])
def test_requests_that_the_driver_gives_up_during_a_pause_give_no_result_and_hold_up_nobody(versions: Versions, pause: str) -> None:
    old = versions.current
    keep, drop = long_requests(4, seed=12), long_requests(4, seed=13)
    versions.engine.call("begin", [*keep, *drop], 3)
    new, applying = begin_sync(versions, pause)
    waiting = long_requests(2, seed=14)
    versions.engine.call("submit", waiting)
    if pause == "drain":
        versions.engine.call("free")
        versions.check_all(keep, {old})
    end_sync(versions, new, applying, commit=False)
    given_up = [request.request_id for request in [*drop, waiting[0]]]
    versions.engine.call("abort", given_up)
    versions.engine.call("free")
    versions.sender.commit(new)
    versions.check_all(keep, {old, new})
    versions.check_all(waiting[1:], {new})
    assert versions.engine.call("settled") == 0
    versions.engine.call("take", 0.1)
    if pause != "drain":
        assert not any(versions.engine.call("outcomes_of", given_up))


@pytest.mark.parametrize("pause", ["keep", "drain", "abort"])
@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_flood_of_requests_during_syncs_gives_each_exactly_one_right_result(versions: Versions, pause: str, mode: SyncMode) -> None:
    """Nothing is held: requests arrive, run and end while syncs come as they like."""
    if versions.current == 0:
        versions.sync()
    first = versions.current
    versions.engine.call("set_pause", pause)
    requests = requests_of(160, seed=15, max_new_tokens=40, temperature=2.0)
    for start in range(0, 160, 40):
        versions.engine.call("submit", requests[start : start + 40])
        if start:
            version = versions.prepare_sparse()
            versions.sender.sync(versions.models[version], version, mode)
    results = versions.check_all(requests, set(range(first, first + 4)))
    check_ends(requests, results, {END_TOKEN})
    assert versions.engine.call("take", 0.3) == 0
    assert {int(result.versions[-1]) for result in results[120:]} <= {first + 2, first + 3}
    if pause == "drain":
        assert all(len(set(result.versions.tolist())) == 1 for result in results)


@pytest.mark.parametrize("pause", ["keep", "drain", "abort"])
def test_after_a_sync_that_breaks_off_and_one_that_heals_requests_go_on_with_the_new_weights(versions: Versions, pause: str) -> None:
    """Between the two nothing may run, whoever wants to continue."""
    old = versions.current
    requests = long_requests(8, seed=16)
    versions.engine.call("begin", requests, STEPS)
    broken, applying = begin_sync(versions, pause)
    if pause == "drain":
        versions.engine.call("free")
        versions.check_all(requests, {old})
    versions.sender.close()
    with pytest.raises(InfrastructureError):
        applying.result(60)
    versions.engine.call("free")
    late = requests_of(2, seed=17)
    versions.engine.call("submit", late)
    versions.sender.join("collective")
    versions.sender.sync(versions.models[broken], broken)
    results = versions.check_all(requests, {old, broken})
    if pause != "drain":
        assert all(set(result.versions.tolist()) == {old, broken} for result in outlasting(results, 1))
    versions.check_all(late, {broken})


def test_the_pause_that_is_reported_is_the_time_without_generation(versions: Versions) -> None:
    """From the stop to the commit, whatever the mode; a drain is no pause, because requests run."""
    for pause in ("keep", "drain", "abort"):
        versions.engine.call("set_pause", pause)
        version = versions.prepare()
        versions.sender.load(versions.models[version])
        versions.sender.check(versions.sender.apply(versions.sender.plan(version, "full")), version)
        request = requests_of(1, seed=18)
        versions.engine.call("submit", request)
        assert versions.engine.call("take", 0.5) == 0
        assert versions.sender.commit(version) >= 0.5
        assert succeeded(versions.engine.finish(request)[0]).versions[0] == version
        assert versions.sync() and versions.engine.call("resume") < 0.5
