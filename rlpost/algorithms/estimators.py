"""KL to a reference model: estimators of a token's KL from its sample, and a coefficient that steers it.

With d = log ref - log pi of the sampled token (Schulman 2020, "Approximating KL divergence"):

    estimator    value               mean of the value over pi    mean of the gradient over pi
    k1           -d                  KL(pi || ref)                0: as a loss it teaches nothing
    k2           d^2 / 2             biased, second order right   that of KL(pi || ref)
    k3           exp(d) - 1 - d      KL(pi || ref)                that of KL(ref || pi), the other direction
    k3_unbiased  pi/pi_old times k3  KL(pi || ref)                that of KL(pi || ref)

k3_unbiased is DeepSeek-V3.2's (2025, eq. 7). Of it value and gradient are unbiased also when another policy pi_old sampled: the mean over
pi_old of (pi / pi_old) k3 is the mean over pi of k3, for every pi, hence so is its gradient, which flows through the ratio too.
"Unbiased" is of each token's distribution after the context that was sampled; how pi changes which contexts come is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

MOST_LOG_RATIO = 20.0
"""Log ratios are cut here: exp overflows float32 at 88, and inf * 0 in the backward pass would make every gradient NaN."""

Array = TypeVar("Array", np.ndarray, "torch.Tensor")


def estimate(delta: Array, grown: Array, estimator: str) -> Array:
    """The estimator's value for d = ``delta`` and exp(d) = ``grown``."""
    if estimator == "k1":
        return -delta
    if estimator == "k2":
        return 0.5 * delta * delta
    if estimator in ("k3", "k3_unbiased"):
        return grown - 1.0 - delta
    raise AssertionError(f"unknown KL estimator {estimator!r}; expected k1, k2, k3 or k3_unbiased")


def token_kl(logprobs: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    """The KL of sampled tokens, for a KL in the reward: no gradient, and the policy that sampled is pi. ``[tokens]``, 0 where NaN."""
    delta = np.clip(reference - logprobs, -MOST_LOG_RATIO, MOST_LOG_RATIO)
    return np.nan_to_num(estimate(delta, np.exp(delta), estimator), nan=0.0)


class KlController:
    """The KL's coefficient, steered so that the measured KL comes to ``target`` (Ziegler et al. 2019, section 2.2); None keeps it.

    Proportional control in log space: each update multiplies it by exp(error / horizon), error = (kl - target) / target cut at -1 and 1,
    so in ``horizon`` updates it changes by a factor of 2.718 at most. (Ziegler: error cut at 0.2, factor 1 + 0.1 error.)
    """

    def __init__(self, coefficient: float, target: float | None, horizon: int) -> None:
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, kl: float) -> None:
        """Steer by the mean KL a token of a step."""
        if self.target is not None:
            error = min(1.0, max(-1.0, (kl - self.target) / self.target))
            self.coefficient *= math.exp(error / self.horizon)

    def state(self) -> dict[str, float]:
        """What a resume needs."""
        return {"coefficient": self.coefficient}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with the coefficient of :meth:`state`, if it is steered (from above 0); a fixed one is the present configuration's."""
        if self.target is not None and state["coefficient"] > 0:
            self.coefficient = state["coefficient"]
