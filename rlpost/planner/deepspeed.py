"""DeepSpeed's own estimates of model states (its docs/code-docs/source/memory.rst): 18 bytes a parameter, gradients in float32.

They differ from plain ZeRO arithmetic by the largest layer that is gathered, and by what is held in host memory.
"""

from __future__ import annotations

from rlpost.planner.memory import MemoryLine, line
from rlpost.planner.quantities import require_at_least, require_choice

OFFLOADS = ("none", "optimizer", "all")
HOST_BUFFER_FACTOR = 1.5
"""DeepSpeed's allowance for host buffers beside the states."""


def zero3_line(parameters: int, largest_layer: int, gpus: int, offload: str = "none") -> MemoryLine:
    """ZeRO-3 on one GPU; ``largest_layer`` in parameters. ``offload``: none, optimizer, or all (weights too)."""
    require_at_least(1, gpus=gpus)
    require_at_least(0, parameters=parameters, largest_layer=largest_layer)
    require_choice("offload", offload, OFFLOADS)
    each = {"none": 18, "optimizer": 2, "all": 0}[offload]
    formula = f"4 B x {largest_layer:,} of the largest layer + {each} B x {parameters:,} / {gpus} GPUs"
    return line(f"ZeRO-3, offload {offload}", 4 * largest_layer + each * parameters / gpus, formula)


def zero2_line(parameters: int, gpus: int, *, offload: bool = False) -> MemoryLine:
    """ZeRO-2 on one GPU; ``offload`` holds optimizer and gradients in host memory."""
    require_at_least(1, gpus=gpus)
    require_at_least(0, parameters=parameters)
    if offload:
        return line("ZeRO-2, offload optimizer", 2 * parameters, f"2 B x {parameters:,}")
    return line("ZeRO-2", 4 * parameters + 16 * parameters / gpus, f"4 B x {parameters:,} + 16 B x {parameters:,} / {gpus} GPUs")


def zero3_host_line(parameters: int, gpus_per_node: int, nodes: int) -> MemoryLine:
    """Host memory of one node under ZeRO-3 with everything offloaded, when every process first builds the whole model in float32."""
    require_at_least(1, gpus_per_node=gpus_per_node, nodes=nodes)
    require_at_least(0, parameters=parameters)
    each = max(4 * gpus_per_node, 18 / nodes)
    formula = f"{parameters:,} x max(4 B x {gpus_per_node} GPUs a node, 18 B / {nodes} nodes) x {HOST_BUFFER_FACTOR}"
    return line("ZeRO-3 host memory", parameters * each * HOST_BUFFER_FACTOR, formula)
