"""Episodes: what was sampled is what is kept, whatever the tokenizer, the environment and the turns do."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlpost.environments.protocol import Step
from rlpost.rollout.episode import EpisodeLimits, run_episode
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, Prompt, SamplingSettings, Trajectory

END = 0


class MergingCodec:
    """Characters are tokens, but ``ab`` is one token of its own: text that is tokenised again is cut in other places."""

    merged = ord("~")

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return "".join("ab" if int(t) == self.merged else chr(int(t)) for t in tokens if int(t) != END or not skip_special_tokens)

    def encode_text(self, text: str) -> list[int]:
        return [ord(c) for c in text.replace("ab", "~")]

    def encode_turn(self, messages: Any) -> list[int]:
        return [ord("<"), *self.encode_text("".join(m["content"] for m in messages)), ord(">")]


class Engine:
    """Gives prepared turns; remembers what it was asked. Version and logprobs count up, so that each token is known again."""

    def __init__(
        self, turns: Sequence[str | list[int]], *, finish: str = "stop", version: int = 4, logprobs: Sequence[float] | None = None
    ) -> None:
        self.turns, self.finish, self.version, self.fixed = list(turns), finish, version, logprobs
        self.requests: list[GenerateRequest] = []
        self.sampled = 0

    async def __call__(self, request: GenerateRequest) -> GenerateResult:
        turn = self.turns[len(self.requests)]
        self.requests.append(request)
        tokens = np.array([ord(c) for c in turn] if isinstance(turn, str) else turn, np.int32)
        numbers = self.sampled + np.arange(1, len(tokens) + 1, dtype=np.float32)
        self.sampled += len(tokens)
        return GenerateResult(
            request_id=request.request_id,
            tokens=tokens,
            logprobs=-numbers if self.fixed is None else np.array(self.fixed, np.float32),
            versions=np.full(len(tokens), self.version + len(self.requests) - 1, np.int32),
            finish_reason=self.finish,  # type: ignore[arg-type]
            prompt_tokens=len(request.tokens),
            cached_tokens=1,
        )


class Scripted:
    """Answers each turn with the next prepared step; a callable is called, an exception raised."""

    instant = True

    def __init__(self, *steps: Any, opening: Any = None) -> None:
        self.steps, self.opening, self.actions = list(steps), opening, list[str]()

    def reset(self, prompt: Prompt, seed: int) -> Any:
        return self._answer(self.opening)

    def step(self, action: str) -> Any:
        self.actions.append(action)
        return self._answer(self.steps[len(self.actions) - 1])

    @staticmethod
    def _answer(prepared: Any) -> Any:
        if isinstance(prepared, Exception):
            raise prepared
        return prepared() if callable(prepared) else prepared


class Threaded(Scripted):
    """The same without ``instant``: called in a thread."""

    instant = False


DONE = Step(terminated=True, reward=1.0)


async def play(
    engine: Callable[[GenerateRequest], Any],
    environment: Any,
    *,
    prompt: str = "xy",
    max_new: int = 8,
    max_total: int = 100,
    max_turns: int = 5,
    timeout_s: float = 5.0,
    seed: int | None = 7,
) -> Trajectory:
    return await run_episode(
        prompt=Prompt(prompt_id="p", text=prompt, tokens=np.array([ord(c) for c in prompt], np.int32)),
        group_id="g",
        sample=2,
        seed=seed,
        make_environment=environment if isinstance(environment, partial) else lambda: environment,
        generate=engine,
        codec=MergingCodec(),
        sampling=SamplingSettings(max_new_tokens=max_new),
        limits=EpisodeLimits(max_turns=max_turns, max_total_tokens=max_total, environment_timeout_s=timeout_s),
    )


def run(engine: Any, environment: Any, **settings: Any) -> Trajectory:
    return asyncio.run(play(engine, environment, **settings))


# ---- tokens in, tokens out -----------------------------------------------------------------------------------------


def test_sampled_ids_are_kept_where_tokenising_again_would_merge_them() -> None:
    """The engine sampled ``a`` and ``b``; the codec would make one token of "ab", in a turn and across a boundary."""
    engine = Engine(["ab", "ba", "b"])
    t = run(engine, Scripted(Step(observation="ab"), Step(observation="bb"), DONE), prompt="xa")
    codec = MergingCodec()
    text = codec.decode(t.tokens)
    assert text == "xaab" + "ab" + "ba" + "bb" + "b"
    assert len(codec.encode_text(text)) < len(t.tokens), "the codec does merge: the test can fail"
    assert t.tokens[t.trainable].tolist() == [ord(c) for c in "ab" + "ba" + "b"]
    assert t.tokens.tolist() == [ord(c) for c in "xa" + "ab" + "~" + "ba" + "bb" + "b"]


def test_each_turns_prompt_is_the_turn_before_token_for_token_plus_new_ones() -> None:
    engine = Engine(["ab", "cd", [ord("e"), END]])
    t = run(engine, Scripted(Step(observation="1"), Step(observation=[{"role": "tool", "content": "2"}]), DONE))
    asked = [list(request.tokens) for request in engine.requests]
    assert asked[0] == [ord(c) for c in "xy"]
    assert asked[1] == asked[0] + [ord(c) for c in "ab1"]
    assert asked[2] == asked[1] + [ord(c) for c in "cd<2>"]
    assert t.tokens.tolist() == asked[2] + [ord("e"), END]


def test_tool_and_prompt_tokens_are_not_trained_and_every_sampled_token_is_once() -> None:
    """Three turns of different length; the end token that was sampled is trained, whatever its id is."""
    engine = Engine(["abc", "d", [ord("e"), END]])
    t = run(engine, Scripted(Step(observation="12"), Step(observation="3"), DONE, opening="hi"))
    assert t.trainable.tolist() == [False] * 4 + [True] * 3 + [False] * 2 + [True] + [False] + [True] * 2
    assert t.sampled_tokens == 6
    assert t.prompt_length == 2
    np.testing.assert_array_equal(t.logprobs[t.trainable], [-1, -2, -3, -4, -5, -6])
    assert np.isnan(t.logprobs[~t.trainable]).all()
    assert t.versions[t.trainable].tolist() == [4, 4, 4, 5, 6, 6]
    assert (t.versions[~t.trainable] == -1).all()
    assert (t.turns, t.oldest_version, t.trajectory_id, t.group_id) == (3, 4, "g.2", "g")


@pytest.mark.parametrize("turn", ["abc", [ord("a"), END], []])
def test_no_stop_token_is_appended_so_every_trained_token_has_the_engines_logprob(turn: Any) -> None:
    """Stopped by a string, by an end token, or with nothing at all: what the engine sampled and not one token more."""
    t = run(Engine([turn]), Scripted(DONE))
    assert len(t.tokens) == 2 + len(turn)
    assert t.sampled_tokens == len(turn)
    assert np.isfinite(t.logprobs[t.trainable]).all()
    assert (t.logprobs[t.trainable] != 0.0).all()


def test_an_engines_unknown_logprob_stays_unknown_and_does_not_become_zero() -> None:
    t = run(Engine(["abc"], logprobs=[-1.0, np.nan, -3.0]), Scripted(DONE))
    assert np.isnan(t.logprobs[3])
    assert t.trainable[3]


def test_the_end_of_a_turn_is_what_the_engine_says_and_not_the_end_token() -> None:
    """The end token's id also occurs inside a turn, and in the prompt."""
    t = run(Engine([[END, ord("a"), END]]), Scripted(DONE), prompt="\0x")
    assert t.tokens.tolist() == [END, ord("x"), END, ord("a"), END]
    assert t.trainable.tolist() == [False, False, True, True, True]


# ---- budgets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("finish", "truncated"), [("stop", False), ("length", True), ("abort", True)])
def test_truncation_is_the_engines_word_and_not_a_length(finish: str, truncated: bool) -> None:
    assert run(Engine(["a" * 8], finish=finish), Scripted(DONE), max_new=8).truncated is truncated


def test_the_context_budget_shortens_the_last_turn_and_then_truncates() -> None:
    engine = Engine(["abcd", "efg"])
    t = run(engine, Scripted(Step(observation="1"), Step(observation="2")), max_new=4, max_total=10)
    assert [request.sampling.max_new_tokens for request in engine.requests] == [4, 3]
    assert len(t.tokens) <= 11
    assert t.truncated
    assert t.turns == 2


def test_the_turn_budget_truncates() -> None:
    t = run(Engine(["a"] * 3), Scripted(*[Step(observation="1")] * 3), max_turns=3)
    assert (t.turns, t.truncated, t.failure) == (3, True, None)


def test_a_prompt_that_fills_the_context_samples_nothing_and_asks_no_engine() -> None:
    engine = Engine([])
    t = run(engine, Scripted(), prompt="xyz", max_total=3)
    assert engine.requests == []
    assert (t.sampled_tokens, t.truncated, t.oldest_version, t.completion) == (0, True, -1, "")


def test_requests_are_told_apart_by_turn_and_bound_to_the_group_with_seeds_of_their_own() -> None:
    engine = Engine(["a", "b"])
    run(engine, Scripted(Step(observation="1"), DONE), seed=5)
    assert [r.request_id for r in engine.requests] == ["g.2.0", "g.2.1"]
    assert {r.session for r in engine.requests} == {"g"}
    assert engine.requests[0].seed == 5
    assert engine.requests[1].seed not in (None, 5)
    engine = Engine(["a"])
    run(engine, Scripted(DONE), seed=None)
    assert engine.requests[0].seed is None


def test_prefix_cache_counts_add_up_over_the_turns() -> None:
    t = run(Engine(["ab", "c"]), Scripted(Step(observation="1"), DONE))
    assert (t.prompt_tokens_requested, t.prompt_tokens_cached) == (2 + 5, 2)


# ---- rewards of the environment ----------------------------------------------------------------------------------------


def test_rewards_of_all_turns_add_up_and_metrics_are_kept() -> None:
    first, last = Step(observation="1", reward=0.25, metrics={"m": 1}), Step(reward=1.0, terminated=True, metrics={"n": 2})
    t = run(Engine(["a", "b"]), Scripted(first, last))
    assert (t.reward, t.reward_parts, t.reward_metrics) == (1.25, {"environment": 1.25}, {"m": 1.0, "n": 2.0})
    assert t.completion == "a1b"


def test_an_environment_that_gives_no_reward_leaves_it_unknown() -> None:
    t = run(Engine(["a"]), Scripted(Step(terminated=True)))
    assert (t.reward, t.reward_parts, t.failure) == (None, {}, None)


# ---- failures of the environment -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Scripted, Threaded])
@pytest.mark.parametrize(
    ("step", "failure", "words"),
    [
        (ValueError("boom"), "environment", r"step raised ValueError: boom"),
        (TimeoutError("the tool's own"), "environment", r"step raised TimeoutError: the tool's own"),
        (None, "wrong_type", r"returned None, expected a Step"),
        (lambda: ("obs", 1.0, True, False, {}), "wrong_type", r"expected a Step"),
        (Step(terminated=True, reward=float("nan")), "not_a_number", r"nan"),
        (Step(terminated=True, reward=float("-inf")), "not_a_number", r"-inf"),
        (Step(terminated=True, reward="many"), "wrong_type", r"'many'"),  # type: ignore[arg-type]
        (Step(terminated=True, metrics={"m": "x"}), "wrong_type", r"metrics"),  # type: ignore[dict-item]
        (Step(terminated=True, metrics=None), "wrong_type", r"metrics"),  # type: ignore[arg-type]
        (Step(observation=3), "environment", r"observation 3 cannot be tokenised"),  # type: ignore[arg-type]
        (Step(), "environment", r"neither an observation nor an end"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_whatever_an_environment_does_wrong_marks_the_trajectory_without_a_reward(kind: type, step: Any, failure: str, words: str) -> None:
    """Never reward 0, never NaN in the baseline, never the end of the run; what it earned before does not count."""
    t = run(Engine(["ab", "c"]), kind(Step(observation="1", reward=5.0), step))
    assert t.failure is not None
    assert (t.failure.kind, t.failure.where) == (failure, kind.__name__)
    assert re.search(words, t.failure.message)
    assert t.reward is None
    assert t.reward_parts == {}
    assert t.sampled_tokens == 3, "what was sampled so far is kept, to be looked at"


def test_a_raise_keeps_the_users_traceback() -> None:
    t = run(Engine(["a"]), Scripted(ValueError("boom")))
    assert t.failure is not None
    assert "_answer" in t.failure.traceback


@pytest.mark.parametrize("opening", [RuntimeError("no sandbox"), 17])
def test_a_failing_reset_marks_the_trajectory_before_anything_is_sampled(opening: Any) -> None:
    engine = Engine([])
    t = run(engine, Scripted(opening=opening))
    assert t.failure is not None
    assert (t.failure.kind, t.reward, t.sampled_tokens) == ("environment", None, 0)


def test_a_failing_constructor_marks_the_trajectory() -> None:
    class Broken:
        def __init__(self, sandbox: str) -> None:
            raise OSError(f"no {sandbox}")

    t = run(Engine([]), partial(Broken, "docker"))
    assert t.failure is not None
    assert (t.failure.where, t.failure.message) == ("Broken", "its constructor raised OSError: no docker")


def test_a_blocking_environment_that_never_returns_is_marked_and_does_not_keep_the_process() -> None:
    """Its thread cannot be stopped. In the event loop's own pool it would keep asyncio.run from ever returning."""
    never = threading.Event()
    started = time.monotonic()
    t = run(Engine(["a"]), Threaded(lambda: never.wait(60)), timeout_s=0.05)
    assert time.monotonic() - started < 30
    never.set()
    assert t.failure is not None
    assert t.failure.kind == "timeout"
    assert "environment.timeout_s=0.05" in t.failure.message
    assert t.reward is None


def test_blocking_environments_do_not_wait_for_each_other() -> None:
    """All of them must be inside ``step`` at the same time: a pool of a few threads would let the others time out."""
    count = 40
    barrier = threading.Barrier(count)

    def meet() -> Step:
        barrier.wait(20)
        return DONE

    async def everything() -> list[Trajectory]:
        return list(await asyncio.gather(*(play(Engine(["a"]), Threaded(meet), timeout_s=30) for _ in range(count))))

    assert [t.failure for t in asyncio.run(everything())] == [None] * count


def test_an_async_environment_that_hangs_is_marked() -> None:
    class Hanging:
        async def reset(self, prompt: Prompt, seed: int) -> str:
            return "o"

        async def step(self, action: str) -> Step:
            await asyncio.sleep(60)
            return DONE

    t = run(Engine(["a"]), Hanging(), timeout_s=0.05)
    assert t.failure is not None
    assert (t.failure.kind, t.failure.where) == ("timeout", "Hanging")
    assert t.tokens.tolist() == [ord(c) for c in "xyoa"]


def test_the_environment_sees_the_text_of_its_turn_without_special_tokens() -> None:
    environment = Scripted(Step(observation="1"), DONE)
    run(Engine([[ord("a"), END], "b"]), environment)
    assert environment.actions == ["a", "b"]


def test_an_engines_error_is_raised_and_is_no_fault_of_the_episode() -> None:
    async def lost(request: GenerateRequest) -> GenerateResult:
        raise InfrastructureError("engine 0 is lost")

    with pytest.raises(InfrastructureError, match="engine 0"):
        run(lost, Scripted(DONE))
