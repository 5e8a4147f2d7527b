"""Whose logprobs are the reference's, where the trainer ranks compute them themselves (``algorithm.reference``).

No reference adds parameters to the policy: weight sync and export see the policy's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlpost.training.lora import adapters_off
from rlpost.training.model import reshard
from rlpost.training.protocol import WorkerSettings


class Reference:
    """A frozen model beside the policy."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @contextmanager
    def applied(self) -> Iterator[Any]:
        """The sharded model to call in the block."""
        yield self.model

    def after_step(self) -> None:
        """The policy has taken an optimizer step."""

    def state(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must hold of it: tensors, by name, that a load may write to."""
        return {}


class InitialCopy(Reference):
    """A copy of the weights that the run began with. On a GPU it lies in host memory between uses (not run on a GPU yet)."""

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(model.requires_grad_(False).to("cpu"))
        self.device = device

    @contextmanager
    def applied(self) -> Iterator[Any]:
        """The copy, on the device for the block."""
        yield self.model.to(self.device)
        self.model.to("cpu")


class AdaptersOff(Reference):
    """The policy itself without its LoRA adapters."""

    @contextmanager
    def applied(self) -> Iterator[Any]:
        """The policy, whose adapters are off in the block."""
        with adapters_off(self.model):
            yield self.model


class MovingAverage(Reference):
    """The policy with an average of its past weights: after each step ``decay * average + (1 - decay) * weights``.

    Of parameters that are trained only (of LoRA, the adapters' A and B); the others are what they always were. Each rank averages its
    shards. For use, averages and weights change places, so that no second model is held.
    """

    def __init__(self, model: Any, decay: float) -> None:
        super().__init__(model)
        self.decay = decay
        self.averages = {name: parameter.detach().clone() for name, parameter in self._trained()}

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        # After a forward without backward parameters are gathered ones, which nobody should change.
        reshard(self.model)
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    @torch.no_grad()
    def after_step(self) -> None:
        """Bring the new weights into the average."""
        for name, parameter in self._trained():
            self.averages[name].lerp_(parameter, 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[Any]:
        """The policy, which has the average weights in the block."""
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, parameter in self._trained():
            held = parameter.clone()
            parameter.copy_(self.averages[name])
            self.averages[name].copy_(held)

    def state(self) -> dict[str, torch.Tensor]:
        """The averages, by parameter name."""
        return self.averages


def make_reference(model: Any, settings: WorkerSettings, device: torch.device, load: Callable[[str], Any]) -> Reference | None:
    """The reference of ``settings.reference_mode`` for the policy ``model``; ``load`` reads and shards a model. None when there is none.

    Raises ConfigError when adapters are to be switched off and there are none.
    """
    if settings.reference_mode == "initial":
        return InitialCopy(load(settings.reference_path or settings.model_path), device)
    if settings.reference_mode == "adapters_off":
        with adapters_off(model):
            return AdaptersOff(model)
    if settings.reference_mode == "moving_average":
        return MovingAverage(model, settings.reference_decay)
    return None
