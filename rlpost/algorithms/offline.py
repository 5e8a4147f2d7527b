"""Algorithms that learn from a data set: which tokens of a row's answers weigh what, and what the loss is made of.

Their settings are resolved ones (config.algorithms.with_defaults). Losses of a pair or a row are means over the pairs or rows of the whole
optimizer step, those of tokens are what ``algorithm.loss_aggregation`` says; each has its own weights and denominator. The terms of a row
follow one another, and only the order of terms depends on the order of rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlpost.algorithms.aggregation import token_weights
from rlpost.algorithms.protocol import OfflineBatch, OfflineRow, TokenSequence
from rlpost.config.schema import AlgorithmConfig
from rlpost.types import MAIN_WEIGHT, ConfigError, LossComponent, LossTerms

PAIR_WEIGHT = "pair_weight"
"""Scalar: 1 for a pair's chosen sequence, where the loss of the pair stands, 0 for its rejected one."""
LIKELIHOOD_WEIGHT = "likelihood_weight"
"""Column: weights of the plain likelihood, on the chosen answers' tokens."""
ROW_WEIGHT = "row_weight"
"""Scalar: weight of a labelled answer."""


class SupervisedFineTuning:
    """The likelihood of the trained tokens (sft)."""

    data_kind = "conversation"
    together = False
    score_head = False
    needs_reference = False

    def __init__(self, config: AlgorithmConfig) -> None:
        self.aggregation = _aggregation(config)

    def terms(self, rows: Sequence[OfflineRow]) -> OfflineBatch:
        """One sequence a row."""
        weights, denominator = token_weights([row.sequences["answer"].trainable for row in rows], self.aggregation, 1)
        terms = [
            replace(_bare(row, group, "answer"), weight=weight) for row, group, weight in zip(rows, _groups(rows), weights, strict=True)
        ]
        return OfflineBatch(terms=tuple(terms), denominators={MAIN_WEIGHT: denominator})

    def components(self, baseline: float = 0.0) -> list[LossComponent]:
        """-log pi."""
        return [LossComponent(term="likelihood")]


class _Pairwise:
    """What algorithms over pairs have in common: two sequences a row, and a weight that is 1 a pair."""

    data_kind = "pair"
    together = True
    score_head = False
    needs_reference = False

    def __init__(self, config: AlgorithmConfig) -> None:
        self.settings = config.preference

    def terms(self, rows: Sequence[OfflineRow]) -> OfflineBatch:
        """The chosen, then the rejected sequence of each row."""
        terms = [
            self._one(row, group, name, {"pair": float(pair), "side": side, PAIR_WEIGHT: float(side > 0)})
            for pair, (row, group) in enumerate(zip(rows, _groups(rows), strict=True))
            for name, side in (("chosen", 1.0), ("rejected", -1.0))
        ]
        return OfflineBatch(terms=tuple(terms), denominators={MAIN_WEIGHT: _tokens(terms), PAIR_WEIGHT: float(len(rows))})

    def _one(self, row: OfflineRow, group: str, name: str, scalars: Mapping[str, float]) -> LossTerms:
        return replace(_bare(row, group, name), scalars=scalars)


class _WithLikelihood(_Pairwise):
    """Pairs whose chosen answer may be learnt like supervised data besides."""

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self.aggregation = _aggregation(config)

    def terms(self, rows: Sequence[OfflineRow]) -> OfflineBatch:
        """Pairs, with the weights of the likelihood in a column that is 0 for the rejected."""
        batch = super().terms(rows)
        weights, denominator = token_weights([row.sequences["chosen"].trainable for row in rows], self.aggregation, 1)
        nothing = [np.zeros(len(row.sequences["rejected"].tokens), np.float32) for row in rows]
        columns = [column for pair in zip(weights, nothing, strict=True) for column in pair]
        terms = tuple(replace(term, columns={LIKELIHOOD_WEIGHT: column}) for term, column in zip(batch.terms, columns, strict=True))
        return replace(batch, terms=terms, denominators={**batch.denominators, LIKELIHOOD_WEIGHT: denominator})


class DirectPreference(_WithLikelihood):
    """A loss of the pair's margin in log ratios to the reference (dpo: sigmoid, ipo, hinge, robust), and a share of likelihood."""

    needs_reference = True

    def components(self, baseline: float = 0.0) -> list[LossComponent]:
        """The preference, and the likelihood where it has a weight."""
        settings = self.settings
        parameters: dict[str, float | str] = {"loss": settings.loss, "beta": settings.beta, "label_smoothing": settings.label_smoothing}
        parts = [LossComponent(term="preference", parameters=parameters, weight=PAIR_WEIGHT)]
        if settings.likelihood:
            parts.append(LossComponent(term="likelihood", coefficient=settings.likelihood, weight=LIKELIHOOD_WEIGHT))
        return parts


class SimplePreference(_Pairwise):
    """The margin in mean logprobs has to exceed gamma; no reference (simpo)."""

    def components(self, baseline: float = 0.0) -> list[LossComponent]:
        """The preference."""
        settings = self.settings
        parameters = {"beta": settings.beta, "margin": settings.margin, "label_smoothing": settings.label_smoothing}
        return [LossComponent(term="simple_preference", parameters=parameters, weight=PAIR_WEIGHT)]


class OddsRatioPreference(_WithLikelihood):
    """Likelihood of the chosen answer, and beta times the log odds ratio of the pair; no reference (orpo)."""

    def components(self, baseline: float = 0.0) -> list[LossComponent]:
        """The likelihood and the odds ratio."""
        return [
            LossComponent(term="likelihood", weight=LIKELIHOOD_WEIGHT),
            LossComponent(term="odds_ratio", coefficient=self.settings.beta, weight=PAIR_WEIGHT),
        ]


class RewardModelling(_Pairwise):
    """A score of the last token, larger for the chosen answer by a margin (reward_model)."""

    score_head = True

    def components(self, baseline: float = 0.0) -> list[LossComponent]:
        """Bradley-Terry, and what keeps scores around 0."""
        return [LossComponent(term="score_pairs", parameters={"centering": self.settings.centering}, weight=PAIR_WEIGHT)]

    def _one(self, row: OfflineRow, group: str, name: str, scalars: Mapping[str, float]) -> LossTerms:
        """The score stands at the last token, the end of the answer."""
        term = _bare(row, group, name)
        last = np.arange(len(term.tokens)) == len(term.tokens) - 1
        margin = self.settings.margin if row.margin is None else row.margin
        return replace(term, trainable=last, weight=last.astype(np.float32), scalars={**scalars, "margin": margin}, scored=True)


class UnpairedPreference:
    """Wanted answers above, unwanted ones below a baseline of log ratios to the reference (kto)."""

    data_kind = "labelled"
    together = False
    score_head = False
    needs_reference = True

    def __init__(self, config: AlgorithmConfig) -> None:
        self.settings = config.preference

    def terms(self, rows: Sequence[OfflineRow]) -> OfflineBatch:
        """One sequence a row; ``estimate`` are its prompts, each with the answer of another row.

        Raises ConfigError for a single row, which has no other.
        """
        if len(rows) < 2:
            raise ConfigError(
                "kto compares with the answers of other rows, but a batch has one: schedule.prompts_per_step (and evaluation.prompts) "
                "must be 2 or more"
            )
        terms = []
        for row, group in zip(rows, _groups(rows), strict=True):
            weight = self.settings.desirable if row.wanted else self.settings.undesirable
            terms.append(replace(_bare(row, group, "answer"), scalars={"wanted": float(bool(row.wanted)), ROW_WEIGHT: weight}))
        denominators = {MAIN_WEIGHT: _tokens(terms), ROW_WEIGHT: float(len(rows))}
        return OfflineBatch(terms=tuple(terms), denominators=denominators, estimate=_mismatched(rows))

    def components(self, baseline: float = 0.0) -> list[LossComponent]:
        """The value of each answer beside the ``baseline``."""
        return [LossComponent(term="kto", parameters={"beta": self.settings.beta, "baseline": baseline}, weight=ROW_WEIGHT)]


def _aggregation(config: AlgorithmConfig) -> str:
    """What a likelihood is a mean of. Raises ConfigError for what is defined for sampled groups only."""
    if config.loss_aggregation not in ("token_mean", "sequence_mean"):
        raise ConfigError(
            f"algorithm.loss_aggregation={config.loss_aggregation} is for groups of samples; {config.name} takes token_mean (all trained "
            "tokens weigh the same) or sequence_mean (all answers do)"
        )
    return config.loss_aggregation


def _groups(rows: Sequence[OfflineRow]) -> list[str]:
    """A group for each row: its id, with a number where a batch has a row again, as at the end of an epoch."""
    seen: Counter[str] = Counter()
    groups = []
    for row in rows:
        seen[row.row_id] += 1
        groups.append(row.row_id if seen[row.row_id] == 1 else f"{row.row_id} again {seen[row.row_id]}")
    return groups


def _bare(row: OfflineRow, group: str, name: str) -> LossTerms:
    """One answer of a row, all its trained tokens with weight 1."""
    return _sequence(row.sequences[name], f"{row.row_id}/{name}", group)


def _sequence(sequence: TokenSequence, trajectory_id: str, group: str) -> LossTerms:
    return LossTerms(
        trajectory_id=trajectory_id,
        group_id=group,
        prompt_length=sequence.prompt_length,
        tokens=sequence.tokens,
        trainable=sequence.trainable,
        weight=sequence.trainable.astype(np.float32),
    )


def _tokens(terms: Sequence[LossTerms]) -> float:
    return float(sum(term.trainable.sum() for term in terms))


def _mismatched(rows: Sequence[OfflineRow]) -> tuple[LossTerms, ...]:
    """The prompt of each row with the answer of the next, in the order of ids, so that it does not depend on that of ``rows``.

    The mean log ratio of such answers, cut at 0, estimates the KL to the reference (KTO, Ethayarajh et al. 2024, section 4.1). An answer
    is cut where the sequence would be longer than the longest row, which is what the trainer has memory for.
    """
    longest = max(len(row.sequences["answer"].tokens) for row in rows)
    ordered = sorted(rows, key=lambda row: row.row_id)
    found = []
    for row, other in zip(ordered, [*ordered[1:], ordered[0]], strict=True):
        own, answer = row.sequences["answer"], other.sequences["answer"]
        tail = slice(answer.prompt_length, answer.prompt_length + longest - own.prompt_length)
        sequence = TokenSequence(
            tokens=np.concatenate([own.tokens[: own.prompt_length], answer.tokens[tail]]),
            trainable=np.concatenate([np.zeros(own.prompt_length, bool), answer.trainable[tail]]),
            prompt_length=own.prompt_length,
        )
        found.append(_sequence(sequence, f"{row.row_id}/answer of {other.row_id}", row.row_id))
    return tuple(found)
