"""Trainer ranks in long-lived processes, joined over gloo, and the uneven little batches that they train on.

A process imports torch and transformers once (seconds); tests make and leave process groups inside it (milliseconds).
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.config.schema import OptimizerConfig, TrainingConfig
from rlpost.models.embedded import build
from rlpost.training.packing import pack, unpack
from rlpost.training.protocol import UpdateRequest, WorkerSettings
from rlpost.types import Group, LossComponent, LossTerms, Prompt, Trajectory

RANKS = 2
RECEIVER = RANKS
"""Index of the process that plays engines."""
THIRD_RANK = RECEIVER + 1
"""Index of one more trainer process, started by the first test that asks for three ranks."""

CALL_TIMEOUT_S = 60.0
GROUP_TIMEOUT_S = 30.0
FIRST_ID, LAST_ID = 4, 98
"""Token ids of printable characters in the embedded models' vocabulary."""


# ---- what runs in the processes ----------------------------------------------------------------------------------------

_worker: Any = None


def _import(modules: Sequence[str]) -> int:
    """What takes the time; returns the process's id."""
    for module in modules:
        importlib.import_module(module)
    return os.getpid()


def _make(kind: str, rank: int, world: int, settings: Any) -> tuple[str, int]:
    """The rank of a class ``MODULE:NAME``; returns an address for the ranks' rendezvous."""
    module, _, name = kind.partition(":")
    global _worker
    _worker = getattr(importlib.import_module(module), name)(rank, world, settings)
    address: tuple[str, int] = _worker.address()
    return address


def _call(method: str, arguments: Sequence[Any]) -> Any:
    return getattr(_worker, method)(*arguments)


def _apply(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    return function(_worker, *arguments)


def _leave() -> None:
    import torch.distributed as dist

    global _worker
    _worker = None
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- what tests use ----------------------------------------------------------------------------------------------------


TRAINER = "rlpost.training.worker:TrainerRank"
TRAINER_MODULES = ("rlpost.training.worker", "transformers.models.auto.modeling_auto")


class RankProcesses:
    """Two processes for trainer ranks, one for a receiver of weights, and a third for trainer ranks when it is asked for.

    ``modules`` is what the trainers' processes import at once.
    """

    def __init__(self, modules: Sequence[str] = TRAINER_MODULES) -> None:
        # torch asks for the name of every peer that it connects to: a name server that is slow to answer would cost five seconds each time.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        context = multiprocessing.get_context("spawn")
        self._modules = modules
        self._pools = [ProcessPoolExecutor(1, mp_context=context) for _ in range(THIRD_RANK + 1)]
        everywhere = [modules] * RANKS + [["rlpost.weights.collective"]]
        self._pids = gather([pool.submit(_import, names) for pool, names in zip(self._pools, everywhere, strict=False)])

    def submit(self, process: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a module-level function in one of the processes."""
        if process == len(self._pids):
            self._pids.append(self._pools[process].submit(_import, self._modules).result(CALL_TIMEOUT_S))
        return self._pools[process].submit(function, *args)

    @contextmanager
    def trainers(self, settings: Any, *, ranks: int, kind: str = TRAINER) -> Iterator[Trainers]:
        """``ranks`` trainer ranks (of the class ``kind``) that are set up; they leave their group with the block."""
        trainers = Trainers(self, ranks)
        try:
            addresses = gather([self.submit(process, _make, kind, rank, ranks, settings) for rank, process in trainers.processes_of()])
            trainers.reports = trainers.call("setup", *addresses[0])
            yield trainers
        finally:
            for future in [self.submit(process, _leave) for _, process in trainers.processes_of()]:
                future.result(CALL_TIMEOUT_S)

    def close(self) -> None:
        """End the processes, also those that a failed test left in a collective."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # one that a test let die
                os.kill(pid, signal.SIGKILL)
        for pool in self._pools:
            pool.shutdown(wait=True, cancel_futures=True)


class Trainers:
    """The ranks of one test, called together. Results are lists by rank; the first failure is raised."""

    def __init__(self, processes: RankProcesses, ranks: int) -> None:
        self.processes, self.ranks = processes, ranks
        self.reports: list[Any] = []

    def processes_of(self) -> list[tuple[int, int]]:
        """Each rank and the index of its process."""
        return [(rank, rank if rank < RANKS else THIRD_RANK + rank - RANKS) for rank in range(self.ranks)]

    def submit(self, method: str, *args: Any) -> list[Future[Any]]:
        """Begin a call of a TrainerRank's method on every rank."""
        return [self.processes.submit(process, _call, method, args) for _, process in self.processes_of()]

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a TrainerRank's method on every rank with the same arguments."""
        return gather(self.submit(method, *args))

    def submit_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Future[Any]]:
        """Begin a call of a TrainerRank's method on every rank with its own arguments."""
        return [self.processes.submit(process, _call, method, arguments[rank]) for rank, process in self.processes_of()]

    def call_each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a TrainerRank's method on every rank with its own arguments."""
        return gather(self.submit_each(method, arguments))

    def apply(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(worker, *args)`` on every rank."""
        return gather([self.processes.submit(process, _apply, function, args) for _, process in self.processes_of()])

    def apply_each(self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Call ``function(worker, *args)`` on every rank with its own arguments."""
        return gather([self.processes.submit(process, _apply, function, arguments[rank]) for rank, process in self.processes_of()])

    def logprobs(self, method: str, terms: Sequence[LossTerms], temperature: float, *, micro_batch_tokens: int) -> list[np.ndarray]:
        """``logprobs`` or ``reference_logprobs`` of each trajectory ``[tokens]``, NaN where nothing is trained."""
        packed = pack(terms, ranks=self.ranks, micro_batch_tokens=micro_batch_tokens)
        return unpack(packed, self.call_each(method, [(micros, temperature) for micros in packed]), terms)


def gather(futures: Sequence[Future[Any]]) -> list[Any]:
    """The results of calls that run together; raises the first failure without waiting for the others."""
    done, pending = wait(futures, timeout=CALL_TIMEOUT_S, return_when=FIRST_EXCEPTION)
    for future in futures:
        if future in done and future.exception() is not None:
            future.result()
    assert not pending, f"{len(pending)} of {len(futures)} ranks did not answer within {CALL_TIMEOUT_S:.0f} s"
    return [future.result() for future in futures]


def worker_settings(
    model: str | Path = "tiny-sort5",
    *,
    optimizer: OptimizerConfig | None = None,
    training: TrainingConfig | None = None,
    total_updates: int | None = 10,
    seed: int = 0,
    reference: str | None = None,
) -> WorkerSettings:
    """Settings of CPU ranks for an embedded model or a directory; ``reference`` is an embedded model that stands beside."""
    training = training or TrainingConfig()
    if optimizer is not None:
        training.optimizer = optimizer
    return WorkerSettings(
        model_path=str(model if isinstance(model, Path) else build(model)),
        training=training,
        dtype="float32",
        device="cpu",
        attention="padded",
        total_updates=total_updates,
        seed=seed,
        timeout_s=GROUP_TIMEOUT_S,
        reference_mode="none" if reference is None else "initial",
        reference_path=str(build(reference)) if reference else None,
    )


def update_requests(
    terms: Sequence[LossTerms],
    denominator: float,
    components: Sequence[LossComponent],
    *,
    ranks: int,
    micro_batch_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[tuple[UpdateRequest]]:
    """One optimizer step, as the driver asks each rank for it."""
    return [
        (
            UpdateRequest(
                micro_batches=micros,
                denominators={"weight": denominator},
                components=components,
                temperature=temperature,
                measure_parity=True,
            ),
        )
        for micros in pack(terms, ranks=ranks, micro_batch_tokens=micro_batch_tokens)
    ]


# ---- batches -----------------------------------------------------------------------------------------------------------

Sample = tuple[float | None, Sequence[int]]
"""Reward, and the lengths of what follows the prompt: sampled, observed, sampled ... (a leading 0: observed comes first)."""

UNEVEN: Sequence[tuple[int, Sequence[Sample]]] = (
    (5, [(1.0, [1]), (0.0, [7, 3, 4]), (0.5, [55])]),
    (1, [(0.0, [1]), (1.0, [20, 10, 2])]),
    (12, [(1.0, [9]), (None, [30]), (0.0, [0, 4, 2, 1, 1])]),
    (3, [(1.0, [3]), (1.0, [6])]),
    (8, [(1.0, [50]), (0.0, [52]), (0.3, [44, 4, 4])]),
    (2, [(0.0, [40]), (1.0, [35])]),
)
"""Groups as (prompt length, samples): 2 to 60 tokens, tool gaps, a failed reward, a group without variance."""


def make_groups(shapes: Sequence[tuple[int, Sequence[Sample]]] = UNEVEN, *, seed: int = 0, version: int = 0) -> list[Group]:
    """Groups of random tokens; ``logprobs`` are -1 until :func:`with_logprobs`."""
    random = np.random.default_rng(seed)
    groups = []
    for index, (prompt_length, samples) in enumerate(shapes):
        prompt = random.integers(FIRST_ID, LAST_ID, prompt_length)
        trajectories = []
        for sample, (reward, lengths) in enumerate(samples):
            sampled = np.concatenate([np.full(length, position % 2 == 0) for position, length in enumerate(lengths)])
            trainable = np.concatenate([np.zeros(prompt_length), sampled]).astype(bool)
            trajectories.append(
                Trajectory(
                    trajectory_id=f"g{index}.{sample}",
                    group_id=f"g{index}",
                    prompt_id=f"p{index}",
                    tokens=np.concatenate([prompt, random.integers(FIRST_ID, LAST_ID, len(sampled))]).astype(np.int32),
                    trainable=trainable,
                    logprobs=np.where(trainable, -1.0, np.nan).astype(np.float32),
                    versions=np.where(trainable, version, -1).astype(np.int32),
                    prompt_length=prompt_length,
                    reward=reward,
                )
            )
        groups.append(Group(group_id=f"g{index}", index=index, prompt=Prompt(prompt_id=f"p{index}"), trajectories=tuple(trajectories)))
    return groups


def with_logprobs(groups: Sequence[Group], values: Mapping[str, np.ndarray]) -> list[Group]:
    """The same groups with these logprobs ``[tokens]`` by trajectory as the engine's."""
    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, logprobs=np.where(t.trainable, values[t.trajectory_id], np.nan).astype(np.float32)) for t in group.trajectories
            ),
        )
        for group in groups
    ]
