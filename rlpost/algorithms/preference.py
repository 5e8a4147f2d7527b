"""Losses of offline algorithms: over answers that are preferred, refused, labelled, or just given.

A pair is two sequences of one micro-batch with the same number in the scalar ``pair``; ``side`` is +1 for the chosen and -1 for the
rejected. The loss of a pair, and what is reported of it, stands at its chosen sequence, and 0 at the rejected one; so the weights are a
scalar that is 0 at the rejected. All but :func:`likelihood` return one value a sequence ``[sequences]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from rlpost.algorithms.losses import Targets, Term

MOST_LOG_LIKELIHOOD = -1e-6
"""Mean logprobs are cut here in odds: those of an answer that is certain are infinite, and so is their gradient."""


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a micro-batch."""

    side: torch.Tensor
    """``[sequences]``: +1 chosen, -1 rejected."""
    index: torch.Tensor
    """Which pair each sequence belongs to, counted from 0 ``[sequences]``."""
    count: int

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """For each sequence, the sum of ``values`` ``[sequences]`` over its pair."""
        return values.new_zeros(self.count).index_add(0, self.index, values).index_select(0, self.index)

    def at_chosen(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` at chosen sequences, else 0."""
        return torch.where(self.side > 0, values, torch.zeros_like(values))

    def term(self, loss: torch.Tensor, rewards: torch.Tensor) -> Term:
        """The term of a pair's ``loss``, with what ``rewards`` (larger is better) say of it."""
        detached = rewards.detach()
        margin = self.sum(self.side * detached)
        found = {
            "accuracy": (margin > 0).to(margin.dtype),
            "margin": margin,
            "reward_chosen": detached,
            "reward_rejected": self.sum(detached) - detached,
        }
        return Term(loss=self.at_chosen(loss), means={name: self.at_chosen(values) for name, values in found.items()})


def _pairs(targets: Targets) -> _Pairs:
    """Raises AssertionError unless every pair has one chosen and one rejected sequence here."""
    side = targets.scalars["side"]
    names, index = torch.unique(targets.scalars["pair"], return_inverse=True)
    chosen, rejected = (torch.bincount(index[sign * side > 0], minlength=len(names)) for sign in (1, -1))
    if not (bool((chosen == 1).all()) and bool((rejected == 1).all())):
        raise AssertionError(
            f"every pair of a micro-batch needs one chosen and one rejected sequence; found {chosen.tolist()} chosen and "
            f"{rejected.tolist()} rejected. Pack with together=True, one group_id a pair"
        )
    return _Pairs(side=side, index=index, count=len(names))


def _log_ratios(targets: Targets) -> torch.Tensor:
    """log pi / reference of each target, 0 where the reference's is unknown."""
    if targets.reference_logprobs is None:
        raise AssertionError("this loss needs reference logprobs")
    return targets.logprobs - targets.known(targets.reference_logprobs)


def _smoothed(margin: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """``-log sigmoid(margin)`` where a share of the pairs is taken to be labelled the wrong way round."""
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def preference(targets: Targets, *, loss: str, beta: float, label_smoothing: float = 0.0) -> Term:
    """DPO's family, with h = log ratio to the reference of the chosen answer minus that of the rejected one.

    ``sigmoid``  -log sigmoid(beta h) (DPO, Rafailov et al. 2023, eq. 7), with ``label_smoothing`` e cDPO (Mitchell 2023).
    ``robust``   (-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e), whose mean over labels that are wrong with
                 probability e < 1/2 is DPO's loss of right ones (Chowdhury et al. 2024).
    ``hinge``    max(0, 1 - beta h) (SLiC, Zhao et al. 2023).
    ``ipo``      (h - 1 / (2 beta))^2 (Azar et al. 2023, eq. 17).

    The log ratio of an answer is the sum over its tokens, but for ipo the mean: its target is a fixed gap, which the sum of a long answer
    overshoots in one step (TRL takes the mean too). ``hinge`` and ``ipo`` have no use for ``label_smoothing``. The rewards reported are
    beta times the log ratios.
    """
    pairs, tokens = _pairs(targets), _log_ratios(targets)
    ratios = targets.sequence_mean(tokens) if loss == "ipo" else targets.sequence_sum(tokens)
    gap = pairs.sum(pairs.side * ratios)
    if loss == "sigmoid":
        value = _smoothed(beta * gap, label_smoothing)
    elif loss == "robust":
        right, wrong = -logsigmoid(beta * gap), -logsigmoid(-beta * gap)
        value = ((1.0 - label_smoothing) * right - label_smoothing * wrong) / (1.0 - 2.0 * label_smoothing)
    elif loss == "hinge":
        value = torch.relu(1.0 - beta * gap)
    elif loss == "ipo":
        value = (gap - 1.0 / (2.0 * beta)).square()
    else:
        raise AssertionError(f"unknown preference loss {loss!r}; expected sigmoid, robust, hinge or ipo")
    return pairs.term(value, beta * ratios)


def simple_preference(targets: Targets, *, beta: float, margin: float, label_smoothing: float = 0.0) -> Term:
    """``-log sigmoid(beta (m_chosen - m_rejected) - margin)``, m the mean logprob of an answer (SimPO, Meng et al. 2024, eq. 6)."""
    pairs, rewards = _pairs(targets), beta * targets.sequence_mean(targets.logprobs)
    return pairs.term(_smoothed(pairs.sum(pairs.side * rewards) - margin, label_smoothing), rewards)


def odds_ratio(targets: Targets) -> Term:
    """``-log sigmoid(log odds_chosen - log odds_rejected)``, odds = p / (1 - p), log p the mean logprob (ORPO, Hong et al. 2024, eq. 7).

    ORPO adds it, times lambda, to the plain likelihood of the chosen answer.
    """
    pairs = _pairs(targets)
    mean = targets.sequence_mean(targets.logprobs).clamp(max=MOST_LOG_LIKELIHOOD)
    odds = mean - torch.log(-torch.expm1(mean))
    return pairs.term(-logsigmoid(pairs.sum(pairs.side * odds)), odds)


def likelihood(targets: Targets) -> Term:
    """``-log pi`` of each target ``[targets]``."""
    return Term(loss=-targets.logprobs)


def kto(targets: Targets, *, beta: float, baseline: float) -> Term:
    """``1 - sigmoid(beta (r - z))`` of a wanted answer, ``1 - sigmoid(beta (z - r))`` of another (KTO, Ethayarajh et al. 2024, eq. 8).

    r is the sum of an answer's log ratios to the reference, z the ``baseline`` (an estimate of the KL, no gradient), the scalar ``wanted``
    1 or 0; the weights of wanted and unwanted answers (the paper's lambda) are those of the loss. Means: ``margin``, beta r with the sign
    of the label, and ``accuracy``, whether r lies on its label's side of z.
    """
    ratios = targets.sequence_sum(_log_ratios(targets))
    sign = 2.0 * targets.scalars["wanted"] - 1.0
    gap = sign * (ratios - baseline)
    means = {"accuracy": (gap.detach() > 0).to(gap.dtype), "margin": beta * (sign * ratios).detach()}
    return Term(loss=torch.sigmoid(-beta * gap), means=means)


def score_pairs(targets: Targets, *, centering: float) -> Term:
    """``-log sigmoid(s_chosen - s_rejected - margin) + centering (s_chosen + s_rejected)^2`` of a reward model (Bradley-Terry).

    Scores are the values, one target a sequence (its last token); the scalar ``margin`` is the pair's (Llama 2, Touvron et al. 2023,
    eq. 2); ``centering`` keeps scores around 0 (Eisenstein et al. 2023).
    """
    if targets.values is None:
        raise AssertionError("a reward model's loss needs a model with a value head")
    pairs, scores = _pairs(targets), targets.sequence_sum(targets.values)
    value = -logsigmoid(pairs.sum(pairs.side * scores) - targets.scalars["margin"])
    return pairs.term(value + centering * pairs.sum(scores).square(), scores)
