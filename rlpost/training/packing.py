"""From trajectories to balanced micro-batches: the same number on every rank, none above the token limit."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpost.types import ConfigError, LossTerms


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Whole sequences laid end to end in one row; nothing is padded.

    ``tokens``, ``positions`` are ``[row_len]`` (positions restart at 0 in each sequence), ``lengths`` ``[sequences]``.
    The remaining arrays are ``[targets]``, one entry a trained token: ``predictor`` is the row index whose hidden
    state predicts it (its own index minus one), ``sequence`` the index into ``lengths``. ``old_logprobs`` and
    ``reference_logprobs`` are None where the loss needs none. An empty micro-batch has no sequences at all.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    predictor: np.ndarray
    target: np.ndarray
    sequence: np.ndarray
    weight: np.ndarray
    advantage: np.ndarray
    parity_logprobs: np.ndarray
    old_logprobs: np.ndarray | None
    reference_logprobs: np.ndarray | None
    members: tuple[int, ...]
    """Index of each sequence in the list that was packed."""


def balance(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Spread items over ``bins`` so that the fullest bin is small: longest first, each to the emptiest bin."""
    heap = [(0, index) for index in range(bins)]
    result: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, index = heapq.heappop(heap)
        result[index].append(item)
        heapq.heappush(heap, (load + lengths[item], index))
    return [sorted(members) for members in result]


def pack(terms: Sequence[LossTerms], *, ranks: int, micro_batch_tokens: int) -> list[list[MicroBatch]]:
    """Pack sequences into micro-batches: ``result[rank][i]``, the same number of micro-batches for every rank.

    Raises ConfigError when one sequence alone is longer than ``micro_batch_tokens``.
    """
    lengths = [len(term.tokens) for term in terms]
    if lengths and max(lengths) > micro_batch_tokens:
        worst = int(np.argmax(lengths))
        raise ConfigError(
            f"trajectory {terms[worst].trajectory_id} has {lengths[worst]} tokens, more than training.micro_batch_tokens="
            f"{micro_batch_tokens}; raise it to at least {lengths[worst]}"
        )
    per_rank = max(1, -(-sum(lengths) // (ranks * micro_batch_tokens)))
    while True:
        bins = balance(lengths, ranks * per_rank)
        if max((sum(lengths[i] for i in members) for members in bins), default=0) <= micro_batch_tokens:
            break
        per_rank += 1
    return [[build(terms, bins[i * ranks + rank]) for i in range(per_rank)] for rank in range(ranks)]


def build(terms: Sequence[LossTerms], members: Sequence[int]) -> MicroBatch:
    """Lay the chosen sequences end to end."""
    chosen = [terms[i] for i in members]
    lengths = np.array([len(term.tokens) for term in chosen], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if len(chosen) else np.zeros(0, np.int64)
    for term in chosen:
        if len(term.tokens) and term.trainable[0]:
            raise AssertionError(f"{term.trajectory_id}: the first token has no context, it cannot be trained")
    trained = [np.flatnonzero(term.trainable) for term in chosen]

    def gather(name: str, dtype: type) -> np.ndarray:
        parts = [np.asarray(getattr(term, name))[index] for term, index in zip(chosen, trained, strict=True)]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    def gather_optional(name: str) -> np.ndarray | None:
        # The same choice on every rank and micro-batch, empty ones too: it is a property of the whole list.
        return gather(name, np.float32) if terms and getattr(terms[0], name) is not None else None

    return MicroBatch(
        tokens=np.concatenate([term.tokens for term in chosen]).astype(np.int64) if chosen else np.zeros(0, np.int64),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int64) if chosen else np.zeros(0, np.int64),
        lengths=lengths,
        predictor=np.concatenate([index - 1 + start for index, start in zip(trained, starts, strict=True)]).astype(np.int64)
        if chosen
        else np.zeros(0, np.int64),
        target=gather("tokens", np.int64),
        sequence=np.repeat(np.arange(len(chosen)), [len(index) for index in trained]).astype(np.int64),
        weight=gather("weight", np.float32),
        advantage=gather("advantage", np.float32),
        parity_logprobs=gather("parity_logprobs", np.float32),
        old_logprobs=gather_optional("old_logprobs"),
        reference_logprobs=gather_optional("reference_logprobs"),
        members=tuple(members),
    )


def occupancy(packed: Sequence[Sequence[MicroBatch]]) -> float:
    """Real tokens over the tokens that all ranks would process if each took as long as the slowest, 0 to 1."""
    rounds = list(zip(*packed, strict=True))
    slowest = sum(max(len(m.tokens) for m in micro) for micro in rounds) * len(packed)
    return sum(len(m.tokens) for micro in rounds for m in micro) / slowest if slowest else 1.0


def unpack(packed: Sequence[Sequence[MicroBatch]], values: Sequence[Sequence[np.ndarray]], terms: Sequence[LossTerms]) -> list[np.ndarray]:
    """Per-target values ``[rank][micro][targets]`` back to one array ``[tokens]`` a trajectory (NaN where not trained)."""
    result = [np.full(len(term.tokens), np.nan, np.float32) for term in terms]
    for micros, arrays in zip(packed, values, strict=True):
        for micro, array in zip(micros, arrays, strict=True):
            for position, member in enumerate(micro.members):
                result[member][terms[member].trainable] = array[micro.sequence == position]
    return result
