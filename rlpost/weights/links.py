"""Connections that carry weights from the trainer to engine workers: what they have in common, and the catalogue of carriers.

One link joins a trainer rank (its outlet; rank 0 but for memory shared on a GPU) and the workers of one or more engines (their inlets).
It carries a sequence of byte buffers in order. A carrier is one module with an Outlet and an Inlet and one line in ``CARRIERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlpost.plugins import resolve
from rlpost.types import SyncPlan, WeightsManifest
from rlpost.weights.buckets import Bucket

if TYPE_CHECKING:
    import torch

CARRIERS = {
    "collective": "rlpost.weights.collective:CARRIER",
    "ipc": "rlpost.weights.ipc:CARRIER",
    "disk": "rlpost.weights.disk:CARRIER",
}


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """How both ends find each other. ``world`` counts the sending trainer rank and all engine workers; ``rank`` is 0 for the trainer."""

    name: str
    carrier: str
    world: int
    timeout_s: float
    sender: int = 0
    """The trainer rank at the other end."""
    backend: str = "gloo"
    directory: str = ""
    """Where the disk carrier writes (a path or an fsspec URL)."""
    model_path: str = ""
    host: str = ""
    port: int = 0
    rank: int = 0


Placing = Callable[[int], "torch.Tensor | None"]


def nowhere(_number: int) -> torch.Tensor | None:
    """No buffer is wanted in a certain place."""
    return None


class Outlet(Protocol):
    """The trainer's end."""

    def begin(self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket]) -> None:
        """A sync starts; what follows are its buckets in order, or (none given) one message of ``plan.message_bytes``."""

    def send(self, buffer: torch.Tensor) -> Callable[[], None]:
        """Begin to send a uint8 buffer. The returned function waits until it was sent and may be overwritten."""

    def finish(self) -> None:
        """All of it was sent."""

    def acknowledge(self, version: int) -> None:
        """Every engine holds ``version``: older ones may be thrown away."""

    def close(self) -> None:
        """Leave; who still waits hears of it."""


class Inlet(Protocol):
    """An engine worker's end."""

    def stream(
        self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket], sizes: Sequence[int], place: Placing = nowhere
    ) -> Iterator[torch.Tensor]:
        """The buffers in order, of these sizes, each valid until the next one is asked for. Raises within the link's deadline.

        ``place(n)`` is memory in which buffer n is wanted, or None; a carrier may write it there and yield just that.
        """

    def close(self) -> None:
        """Leave."""


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """A kind of link. ``live``: both ends must be there at the same time, so engines that load from it directly are paused meanwhile."""

    live: bool
    serve: Callable[[LinkSettings, torch.device], Any]
    """Trainer: open the rendezvous; returns an object with ``address`` (host, port) and ``join()`` -> Outlet."""
    enter: Callable[[LinkSettings, torch.device], Inlet]
    """Engine worker: connect; blocks until all members did."""


def carrier(name: str) -> Carrier:
    """The carrier called ``name`` in the catalogue, or at an import path."""
    found: Carrier = resolve(name, kind="weight carrier", group="rlpost.weight_carriers", catalogue=CARRIERS)
    return found
