"""Weights out of the trainer: bit-equal on every receiver for every bucket size, and no wait without an end."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import RECEIVER, RankProcesses, Trainers, make_groups, update_requests, worker_settings
from plain_models import plain_model, untied_model

from rlpost.algorithms.grpo import Grpo
from rlpost.config.schema import AlgorithmConfig, OptimizerConfig
from rlpost.driver.batch import build_minibatch
from rlpost.models.embedded import build
from rlpost.types import InfrastructureError, WeightsManifest
from rlpost.weights import collective
from rlpost.weights.fingerprint import Fingerprint

TIMEOUT_S = 20.0
SHORT_S = 2.0
"""Deadline of the collectives that must fail."""

LONG_S = 60.0
"""A deadline that must not be needed."""

SLACK_S = 25.0
"""Far more than the deadline, far less than gloo's half-hour default."""

ALGORITHM = Grpo(AlgorithmConfig(advantage="group_mean"))
Received = tuple[str, dict[str, torch.Tensor]]


def receive_member(
    host: str, port: int, world: int, rank: int, manifest: WeightsManifest, timeout_s: float, buckets: int | None
) -> Received:
    """What an engine worker does: join, receive ``buckets`` (None: all), leave."""
    store = collective.join_store(host, port, world, timeout_s)
    group = collective.make_group(store, backend="gloo", rank=rank, world=world, timeout_s=timeout_s)
    fingerprint, tensors = Fingerprint(), {}
    for bucket in manifest.buckets[:buckets]:
        buffer = torch.zeros(collective.bucket_bytes(manifest, bucket), dtype=torch.uint8)
        collective.broadcast(group, buffer)
        for name, tensor in collective.views(buffer, manifest, bucket):
            fingerprint.add(name, tensor)
            tensors[name] = tensor.clone()
    return fingerprint.hexdigest(), tensors


def receive(
    host: str, port: int, world: int, manifest: WeightsManifest, timeout_s: float, delays: list[float], buckets: int | None = None
) -> list[Received]:
    """In the receiver's process: ``world - 1`` members, a thread each; they leave after ``buckets`` buckets."""
    results: list[Any] = [None] * (world - 1)

    def member(rank: int) -> None:
        try:
            time.sleep(delays[rank - 1])
            results[rank - 1] = receive_member(host, port, world, rank, manifest, timeout_s, buckets)
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            results[rank - 1] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(1, world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise RuntimeError(f"{type(result).__name__}: {result}")
    return results


def sync(
    trainers: Trainers, *, dtype: str = "float32", bucket_bytes: int = 64 << 20, receivers: int = 1, delays: list[float] | None = None,
    sender_delay: float = 0.0,
) -> tuple[tuple[str, int], list[Received], WeightsManifest]:  # fmt: skip
    """One whole sync: what rank 0 says it sent, what each receiver has, the manifest."""
    world = 1 + receivers
    manifest = trainers.call("manifest", dtype, bucket_bytes)[0]
    host, port = trainers.call("serve_weights", world, TIMEOUT_S)[0]
    receiving = trainers.processes.submit(RECEIVER, receive, host, port, world, manifest, TIMEOUT_S, delays or [0.0] * receivers)
    time.sleep(sender_delay)
    trainers.call("join_weights", world, "gloo", TIMEOUT_S)
    sent = trainers.call("send_weights", manifest)
    return sent[0], receiving.result(TIMEOUT_S + SLACK_S), manifest


def full_weights(worker: Any) -> dict[str, torch.Tensor]:
    """In a rank: all parameters whole, read without the code under test."""
    worker.model.reshard()
    return {name: parameter.detach().full_tensor().clone() for name, parameter in worker.model.named_parameters()}


def update(trainers: Trainers) -> None:
    batch = build_minibatch(make_groups(), ALGORITHM, version=0, aggregation="token_mean", constant=64, old="current")
    requests = update_requests(batch.terms, batch.denominator, ALGORITHM.components(), ranks=trainers.ranks, micro_batch_tokens=110)
    trainers.call_each("update", requests)


def forward_only(trainers: Trainers) -> None:
    batch = build_minibatch(make_groups(), ALGORITHM, version=0, aggregation="token_mean", constant=64, old="current")
    trainers.logprobs("logprobs", batch.terms, 0.7, micro_batch_tokens=110)


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_every_receiver_has_the_trainers_bits_whatever_the_bucket_size(processes: RankProcesses, tmp_path: Path, model: str) -> None:
    """After an update, and after a forward without backward, which leaves FSDP's root gathered."""
    path = build("tiny-sort5") if model == "tied" else untied_model(tmp_path / "untied")
    start = dict(plain_model(path).named_parameters())
    with processes.trainers(worker_settings(path, optimizer=OptimizerConfig(lr=1e-3)), ranks=2) as trainers:
        update(trainers)
        expected = trainers.apply(full_weights)[0]
        assert sorted(expected) == sorted(start)
        assert any(not torch.equal(expected[name], start[name]) for name in start)
        rounds = {}
        for bucket_bytes in (1, 3000, 64 << 20):
            forward_only(trainers)
            (fingerprint, size), received, manifest = sync(trainers, bucket_bytes=bucket_bytes, receivers=2)
            rounds[bucket_bytes] = len(manifest.buckets)
            assert size >= sum(tensor.nbytes for tensor in expected.values())
            for got_fingerprint, tensors in received:
                assert got_fingerprint == fingerprint
                assert list(tensors) == list(manifest.names) == list(expected)
                for name, tensor in expected.items():
                    assert torch.equal(tensors[name], tensor), (bucket_bytes, name)
        assert rounds[1] == len(expected) > rounds[3000] > rounds[64 << 20] == 1
        (fingerprint, half), [(got_fingerprint, tensors)], _ = sync(trainers, dtype="bfloat16", bucket_bytes=5000)
        assert got_fingerprint == fingerprint and half < size
        for name, tensor in expected.items():
            assert tensors[name].dtype == torch.bfloat16
            assert torch.equal(tensors[name], tensor.to(torch.bfloat16)), name


def test_fingerprint_changes_with_every_update_and_is_that_of_the_weights(processes: RankProcesses) -> None:
    with processes.trainers(worker_settings(optimizer=OptimizerConfig(lr=1e-3)), ranks=2) as trainers:
        seen = []
        for _ in range(3):
            (fingerprint, _), [_], _ = sync(trainers)
            again = Fingerprint()
            for name, tensor in trainers.apply(full_weights)[0].items():
                again.add(name, tensor)
            assert fingerprint == again.hexdigest()
            seen.append(fingerprint)
            update(trainers)
    assert len(set(seen)) == 3


def test_ten_starts_with_random_delays_never_hang(processes: RankProcesses) -> None:
    """Sender first, receivers first, one receiver long before the other: a race at start-up would end in the deadline."""
    delay = random.Random(0)
    with processes.trainers(worker_settings(), ranks=2) as trainers:
        for _ in range(10):
            delays = [delay.choice([0.0, 0.02, 0.2]) for _ in range(2)]
            (fingerprint, _), received, _ = sync(trainers, receivers=2, delays=delays, sender_delay=delay.choice([0.0, 0.1]))
            assert [got for got, _ in received] == [fingerprint] * 2


def test_a_receiver_that_never_joins_is_an_error_within_the_deadline_and_the_next_sync_works(processes: RankProcesses) -> None:
    with processes.trainers(worker_settings(), ranks=2) as trainers:
        trainers.call("serve_weights", 2, SHORT_S)
        started = time.perf_counter()
        with pytest.raises(Exception, match=r"(?i)time"):
            trainers.call("join_weights", 2, "gloo", SHORT_S)
        assert time.perf_counter() - started < SHORT_S + SLACK_S
        (fingerprint, _), [(got, _)], _ = sync(trainers)
        assert got == fingerprint


def test_a_receiver_that_leaves_in_the_middle_is_an_error_within_the_deadline_and_the_next_sync_works(processes: RankProcesses) -> None:
    with processes.trainers(worker_settings(), ranks=2) as trainers:
        manifest = trainers.call("manifest", "float32", 1)[0]
        host, port = trainers.call("serve_weights", 2, TIMEOUT_S)[0]
        receiving = processes.submit(RECEIVER, receive, host, port, 2, manifest, TIMEOUT_S, [0.0], 1)
        trainers.call("join_weights", 2, "gloo", TIMEOUT_S)
        sending = trainers.submit("send_weights", manifest)
        started = time.perf_counter()
        receiving.result(SLACK_S)
        with pytest.raises(InfrastructureError, match="weights could not be sent to all engines"):
            sending[0].result(SHORT_S + SLACK_S)
        sending[1].result(SHORT_S + SLACK_S)  # the other rank was not left alone in a gather
        assert time.perf_counter() - started < SHORT_S + SLACK_S
        update(trainers)
        (fingerprint, _), [(got, _)], _ = sync(trainers)
        assert got == fingerprint


def test_a_sender_that_never_sends_is_an_error_of_the_receiver_within_the_deadline(processes: RankProcesses) -> None:
    with processes.trainers(worker_settings(), ranks=1) as trainers:
        manifest = trainers.call("manifest", "float32", 64 << 20)[0]
        host, port = trainers.call("serve_weights", 2, SHORT_S)[0]
        started = time.perf_counter()
        receiving = processes.submit(RECEIVER, receive, host, port, 2, manifest, SHORT_S, [0.0])
        trainers.call("join_weights", 2, "gloo", SHORT_S)
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            receiving.result(SHORT_S + SLACK_S)
        assert time.perf_counter() - started < SHORT_S + SLACK_S


def test_weights_streamed_in_another_order_than_declared_are_refused(processes: RankProcesses) -> None:
    """The bytes of one parameter under the name of another would pass every size check of equal shapes."""
    with processes.trainers(worker_settings(), ranks=1) as trainers:
        manifest = trainers.call("manifest", "float32", 64 << 20)[0]
        swapped = replace(manifest, names=(manifest.names[1], manifest.names[0], *manifest.names[2:]))
        with pytest.raises(AssertionError, match="another order than declared"):
            trainers.call("send_weights", swapped)


def test_receivers_that_still_wait_hear_at_once_that_the_sender_gave_up(processes: RankProcesses) -> None:
    """One of two engines dies: the other must not sit out a deadline of minutes."""
    with processes.trainers(worker_settings(), ranks=1) as trainers:
        manifest = trainers.call("manifest", "float32", 1)[0]
        host, port = trainers.call("serve_weights", 3, TIMEOUT_S)[0]
        receiving = processes.submit(RECEIVER, receive_one_of_two, host, port, manifest, LONG_S)
        trainers.call("join_weights", 3, "gloo", TIMEOUT_S)
        with pytest.raises(InfrastructureError):
            trainers.call("send_weights", manifest)
        assert "Error" in receiving.result(SHORT_S + SLACK_S)


def receive_one_of_two(host: str, port: int, manifest: WeightsManifest, timeout_s: float) -> str:
    """In the receiver's process: member 1 leaves after the first bucket; returns what member 2 met."""

    def leaves() -> None:
        receive_member(host, port, 3, 1, manifest, timeout_s, 1)

    thread = threading.Thread(target=leaves)
    thread.start()
    try:
        receive_member(host, port, 3, 2, manifest, timeout_s, None)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must come soon
        return f"{type(error).__name__}: {error}"
    finally:
        thread.join()
    return "nothing"
