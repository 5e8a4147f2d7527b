"""All engines of a run: start, routing, and the replacement of a lost one.

A request to a lost engine is made again elsewhere, or waits until the driver replaced the engine and gave it the present
weights; no episode notices. The driver replaces engines only where the trainer holds a committed version (``repair``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rlpost.rollout.client import EngineClient, EngineLostError
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
            report: dict[str, Any] = await asyncio.wait_for(_resolve(self.actors[index].start.remote()), self.start_timeout_s)
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

    async def repair(self, give_weights: Callable[[], Any]) -> list[str]:
        """Replace every lost engine, then let ``give_weights`` bring the present weights to all. Returns the engines' names.

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
            await self.clients[index].close()
            ray.kill(self.actors[index])
            self.actors[index] = self._spawn(index)
            await self._started(index)
            self.clients[index] = EngineClient(self.settings[index].name, self.actors[index])
        if gone:
            await give_weights()
            self.lost.clear()
            async with self._replaced:
                for index in gone:
                    self.router.alive[index] = True
                self._replaced.notify_all()
        return [self.settings[index].name for index in gone]

    # ---- all engines -----------------------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call ``method`` on every engine with the same arguments."""
        return await self.call_each(method, [args] * len(self.actors), timeout_s=timeout_s)

    async def call_each(self, method: str, arguments: Sequence[Sequence[Any]], *, timeout_s: float) -> list[Any]:
        """Call ``method`` on every engine with its own arguments. A dead or late engine is an InfrastructureError naming it."""

        async def one(index: int) -> Any:
            try:
                return await asyncio.wait_for(_resolve(getattr(self.actors[index], method).remote(*arguments[index])), timeout_s)
            except TimeoutError:
                raise InfrastructureError(f"{self.settings[index].name} did not finish {method} within {timeout_s:.0f} s") from None
            except ray.exceptions.RayActorError as error:
                self.clients[index]._lose(error)
                self.router.alive[index] = False
                self.lost.set()
                raise EngineLostError(f"{self.settings[index].name} died in {method}") from error
            except ray.exceptions.RayTaskError as error:
                raise InfrastructureError(str(error.cause)) from error

        return list(await asyncio.gather(*(one(index) for index in range(len(self.actors)))))

    async def stop(self) -> None:
        """End all engines; bounded in time."""
        await asyncio.gather(*(client.close() for client in self.clients), return_exceptions=True)
        for actor in self.actors:
            ray.kill(actor)


async def _resolve(ref: Any) -> Any:
    return await ref
