"""AdamW's parameter groups and the learning-rate schedule; what of both is configuration and what is state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from rlpost.config.schema import OptimizerConfig


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
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, *, total: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with weight decay on matrices only, and its schedule over ``total`` optimizer steps."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, total=total, config=config))
    return optimizer, schedule


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
