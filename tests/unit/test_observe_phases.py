"""PhaseClock: every second of a step is in exactly one phase."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.observe import PHASES, PhaseClock


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def phases_of(record: dict[str, float]) -> dict[str, float]:
    return {name: record[f"time/{name}_s"] for name in PHASES}


def test_seconds_land_in_the_phase_in_which_they_passed_and_the_rest_in_wait() -> None:
    fake = FakeTime()
    clock = PhaseClock(fake)
    fake.passes(1000)  # start-up is in no step
    clock.start_step()
    with clock.phase("generate"):
        fake.passes(4)
    fake.passes(0.5)
    with clock.phase("update"):
        fake.passes(2)
    record = clock.finish_step()
    assert set(record) == {"time/step_s", *(f"time/{name}_s" for name in PHASES)}
    assert phases_of(record) == {**dict.fromkeys(PHASES, 0.0), "generate": 4, "update": 2, "wait": 0.5}
    assert record["time/step_s"] == 6.5


def test_a_phase_inside_another_suspends_it_so_no_second_is_counted_twice() -> None:
    fake = FakeTime()
    clock = PhaseClock(fake)
    clock.start_step()
    with clock.phase("generate"):
        fake.passes(1)
        with clock.phase("reward"):
            assert clock.current == "reward"
            fake.passes(10)
        assert clock.current == "generate"
        fake.passes(2)
    assert clock.current == "wait"
    record = clock.finish_step()
    assert (record["time/generate_s"], record["time/reward_s"], record["time/step_s"]) == (3, 10, 13)


def test_a_phase_that_raises_is_left_and_counted() -> None:
    fake = FakeTime()
    clock = PhaseClock(fake)
    clock.start_step()
    with pytest.raises(RuntimeError), clock.phase("update"):
        fake.passes(3)
        raise RuntimeError
    assert clock.current == "wait"
    clock.start_step()  # the step is tried again; its first try is not lost
    fake.passes(1)
    record = clock.finish_step()
    assert (record["time/update_s"], record["time/wait_s"]) == (3, 1)


def test_steps_are_contiguous_so_logging_between_them_is_not_lost() -> None:
    fake = FakeTime()
    clock = PhaseClock(fake)
    clock.start_step()
    fake.passes(1)
    clock.finish_step()
    fake.passes(2)
    with clock.phase("checkpoint"):
        fake.passes(4)
    clock.start_step()
    fake.passes(8)
    record = clock.finish_step()
    assert (record["time/wait_s"], record["time/checkpoint_s"], record["time/step_s"]) == (10, 4, 14)


def test_attribute_moves_seconds_and_keeps_the_sum() -> None:
    fake = FakeTime()
    clock = PhaseClock(fake)
    clock.start_step()
    with clock.phase("generate"):
        fake.passes(5)
        clock.attribute("generate", "reward", 2)  # also while the phase is still open
    clock.attribute("generate", "reward", 1)
    record = clock.finish_step()
    assert (record["time/generate_s"], record["time/reward_s"], record["time/step_s"]) == (2, 3, 5)


def test_attribute_never_makes_a_phase_negative() -> None:
    fake = FakeTime()
    clock = PhaseClock(fake)
    clock.start_step()
    with clock.phase("generate"):
        fake.passes(5)
    for seconds in (5.1, -1.0):
        with pytest.raises(ValueError, match=r"'generate' has 5\.0"):
            clock.attribute("generate", "reward", seconds)
    clock.attribute("generate", "reward", 5.0005)  # clocks were read at other moments: all of it, not more
    record = clock.finish_step()
    assert (record["time/generate_s"], record["time/reward_s"]) == (0, 5)


def test_misuse_is_named() -> None:
    clock = PhaseClock(FakeTime())
    with pytest.raises(AssertionError, match="without start_step"):
        clock.finish_step()
    clock.start_step()
    with pytest.raises(ValueError, match=r"unknown phase 'training'.*generate"), clock.phase("training"):
        pass
    with pytest.raises(AssertionError, match="inside phase 'update'"), clock.phase("update"):
        clock.finish_step()


def test_the_console_hears_every_change() -> None:
    heard: list[str] = []
    clock = PhaseClock(FakeTime(), on_change=heard.append)
    with clock.phase("generate"):
        with clock.phase("reward"):
            pass
    assert heard == ["generate", "reward", "generate", "wait"]


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1))))
def test_the_phases_add_up_exactly_whatever_happens(events: list[tuple[str, float, float, float]]) -> None:
    fake = FakeTime()
    clock = PhaseClock(fake)
    clock.start_step()
    for name, inside, after, share in events:
        with clock.phase(name):
            fake.passes(inside)
        fake.passes(after)
        clock.attribute(name, "reward", share * inside * 0.999)
    record = clock.finish_step()
    phases = phases_of(record)
    assert record["time/step_s"] == sum(phases.values())
    assert record["time/step_s"] == pytest.approx(fake.now - 100.0)
    assert min(phases.values()) >= 0


def test_the_default_clock_runs_in_seconds() -> None:
    clock = PhaseClock()
    began = time.perf_counter()
    clock.start_step()
    with clock.phase("sync"):
        time.sleep(0.02)
    record = clock.finish_step()
    assert 0.02 <= record["time/sync_s"] <= record["time/step_s"] <= time.perf_counter() - began
