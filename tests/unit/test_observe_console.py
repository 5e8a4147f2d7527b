"""The console: plain lines, the live panel, and short forms of numbers."""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from rlpost.observe import Console, formats, setup_logging
from rlpost.observe.console import _wants_live


class FakeTime:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    """A stream that claims to be a terminal, or not."""

    def __init__(self, *, terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self._terminal, self._encoding = terminal, encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal


def plain(steps: int = 80, **other: Any) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(steps=steps, stream=stream, live=False, **other), stream


def test_a_step_is_one_line_with_what_one_watches() -> None:
    console, stream = plain()
    console.step({"step": 11, "reward/mean": 0.39, "time/step_s": 1.0})
    console.step(
        {
            "step": 12,
            "reward/mean": 0.41,
            "train/loss": 0.0134,
            "train/kl": 0.0,
            "rollout/tokens_per_s": 18200,
            "rollout/staleness_max": 0,
            "reward/failed": 0,
            "time/step_s": 2.0,
            "time/generate_s": 0.41,
            "time/update_s": 0.3,
            "time/sync_s": 0.02,
            "time/reward_s": 0.001,
        }
    )
    assert stream.getvalue().splitlines()[1] == (
        "step 12/80 reward 0.41 (+0.02) loss 0.013 kl 0.000 18.2k tok/s gen 0.4s upd 0.3s sync 0.02s eta 1m42s"
    )


def test_trouble_is_on_the_line_only_when_there_is_some() -> None:
    console, stream = plain()
    console.step(
        {
            "step": 1,
            "reward/mean": float("nan"),
            "reward/failed": 3,
            "rollout/staleness_max": 2,
            "evaluate/reward": 0.5,
            "time/reward_s": 1.5,
        }
    )
    assert stream.getvalue() == "step 1/80 reward - rew 1.5s stale 2 failed 3 eval 0.500\n"


def test_time_left_is_the_median_so_that_one_slow_step_does_not_move_it() -> None:
    console, stream = plain(steps=10)
    for step, seconds in enumerate((10, 10, 5000, 10, 10), start=1):
        console.step({"step": step, "time/step_s": seconds})
    assert stream.getvalue().splitlines()[-1].endswith("eta 50s")


def test_change_is_against_the_mean_of_five_steps_before_and_skips_unscored_ones() -> None:
    console, stream = plain()
    for step, reward in enumerate((9.0, 0.1, 0.2, None, 0.3, 0.2, 0.5), start=1):
        console.step({"step": step, "reward/mean": reward})
    assert stream.getvalue().splitlines()[-1].endswith("reward 0.50 (+0.30)")


def test_messages_carry_the_elapsed_seconds_and_are_never_read_as_markup() -> None:
    fake = FakeTime()
    console, stream = plain(clock=fake)
    fake.now += 3.21
    console.message("starting 1 engine, 2 trainer ranks")
    console.warning("rewards [1, None, /0]")
    assert stream.getvalue() == "[  3.2s] starting 1 engine, 2 trainer ranks\n[  3.2s] warning: rewards [1, None, /0]\n"


def test_a_sample_is_cut_in_the_middle_and_cannot_steer_the_terminal() -> None:
    console, stream = plain()
    console.sample("2+2=", "a" * 1000 + "\x1b[2J\nanswer", None)
    shown = stream.getvalue()
    assert "\x1b" not in shown and "\\x1b[2J" in shown
    assert "characters left out" in shown and len(shown) < 1000
    assert shown.splitlines()[0] == "sample  reward none (not scored)"
    assert "             | answer" in shown


def test_a_stream_that_cannot_encode_a_text_still_gets_it() -> None:
    buffer = io.BytesIO()
    console = Console(steps=1, stream=io.TextIOWrapper(buffer, encoding="ascii"), live=False)
    console.message("caf\u00e9")
    assert b"caf\\xe9" in buffer.getvalue()


def test_a_closed_pipe_silences_the_console_and_not_the_run() -> None:
    class Pipe(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    pipe = Pipe()
    console = Console(steps=1, stream=pipe, live=False)
    console.message("one")
    console.step({"step": 1})
    console.close()
    assert pipe.writes == 1


@pytest.mark.parametrize(
    ("terminal", "environment", "encoding", "live"),
    [
        (True, {"TERM": "xterm"}, "UTF-8", True),
        (False, {"TERM": "xterm"}, "utf-8", False),
        (True, {"TERM": "dumb"}, "utf-8", False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "utf-8", False),
        (True, {"TERM": "xterm"}, "ascii", False),
    ],
)
def test_the_panel_is_for_terminals_that_can_show_it(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, environment: dict[str, str], encoding: str, live: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _wants_live(Stream(terminal=terminal, encoding=encoding)) is live


def test_the_panel_shows_the_run_and_messages_stay_above_it(tmp_path: Path) -> None:
    stream = Stream(terminal=True)
    with Console(steps=80, run_dir=tmp_path, stream=stream, live=True) as console:
        console.phase("update")
        for step, reward in enumerate((0.0, 0.5, None, 1.0), start=1):
            console.step(
                {"step": step, "reward/mean": reward, "rollout/tokens_per_s": 1234, "rollout/staleness_max": 1, "time/step_s": 1.0}
            )
        console.message("a message [not markup]")
    last_panel = stream.getvalue().split("rlpost")[-1]
    assert "4/80" in last_panel and "1m16s left" in last_panel
    assert "update" in last_panel
    assert "1.000  ▁▅ █" in last_panel or "1.000  ▁▄ █" in last_panel
    assert "1.2k tok/s" in last_panel and "staleness 1" in last_panel
    assert "a message [not markup]" in stream.getvalue()
    assert "step 4/80" not in stream.getvalue(), "the panel replaces the step lines"
    before = len(stream.getvalue())
    console.close()
    console.message("after")
    assert stream.getvalue()[before:].endswith("after\n")


def test_printing_while_the_panel_is_drawn_does_not_deadlock() -> None:
    console = Console(steps=100, stream=Stream(terminal=True), live=True)

    def say() -> None:
        for step in range(100):
            console.step({"step": step, "reward/mean": 0.1})
            console.message("text")

    def draw() -> None:
        for _ in range(100):
            console._live.refresh()

    threads = [threading.Thread(target=work, daemon=True) for work in (say, draw)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    stuck = [thread for thread in threads if thread.is_alive()]
    assert not stuck
    console.close()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (45.4, "45s"), (59.6, "1m00s"), (100, "1m40s"), (3599.7, "1h00m"), (7500, "2h05m"), (273600, "3d04h"), (None, "-")],
)
def test_durations(value: float | None, text: str) -> None:
    assert formats.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (999.96, "1.0k"), (18249, "18.2k"), (999960, "1.0M"), (2.5e9, "2.5G"), (float("nan"), "-")]
)
def test_counts(value: float, text: str) -> None:
    assert formats.count(value) == text


def test_small_numbers_do_not_read_as_zero() -> None:
    assert [formats.number(value) for value in (0.0, 0.0134, 2.0e-7, -2.0e-7, None)] == ["0.000", "0.013", "2.0e-07", "-2.0e-07", "-"]
    assert [formats.seconds(value) for value in (0.004, 0.02, 0.4, 59.9, 59.97)] == ["0.00s", "0.02s", "0.4s", "59.9s", "1m00s"]


def test_sparkline_of_constant_missing_and_rising_values() -> None:
    assert formats.sparkline([]) == ""
    assert formats.sparkline([None, float("nan")]) == "  "
    assert formats.sparkline([2, 2]) == "▁▁"
    assert formats.sparkline(list(range(8))) == "▁▂▃▄▅▆▇█"


def test_the_log_file_has_everything_and_the_console_the_warnings_once(tmp_path: Path) -> None:
    console, stream = plain()
    try:
        logger = setup_logging(tmp_path / "one", "INFO", console)
        child = logging.getLogger("rlpost.rollout.engine")
        child.info("engine 0 is up")
        child.debug("too fine")
        child.warning("engine 1 is slow")
        console.message("hello")
        console.warning("careful")
        log = (tmp_path / "one" / "logs" / "driver.log").read_text(encoding="utf-8")
        assert [log.count(text) for text in ("engine 0 is up", "engine 1 is slow", "hello", "careful", "too fine")] == [1, 1, 1, 1, 0]
        shown = stream.getvalue()
        assert [shown.count(text) for text in ("engine 0 is up", "engine 1 is slow", "hello", "careful")] == [0, 1, 1, 1]

        setup_logging(tmp_path / "two", "INFO", console)
        child.warning("second run")
        assert "second run" not in (tmp_path / "one" / "logs" / "driver.log").read_text(encoding="utf-8")
        assert stream.getvalue().count("second run") == 1
    finally:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(logging.NOTSET)
