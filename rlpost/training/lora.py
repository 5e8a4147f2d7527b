"""Low-rank adapters (LoRA, Hu et al. 2021, equation 3): y = W x + (alpha / rank) B A x, with W frozen.

A layer is changed in place, so that W keeps its name, and A and B stand beside it: ``...q_proj.weight``, ``...q_proj.lora_A``,
``...q_proj.lora_B``. Sharding, checkpoints and weight sync then see three parameters like any others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional

from rlpost.config.schema import LoraConfig
from rlpost.types import ConfigError


class LoraLinear(torch.nn.Linear):
    """A linear layer with an adapter. ``lora_A`` [rank, in], ``lora_B`` [out, rank], ``scaling`` alpha / rank.

    While it is not ``active`` it is the layer without its adapter.
    """

    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    scaling: float
    active: bool = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The frozen layer's output plus the adapter's."""
        if not self.active:
            return functional.linear(input, self.weight, self.bias)
        low_rank = functional.linear(functional.linear(input, self.lora_A), self.lora_B)
        return functional.linear(input, self.weight, self.bias) + self.scaling * low_rank


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freeze the model and give every linear layer that ``config.targets`` matches an adapter that changes nothing yet (B is 0).

    Raises ConfigError when it matches none, or the output layer, whose weight the trainer uses without calling the layer.
    """
    pattern = re.compile(config.targets)
    model.requires_grad_(False)
    linear: dict[str, Any] = {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    chosen = {name: module for name, module in linear.items() if pattern.search(name)}
    for name, module in chosen.items():
        if module is output:
            raise ConfigError(
                f"training.lora.targets={config.targets!r} matches {name}, the output layer, which cannot have an adapter; "
                "give a pattern that leaves it out"
            )
    if not chosen:
        names = [name for name, module in linear.items() if module is not output]
        raise ConfigError(
            f"training.lora.targets={config.targets!r} matches no linear layer; their names look like {names[:1] + names[-1:]}"
        )
    for layer in chosen.values():
        layer.__class__ = LoraLinear
        layer.scaling = config.alpha / config.rank
        first = torch.empty(config.rank, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
        torch.nn.init.kaiming_uniform_(first, a=math.sqrt(5))  # the usual start of A
        layer.lora_A = torch.nn.Parameter(first)
        layer.lora_B = torch.nn.Parameter(torch.zeros(layer.out_features, config.rank, dtype=first.dtype, device=first.device))


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """In the block the model computes without its adapters, bit by bit as if it had none. Raises ConfigError when it has none."""
    layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not layers:
        raise ConfigError(
            "algorithm.reference=adapters_off is for a model with LoRA adapters, and this one has none; "
            "set training.lora.rank, or take algorithm.reference=initial"
        )
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True
