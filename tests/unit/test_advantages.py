"""Group-relative advantages against independent statements of the papers' formulas."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectories import group

from rlpost.algorithms.advantages import ADVANTAGES, group_mean, group_std
from rlpost.algorithms.grpo import Grpo
from rlpost.config.schema import AlgorithmConfig

BOTH = pytest.mark.parametrize("name", sorted(ADVANTAGES))
rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=0, max_size=9)


def expected(name: str, rewards: list[float | None]) -> list[float]:
    """GRPO, section 4.1.2, and Dr.GRPO, eq. 3, over the scored samples, in plain Python."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(scored)
    scale = statistics.stdev(scored) + 1e-6 if name == "group_std" else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]


@BOTH
@settings(max_examples=50, deadline=None)
@given(rewards=rewards_of_a_group)
def test_advantages_are_the_papers_formula_over_scored_samples(name: str, rewards: list[float | None]) -> None:
    got = ADVANTAGES[name](rewards)
    assert got.shape == (len(rewards),)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, expected(name, rewards), atol=1e-6, rtol=1e-6)


def test_a_reward_of_none_is_not_zero_and_not_in_the_baseline() -> None:
    """[1, None, 0, 1]: the baseline is 2/3; with None as 0 it would be 1/2."""
    np.testing.assert_allclose(group_mean([1.0, None, 0.0, 1.0]), [1 / 3, 0, -2 / 3, 1 / 3])
    np.testing.assert_allclose(group_std([1.0, None, 0.0, 1.0])[[0, 2, 3]], group_std([1.0, 0.0, 1.0]))
    assert group_std([1.0, None, 0.0, 1.0])[1] == 0.0


@BOTH
@pytest.mark.parametrize("rewards", [[0.4] * 4, [0.1 + 0.2, 0.3, 0.3], [1.0], [None, 1.0, None], [None, None], [0.0, 0.0, None]])
def test_a_group_without_variance_has_no_advantage(name: str, rewards: list[float | None]) -> None:
    """Not even the rounding of a mean, blown up by a tiny standard deviation."""
    assert np.abs(ADVANTAGES[name](rewards)).max() < 1e-6


def test_group_std_does_not_depend_on_the_scale_of_rewards_and_group_mean_does() -> None:
    rewards = [0.0, 1.0, 3.0]
    np.testing.assert_allclose(group_std([100 * r for r in rewards]), group_std(rewards), rtol=1e-4)
    np.testing.assert_allclose(group_mean([100 * r for r in rewards]), 100 * group_mean(rewards))


def grpo(**settings: object) -> Grpo:
    return Grpo(AlgorithmConfig(**settings))  # type: ignore[arg-type]


def test_grpo_uses_the_configured_advantage() -> None:
    some = group(0, [1.0, None, 0.0, 1.0])
    for name, function in ADVANTAGES.items():
        np.testing.assert_array_equal(grpo(advantage=name).advantages(some), function([1.0, None, 0.0, 1.0]))


@pytest.mark.parametrize("rewards", [[0.4] * 4, [0.4, None, 0.4], [0.4], [None, None]])
@pytest.mark.parametrize("skip", [True, False])
def test_zero_variance_groups_leave_the_loss_only_when_asked(rewards: list[float | None], skip: bool) -> None:
    """All scores 0.4: a filter on the mean would let them pass."""
    kept = grpo(skip_zero_variance=skip).keep(group(0, rewards))
    assert len(kept) == (0 if skip else sum(reward is not None for reward in rewards))


def test_a_group_with_variance_stays_when_zero_variance_groups_are_skipped() -> None:
    kept = grpo(skip_zero_variance=True).keep(group(0, [0.4, None, 0.4, 0.5]))
    assert [t.trajectory_id for t in kept] == ["g0.0", "g0.2", "g0.3"]


def test_components_follow_the_configuration() -> None:
    assert [c.term for c in grpo().components()] == ["policy_clip"]
    parts = {c.term: c for c in grpo(kl_coefficient=0.1, kl_estimator="k2", entropy_coefficient=0.01, clip_high=0.3).components()}
    assert parts["policy_clip"].parameters == {"clip_low": 0.2, "clip_high": 0.3}
    assert (parts["kl"].coefficient, parts["kl"].parameters) == (0.1, {"estimator": "k2"})
    assert parts["entropy"].coefficient == 0.01
