"""The clock of a run: every second of a step is in exactly one phase.

    start_step      phase("generate")   phase("update")     finish_step = start of the next step
        |---- wait ----|--- generate ---|wait|-- update --|---- wait ----|---- wait (next step) ...

There is always exactly one running phase; what is in no named phase is in ``wait``, measured like the others and not computed as a
difference. A phase entered inside another suspends the outer one, so no second is counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("generate", "reward", "reference", "old_logprob", "values", "update", "sync", "checkpoint", "evaluate", "wait")
"""All phases (DESIGN, Words). ``wait`` is the time in none of the others."""

WAIT = "wait"

ATTRIBUTION_SLACK_S = 1e-3
"""Seconds by which ``attribute`` may ask for more than was measured: the asker's clock was read at another moment. It gets less."""


class PhaseClock:
    """Measures phases in seconds. Used by one task only (the driver's main task); it has no locks.

    Steps are contiguous: the second and later steps begin where the one before finished, so that logging between two steps is in the
    next step's ``wait`` and the steps of a run add up to its wall time. Time before the first :meth:`start_step` is in no step.

    ``clock`` gives monotonic seconds; ``on_change`` is told the name of the running phase whenever it changes.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, on_change: Callable[[str], None] | None = None) -> None:
        self._clock = clock
        self._on_change = on_change
        self._stack: list[str] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = clock()
        self._in_step = False
        self._contiguous = False

    @property
    def current(self) -> str:
        """The running phase; ``wait`` when in none."""
        return self._stack[-1] if self._stack else WAIT

    def start_step(self) -> None:
        """Begin a step. Called again before :meth:`finish_step`, the step is tried anew and keeps the seconds of the first try."""
        if not self._contiguous:
            self._flush()
            self._seconds = dict.fromkeys(PHASES, 0.0)
            self._contiguous = True
        self._in_step = True

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the body's seconds for phase ``name``; an outer phase stands still meanwhile. Raises ValueError for an unknown name."""
        self._check(name)
        self._flush()
        self._stack.append(name)
        self._tell()
        try:
            yield
        finally:
            self._flush()
            self._stack.pop()
            self._tell()

    def seconds_in(self, name: str) -> float:
        """Seconds of phase ``name`` in this step so far."""
        self._check(name)
        self._flush()
        return self._seconds[name]

    def attribute(self, frm: str, to: str, seconds: float) -> None:
        """Move ``seconds`` already measured in this step from phase ``frm`` to phase ``to``; their sum stays as it is.

        For a wait whose inside is known afterwards: of the seconds waited for rollouts, the last were spent on rewards.
        Raises ValueError when ``seconds`` is negative or more than ``frm`` has (beyond ATTRIBUTION_SLACK_S), or a name is unknown.
        """
        self._check(frm)
        self._check(to)
        self._flush()
        available = self._seconds[frm]
        if not 0 <= seconds <= available + ATTRIBUTION_SLACK_S:
            raise ValueError(
                f"cannot move {seconds:.6f} s from phase {frm!r} to {to!r}: {frm!r} has {available:.6f} s in this step; "
                "give seconds between 0 and that, measured inside the phase"
            )
        moved = min(seconds, available)
        self._seconds[frm] -= moved
        self._seconds[to] += moved

    def finish_step(self) -> dict[str, float]:
        """End the step: ``time/step_s`` and ``time/<phase>_s`` of all phases, in seconds, 0.0 where unused.

        ``time/step_s`` is the sum of the phases in the order of PHASES, exactly. Raises AssertionError without a started step or
        inside a phase: its seconds would be cut in two.
        """
        if not self._in_step:
            raise AssertionError("finish_step without start_step")
        if self._stack:
            raise AssertionError(f"finish_step inside phase {self.current!r}: leave the phase first")
        self._flush()
        record = {"time/step_s": sum(self._seconds.values())}
        record.update({f"time/{name}_s": seconds for name, seconds in self._seconds.items()})
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._in_step = False
        return record

    def _check(self, name: str) -> None:
        if name not in self._seconds:
            raise ValueError(f"unknown phase {name!r}; phases are {', '.join(PHASES)}")

    def _flush(self) -> None:
        """Give the seconds since the last flush to the running phase."""
        now = self._clock()
        self._seconds[self.current] += now - self._mark
        self._mark = now

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self.current)
