"""Off-policy correction: what is sampled by the engine is weighted by w = pi_old / pi_engine, or left out where w is far from 1.

Two ratios are kept apart: the loss's own, pi / pi_old, is clipped and carries the gradient (decoupled PPO: Hilton et al. 2022); w here
is between the trainer's policy before the update and the engine's that sampled, whose numerics and version may differ. w has no gradient.
Published methods as one table (``level``, ``action``, ``low``, ``high`` of OffPolicyCorrection):

    method                                   level      action    low, high     source
    truncated importance sampling (TIS)      token      truncate  -, 2          Yao et al. 2025 ("... secretly brings you off-policy RL")
    TIS of sequences                         sequence   truncate  -, 2          Liu, Li et al. 2025 ("When speed kills stability")
    masked importance sampling (MIS)         sequence   mask      0, 2          Liu, Li et al. 2025
    IcePop                                   token      mask      0.5, 5        Ling team 2025 ("Small leak can sink a great ship")
    sequence mask by the mean log ratio      geometric  mask      0.99, 1.01    Liu, Li et al. 2025 (who weight what is kept by 1, not w)
    both sides cut                           any        clip      0.5, 2        this package

A masked weight leaves the numerator only: the denominator of the loss was counted before the update, so what is left weighs no more.
"""

from __future__ import annotations

import torch

from rlpost.algorithms.estimators import MOST_LOG_RATIO
from rlpost.algorithms.losses import Targets
from rlpost.types import OffPolicyCorrection


def correction_factor(correction: OffPolicyCorrection, targets: Targets) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weight of each target ``[targets]``, without gradient, and what to report of it.

    Reads the column ``rollout_logprobs``, the engine's. Where it is unknown (NaN) the engine counts as pi_old: log w is 0, so a token's
    weight is exactly 1, and in a sequence it changes nothing. Means: ``correction_mean``, ``correction_dropped`` (share of targets whose
    weight became 0) and ``correction_kl`` (KL(engine || pi_old) of a token by k3: the engine's tokens are its samples).
    """
    rollout = targets.columns["rollout_logprobs"]
    gap = targets.known(targets.old_logprobs).detach() - rollout
    token = torch.where(torch.isfinite(gap), gap, 0.0).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    if correction.level == "token":
        log_weight = token
    elif correction.level == "sequence":
        log_weight = targets.spread(targets.sequence_sum(token).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO))
    else:
        log_weight = targets.spread(targets.sequence_mean(token))
    weight = log_weight.exp()
    if correction.action == "truncate":
        factor = weight.clamp(max=correction.high)
    elif correction.action == "clip":
        factor = weight.clamp(correction.low, correction.high)
    else:
        factor = torch.where((weight >= correction.low) & (weight <= correction.high), weight, 0.0)
    means = {
        "correction_mean": factor,
        "correction_dropped": (factor == 0.0).to(factor.dtype),
        "correction_kl": token.exp() - 1.0 - token,
    }
    return factor, means
