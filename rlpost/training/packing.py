"""From trajectories to balanced micro-batches: the same number on every rank, none above the token limit.

Samples of one group begin with the same prompt. Every layer but attention works on single tokens, so a micro-batch holds the prompt's
tokens once, however many samples of the group it has; attention lays the sequences out again by ``index``. The result is the
same to the last rounding, and with N samples of P prompt and R answer tokens N (P + R) tokens become P + N R.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlpost.types import ConfigError, LossTerms


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Whole sequences in one row; nothing is padded, and what sequences share at their start is there once.

    ``tokens``, ``positions`` are ``[row_len]`` (a position counts within its sequence), ``lengths`` ``[sequences]``, and ``index``
    ``[sum of lengths]`` holds the row index of each token of each sequence. The remaining arrays are ``[targets]``, one entry a
    trained token: ``predictor`` is the row index whose hidden state predicts it (or, of terms that are ``scored``, its own), ``sequence``
    the index into ``lengths``. Optional arrays are None where the loss needs none. ``columns`` are ``[targets]``, ``scalars``
    ``[sequences]``. An empty micro-batch has no sequences.
    """

    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    index: np.ndarray
    predictor: np.ndarray
    target: np.ndarray
    sequence: np.ndarray
    weight: np.ndarray
    advantage: np.ndarray | None
    parity_logprobs: np.ndarray | None
    old_logprobs: np.ndarray | None
    reference_logprobs: np.ndarray | None
    members: tuple[int, ...]
    """Index of each sequence in the list that was packed."""
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)


class _Bins:
    """Sequences in bins; a bin's load counts each shared prompt once."""

    def __init__(self, terms: Sequence[LossTerms], count: int, share: bool) -> None:
        self.terms, self.share = terms, share
        self.members: list[list[int]] = [[] for _ in range(count)]
        self.loads = [0] * count
        self._groups: list[set[str]] = [set() for _ in range(count)]

    def cost(self, item: int, target: int) -> int:
        """Tokens that a sequence would add to a bin."""
        term = self.terms[item]
        shared = self.share and term.group_id in self._groups[target]
        return len(term.tokens) - (term.prompt_length if shared else 0)

    def add(self, item: int, target: int) -> None:
        """Put a sequence into a bin."""
        self.loads[target] += self.cost(item, target)
        self.members[target].append(item)
        self._groups[target].add(self.terms[item].group_id)


def balance(terms: Sequence[LossTerms], count: int, share: bool, together: bool = False) -> list[list[int]]:
    """Spread sequences over ``count`` bins so that the fullest is small: whole groups where that is as even, else one by one.

    Longest first, each to where the load is smallest afterwards. ``together`` never splits a group.
    """
    groups: dict[str, list[int]] = {}
    for item, term in enumerate(terms):
        groups.setdefault(term.group_id if share or together else str(item), []).append(item)
    for members in groups.values():
        members.sort(key=lambda item: (-len(terms[item].tokens), item))
    whole, single = _Bins(terms, count, share), _Bins(terms, count, share)
    by_size = sorted(groups.values(), key=lambda members: (-sum(len(terms[item].tokens) for item in members), members[0]))
    for members in by_size:
        target = min(range(count), key=lambda index: (whole.loads[index], index))
        for item in members:
            whole.add(item, target)
    if together:
        return [sorted(members) for members in whole.members]
    for members in by_size:
        for item in members:
            single.add(item, min(range(count), key=lambda index: (single.loads[index] + single.cost(item, index), index)))
    best = whole if max(whole.loads) <= max(single.loads) else single
    return [sorted(members) for members in best.members]


def row_length(terms: Sequence[LossTerms], members: Sequence[int], share: bool) -> int:
    """Tokens of the row that holds these sequences."""
    total = sum(len(terms[item].tokens) for item in members)
    if not share:
        return total
    prompts = {terms[item].group_id: terms[item].prompt_length for item in members}
    return total - sum(terms[item].prompt_length for item in members) + sum(prompts.values())


def pack(
    terms: Sequence[LossTerms], *, ranks: int, micro_batch_tokens: int, share: bool = True, together: bool = False
) -> list[list[MicroBatch]]:
    """Pack sequences into micro-batches: ``result[rank][i]``, the same number of micro-batches for every rank.

    ``share`` computes the prompt of a group once in each micro-batch; ``together`` keeps every group in one micro-batch, for losses that
    compare its sequences. Raises ConfigError when a sequence (a group) alone is longer than ``micro_batch_tokens``.
    """
    _check_lengths(terms, micro_batch_tokens, share, together)
    per_rank = max(1, -(-row_length(terms, range(len(terms)), share) // (ranks * micro_batch_tokens)))
    while True:
        bins = balance(terms, ranks * per_rank, share, together)
        if max(row_length(terms, members, share) for members in bins) <= micro_batch_tokens:
            break
        per_rank += 1
    return [[build(terms, bins[i * ranks + rank], share) for i in range(per_rank)] for rank in range(ranks)]


def _check_lengths(terms: Sequence[LossTerms], micro_batch_tokens: int, share: bool, together: bool) -> None:
    units: dict[str, list[int]] = {}
    for item, term in enumerate(terms):
        units.setdefault(term.group_id if together else str(item), []).append(item)
    lengths = [(row_length(terms, members, share), members[0]) for members in units.values()]
    longest, first = max(lengths, default=(0, 0))
    if longest > micro_batch_tokens:
        what = (
            f"the sequences of {terms[first].group_id}, which are compared with one another, have"
            if together
            else (f"trajectory {terms[first].trajectory_id} has")
        )
        raise ConfigError(
            f"{what} {longest} tokens, more than training.micro_batch_tokens={micro_batch_tokens}; raise it to at least {longest}"
        )


def build(terms: Sequence[LossTerms], members: Sequence[int], share: bool = True) -> MicroBatch:
    """Lay the chosen sequences into one row."""
    chosen = [terms[item] for item in members]
    trained = [np.flatnonzero(term.trainable) for term in chosen]
    tokens: list[np.ndarray] = [np.zeros(0, np.int64)]
    positions: list[np.ndarray] = [np.zeros(0, np.int64)]
    rows: list[np.ndarray] = []
    prompts: dict[str, tuple[int, np.ndarray]] = {}
    end = 0
    for term, targets in zip(chosen, trained, strict=True):
        if len(targets) and not term.scored and targets[0] < max(1, term.prompt_length):
            raise AssertionError(f"{term.trajectory_id}: a token of the prompt, or one without context, cannot be trained")
        shared = term.prompt_length if share and term.group_id in prompts else 0
        start, prompt = prompts.setdefault(term.group_id, (end, term.tokens[: term.prompt_length]))
        if shared and not np.array_equal(prompt, term.tokens[:shared]):
            raise AssertionError(f"{term.trajectory_id}: its prompt differs from that of its group {term.group_id}")
        own = np.arange(shared, len(term.tokens))
        tokens.append(term.tokens[shared:].astype(np.int64))
        positions.append(own)
        rows.append(np.concatenate([np.arange(start, start + shared), end + own - shared]))
        end += len(own)

    def gather(name: str, dtype: type) -> np.ndarray:
        parts = [np.asarray(getattr(term, name))[targets] for term, targets in zip(chosen, trained, strict=True)]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    def gather_optional(name: str) -> np.ndarray | None:
        # The same choice on every rank and micro-batch, empty ones too: it is a property of the whole list.
        return gather(name, np.float32) if terms and getattr(terms[0], name) is not None else None

    def gather_column(name: str) -> np.ndarray:
        parts = [term.columns[name][targets] for term, targets in zip(chosen, trained, strict=True)]
        return np.concatenate([np.zeros(0, np.float32), *parts]).astype(np.float32)

    none = [np.zeros(0, np.int64)]
    # The hidden state before a token predicts it; a score is of the state that has seen it.
    before = 0 if terms and terms[0].scored else 1
    return MicroBatch(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        lengths=np.array([len(term.tokens) for term in chosen], dtype=np.int64),
        index=np.concatenate([*none, *rows]).astype(np.int64),
        predictor=np.concatenate([*none, *(row[targets - before] for row, targets in zip(rows, trained, strict=True))]).astype(np.int64),
        target=gather("tokens", np.int64),
        sequence=np.repeat(np.arange(len(chosen)), [len(targets) for targets in trained]).astype(np.int64),
        weight=gather("weight", np.float32),
        advantage=gather_optional("advantage"),
        parity_logprobs=gather_optional("parity_logprobs"),
        old_logprobs=gather_optional("old_logprobs"),
        reference_logprobs=gather_optional("reference_logprobs"),
        members=tuple(members),
        columns={name: gather_column(name) for name in (terms[0].columns if terms else ())},
        scalars={name: np.array([term.scalars[name] for term in chosen], np.float32) for name in (terms[0].scalars if terms else ())},
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
