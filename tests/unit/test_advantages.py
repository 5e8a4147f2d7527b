"""Advantages of groups, tokens and batches against independent statements of the papers' formulas, and fixtures worked out by hand."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_targets import close

from rlpost.algorithms.advantages import (
    ADVANTAGES,
    discounted_returns,
    gae,
    greedy,
    group_mean,
    group_std,
    leave_one_out,
    maxrl,
    normalise,
)
from rlpost.types import RlpostError

EVERY = pytest.mark.parametrize("name", sorted(ADVANTAGES))
rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(0, 100, allow_subnormal=False)), min_size=0, max_size=9)

# ---- groups --------------------------------------------------------------------------------------------------------


def expected(name: str, rewards: list[float | None]) -> list[float]:
    """Over the scored samples, in plain Python. One scored sample has nothing to be compared with."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(scored)

    def worth(reward: float) -> float:
        if name == "leave_one_out":
            return reward - (sum(scored) - reward) / (len(scored) - 1)
        if name == "maxrl":
            return (reward - mean) / mean if mean else 0.0
        return (reward - mean) / (statistics.stdev(scored) + 1e-6 if name == "group_std" else 1.0)

    return [0.0 if reward is None else worth(reward) for reward in rewards]


@EVERY
@settings(max_examples=50, deadline=None)
@given(rewards=rewards_of_a_group)
def test_advantages_are_the_papers_formula_over_scored_samples(name: str, rewards: list[float | None]) -> None:
    got = ADVANTAGES[name](rewards)
    assert got.shape == (len(rewards),)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected(name, rewards), atol=1e-6, rtol=1e-6)


@EVERY
def test_a_reward_of_none_is_not_zero_and_not_in_the_baseline(name: str) -> None:
    """[1, None, 0, 1]: the baseline is 2/3; with None as 0 it would be 1/2."""
    with_none = ADVANTAGES[name]([1.0, None, 0.0, 1.0])
    close(with_none[[0, 2, 3]], ADVANTAGES[name]([1.0, 0.0, 1.0]))
    assert with_none[1] == 0.0


def test_group_advantages_by_hand() -> None:
    close(group_mean([1.0, None, 0.0, 1.0]), [1 / 3, 0, -2 / 3, 1 / 3])
    close(group_std([1.0, 0.0, 1.0]), np.array([1, -2, 1]) / 3**0.5, 1e-5)
    close(leave_one_out([1.0, 0.0, 1.0]), [0.5, -1.0, 0.5])  # 1 - (0 + 1) / 2, 0 - (1 + 1) / 2
    close(leave_one_out([3.0, 1.0]), [2.0, -2.0])
    close(maxrl([1.0, 0.0, 0.0, 0.0]), [3.0, -1.0, -1.0, -1.0])  # one success in four: 1 / (1/4) - 1


@EVERY
@pytest.mark.parametrize("rewards", [[0.4] * 4, [0.1 + 0.2, 0.3, 0.3], [1.0], [None, 1.0, None], [None, None], [0.0, 0.0, None], []])
def test_a_group_without_variance_has_no_advantage(name: str, rewards: list[float | None]) -> None:
    """Not even the rounding of a mean, blown up by a tiny standard deviation; nor one sample alone, nor no success at all."""
    assert np.abs(ADVANTAGES[name](rewards)).max(initial=0.0) < 1e-6


def test_group_std_does_not_depend_on_the_scale_of_rewards_and_group_mean_does() -> None:
    rewards = [0.0, 1.0, 3.0]
    close(group_std([100 * r for r in rewards]), group_std(rewards), 1e-4)
    close(group_mean([100 * r for r in rewards]), 100 * group_mean(rewards))


def test_maxrl_refuses_rewards_below_zero_which_would_turn_its_sign() -> None:
    """[-1, -3]: the mean is -2, and dividing by it would make the worse sample the better one."""
    with pytest.raises(RlpostError, match=r"algorithm\.advantage=maxrl.*found -3"):
        maxrl([-1.0, None, -3.0])


def test_maxrl_averages_the_score_over_successes() -> None:
    """Its gradient, mean of A_i s_i, is the mean score of the successes less the mean score (MaxRL, with its control variate)."""
    rewards, scores = [1.0, 0.0, 1.0, 0.0, 0.0], np.array([0.3, -1.0, 2.0, 0.7, 0.1])
    assert np.mean(maxrl(rewards) * scores) == pytest.approx(np.mean(scores[[0, 2]]) - scores.mean())


def test_greedy_compares_with_the_greedy_sample_even_alone() -> None:
    close(greedy([1.0, None, 0.25], 0.5), [0.5, 0.0, -0.25])
    close(greedy([1.0], 1.0), [0.0])


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_gae_by_hand_with_a_gap_of_tool_tokens() -> None:
    """Two sampled tokens with two tool tokens between them, values 0.5, reward 1 at the end, gamma 1, lambda 0.9.

    The last has 1 - 0.5; the first 0.5 - 0.5 + 0.9 * 0.5 = 0.45. Were the tool tokens (values 0) steps too, it would have 0.27.
    """
    sampled = np.array([True, False, False, True])
    rewards, values = np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.5, 0.0, 0.0, 0.5])
    advantages, returns = gae(rewards[sampled], values[sampled], 1.0, 0.9)
    close(advantages, [0.45, 0.5])
    close(returns, [0.95, 1.0])
    assert gae(rewards, values, 1.0, 0.9)[0][0] == pytest.approx(0.2695)


def test_gae_by_hand_with_a_discount_and_a_reward_in_between() -> None:
    """gamma 0.5, lambda 0.5: deltas 1 + 0.5*4 - 2 = 1, 0 + 0.5*1 - 4 = -3.5, 2 - 1 = 1; each carries a quarter of the next."""
    advantages, returns = gae(np.array([1.0, 0.0, 2.0]), np.array([2.0, 4.0, 1.0]), 0.5, 0.5)
    close(advantages, [1 - 3.25 / 4, -3.25, 1.0])
    close(returns, [2.1875, 0.75, 2.0])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_gae_is_the_sum_of_discounted_errors(gamma: float, lam: float) -> None:
    """Schulman et al. 2016, eq. 16, as its double sum; nothing follows the last token."""
    random = np.random.default_rng(0)
    rewards, values = random.normal(size=8), random.normal(size=8)
    after = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * after[t] - values[t] for t in range(8)]
    expected_advantages = [sum((gamma * lam) ** k * deltas[t + k] for k in range(8 - t)) for t in range(8)]
    advantages, returns = gae(rewards, values, gamma, lam)
    close(advantages, expected_advantages)
    close(returns, advantages + values)
    if lam == 1.0:
        close(returns, discounted_returns(rewards, gamma))


def test_discounted_returns_by_hand() -> None:
    close(discounted_returns(np.array([1.0, 0.0, 4.0]), 0.5), [2.0, 2.0, 4.0])


def test_a_trajectory_without_sampled_tokens_has_no_advantages() -> None:
    nothing = np.zeros(0)
    assert [len(part) for part in gae(nothing, nothing, 1.0, 0.9)] == [0, 0]
    assert len(discounted_returns(nothing, 1.0)) == 0


# ---- batches -------------------------------------------------------------------------------------------------------


def test_normalising_is_over_all_entries_and_not_a_mean_of_means() -> None:
    """1 and 3 numbers: the mean is that of the four."""
    first, second = normalise([np.array([4.0]), np.array([0.0, 2.0, 2.0])])
    everything = np.concatenate([first, second])
    assert everything.mean() == pytest.approx(0.0, abs=1e-12)
    assert everything.std() == pytest.approx(1.0, abs=1e-5)
    close(everything, (np.array([4.0, 0.0, 2.0, 2.0]) - 2.0) / 2**0.5, 1e-5)


@pytest.mark.parametrize("values", [[[0.1 + 0.2], [0.3, 0.3]], [[7.0]], [[0.0, 0.0], []]])
def test_normalising_equal_numbers_gives_zeros(values: list[list[float]]) -> None:
    found = normalise([np.array(one) for one in values])
    assert [len(one) for one in found] == [len(one) for one in values]
    assert max(np.abs(one).max(initial=0.0) for one in found) < 1e-6


def test_normalising_nothing_is_nothing() -> None:
    assert normalise([]) == []
    assert [len(one) for one in normalise([np.zeros(0)])] == [0]
