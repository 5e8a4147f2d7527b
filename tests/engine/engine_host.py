"""What runs in an engine's process under test: the engine itself, and the hands that stop, look into and damage it.

The core can be held still after a given number of steps, so that a test, and not the machine's speed, decides what a weight sync
meets: requests that have begun, that have not, that end meanwhile. Only engines whose core runs in their own process can be held
or looked into.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlpost.rollout.engine import EngineSettings, VllmEngine
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError

Outcome = GenerateResult | InfrastructureError
LOOK_S = 0.002
"""How often a state of the core that must come is looked for."""


class EngineHost:
    """The engine, and everything that it ever handed out."""

    def __init__(self, settings: EngineSettings) -> None:
        self.engine = VllmEngine(settings)
        self.outcomes: dict[str, list[Outcome]] = defaultdict(list)
        self._collecting = asyncio.Lock()
        self._free_step: Callable[[], Any] | None = None
        self._arrivals: threading.Event | None = None

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """A method of the host, else of the engine."""
        return await getattr(self if hasattr(self, method) else self.engine, method)(*arguments)

    # ---- results ---------------------------------------------------------------------------------------------------

    async def finish(self, request_ids: Sequence[str]) -> list[list[Outcome]]:
        """Wait until each of these requests ended; all outcomes of each (there should be one)."""
        while any(not self.outcomes[request_id] for request_id in request_ids):
            async with self._collecting:
                await self.take(0.2)
        return [self.outcomes[request_id] for request_id in request_ids]

    async def take(self, timeout_s: float) -> int:
        """Take what ended; how many that were."""
        items = await self.engine.collect(timeout_s)
        for request_id, outcome in items:
            self.outcomes[request_id].append(outcome)
        return len(items)

    async def outcomes_of(self, request_ids: Sequence[str]) -> list[int]:
        """How many outcomes each request had so far."""
        return [len(self.outcomes[request_id]) for request_id in request_ids]

    async def settled(self) -> int:
        """Requests in vLLM's scheduler, once it is all that the engine has been given and not ended."""
        while (held := await self._on_core(self._scheduled)) != self._unfinished():  # noqa: ASYNC110 - vLLM tells nobody
            await asyncio.sleep(LOOK_S)
        return held

    async def scheduled(self) -> int:
        """Requests in vLLM's scheduler, running or waiting, now."""
        return int(await self._on_core(self._scheduled))

    def _scheduled(self) -> int:
        return sum(self._core.scheduler.get_request_counts())

    def _unfinished(self) -> int:
        return sum(not task.done() for task in self.engine._running.values())

    # ---- time ------------------------------------------------------------------------------------------------------

    async def hold(self, steps: int = 0) -> None:
        """Let the core do ``steps`` steps with all requests that the engine has, then stand still until :meth:`free`."""
        step = self._free_step = self._free_step or self._core.step_fn
        self._core.step_fn = lambda: ({}, False)
        await self._on_core(lambda: None)
        if steps:
            await self.settled()
            await self._run(steps, step)

    async def _run(self, steps: int, step: Callable[[], Any]) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        left = steps

        def limited() -> Any:
            nonlocal left
            if left == 0 or not self._scheduled():
                loop.call_soon_threadsafe(done.set)  # after what the steps before gave was handed over
                return {}, False
            outputs, executed = step()
            left -= executed
            return outputs, executed

        self._core.step_fn = limited
        await self._on_core(lambda: None)
        await done.wait()

    async def begin(self, requests: Sequence[GenerateRequest], steps: int) -> None:
        """Submit requests and let each be sampled ``steps`` tokens (less where it ends sooner); then the core stands still."""
        await self.hold()
        await self.engine.submit(requests)
        await self.hold(steps)

    async def free(self) -> None:
        """Let the core go on as it likes."""
        if self._free_step is not None:
            self._core.step_fn, self._free_step = self._free_step, None
        await self._on_core(lambda: None)

    async def hold_arrivals(self) -> None:
        """Stop requests on their way into vLLM: taken by the engine, not known to vLLM's core, until :meth:`free_arrivals`."""
        self._arrivals = threading.Event()
        executor = self.engine.llm.renderer._executor
        for _ in range(executor._max_workers):
            executor.submit(self._arrivals.wait)

    async def free_arrivals(self) -> None:
        """Let them in."""
        if self._arrivals is not None:
            self._arrivals.set()

    async def set_pause(self, mode: str) -> None:
        """Change EngineSettings.pause, which each sync reads: one engine serves the tests of all three modes."""
        self.engine.settings = replace(self.engine.settings, pause=mode)

    async def break_core(self) -> None:
        """Let the next step of vLLM's core fail, as a bug or exhausted memory would."""

        def fail() -> None:
            raise MemoryError("no memory is left")

        self._core.step_fn = fail

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def live(self) -> dict[str, np.ndarray]:
        """The bits of every parameter that vLLM computes with, by vLLM's name, flat in row-major order, as unsigned integers."""
        return dict(await self._on_core(lambda: {name: _bits(parameter).copy() for name, parameter in self._model.named_parameters()}))

    async def flip(self, name: str, element: int) -> None:
        """Change the lowest bit of one element of a live parameter, as a stray write would."""

        def change() -> None:
            bits = _bits(dict(self._model.named_parameters())[name])
            bits[element] ^= 1

        await self._on_core(change)

    @property
    def _core(self) -> Any:
        return self.engine.llm.engine_core._core

    @property
    def _model(self) -> Any:
        return self._core.model_executor.driver_worker.worker.model_runner.model

    async def _on_core(self, call: Callable[[], Any]) -> Any:
        """Run something on the core's thread, between two steps."""
        return await asyncio.wrap_future(self.engine.llm.engine_core._submit(call))


def _bits(parameter: Any) -> np.ndarray:
    """The memory of a contiguous tensor as integers."""
    import torch

    view = parameter.detach().view(-1).view(torch.uint8).numpy()
    return view.view(f"u{parameter.element_size()}")
