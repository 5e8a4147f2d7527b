"""The driver's handle of one engine actor: each request is awaited by itself, the calls to the actor are few.

Requests made in the same turn of the event loop travel in one call; one long poll brings back all that finished.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rlpost.cluster.references import result_of
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError

POLL_S = 10.0
"""One long poll's length; the actor answers as soon as something finished."""

POLL_GRACE_S = 60.0
"""An engine that does not answer a poll this long after its end is lost (an engine step or a weight update is far shorter)."""


class EngineLostError(InfrastructureError):
    """The engine's process is gone or silent; its requests can be made again elsewhere."""


class EngineLateError(InfrastructureError):
    """The engine did not answer a call within its deadline; it may still be at it."""


class EngineClient:
    """Requests to one engine. After :class:`EngineLostError` a new client is needed."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self._queued: list[GenerateRequest] = []
        self._waiting: dict[str, asyncio.Future[GenerateResult]] = {}
        self._work = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lost: EngineLostError | None = None
        self._start(self._pump())

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def generate(self, request: GenerateRequest, timeout_s: float) -> GenerateResult:
        """Sample one continuation. Raises EngineLostError, or InfrastructureError after ``timeout_s``."""
        if self.lost is not None:
            raise self.lost
        future: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._queued.append(request)
        if len(self._queued) == 1:
            asyncio.get_running_loop().call_soon(lambda: self._start(self._flush()))
        self._work.set()
        try:
            return await asyncio.wait_for(future, timeout_s)
        except asyncio.CancelledError:
            self._start(self._abort(request.request_id))  # nobody waits for it any more
            raise
        except TimeoutError:
            self._start(self._abort(request.request_id))
            raise InfrastructureError(
                f"{self.name} did not finish request {request.request_id} within {timeout_s:.0f} s (engine.request_timeout_s)"
            ) from None
        finally:
            self._waiting.pop(request.request_id, None)

    async def _flush(self) -> None:
        batch, self._queued = self._queued, []
        if batch:
            try:
                await self.actor.submit.remote(batch)
            except Exception as error:  # noqa: BLE001 - any failure of the call means that the engine is gone
                self._lose(error)

    async def _abort(self, request_id: str) -> None:
        try:
            await self.actor.abort.remote([request_id])
        except Exception as error:  # noqa: BLE001 - see _flush
            self._lose(error)

    async def _pump(self) -> None:
        try:
            while self.lost is None:
                if not self._waiting:
                    self._work.clear()
                    await self._work.wait()
                for request_id, result in await self._poll():
                    future = self._waiting.get(request_id)
                    if future is None or future.done():
                        continue
                    if isinstance(result, InfrastructureError):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - it reaches every waiting request
            self._lose(error)

    async def _poll(self) -> list[tuple[str, GenerateResult | InfrastructureError]]:
        deadline_s = POLL_S + POLL_GRACE_S
        try:
            return await asyncio.wait_for(result_of(self.actor.collect.remote(POLL_S)), deadline_s)
        except TimeoutError:
            raise InfrastructureError(f"it answered no poll for {deadline_s:.0f} s") from None

    def _lose(self, error: BaseException) -> None:
        if self.lost is None:
            cause = getattr(error, "cause", None) or error
            first_line = str(cause).strip().partition("\n")[0]
            self.lost = EngineLostError(f"{self.name} is lost: {type(cause).__name__}: {first_line}")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self.lost)

    async def close(self) -> None:
        """Stop polling; requests still waiting, and later ones, get EngineLostError."""
        self._lose(InfrastructureError("its client was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
