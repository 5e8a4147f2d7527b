"""A reward that differs between answers, for models that know nothing: with equal rewards there would be no gradient to compare."""

from __future__ import annotations

import zlib
from typing import Any


def spread(prompt: str, completion: str, **fields: Any) -> float:
    """A number between 0 and 1 that the answer's text decides, the same in every process."""
    return zlib.crc32(completion.encode("utf-8", "backslashreplace")) / 2**32
