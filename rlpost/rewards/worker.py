"""The worker process: loads the reward functions, calls them in its main thread, says what each call gave.

Started by worker_process.py as a fresh interpreter, never as a fork and never through the user's ``__main__``: a training
script needs no ``if __name__ == "__main__"`` for this. Synchronous functions run one call after another, so that
signal-based time-outs (math-verify) work and the parent knows which call hangs; the asynchronous calls of a batch then run
concurrently, each with its own deadline. The process ends when the parent closes the socket, and is killed by the kernel
(Linux) when the parent dies in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import math
import numbers
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpost.rewards.resolve import load_rewards
from rlpost.rewards.result import RewardResult
from rlpost.rewards.signature import BoundReward
from rlpost.rewards.wire import Batch, BlockingChannel, CallRequest, Finished, Ready, Refused, Setup, Started, Unreadable
from rlpost.types import ConfigError, FailureKind

CONCURRENT_ASYNC_CALLS = 64
"""Asynchronous calls of one worker in flight: enough to hide a judge's latency, few enough for its connection limits."""

_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""


def main(descriptor: int, crash_descriptor: int, parent_pid: int) -> None:
    """Serve batches until the parent closes the socket.

    ``descriptor`` is the socket; ``crash_descriptor`` a file for the traceback of a crash or, on SIGUSR1, of where a call hangs.
    """
    _die_with_parent(parent_pid)
    # Schedulers send it to all processes of a job: the driver then saves, and ends its workers itself. No SIG_IGN, which the programs
    # that a reward starts would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    for inherited in (descriptor, crash_descriptor):
        os.set_inheritable(inherited, False)  # a process that a reward starts must not hold our socket open
    faulthandler.enable(file=crash_descriptor, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file=crash_descriptor, all_threads=False)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = BlockingChannel(descriptor)
    message = channel.receive_bytes()
    if message is None:
        return
    setup: Setup = pickle.loads(message)
    try:
        rewards = load_rewards(setup.configs, setup.field_names)
    except ConfigError as error:
        channel.send(Refused(message=str(error)))
        return
    channel.send(Ready(where=[reward.where for reward in rewards], is_async=[reward.is_async for reward in rewards]))
    loop = asyncio.new_event_loop()  # one for the worker's life: a user's HTTP session stays usable from batch to batch
    asyncio.set_event_loop(loop)
    while (message := channel.receive_bytes()) is not None:
        try:
            batch: Batch = pickle.loads(message)
        except Exception:  # noqa: BLE001 - unpickling runs code of whatever classes the user's fields have
            channel.send(Unreadable(traceback=traceback.format_exc()))
            continue
        _run_batch(channel, loop, rewards, batch, setup.timeout_s)


def _run_batch(
    channel: BlockingChannel, loop: asyncio.AbstractEventLoop, rewards: Sequence[BoundReward], batch: Batch, timeout_s: float
) -> None:
    asynchronous = []
    for call in batch.calls:
        reward = rewards[call.function]
        if reward.is_async:
            asynchronous.append(call)
            continue
        channel.send(Started(call_id=call.call_id))
        channel.send(_call(reward, call))
    if asynchronous:
        loop.run_until_complete(_run_concurrently(channel, rewards, asynchronous, timeout_s))


def _call(reward: BoundReward, call: CallRequest) -> Finished:
    """One synchronous call; whatever the user's code does short of ending the process becomes a Finished."""
    try:
        answer = reward.function(**reward.arguments(call.item))
    except BaseException as error:  # noqa: BLE001 - sys.exit() and KeyboardInterrupt in a reward are its failure, not the worker's
        return _raised(reward, call, error)
    return judge(answer, reward, call)


async def _run_concurrently(
    channel: BlockingChannel, rewards: Sequence[BoundReward], calls: Sequence[CallRequest], timeout_s: float
) -> None:
    slots = asyncio.Semaphore(CONCURRENT_ASYNC_CALLS)

    async def run(call: CallRequest) -> None:
        async with slots:
            channel.send(Started(call_id=call.call_id))
            channel.send(await _call_async(rewards[call.function], call, timeout_s))

    await asyncio.gather(*(run(call) for call in calls))


async def _call_async(reward: BoundReward, call: CallRequest, timeout_s: float) -> Finished:
    """One asynchronous call with its deadline. A call that blocks the loop is found and killed by the parent."""

    async def guarded() -> Finished:
        try:
            answer = await reward.function(**reward.arguments(call.item))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # our own time-out below
            return _raised(reward, call, error)
        return judge(answer, reward, call)

    task = asyncio.ensure_future(guarded())
    began = time.monotonic()
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if done:
        return task.result()
    frames = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in _suspended_frames(task)).format()
    task.cancel()  # not awaited: a function that swallows the cancellation would hold up its batch
    waited = f"did not answer within {timeout_s:g} s (waited {time.monotonic() - began:.1f} s)"
    return _failed(reward, call, "timeout", waited, "Suspended at (most recent call last):\n" + "".join(frames))


def _suspended_frames(task: asyncio.Task[Any]) -> list[Any]:
    """The frames of a waiting task down to the innermost await."""
    frames = []
    awaited: Any = task.get_coro()
    while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.append(frame)
        awaited = awaited.cr_await
    return frames[1:]  # the first is our own wrapper


def judge(answer: Any, reward: BoundReward, call: CallRequest) -> Finished:
    """Turn what a function returned into a Finished: a finite number, None, or a RewardResult of these; else a failure."""
    metrics: dict[str, float] = {}
    value = answer
    if isinstance(answer, RewardResult):
        value = answer.value
        if not isinstance(answer.metrics, Mapping):
            return _failed(reward, call, "wrong_type", f"returned metrics {_show(answer.metrics)}, expected a dict of names and numbers")
        for name, figure in answer.metrics.items():
            number = _number(figure)
            if number is None or not isinstance(name, str):
                what = f"returned the metric {_show(name)}: {_show(figure)}, expected a name and a number"
                return _failed(reward, call, "wrong_type", what)
            if not math.isfinite(number):
                return _failed(reward, call, "not_a_number", f"returned the metric {name} = {number}, expected a finite number")
            metrics[name] = number
    if value is None:
        message = _say(reward, call, "returned None (not scorable)")
        return Finished(call_id=call.call_id, metrics=metrics, kind="not_scorable", message=message)
    number = _number(value)
    if number is None:
        hint = ""
        if asyncio.iscoroutine(value):
            value.close()  # or Python warns that it was never awaited
            hint = "; declare the function with `async def`"
        elif hasattr(value, "item"):
            hint = "; call .item() on it"
        return _failed(reward, call, "wrong_type", f"returned {_show(value)}, expected float | None | RewardResult{hint}")
    if not math.isfinite(number):
        return _failed(reward, call, "not_a_number", f"returned {number}, expected a finite number")
    return Finished(call_id=call.call_id, value=number, metrics=metrics)


def _number(value: Any) -> float | None:
    """``value`` as a float when it is a real number, a bool, or a numpy scalar of these; else None."""
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _raised(reward: BoundReward, call: CallRequest, error: BaseException) -> Finished:
    """A raise. TimeoutError is the function's own way to say that time ran out."""
    kind: FailureKind = "timeout" if isinstance(error, TimeoutError) else "raised"
    trace = traceback.TracebackException.from_exception(error)
    trace.stack = traceback.StackSummary.from_list([frame for frame in trace.stack if frame.filename != __file__])
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's exception may have a broken __str__
        text = "(its message cannot be shown)"
    return _failed(reward, call, kind, f"raised {type(error).__name__}: {text}", "".join(trace.format()))


def _failed(reward: BoundReward, call: CallRequest, kind: FailureKind, what: str, trace: str = "") -> Finished:
    return Finished(call_id=call.call_id, kind=kind, message=_say(reward, call, what), traceback=trace)


def _say(reward: BoundReward, call: CallRequest, what: str) -> str:
    return f"reward {reward.name}: {reward.where} {what}; prompt {call.item.prompt_id}"


def _show(value: Any) -> str:
    """Type and a short form of a value."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's object may have a broken __repr__
        text = "(cannot be shown)"
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"


def _die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent ends; elsewhere only the closed socket ends it, between two batches."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)
