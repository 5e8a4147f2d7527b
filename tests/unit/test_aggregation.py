"""What a token weighs, and the one denominator of an optimizer step."""

from __future__ import annotations

import numpy as np
import pytest

from rlpost.algorithms.aggregation import token_weights

TEN_AND_SIX = [np.r_[np.zeros(3, bool), np.ones(10, bool)], np.r_[np.zeros(5, bool), np.ones(6, bool)]]


def shares(masks: list[np.ndarray], aggregation: str, constant: int = 20, groups: list[str] | None = None) -> list[np.ndarray]:
    """Each token's share in the loss; by default all sequences are of one prompt."""
    weights, denominator = token_weights(masks, aggregation, constant, groups or ["prompt"] * len(masks))
    return [weight / denominator for weight in weights]


@pytest.mark.parametrize(
    ("aggregation", "first", "second"),
    [
        ("token_mean", 1 / 16, 1 / 16),  # not 1/20 and 1/12, which a mean of means gives
        ("sequence_mean", 1 / 20, 1 / 12),
        ("constant", 1 / 40, 1 / 40),
        ("prompt_mean", 1 / 16, 1 / 16),
    ],
)
def test_ten_and_six_tokens_weigh_what_the_aggregation_says(aggregation: str, first: float, second: float) -> None:
    ten, six = shares(TEN_AND_SIX, aggregation)
    np.testing.assert_allclose(ten, [0] * 3 + [first] * 10, rtol=1e-6)
    np.testing.assert_allclose(six, [0] * 5 + [second] * 6, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean"])
def test_shares_of_a_mean_add_up_to_one_whatever_is_masked(aggregation: str) -> None:
    """A mask in the numerator but not in the denominator, or the reverse, breaks this."""
    half = [mask & (np.arange(len(mask)) % 2 == 0) for mask in TEN_AND_SIX]
    for masks in (TEN_AND_SIX, half, [TEN_AND_SIX[0], np.zeros(7, bool)]):
        assert sum(share.sum() for share in shares(masks, aggregation)) == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "prompt_mean"])
def test_tool_tokens_and_padding_to_the_right_change_nothing(aggregation: str) -> None:
    """A gap of tool tokens between two turns, and a longer row, weigh nothing and are not counted."""
    gap = [np.insert(mask, 6, [False] * 4) for mask in TEN_AND_SIX]
    wide = [np.r_[mask, np.zeros(9, bool)] for mask in TEN_AND_SIX]
    plain = shares(TEN_AND_SIX, aggregation)
    for other in (shares(gap, aggregation), shares(wide, aggregation)):
        for before, after in zip(plain, other, strict=True):
            np.testing.assert_array_equal(before[before > 0], after[after > 0])


@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant"])
def test_a_sequence_without_trained_tokens_is_not_counted_as_a_sequence(aggregation: str) -> None:
    assert token_weights([*TEN_AND_SIX, np.zeros(4, bool)], aggregation, 20)[1] == token_weights(TEN_AND_SIX, aggregation, 20)[1]


def test_prompts_weigh_the_same_whatever_number_and_length_their_samples_have() -> None:
    """Two prompts in the order a, b, a; b's ten tokens weigh as much as a's six and two together. A prompt with nothing trained is none."""
    masks = [TEN_AND_SIX[1], TEN_AND_SIX[0], np.array([False, True, True]), np.zeros(4, bool)]
    found = shares(masks, "prompt_mean", groups=["a", "b", "a", "c"])
    assert [share.max() for share in found] == pytest.approx([1 / 16, 1 / 20, 1 / 16, 0.0])
    assert found[0].sum() + found[2].sum() == pytest.approx(0.5)


def test_prompt_mean_without_groups_is_an_error() -> None:
    with pytest.raises(AssertionError, match="group of each sequence"):
        token_weights(TEN_AND_SIX, "prompt_mean", 1)


def test_unknown_aggregation_is_an_error() -> None:
    with pytest.raises(AssertionError, match="mean_of_means"):
        token_weights(TEN_AND_SIX, "mean_of_means", 1)
