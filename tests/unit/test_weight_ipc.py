"""Weights through shared memory: no slot is overwritten before every engine read it, and nothing stays behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlpost.types import InfrastructureError, SyncPlan, SyncRefusedError, WeightsManifest
from rlpost.weights import ipc
from rlpost.weights.buckets import Bucket, plan_buckets
from rlpost.weights.ipc import IpcInlet, IpcOutlet, IpcRendezvous
from rlpost.weights.links import LinkSettings, carrier
from rlpost.weights.sender import WeightSender
from rlpost.weights.shards import ShardedWeights

CPU = torch.device("cpu")
TIMEOUT_S = 20.0
SHORT_S = 1.0
"""Deadline of what must fail."""

LONG_S = 120.0
"""A deadline that must not be needed."""

SLACK_S = 30.0
MANIFEST = WeightsManifest(names=(), shapes=(), dtypes=(), cuts=(), trained=(), bucket_bytes=1)


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the slots' files are made here; whatever happened, none stays."""
    monkeypatch.setattr(ipc, "SHARED_MEMORY", tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def settings_of(readers: int, timeout_s: float = TIMEOUT_S) -> LinkSettings:
    return LinkSettings(name="engines", carrier="ipc", world=1 + readers, timeout_s=timeout_s, host="127.0.0.1")


@contextmanager
def linked(
    threads: ThreadPoolExecutor, readers: int, *, outlet_s: float = TIMEOUT_S, inlet_s: float = TIMEOUT_S
) -> Iterator[tuple[IpcOutlet, list[IpcInlet]]]:
    """An outlet and its inlets, with their deadlines."""
    door = carrier("ipc").serve(settings_of(readers, outlet_s), CPU)
    host, port = door.address
    entering = [
        threads.submit(IpcInlet, replace(settings_of(readers, inlet_s), host=host, port=port, rank=rank), CPU)
        for rank in range(1, 1 + readers)
    ]
    inlets = [future.result(LONG_S) for future in entering]  # before a short deadline begins: a connection may take seconds
    outlet = door.join()
    with ExitStack() as stack:
        for end in (outlet, *inlets):
            stack.callback(end.close)
        yield outlet, inlets


def plan_of(message_bytes: int = 0) -> SyncPlan:
    return SyncPlan(version=1, mode="delta", base_version=0, link="engines", verify=False, message_bytes=message_bytes)


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def send_all(outlet: IpcOutlet, buffers: Sequence[torch.Tensor]) -> None:
    """As a sender: a buffer is used again as soon as its send was waited for."""
    outlet.begin(plan_of(), MANIFEST, [Bucket((), buffer.numel()) for buffer in buffers])
    for buffer in buffers:
        reused = buffer.clone()
        outlet.send(reused)()
        reused.zero_()
    outlet.finish()


def read_all(inlet: IpcInlet, sizes: Sequence[int]) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in inlet.stream(plan_of(), MANIFEST, (), sizes)]


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_every_reader_gets_every_buffer_while_the_memory_grows(threads: ThreadPoolExecutor, shared_memory: Path, readers: int) -> None:
    """Syncs of small, large, larger and small buffers over one link, odd numbers of them: slots are taken in turn throughout."""
    mib = 1 << 20
    rounds = [[10, 1, 7], [3 * mib, 100, 3 * mib, 5, 2 * mib], [3 * mib + 1], [mib] * 4, [9 * mib, 9 * mib, 9 * mib]]
    with linked(threads, readers) as (outlet, inlets):
        for number, sizes in enumerate(rounds):
            buffers = [random_bytes(size, 10 * number + index) for index, size in enumerate(sizes)]
            reading = [threads.submit(read_all, inlet, sizes) for inlet in inlets]
            send_all(outlet, buffers)
            for future in reading:
                found = future.result(TIMEOUT_S)
                assert len(found) == len(buffers) and all(map(torch.equal, found, buffers)), f"round {number}"
            assert list(shared_memory.iterdir()) == [], "the file has no name any more once all opened it"


def test_a_message_has_room_too(threads: ThreadPoolExecutor) -> None:
    """A delta comes without buckets; its size is the plan's."""
    message = random_bytes(5 << 20, 1)
    with linked(threads, 2) as (outlet, inlets):
        reading = [threads.submit(read_all, inlet, [message.numel()]) for inlet in inlets]
        outlet.begin(plan_of(message.numel()), MANIFEST, ())
        outlet.send(message)()
        outlet.finish()
        assert all(torch.equal(future.result(TIMEOUT_S)[0], message) for future in reading)


def test_a_slot_is_not_overwritten_before_the_slowest_reader_read_it(threads: ThreadPoolExecutor) -> None:
    """One reader has read all, the other still looks at the first buffer: the third waits until its deadline."""
    buffers = [random_bytes(100, seed) for seed in range(3)]
    with linked(threads, 2, outlet_s=SHORT_S) as (outlet, inlets):
        starting = [threads.submit(start_reading, inlet, 3 * [100]) for inlet in inlets]
        outlet.begin(plan_of(), MANIFEST, 3 * [Bucket((), 100)])
        outlet.send(buffers[0])()
        outlet.send(buffers[1])()
        (quick, _), (slow, first) = (future.result(TIMEOUT_S) for future in starting)
        assert torch.equal(next(quick), buffers[1])
        with pytest.raises(dist.DistStoreError, match=r"timeout.*read/0/2"):
            outlet.send(buffers[2])
        assert torch.equal(first, buffers[0]) and torch.equal(next(slow), buffers[1])
        outlet.send(buffers[2])()
        assert torch.equal(next(slow), buffers[2]) and torch.equal(next(quick), buffers[2])


def start_reading(inlet: IpcInlet, sizes: Sequence[int]) -> tuple[Iterator[torch.Tensor], torch.Tensor]:
    stream = inlet.stream(plan_of(), MANIFEST, (), sizes)
    return stream, next(stream)


def test_a_sync_does_not_end_before_all_was_read(threads: ThreadPoolExecutor) -> None:
    """Else the next sync would overwrite what a slow engine has not read."""
    with linked(threads, 2, outlet_s=SHORT_S) as (outlet, inlets):
        starting = [threads.submit(start_reading, inlet, [100]) for inlet in inlets]
        outlet.begin(plan_of(), MANIFEST, [Bucket((), 100)])
        outlet.send(random_bytes(100, 1))()
        (quick, _), (slow, _) = (future.result(TIMEOUT_S) for future in starting)
        assert next(quick, None) is None
        with pytest.raises(dist.DistStoreError, match=r"timeout.*read/0/2"):
            outlet.finish()
        assert next(slow, None) is None
        outlet.finish()


# ---- faults ------------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Four rows of 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4096.0).view(4, 1024))


def model_sender() -> WeightSender:
    """A trainer of one rank; the rows of its model travel one by one."""
    return WeightSender(ShardedWeights(Model(), "float32", 4096), CPU, host="127.0.0.1", keep_baseline=False)


def join(sender: WeightSender, readers: int, timeout_s: float) -> list[IpcInlet]:
    """A link with this deadline for the sender; its readers are patient."""
    host, port = sender.serve([settings_of(readers, timeout_s)])
    inlets = [IpcInlet(replace(settings_of(readers, LONG_S), host=host, port=port, rank=rank), CPU) for rank in range(1, 1 + readers)]
    sender.join("engines")
    return inlets


def read_model(inlet: IpcInlet, manifest: WeightsManifest) -> list[torch.Tensor]:
    """All that a reader gets."""
    buckets = plan_buckets(manifest)
    return [buffer.clone() for buffer in inlet.stream(FULL, manifest, buckets, [bucket.size for bucket in buckets])]


def read_some(inlet: IpcInlet, manifest: WeightsManifest, count: int) -> tuple[Iterator[torch.Tensor], int]:
    """A reader that stops while it looks at buffer ``count`` (0: before it opened the memory), and how many it got."""
    buckets = plan_buckets(manifest)
    stream = inlet.stream(FULL, manifest, buckets, [bucket.size for bucket in buckets])
    return stream, sum(1 for _ in islice(stream, count))


FULL = SyncPlan(version=1, mode="full", base_version=0, link="engines", verify=True)


def assert_next_sync_works(threads: ThreadPoolExecutor, sender: WeightSender) -> None:
    """Over a new link."""
    [inlet] = join(sender, 1, LONG_S)
    reading = threads.submit(read_model, inlet, sender.manifest)
    sender.send_weights(FULL)
    assert torch.equal(torch.cat(reading.result(SLACK_S)).view(torch.float32), torch.arange(4096.0))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_reader_that_dies_is_an_error_in_time_and_the_others_hear_of_it_at_once(threads: ThreadPoolExecutor, count: int) -> None:
    """It says nothing any more, before it opened the memory or later."""
    sender = model_sender()
    inlets = join(sender, 2, SHORT_S)
    dying = threads.submit(read_some, inlets[0], sender.manifest, count)
    waiting = threads.submit(read_model, inlets[1], sender.manifest)
    with pytest.raises(SyncRefusedError, match=r"weights could not be sent to all engines: .*timeout.*/1") as caught:
        sender.send_weights(FULL)
    assert caught.value.reason == "broken"
    assert dying.result(SLACK_S)[1] == count
    with pytest.raises(dist.DistNetworkError):
        waiting.result(SLACK_S)
    assert_next_sync_works(threads, sender)


def test_a_reader_that_leaves_is_noticed_before_any_deadline(threads: ThreadPoolExecutor) -> None:
    """An engine that fails while it takes weights in says so; the others hear of it as well."""
    sender = model_sender()
    inlets = join(sender, 2, LONG_S)
    leaving = threads.submit(read_some, inlets[0], sender.manifest, 1)
    waiting = threads.submit(read_model, inlets[1], sender.manifest)
    sending = threads.submit(sender.send_weights, FULL)
    leaving.result(SLACK_S)[0].close()  # type: ignore[attr-defined]
    with pytest.raises(SyncRefusedError, match=r"weights could not be sent to all engines: engine workers \[1\] stopped reading"):
        sending.result(SLACK_S)
    with pytest.raises(dist.DistNetworkError):
        waiting.result(SLACK_S)
    assert_next_sync_works(threads, sender)


def test_full_shared_memory_is_said_with_what_to_do_and_readers_hear_at_once(
    threads: ThreadPoolExecutor, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is only as long as needed, without room behind it, would kill the process at the first touch."""
    wanted = []

    def refuse(file: int, offset: int, length: int) -> None:
        wanted.append((offset, length))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    sender = model_sender()
    [inlet] = join(sender, 1, TIMEOUT_S)
    waiting = threads.submit(read_model, inlet, sender.manifest)
    with pytest.raises(SyncRefusedError) as caught:
        sender.send_weights(FULL)
    assert wanted == [(0, 2 << 20)], "all of it, before the first byte"
    for part in ("2 MiB of shared memory", f"in {shared_memory}", "No space left", "weights.bucket_mib", "weights.transport=collective"):
        assert part in str(caught.value)
    with pytest.raises(dist.DistNetworkError):
        waiting.result(SLACK_S)


def test_engines_on_another_machine_are_named(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory would not be there: said when the link is made, with what to use instead."""
    door = IpcRendezvous.serve(settings_of(3), CPU)
    host, port = door.address
    here = ipc._machine()
    for rank in (1, 2, 3):
        monkeypatch.setattr(ipc, "_machine", lambda rank=rank: here if rank == 2 else f"machine {rank}")
        threads.submit(IpcInlet, replace(settings_of(3), host=host, port=port, rank=rank), CPU).result(TIMEOUT_S)
    monkeypatch.setattr(ipc, "_machine", lambda: here)
    with pytest.raises(InfrastructureError, match=r"engine workers \[1, 3\] are on another one; use weights.transport=collective"):
        door.join()
