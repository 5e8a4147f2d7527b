"""LoRA adapters on their way to engines: merged into the weights that are sent, or alone, as a message.

The message is a safetensors file in PEFT's layout, with the scaling multiplied into B, so that what the engine computes with has the
bits that were sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from rlpost.weights.fingerprint import MODULUS, raw_bytes

PREFIX = "base_model.model."

BLOCK_ROWS = 64
"""Rows of B that are multiplied by A at once."""


@dataclass
class Adapter:
    """The adapter of one layer: ``first`` [rank, in] and ``second`` [out, rank], both perhaps sharded by rows as the layer's weight is."""

    layer: str
    first: torch.Tensor
    second: torch.Tensor
    scaling: float
    _gathered: torch.Tensor | None = field(default=None, repr=False)

    def gather(self) -> None:
        """Get the whole ``first``, which is small; every rank calls it, before a sync reads merged rows."""
        self._gathered = whole_tensor(self.first)

    def update(self, local_rows: slice) -> torch.Tensor:
        """What the adapter adds to rows of this rank's shard of the weight ``[rows, in]``.

        A row has the same bits whatever rows it is read with: a full sync and a delta's baseline cut them differently. As a product's
        rounding depends on its shape, every row is made in the same block of the shard, and all blocks have the same shape.
        """
        assert self._gathered is not None, "gather() comes first"
        second = (self.second._local_tensor if isinstance(self.second, DTensor) else self.second).detach()
        start, stop = local_rows.start, local_rows.stop
        begin, end = start // BLOCK_ROWS * BLOCK_ROWS, -(-stop // BLOCK_ROWS) * BLOCK_ROWS
        padded = second.new_zeros(end - begin, second.shape[1])
        padded[: second.shape[0] - begin] = second[begin:end]
        product = padded.new_empty(end - begin, self._gathered.shape[1])
        for row in range(0, end - begin, BLOCK_ROWS):
            block = slice(row, row + BLOCK_ROWS)
            torch.matmul(padded[block], self._gathered, out=product[block])
        return self.scaling * product[start - begin : stop - begin]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a perhaps sharded tensor; a collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def find_adapters(model: Any) -> list[Adapter]:
    """The adapters of a model, in the order of its layers."""
    return [
        Adapter(name, module.lora_A, module.lora_B, module.scaling) for name, module in model.named_modules() if hasattr(module, "lora_A")
    ]


def adapter_tensors(adapters: Sequence[Adapter], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Whole tensors by PEFT's names, in the engine's dtype, on the CPU; a collective."""
    tensors = {}
    for adapter in adapters:
        tensors[f"{PREFIX}{adapter.layer}.lora_A.weight"] = whole_tensor(adapter.first).to("cpu", dtype).contiguous()
        tensors[f"{PREFIX}{adapter.layer}.lora_B.weight"] = (adapter.scaling * whole_tensor(adapter.second)).to("cpu", dtype).contiguous()
    return tensors


def adapter_config(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """PEFT's adapter_config.json for these tensors, with a scaling of 1."""
    ranks = {tensor.shape[0] for name, tensor in tensors.items() if name.endswith("lora_A.weight")}
    layers = sorted({name.removeprefix(PREFIX).rsplit(".", 2)[0].rsplit(".", 1)[-1] for name in tensors})
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": max(ranks), "lora_alpha": max(ranks), "lora_dropout": 0.0, "bias": "none",
        "target_modules": layers, "inference_mode": True, "base_model_name_or_path": None,
    }  # fmt: skip


def hash_adapter(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Each tensor's part in the fingerprint, over its name, shape, dtype and bytes."""
    sums = {}
    for name, tensor in tensors.items():
        digest = xxhash.xxh3_128(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}".encode())
        digest.update(raw_bytes(tensor))
        sums[name] = digest.intdigest() % MODULUS
    return sums
