"""An event loop whose clock jumps to the next timer when nothing else is to be done: minutes pass at once, always in the same order."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time()`` counts virtual seconds from 0. Nothing in it may wait for threads, processes or sockets."""

    _now = 0.0

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready:
            timers = [timer.when() for timer in loop._scheduled if not timer.cancelled()]
            if not timers:
                raise AssertionError("everything waits, and nothing will ever happen")
            self._now = max(self._now, min(timers))
        run_once: Any = super()._run_once  # type: ignore[misc]
        run_once()


def play(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; tasks that are left over are cancelled."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)
