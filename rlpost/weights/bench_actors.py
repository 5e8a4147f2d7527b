"""What the sync benchmark adds to a trainer rank and to an engine: several senders at once, changed weights, gauges, and two bare limits.

The ranks and engines are a run's own; everything here happens between the measured syncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlpost.rollout.engine import EngineSettings, VllmEngine
from rlpost.training.group import RankActor
from rlpost.training.model import reshard
from rlpost.training.protocol import WorkerSettings
from rlpost.training.worker import TrainerRank
from rlpost.weights.collective import join_store, make_group, serve_store, start_broadcast
from rlpost.weights.sender import WeightSender

CHUNK_ELEMENTS = 1 << 20
"""Elements that are changed at once: the change must not be what needs the most memory."""

LARGEST_BUFFER = 512 << 20
"""Bytes of the bare limits' one big tensor; what is larger goes through it in turns."""

LEAST_COPIES = 3
STATUS, CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PEAK = "5"
"""Written to ``clear_refs`` it resets VmHWM (Linux, proc(5))."""


# ---- memory of this process ------------------------------------------------------------------------------------------


def _status_gib(field: str) -> float | None:
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 2**20
    return None


def settle() -> float | None:
    """Give freed memory back to the system and begin to watch the peak. Resident GiB now; None where the system cannot tell."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # actors keep freed memory; it would hide what a sync needs
    try:
        CLEAR_PEAK.write_text(PEAK)
    except OSError:
        return None
    return _status_gib("VmRSS")


def peak() -> float | None:
    """Largest resident GiB since :func:`settle`."""
    return _status_gib("VmHWM")


# ---- the bare limits -------------------------------------------------------------------------------------------------


def copy_seconds(size: int, device: torch.device) -> float:
    """Seconds of a plain copy of ``size`` bytes in memory: the median of a few."""
    source = torch.ones(min(size, LARGEST_BUFFER), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(LEAST_COPIES):
        started = time.perf_counter()
        for start in range(0, size, LARGEST_BUFFER):
            part = min(LARGEST_BUFFER, size - start)
            target[:part].copy_(source[:part])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


class BareMember:
    """A member of a process group that broadcasts bytes and nothing else: the limit of the collective transport."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        self._store = store
        self._group = make_group(store, backend="gloo", rank=rank, world=world, timeout_s=timeout_s)

    def broadcast(self, size: int) -> float:
        """Send or receive ``size`` bytes; seconds until all members have them."""
        buffer = torch.ones(min(size, LARGEST_BUFFER), dtype=torch.uint8)
        self._group.barrier().wait()
        started = time.perf_counter()
        for start in range(0, size, LARGEST_BUFFER):
            start_broadcast(self._group, buffer[: min(LARGEST_BUFFER, size - start)]).wait()
        self._group.barrier().wait()
        return time.perf_counter() - started


# ---- the trainer's side ----------------------------------------------------------------------------------------------


def moved(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """New values, each with other bits than before in bfloat16 too; doing it often does not lead away. Zeros become small numbers."""
    factor = 1.25 + 0.5 * torch.rand(values.shape, generator=generator, device=values.device)
    away = torch.where(values.abs() < 1, values * factor, values / factor)
    return torch.where(values == 0, 1e-3 * factor, away)


class MeasuredRank(TrainerRank):
    """A trainer rank with one sender for each transport."""

    def __init__(self, rank: int, world: int, settings: WorkerSettings) -> None:
        super().__init__(rank, world, settings)
        self._senders: dict[str, WeightSender | None] = {}
        self._door: Any = None
        self._bare: BareMember | None = None

    def of_transport(self, transport: str, method: str, *arguments: Any) -> Any:
        """Call a method of this rank that uses its sender, with the transport's."""
        self.sender = self._senders.get(transport)
        try:
            return getattr(self, method)(*arguments)
        finally:
            self._senders[transport] = self.sender

    def forget(self, transport: str) -> None:
        """Let a transport go that cannot run here."""
        self._senders.pop(transport, None)
        self.sender = None

    @torch.no_grad()
    def change(self, share: float, turn: int) -> None:
        """Change about ``share`` of the trained elements that this rank owns; another ``turn`` chooses others."""
        generator = torch.Generator(self.device).manual_seed(1000003 * turn + self.rank)
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for part in local.detach().view(-1).split(CHUNK_ELEMENTS):
                chosen = torch.rand(part.shape, generator=generator, device=part.device) < share
                part[chosen] = moved(part[chosen], generator)

    def load_model(self, directory: str) -> None:
        """The model of a checkpoint, without its optimizer; the checkpoint may be of another number of ranks."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

        reshard(self.model)
        state: dict[str, Any] = {"model": get_model_state_dict(self.model)}
        dcp.load(state, checkpoint_id=str(Path(directory) / "tensors"))
        set_model_state_dict(self.model, state["model"])

    def settle(self) -> float | None:
        """See :func:`settle`; None on a GPU, whose memory it does not watch."""
        return settle() if self.device.type == "cpu" else None

    def peak(self) -> float | None:
        """See :func:`peak`."""
        return peak() if self.device.type == "cpu" else None

    def copy_seconds(self, size: int) -> float:
        """See :func:`copy_seconds`; measured on rank 0."""
        return copy_seconds(size, self.device) if self.rank == 0 else 0.0

    def serve_bare(self, world: int, timeout_s: float) -> tuple[str, int]:
        """Rank 0 opens the rendezvous of the bare broadcast."""
        if self.rank:
            return "", 0
        host = self.address()[0]
        self._door = serve_store(host, world, timeout_s)
        return host, int(self._door.port)

    def join_bare(self, world: int, timeout_s: float) -> None:
        """Rank 0 waits for the receivers."""
        if self.rank == 0:
            self._bare = BareMember(self._door, 0, world, timeout_s)

    def bare_broadcast(self, size: int) -> float:
        """Rank 0 sends; see BareMember."""
        return self._bare.broadcast(size) if self._bare is not None else 0.0


class MeasuredRankActor(RankActor):
    """The Ray actor of one measured rank."""

    def __init__(self, rank: int, world: int, settings: WorkerSettings) -> None:
        super().__init__(rank, world, settings)
        self.rank = MeasuredRank(rank, world, settings)


# ---- the engine's side -----------------------------------------------------------------------------------------------


class MeasuredEngine(VllmEngine):
    """An engine with gauges."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._bare: BareMember | None = None

    async def settle(self) -> float | None:
        """See :func:`settle`; None where vLLM computes in processes of its own."""
        return settle() if self.settings.in_actor else None

    async def peak(self) -> float | None:
        """See :func:`peak`."""
        return peak() if self.settings.in_actor else None

    async def join_bare(self, host: str, port: int, rank: int, world: int, timeout_s: float) -> None:
        """Become a receiver of the bare broadcast."""

        def join() -> BareMember:
            return BareMember(join_store(host, port, world, timeout_s), rank, world, timeout_s)

        self._bare = await asyncio.to_thread(join)

    async def bare_broadcast(self, size: int) -> float:
        """Receive; see BareMember."""
        assert self._bare is not None, "join_bare() comes first"
        return await asyncio.to_thread(self._bare.broadcast, size)
