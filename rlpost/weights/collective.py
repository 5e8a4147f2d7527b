"""Links over a process group: one broadcast a buffer, from trainer rank 0 to every engine worker (gloo on CPU, NCCL on GPU).

The group is made by hand from a store, beside and independent of any default group: the trainer ranks have one of their
own, and vLLM has others. gloo and NCCL run the same lines (NCCL: not run on a GPU yet).
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rlpost.types import SyncPlan, WeightsManifest
from rlpost.weights.buckets import Bucket
from rlpost.weights.links import Carrier, LinkSettings, Placing, nowhere

SENDER_RANK = 0

AHEAD = 6
"""Messages that a receiver waits for at once, where they go straight to their places: the sender never waits for it then."""


def serve_store(host: str, world: int, timeout_s: float) -> dist.TCPStore:
    """The sender's rendezvous point, on a port that the system picks (``store.port``)."""
    return dist.TCPStore(host, 0, world, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout_s))


def join_store(host: str, port: int, world: int, timeout_s: float) -> dist.TCPStore:
    """A receiver's connection to the sender's rendezvous point."""
    return dist.TCPStore(host, port, world, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))


def make_group(store: dist.TCPStore, *, backend: str, rank: int, world: int, timeout_s: float) -> Any:
    """Blocks until all ``world`` members called it; raises after ``timeout_s``."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(dist.PrefixStore("rlpost-weights", store), rank, world, timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(dist.PrefixStore("rlpost-weights", store), rank, world, options)
    raise AssertionError(f"unknown collective backend {backend!r}")


def start_broadcast(group: Any, buffer: torch.Tensor) -> Any:
    """Begin to send (rank 0) or receive ``buffer``; the result's ``wait()`` ends it."""
    options = dist.BroadcastOptions()
    options.rootRank = SENDER_RANK
    options.rootTensor = 0
    return group.broadcast([buffer], options)


@dataclass
class CollectiveRendezvous:
    """Rank 0's open door."""

    settings: LinkSettings
    store: dist.TCPStore

    @classmethod
    def serve(cls, settings: LinkSettings, _device: torch.device) -> CollectiveRendezvous:
        """Open the store on ``settings.host``."""
        return cls(settings, serve_store(settings.host, settings.world, settings.timeout_s))

    @property
    def address(self) -> tuple[str, int]:
        """Where members connect."""
        return self.settings.host, int(self.store.port)

    def join(self) -> CollectiveOutlet:
        """Wait for all members."""
        settings = self.settings
        group = make_group(self.store, backend=settings.backend, rank=0, world=settings.world, timeout_s=settings.timeout_s)
        return CollectiveOutlet(self.store, group)


class CollectiveOutlet:
    """Broadcasts each buffer. The store must live as long as the group."""

    def __init__(self, store: dist.TCPStore, group: Any) -> None:
        self._store: Any = store
        self._group = group

    def begin(self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket]) -> None:
        """Nothing to prepare."""

    def send(self, buffer: torch.Tensor) -> Callable[[], None]:
        """See Outlet."""
        wait: Callable[[], None] = start_broadcast(self._group, buffer).wait
        return wait

    def finish(self) -> None:
        """Nothing to do."""

    def acknowledge(self, version: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Leave: members that still wait get an error at once."""
        self._group = None
        self._store = None


class CollectiveInlet:
    """Receives one buffer while the one before it is being used."""

    def __init__(self, settings: LinkSettings, device: torch.device) -> None:
        self._device = device
        self._store: Any = join_store(settings.host, settings.port, settings.world, settings.timeout_s)
        self._group: Any = make_group(
            self._store, backend=settings.backend, rank=settings.rank, world=settings.world, timeout_s=settings.timeout_s
        )

    def stream(
        self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket], sizes: Sequence[int], place: Placing = nowhere
    ) -> Iterator[torch.Tensor]:
        """See Inlet."""
        own: list[torch.Tensor] = []
        turns = 0
        """Buffers of our own that were asked for: two of them take turns, so no more than the next one is received ahead."""
        waiting: deque[tuple[Any, torch.Tensor, bool]] = deque()
        number = 0
        for _ in range(len(sizes)):
            while number < len(sizes) and len(waiting) < AHEAD:
                buffer = place(number)
                mine = buffer is None
                if buffer is None:
                    if sum(held for _, _, held in waiting) > 1:
                        break
                    if len(own) < 2:
                        own.append(torch.empty(max(sizes), dtype=torch.uint8, device=self._device))
                    buffer = own[turns % 2][: sizes[number]]
                    turns += 1
                waiting.append((start_broadcast(self._group, buffer), buffer, mine))
                number += 1
            work, buffer, _ = waiting.popleft()
            work.wait()
            yield buffer

    def close(self) -> None:
        """Leave the group."""
        self._group = None
        self._store = None


CARRIER = Carrier(live=True, serve=CollectiveRendezvous.serve, enter=CollectiveInlet)
