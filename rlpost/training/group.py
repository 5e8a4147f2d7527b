"""All ranks of a trainer (or of a reference model) as Ray actors, called together with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from rlpost.cluster.actor_process import settle
from rlpost.cluster.node_network import use_node_network
from rlpost.cluster.references import result_of
from rlpost.training.protocol import WorkerSettings
from rlpost.types import InfrastructureError, RlpostError

DEATH_NOTICE_S = 3.0
"""Ray tells of a dead actor within about two seconds."""

DEADLINES = {"address": "schedule.start_timeout_s", "setup": "schedule.start_timeout_s", "weights": "weights.timeout_s"}
"""Settings behind the deadlines of calls that have one of their own; all others have the group's."""
GROUP_DEADLINE = "schedule.phase_timeout_s"


class RankActor:
    """The Ray actor of one rank. It brings torch up in its own process, not in the driver's."""

    def __init__(self, rank: int, world: int, settings: WorkerSettings) -> None:
        settle()
        use_node_network()
        from rlpost.training.worker import TrainerRank

        self.rank = TrainerRank(rank, world, settings)

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method of the rank."""
        return getattr(self.rank, method)(*arguments)


class TrainerGroup:
    """The ranks of one sharded model. Every call reaches all ranks; the first failure is raised with the rank's name."""

    def __init__(self, role: str, actors: Sequence[Any], timeout_s: float) -> None:
        self.role, self.actors, self.timeout_s = role, list(actors), timeout_s

    @classmethod
    def create(cls, role: str, settings: WorkerSettings, *, options: Sequence[dict[str, Any]], timeout_s: float) -> TrainerGroup:
        """Start one actor a rank; ``options`` are Ray's, one dictionary a rank (resources, placement)."""
        remote = ray.remote(RankActor)
        world = len(options)
        return cls(role, [remote.options(**option).remote(rank, world, settings) for rank, option in enumerate(options)], timeout_s)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.actors)

    async def setup(self, timeout_s: float) -> dict[str, Any]:
        """Bring all ranks up; returns rank 0's report."""
        host, port = await self._wait([self.actors[0].call.remote("address", ())], "address", timeout_s)
        reports = await self._wait_all([actor.call.remote("setup", (host, port)) for actor in self.actors], "setup", timeout_s)
        report: dict[str, Any] = reports[0]
        return report

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call ``method`` on every rank with the same arguments. Results by rank."""
        return await self.call_each(method, [args] * self.world, timeout_s=timeout_s)

    async def call_each(self, method: str, arguments: Sequence[Sequence[Any]], timeout_s: float | None = None) -> list[Any]:
        """Call ``method`` on every rank with its own arguments. Raises InfrastructureError when a rank fails or is late."""
        refs = [actor.call.remote(method, args) for actor, args in zip(self.actors, arguments, strict=True)]
        what = f"{method} {arguments[0][0]}" if method == "weights" else method
        return await self._wait_all(refs, what, timeout_s or self.timeout_s)

    async def _wait(self, refs: list[Any], method: str, timeout_s: float) -> Any:
        return (await self._wait_all(refs, method, timeout_s))[0]

    async def _wait_all(self, refs: list[Any], method: str, timeout_s: float) -> list[Any]:
        waiting = [asyncio.ensure_future(result_of(ref)) for ref in refs]
        try:
            done, pending = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for task in waiting:
                task.cancel()
            raise
        if any(task.exception() is not None for task in done):
            await self._raise_failure(waiting, method)
        if pending:
            late = [rank for rank, task in enumerate(waiting) if task in pending]
            for task in pending:
                task.cancel()
            setting = GROUP_DEADLINE if timeout_s == self.timeout_s else DEADLINES.get(method.split()[0], GROUP_DEADLINE)
            raise InfrastructureError(f"{self.role} ranks {late} did not finish {method} within {timeout_s:.0f} s ({setting})")
        return [task.result() for task in waiting]

    async def _raise_failure(self, waiting: list[asyncio.Task[Any]], method: str) -> None:
        """Raise what failed first in truth: when a rank dies its peers' broken connections are often heard of earlier."""
        await asyncio.wait(waiting, timeout=DEATH_NOTICE_S)
        failed = {rank: task.exception() for rank, task in enumerate(waiting) if task.done() and not task.cancelled() and task.exception()}
        for task in waiting:
            task.cancel()
        dead = [rank for rank, error in failed.items() if isinstance(error, ray.exceptions.RayActorError)]
        rank = dead[0] if dead else next(iter(failed))
        error = failed[rank]
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, RlpostError):
            raise cause from error
        first_line = str(cause).strip().partition("\n")[0]
        what = "died" if dead else "failed"
        if isinstance(error, ray.exceptions.ActorUnavailableError):
            what = "died or is out of reach"
        hint = ""
        if not dead and "timed out" in first_line.lower():  # gloo does not say whom it waited for
            others = [other for other in range(self.world) if other != rank]
            hint = f"; it waited for ranks {others} ({GROUP_DEADLINE}): do they work, and does the network between their nodes?"
        raise InfrastructureError(f"{self.role} rank {rank} {what} in {method}: {type(cause).__name__}: {first_line}{hint}") from error

    def kill(self) -> None:
        """End all ranks at once."""
        for actor in self.actors:
            ray.kill(actor)
