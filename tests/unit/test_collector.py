"""The background between prompts and buffer: errors reach the consumer at once, failed rewards are None, nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import play

from rlpost.environments.protocol import Step
from rlpost.environments.single_turn import SingleTurn
from rlpost.rollout.buffer import StalenessBuffer
from rlpost.rollout.collector import Collector, RolloutPlan, Score, run_group, sample_seed
from rlpost.rollout.episode import EpisodeLimits, Generate
from rlpost.types import (
    DataFailureError,
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
    *,
    generate: Generate = generate,
    score: Score | None = score,
    group_size: int = 2,
    make_environment: Callable[[], Any] = SingleTurn,
    greedy_baseline: bool = False,
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
        greedy_baseline=greedy_baseline,
    )


def collect(
    scenario: Callable[[Collector], Coroutine[Any, Any, None]],
    *,
    prompts_per_step: int = 2,
    staleness: int = 0,
    refuses: Callable[[Group], bool] | None = None,
    most_refused: int = 0,
    **of_plan: Any,
) -> None:
    async def everything() -> None:
        buffer = StalenessBuffer(prompts_per_step, staleness)
        collector = Collector(plan(**of_plan), PROMPTS, Cursor(), buffer, refuses=refuses, most_refused=most_refused)
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
        if request.session == "0-1":
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
        if request.session == "0-3":
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
        if request.session != "0-1":
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
        assert asked == {request_id: seed for request_id, seed in before.items() if request_id[:3] in ("0-2", "0-3")}
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


# ---- groups that teach nothing -------------------------------------------------------------------------------------


def of_prompts(*names: str) -> Callable[[Group], bool]:
    return lambda group: group.prompt.prompt_id in names


def test_a_refused_group_is_replaced_under_its_index_by_the_next_prompt_and_counted() -> None:
    """p0 and its replacement p2 are refused: index 0 gets p3. The batch is full, and no prompt is lost or used twice."""

    async def scenario(collector: Collector) -> None:
        collector.fill()
        batch = await collector.take(10)
        assert batch is not None
        assert [(group.index, group.prompt.prompt_id) for group in batch] == [(1, "p1"), (0, "p3")]
        assert [group.group_id for group in batch] == ["0-1", "0-3"]
        assert (len(collector.take_refused()), collector.take_refused()) == (2, [])
        assert collector.rows == {}
        assert collector.buffer.dispatched == 2, "a replacement is no further group of the staleness bound"
        collector.buffer.version = 1
        collector.fill()
        assert collector.rows == {2: (0, 4), 3: (1, 0)}

    collect(scenario, refuses=of_prompts("p0", "p2"), most_refused=2)


def test_the_same_batches_seeds_and_cursor_for_every_order_in_which_groups_finish() -> None:
    """Dynamic sampling with 20 orders, 3 steps each: without it a run could not be repeated, nor resumed as it went."""

    def steps_of(order: int) -> tuple[Any, ...]:
        luck, version, seeds, cursor = random.Random(order), 0, dict[str, int | None](), Cursor()

        async def some_time(request: GenerateRequest) -> GenerateResult:
            seeds[request.request_id] = request.seed
            await asyncio.sleep(luck.random())
            return replace(await generate(request), versions=np.full(2, version))

        def refuses(group: Group) -> bool:
            """As rewards do, by what the seeds made the engine sample."""
            return sum(seeds[trajectory.trajectory_id + ".0"] or 0 for trajectory in group.trajectories) % 2 == 0

        async def train() -> list[Any]:
            nonlocal version
            buffer = StalenessBuffer(3, 0)
            collector = Collector(plan(generate=some_time), PROMPTS, cursor, buffer, refuses=refuses, most_refused=1000)
            found: list[Any] = []
            for step in range(3):
                version = buffer.version = step
                collector.fill()
                batch = await collector.take(1e9)
                assert batch is not None
                found.append(([group.group_id for group in batch], {group.group_id for group in collector.take_refused()}, cursor.count))
            await collector.close()
            return found

        return play(train()), seeds

    first, *others = [steps_of(order) for order in range(20)]
    assert sum(len(refused) for _, refused, _ in first[0]) > 0, "nothing was refused, so nothing is tested"
    assert all(other == first for other in others)


def test_refused_groups_come_back_with_their_failures() -> None:
    """A reward that fails for whole groups makes them refused; uncounted, such failures would never end the run."""

    async def fails_for_two(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        if items[0].prompt_id not in ("p0", "p2"):
            return await score(items)
        failure = Failure(kind="raised", where="f", message="KeyError: 'answer'")
        return [RewardOutcome(trajectory_id=item.trajectory_id, value=None, failure=failure) for item in items]

    async def scenario(collector: Collector) -> None:
        collector.fill()
        batch = await collector.take(10)
        assert batch is not None
        assert all(trajectory.failure is None for group in batch for trajectory in group.trajectories)
        refused = collector.take_refused()
        assert [group.prompt.prompt_id for group in refused] == ["p0", "p2"]
        failures = [trajectory.failure for group in refused for trajectory in group.trajectories]
        assert [(failure.kind, failure.where) if failure else None for failure in failures] == [("raised", "f")] * 4
        assert collector.take_refused() == []

    def refuses(group: Group) -> bool:
        return all(trajectory.reward is None for trajectory in group.trajectories)

    collect(scenario, refuses=refuses, most_refused=2, score=fails_for_two)


def test_without_a_filter_nothing_is_refused() -> None:
    async def scenario(collector: Collector) -> None:
        collector.fill()
        batch = await collector.take(10)
        assert batch is not None
        assert [group.prompt.prompt_id for group in batch] == ["p0", "p1"]
        assert collector.take_refused() == []

    collect(scenario)


def test_a_resume_plays_the_replacement_and_not_the_group_that_was_refused() -> None:
    """The cursor is past both, so the refused prompt would push the replacement's out of the epoch."""

    async def stuck_at_replacement(request: GenerateRequest) -> GenerateResult:
        if request.session == "0-2":
            await asyncio.Event().wait()
        return await generate(request)

    async def first(collector: Collector) -> None:
        collector.fill()
        await until(lambda: collector.rows.get(0) == (0, 2))
        rows.update(collector.rows)

    async def second(collector: Collector) -> None:
        collector.buffer.dispatched = 2
        collector.resume(rows)
        batch = await collector.take(10)
        assert batch is not None
        assert [group.prompt.prompt_id for group in batch] == ["p2", "p1"]

    rows: dict[int, tuple[int, int]] = {}
    collect(first, refuses=of_prompts("p0"), most_refused=5, generate=stuck_at_replacement)
    assert rows == {0: (0, 2), 1: (0, 1)}
    collect(second, refuses=of_prompts("p0"), most_refused=5)


def test_too_many_refused_groups_end_the_run_at_once_although_another_group_never_ends() -> None:
    async def one_stuck(request: GenerateRequest) -> GenerateResult:
        if request.session == "0-1":
            await asyncio.Event().wait()
        return await generate(request)

    async def scenario(collector: Collector) -> None:
        collector.fill()
        with pytest.raises(DataFailureError, match=r"4 groups.*max_resampled allows 3.*\[1\.0, 1\.0\]"):
            await collector.take(1000)
        assert len(collector.refused) == 4

    collect(scenario, refuses=lambda group: True, most_refused=3, generate=one_stuck)


@pytest.mark.parametrize("cause", ["engine", "refused"])
def test_a_failure_wakes_take_in_the_moment_it_happens(cause: str) -> None:
    """Not at its next look at the clock: in virtual time a second's delay is seen."""

    async def late(request: GenerateRequest) -> GenerateResult:
        if request.session != "0-0":
            await asyncio.sleep(1e6)
        await asyncio.sleep(0.25)
        if cause == "engine":
            raise InfrastructureError("gone")
        return await generate(request)

    async def scenario() -> None:
        collector = Collector(plan(generate=late), PROMPTS, Cursor(), StalenessBuffer(2, 0), refuses=lambda group: True)
        collector.fill()
        with pytest.raises(InfrastructureError if cause == "engine" else DataFailureError):
            await collector.take(1000)
        assert asyncio.get_running_loop().time() == 0.25
        await collector.close()

    play(scenario())


def test_a_replacement_is_as_young_as_its_dispatch_and_not_waited_for_like_the_group_it_replaces() -> None:
    """Index 0 is of version 0 until it is refused at version 2: as an old group, step 2 would have to wait for it."""
    version, let_go = 0, asyncio.Event()

    async def controlled(request: GenerateRequest) -> GenerateResult:
        if request.session == "0-0":
            await let_go.wait()
        elif request.session == "0-4":  # what replaces it
            await asyncio.Event().wait()
        return replace(await generate(request), versions=np.full(2, version))

    async def scenario(collector: Collector) -> None:
        nonlocal version
        taken: list[int] = []
        for _ in range(2):
            collector.fill()
            batch = await collector.take(10)
            assert batch is not None
            taken += [group.index for group in batch]
            version = collector.buffer.version = version + 1
        assert taken == [1, 2]
        let_go.set()
        await until(lambda: collector.refused)
        batch = await collector.take(10)
        assert batch is not None
        assert [group.index for group in batch] == [3]

    refuses = of_prompts("p0")
    collect(scenario, prompts_per_step=1, staleness=2, refuses=refuses, most_refused=5, generate=controlled)


def test_the_cap_is_of_one_batch_and_not_of_the_run() -> None:
    """Three refused for each of four batches, with a cap of three."""
    seen: list[str] = []

    def three_of_four(group: Group) -> bool:
        seen.append(group.group_id)
        return len(seen) % 4 != 0

    async def scenario(collector: Collector) -> None:
        for step in range(4):
            collector.buffer.version = step
            collector.fill()
            assert await collector.take(10) is not None
            assert len(collector.take_refused()) == 3

    async def of_every_version(request: GenerateRequest) -> GenerateResult:
        return replace(await generate(request), versions=np.full(2, len(seen) // 4))

    collect(scenario, prompts_per_step=1, refuses=three_of_four, most_refused=3, generate=of_every_version)


@settings(max_examples=60, deadline=None)
@given(prompts=st.integers(1, 4), staleness=st.integers(0, 3), refused=st.floats(0, 0.7), seed=st.integers(0, 2**16))
def test_no_token_is_too_old_however_long_groups_take_and_whichever_are_refused(
    prompts: int, staleness: int, refused: float, seed: int
) -> None:
    """In virtual time: tokens are sampled before and after weight syncs, and a replaced group starts late under an old index."""
    luck, version, decided = random.Random(seed), 0, {}

    async def slow(request: GenerateRequest) -> GenerateResult:
        before = version
        await asyncio.sleep(luck.choice([0.0, 0.1, 1.0, 20.0]))
        return replace(await generate(request), versions=np.array([before, version]))

    def refuses(group: Group) -> bool:
        decided[group.group_id] = luck.random() < refused
        return decided[group.group_id]

    async def train() -> None:
        nonlocal version
        buffer = StalenessBuffer(prompts, staleness)
        collector = Collector(plan(generate=slow), PROMPTS, Cursor(), buffer, refuses=refuses, most_refused=10**6)
        taken: list[int] = []
        for step in range(8):
            collector.fill()
            batch = await collector.take(1e9)
            assert batch is not None
            assert len(batch) == prompts
            assert not any(decided[group.group_id] for group in batch)
            oldest = min(trajectory.oldest_version for group in batch for trajectory in group.trajectories)
            assert step - staleness <= oldest <= step
            taken += [group.index for group in batch]
            await asyncio.sleep(luck.choice([0.0, 5.0]))
            version = step + 1  # the engines first, then the driver's count
            await asyncio.sleep(luck.choice([0.0, 0.5]))
            buffer.version = step + 1
        assert sorted([*taken, *collector.rows]) == list(range(buffer.dispatched)), "every dispatched group is taken once or under way"
        await collector.close()

    play(train())


# ---- the greedy sample ---------------------------------------------------------------------------------------------


def test_a_greedy_sample_is_played_besides_scored_and_kept_apart() -> None:
    temperatures: list[float] = []

    async def look(request: GenerateRequest) -> GenerateResult:
        temperatures.append(request.sampling.temperature)
        tokens = np.array([9, 9]) if request.sampling.temperature == 0 else np.array([7, 8])
        return replace(await generate(request), tokens=tokens)

    async def by_text(items: Sequence[RewardItem]) -> Sequence[RewardOutcome]:
        return [RewardOutcome(trajectory_id=item.trajectory_id, value=float(item.completion[0])) for item in items]

    found = one_group(generate=look, score=by_text, group_size=3, greedy_baseline=True)
    assert sorted(temperatures) == [0.0, 1.0, 1.0, 1.0]
    assert [trajectory.reward for trajectory in found.trajectories] == [7.0, 7.0, 7.0]
    assert found.baseline is not None
    assert found.baseline.reward == 9.0
    assert found.baseline.trajectory_id not in {trajectory.trajectory_id for trajectory in found.trajectories}


def test_the_samples_beside_a_greedy_one_have_the_seeds_that_they_have_without() -> None:
    def seeds(greedy: bool) -> dict[str, int | None]:
        found: dict[str, int | None] = {}

        async def look(request: GenerateRequest) -> GenerateResult:
            found[request.request_id] = request.seed
            return await generate(request)

        assert (one_group(generate=look, greedy_baseline=greedy).baseline is not None) == greedy
        return found

    without, besides = seeds(False), seeds(True)
    assert len(without) == 2
    assert {name: besides[name] for name in without} == without
