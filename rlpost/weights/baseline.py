"""What the engines hold, kept by the trainer rank that owns it, so that a delta can be told: one copy of its shard in the engines' dtype.

The comparison is bitwise and goes a chunk at a time. The copy moves only by :meth:`Baseline.advance`, after every engine acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rlpost.types import WeightsManifest
from rlpost.weights.buckets import row_elements
from rlpost.weights.delta import TensorChange, index_dtype
from rlpost.weights.shards import Shard

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of a size, to compare and move bits whatever they mean (NaN payloads, -0.0)."""

Visit = Callable[[Shard, int, torch.Tensor], None]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, flat; ``tensor`` is contiguous."""
    return tensor.view(-1).view(BITS[tensor.dtype.itemsize])


def _differences(shard: Shard, held: np.ndarray, visit: Visit) -> tuple[np.ndarray, np.ndarray]:
    """Positions in the shard ``[changed]`` whose bits are not those of ``held`` ``[elements]``, and their new bits ``[changed]``."""
    row = row_elements(shard.shape)
    different = np.empty(0, bool)
    found, values = [np.empty(0, np.int64)], [np.empty(0, held.dtype)]
    for start, chunk in shard.chunks():
        visit(shard, start, chunk)
        new, first = bits(chunk.cpu()).numpy(), (start - shard.start) * row
        if len(different) < len(new):
            different = np.empty(len(new), bool)
        np.not_equal(new, held[first : first + len(new)], out=different[: len(new)])
        positions = np.flatnonzero(different[: len(new)])
        if len(positions):
            found.append(positions + first)
            values.append(new[positions])
    return np.concatenate(found), np.concatenate(values)


class Baseline:
    """This rank's copy. Empty until the first :meth:`advance`."""

    def __init__(self, manifest: WeightsManifest, shards: Sequence[Shard]) -> None:
        self._manifest, self._shards = manifest, [shard for shard in shards if shard.trained]
        self._held: list[torch.Tensor] | None = None
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def compare(self, visit: Visit) -> tuple[list[TensorChange], int]:
        """What changed since the last :meth:`advance`, and the number of elements compared. ``visit`` sees every chunk once, in order."""
        assert self._held is not None, "there is no baseline before the first full sync"
        changes, compared = [], 0
        self._pending = []
        for shard, held in zip(self._shards, self._held, strict=True):
            positions, values = _differences(shard, held.numpy(), visit)
            compared += held.numel()
            self._pending.append((torch.from_numpy(positions), torch.from_numpy(values)))
            if len(positions):
                numel = row_elements((1, *shard.shape))
                indices = (positions + shard.start * row_elements(shard.shape)).astype(index_dtype(numel), copy=False)
                unsigned = values.view(f"u{values.itemsize}")
                changes.append(TensorChange(tensor=shard.tensor, numel=numel, indices=indices, values=unsigned))
        return changes, compared

    def advance(self) -> None:
        """The engines now hold what the trainer holds."""
        if self._held is not None and self._pending is not None:
            for held, (positions, values) in zip(self._held, self._pending, strict=True):
                held[positions] = values
        else:
            self._copy()
        self._pending = None

    def forget_pending(self) -> None:
        """The comparison's result is not sent; the next :meth:`advance` copies everything."""
        self._pending = None

    def _copy(self) -> None:
        if self._held is None:
            sizes = [(shard.stop - shard.start) * row_elements(shard.shape) for shard in self._shards]
            self._held = [torch.empty(size, dtype=BITS[shard.dtype.itemsize]) for shard, size in zip(self._shards, sizes, strict=True)]
        for shard, held in zip(self._shards, self._held, strict=True):
            row = row_elements(shard.shape)
            for start, chunk in shard.chunks():
                first = (start - shard.start) * row
                held[first : first + chunk.numel()] = bits(chunk.cpu())

    @property
    def nbytes(self) -> int:
        """Memory of the copy."""
        return sum(held.nbytes for held in self._held or ())
