"""Packing: which hidden state predicts which token, equal micro-batch counts, nothing lost, nothing guessed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.training.packing import balance, build, occupancy, pack, unpack
from rlpost.types import ConfigError, LossTerms


def terms(
    mask: Sequence[int],
    *,
    name: str = "t",
    tokens: Sequence[int] | np.ndarray | None = None,
    base: float = 0.0,
    group: str | None = None,
    prompt_length: int = 0,
    old_logprobs: np.ndarray | None = None,
) -> LossTerms:
    """One sequence; weights, advantages and logprobs are distinct numbers, so that a shift shows."""
    count = len(mask)
    numbers = base + np.arange(count, dtype=np.float32)
    trainable = np.asarray(mask, bool)
    return LossTerms(
        trajectory_id=name,
        group_id=group or f"group of {name} {base}",
        prompt_length=prompt_length,
        tokens=np.asarray(tokens if tokens is not None else 100 * base + np.arange(count), np.int32),
        trainable=trainable,
        weight=trainable.astype(np.float32),
        advantage=numbers + 0.5,
        parity_logprobs=-numbers,
        old_logprobs=old_logprobs,
    )


def of_lengths(lengths: Sequence[int]) -> list[LossTerms]:
    return [terms([0] + [1] * (length - 1), name=f"t{i}", base=float(i)) for i, length in enumerate(lengths)]


# ---- off by one ----------------------------------------------------------------------------------------------------


def test_hand_computed_row_of_two_sequences_with_a_tool_gap() -> None:
    """Each trained token is predicted by the hidden state one before it, in its own sequence, also after tool tokens."""
    first = terms([0, 1, 0, 0, 1, 1], tokens=[10, 11, 12, 13, 14, 15])
    second = terms([0, 0, 1], tokens=[20, 21, 22], base=50.0)
    row = build([first, second], [0, 1])
    assert row.tokens.tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert row.lengths.tolist() == [6, 3]
    assert row.target.tolist() == [11, 14, 15, 22]
    assert row.predictor.tolist() == [0, 3, 4, 7]
    assert row.sequence.tolist() == [0, 0, 0, 1]
    assert row.advantage is not None and row.advantage.tolist() == [1.5, 4.5, 5.5, 52.5]
    assert row.parity_logprobs is not None and row.parity_logprobs.tolist() == [-1.0, -4.0, -5.0, -52.0]
    assert row.old_logprobs is None


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), ranks=st.integers(1, 3), seed=st.integers(0, 99))
def test_packed_logprobs_equal_those_of_each_sequence_alone(lengths: list[int], ranks: int, seed: int) -> None:
    """A model whose prediction is a known table of (previous token, token): packed and unpacked agree token by token."""
    random = np.random.default_rng(seed)
    table = random.normal(size=(30, 30)).astype(np.float32)
    sequences = [terms([0, *random.integers(0, 2, length - 1)], tokens=random.integers(0, 30, length)) for length in lengths]
    packed = pack(sequences, ranks=ranks, micro_batch_tokens=64)
    values = [[table[micro.tokens[micro.predictor], micro.target] for micro in micros] for micros in packed]
    for term, got in zip(sequences, unpack(packed, values, sequences), strict=True):
        alone = np.full(len(term.tokens), np.nan, np.float32)
        for t in np.flatnonzero(term.trainable):
            alone[t] = table[term.tokens[t - 1], term.tokens[t]]
        np.testing.assert_array_equal(got, alone)


# ---- masks from values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [0, 7])
def test_masks_do_not_come_from_token_values_when_padding_is_the_end_token(eos: int) -> None:
    """Real end tokens inside the prompt are not trained, those that were sampled are, with whatever id."""
    row = build([terms([0, 0, 1, 1], tokens=[eos, eos, eos, eos]), terms([0, 1], tokens=[eos, 5])], [0, 1])
    assert row.predictor.tolist() == [1, 2, 4]
    assert row.target.tolist() == [eos, eos, 5]
    assert row.lengths.tolist() == [4, 2]


def test_training_the_first_token_is_an_error_for_nothing_predicts_it() -> None:
    with pytest.raises(AssertionError, match="t: a token of the prompt"):
        build([terms([1, 1])], [0])


# ---- counts --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), min_size=0, max_size=30), ranks=st.integers(1, 5))
def test_every_rank_gets_the_same_number_of_micro_batches_and_each_sequence_exactly_once(lengths: list[int], ranks: int) -> None:
    """Different numbers would hang the collectives for ever."""
    sequences = of_lengths(lengths)
    packed = pack(sequences, ranks=ranks, micro_batch_tokens=64)
    assert len(packed) == ranks
    assert len({len(micros) for micros in packed}) == 1
    assert len(packed[0]) >= 1
    members = [member for micros in packed for micro in micros for member in micro.members]
    assert sorted(members) == list(range(len(lengths)))
    for micros in packed:
        for micro in micros:
            assert len(micro.tokens) == sum(lengths[member] for member in micro.members) <= 64
            assert len(micro.target) == len(micro.predictor) == len(micro.weight)


def test_skewed_lengths_on_two_ranks_are_balanced() -> None:
    """One long sequence and many short ones: both ranks run as many micro-batches, and nearly as many tokens."""
    packed = pack(of_lengths([60] + [6] * 10), ranks=2, micro_batch_tokens=64)
    assert [len(micros) for micros in packed] == [1, 1]
    assert sorted(len(micros[0].tokens) for micros in packed) == [60, 60]
    assert occupancy(packed) == 1.0


def test_a_rank_without_sequences_still_gets_an_empty_micro_batch() -> None:
    packed = pack(of_lengths([5]), ranks=2, micro_batch_tokens=8)
    empty = next(micros[0] for micros in packed if not micros[0].members)
    assert all(len(getattr(empty, name)) == 0 for name in ("tokens", "positions", "lengths", "predictor", "target", "sequence", "weight"))
    assert occupancy(packed) == 0.5


@pytest.mark.parametrize("given_", [True, False])
def test_optional_logprobs_are_present_everywhere_or_nowhere_also_in_empty_micro_batches(given_: bool) -> None:
    """A loss that differs between ranks would not be one loss."""
    old = np.array([np.nan, -0.5, -0.25], np.float32) if given_ else None
    packed = pack([terms([0, 1, 1], old_logprobs=old)], ranks=2, micro_batch_tokens=8)
    assert {micro.old_logprobs is not None for micros in packed for micro in micros} == {given_}
    assert all(micro.reference_logprobs is None for micros in packed for micro in micros)
    if given_:
        old = next(m for micros in packed for m in micros if m.members).old_logprobs
        assert old is not None and old.tolist() == [-0.5, -0.25]


def test_a_sequence_longer_than_a_micro_batch_is_refused_with_the_key_to_change() -> None:
    with pytest.raises(ConfigError, match=r"t1 has 9 tokens.*training\.micro_batch_tokens=8.*at least 9"):
        pack(of_lengths([3, 9]), ranks=1, micro_batch_tokens=8)


def test_balance_is_the_same_every_time_and_puts_long_items_apart() -> None:
    items = of_lengths([9, 1, 9, 1])
    assert balance(items, 2, share=True) == balance(items, 2, share=True) == [[0, 1], [2, 3]]


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), ranks=st.integers(1, 3), limit=st.sampled_from([50, 64, 200, 5000]))
def test_unpack_undoes_pack(lengths: list[int], ranks: int, limit: int) -> None:
    sequences = of_lengths(lengths)
    packed = pack(sequences, ranks=ranks, micro_batch_tokens=limit)
    back = unpack(packed, [[np.asarray(micro.advantage) for micro in micros] for micros in packed], sequences)
    for term, values in zip(sequences, back, strict=True):
        np.testing.assert_array_equal(values, np.where(term.trainable, np.asarray(term.advantage), np.nan).astype(np.float32))


# ---- shared prompts ------------------------------------------------------------------------------------------------


def group_of(answers: Sequence[int], prompt: int, name: str = "g") -> list[LossTerms]:
    """A group whose samples have ``prompt`` equal tokens and these numbers of own ones."""
    samples = []
    for i, n in enumerate(answers):
        tokens = [*range(prompt), *range(100 * (i + 1), 100 * (i + 1) + n)]
        samples.append(terms([0] * prompt + [1] * n, name=f"{name}{i}", group=name, prompt_length=prompt, base=float(i), tokens=tokens))
    return samples


def test_a_prompt_is_in_the_row_once_and_each_first_answer_token_is_predicted_by_its_last_token() -> None:
    row = build(group_of([2, 1], prompt=3), [0, 1])
    assert row.tokens.tolist() == [0, 1, 2, 100, 101, 200]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert row.lengths.tolist() == [5, 4]
    assert row.index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert row.predictor.tolist() == [2, 3, 2]
    assert row.target.tolist() == [100, 101, 200]


def test_without_sharing_the_row_holds_every_prompt() -> None:
    row = build(group_of([2, 1], prompt=3), [0, 1], share=False)
    assert row.tokens.tolist() == [0, 1, 2, 100, 101, 0, 1, 2, 200]
    assert row.index.tolist() == list(range(9))
    assert row.predictor.tolist() == [2, 3, 7]


def test_a_group_whose_prompts_differ_is_refused() -> None:
    first, second = group_of([2, 2], prompt=3)
    changed = dataclasses.replace(second, tokens=second.tokens + 1)
    with pytest.raises(AssertionError, match="prompt differs"):
        build([first, changed], [0, 1])


def test_groups_stay_together_where_that_is_even_and_are_split_where_it_is_not() -> None:
    together = group_of([5, 5], 20, "a") + group_of([5, 5], 20, "b")
    assert balance(together, 2, share=True) == [[0, 1], [2, 3]]
    assert all(balance(group_of([30, 30, 30, 30], 2), 2, share=True))


def test_the_limit_counts_a_shared_prompt_once() -> None:
    group = group_of([4] * 8, prompt=32)
    assert len(pack(group, ranks=1, micro_batch_tokens=64)[0]) == 1
    assert len(pack(group, ranks=1, micro_batch_tokens=64, share=False)[0]) > 1
