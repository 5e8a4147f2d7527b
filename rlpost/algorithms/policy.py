"""Policy-gradient losses, one value a token. A = advantage, r = pi / pi_old of a token.

All take ``clip_low``, ``clip_high`` and ``dual_clip``, so that a configuration can name any of them; what a loss has no use for is
accepted and ignored, as its docstring says. A loss of a whole sequence is spread over its tokens: with the weights of
``sequence_mean`` (1 / tokens of the sequence) their sum is the paper's. On the policy that sampled (r = 1) the gradient of
each is REINFORCE's, ``-A d log pi``.
"""

from __future__ import annotations

import torch

from rlpost.algorithms.losses import Targets, Term, log_ratio


def _advantage(targets: Targets) -> torch.Tensor:
    if targets.advantage is None:
        raise AssertionError("a policy loss needs advantages")
    return targets.advantage


def _clipped_gain(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``min(r A, clip(r, 1 - low, 1 + high) A)``, and 1 where the clipped side is the smaller one, else 0."""
    unclipped, clipped = ratio * advantage, ratio.clamp(1.0 - low, 1.0 + high) * advantage
    return torch.minimum(unclipped, clipped), (clipped < unclipped).to(ratio.dtype)


def policy_clip(targets: Targets, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Term:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` (PPO, Schulman et al. 2017, eq. 7; two bounds as in DAPO).

    With ``dual_clip`` c above 1, where A < 0 the gain is at least c A (Ye et al. 2020, eq. 5).
    """
    advantage, ratio = _advantage(targets), log_ratio(targets).exp()
    gain, hit = _clipped_gain(ratio, advantage, clip_low, clip_high)
    if dual_clip:
        gain = torch.where(advantage < 0, torch.maximum(gain, dual_clip * advantage), gain)
    return Term(loss=-gain, means={"clip_fraction": hit}, maxima={"ratio_max": ratio.detach()})


def reinforce(targets: Targets, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Term:
    """``-A log pi`` (Williams 1992). Old logprobs are only reported on: nothing is weighted or clipped, and no bound is used."""
    ratio = log_ratio(targets).detach().exp()
    return Term(loss=-_advantage(targets) * targets.logprobs, maxima={"ratio_max": ratio})


def gspo(targets: Targets, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Term:
    """PPO's loss with the ratio of the sequence, ``s = (pi(y) / pi_old(y))^(1 / tokens)`` (GSPO, Zheng et al. 2025, eq. 5 to 7).

    In the form of its eq. 13 and 14 (GSPO-token): every token has the value s and the gradient ``s d log pi`` of its own, which is the
    same where all tokens have one advantage, and right where they have not. ``dual_clip`` is not used.
    """
    advantage = _advantage(targets)
    whole = targets.spread(targets.sequence_mean(log_ratio(targets).detach()))
    ratio = (whole + targets.logprobs - targets.logprobs.detach()).exp()
    gain, hit = _clipped_gain(ratio, advantage, clip_low, clip_high)
    return Term(loss=-gain, means={"clip_fraction": hit}, maxima={"ratio_max": ratio.detach()})


def gmpo(targets: Targets, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Term:
    """``-A g``, where g is the geometric mean of the sequence's clipped token ratios (GMPO, Zhao et al. 2025).

    Each ratio is clipped on the side that A would push it to: ``min(r, e^clip_high)`` where A > 0, ``max(r, e^-clip_low)`` where A < 0
    (clipping in log space; the paper takes 0.4 on both sides). ``dual_clip`` is not used.
    """
    advantage, ratio = _advantage(targets), log_ratio(targets)
    clipped = torch.where(advantage > 0, ratio.clamp(max=clip_high), ratio.clamp(min=-clip_low))
    mean = targets.spread(targets.sequence_mean(clipped))
    hit = (clipped != ratio).to(ratio.dtype)
    return Term(loss=-advantage * mean.exp(), means={"clip_fraction": hit}, maxima={"ratio_max": ratio.detach().exp()})


def cispo(targets: Targets, *, clip_low: float, clip_high: float, dual_clip: float = 0.0) -> Term:
    """``-clip(r, 1 - clip_low, 1 + clip_high) A log pi``, no gradient through the ratio (CISPO, MiniMax-M1 2025, eq. 4 and 5).

    So every token keeps a gradient. The paper has no lower bound: clip_low = 1. ``dual_clip`` is not used.
    """
    ratio = log_ratio(targets).detach().exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    hit = (clipped != ratio).to(ratio.dtype)
    loss = -clipped * _advantage(targets) * targets.logprobs
    return Term(loss=loss, means={"clip_fraction": hit}, maxima={"ratio_max": ratio})


def sapo(
    targets: Targets,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Term:
    """``-A sigmoid(tau (r - 1)) 4 / tau``: a soft gate in place of clipping (SAPO, Gao et al. 2025).

    tau is ``temperature_positive`` where A > 0, else ``temperature_negative``; larger is narrower. No bound is used.
    """
    advantage, ratio = _advantage(targets), log_ratio(targets).exp()
    sharpness = torch.where(advantage > 0, ratio.new_tensor(temperature_positive), ratio.new_tensor(temperature_negative))
    gate = torch.sigmoid(sharpness * (ratio - 1.0)) * 4.0 / sharpness
    return Term(loss=-advantage * gate, maxima={"ratio_max": ratio.detach()})


def entropy_bonus(targets: Targets) -> Term:
    """Minus the entropy of the whole distribution at each target."""
    return Term(loss=-targets.entropy)
