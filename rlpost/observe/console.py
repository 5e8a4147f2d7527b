"""What the user sees while a run goes on: a live panel on a terminal, one line a step elsewhere.

The plain form is used when the stream is not a terminal, when NO_COLOR is set, TERM is ``dumb``, or the stream cannot show the
panel's characters. A stream that breaks (a closed pipe) silences the console and never ends the run.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TextIO

from rlpost.observe import formats

if TYPE_CHECKING:
    from rich.panel import Panel

SPARKLINE_STEPS = 40
ETA_STEPS = 20
"""Steps whose median duration gives the time left: one slow step (a checkpoint, a restart) does not move it."""
CHANGE_STEPS = 5
"""The change of the reward is shown against the mean of this many steps before: a single step is too noisy."""
SAMPLE_CHARACTERS = 800
REFRESH_PER_SECOND = 4

_log = logging.getLogger("rlpost.console")


class Console:
    """The run's console. Methods may be called from any thread.

    ``steps`` is the number of the run's last step, ``stream`` where to write (None: standard output), ``live`` forces the panel on or
    off (None: decided by the stream and the environment), ``clock`` gives monotonic seconds; elapsed times count from construction.
    Messages and warnings also go to the logger ``rlpost.console``, and by it into the run's log file.
    """

    def __init__(
        self,
        *,
        steps: int,
        run_dir: Path | None = None,
        stream: TextIO | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.steps = steps
        self.run_dir = run_dir
        self._stream = stream if stream is not None else sys.stdout
        self._clock = clock
        self._began = clock()
        self._state_lock = threading.Lock()
        self._muted = False
        self._phase = "start"
        self._phase_began = self._began
        self._record: dict[str, Any] = {"step": 0}
        self._rewards: deque[Any] = deque(maxlen=SPARKLINE_STEPS)
        self._durations: deque[float] = deque(maxlen=ETA_STEPS)
        self._live: Any = None
        if _wants_live(self._stream) if live is None else live:
            self._start_live()

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the console was made."""
        return self._clock() - self._began

    def phase(self, name: str) -> None:
        """The run is in phase ``name`` from now on. Seen on the live panel only."""
        self._phase, self._phase_began = name, self._clock()

    def step(self, record: Mapping[str, Any]) -> None:
        """Show the record of one finished step: a line, or the new state of the panel."""
        line = self._take(record)
        if self._live is None:
            self.print(line)

    def message(self, text: str) -> None:
        """Say something in one line, with the elapsed seconds: ``[  3.2s] starting 1 engine, 2 trainer ranks``."""
        _log.info("%s", text)
        self.print(self._stamped(text))

    def warning(self, text: str) -> None:
        """Like :meth:`message`, marked as a warning."""
        _log.warning("%s", text)
        self.print_warning(text)

    def print_warning(self, text: str) -> None:
        """Show a warning without logging it (the logger's own handler comes here)."""
        self.print(self._stamped(f"warning: {text}"), style="yellow")

    def sample(self, prompt: str, completion: str, reward: float | None) -> None:
        """Show one trajectory: long texts are cut in the middle, control characters are escaped."""
        lines = [f"sample  reward {formats.number(reward, 2) if reward is not None else 'none (not scored)'}"]
        for label, text in (("prompt", prompt), ("completion", completion)):
            shown = formats.shorten(text, SAMPLE_CHARACTERS).split("\n")
            lines += [f"  {label if index == 0 else '':<10} | {line}" for index, line in enumerate(shown)]
        self.print("\n".join(lines))

    def print(self, text: str, style: str = "") -> None:
        """Write ``text`` as it is (no markup is read in it) above the panel, or as plain lines."""
        if self._muted:
            return
        text = formats.printable(text)
        live = self._live
        try:
            if live is not None:
                from rich.text import Text

                live.console.print(Text(text, style=style), soft_wrap=True)
            else:
                self._write(text + "\n")
        except (OSError, ValueError) as error:  # a closed pipe or file: nobody reads, the run goes on
            self._muted = True
            _log.warning("the console is silent from now on: %s", error)

    def close(self) -> None:
        """Take the panel down, leaving its last state on the screen. May be called more than once; plain output still works after."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _take(self, record: Mapping[str, Any]) -> str:
        """Remember ``record``; the step's line."""
        # the panel's thread takes this lock while it holds rich's: nothing may be printed inside
        with self._state_lock:
            if formats.is_number(record.get("time/step_s")):
                self._durations.append(record["time/step_s"])
            before = [value for value in list(self._rewards)[-CHANGE_STEPS:] if formats.is_number(value)]
            if "reward/mean" in record:
                self._rewards.append(record["reward/mean"])
            self._record = {**self._record, **record}
            left = self._seconds_left()
        return formats.step_line(record, steps=self.steps, reward_before=fmean(before) if before else None, seconds_left=left)

    def _seconds_left(self) -> float | None:
        """Median of the last steps' seconds times the steps that are left; None before the first step."""
        if not self._durations:
            return None
        return median(self._durations) * max(self.steps - int(self._record["step"]), 0)

    def _stamped(self, text: str) -> str:
        return f"[{self.elapsed_s:5.1f}s] {text}"

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()

    def _start_live(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        terminal = RichConsole(file=self._stream, highlight=False, force_terminal=True)
        self._live = Live(get_renderable=self._panel, console=terminal, refresh_per_second=REFRESH_PER_SECOND)
        self._live.start()

    def _panel(self) -> Panel:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        with self._state_lock:
            record, rewards, left = self._record, list(self._rewards), self._seconds_left()
        reward = formats.number(record.get("reward/mean"), 3)
        staleness = formats.count(record.get("rollout/staleness_max"))
        rows = [
            ("step", f"{record['step']}/{self.steps}   {formats.duration(self.elapsed_s)} gone, {formats.duration(left)} left"),
            ("phase", f"{self._phase} {formats.seconds(self._clock() - self._phase_began)}"),
            ("reward", f"{reward}  {formats.sparkline(rewards)}"),
            ("rollouts", f"{formats.count(record.get('rollout/tokens_per_s'))} tok/s   staleness {staleness}"),
            ("loss", f"{formats.number(record.get('train/loss'))}   kl {formats.number(record.get('train/kl'))}"),
        ]
        if "evaluate/reward" in record:
            rows.append(("evaluation", formats.number(record["evaluate/reward"])))
        if self.run_dir is not None:
            rows.append(("run", str(self.run_dir)))
        table = Table.grid(padding=(0, 2))
        for label, value in rows:
            # a path is what one copies: it may be folded but never shortened
            table.add_row(Text(label, style="bold"), Text(value, overflow="fold"))
        return Panel(table, title="rlpost", title_align="left")


def _wants_live(stream: TextIO) -> bool:
    """Whether the stream is a terminal on which a panel can be drawn and is wanted."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
