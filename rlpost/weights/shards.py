"""What one trainer rank owns of each tensor, as the engines will hold it: read a few rows at a time, never as a second model.

A rank's shard is a range of rows (FSDP2 shards the first dimension). Values are made on demand in the engine's dtype by
:meth:`Shard.chunks`; a LoRA layer's are the merged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from rlpost.types import WeightsManifest
from rlpost.weights.adapters import Adapter, find_adapters
from rlpost.weights.buckets import row_elements, rows_of

ADAPTER_NAMES = ("lora_A", "lora_B")
"""Last parts of the names of adapters' parameters (training/lora.py)."""

CHUNK_ELEMENTS = 1 << 19
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
    stored: bool
    """The rows lie in memory as engines will hold them: no cast, no adapter to add."""
    rows: Callable[[int, int], torch.Tensor]

    def chunks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """All its rows in order, a chunk at a time: first row, and values in the engine's dtype, valid until the next are asked for."""
        row = row_elements(self.shape)
        step = max(1, CHUNK_ELEMENTS // max(1, row))
        scratch: torch.Tensor | None = None
        for start in range(self.start, self.stop, step):
            stop = min(self.stop, start + step)
            rows = self.rows(start, stop)
            if scratch is None:  # one for all chunks: fresh memory for each costs as much as the cast
                scratch = torch.empty((stop - start) * row, dtype=self.dtype, device=rows.device)
            values = scratch[: (stop - start) * row]
            values.copy_(rows.reshape(-1))  # flat, as a full sync reads them: the cast of a NaN differs with the strides
            yield start, values.view(stop - start, *self.shape[1:])


class ShardedWeights:
    """All tensors of the policy that engines get, and this rank's part of them.

    A model's LoRA adapters are no tensors of the manifest: with ``merge_adapters`` they are added to the rows of their layers' weights
    as these are read, else they are ``adapters``, which travel alone.
    """

    def __init__(self, model: Any, engine_dtype: str, bucket_bytes: int, *, merge_adapters: bool = False) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.engine_dtype = getattr(torch, engine_dtype)
        found = find_adapters(model)
        self.adapters = [] if merge_adapters else found
        self.merged = found if merge_adapters else []
        merged = {f"{adapter.layer}.weight": adapter for adapter in self.merged}
        parameters = [(name, parameter) for name, parameter in model.named_parameters() if not name.endswith(ADAPTER_NAMES)]
        trained = tuple(parameter.requires_grad or name in merged for name, parameter in parameters)
        cuts = [_cuts(parameter) for _, parameter in parameters]
        self.manifest = WeightsManifest(
            names=tuple(name for name, _ in parameters),
            shapes=tuple(tuple(parameter.shape) for _, parameter in parameters),
            dtypes=(engine_dtype,) * len(parameters),
            cuts=tuple(cuts),
            trained=trained,
            bucket_bytes=bucket_bytes,
        )
        self.shards = [
            Shard(
                tensor=index,
                shape=tuple(parameter.shape),
                dtype=self.engine_dtype,
                start=cuts[index][self.rank],
                stop=cuts[index][self.rank + 1],
                trained=trained[index],
                stored=parameter.dtype == self.engine_dtype and name not in merged,
                rows=_reader(parameter, cuts[index][self.rank], merged.get(name)),
            )
            for index, (name, parameter) in enumerate(parameters)
        ]

    def refresh(self) -> None:
        """Before a sync reads rows: what merged adapters need of other ranks. A collective."""
        for adapter in self.merged:
            adapter.gather()


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


def _reader(parameter: torch.Tensor, first: int, adapter: Adapter | None) -> Callable[[int, int], torch.Tensor]:
    def rows(start: int, stop: int) -> torch.Tensor:
        # Asked each time: a checkpoint or an optimizer may put other storage under the parameter.
        local: Any = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        local = local.detach()
        found: torch.Tensor = local.view(1) if local.ndim == 0 else local
        mine = slice(start - first, stop - first)
        return found[mine] if adapter is None else found[mine] + adapter.update(mine)

    return rows
