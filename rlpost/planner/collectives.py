"""Seconds of collectives, from bytes and bus bandwidth (nccl-tests, doc/PERFORMANCE.md), and the traffic that sharding makes.

Bus bandwidth must be measured: eight H100 with NVLink reach 460e9 bytes/s, two nodes over four network cards 35e9. Bandwidths are in
bytes/s throughout, sizes are those of the whole tensor.
"""

from __future__ import annotations

from rlpost.planner.quantities import TimeLine, require_at_least, require_positive
from rlpost.planner.shapes import ModelShape, check_tensor_parallel


def _check(size_bytes: float, ranks: int, bus_bytes_per_second: float) -> None:
    require_at_least(0, size_bytes=size_bytes)
    require_at_least(1, ranks=ranks)
    require_positive(bus_bytes_per_second=bus_bytes_per_second)


def all_reduce_seconds(size_bytes: float, ranks: int, bus_bytes_per_second: float) -> float:
    """2 (n - 1) / n x size / bandwidth."""
    _check(size_bytes, ranks, bus_bytes_per_second)
    return 2 * (ranks - 1) / ranks * size_bytes / bus_bytes_per_second


def all_gather_seconds(size_bytes: float, ranks: int, bus_bytes_per_second: float) -> float:
    """(n - 1) / n x size / bandwidth; the same for reduce-scatter and all-to-all."""
    _check(size_bytes, ranks, bus_bytes_per_second)
    return (ranks - 1) / ranks * size_bytes / bus_bytes_per_second


def broadcast_seconds(size_bytes: float, bus_bytes_per_second: float) -> float:
    """Size / bandwidth, whatever the number of ranks."""
    _check(size_bytes, 1, bus_bytes_per_second)
    return size_bytes / bus_bytes_per_second


def fsdp_line(
    parameters: int,
    ranks: int,
    bus_bytes_per_second: float,
    *,
    micro_batches: int = 1,
    gradient_reductions: int = 1,
    reshard_after_forward: bool = True,
    weight_bytes: float = 2,
    gradient_bytes: float = 4,
) -> TimeLine:
    """Traffic of a sharded update: each micro-batch gathers the weights once or twice (with ``reshard_after_forward``).

    ``gradient_reductions`` times gradients are reduce-scattered, which rlpost does in float32: after each micro-batch, or without
    ``reshard_after_forward`` once a step.
    """
    require_at_least(0, parameters=parameters)
    require_at_least(1, micro_batches=micro_batches, gradient_reductions=gradient_reductions)
    gathers = 2 if reshard_after_forward else 1
    size = parameters * (micro_batches * gathers * weight_bytes + gradient_reductions * gradient_bytes)
    seconds = all_gather_seconds(size, ranks, bus_bytes_per_second)
    formula = (
        f"{parameters:,} parameters x ({micro_batches} micro-batches x {gathers} x {weight_bytes:g} B + {gradient_reductions} x "
        f"{gradient_bytes:g} B) x {ranks - 1}/{ranks} / {bus_bytes_per_second / 1e9:g} GB/s"
    )
    return TimeLine(name="FSDP traffic", seconds=seconds, formula=formula)


def zero_traffic_ratio(stage: int) -> float:
    """Elements sent in an update for each parameter: 2 with replicated weights (stages 0 to 2), 3 with sharded ones (ZeRO, section 7)."""
    require_at_least(0, stage=stage)
    return 3.0 if stage >= 3 else 2.0


def tensor_parallel_line(
    shape: ModelShape,
    tokens: int,
    degree: int,
    bus_bytes_per_second: float,
    *,
    training: bool,
    full_recompute: bool = False,
    bytes_per_element: float = 2,
) -> TimeLine:
    """All-reduces of tensor parallelism over ``tokens`` (Megatron): two a layer in the forward, two more in the backward, and two when
    the forward is computed again.
    """
    require_at_least(0, tokens=tokens)
    check_tensor_parallel(shape, degree)
    count = shape.layers * (2 + (2 + 2 * full_recompute) * training)
    size = tokens * shape.hidden * bytes_per_element
    seconds = count * all_reduce_seconds(size, degree, bus_bytes_per_second)
    formula = f"{count} all-reduces x {size / 1e6:.1f} MB x 2 x {degree - 1}/{degree} / {bus_bytes_per_second / 1e9:g} GB/s"
    return TimeLine(name="tensor-parallel all-reduces", seconds=seconds, formula=formula)
