"""The handle of one engine: few calls, each result to its own request, and an engine's loss to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlpost.rollout import client as module
from rlpost.rollout.client import EngineClient, EngineLostError
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, SamplingSettings


class _Remote:
    """``actor.method.remote(...)`` as Ray has it: returns something to await."""

    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    def remote(self, *args: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._method(*args))


class FakeActor:
    """An engine in this process. Requests finish when the test says so; ``error`` makes every call fail."""

    def __init__(self) -> None:
        self.submitted: list[list[str]] = []
        self.aborted: list[str] = []
        self.polls = 0
        self.error: BaseException | None = None
        self.silent = False
        self._finished: asyncio.Queue[tuple[str, GenerateResult | InfrastructureError]] = asyncio.Queue()
        self._broken = asyncio.Event()
        self.submit, self.abort, self.collect = _Remote(self._submit), _Remote(self._abort), _Remote(self._collect)

    async def _submit(self, batch: Sequence[GenerateRequest]) -> None:
        self._raise()
        self.submitted.append([request.request_id for request in batch])

    async def _abort(self, request_ids: Sequence[str]) -> None:
        self._raise()
        self.aborted += request_ids

    async def _collect(self, timeout_s: float) -> list[tuple[str, GenerateResult | InfrastructureError]]:
        self.polls += 1
        if self.silent:
            await asyncio.Event().wait()
        first = asyncio.ensure_future(self._finished.get())
        broken = asyncio.ensure_future(self._broken.wait())
        done, pending = await asyncio.wait({first, broken}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        self._raise()
        if first not in done:
            return []
        items = [first.result()]
        while not self._finished.empty():
            items.append(self._finished.get_nowait())
        return items

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def finish(self, *request_ids: str) -> None:
        for request_id in request_ids:
            token = int(request_id[1:])
            self._finished.put_nowait(
                (
                    request_id,
                    GenerateResult(
                        request_id=request_id,
                        tokens=np.array([token]),
                        logprobs=np.array([-1.0]),
                        versions=np.array([0]),
                        finish_reason="stop",
                        prompt_tokens=1,
                        cached_tokens=0,
                    ),
                )
            )

    def refuse(self, request_id: str) -> None:
        self._finished.put_nowait((request_id, InfrastructureError("the prompt is too long")))

    def die(self, error: BaseException) -> None:
        self.error = error
        self._broken.set()


def request(number: int) -> GenerateRequest:
    return GenerateRequest(request_id=f"r{number}", tokens=[1], sampling=SamplingSettings())


def play(scenario: Callable[[FakeActor, EngineClient], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario with a client; it must end by itself, and leave no task behind."""

    async def everything() -> None:
        actor = FakeActor()
        client = EngineClient("engine 3", actor)
        try:
            await asyncio.wait_for(scenario(actor, client), 20)
        finally:
            await asyncio.wait_for(client.close(), 5)

    asyncio.run(everything())


def start(client: EngineClient, numbers: Sequence[int], timeout_s: float = 20) -> list[asyncio.Task[GenerateResult]]:
    return [asyncio.create_task(client.generate(request(n), timeout_s)) for n in numbers]


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is another's state
        await asyncio.sleep(0.001)


def test_requests_of_one_turn_of_the_loop_travel_in_one_call_and_later_ones_in_another() -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        tasks = start(client, range(50))
        await until(lambda: actor.submitted)
        tasks += start(client, [50, 51])
        await until(lambda: len(actor.submitted) == 2)
        assert actor.submitted == [[f"r{n}" for n in range(50)], ["r50", "r51"]]
        actor.finish(*(f"r{n}" for n in range(52)))
        await asyncio.gather(*tasks)
        assert actor.polls < 10

    play(scenario)


def test_each_result_reaches_its_own_request_in_whatever_order_they_finish() -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        tasks = start(client, range(20))
        await until(lambda: actor.submitted)
        for n in reversed(range(20)):
            actor.finish(f"r{n}")
            if n % 3 == 0:
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks)
        assert [(r.request_id, int(r.tokens[0])) for r in results] == [(f"r{n}", n) for n in range(20)]

    play(scenario)


def test_an_idle_client_does_not_poll_and_works_again_later() -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        for n in range(3):
            before = actor.polls
            await asyncio.sleep(0.01)
            assert actor.polls == before
            (task,) = start(client, [n])
            await until(partial(lambda count: len(actor.submitted) == count, n + 1))
            actor.finish(f"r{n}")
            await task

    play(scenario)


@pytest.mark.parametrize("requests", [1, 30])
def test_the_death_of_the_actor_reaches_every_waiting_request_at_once(requests: int) -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        tasks = start(client, range(requests))
        await until(lambda: actor.submitted)
        actor.die(RuntimeError("out of memory\nlong story"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(r) for r in results} == {EngineLostError}
        assert str(results[0]) == "engine 3 is lost: RuntimeError: out of memory"
        with pytest.raises(EngineLostError, match="out of memory"):  # and later ones, without asking the actor
            await client.generate(request(99), 20)
        assert len(actor.submitted) == 1

    play(scenario)


def test_a_failing_submit_is_the_engines_loss_and_no_endless_wait() -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        actor.error = ConnectionError("no such actor")
        results = await asyncio.gather(*start(client, [0, 1]), return_exceptions=True)
        assert [type(r) for r in results] == [EngineLostError] * 2

    play(scenario)


def test_the_cause_inside_rays_wrapper_is_what_is_told() -> None:
    class RayTaskError(Exception):
        cause = InfrastructureError("request r0 failed: prompt too long")

    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        (task,) = start(client, [0])
        await until(lambda: actor.submitted)
        actor.die(RayTaskError("a page of remote traceback"))
        with pytest.raises(EngineLostError, match="InfrastructureError: request r0 failed: prompt too long"):
            await task

    play(scenario)


def test_a_silent_engine_is_lost_after_the_grace_with_words_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "POLL_GRACE_S", 0.03)

    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        actor.silent = True
        (task,) = start(client, [0])
        with pytest.raises(EngineLostError, match="answered no poll"):
            await task

    play(scenario)


def test_a_request_over_its_deadline_names_itself_and_the_setting_and_is_aborted() -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        late, other = start(client, [0], timeout_s=0.05) + start(client, [1])
        with pytest.raises(InfrastructureError, match=r"engine 3 did not finish request r0 .*engine\.request_timeout_s") as caught:
            await late
        assert not isinstance(caught.value, EngineLostError)
        await until(lambda: actor.aborted)
        assert actor.aborted == ["r0"]
        actor.finish("r0", "r1")  # a late result disturbs nobody
        assert (await other).request_id == "r1"

    play(scenario)


def test_a_cancelled_request_is_aborted_on_the_engine_and_others_go_on() -> None:
    """Otherwise the engine goes on sampling for nobody."""

    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        gone, other = start(client, [0, 1])
        await until(lambda: actor.submitted)
        gone.cancel()
        await until(lambda: actor.aborted)
        assert actor.aborted == ["r0"]
        actor.finish("r1")
        assert (await other).request_id == "r1"

    play(scenario)


def test_close_fails_what_is_waiting_and_what_comes_later() -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        tasks = start(client, range(3))
        await until(lambda: actor.submitted)
        await client.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [EngineLostError] * 3
        with pytest.raises(EngineLostError, match="closed"):
            await client.generate(request(9), 20)

    play(scenario)


def test_a_request_that_the_engine_refuses_is_its_own_failure_and_not_the_engines_loss() -> None:
    async def scenario(actor: FakeActor, client: EngineClient) -> None:
        refused, served = start(client, [1, 2])
        await until(lambda: actor.submitted)
        actor.refuse("r1")
        actor.finish("r2")
        with pytest.raises(InfrastructureError, match="too long") as error:
            await refused
        assert not isinstance(error.value, EngineLostError)
        assert (await served).request_id == "r2"
        assert client.lost is None

    play(scenario)
