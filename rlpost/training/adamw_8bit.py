"""torchao's AdamW with moments in 8 bits (Dettmers et al. 2022), made fit for shards of any number of ranks. Needs torchao."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit

BLOCK = 128
"""Elements that share a scale. Every usual width of a model is a multiple, so that rows, and with them shards, are whole blocks."""

FEWEST_ELEMENTS = 4096
"""Smaller tensors keep float32 moments, as in torchao and bitsandbytes: they are sensitive, and little is saved."""


class AdamW8bit(TorchaoAdamW8bit):
    """Moments in 8 bits for tensors whose rows are whole blocks, in float32 for the others.

    torchao decides by the size of the local shard, so that updates would depend on the number of ranks, and a checkpoint could not be
    loaded on another one.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, block_size=BLOCK)
        for group in self.param_groups:
            group["lr"] = lr

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        local = p.to_local() if isinstance(p, DTensor) else p
        quantised = p.numel() >= FEWEST_ELEMENTS and p[0].numel() % BLOCK == 0 and local.numel() > 0
        buffer = self._subclass_zeros(local, signed, BLOCK) if quantised else torch.zeros_like(local)
        if not isinstance(p, DTensor):
            return buffer
        return DTensor.from_local(buffer, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    def step(self, closure: Any = None) -> None:
        """One update of every parameter that has a gradient.

        torchao wants the learning rate in a tensor; schedule and checkpoints see the number, as with every other optimizer. On a CPU
        nothing is compiled: it would need a C++ compiler and seconds for every shape.
        """
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32)
        on_cpu = self.param_groups[0]["params"][0].device.type == "cpu"
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
