"""The data order: every prompt once an epoch, and nothing skipped or repeated by a resume."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.data.cursor import PromptCursor
from rlpost.types import ConfigError


def take(cursor: PromptCursor, count: int) -> list[tuple[int, int]]:
    return [cursor.next() for _ in range(count)]


@settings(deadline=None)
@given(count=st.integers(1, 40), seed=st.integers(0, 2**31), shuffle=st.booleans(), epochs=st.integers(1, 4))
def test_every_epoch_is_a_permutation(count: int, seed: int, shuffle: bool, epochs: int) -> None:
    drawn = take(PromptCursor(count, seed, shuffle), count * epochs)
    for epoch in range(epochs):
        assert sorted(index for drawn_epoch, index in drawn if drawn_epoch == epoch) == list(range(count))


@settings(deadline=None)
@given(count=st.integers(1, 25), seed=st.integers(0, 1000), shuffle=st.booleans(), batch=st.integers(1, 7), stop=st.integers(0, 80))
def test_resume_anywhere_continues_the_same_sequence(count: int, seed: int, shuffle: bool, batch: int, stop: int) -> None:
    """Batches that do not divide the data set, interrupted at any index, the state through JSON as a checkpoint has it."""
    whole = take(PromptCursor(count, seed, shuffle), stop + 5 * batch)
    first = PromptCursor(count, seed, shuffle)
    assert take(first, stop) == whole[:stop]
    saved = json.loads(json.dumps(first.state()))
    take(first, 3)  # prompts handed out after the checkpoint must come again
    resumed = PromptCursor(count, seed, shuffle)
    resumed.restore(saved)
    assert take(resumed, 5 * batch) == whole[stop:]


def test_order_depends_on_seed_and_epoch() -> None:
    drawn = take(PromptCursor(50, seed=1), 100)
    assert [index for _, index in drawn[:50]] != [index for _, index in drawn[50:]]
    assert drawn[:50] != take(PromptCursor(50, seed=2), 50)
    assert drawn == take(PromptCursor(50, seed=1), 100)


def test_order_is_fixed_across_releases() -> None:
    """A checkpoint outlives an upgrade: these figures must not change."""
    assert [index for _, index in take(PromptCursor(8, seed=3), 16)] == [6, 7, 2, 1, 4, 5, 3, 0, 2, 1, 4, 0, 5, 7, 6, 3]


@pytest.mark.parametrize(
    ("other", "named"),
    [(PromptCursor(9, 1, True), "count 9"), (PromptCursor(10, 2, True), "seed 2"), (PromptCursor(10, 1, False), "shuffle False")],
)
def test_state_of_another_run_is_refused(other: PromptCursor, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        PromptCursor(10, 1, True).restore(other.state())


@pytest.mark.parametrize("damage", [{"position": 11}, {"position": -1}, {"epoch": None}, {"epoch": -1}])
def test_damaged_state_is_refused(damage: dict[str, int | None]) -> None:
    cursor = PromptCursor(10, 1)
    with pytest.raises(ConfigError, match="damaged"):
        cursor.restore({**cursor.state(), **damage})


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 prompts"):
        PromptCursor(0, 1)
