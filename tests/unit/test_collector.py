"""The background between prompts and buffer: errors reach the consumer at once, failed rewards are None, nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlpost.environments.protocol import Step
from rlpost.environments.single_turn import SingleTurn
from rlpost.rollout.buffer import StalenessBuffer
from rlpost.rollout.collector import Collector, RolloutPlan, Score, run_group, sample_seed
from rlpost.rollout.episode import EpisodeLimits, Generate
from rlpost.types import (
    Failure,
    GenerateRequest,
    GenerateResult,
    Group,
    InfrastructureError,
    Prompt,
    RewardItem,
    RewardOutcome,
    SamplingSettings,
)

PROMPTS = [Prompt(prompt_id=f"p{i}", text=f"text {i}", fields={"answer": i}, tokens=np.array([1, 2])) for i in range(5)]


class Codec:
    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return " ".join(str(int(t)) for t in tokens)

    def encode_text(self, text: str) -> list[int]:
        return [int(t) for t in text.split()]

    def encode_turn(self, messages: Any) -> list[int]:
        raise NotImplementedError


class Cursor:
    def __init__(self) -> None:
        self.count = 0

    def next(self) -> tuple[int, int]:
        self.count += 1
        return divmod(self.count - 1, len(PROMPTS))


async def generate(request: GenerateRequest) -> GenerateResult:
    await asyncio.sleep(0)
    return GenerateResult(
        request_id=request.request_id,
        tokens=np.array([7, 8]),
        logprobs=np.array([-1.0, -2.0]),
        versions=np.array([0, 0]),
        finish_reason="stop",
        prompt_tokens=2,
        cached_tokens=0,
    )


async def score(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
    return [RewardOutcome(trajectory_id=item.trajectory_id, value=1.0, parts={"f": 1.0}) for item in items]


def plan(
    *, generate: Generate = generate, score: Score | None = score, group_size: int = 2, make_environment: Callable[[], Any] = SingleTurn
) -> RolloutPlan:
    return RolloutPlan(
        group_size=group_size,
        seed=1,
        sampling=SamplingSettings(max_new_tokens=8),
        limits=EpisodeLimits(max_turns=2, max_total_tokens=50, environment_timeout_s=5),
        make_environment=make_environment,
        generate=generate,
        codec=Codec(),
        score=score,
    )


def collect(
    scenario: Callable[[Collector], Coroutine[Any, Any, None]], *, prompts_per_step: int = 2, staleness: int = 0, **of_plan: Any
) -> None:
    async def everything() -> None:
        collector = Collector(plan(**of_plan), PROMPTS, Cursor(), StalenessBuffer(prompts_per_step, staleness))
        try:
            await asyncio.wait_for(scenario(collector), 20)
        finally:
            await asyncio.wait_for(collector.close(), 5)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "a task outlived close()"

    asyncio.run(everything())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for is another's state
        await asyncio.sleep(0)


def one_group(**of_plan: Any) -> Group:
    return asyncio.run(run_group(plan(**of_plan), PROMPTS[3], "g", 0))


# ---- rewards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raised", "timeout", "worker_died", "not_a_number", "not_scorable"])
def test_a_failed_reward_is_none_and_never_zero_with_its_failure_kept(kind: Any) -> None:
    async def failing(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        failure = Failure(kind=kind, where="f", message="m")
        good, bad = items
        return [
            RewardOutcome(trajectory_id=good.trajectory_id, value=0.5, parts={"f": 0.5}),
            RewardOutcome(trajectory_id=bad.trajectory_id, value=None, parts={"f": None}, failure=failure),
        ]

    good, bad = one_group(score=failing).trajectories
    assert (good.reward, good.failure) == (0.5, None)
    assert bad.reward is None
    assert bad.reward_parts == {"f": None}
    assert bad.failure is not None
    assert bad.failure.kind == kind


def test_outcomes_are_matched_by_trajectory_and_not_by_position() -> None:
    async def shuffled(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        outcomes = [RewardOutcome(trajectory_id=item.trajectory_id, value=float(item.trajectory_id[-1])) for item in items]
        return outcomes[::-1]

    assert [t.reward for t in one_group(score=shuffled, group_size=4).trajectories] == [0.0, 1.0, 2.0, 3.0]


def test_reward_functions_see_the_text_and_the_rows_fields() -> None:
    seen: list[RewardItem] = []

    async def look(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        seen.extend(items)
        return await score(items)

    group = one_group(score=look)
    assert [(i.prompt, i.completion, i.fields, i.tokens, i.truncated) for i in seen] == [("text 3", "7 8", {"answer": 3}, 2, False)] * 2
    for one, trajectory in zip(seen, group.trajectories, strict=True):
        assert one.trajectory_tokens is trajectory.tokens, "a reward model scores exactly what was sampled"


class Rewarding:
    """Gives a reward of its own; every second one made fails."""

    instant = True
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.fails = type(self).made % 2 == 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        pass

    def step(self, action: str) -> Step:
        if self.fails:
            raise RuntimeError("sandbox")
        return Step(reward=0.25, terminated=True)


def test_a_failed_episode_is_not_scored_and_a_good_ones_rewards_add_up() -> None:
    """A reward function must not turn a broken episode into a number."""
    asked: list[str] = []

    async def look(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        asked.extend(item.trajectory_id for item in items)
        return await score(items)

    Rewarding.made = 0
    trajectories = one_group(score=look, make_environment=Rewarding, group_size=4).trajectories
    good = [t for t in trajectories if t.failure is None]
    assert len(good) == 2
    assert asked == [t.trajectory_id for t in good]
    assert all(t.reward == 1.25 and t.reward_parts == {"environment": 0.25, "f": 1.0} for t in good)
    assert all(t.reward is None for t in trajectories if t.failure is not None)


def test_a_failed_function_leaves_no_reward_even_when_the_environment_gave_one() -> None:
    async def none(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        failure = Failure(kind="raised", where="f", message="m")
        return [RewardOutcome(trajectory_id=item.trajectory_id, value=None, failure=failure) for item in items]

    Rewarding.made = 0
    assert [t.reward for t in one_group(score=none, make_environment=Rewarding, group_size=1).trajectories] == [None]


def test_seeds_depend_on_run_group_and_sample_alone() -> None:
    seeds = {sample_seed(run, group, sample) for run in (0, 1) for group in ("a", "b") for sample in range(4)}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(3, "00000001-0-7", 2) == 2139277433, "a checkpoint outlives an upgrade: this must not change"


# ---- the collector -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 2])
def test_groups_in_equal_groups_out_over_many_steps(staleness: int) -> None:
    version = 0

    async def of_this_version(request: GenerateRequest) -> GenerateResult:
        return replace(await generate(request), versions=np.full(2, version))

    async def scenario(collector: Collector) -> None:
        nonlocal version
        taken: list[int] = []
        for _ in range(6):
            collector.fill()
            batch = await collector.take(10)
            assert batch is not None
            assert [len(g.trajectories) for g in batch] == [2, 2]
            taken += [g.index for g in batch]
            version += 1
            collector.buffer.version = version
        assert sorted([*taken, *collector.rows]) == list(range(collector.buffer.dispatched))
        assert set(collector.rows) == set(collector.buffer.outstanding)

    collect(scenario, staleness=staleness, generate=of_this_version)


@pytest.mark.parametrize("where", ["generate", "score"])
def test_an_error_in_a_group_reaches_take_at_once_as_what_it_was(where: str) -> None:
    """Not after the deadline, not wrapped, although another group never ends."""

    async def broken_generate(request: GenerateRequest) -> GenerateResult:
        if request.session.startswith("00000001"):
            raise InfrastructureError("engine 0 is gone")
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def broken_score(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        raise InfrastructureError("engine 0 is gone")

    async def scenario(collector: Collector) -> None:
        collector.fill()
        with pytest.raises(InfrastructureError, match="engine 0 is gone"):
            await collector.take(1000)
        collector.fill()
        with pytest.raises(InfrastructureError, match="engine 0 is gone"):  # again: it does not go away
            await collector.take(1000)

    collect(scenario, **({"generate": broken_generate} if where == "generate" else {"score": broken_score}))


def test_an_error_is_raised_even_when_a_batch_is_ready() -> None:
    """With rollouts ahead a run could otherwise go on for steps with a dead background."""

    async def broken(request: GenerateRequest) -> GenerateResult:
        if request.session.startswith("00000003"):
            raise InfrastructureError("gone")
        return await generate(request)

    async def scenario(collector: Collector) -> None:
        collector.fill()
        await until(lambda: len(collector.buffer.finished) == 3 and collector._failure is not None)
        assert collector.buffer.ready()
        with pytest.raises(InfrastructureError, match="gone"):
            await collector.take(1000)

    collect(scenario, staleness=1, generate=broken)


def test_a_group_that_is_cancelled_from_outside_is_an_error_and_not_an_endless_wait() -> None:
    async def cancelled(request: GenerateRequest) -> GenerateResult:
        raise asyncio.CancelledError

    async def scenario(collector: Collector) -> None:
        collector.fill()
        with pytest.raises(InfrastructureError, match="cancelled"):
            await collector.take(1000)

    collect(scenario, generate=cancelled)


def test_the_deadlines_message_names_the_groups_that_are_missing_and_the_setting() -> None:
    async def stuck(request: GenerateRequest) -> GenerateResult:
        if not request.session.startswith("00000001"):
            await asyncio.Event().wait()
        return await generate(request)

    async def scenario(collector: Collector) -> None:
        collector.fill()
        with pytest.raises(InfrastructureError, match=r"schedule\.rollout_timeout_s\): 1 groups finished, waiting for groups \[0, 2\]"):
            await collector.take(0.1)

    collect(scenario, generate=stuck, prompts_per_step=3)


def test_take_returns_none_when_interrupted_and_nothing_is_lost() -> None:
    async def scenario(collector: Collector) -> None:
        assert await collector.take(10, interrupted=lambda: True) is None
        collector.fill()
        batch = await collector.take(10)
        assert batch is not None
        assert [g.index for g in batch] == [0, 1]

    collect(scenario)


def test_close_cancels_running_groups_and_their_requests_without_an_error() -> None:
    cancelled: list[str] = []

    async def endless(request: GenerateRequest) -> GenerateResult:
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        except asyncio.CancelledError:
            cancelled.append(request.request_id)
            raise

    async def scenario(collector: Collector) -> None:
        collector.fill()
        await asyncio.sleep(0.01)
        await collector.close()
        assert len(cancelled) == 4
        assert collector._failure is None

    collect(scenario, generate=endless)


def test_resume_makes_unfinished_groups_again_with_the_same_ids_prompts_and_seeds() -> None:
    asked: dict[str, int | None] = {}

    async def look(request: GenerateRequest) -> GenerateResult:
        asked[request.request_id] = request.seed
        return await generate(request)

    async def first(collector: Collector) -> None:
        collector.fill()
        await collector.take(10)
        rows.update(collector.rows)

    async def second(collector: Collector) -> None:
        before = dict(asked)
        asked.clear()
        collector.buffer.dispatched = 4
        collector.buffer.version = 0
        collector.resume(rows)
        assert collector.rows == rows
        batch = await collector.take(10)
        assert batch is not None
        assert [(g.index, g.prompt.prompt_id) for g in batch] == [(2, "p2"), (3, "p3")]
        assert asked == {request_id: seed for request_id, seed in before.items() if request_id[:8] in ("00000002", "00000003")}
        assert collector.buffer.dispatched == 4

    rows: dict[int, tuple[int, int]] = {}
    collect(first, generate=look, staleness=1)
    assert rows == {2: (0, 2), 3: (0, 3)}
    collect(second, generate=look, staleness=1)


def test_the_same_prompt_in_two_epochs_makes_two_groups() -> None:
    async def scenario(collector: Collector) -> None:
        collector.fill()
        batch = await collector.take(10)
        assert batch is not None
        assert len({g.group_id for g in batch}) == len(batch) == 10
        assert [g.prompt.prompt_id for g in batch] == [f"p{i}" for i in range(5)] * 2

    collect(scenario, prompts_per_step=10)


def test_busy_time_is_counted_once_for_overlapping_groups_and_stops_with_the_last() -> None:
    async def scenario(collector: Collector) -> None:
        collector.fill()
        await collector.take(10)
        assert collector.take_busy_s() >= 0.0
        await asyncio.sleep(0.01)
        assert collector.take_busy_s() == 0.0
        assert collector._generating == 0

    collect(scenario)
