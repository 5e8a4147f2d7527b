"""One real engine in a process of its own, driven over a pipe.

vLLM changes its whole process (threads, seeds, process groups), so it must not share one with other tests. The process runs one
event loop for its whole life, as a Ray actor does; calls run beside each other in it.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from engine_host import EngineHost, Outcome

from rlpost.models.embedded import build
from rlpost.rollout.engine import EngineSettings
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, SamplingSettings

CALL_TIMEOUT_S = 120.0
START_TIMEOUT_S = 240.0
FIRST_ID, LAST_ID = 4, 98
"""Token ids of printable characters in the embedded models' vocabulary."""
END_TOKEN = 2
MAX_MODEL_LEN = 640


def engine_settings(
    *, in_actor: bool = True, dtype: str = "float32", live_weights: bool = True, tensor_parallel: int = 1
) -> EngineSettings:
    """A small engine of the tiny model on one thread a worker."""
    return EngineSettings(
        name="engine-0",
        model_path=str(build("tiny-sort5")),
        dtype=dtype,
        device="cpu",
        in_actor=in_actor,
        live_weights=live_weights,
        tensor_parallel=tensor_parallel,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=256,
        block_size=32,
        prefix_caching=True,
        kv_cache_mib=64,
    )


def _serve(connection: Connection, settings: EngineSettings) -> None:
    """The process's main function."""

    async def main() -> None:
        host, loop, running = EngineHost(settings), asyncio.get_running_loop(), set()

        async def handle(number: int, method: str, arguments: Sequence[Any]) -> None:
            try:
                answer: Any = await host.call(method, arguments)
            except Exception as error:  # noqa: BLE001 - raised where it was asked for
                answer = error if isinstance(error, InfrastructureError) else RuntimeError(f"{type(error).__name__}: {error}")
            connection.send((number, answer))

        def receive() -> Any:
            try:
                return connection.recv()
            except EOFError:  # the tests ended without stop()
                return None

        while (message := await loop.run_in_executor(None, receive)) is not None:
            task = asyncio.create_task(handle(*message))
            running.add(task)
            task.add_done_callback(running.discard)

    asyncio.run(main())


class EngineProcess:
    """The tests' handle. ``report`` is what the engine said when it had started."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, settings))
        self._process.start()
        other.close()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.report: dict[str, Any] = self.call("start", timeout_s=START_TIMEOUT_S)

    def _read(self) -> None:
        while True:
            try:
                number, answer = self._connection.recv()
            except (EOFError, OSError):
                for future in self._waiting.values():
                    future.set_exception(RuntimeError("the engine's process ended"))
                return
            future = self._waiting.pop(number)
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def begin(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call of a method of VllmEngine or EngineHost."""
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        self._connection.send((number, method, arguments))
        return future

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call a method and wait for its result; raises what it raised."""
        return self.begin(method, *arguments).result(timeout_s)

    def outcomes(self, requests: Sequence[GenerateRequest]) -> list[Outcome]:
        """Generate; each request's only outcome, in order."""
        self.call("submit", list(requests))
        return self.finish(requests)

    def finish(self, requests: Sequence[GenerateRequest]) -> list[Outcome]:
        """Wait for requests that were submitted; fails when one of them had more than one outcome."""
        listed: list[list[Outcome]] = self.call("finish", [request.request_id for request in requests])
        assert [len(outcomes) for outcomes in listed] == [1] * len(requests)
        return [outcomes[0] for outcomes in listed]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Generate; fails when a request did."""
        return [succeeded(outcome) for outcome in self.outcomes(requests)]

    def stop(self) -> None:
        """End the engine and its process."""
        try:
            self.call("stop", timeout_s=30.0)
            self._connection.send(None)
            self._process.join(10.0)
        finally:
            self._process.kill()


_request_numbers = itertools.count()


def make_request(
    tokens: Sequence[int],
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 12,
    seed: int | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> GenerateRequest:
    """A request with a name of its own; without stop tokens only the model's end token stops it."""
    return GenerateRequest(
        request_id=f"r{next(_request_numbers)}",
        tokens=list(tokens),
        sampling=SamplingSettings(temperature=temperature, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids),
        seed=seed,
    )


def random_prompts(count: int, length: int | None = None, *, seed: int = 0) -> list[list[int]]:
    """Prompts of printable characters, of ``length`` or of 1 to 40 tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(FIRST_ID, LAST_ID, length or int(random.integers(1, 41))).tolist() for _ in range(count)]


def succeeded(outcome: Outcome) -> GenerateResult:
    """The result; raises the request's error."""
    if isinstance(outcome, InfrastructureError):
        raise outcome
    return outcome
