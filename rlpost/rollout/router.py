"""Which engine a session goes to: sticky, so that its prefix is cached there; new sessions go to the least loaded."""

from __future__ import annotations

from collections import OrderedDict

MOST_SESSIONS = 65536
"""Sessions remembered; the least recently used is forgotten first."""


class Router:
    """Sticky least-loaded routing over engines 0 .. count - 1. Every ``choose`` is paired with a ``done``."""

    def __init__(self, count: int) -> None:
        self.load = [0] * count
        self.alive = [True] * count
        self._sessions: OrderedDict[str, int] = OrderedDict()

    def choose(self, session: str) -> int | None:
        """The engine for this session's next request; None when no engine is alive. An empty ``session`` is none: least loaded."""
        engine = self._sessions.get(session)
        if engine is None or not self.alive[engine]:
            living = [index for index, alive in enumerate(self.alive) if alive]
            if not living:
                return None
            engine = min(living, key=lambda index: (self.load[index], index))
        if session:
            self._sessions[session] = engine
            self._sessions.move_to_end(session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self.load[engine] += 1
        return engine

    def done(self, engine: int) -> None:
        """A request on ``engine`` ended, well or not."""
        self.load[engine] -= 1
