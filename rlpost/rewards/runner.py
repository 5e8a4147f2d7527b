"""Scores trajectories with reward functions that run in processes of their own, so that no reward can harm the run.

    score(items) --calls--> queue --batches--> one task a worker --socket--> worker process (worker.py)
                 <--outcomes-- parts of each item <--Started, Finished--

One call is one function on one item. The worker says when a call starts and what it gave. Hence when the worker
falls silent for longer than a call may take, or dies, the call in progress is known: it fails (``timeout``, ``worker_died``), a new worker
takes over, and all other calls are made there. When several asynchronous calls were in progress, each of them is made again alone,
so that the guilty one is found.

Guaranteed: every item gets exactly one outcome, in the order of the items; each call is given one result; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import traceback
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlpost.rewards.resolve import reward_names
from rlpost.rewards.wire import Batch, CallRequest, Finished, Ready, Setup, Started, Unreadable, encode
from rlpost.rewards.worker_process import Silence, WorkerDied, WorkerProcess
from rlpost.types import ConfigError, Failure, FailureKind, InfrastructureError, RewardItem, RewardOutcome

if TYPE_CHECKING:
    from rlpost.config.schema import RewardConfig

BATCHES_PER_WORKER = 8
"""Synchronous calls are dealt in this many batches a worker, so that one slow batch does not leave the other workers idle."""

ASYNC_GRACE_S = 2.0
"""The worker itself ends asynchronous calls at their deadline; the parent steps in this much later, when its loop is blocked."""


@dataclass(eq=False)
class _Job:
    """One item on its way: ``results`` has one place a function, ``done`` is set when all are filled."""

    item: RewardItem
    results: list[Finished | None]
    done: asyncio.Future[None]

    def set(self, function: int, result: Finished) -> None:
        self.results[function] = result
        if None not in self.results and not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False)
class _Call:
    """One function on one item. ``alone`` after it was in progress together with others when a worker was lost."""

    call_id: int
    function: int
    job: _Job
    alone: bool = False


@dataclass
class RewardRunner:
    """Runs the configured reward functions in ``workers`` processes; reward models among ``configs`` are others' work.

    ``timeout_s`` is the deadline of one call of one function. ``field_names`` are the columns of the data besides the
    prompt, to check signatures against; None skips that. ``output`` is a file for what the functions print (default: this process's
    stderr). Use ``async with``, or ``start`` and ``close``; all in one event loop. ``score`` may be called concurrently.
    """

    configs: Sequence[RewardConfig]
    workers: int = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    field_names: Collection[str] | None = field(default=None, kw_only=True)
    output: Path | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        names_and_configs = zip(reward_names(self.configs), self.configs, strict=True)
        functions = [(name, config.weight) for name, config in names_and_configs if config.function is not None]
        if not functions:
            raise ConfigError("no reward function is configured: give rewards: [{function: ...}], or an environment that gives rewards.")
        if self.workers < 1:
            raise ConfigError(f"reward_runner.workers is {self.workers}, expected at least 1.")
        if not self.timeout_s > 0:
            raise ConfigError(f"reward_runner.timeout_s is {self.timeout_s}, expected more than 0 seconds.")
        self.names = [name for name, _ in functions]
        self._weights = [weight for _, weight in functions]
        names = None if self.field_names is None else sorted(self.field_names)
        self._setup = Setup(configs=list(self.configs), field_names=names, timeout_s=self.timeout_s)
        self._directory = Path.cwd()  # a worker that is started later resolves relative paths as the first one did
        self._ready = Ready(where=(), is_async=())
        self._queue: deque[_Call] = deque()
        self._filled = asyncio.Event()
        self._call_ids = itertools.count()
        self._open_jobs: set[_Job] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._broken: BaseException | None = None

    async def __aenter__(self) -> RewardRunner:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers and check every function. Raises ConfigError (a function does not fit) or InfrastructureError."""
        if self._tasks:
            raise RuntimeError("RewardRunner.start was called twice")
        started = await asyncio.gather(*(self._start_worker() for _ in range(self.workers)), return_exceptions=True)
        running = [worker for worker in started if isinstance(worker, WorkerProcess)]
        errors = [error for error in started if isinstance(error, BaseException)]
        if errors:
            await asyncio.gather(*(worker.close() for worker in running))
            raise errors[0]
        self._ready = running[0].ready
        self._broken = None
        for worker in running:
            task = asyncio.create_task(self._serve(worker), name="reward worker")
            task.add_done_callback(self._on_task_end)
            self._tasks.append(task)

    async def score(self, items: Sequence[RewardItem]) -> list[RewardOutcome]:
        """Score all items; the outcomes are in the order of the items.

        A failing function is part of the outcome, never an exception. Raises InfrastructureError when the workers
        cannot be kept running or the runner is closed meanwhile.
        """
        if self._broken is not None:
            raise InfrastructureError(f"the reward workers stopped: {self._broken}") from self._broken
        if not self._tasks:
            raise RuntimeError("RewardRunner.score needs a started runner: call start() first, or use `async with`")
        loop = asyncio.get_running_loop()
        # Tokens are for reward models; here they would only be pickled.
        items = [replace(item, trajectory_tokens=None) for item in items]
        jobs = [_Job(item, [None] * len(self.names), loop.create_future()) for item in items]
        self._open_jobs.update(jobs)
        try:
            self._queue.extend(_Call(next(self._call_ids), function, job) for job in jobs for function in range(len(self.names)))
            self._filled.set()
            await asyncio.gather(*(job.done for job in jobs))
        finally:
            self._open_jobs.difference_update(jobs)
            for job in jobs:
                job.done.cancel()  # calls of an abandoned score are skipped; no effect on finished jobs
        return [self._outcome(job) for job in jobs]

    async def close(self) -> None:
        """End all workers, within seconds even when a call hangs. A score in progress raises. May be called twice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_open_jobs(InfrastructureError("the reward runner was closed while items were being scored"))
        self._queue.clear()

    async def _start_worker(self) -> WorkerProcess:
        return await WorkerProcess.start(self._setup, self._directory, self.output)

    async def _serve(self, worker: WorkerProcess) -> None:
        """One worker's task: batch after batch; a lost worker is replaced."""
        try:
            while True:
                calls = await self._next_batch()
                if not await self._run(worker, calls):
                    worker = await self._start_worker()
        finally:
            await worker.close()

    async def _next_batch(self) -> list[_Call]:
        """Wait for calls and take a share of the queue; a call that must be alone comes alone."""
        while True:
            shares = self.workers * (1 if any(self._ready.is_async) else BATCHES_PER_WORKER)
            size = math.ceil(len(self._queue) / shares)
            calls: list[_Call] = []
            while self._queue and len(calls) < size and not (calls and (calls[0].alone or self._queue[0].alone)):
                call = self._queue.popleft()
                if not call.job.done.done():  # else nobody waits for it any more
                    calls.append(call)
            if calls:
                return calls
            self._filled.clear()
            await self._filled.wait()

    async def _run(self, worker: WorkerProcess, calls: list[_Call]) -> bool:
        """Make the calls; False when the worker was lost: then the guilty call has failed and the others are queued again."""
        waiting = {call.call_id: call for call in calls}
        running: dict[int, _Call] = {}
        try:
            frame = encode(Batch(calls=[CallRequest(call_id=c.call_id, function=c.function, item=c.job.item) for c in calls]))
        except Exception:  # noqa: BLE001 - pickling runs code of whatever classes the user's fields have
            self._refuse(calls, "gets fields that cannot be sent to a worker process", traceback.format_exc())
            return True
        try:
            await worker.send(frame)
            while waiting:
                message = await worker.receive(self._patience(running))
                if isinstance(message, Started):
                    running[message.call_id] = waiting[message.call_id]
                elif isinstance(message, Unreadable):
                    self._refuse(calls, "gets fields that the worker process cannot read", message.traceback)
                    return True
                else:
                    running.pop(message.call_id, None)
                    call = waiting.pop(message.call_id)
                    call.job.set(call.function, message)
            return True
        except (Silence, WorkerDied) as loss:
            await self._bury(worker, loss, waiting, running)
            return False
        except asyncio.CancelledError:
            await worker.kill()  # busy, so it would not end by itself
            raise

    def _patience(self, running: Mapping[int, _Call]) -> float:
        """Seconds of silence that the calls in progress may cause."""
        if len(running) == 1 and not self._ready.is_async[next(iter(running.values())).function]:
            return self.timeout_s
        return self.timeout_s + ASYNC_GRACE_S

    async def _bury(self, worker: WorkerProcess, loss: Exception, waiting: Mapping[int, _Call], running: Mapping[int, _Call]) -> None:
        """Name the guilty call of a lost worker and queue the others again, in front."""
        ending = await worker.kill(dump_traceback=isinstance(loss, Silence))
        again = dict(waiting)
        if len(running) > 1:
            for call in running.values():
                call.alone = True  # each again by itself: then the guilty one is known
        else:
            # Nothing in progress: the worker was lost before its first call; blaming that one guarantees progress.
            guilty = next(iter(running.values()), None) or next(iter(waiting.values()))
            del again[guilty.call_id]
            if isinstance(loss, Silence):
                self._fail([guilty], "timeout", f"did not answer within {self.timeout_s:g} s; its worker was killed", ending.traceback)
            else:
                self._fail([guilty], "worker_died", f"ended its worker process ({ending.status})", ending.traceback)
        self._queue_again(again.values())

    def _refuse(self, calls: Sequence[_Call], what: str, trace: str) -> None:
        """A batch that could not be pickled or unpickled: one call fails, of several each is tried alone."""
        if len(calls) == 1:
            self._fail(calls, "raised", what, trace)
            return
        for call in calls:
            call.alone = True
        self._queue_again(calls)

    def _queue_again(self, calls: Collection[_Call]) -> None:
        self._queue.extendleft(sorted(calls, key=lambda call: (not call.alone, call.call_id), reverse=True))
        self._filled.set()

    def _fail(self, calls: Collection[_Call], kind: FailureKind, what: str, trace: str) -> None:
        for call in calls:
            message = f"reward {self.names[call.function]}: {self._ready.where[call.function]} {what}; prompt {call.job.item.prompt_id}"
            call.job.set(call.function, Finished(call_id=call.call_id, kind=kind, message=message, traceback=trace))

    def _outcome(self, job: _Job) -> RewardOutcome:
        """The weighted sum, or the failure: the first real one, else the first None."""
        results = dict(zip(self.names, (result for result in job.results if result is not None), strict=True))
        failed = [name for name, result in results.items() if result.kind is not None]
        failure = None
        if failed:
            worst = next((name for name in failed if results[name].kind != "not_scorable"), failed[0])
            result = results[worst]
            assert result.kind is not None
            failure = Failure(kind=result.kind, where=worst, message=result.message, traceback=result.traceback)
        parts = zip(self._weights, results.values(), strict=True)
        value = None if failure else sum(weight * (result.value or 0.0) for weight, result in parts)
        return RewardOutcome(
            trajectory_id=job.item.trajectory_id,
            value=value,
            parts={name: result.value for name, result in results.items()},
            metrics={f"{name}/{metric}": figure for name, result in results.items() for metric, figure in result.metrics.items()},
            failure=failure,
        )

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """A worker's task ends only by close(); anything else reaches every waiting score at once."""
        if task.cancelled() or task not in self._tasks:
            return
        self._broken = task.exception() or RuntimeError("a reward worker's task ended early")
        self._fail_open_jobs(InfrastructureError(f"a reward worker could not be kept running: {self._broken}"))

    def _fail_open_jobs(self, error: Exception) -> None:
        for job in self._open_jobs:
            if not job.done.done():
                job.done.set_exception(error)
