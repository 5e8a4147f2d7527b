"""The trainer's end of a weight sync. Every rank calls every method, in the same order; rank 0 has the links to the engines (on GPUs
that trainers and engines share, every rank has one to the engine beside it).

A full sync gathers a bucket at a time from the ranks' shards, each rank casting and hashing what it owns, while the bucket before it
is being sent: besides the model there are two buckets on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save

from rlpost.types import InfrastructureError, Layout, SyncPlan, SyncRefusedError
from rlpost.weights import delta
from rlpost.weights.adapters import adapter_tensors, hash_adapter
from rlpost.weights.baseline import Baseline
from rlpost.weights.buckets import Bucket, piece_bytes, plan_buckets
from rlpost.weights.fingerprint import TensorHashes
from rlpost.weights.links import LinkSettings, Outlet, carrier
from rlpost.weights.shards import Shard, ShardedWeights


@dataclass(frozen=True, kw_only=True)
class SendReport:
    """What one rank did. ``sums`` are its shares of the fingerprints, one a layout; empty without verification."""

    bytes: int = 0
    gather_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    changed: int = 0
    compared: int = 0
    sums: tuple[int, ...] = ()


@dataclass
class _Timer:
    """Seconds of a kind of work, added up."""

    seconds: float = 0.0
    _started: float = field(default=0.0, repr=False)

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class WeightSender:
    """One rank's part of all syncs of a run."""

    def __init__(self, weights: ShardedWeights, device: torch.device, *, host: str, keep_baseline: bool) -> None:
        self.manifest, self.shards, self._weights = weights.manifest, weights.shards, weights
        self.rank, self.device, self.host = weights.rank, device, host
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.layouts: list[Layout] = [(None,) * len(self.manifest.names)]
        self.hashes: list[TensorHashes] = []
        self._frozen: list[dict[str, int]] | None = None
        self._baseline = Baseline(self.manifest, self.shards) if keep_baseline else None
        self._doors: dict[str, Any] = {}
        self._outlets: dict[str, Outlet] = {}
        self._message: torch.Tensor | None = None

    def set_layouts(self, layouts: Sequence[Layout]) -> None:
        """Which parts of the tensors engine workers hold: a fingerprint is made for each."""
        self.layouts, self._frozen = list(layouts), None

    # ---- links -----------------------------------------------------------------------------------------------------

    def serve(self, links: Sequence[LinkSettings]) -> tuple[str, int]:
        """The ranks that send open a rendezvous, each for its own of ``links``; returns its address ("" on a rank that has none)."""
        self.close(links[0].name)
        mine = [settings for settings in links if settings.sender == self.rank]
        if not mine:
            return "", 0
        settings = replace(mine[0], host=self.host)
        door = self._doors[settings.name] = carrier(settings.carrier).serve(settings, self.device)
        address: tuple[str, int] = door.address
        return address

    def join(self, name: str) -> None:
        """Wait for all members of the link. Raises SyncRefusedError when some do not come in time."""
        if name not in self._doors:
            return
        try:
            self._outlets[name] = self._doors.pop(name).join()
        except InfrastructureError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the carrier's library raises
            raise SyncRefusedError("broken", f"not all engines came to the link {name}: {type(error).__name__}: {error}") from None

    def close(self, name: str) -> None:
        """Give a link up; who still waits on it hears of it at once."""
        self._doors.pop(name, None)
        outlet = self._outlets.pop(name, None)
        if outlet is not None:
            outlet.close()

    # ---- full ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send_weights(self, plan: SyncPlan) -> SendReport:
        """Send all tensors, or all that training changes. Raises SyncRefusedError on a sender when engines cannot be reached.

        Then the rest is gathered all the same before the error is raised, so that the ranks stay in step.
        """
        self._weights.refresh()
        if self._baseline is not None:
            self._baseline.forget_pending()  # of a delta that nobody took: what is sent now is all there is
        trained_only = plan.mode == "trained"
        buckets = plan_buckets(self.manifest, trained_only=trained_only)
        self.hashes = self._begin_hashes(trained_only) if plan.verify else []
        gathering, transfer = _Timer(), _Timer()
        sending = _Sending(self._outlet(plan), transfer)
        sending.attempt(lambda outlet: outlet.begin(plan, self.manifest, buckets))
        buffers = [torch.empty(0, dtype=torch.uint8, device=self.device)] * 2
        filled: list[int] = []
        """Buckets that went out by these two, in turn."""
        for number, bucket in enumerate(buckets):
            buffer = self._in_place(bucket) if plan.senders == (0,) else None
            if buffer is None:
                turn = len(filled) % 2
                if len(filled) > 1:
                    sending.wait_for(filled[-2])
                filled.append(number)
                with gathering:
                    if buffers[turn].numel() < bucket.size:
                        buffers[turn] = torch.empty(bucket.size, dtype=torch.uint8, device=self.device)
                    buffer = buffers[turn][: bucket.size]
                    self._gather(bucket, buffer, plan.senders)
            sending.send(number, buffer)
        sending.finish()
        if sending.failure:
            self.close(plan.link)
            raise SyncRefusedError("broken", f"weights could not be sent to all engines: {sending.failure}")
        size = sum(bucket.size for bucket in buckets)
        return SendReport(bytes=size, gather_s=gathering.seconds, transfer_s=transfer.seconds, sums=self.sums())

    def _in_place(self, bucket: Bucket) -> torch.Tensor | None:
        """The bytes of the bucket where they lie: one piece, rank 0's own, in the engine's dtype already. None otherwise."""
        piece = bucket.pieces[0]
        if self.rank != 0 or piece.owner != 0 or len(bucket.pieces) > 1 or not self.shards[piece.tensor].stored:
            return None
        rows = self.shards[piece.tensor].rows(piece.start, piece.stop)
        if not rows.is_contiguous() or rows.nbytes != bucket.size:
            return None
        for hashes in self.hashes:
            hashes.add(piece.tensor, self.rank, piece.start, rows)
        return rows.view(-1).view(torch.uint8)

    def _outlet(self, plan: SyncPlan) -> Outlet | str | None:
        """This rank's end of the plan's link: None when it has none, the reason as text when the link was given up."""
        if self.rank not in plan.senders:
            return None
        return self._outlets.get(plan.link) or f"the link {plan.link!r} was given up"

    def _gather(self, bucket: Bucket, buffer: torch.Tensor, senders: tuple[int, ...]) -> None:
        """The ``buffer`` of every sender gets the whole bucket; each rank gives its span of it."""
        self._fill(bucket, buffer)
        spans = [bucket.span(self.manifest, owner) for owner in range(self.world)]
        if senders != (0,):
            for owner, (first, last) in enumerate(spans):
                if last > first:
                    dist.broadcast(buffer[first:last], src=owner)
        elif self.rank == 0:
            receiving: list[Any] = [
                dist.irecv(buffer[first:last], src=owner) for owner, (first, last) in enumerate(spans) if owner and last > first
            ]
            for work in receiving:
                work.wait()
        elif spans[self.rank][1] > spans[self.rank][0]:
            first, last = spans[self.rank]
            dist.send(buffer[first:last], dst=0)

    def _fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        for piece in bucket.pieces:
            if piece.owner != self.rank:
                continue
            shard = self.shards[piece.tensor]
            size = piece_bytes(self.manifest, piece)
            target = buffer[piece.offset : piece.offset + size].view(shard.dtype)
            target.copy_(shard.rows(piece.start, piece.stop).reshape(-1))
            if self.hashes:
                rows = target.view(piece.stop - piece.start, *shard.shape[1:])
                for hashes in self.hashes:
                    hashes.add(piece.tensor, self.rank, piece.start, rows)

    # ---- fingerprints ----------------------------------------------------------------------------------------------

    def _begin_hashes(self, trained_only: bool) -> list[TensorHashes]:
        """One for each layout; with ``trained_only`` the frozen tensors, whose bits never change, are counted already."""
        hashes = [TensorHashes(self.manifest, layout) for layout in self.layouts]
        if trained_only:
            if self._frozen is None:
                self._frozen = self._hash_frozen()
            for one, frozen in zip(hashes, self._frozen, strict=True):
                one.sums.update(frozen)
        return hashes

    def _hash_frozen(self) -> list[dict[str, int]]:
        hashes = [TensorHashes(self.manifest, layout) for layout in self.layouts]
        for shard in self.shards:
            if not shard.trained:
                for start, chunk in shard.chunks():
                    self._visit(hashes)(shard, start, chunk)
        return [one.sums for one in hashes]

    def _visit(self, hashes: list[TensorHashes]) -> Callable[[Shard, int, torch.Tensor], None]:
        def visit(shard: Shard, start: int, chunk: torch.Tensor) -> None:
            for one in hashes:
                one.add(shard.tensor, self.rank, start, chunk)

        return visit

    def sums(self) -> tuple[int, ...]:
        """This rank's shares of the last fingerprint, one a layout; whole also when the weights did not reach all engines."""
        return tuple(hashes.total() for hashes in self.hashes)

    def tensor_sums(self, layout: int) -> dict[str, int]:
        """This rank's share of each tensor's part in the last fingerprint: to name what differs."""
        return dict(self.hashes[layout].sums)

    # ---- deltas ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_delta(self, verify: bool) -> SendReport:
        """Compare with the baseline and encode what changed; rank 0 collects all ranks' parts as the message to send."""
        assert self._baseline is not None, "deltas are off: weights.transport is not delta"
        self._weights.refresh()
        self.hashes = self._begin_hashes(trained_only=True) if verify else []
        encoding, gathering = _Timer(), _Timer()
        with encoding:
            changes, compared = self._baseline.compare(self._visit(self.hashes))
            mine = delta.encode(changes)
        with gathering:
            parts = self._gather_bytes(mine)
        if self.rank == 0:
            self._message = torch.frombuffer(bytearray(delta.join(parts)), dtype=torch.uint8).to(self.device)
        return SendReport(
            bytes=self._message.numel() if self._message is not None else 0,
            encode_s=encoding.seconds,
            gather_s=gathering.seconds,
            changed=sum(len(change.indices) for change in changes),
            compared=compared,
            sums=self.sums(),
        )

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes on rank 0."""
        if self.world == 1:
            return [mine]
        sizes: list[Any] = [None] * self.world
        dist.all_gather_object(sizes, len(mine))
        if self.rank != 0:
            dist.send(torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device), dst=0)
            return []
        others = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes[1:]]
        for owner, buffer in enumerate(others, 1):
            dist.recv(buffer, src=owner)
        return [mine, *(buffer.cpu().numpy().tobytes() for buffer in others)]

    @torch.no_grad()
    def encode_adapter(self, verify: bool) -> SendReport:
        """Collect the LoRA adapters as the message to send. The proof covers them and the frozen weights under them."""
        self.hashes = self._begin_hashes(trained_only=True) if verify else []
        gathering = _Timer()
        with gathering:
            tensors = adapter_tensors(self._weights.adapters, self._weights.engine_dtype)
        if self.rank == 0:
            for hashes in self.hashes:
                hashes.sums.update(hash_adapter(tensors))
            self._message = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8).to(self.device)
        size = self._message.numel() if self._message is not None else 0
        return SendReport(bytes=size, gather_s=gathering.seconds, sums=self.sums())

    def send_message(self, plan: SyncPlan) -> SendReport:
        """Send the encoded message over the link."""
        if plan.senders != (0,):
            self._share_message(plan)
        if self.rank not in plan.senders:
            return SendReport()
        assert self._message is not None and self._message.numel() == plan.message_bytes
        message, transfer = self._message, _Timer()
        sending = _Sending(self._outlet(plan), transfer)
        sending.attempt(lambda outlet: outlet.begin(plan, self.manifest, ()))
        sending.send(0, message)
        sending.finish()
        if sending.failure:
            self.close(plan.link)
            raise SyncRefusedError("broken", f"a {plan.mode} could not be sent to all engines: {sending.failure}")
        return SendReport(bytes=message.numel(), transfer_s=transfer.seconds)

    def _share_message(self, plan: SyncPlan) -> None:
        message = self._message
        if message is None or self.rank != 0:  # whatever an earlier sync that failed has left on other ranks
            message = torch.empty(plan.message_bytes, dtype=torch.uint8, device=self.device)
        dist.broadcast(message, src=0)
        self._message = message

    def forget_delta(self) -> None:
        """The encoded delta is not sent; a full sync follows."""
        self._message = None
        if self._baseline is not None:
            self._baseline.forget_pending()

    @torch.no_grad()
    def advance(self, version: int) -> None:
        """Every live engine acknowledged ``version``."""
        self._message = None
        if self._baseline is not None:
            self._baseline.advance()
        for outlet in self._outlets.values():
            outlet.acknowledge(version)


class _Sending:
    """The sends of one sync (``outlet`` None: a rank that sends nothing; a text: it cannot). After a failure nothing more is sent; its
    text is kept, not the exception, which would keep the link alive."""

    def __init__(self, outlet: Outlet | str | None, timer: _Timer) -> None:
        self.failure = outlet if isinstance(outlet, str) else ""
        self._outlet, self._timer = (None if isinstance(outlet, str) else outlet), timer
        self._waits: dict[int, Callable[[], None]] = {}

    def attempt(self, call: Callable[[Outlet], Any]) -> Any:
        if self._outlet is None or self.failure:
            return None
        with self._timer:
            try:
                return call(self._outlet)
            except Exception as error:  # noqa: BLE001 - reported when all ranks have done their part
                self.failure = str(error) if isinstance(error, InfrastructureError) else f"{type(error).__name__}: {error}"
        return None

    def send(self, number: int, buffer: torch.Tensor) -> None:
        wait = self.attempt(lambda outlet: outlet.send(buffer))
        if wait is not None:
            self._waits[number] = wait

    def wait_for(self, number: int) -> None:
        wait = self._waits.pop(number, None)
        if wait is not None:
            self.attempt(lambda _: wait())

    def finish(self) -> None:
        for number in sorted(self._waits):
            self.wait_for(number)
        self.attempt(lambda outlet: outlet.finish())
