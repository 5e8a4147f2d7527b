"""Trainer ranks in plain processes of this machine, joined over gloo or NCCL, called like the driver's TrainerGroup. No Ray.

A process imports torch once (seconds) and is a rank of one group after the other (milliseconds). None outlives the block that it was
started for: it ends when its pipe closes, and is killed when it does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rlpost.training.protocol import WorkerSettings
from rlpost.types import InfrastructureError

MAKE = "make"
NUMBERS = itertools.count()
"""Of calls: a late answer is not taken for that of the next call."""
START_S = 120.0
"""torch and transformers are imported meanwhile, by several processes at once."""
END_S = 5.0


def serve(connection: Connection, gpu: str, log: str) -> None:
    """A rank's process: answers calls ``(number, method, arguments)`` with ``(number, succeeded, result or error in words)``.

    It ends when the pipe closes. What it and its libraries print goes to the file ``log``.
    """
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    # torch asks for the name of each peer, and a name server that does not answer would cost seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    import rlpost.diagnosis.verify_rank  # noqa: F401  # the seconds that it takes run in all processes at once

    rank: Any = None
    while True:
        try:
            number, method, arguments = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # without waiting for what torch has under way
        try:
            if method == MAKE:
                rank = _make(rank, *arguments)
                answer = (number, True, rank.address())
            else:
                answer = (number, True, getattr(rank, method)(*arguments))
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller is told
            answer = (number, False, f"{type(error).__name__}: {error}")
        connection.send(answer)


def _make(before: Any, rank: int, world: int, settings: WorkerSettings) -> Any:
    """The rank of a new group, after the process has left the one before."""
    import torch.distributed as dist

    from rlpost.diagnosis.verify_rank import ExactRank

    del before
    if dist.is_initialized():
        dist.destroy_process_group()
    return ExactRank(rank, world, settings)


class RankProcess:
    """One process, and this end of its pipe."""

    def __init__(self, gpu: str, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, gpu, str(log)), daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        """Ask it to end, and see that it does."""
        self.connection.close()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def rank_processes(gpus: Sequence[str], log: Path) -> Iterator[list[RankProcess]]:
    """One process for each entry, which is what it sees as CUDA_VISIBLE_DEVICES (empty: no GPU); ``log`` is where they write."""
    found: list[RankProcess] = []
    try:
        for gpu in gpus:
            found.append(RankProcess(gpu, log))
        yield found
    finally:
        for one in found:
            with contextlib.suppress(OSError):  # closed already
                one.connection.close()
        for one in found:
            one.close()


class LocalGroup:
    """All ranks of a model, one a process; what the driver uses of a TrainerGroup. Results are lists by rank.

    ``micro_batches`` are how many each update of the first rank had, in order.
    """

    def __init__(self, role: str, processes: Sequence[RankProcess], timeout_s: float) -> None:
        self.role, self.processes, self.timeout_s = role, list(processes), timeout_s
        self.micro_batches: list[int] = []

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.processes)

    async def setup(self, settings: WorkerSettings) -> None:
        """Make the ranks and bring them up."""
        addresses = await self.call_each(MAKE, [(rank, self.world, settings) for rank in range(self.world)], timeout_s=START_S)
        await self.call("setup", *addresses[0], timeout_s=START_S)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call ``method`` on every rank with the same arguments."""
        return await self.call_each(method, [args] * self.world, timeout_s=timeout_s)

    async def call_each(self, method: str, arguments: Sequence[Sequence[Any]], timeout_s: float | None = None) -> list[Any]:
        """Call ``method`` on every rank with its own arguments. Raises InfrastructureError when a rank fails, dies or is late."""
        if method == "update":
            self.micro_batches.append(len(arguments[0][0].micro_batches))
        number = next(NUMBERS)
        for rank, (one, values) in enumerate(zip(self.processes, arguments, strict=True)):
            try:
                one.connection.send((number, method, tuple(values)))
            except OSError as error:
                raise InfrastructureError(f"{self.role} rank {rank} is gone before {method}: {error}") from error
        return await asyncio.to_thread(self._answers, number, method, timeout_s or self.timeout_s)

    def _answers(self, number: int, method: str, timeout_s: float) -> list[Any]:
        """One answer of each rank; the first failure is raised at once: its peers may wait for it until their own deadline."""
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {one.connection: rank for rank, one in enumerate(self.processes)}
        results: list[Any] = [None] * self.world
        while waiting:
            ready: list[Any] = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise InfrastructureError(f"{self.role} ranks {sorted(waiting.values())} did not finish {method} within {timeout_s:.0f} s")
            for connection in ready:
                rank = waiting[connection]
                try:
                    answered, succeeded, result = connection.recv()
                except (EOFError, OSError) as error:
                    raise InfrastructureError(f"{self.role} rank {rank} died in {method}") from error
                if answered != number:  # of an earlier call that another rank made fail
                    continue
                del waiting[connection]
                if not succeeded:
                    raise InfrastructureError(f"{self.role} rank {rank} failed in {method}: {result}")
                results[rank] = result
        return results
