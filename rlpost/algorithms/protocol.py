"""What the driver asks of an algorithm. Everything here is numpy: an algorithm never sees the trainer.

Online, for each batch of groups:

    choose        rewards shaped, samples and groups filtered            -> SampledGroup, Sample
    (driver)      the forwards that ``forwards`` names: old, reference, values, entropy
    advantages    what each token of each sample is worth               -> Credit
    components    what the loss is made of

Offline, for each batch of rows: ``terms`` gives sequences with weights, and the denominators; then ``components``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlpost.types import DataKind, Group, LossComponent, LossTerms, Trajectory


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A scored trajectory and what forwards said of it. Arrays ``[tokens]`` float32, NaN where nothing was sampled."""

    trajectory: Trajectory
    reward: float
    """After shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Each reward function's own value, by name."""
    trained: bool = True
    """False: only in the baseline of its group."""
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    values: np.ndarray | None = None
    entropy: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """The scored samples of one prompt. ``baseline`` is the reward of its greedy sample, where the algorithm asked for one."""

    group_id: str
    samples: tuple[Sample, ...]
    baseline: float | None = None


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What each token of a sample is worth ``[tokens]``, 0 where nothing was sampled; ``returns`` are what a critic should have said."""

    advantage: np.ndarray
    returns: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What an algorithm may need to know of the run besides its own settings."""

    max_new_tokens: int
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """By the name of the reward."""


class Algorithm(Protocol):
    """An online algorithm; made from its settings and a :class:`RunFacts`."""

    greedy_baseline: bool
    """Each group needs a greedy sample besides."""

    @property
    def forwards(self) -> frozenset[str]:
        """What the driver must compute before :meth:`advantages`: any of reference, values."""

    def choose(self, groups: Sequence[Group]) -> list[SampledGroup]:
        """The scored trajectories, with shaped rewards; nothing else may enter a loss or a baseline."""

    def refuses(self, group: Group) -> bool:
        """Whether the group teaches nothing (and is to be replaced, with algorithm.filter.zero_variance=resample)."""

    def advantages(self, batch: Sequence[SampledGroup]) -> list[list[Credit]]:
        """For each sample of each group."""

    def components(self) -> list[LossComponent]:
        """The summands of the policy's loss."""

    def critic_components(self) -> list[LossComponent]:
        """The summands of the critic's loss."""

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Called with what the updates measured, once a step; returns metrics to report besides."""

    def state(self) -> dict[str, Any]:
        """What a resume needs, as plain JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where the algorithm that gave ``state`` stood."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One token sequence of an offline row. Arrays ``[tokens]``; ``trainable`` marks what a loss may look at."""

    tokens: np.ndarray
    trainable: np.ndarray
    prompt_length: int


@dataclass(frozen=True, kw_only=True)
class OfflineRow:
    """One row of an offline data set, tokenised: what its answers are named depends on the algorithm's kind of data.

    ``conversation``: one sequence ``answer``. ``pair``: ``chosen`` and ``rejected``, whose prompts are equal. ``labelled``: ``answer`` and
    ``wanted``.
    """

    row_id: str
    sequences: Mapping[str, TokenSequence]
    wanted: bool | None = None
    margin: float | None = None


@dataclass(frozen=True, kw_only=True)
class OfflineBatch:
    """The sequences of one optimizer step, and the denominators counted over all of them, by the name of their weights."""

    terms: tuple[LossTerms, ...]
    denominators: Mapping[str, float]
    estimate: tuple[LossTerms, ...] = ()
    """Sequences whose mean log ratio to the reference, at least 0, must be known before the update (KTO's baseline)."""


class OfflineAlgorithm(Protocol):
    """An algorithm that learns from a data set: no engine is started."""

    data_kind: DataKind
    together: bool
    """The sequences of a row are compared with one another, so they share a micro-batch."""
    score_head: bool
    """The model has a score head (a reward model) instead of its output layer."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads reference logprobs."""

    def terms(self, rows: Sequence[OfflineRow]) -> OfflineBatch:
        """Sequences with weights."""

    def components(self, baseline: float = 0.0) -> list[LossComponent]:
        """The summands of the loss; ``baseline`` is what was asked for by ``OfflineBatch.estimate``."""
