"""Runs one check: whatever it raises becomes a failed finding with the error's words, and the next check runs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from rlpost.diagnosis.report import Finding

AREA = "verify"

Say = Callable[[str], None]


def broken(name: str, error: Exception) -> Finding:
    """The finding of a check that did not come to its end."""
    return Finding(area=AREA, name=name, status="failed", found=f"{type(error).__name__}: {error}", expected="the check to come to its end")


async def guarded(name: str, work: Awaitable[Finding], say: Say) -> Finding:
    """Await ``work``, and tell how long it took."""
    started = time.monotonic()
    try:
        finding = await work
    except Exception as error:  # noqa: BLE001  # foreign rewards, losses and models may raise anything
        finding = broken(name, error)
    say(f"{name}: {finding.status} ({time.monotonic() - started:.0f} s)")
    return finding
