"""The staleness bound under every order of finishing: it holds, nothing is lost, nothing waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import group, trajectory

from rlpost.rollout.buffer import StalenessBuffer, StalenessError


def fill(buffer: StalenessBuffer) -> list[int]:
    """Dispatch as many groups as rule 1 allows."""
    new = []
    while buffer.may_dispatch():
        new.append(buffer.dispatch())
    return new


class Simulation:
    """A run whose groups finish in a random order; a group's tokens have the version at its dispatch, the worst case."""

    def __init__(self, prompts: int, staleness: int, seed: int, preference: str) -> None:
        self.buffer = StalenessBuffer(prompts, staleness)
        self.random = random.Random(seed)
        self.preference = preference
        self.running: dict[int, int] = {}
        self.dispatched: list[int] = []
        self.taken: list[list[int]] = []

    def dispatch(self) -> None:
        for index in fill(self.buffer):
            self.running[index] = self.buffer.version
            self.dispatched.append(index)
        assert len(self.buffer.outstanding) <= self.buffer.slots

    def finish_one(self) -> None:
        order = sorted(self.running)
        index = {"oldest": order[0], "newest": order[-1], "any": self.random.choice(order)}[self.preference]
        self.buffer.put(group(index, version=self.running.pop(index)))

    def step(self) -> None:
        """Finish groups until the batch is there, plus a few more, then train on it."""
        self.dispatch()
        while not self.buffer.ready():
            assert self.running, "every group is finished, and still no batch: the run would wait for ever"
            self.finish_one()
        for _ in range(self.random.randint(0, len(self.running))):
            self.finish_one()
        batch = self.buffer.take()
        for taken in batch:
            assert 0 <= self.buffer.version - taken.trajectories[0].oldest_version <= self.buffer.max_staleness
        self.taken.append([taken.index for taken in batch])
        self.buffer.version += 1


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(1, 4),
    staleness=st.integers(0, 4),
    seed=st.integers(0, 10_000),
    preference=st.sampled_from(["any", "oldest", "newest"]),
)
def test_bound_holds_and_count_in_equals_count_out_in_any_order(prompts: int, staleness: int, seed: int, preference: str) -> None:
    """``take`` asserts the bound on every token; groups that finish newest first are the ones that overtake."""
    run = Simulation(prompts, staleness, seed, preference)
    for _ in range(12):
        run.step()
    out = [index for batch in run.taken for index in batch]
    assert all(len(batch) == prompts for batch in run.taken)
    assert len(out) == len(set(out))
    left = set(run.buffer.outstanding)
    assert set(out) | left == set(run.dispatched)
    assert not set(out) & left
    assert set(run.buffer.finished) | set(run.running) == left


def test_a_slow_group_is_overtaken_but_not_for_longer_than_the_bound() -> None:
    """k = 2, one group a step: group 3 (version 1) may not take step 1, or two groups of version 0 would be left for step 2."""
    buffer = StalenessBuffer(1, 2)
    assert fill(buffer) == [0, 1, 2]
    buffer.put(group(2))
    assert [g.index for g in buffer.take()] == [2]
    buffer.version = 1
    assert fill(buffer) == [3]
    buffer.put(group(3, version=1))
    assert not buffer.ready()
    buffer.put(group(1))
    assert [g.index for g in buffer.take()] == [1]
    buffer.version = 2
    fill(buffer)
    assert not buffer.ready(), "group 0 of version 0 is due"
    buffer.put(group(0))
    assert [g.index for g in buffer.take()] == [0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), prompts=st.integers(1, 5))
def test_synchronous_batches_are_the_dispatched_groups_in_order_whatever_finished_first(seed: int, prompts: int) -> None:
    """max_staleness 0: the batch depends on the prompts alone, so that a resumed run trains on the same."""
    run = Simulation(prompts, 0, seed, "any")
    for step in range(4):
        run.step()
        assert run.taken[step] == list(range(step * prompts, (step + 1) * prompts))


@pytest.mark.parametrize(("staleness", "slots"), [(0, 3), (1, 6), (3, 12)])
def test_rollouts_run_ahead_by_the_staleness_and_no_further(staleness: int, slots: int) -> None:
    buffer = StalenessBuffer(3, staleness)
    assert len(fill(buffer)) == slots == buffer.slots
    for index in range(slots):
        buffer.put(group(index))
    assert fill(buffer) == []
    buffer.take()
    assert fill(buffer) == [], "only a new version opens new slots"
    buffer.version = 1
    assert len(fill(buffer)) == 3


def test_a_full_buffer_never_freezes() -> None:
    """All slots finished before the first batch is taken: every step still gets one."""
    buffer = StalenessBuffer(2, 3)
    for index in fill(buffer):
        buffer.put(group(index))
    for step in range(10):
        assert buffer.ready()
        buffer.take()
        buffer.version = step + 1
        for index in fill(buffer):
            buffer.put(group(index, version=step + 1))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), staleness=st.integers(0, 3), steps=st.integers(0, 5), prompts=st.integers(1, 3))
def test_resume_dispatches_unfinished_groups_again_and_keeps_the_bound(seed: int, staleness: int, steps: int, prompts: int) -> None:
    """What a checkpoint holds: dispatched, version, unfinished indices. Redone groups are of the version resumed from."""
    run = Simulation(prompts, staleness, seed, "newest")
    for _ in range(steps):
        run.step()
    resumed = Simulation(prompts, staleness, seed + 1, "newest")
    resumed.buffer.version = run.buffer.version
    resumed.buffer.dispatched = run.buffer.dispatched
    for index in sorted(run.buffer.outstanding):
        assert resumed.buffer.dispatch(index) == index
        resumed.running[index] = run.buffer.version
    for _ in range(6):
        resumed.step()
    out = [index for batch in run.taken + resumed.taken for index in batch]
    assert len(out) == len(set(out))
    assert set(out) | set(resumed.buffer.outstanding) == set(range(resumed.buffer.dispatched))


def test_putting_a_group_twice_or_an_unknown_one_is_an_error() -> None:
    buffer = StalenessBuffer(2, 0)
    fill(buffer)
    buffer.put(group(0))
    for index in (0, 7):
        with pytest.raises(StalenessError, match=f"group {index}"):
            buffer.put(group(index))


def test_take_before_ready_is_an_error() -> None:
    buffer = StalenessBuffer(2, 0)
    fill(buffer)
    buffer.put(group(0))
    with pytest.raises(StalenessError, match="1 of 2"):
        buffer.take()


@pytest.mark.parametrize("version", [2, 6])
def test_a_token_outside_the_bound_is_never_handed_to_the_trainer(version: int) -> None:
    """Too old, or newer than the trainer: the assertion at consumption does not trust the bookkeeping."""
    buffer = StalenessBuffer(1, 2, version=5)
    buffer.dispatched = 7
    buffer.dispatch()
    buffer.put(group(7, version=version))
    with pytest.raises(StalenessError, match=rf"g7\.0 has a token of version {version}, trained at 5 with max_staleness=2"):
        buffer.take()


def test_a_group_whose_trajectories_sampled_nothing_has_no_staleness() -> None:
    buffer = StalenessBuffer(1, 0, version=3)
    buffer.dispatched = 3
    buffer.dispatch()
    empty = replace(group(3), trajectories=(trajectory("g3.0", spans=((False, 4),)),))
    assert empty.trajectories[0].oldest_version == -1
    buffer.put(empty)
    assert [g.index for g in buffer.take()] == [3]
