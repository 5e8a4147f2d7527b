"""All engines of a run: start, routing, and the replacement of a lost one.

A request to a lost engine is made again elsewhere, or waits until the driver replaced the engine and gave it the present
weights; no episode notices. The driver replaces engines only where the trainer holds a committed version (``repair``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from rlpost.cluster.references import result_of
from rlpost.rollout.client import EngineClient, EngineLateError, EngineLostError
from rlpost.rollout.engine import EngineSettings, VllmEngine
from rlpost.rollout.router import Router
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError


class EnginePool:
    """Engines as Ray actors. ``options`` are Ray's for each engine (resources, placement, environment)."""

    def __init__(
        self,
        settings: Sequence[EngineSettings],
        options: Sequence[dict[str, Any]],
        *,
        request_timeout_s: float,
        start_timeout_s: float,
        max_restarts: int,
        actor_class: type = VllmEngine,
    ) -> None:
        self.settings, self.options = list(settings), list(options)
        self.request_timeout_s, self.start_timeout_s, self.max_restarts = request_timeout_s, start_timeout_s, max_restarts
        self._actor_class = actor_class
        self.router = Router(len(self.settings))
        self.actors: list[Any] = []
        self.clients: list[EngineClient] = []
        self.restarts = 0
        self.lost = asyncio.Event()
        """Set while an engine waits to be replaced."""
        self._replaced = asyncio.Condition()

    async def start(self) -> list[dict[str, Any]]:
        """Bring all engines up; returns their reports."""
        self.actors = [self._spawn(index) for index in range(len(self.settings))]
        reports = await asyncio.gather(*(self._started(index) for index in range(len(self.actors))))
        self.clients = [EngineClient(s.name, actor) for s, actor in zip(self.settings, self.actors, strict=True)]
        return list(reports)

    def _spawn(self, index: int) -> Any:
        return ray.remote(self._actor_class).options(max_concurrency=1000, **self.options[index]).remote(self.settings[index])

    async def _started(self, index: int) -> dict[str, Any]:
        name = self.settings[index].name
        try:
            report: dict[str, Any] = await asyncio.wait_for(result_of(self.actors[index].start.remote()), self.start_timeout_s)
        except TimeoutError:
            raise InfrastructureError(f"{name} did not start within {self.start_timeout_s:.0f} s (schedule.start_timeout_s)") from None
        except ray.exceptions.RayError as error:
            raise InfrastructureError(f"{name} failed to start: {getattr(error, 'cause', None) or error}") from error
        return report

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample one continuation on the session's engine; a lost engine costs time, not the request."""
        while True:
            engine = self.router.choose(request.session)
            if engine is None:
                await self._wait_for_replacement()
                continue
            try:
                return await self.clients[engine].generate(request, self.request_timeout_s)
            except EngineLostError:
                self.router.alive[engine] = False
                self.lost.set()
            finally:
                self.router.done(engine)

    async def _wait_for_replacement(self) -> None:
        async with self._replaced:
            try:
                await asyncio.wait_for(
                    self._replaced.wait_for(lambda: any(self.router.alive)), self.start_timeout_s + self.request_timeout_s
                )
            except TimeoutError:
                raise InfrastructureError("no engine is alive, and none was replaced in time") from None

    # ---- repair ----------------------------------------------------------------------------------------------------

    async def repair(self, give_weights: Callable[[list[int]], Any]) -> list[str]:
        """Replace every lost engine, then let ``give_weights`` bring the present weights to the new ones. Returns the engines' names.

        Raises InfrastructureError when engines died more often than ``max_restarts``.
        """
        gone = [index for index, alive in enumerate(self.router.alive) if not alive or self.clients[index].lost]
        for index in gone:
            self.router.alive[index] = False
            self.restarts += 1
            if self.restarts > self.max_restarts:
                raise InfrastructureError(
                    f"engines died {self.restarts} times, more than engine.max_restarts={self.max_restarts}; "
                    f"last: {self.clients[index].lost}"
                )
            lost = self.clients[index].lost
            await self.clients[index].close()
            ray.kill(self.actors[index])
            self.actors[index] = self._spawn(index)
            try:
                await self._started(index)
            except InfrastructureError as error:
                dead = [str(node["NodeManagerAddress"]) for node in ray.nodes() if not node["Alive"]]
                nodes = f"; nodes that Ray has given up: {', '.join(dead)}" if dead else ""
                raise InfrastructureError(f"{error}; it was to replace one that was lost: {lost}{nodes}") from error
            self.clients[index] = EngineClient(self.settings[index].name, self.actors[index])
        if gone:
            await give_weights(gone)
            async with self._replaced:
                for index in gone:
                    self.router.alive[index] = self.clients[index].lost is None
                self._replaced.notify_all()
            if all(self.router.alive):  # another one may have died meanwhile
                self.lost.clear()
        return [self.settings[index].name for index in gone]

    # ---- all engines -----------------------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call ``method`` on every engine with the same arguments; raises the first error, which names its engine."""
        outcomes = await self.outcomes(method, dict.fromkeys(range(len(self.actors)), args), timeout_s=timeout_s)
        for outcome in outcomes.values():
            if isinstance(outcome, InfrastructureError):
                raise outcome
        return list(outcomes.values())

    async def outcomes(self, method: str, arguments: Mapping[int, Sequence[Any]], *, timeout_s: float) -> dict[int, Any]:
        """Call ``method`` on some engines, each with its own arguments. By engine: the result, or the error that it ended with.

        EngineLostError when its process died, EngineLateError after ``timeout_s``, else what it raised.
        """

        async def one(index: int) -> Any:
            name = self.settings[index].name
            try:
                return await asyncio.wait_for(result_of(getattr(self.actors[index], method).remote(*arguments[index])), timeout_s)
            except TimeoutError:
                return EngineLateError(f"{name} did not finish {method} within {timeout_s:.0f} s")
            except ray.exceptions.RayActorError as error:
                self.clients[index]._lose(error)
                self.router.alive[index] = False
                self.lost.set()
                return EngineLostError(f"{name} died in {method}")
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                return cause if isinstance(cause, InfrastructureError) else InfrastructureError(f"{name}: {method} failed: {cause}")

        answers = await asyncio.gather(*(one(index) for index in arguments))
        return dict(zip(arguments, answers, strict=True))

    async def stop(self) -> None:
        """End all engines; bounded in time."""
        await asyncio.gather(*(client.close() for client in self.clients), return_exceptions=True)
        for actor in self.actors:
            ray.kill(actor)
