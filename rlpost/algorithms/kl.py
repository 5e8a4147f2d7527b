"""The KL to a reference model as a loss term; see :mod:`rlpost.algorithms.estimators`."""

from __future__ import annotations

from rlpost.algorithms.estimators import MOST_LOG_RATIO, estimate
from rlpost.algorithms.losses import Targets, Term, log_ratio


def kl_to_reference(targets: Targets, *, estimator: str) -> Term:
    """KL(pi || reference) of each token from its sample; see the estimators. An unknown (NaN) reference logprob gives 0."""
    if targets.reference_logprobs is None:
        raise AssertionError("the KL term needs reference logprobs")
    delta = (targets.known(targets.reference_logprobs) - targets.logprobs).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    value = estimate(delta, delta.exp(), estimator)
    if estimator == "k3_unbiased":
        value = log_ratio(targets).exp() * value
    return Term(loss=value, means={"kl": value.detach()})
