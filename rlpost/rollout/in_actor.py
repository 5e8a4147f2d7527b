"""vLLM's engine core on a thread of this process, behind the client that AsyncLLM talks to.

AsyncLLM normally starts its core in another process and speaks to it over sockets. On a CPU that second process costs
12 CPU-seconds of imports and a third of the throughput, so here the core runs on one thread of the actor. AsyncLLM itself
(requests, outputs, pausing, weight updates) is the same on CPU and GPU.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock


class InActorCore:
    """Everything that touches the core happens on its thread, in order: commands first, then one step while there is work.

    An exception in a step ends the thread and reaches every later caller as the error it was.
    """

    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool, loop: asyncio.AbstractEventLoop) -> None:
        from vllm.v1.engine.core import EngineCore

        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._loop = loop
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._core = EngineCore(vllm_config, executor_class, log_stats)
        self._thread = threading.Thread(target=self._run, name="vllm-core", daemon=True)
        self._thread.start()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            progressing = True
            while self._serve_commands(wait=not (progressing and self._core.scheduler.has_requests())):
                progressing = self._step()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must reach the callers
            self.resources.engine_dead = True
            self._refuse_commands()
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, error)

    def _serve_commands(self, wait: bool) -> bool:
        """Run waiting commands; with ``wait`` block for the first one. False when told to stop."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            call, future = command
            if not future.set_running_or_notify_cancel():
                continue  # nobody waits for it any more
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)
            wait = False

    def _step(self) -> bool:
        """One step; False when nothing moved (all requests wait behind a pause), so that the thread sleeps instead of spinning."""
        if not self._core.scheduler.has_requests():
            return True
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        mine = outputs.get(0) if outputs else None
        if mine is not None:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, mine)
        return executed or mine is not None

    # ---- what AsyncLLM calls ---------------------------------------------------------------------------------------

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._commands.put((call, future))
        if self.resources.engine_dead:
            self._refuse_commands()
        return future

    def _refuse_commands(self) -> None:
        """The thread has ended: whoever waits for a command must hear of it."""
        from vllm.v1.engine.exceptions import EngineDeadError

        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(EngineDeadError())

    async def get_output_async(self) -> Any:
        """The next outputs; raises what ended the core."""
        item = await self._outputs.get()
        if isinstance(item, BaseException):
            from vllm.v1.engine.exceptions import EngineDeadError

            raise EngineDeadError() from item
        return item

    async def add_request_async(self, request: Any) -> None:
        """Queue a request; its errors come back at once."""
        request.client_index = 0
        self._submit(lambda: self._core.add_request(*self._core.preprocess_add_request(request)))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests; AsyncLLM has made their last outputs already."""
        if request_ids and not self.resources.engine_dead:
            self._submit(lambda: self._core.abort_requests(request_ids))

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """``something_async(...)`` runs the core's ``something(...)`` on its thread."""
        if not name.endswith("_async") or name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._core, name.removesuffix("_async"))

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.wrap_future(self._submit(lambda: method(*args, **kwargs)))

        return call

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the thread, then the core; safe to call again."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(timeout=timeout or 10.0)
            self._core.shutdown()


def make_async_llm(vllm_config: Any) -> Any:
    """An AsyncLLM whose core runs in this process. Called inside a running event loop."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import EngineCoreClient

    loop = asyncio.get_running_loop()

    def make_client(vllm_config: Any, executor_class: Any, log_stats: bool, **_: Any) -> InActorCore:
        return InActorCore(vllm_config, executor_class, log_stats, loop)

    # AsyncLLM takes no client; the factory that it asks is replaced while it is being built, and only then.
    with mock.patch.object(EngineCoreClient, "make_async_mp_client", staticmethod(make_client)):
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
