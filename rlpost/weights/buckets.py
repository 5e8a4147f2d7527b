"""Which rows of which tensors travel in one buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlpost.types import WeightsManifest

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ALIGNMENT = 16
"""Each piece starts at a multiple of this many bytes, so that a view of any dtype is aligned."""

ALONE_BYTES = 2 << 20
"""A piece from this size on travels alone: a message costs about as much as copying a quarter of it."""


def rows_of(shape: Sequence[int]) -> int:
    """Length of the first dimension; a scalar is one row."""
    return shape[0] if shape else 1


def row_elements(shape: Sequence[int]) -> int:
    """Elements of one row."""
    return math.prod(shape[1:])


@dataclass(frozen=True)
class Piece:
    """Rows ``start`` to ``stop`` (exclusive) of tensor ``tensor``, owned by trainer rank ``owner``, at ``offset`` bytes of its buffer."""

    tensor: int
    start: int
    stop: int
    owner: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel in one buffer, ordered by owner, so that each rank's part is one span of it."""

    pieces: tuple[Piece, ...]
    size: int
    """Bytes."""

    def span(self, manifest: WeightsManifest, owner: int) -> tuple[int, int]:
        """First byte, and the byte after the last, of what ``owner`` puts in; equal when it has nothing."""
        mine = [piece for piece in self.pieces if piece.owner == owner]
        return (mine[0].offset, mine[-1].offset + piece_bytes(manifest, mine[-1])) if mine else (0, 0)


def piece_bytes(manifest: WeightsManifest, piece: Piece) -> int:
    """Bytes of a piece, without alignment."""
    return (piece.stop - piece.start) * row_elements(manifest.shapes[piece.tensor]) * DTYPE_BYTES[manifest.dtypes[piece.tensor]]


def total_bytes(manifest: WeightsManifest, *, trained_only: bool = False) -> int:
    """Bytes of all tensors, or of those that training changes."""
    return sum(
        math.prod(shape) * DTYPE_BYTES[dtype]
        for shape, dtype, trained in zip(manifest.shapes, manifest.dtypes, manifest.trained, strict=True)
        if trained or not trained_only
    )


def plan_buckets(manifest: WeightsManifest, *, trained_only: bool = False) -> tuple[Bucket, ...]:
    """All rows of the tensors, in order, each once. A piece never crosses a cut; no buffer is above ``bucket_bytes``, unless one row is.

    A large piece is a bucket of its own: it can be sent from where it lies, and received where it belongs, without a copy. Both ends
    derive the same buckets from the same manifest.
    """
    buckets: list[Bucket] = []
    pending: list[tuple[int, int, int, int]] = []
    filled = 0

    def close() -> None:
        nonlocal pending, filled
        if pending:
            buckets.append(_bucket(manifest, pending))
            pending, filled = [], 0

    for tensor, (shape, dtype) in enumerate(zip(manifest.shapes, manifest.dtypes, strict=True)):
        if trained_only and not manifest.trained[tensor]:
            continue
        row_bytes = row_elements(shape) * DTYPE_BYTES[dtype]
        cuts = manifest.cuts[tensor]
        for owner, (start, stop) in enumerate(pairwise(cuts)):
            while start < stop:
                room = (manifest.bucket_bytes - filled) // max(row_bytes, 1)
                if room <= 0 and pending:
                    close()
                    continue
                alone = min(stop - start, max(1, manifest.bucket_bytes // max(row_bytes, 1)))
                if alone * row_bytes >= min(ALONE_BYTES, manifest.bucket_bytes):
                    close()
                    pending.append((tensor, start, start + alone, owner))
                    start += alone
                    close()
                    continue
                rows = max(1, min(stop - start, room))
                pending.append((tensor, start, start + rows, owner))
                filled += _aligned(rows * row_bytes)
                start += rows
    close()
    return tuple(buckets)


def _bucket(manifest: WeightsManifest, parts: list[tuple[int, int, int, int]]) -> Bucket:
    pieces, offset = [], 0
    for tensor, start, stop, owner in sorted(parts, key=lambda part: (part[3], part[0], part[1])):
        piece = Piece(tensor, start, stop, owner, offset)
        pieces.append(piece)
        offset += _aligned(piece_bytes(manifest, piece))
    return Bucket(tuple(pieces), offset)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
