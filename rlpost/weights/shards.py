"""What one trainer rank owns of each tensor, as the engines will hold it: read a few rows at a time, never as a second model.

A rank's shard is a range of rows (FSDP2 shards the first dimension). Values are made on demand in the engine's dtype by
:meth:`Shard.read`; a LoRA layer's are the merged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from rlpost.types import WeightsManifest
from rlpost.weights.buckets import row_elements, rows_of

CHUNK_ELEMENTS = 1 << 20
"""Elements that are read, cast and compared at once: a few MiB, which stay in a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows ``start`` to ``stop`` of a tensor, owned by this rank. ``rows(a, b)`` gives rows a to b of the whole tensor, any dtype."""

    tensor: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    trained: bool
    rows: Callable[[int, int], torch.Tensor]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows in the engine's dtype, contiguous ``[stop - start, *row shape]``."""
        return self.rows(start, stop).to(self.dtype).contiguous()

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All its rows in order, a chunk at a time: first row, values."""
        step = max(1, CHUNK_ELEMENTS // max(1, row_elements(self.shape)))
        for start in range(self.start, self.stop, step):
            yield start, self.read(start, min(self.stop, start + step))


class ShardedWeights:
    """All tensors of the policy that engines get, and this rank's part of them."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]], engine_dtype: str, bucket_bytes: int) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        cuts = [_cuts(parameter) for _, parameter in parameters]
        self.manifest = WeightsManifest(
            names=tuple(name for name, _ in parameters),
            shapes=tuple(tuple(parameter.shape) for _, parameter in parameters),
            dtypes=(engine_dtype,) * len(parameters),
            cuts=tuple(cuts),
            trained=tuple(parameter.requires_grad for _, parameter in parameters),
            bucket_bytes=bucket_bytes,
        )
        dtype = getattr(torch, engine_dtype)
        self.shards = [
            Shard(
                tensor=index,
                shape=tuple(parameter.shape),
                dtype=dtype,
                start=cuts[index][self.rank],
                stop=cuts[index][self.rank + 1],
                trained=parameter.requires_grad,
                rows=_reader(parameter, cuts[index][self.rank]),
            )
            for index, (_, parameter) in enumerate(parameters)
        ]


def _cuts(parameter: torch.Tensor) -> tuple[int, ...]:
    """First row of every rank's shard, and the end. A tensor that is not sharded belongs to rank 0."""
    rows = rows_of(parameter.shape)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(parameter, DTensor):
        return (0, *([rows] * world))
    [placement] = parameter.placements
    if not isinstance(placement, ShardPlacement):
        return (0, *([rows] * world))
    if placement.dim != 0:
        raise AssertionError(f"a parameter is sharded on dimension {placement.dim}; only rows (dimension 0) are known here")
    starts = []
    for rank in range(world):
        size, offset = _local_rows(parameter, rank)
        starts.append(offset if size else rows)
    return (*starts, rows)


def _local_rows(parameter: DTensor, rank: int) -> tuple[int, int]:
    """Rows of a rank and the first of them."""
    world = parameter.device_mesh.size()
    each = -(-parameter.shape[0] // world)  # as torch.chunk: the last ranks may have fewer rows, or none
    start = min(rank * each, parameter.shape[0])
    return min(each, parameter.shape[0] - start), start


def _reader(parameter: torch.Tensor, first: int) -> Callable[[int, int], torch.Tensor]:
    def rows(start: int, stop: int) -> torch.Tensor:
        # Asked each time: a checkpoint or an optimizer may put other storage under the parameter.
        local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        local = local.detach()
        return local.view(1)[start - first : stop - first] if local.ndim == 0 else local[start - first : stop - first]

    return rows
