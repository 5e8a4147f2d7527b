"""The optimizers and the learning-rate schedule; what of both is configuration and what is state.

All of them work on FSDP2's shards: an update is the same on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from rlpost.config.schema import OptimizerConfig
from rlpost.types import ConfigError
from rlpost.weights.shards import ADAPTER_NAMES


def learning_rate_factor(step: int, *, total: int, config: OptimizerConfig) -> float:
    """Share of the peak learning rate at optimizer step ``step`` (0-based) of ``total``.

    Linear warm-up over ``warmup_steps`` (step 0 gets 1/warmup), then constant, or a linear or cosine fall
    that reaches ``final_ratio`` at the last step.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    span = max(1, total - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    shape = 1.0 - progress if config.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.final_ratio + (1.0 - config.final_ratio) * shape


def make_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, *, total: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """The optimizer of the parameters that are trained, weight decay on matrices only, and its schedule over ``total`` optimizer steps.

    Raises ConfigError when muon would have no matrix to work on.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = {id(parameter) for parameter in hidden_matrices(model)} if config.name == "muon" else set()
    if config.name == "muon" and not hidden:
        raise ConfigError(
            "training.optimizer.name=muon works on the layers' weight matrices, and none of them is trained here; "
            "take adamw, or train them (training.lora.rank=0, training.trainable)"
        )
    groups = [
        {"params": [p for p in trained if id(p) in hidden], "weight_decay": config.weight_decay, "orthogonal": True},
        {"params": [p for p in trained if p.ndim >= 2 and id(p) not in hidden], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = _optimizer_class(config.name)(
        [group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, total=total, config=config))
    return optimizer, schedule


def hidden_matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Trained two-dimensional weights of the model's layers: no embedding, output layer, norm, adapter or value head."""
    from rlpost.training.model import decoder_layers

    return [
        parameter
        for layer in decoder_layers(model)
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad and parameter.ndim == 2 and not name.endswith(ADAPTER_NAMES)
    ]


def _optimizer_class(name: str) -> Any:
    if name == "adamw_8bit":
        from rlpost.training.adamw_8bit import AdamW8bit  # torchao is needed by nothing else

        return AdamW8bit
    if name == "adamw_bf16":
        return AdamWBfloat16
    return partial(MuonAndAdamW if name == "muon" else torch.optim.AdamW, foreach=True)


class AdamWBfloat16(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) that keeps its moments in bfloat16 and computes in float32, one parameter at a time.

    bfloat16 has 8 bits: a second moment moves only where a step changes it by more than 0.4 %, so ``betas[1]`` must be below 0.996.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        count = float(state["step"])
        first = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        # Stored anew, not copied into: torch casts loaded moments to the parameter's dtype.
        state["exp_avg"], state["exp_avg_sq"] = first.bfloat16(), second.bfloat16()
        denominator = second.div_(1 - beta2**count).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**count))


class MuonAndAdamW(torch.optim.AdamW):
    """torch's Muon for the groups that are ``orthogonal``, AdamW for the others: one object, one schedule, one state.

    A step's size is Muon's times 0.2 sqrt(larger side), which has the root mean square of AdamW's steps (Liu et al. 2025, "Muon is
    scalable for LLM training", equation 4), so that one learning rate fits both. ``betas[0]`` is its momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient; those of the matrices are gone afterwards."""
        for group in self.param_groups:
            for parameter in group["params"] if "orthogonal" in group else ():
                if parameter.grad is not None:
                    self._step_matrix(parameter, parameter.grad, group)
                    parameter.grad = None  # AdamW leaves alone what has no gradient
        super().step()

    def _step_matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["betas"][0]
        if not state:
            state["step"] = torch.tensor(0.0)  # AdamW's loading looks for one in every state
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["step"] += 1
        average = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonal_step(gradient.lerp(average, momentum), group["lr"]))


def orthogonal_step(update: torch.Tensor, lr: float) -> torch.Tensor:
    """What torch's Muon adds to a matrix for this update, sharded as the update is.

    Every rank gathers the matrix and does all of it: an iteration over shards would round its bfloat16 sums differently for every number
    of ranks, and would gather several times.
    """
    whole = update.full_tensor() if isinstance(update, DTensor) else update
    matrix = torch.nn.Parameter(torch.zeros_like(whole))
    matrix.grad = whole
    # The momentum is in the update already, and was computed on shards.
    torch.optim.Muon([matrix], lr=lr, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    if isinstance(update, DTensor):
        return distribute_tensor(matrix.detach(), update.device_mesh, update.placements, src_data_rank=None)
    return matrix.detach()


@contextmanager
def settings_kept(optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LambdaLR) -> Iterator[None]:
    """Whatever the block loads into them, afterwards both follow the present configuration: a load brings state only.

    State is what updates have made: moments, step counts, the schedule's position (``last_epoch``). But torch's loading also puts in
    the saved run's learning rates, betas, eps and weight decay, and a user who changed them for the resume would be ignored.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    peaks = list(schedule.base_lrs)
    yield
    rates = [peak * factor(schedule.last_epoch) for peak, factor in zip(peaks, schedule.lr_lambdas, strict=True)]
    for group, present, rate in zip(optimizer.param_groups, settings, rates, strict=True):
        group.update({**present, "lr": rate})
    schedule.load_state_dict({**schedule.state_dict(), "base_lrs": peaks, "_last_lr": rates})
