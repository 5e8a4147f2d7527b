"""GPU-hours and money. A price is given, never assumed."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.planner.quantities import require_at_least

SECONDS_AN_HOUR = 3600


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of a whole run. ``money`` is in the currency of the price, None without one."""

    hours: float
    """Wall-clock."""
    gpu_hours: float
    money: float | None
    formula: str


def run_cost(
    *,
    gpus: int,
    step_s: float,
    steps: int,
    start_s: float = 0.0,
    price_per_gpu_hour: float | None = None,
    other_s: float = 0.0,
    unit: str = "GPUs",
) -> Cost:
    """All GPUs for the whole time: start-up, ``steps`` steps, and ``other_s`` (evaluations, checkpoints, expected restarts).

    GPUs that idle cost as much as busy ones. ``unit``: what is paid for, in words.
    """
    require_at_least(1, gpus=gpus, steps=steps)
    require_at_least(0, step_s=step_s, start_s=start_s, other_s=other_s)
    hours = (start_s + steps * step_s + other_s) / SECONDS_AN_HOUR
    formula = f"{gpus} {unit} x ({start_s:g} s + {steps:,} steps x {step_s:.4g} s + {other_s:g} s) / 3600"
    money = None
    if price_per_gpu_hour is not None:
        require_at_least(0, price_per_gpu_hour=price_per_gpu_hour)
        money, formula = gpus * hours * price_per_gpu_hour, f"{formula} x {price_per_gpu_hour:g}"
    return Cost(hours=hours, gpu_hours=gpus * hours, money=money, formula=formula)
