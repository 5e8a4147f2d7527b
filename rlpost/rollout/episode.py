"""Environment + engine -> trajectory. Token in, token out: what was sampled is kept as it is and never tokenised again."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlpost.environments.protocol import Environment, Observation, Step
from rlpost.types import (
    NOT_SAMPLED_VERSION,
    Failure,
    FailureKind,
    GenerateRequest,
    GenerateResult,
    Prompt,
    SamplingSettings,
    Trajectory,
)

Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]


class TokenCodec(Protocol):
    """What an episode needs of the tokenizer."""

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str: ...

    def encode_text(self, text: str) -> list[int]: ...

    def encode_turn(self, messages: Any) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Budgets of one episode. ``max_total_tokens`` counts prompt, turns and observations."""

    max_turns: int
    max_total_tokens: int
    environment_timeout_s: float


@dataclass
class _Tape:
    """The growing trajectory; each append keeps the four arrays equally long."""

    tokens: list[int]
    trainable: list[bool]
    logprobs: list[float]
    versions: list[int]

    def add_context(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.trainable += [False] * len(tokens)
        self.logprobs += [float("nan")] * len(tokens)
        self.versions += [NOT_SAMPLED_VERSION] * len(tokens)

    def drop_context_after(self, start: int) -> None:
        """Forget context at the end that no sampled token follows: an observation nobody reads may be of any length."""
        end = max((position + 1 for position, sampled in enumerate(self.trainable) if sampled), default=start)
        for track in (self.tokens, self.trainable, self.logprobs, self.versions):
            del track[end:]

    def add_sampled(self, result: GenerateResult) -> None:
        self.tokens += result.tokens.tolist()
        self.trainable += [True] * len(result.tokens)
        self.logprobs += result.logprobs.tolist()
        self.versions += result.versions.tolist()


class EpisodeError(Exception):
    """The environment failed; ``failure`` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def run_episode(
    *,
    prompt: Prompt,
    group_id: str,
    sample: int,
    seed: int | None,
    make_environment: Callable[[], Environment],
    generate: Generate,
    codec: TokenCodec,
    sampling: SamplingSettings,
    limits: EpisodeLimits,
) -> Trajectory:
    """Play one episode to its end. An environment that fails marks the trajectory; only engines' errors are raised."""
    assert prompt.tokens is not None, "prompts are tokenised by the data package"
    trajectory_id = f"{group_id}.{sample}"
    tape = _Tape([], [], [], [])
    tape.add_context([int(token) for token in prompt.tokens])
    requested = cached = turns = 0
    reward: float | None = None
    truncated = False
    metrics: dict[str, float] = {}
    failure: Failure | None = None
    try:
        environment = _make(make_environment)
        first = await _call(environment, "reset", limits.environment_timeout_s, prompt, seed or 0)
        tape.add_context(_encode(environment, first, codec))
        while True:
            room = min(sampling.max_new_tokens, limits.max_total_tokens - len(tape.tokens))
            if turns == limits.max_turns or room <= 0:
                truncated = True
                tape.drop_context_after(len(prompt.tokens))
                break
            request = GenerateRequest(
                request_id=f"{trajectory_id}.{turns}",
                tokens=list(tape.tokens),
                sampling=sampling if room == sampling.max_new_tokens else _with_room(sampling, room),
                seed=None if seed is None else (seed + turns * 7919) % (1 << 31),
                session=group_id,
            )
            result = await generate(request)
            # Only now is the turn part of the episode: a request that was made again left no trace.
            tape.add_sampled(result)
            turns += 1
            requested += result.prompt_tokens
            cached += result.cached_tokens
            step = _checked(environment, await _call(environment, "step", limits.environment_timeout_s, codec.decode(result.tokens)))
            metrics.update(step.metrics)
            if step.reward is not None:
                reward = (reward or 0.0) + float(step.reward)
            truncated = step.truncated or result.finish_reason != "stop"
            if step.terminated or truncated:
                break
            if step.observation is None:
                raise EpisodeError(_failure(environment, "step returned neither an observation nor an end of the episode"))
            tape.add_context(_encode(environment, step.observation, codec))
    except EpisodeError as error:
        failure, reward = error.failure, None
    tokens = np.asarray(tape.tokens, np.int32)
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        prompt_id=prompt.prompt_id,
        tokens=tokens,
        trainable=np.asarray(tape.trainable, bool),
        logprobs=np.asarray(tape.logprobs, np.float32),
        versions=np.asarray(tape.versions, np.int32),
        prompt_length=len(prompt.tokens),
        turns=turns,
        truncated=truncated,
        completion=codec.decode(tokens[len(prompt.tokens) :]),
        prompt_tokens_requested=requested,
        prompt_tokens_cached=cached,
        reward=reward,
        reward_parts={} if reward is None else {"environment": reward},
        reward_metrics=metrics,
        failure=failure,
    )


def _with_room(sampling: SamplingSettings, room: int) -> SamplingSettings:
    return replace(sampling, max_new_tokens=room)


def _encode(environment: Environment, observation: Observation | None, codec: TokenCodec) -> list[int]:
    if observation is None:
        return []
    try:
        return codec.encode_text(observation) if isinstance(observation, str) else codec.encode_turn(observation)
    except Exception as error:  # the observation is a user's, and so may be the chat template
        message = f"its observation {observation!r:.200} cannot be tokenised: {type(error).__name__}: {error}"
        raise EpisodeError(_failure(environment, message, traceback.format_exc())) from error


def _failure(environment: Environment, message: str, trace: str = "", kind: FailureKind = "environment") -> Failure:
    return Failure(kind=kind, where=type(environment).__name__, message=message, traceback=trace)


def _checked(environment: Environment, step: Any) -> Step:
    """What ``step`` returned, if it is a Step with a reward that can be trained on and numbers as metrics."""
    if not isinstance(step, Step):
        raise EpisodeError(_failure(environment, f"step returned {step!r:.200}, expected a Step", kind="wrong_type"))
    try:
        reward = 0.0 if step.reward is None else float(step.reward)
        metrics = {name: float(value) for name, value in step.metrics.items()}
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        message = f"step gave reward={step.reward!r:.200}, metrics={step.metrics!r:.200}; expected numbers: {error}"
        raise EpisodeError(_failure(environment, message, kind="wrong_type")) from error
    if not math.isfinite(reward):
        raise EpisodeError(_failure(environment, f"step gave reward={reward}, which is not finite", kind="not_a_number"))
    return replace(step, metrics=metrics)


def _make(make_environment: Callable[[], Environment]) -> Environment:
    try:
        return make_environment()
    except Exception as error:  # see _call
        where = getattr(getattr(make_environment, "func", make_environment), "__name__", "environment")
        message = f"its constructor raised {type(error).__name__}: {error}"
        raise EpisodeError(Failure(kind="environment", where=where, message=message, traceback=traceback.format_exc())) from error


async def _call(environment: Environment, method: str, timeout_s: float, *args: Any) -> Any:
    """Call a method of the environment within its deadline; whatever goes wrong becomes an EpisodeError."""
    function = getattr(environment, method)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            if getattr(environment, "instant", False) or inspect.iscoroutinefunction(function):
                result = function(*args)
            else:
                result = await _in_thread(function, *args)
            return await result if inspect.isawaitable(result) else result
    except Exception as error:  # a user's code may raise anything; the trajectory is marked with it
        if isinstance(error, TimeoutError) and deadline.expired():
            message = f"{method} took longer than environment.timeout_s={timeout_s:g} s"
            raise EpisodeError(_failure(environment, message, kind="timeout")) from None
        raise EpisodeError(_failure(environment, f"{method} raised {type(error).__name__}: {error}", traceback.format_exc())) from error


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a blocking function in a daemon thread of its own.

    Not in the event loop's pool: there calls would wait for a free thread while their deadline runs, and one call that never
    returns would keep the whole process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as raised:  # noqa: BLE001 - it is raised again where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="environment", daemon=True).start()
    result, error = await future
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    return result
