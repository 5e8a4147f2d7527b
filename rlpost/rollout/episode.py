"""Environment + engine -> trajectory. Token in, token out: what was sampled is kept as it is and never tokenised again."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlpost.environments.protocol import Environment, Observation, Step
from rlpost.types import (
    NOT_SAMPLED_VERSION,
    Failure,
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
        environment = make_environment()
        first = await _call(environment, "reset", limits.environment_timeout_s, prompt, seed or 0)
        tape.add_context(_encode(first, codec))
        while True:
            room = min(sampling.max_new_tokens, limits.max_total_tokens - len(tape.tokens))
            if turns == limits.max_turns or room <= 0:
                truncated = True
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
            step: Step = await _call(environment, "step", limits.environment_timeout_s, codec.decode(result.tokens))
            metrics.update(step.metrics)
            if step.reward is not None:
                reward = (reward or 0.0) + float(step.reward)
            truncated = step.truncated or result.finish_reason != "stop"
            if step.terminated or truncated:
                break
            if step.observation is None:
                raise EpisodeError(_failure(environment, "step returned neither an observation nor an end of the episode"))
            tape.add_context(_encode(step.observation, codec))
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
    from dataclasses import replace

    return replace(sampling, max_new_tokens=room)


def _encode(observation: Observation | None, codec: TokenCodec) -> list[int]:
    if observation is None:
        return []
    return codec.encode_text(observation) if isinstance(observation, str) else codec.encode_turn(observation)


def _failure(environment: Environment, message: str, trace: str = "") -> Failure:
    return Failure(kind="environment", where=type(environment).__name__, message=message, traceback=trace)


async def _call(environment: Environment, method: str, timeout_s: float, *args: Any) -> Any:
    """Call a method of the environment within its deadline; whatever goes wrong becomes an EpisodeError."""
    function = getattr(environment, method)
    try:
        if getattr(environment, "instant", False):
            return function(*args)
        running = function(*args) if inspect.iscoroutinefunction(function) else asyncio.to_thread(function, *args)
        return await asyncio.wait_for(running, timeout_s)
    except TimeoutError:
        raise EpisodeError(_failure(environment, f"{method} took longer than environment.timeout_s={timeout_s:.0f} s")) from None
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything; the trajectory is marked with it
        raise EpisodeError(_failure(environment, f"{method} raised {type(error).__name__}: {error}", traceback.format_exc())) from error
