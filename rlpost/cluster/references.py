"""Ray's object references in asyncio."""

from __future__ import annotations

from typing import Any


async def result_of(reference: Any) -> Any:
    """A coroutine of what a reference will be: asyncio's own functions refuse the bare reference."""
    return await reference
