"""Which tensors travel together."""

from __future__ import annotations

from collections.abc import Sequence

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
ALIGNMENT = 16
"""Each tensor starts at a multiple of this many bytes, so that a view of any dtype is aligned."""


def tensor_bytes(shape: Sequence[int], dtype: str) -> int:
    """Bytes of a tensor, rounded up to ALIGNMENT."""
    count = 1
    for size in shape:
        count *= size
    return -(-count * DTYPE_BYTES[dtype] // ALIGNMENT) * ALIGNMENT


def plan_buckets(shapes: Sequence[Sequence[int]], dtypes: Sequence[str], limit_bytes: int) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of tensor indices, in order; each at most ``limit_bytes`` unless one tensor alone is larger."""
    ranges: list[tuple[int, int]] = []
    start, size = 0, 0
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        needed = tensor_bytes(shape, dtype)
        if index > start and size + needed > limit_bytes:
            ranges.append((start, index))
            start, size = index, 0
        size += needed
    if len(shapes) > start:
        ranges.append((start, len(shapes)))
    return tuple(ranges)
