"""Links over memory that trainer and engine share: CUDA IPC handles on one GPU, a file in shared memory on one CPU machine.

The trainer fills one of two slots while engines read the other; a TCP store carries the handle of the memory and says which slot is
full and which is free. The same lines on CPU and GPU but for how the memory is made and opened (CUDA: not run on a GPU yet).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlpost.types import InfrastructureError, SyncPlan, WeightsManifest
from rlpost.weights.buckets import Bucket
from rlpost.weights.collective import join_store, serve_store
from rlpost.weights.links import Carrier, LinkSettings, Placing, nowhere

SLOTS = 2
SHARED_MEMORY = Path("/dev/shm")
"""Where the slots' file is made on Linux; it is unlinked as soon as every engine opened it."""

LEAST_BYTES = 1 << 20


def _machine() -> str:
    """An identity of this running machine, the same in its containers' processes that share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else f"{uuid.getnode():x}"


def _slot(memory: torch.Tensor, number: int) -> torch.Tensor:
    size = memory.numel() // SLOTS
    return memory[(number % SLOTS) * size : (number % SLOTS + 1) * size]


def _make_memory(size: int, device: torch.device) -> tuple[torch.Tensor, tuple[str, Any], Path | None]:
    """``SLOTS`` slots of ``size`` bytes, how another process opens them, and the file to unlink once it did."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(SLOTS * size, dtype=torch.uint8, device=device)
        return memory, ("cuda", reduce_tensor(memory)), None
    directory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    handle, name = tempfile.mkstemp(prefix="rlpost-weights-", dir=directory)
    os.close(handle)
    path = Path(name)
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, SLOTS * size)  # else a full /dev/shm would kill the process on first touch
    except OSError as error:
        path.unlink()
        raise InfrastructureError(
            f"{SLOTS * size >> 20} MiB of shared memory for the weights cannot be had in {path.parent}: {error.strerror}; "
            "enlarge it, lower weights.bucket_mib, or use weights.transport=collective"
        ) from error
    return torch.from_file(str(path), shared=True, size=SLOTS * size, dtype=torch.uint8), ("file", str(path)), path


def _open_memory(handle: tuple[str, Any], size: int) -> torch.Tensor:
    kind, what = handle
    if kind == "cuda":
        rebuild, arguments = what
        memory: torch.Tensor = rebuild(*arguments)
        return memory
    return torch.from_file(what, shared=True, size=SLOTS * size, dtype=torch.uint8)


@dataclass
class IpcRendezvous:
    """Rank 0's open door."""

    settings: LinkSettings
    device: torch.device
    store: dist.TCPStore

    @classmethod
    def serve(cls, settings: LinkSettings, device: torch.device) -> IpcRendezvous:
        """Open the store; it says on which machine the memory is."""
        store = serve_store(settings.host, settings.world, settings.timeout_s)
        store.set("machine", _machine())
        return cls(settings, device, store)

    @property
    def address(self) -> tuple[str, int]:
        """Where members connect."""
        return self.settings.host, int(self.store.port)

    def join(self) -> IpcOutlet:
        """Wait for all members. Raises InfrastructureError when one is on another machine."""
        members = range(1, self.settings.world)
        self.store.wait([f"member/{rank}" for rank in members])
        here = _machine()
        elsewhere = [rank for rank in members if self.store.get(f"member/{rank}").decode() != here]
        if elsewhere:
            raise InfrastructureError(
                f"weights.transport=ipc needs engines on the trainer's machine, but engine workers {elsewhere} are on another one; "
                "use weights.transport=collective"
            )
        return IpcOutlet(self.store, self.settings.world, self.device)


class IpcOutlet:
    """Copies each buffer into a free slot."""

    def __init__(self, store: dist.TCPStore, world: int, device: torch.device) -> None:
        self._store: Any = store
        self._readers = range(1, world)
        self._device = device
        self._memory: torch.Tensor | None = None
        self._sent = 0

    def begin(self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket]) -> None:
        """Make slots that hold the largest buffer, unless they are there."""
        largest = max([LEAST_BYTES, plan.message_bytes, *(bucket.size for bucket in buckets)])
        if self._memory is not None and self._memory.numel() >= SLOTS * largest:
            return
        self._drain()
        self._memory, handle, path = _make_memory(-(-largest // LEAST_BYTES) * LEAST_BYTES, self._device)
        try:
            self._store.set(f"memory/{self._sent}", pickle.dumps((handle, self._memory.numel() // SLOTS)))
            self._store.wait([f"opened/{self._sent}/{rank}" for rank in self._readers])
        finally:
            if path is not None:
                path.unlink(missing_ok=True)

    def send(self, buffer: torch.Tensor) -> Callable[[], None]:
        """See Outlet. The buffer may be overwritten at once: a slot has its bytes."""
        assert self._memory is not None, "begin() comes first"
        if self._sent >= SLOTS:
            self._wait_read(self._sent - SLOTS)
        _slot(self._memory, self._sent)[: buffer.numel()].copy_(buffer)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._store.set(f"full/{self._sent}", b"")
        self._sent += 1
        return lambda: None

    def _wait_read(self, number: int) -> None:
        keys = [f"read/{number}/{rank}" for rank in self._readers]
        self._store.wait(keys)
        self._refuse_left()
        for key in [*keys, f"full/{number}"]:
            self._store.delete_key(key)

    def _drain(self) -> None:
        for number in range(max(0, self._sent - SLOTS), self._sent):
            self._store.wait([f"read/{number}/{rank}" for rank in self._readers])
        self._refuse_left()

    def _refuse_left(self) -> None:
        left = [rank for rank in self._readers if self._store.check([f"left/{rank}"])]
        if left:
            raise InfrastructureError(f"engine workers {left} stopped reading")

    def finish(self) -> None:
        """Wait until all was read."""
        self._drain()

    def acknowledge(self, version: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Free the memory; readers that still wait get an error at once."""
        self._memory = None
        self._store = None


class IpcInlet:
    """Reads each buffer where the trainer put it; nothing is copied here."""

    def __init__(self, settings: LinkSettings, device: torch.device) -> None:
        self._rank = settings.rank
        self._store: Any = join_store(settings.host, settings.port, settings.world, settings.timeout_s)
        self._store.set(f"member/{self._rank}", _machine())
        self._memory: torch.Tensor | None = None
        self._received = 0

    def stream(
        self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket], sizes: Sequence[int], place: Placing = nowhere
    ) -> Iterator[torch.Tensor]:
        """See Inlet."""
        if self._memory is None or self._memory.numel() < SLOTS * max([LEAST_BYTES, *sizes]):
            handle, size = pickle.loads(self._store.get(f"memory/{self._received}"))
            self._memory = _open_memory(handle, size)
            self._store.set(f"opened/{self._received}/{self._rank}", b"")
        try:
            for size in sizes:
                self._store.wait([f"full/{self._received}"])
                yield _slot(self._memory, self._received)[:size]
                if self._memory.is_cuda:
                    torch.cuda.synchronize(self._memory.device)
                self._store.set(f"read/{self._received}/{self._rank}", b"")
                self._received += 1
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Tell the trainer, also where it waits for this reader now."""
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self._rank}", b"")
            for number in range(self._received, self._received + SLOTS):
                self._store.set(f"read/{number}/{self._rank}", b"")

    def close(self) -> None:
        """Leave."""
        self._memory = None
        self._store = None


CARRIER = Carrier(live=True, serve=IpcRendezvous.serve, enter=IpcInlet)
