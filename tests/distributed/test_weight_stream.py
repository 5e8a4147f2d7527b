"""Weights out of the trainer: bit-equal on every receiver for every carrier and bucket size, and no wait without an end."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import RECEIVER, RankProcesses, Trainers, make_groups, update_requests, worker_settings
from plain_models import plain_model, untied_model
from weight_links import (
    CPU,
    LONG_S,
    SHARDED,
    SHORT_S,
    SLACK_S,
    TIMEOUT_S,
    TOY,
    Conduct,
    Received,
    Sync,
    Toy,
    link,
    outcomes,
    same_bits,
    total,
    toy_sync,
)

from rlpost.algorithms.online import PolicyGradient
from rlpost.algorithms.protocol import RunFacts
from rlpost.config.schema import AlgorithmConfig, OptimizerConfig
from rlpost.driver.batch import build_minibatch
from rlpost.models.embedded import build
from rlpost.types import SyncPlan, SyncRefusedError, WeightsManifest
from rlpost.weights.buckets import Bucket, plan_buckets, total_bytes
from rlpost.weights.fingerprint import MODULUS, TensorHashes
from rlpost.weights.links import Carrier, LinkSettings
from rlpost.weights.sender import WeightSender
from rlpost.weights.shards import ShardedWeights

MIB = 1 << 20
ALGORITHM = PolicyGradient(AlgorithmConfig(advantage="group_mean"), RunFacts(max_new_tokens=64))
on_every_carrier = pytest.mark.parametrize("kind", ["collective", "ipc"])


# ---- the same bits -----------------------------------------------------------------------------------------------------


def full_weights(worker: Any) -> dict[str, torch.Tensor]:
    """In a rank: all parameters whole, read without the code under test."""
    worker.model.reshard()
    return {name: parameter.detach().full_tensor().clone() for name, parameter in worker.model.named_parameters()}


def a_batch(trainers: Trainers, *, train: bool) -> None:
    """An optimizer step, or a forward without backward, which leaves FSDP's root gathered."""
    batch = build_minibatch(make_groups(), ALGORITHM, version=0, aggregation="token_mean", constant=64, old="current")
    if train:
        requests = update_requests(batch.terms, batch.denominator, ALGORITHM.components(), ranks=trainers.ranks, micro_batch_tokens=110)
        trainers.call_each("update", requests)
    else:
        trainers.logprobs("logprobs", batch.terms, 0.7, micro_batch_tokens=110)


def model_sync(
    trainers: Trainers, kind: str = "collective", *, dtype: str = "float32", bucket_bytes: int = 64 * MIB, **options: Any
) -> Sync:
    """A link from ranks with a real model."""
    return link(trainers, trainers.call("open_weights", dtype, bucket_bytes, False)[0], kind, **options)


def assert_holds(received: Received, expected: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert received.tensors is not None and list(received.tensors) == list(expected)
    for name, tensor in expected.items():
        assert same_bits(received.tensors[name], tensor.to(dtype)), name


@on_every_carrier
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_every_receiver_has_the_trainers_bits_whatever_the_bucket_size(
    processes: RankProcesses, tmp_path: Path, model: str, kind: str
) -> None:
    """After an update, and after a forward without backward, which leaves FSDP's root gathered."""
    path = build("tiny-sort5") if model == "tied" else untied_model(tmp_path / "untied")
    start = dict(plain_model(path).named_parameters())
    assert ("lm_head.weight" in start) == (model == "untied"), "a tied output layer travels once"
    with processes.trainers(worker_settings(path, optimizer=OptimizerConfig(lr=1e-3)), ranks=2) as trainers:
        a_batch(trainers, train=True)
        expected = trainers.apply(full_weights)[0]
        assert sorted(expected) == sorted(start)
        assert any(not torch.equal(expected[name], start[name]) for name in start)
        counts = []
        for bucket_bytes in (1, 3000, 64 * MIB):
            a_batch(trainers, train=False)
            sync = model_sync(trainers, kind, bucket_bytes=bucket_bytes, receivers=2)
            counts.append(len(plan_buckets(sync.manifest)))
            reports, received = sync.run(sync.plan())
            assert reports[0].bytes >= sum(tensor.nbytes for tensor in expected.values()) == total_bytes(sync.manifest)
            for one in received:
                assert one.fingerprint == total(reports)
                assert_holds(one, expected, torch.float32)
        rows = sum(tensor.shape[0] for tensor in expected.values())
        assert counts[0] == rows > counts[1] > counts[2] == 1
        sync = model_sync(trainers, kind, dtype="bfloat16", bucket_bytes=5000)
        reports, [one] = sync.run(sync.plan())
        assert one.fingerprint == total(reports)
        assert_holds(one, expected, torch.bfloat16)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_every_carrier
def test_uneven_frozen_scalar_and_strided_parameters_arrive_from_any_number_of_ranks(
    processes: RankProcesses, ranks: int, dtype: str, kind: str
) -> None:
    """Rows that ranks cannot share evenly, fewer rows than ranks, parameters that FSDP2 leaves alone."""
    for bucket_bytes in (1, 48, 4096):
        with toy_sync(processes, kind, ranks=ranks, dtype=dtype, bucket_bytes=bucket_bytes, receivers=2) as sync:
            expected = sync.trainers.call("full")[0]
            assert list(expected) == [*SHARDED, "scalar", "transposed", "strided"], "a parameter of two names travels once"
            reports, received = sync.run(sync.plan(), [Conduct(), Conduct(placed=True)])
            for one in received:
                assert one.fingerprint == total(reports)
                assert_holds(one, expected, getattr(torch, dtype))
            assert received[1].in_place == (len(plan_buckets(sync.manifest)) // 2 if kind == "collective" else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_cuts_are_what_fsdp_gave_each_rank(processes: RankProcesses, ranks: int) -> None:
    """They are computed, not asked for: each rank's own storage must be exactly those rows of the whole."""
    with toy_sync(processes, ranks=ranks) as sync:
        whole, locals_of = sync.trainers.call("full")[0], sync.trainers.call("local")
        for index, name in enumerate(sync.manifest.names):
            cuts = sync.manifest.cuts[index]
            assert len(cuts) == ranks + 1 and (cuts[0], cuts[-1]) == (0, max(1, whole[name].shape[0] if whole[name].ndim else 1))
            for rank, (first, last) in enumerate(pairwise(cuts)):
                held = locals_of[rank].get(name)
                if whole[name].ndim == 0 or held is None:
                    assert (first, last) == ((0, 1) if rank == 0 and held is not None else (first, first))
                else:
                    assert torch.equal(held, whole[name][first:last]), (name, rank)
        if ranks == 3:
            cuts_of = dict(zip(sync.manifest.names, sync.manifest.cuts, strict=True))
            assert cuts_of["uneven"] == (0, 3, 6, 7) and cuts_of["one_row"] == (0, 1, 1, 1) and cuts_of["transposed"] == (0, 6, 6, 6)


def test_the_fingerprint_changes_with_every_update_and_is_that_of_the_weights(processes: RankProcesses) -> None:
    with processes.trainers(worker_settings(optimizer=OptimizerConfig(lr=1e-3)), ranks=2) as trainers:
        seen = []
        for _ in range(3):
            sync = model_sync(trainers)
            reports, _ = sync.run(sync.plan())
            seen.append(total(reports))
            assert seen[-1] == fingerprint_of(trainers.apply(full_weights)[0], sync.manifest)
            a_batch(trainers, train=True)
    assert len(set(seen)) == 3


def fingerprint_of(whole: dict[str, torch.Tensor], manifest: WeightsManifest) -> str:
    """Of whole tensors, by one process."""
    hashes = TensorHashes(manifest)
    for index, name in enumerate(manifest.names):
        rows = whole[name].to(getattr(torch, manifest.dtypes[index])).contiguous()
        for owner, (first, last) in enumerate(pairwise(manifest.cuts[index])):
            if first < last:
                hashes.add(index, owner, first, (rows.view(1) if rows.ndim == 0 else rows)[first:last])
    return f"{hashes.total() % MODULUS:032x}"


def test_without_verification_nothing_is_hashed(processes: RankProcesses) -> None:
    with toy_sync(processes) as sync:
        reports, [one] = sync.run(sync.plan(verify=False))
        assert [report.sums for report in reports] == [(), ()]
        assert_holds(one, sync.trainers.call("full")[0], torch.float32)


@on_every_carrier
def test_a_sync_of_what_is_trained_leaves_the_rest_and_its_fingerprint_covers_all(processes: RankProcesses, kind: str) -> None:
    """Twice, as the frozen tensors' hashes are kept; then a frozen bit that differs on the engine must show."""
    with toy_sync(processes, kind, bucket_bytes=64) as sync:
        plans = [sync.plan(), sync.plan("trained", version=2), sync.plan("trained", version=3), sync.plan(version=4)]
        receiving = sync.receiving(plans)
        sync.join()
        reports, whole = [], []
        for version, plan in enumerate(plans, 1):
            sync.trainers.call("put", "uneven", [3, 33], [version, 7 * version])
            whole.append(sync.trainers.call("full")[0])
            reports.append(sync.trainers.call("weights", "send_weights", plan))
        [received] = receiving.result(TIMEOUT_S + SLACK_S)
        for report, expected, one in zip(reports, whole, received, strict=True):
            assert_holds(one, expected, torch.float32)
            assert one.fingerprint == total(report) == fingerprint_of(expected, sync.manifest)
        sizes = [report[0].bytes for report in reports]
        frozen = sum(whole[0][name].nbytes for name in whole[0] if name.startswith("frozen"))
        assert sizes[0] == sizes[3] > sizes[1] == sizes[2] and sizes[0] - sizes[1] >= frozen > 0
        other = {**whole[2], "frozen": whole[2]["frozen"] + 1}
        assert fingerprint_of(other, sync.manifest) != total(reports[2])


def test_there_is_a_fingerprint_for_each_layout_of_the_engines(processes: RankProcesses) -> None:
    """Workers of a tensor-parallel engine hold parts: each proves its own. With and without the frozen tensors' kept hashes."""
    with toy_sync(processes, bucket_bytes=64, receivers=3) as sync:
        parts = {
            "even": ((0, 6), (0, 2)),
            "uneven": ((2, 5), (0, 5)),
            "experts": ((0, 5), (1, 2), (0, 3)),
            "frozen_uneven": ((1, 3), (0, 2)),
        }
        layouts = [tuple(None for _ in sync.manifest.names), tuple(parts.get(name) for name in sync.manifest.names)]
        sync.trainers.call("weights", "set_layouts", layouts)
        plans = [sync.plan(), sync.plan("trained", version=2)]
        receiving = sync.receiving(plans, [Conduct(layout=layouts[0]), Conduct(layout=layouts[1]), Conduct(layout=layouts[1])])
        sync.join()
        reports = [sync.trainers.call("weights", "send_weights", plan) for plan in plans]
        whole, *halves = receiving.result(TIMEOUT_S + SLACK_S)
        for number, report in enumerate(reports):
            assert whole[number].fingerprint == total(report, 0) != total(report, 1)
            assert [half[number].fingerprint for half in halves] == [total(report, 1)] * 2


def test_the_bytes_of_one_parameter_under_the_name_of_another_do_not_pass(processes: RankProcesses) -> None:
    """A receiver whose manifest has two names the other way round: sizes and shapes say nothing."""
    with processes.trainers(worker_settings(), ranks=1) as trainers:
        sync = model_sync(trainers)
        names, shapes = sync.manifest.names, sync.manifest.shapes
        first, second = next((i, j) for i in range(len(names)) for j in range(i) if shapes[i] == shapes[j])
        swapped = list(names)
        swapped[first], swapped[second] = names[second], names[first]
        sync.manifest = replace(sync.manifest, names=tuple(swapped))
        reports, [one] = sync.run(sync.plan())
        assert one.fingerprint != total(reports)


def test_a_rank_names_the_tensors_that_differ(processes: RankProcesses) -> None:
    """The sums by tensor, from all ranks, of the last sync: what an error message is made of."""
    with toy_sync(processes, receivers=1) as sync:
        sums = []
        for version in (1, 2):
            sync.run(sync.plan(version=version))
            parts = sync.trainers.call("weights", "tensor_sums", 0)
            sums.append({name: sum(part.get(name, 0) for part in parts) % MODULUS for name in sync.manifest.names})
            sync.trainers.call("put", "experts", [29], [5])
            sync = link(sync.trainers, sync.manifest)
        assert [name for name in sync.manifest.names if sums[0][name] != sums[1][name]] == ["experts"]


@pytest.mark.parametrize("kind", ["ipc", "collective"])
def test_every_rank_can_serve_a_receiver_of_its_own_and_each_gets_everything(processes: RankProcesses, kind: str) -> None:
    """Trainer and engine pairwise on shared GPUs: the engine beside rank 1 needs rank 0's rows too."""
    with toy_sync(processes, kind, bucket_bytes=48, receivers=2, pairs=True) as sync:
        assert [member.sender for member in sync.members] == [0, 1]
        plan = sync.plan()
        assert plan.senders == (0, 1)
        reports, received = sync.run(plan)
        for one in received:
            assert one.fingerprint == total(reports)
            assert_holds(one, sync.trainers.call("full")[0], torch.float32)


def test_a_model_written_to_disk_is_the_trainers(processes: RankProcesses, tmp_path: Path) -> None:
    """Read by transformers, with configuration and tokenizer, in the engines' dtype; a tied output layer is tied again."""
    path = build("tiny-sort5")
    with processes.trainers(worker_settings(path, optimizer=OptimizerConfig(lr=1e-3)), ranks=2) as trainers:
        a_batch(trainers, train=True)
        expected = trainers.apply(full_weights)[0]
        for version, dtype in enumerate(("float32", "bfloat16"), 1):
            sync = model_sync(trainers, "disk", dtype=dtype, bucket_bytes=5000, directory=str(tmp_path), model_path=str(path))
            reports, [one] = sync.run(sync.plan(version=version))
            assert one.fingerprint == total(reports)
            assert_holds(one, expected, getattr(torch, dtype))
            written = tmp_path / f"version-{version:08d}"
            model = plain_model(written)
            loaded = dict(model.named_parameters())
            assert list(loaded) == list(expected) and model.lm_head.weight is model.model.embed_tokens.weight
            assert all(torch.equal(loaded[name], expected[name].to(getattr(torch, dtype)).float()) for name in expected)
            assert json.loads((written / "config.json").read_text())["dtype"] == dtype
            assert (written / "tokenizer.json").read_bytes() == (Path(path) / "tokenizer.json").read_bytes()


# ---- overlap and memory ------------------------------------------------------------------------------------------------


class RecordingOutlet:
    """Notes what happens to each bucket, in order; a send ends only in its ``wait``, as with a carrier that is slow."""

    def __init__(self, events: list[tuple[str, int]]) -> None:
        self.events = events
        self.contents: list[bytes] = []

    def begin(self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket]) -> None:
        self.events.append(("begin", 0))

    def send(self, buffer: torch.Tensor) -> Callable[[], None]:
        number = len(self.contents)
        self.contents.append(buffer.numpy().tobytes())
        self.events.append(("send", number))

        def wait() -> None:
            self.events.append(("wait", number))
            assert buffer.numpy().tobytes() == self.contents[number], "overwritten while it was being sent"

        return wait

    def finish(self) -> None:
        self.events.append(("finish", 0))

    def acknowledge(self, version: int) -> None: ...

    def close(self) -> None: ...


class RecordingDoor:
    address = ("nowhere", 1)
    events: list[tuple[str, int]]
    outlet: RecordingOutlet

    def join(self) -> RecordingOutlet:
        RecordingDoor.outlet = RecordingOutlet(RecordingDoor.events)
        return RecordingDoor.outlet


RECORDING = Carrier(live=True, serve=lambda settings, device: RecordingDoor(), enter=lambda settings, device: None)  # type: ignore[arg-type,return-value]


def test_a_bucket_is_gathered_while_the_one_before_it_is_being_sent() -> None:
    """Through a carrier of the user's own, with a cast (else large pieces are sent from where they lie).

    Were a send waited for before the next gather, ``wait`` would come before ``read``.
    """
    events = RecordingDoor.events = []
    weights = ShardedWeights(Toy(1), "bfloat16", 24)
    sender = WeightSender(weights, CPU, host="nowhere", keep_baseline=False)
    buckets = plan_buckets(sender.manifest)
    bucket_of = {(piece.tensor, piece.start): number for number, bucket in enumerate(buckets) for piece in bucket.pieces}

    def noted(tensor: int, rows: Callable[[int, int], torch.Tensor]) -> Callable[[int, int], torch.Tensor]:
        def read(start: int, stop: int) -> torch.Tensor:
            events.append(("read", bucket_of[tensor, start]))
            return rows(start, stop)

        return read

    sender.shards[:] = [replace(shard, rows=noted(shard.tensor, shard.rows)) for shard in sender.shards]
    settings = LinkSettings(name="engines", carrier="test_weight_stream:RECORDING", world=2, timeout_s=1.0)
    assert sender.serve([settings]) == ("nowhere", 1)
    sender.join("engines")
    report = sender.send_weights(SyncPlan(version=1, mode="full", base_version=0, link="engines", verify=True))
    assert len(buckets) > 10 and report.bytes == sum(map(len, RecordingDoor.outlet.contents))
    for number in range(len(buckets)):
        assert events.count(("send", number)) == events.count(("wait", number)) == 1
        if number + 1 < len(buckets):
            assert events.index(("read", number + 1)) < events.index(("wait", number))
    last_read = [len(events) - 1 - events[::-1].index(("read", number)) for number in range(len(buckets))]
    for number in range(2, len(buckets)):
        assert events.index(("wait", number - 2)) < events.index(("read", number)), "a third bucket would take more memory"
        assert last_read[number] < events.index(("send", number))
    assert events[0] == ("begin", 0) and events[-1] == ("finish", 0)


@pytest.fixture(scope="module")
def fresh_processes() -> Iterator[RankProcesses]:
    """Processes that have never held a model: what they grow by is new."""
    started = RankProcesses(modules=["weight_links"])
    yield started
    started.close()


@on_every_carrier
def test_memory_beside_the_model_is_that_of_two_buckets(fresh_processes: RankProcesses, kind: str) -> None:
    """64 MiB from two ranks in buckets of 1 MiB (and slots of shared memory); one bucket a rank shows in the measurement."""
    grown = {}
    with fresh_processes.trainers("large", ranks=2, kind=TOY) as trainers:
        for bucket_mib in (1, 1, 128):  # at first, libraries and threads get what they need once
            sync = link(trainers, trainers.call("open_weights", "bfloat16", bucket_mib * MIB, False)[0], kind)
            assert total_bytes(sync.manifest) == 64 * MIB
            receiving = sync.receiving([sync.plan()], [Conduct(keep=False)])
            sync.join()
            measured = trainers.call("measured_send", sync.plan())
            receiving.result(TIMEOUT_S + SLACK_S)
            grown[bucket_mib] = [grew / MIB for _, grew in measured]
    assert max(grown[1]) < 8, f"MiB by which ranks grew: {grown}"
    assert grown[128][0] > 60 and grown[128][1] > 30, f"MiB by which ranks grew: {grown}"


# ---- errors ------------------------------------------------------------------------------------------------------------


@on_every_carrier
def test_ten_starts_with_random_delays_never_hang(processes: RankProcesses, kind: str) -> None:
    """Sender first, receivers first, one receiver long before the other: a race at start-up would end in the deadline."""
    delay = random.Random(0)
    with processes.trainers("toy", ranks=2, kind=TOY) as trainers:
        manifest = trainers.call("open_weights", "float32", 4096, False)[0]
        for _ in range(10):
            sync = link(trainers, manifest, kind, receivers=2)
            plan = sync.plan()
            receiving = sync.receiving([plan], [Conduct(delay_s=delay.choice([0.0, 0.02, 0.2])) for _ in range(2)])
            time.sleep(delay.choice([0.0, 0.1]))
            sync.join()
            reports = trainers.call("weights", "send_weights", plan)
            assert [member[0].fingerprint for member in receiving.result(TIMEOUT_S + SLACK_S)] == [total(reports)] * 2


def assert_next_sync_works(broken: Sync, kind: str) -> None:
    """Over a new link, after the weights moved on: all ranks are in step, and the receiver has what the trainers have."""
    broken.trainers.call("put", "uneven", [0, 34], [11, 12])
    sync = link(broken.trainers, broken.manifest, kind)
    reports, [one] = sync.run(sync.plan(version=2))
    assert one.fingerprint == total(reports)
    assert_holds(one, broken.trainers.call("full")[0], torch.float32)


@on_every_carrier
def test_a_receiver_that_never_joins_is_an_error_within_the_deadline_and_the_next_sync_works(processes: RankProcesses, kind: str) -> None:
    """The error is one that the coordinator heals, as a link that breaks later."""
    with toy_sync(processes, kind, receivers=2, timeout_s=SHORT_S) as sync:
        joining = sync.trainers.submit("weights", "join", sync.members[0].name)
        receiving = sync.processes.submit(RECEIVER, outcomes, sync.members[:1], sync.manifest, [sync.plan()], [Conduct()])
        with pytest.raises(SyncRefusedError, match=r"(?i)time"):
            joining[0].result(SHORT_S + SLACK_S)
        joining[1].result(SLACK_S)
        assert "Error" in receiving.result(SHORT_S + SLACK_S)[0], "the receiver that did join ends too"
        assert_next_sync_works(sync, kind)


@on_every_carrier
def test_a_receiver_that_leaves_in_the_middle_is_an_error_within_the_deadline_and_the_next_sync_works(
    processes: RankProcesses, kind: str
) -> None:
    with toy_sync(processes, kind, bucket_bytes=1, timeout_s=SHORT_S) as sync:
        receiving = sync.receiving([sync.plan()], [Conduct(buckets=1)])
        sync.join()
        sending = sync.trainers.submit("weights", "send_weights", sync.plan())
        receiving.result(SLACK_S)
        with pytest.raises(SyncRefusedError, match="weights could not be sent to all engines") as caught:
            sending[0].result(SHORT_S + SLACK_S)
        assert caught.value.reason == "broken"
        sending[1].result(SHORT_S + SLACK_S)  # the other rank was not left alone in a gather
        assert_next_sync_works(sync, kind)


@on_every_carrier
def test_a_sender_that_never_sends_is_an_error_of_the_receiver_within_the_deadline(processes: RankProcesses, kind: str) -> None:
    with toy_sync(processes, kind, timeout_s=SHORT_S) as sync:
        receiving = sync.receiving([sync.plan()])
        sync.join()
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            receiving.result(SHORT_S + SLACK_S)


@on_every_carrier
def test_receivers_that_still_wait_hear_at_once_that_the_sender_gave_up(processes: RankProcesses, kind: str) -> None:
    """One of two engines dies: the other must not sit out a deadline of minutes."""
    with toy_sync(processes, kind, bucket_bytes=1, receivers=2, timeout_s=SHORT_S) as sync:
        patient = [replace(member, timeout_s=LONG_S) for member in sync.members]
        conducts = [Conduct(buckets=1), Conduct()]
        receiving = sync.processes.submit(RECEIVER, outcomes, patient, sync.manifest, [sync.plan()], conducts)
        sync.join()
        sending = sync.trainers.submit("weights", "send_weights", sync.plan())
        with pytest.raises(SyncRefusedError):
            sending[0].result(SHORT_S + SLACK_S)
        left, waited = receiving.result(SHORT_S + SLACK_S)
        assert left == "" and "Error" in waited


@on_every_carrier
def test_receivers_hear_at_once_of_a_link_that_is_given_up_before_anything_was_sent(processes: RankProcesses, kind: str) -> None:
    """An engine failed elsewhere, so the coordinator drops the link; others wait for a first buffer."""
    with toy_sync(processes, kind, timeout_s=LONG_S) as sync:
        receiving = sync.receiving([sync.plan()], [Conduct()], outcomes)
        sync.join()
        sync.trainers.call("weights", "close", sync.members[0].name)
        assert "Error" in receiving.result(SLACK_S)[0]
        assert_next_sync_works(sync, kind)


def test_a_sync_over_a_link_that_was_given_up_is_refused_and_the_ranks_stay_in_step(processes: RankProcesses) -> None:
    with toy_sync(processes) as sync:
        sync.run(sync.plan())
        sync.trainers.call("weights", "close", sync.members[0].name)
        sending = sync.trainers.submit("weights", "send_weights", sync.plan(version=2))
        with pytest.raises(SyncRefusedError):
            sending[0].result(SLACK_S)
        sending[1].result(SLACK_S)
        assert_next_sync_works(sync, "collective")


def test_a_full_disk_is_said_with_the_directory_and_the_ranks_stay_in_step(processes: RankProcesses, tmp_path: Path) -> None:
    """Here: a directory that cannot be made."""
    (tmp_path / "file").write_text("in the way")
    with toy_sync(processes, "disk", bucket_bytes=64, directory=str(tmp_path / "file")) as sync:
        sync.join()
        sending = sync.trainers.submit("weights", "send_weights", sync.plan())
        with pytest.raises(SyncRefusedError, match=r"version 1 could not be written to .*/file: .*weights\.directory"):
            sending[0].result(SLACK_S)
        sending[1].result(SLACK_S)
        assert_next_sync_works(sync, "collective")
