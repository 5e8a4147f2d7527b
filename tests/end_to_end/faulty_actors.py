"""The actors of the tests of weight-sync faults: an engine and a trainer rank that do as rlpost's own until they are told to fail.

A fault acts where bytes come in or where weights are written: at the interfaces (Inlet.stream, LiveWeights.write and patch) that every
carrier and every kind of sync goes through.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlpost.rollout.engine import VllmEngine
from rlpost.training.group import RankActor

# ---- inside an engine's process ----------------------------------------------------------------------------------------

_armed: dict[str, tuple[str, int]] = {}
"""By place (``buffer``, ``piece``): what is to happen there once, and after how many uneventful passes."""
_released = threading.Event()
_received: Counter[str] = Counter()
"""Bytes that came in, by the kind of sync."""


def _due(place: str) -> str:
    """What happens at this pass; "" is nothing."""
    action, passes = _armed.get(place, ("", 0))
    if action and passes:
        _armed[place] = (action, passes - 1)
        return ""
    _armed.pop(place, None)
    if action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "refuse":
        raise RuntimeError("this engine was told to refuse")
    if action == "hang":
        _released.wait()
    return action


def _watch_stream(stream: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def watched(inlet: Any, plan: Any, *arguments: Any) -> Iterator[Any]:
        for buffer in stream(inlet, plan, *arguments):
            _received[plan.mode] += buffer.numel()
            if _due("buffer") == "flip":
                buffer = buffer.clone()  # memory may be shared with the other engine
                buffer[buffer.numel() // 2] ^= 0x10
            yield buffer

    return watched


def _watch_write(write: Callable[..., None]) -> Callable[..., None]:
    def watched(live: Any, *arguments: Any) -> None:
        if _due("piece") != "lose":
            write(live, *arguments)

    return watched


class FaultyEngine(VllmEngine):
    """An engine that can be told to fail."""

    async def start(self) -> dict[str, Any]:
        """As the engine's; then puts the watches in."""
        report = await super().start()
        from rlpost.weights.collective import CollectiveInlet
        from rlpost.weights.disk import DiskInlet
        from rlpost.weights.ipc import IpcInlet
        from rlpost.weights.layout import LiveWeights

        for inlet in (CollectiveInlet, DiskInlet, IpcInlet):
            inlet.stream = _watch_stream(inlet.stream)  # type: ignore[method-assign]
        LiveWeights.write = _watch_write(LiveWeights.write)  # type: ignore[method-assign]
        LiveWeights.patch = _watch_write(LiveWeights.patch)  # type: ignore[method-assign]
        self.outcomes: Counter[str] = Counter()
        return report

    async def collect(self, timeout_s: float, linger_s: float = 0.005) -> list[Any]:
        """As the engine's; counts how often each request was given a result."""
        items = await super().collect(timeout_s, linger_s)
        self.outcomes.update(request_id for request_id, _ in items)
        return items

    async def arm(self, place: str, action: str, passes: int = 0) -> None:
        """Once, after ``passes`` uneventful ones: ``flip`` a bit of a ``buffer``; ``lose`` a ``piece``; at either die, refuse, hang."""
        _released.clear()
        _armed[place] = (action, passes)

    async def release(self) -> None:
        """End a hang."""
        _released.set()

    async def pid(self) -> int:
        """The engine's process."""
        return os.getpid()

    async def armed(self) -> list[str]:
        """Places whose fault did not happen yet."""
        return list(_armed)

    async def take_received(self) -> dict[str, int]:
        """Bytes that came since the last call, by the kind of sync."""
        taken = dict(_received)
        _received.clear()
        return taken

    async def outcome_counts(self) -> dict[str, int]:
        """How often each request was given a result."""
        return dict(self.outcomes)


# ---- inside a trainer rank's process -----------------------------------------------------------------------------------


class FaultyRankActor(RankActor):
    """A trainer rank whose weights a test changes, reads and troubles."""

    def pid(self) -> int:
        """The rank's process."""
        return os.getpid()

    def nudge(self, share: float, seed: int) -> None:
        """Move this share of the elements of every parameter's shard by about the spread of its values."""
        import torch

        generator = torch.Generator().manual_seed(seed * self.rank.world + self.rank.rank)
        with torch.no_grad():
            for parameter in self.rank.model.parameters():
                local: Any = getattr(parameter, "_local_tensor", parameter)
                chosen = torch.rand(local.shape, generator=generator) < share
                local += chosen * torch.randn(local.shape, generator=generator) * (local.abs().mean() if local.numel() else 0.0)

    def full_weights(self) -> dict[str, np.ndarray]:
        """Every parameter as it is, gathered by FSDP's own means (a collective); empty but on rank 0."""
        tensors = {name: getattr(p, "full_tensor", lambda p=p: p)().detach().numpy() for name, p in self.rank.model.named_parameters()}
        return tensors if self.rank.rank == 0 else {}

    def limit_files(self, size: int | None) -> None:
        """From here on no file of this process may grow above ``size`` bytes, as on a full disk; None lifts it."""
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))
