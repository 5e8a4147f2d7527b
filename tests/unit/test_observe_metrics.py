"""The catalogue of metrics, and the figures computed from a step's groups."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpost.observe import METRICS, PhaseClock, markdown_table, read_metrics, summarise_rollouts, validate_record
from rlpost.types import ConfigError, Failure, Group, Prompt, Trajectory

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def trajectory(name: str, *, prompt: int = 2, versions: tuple[int, ...] = (3, 3), **other: Any) -> Trajectory:
    """A trajectory of ``prompt`` prompt tokens and one sampled token for each entry of ``versions``."""
    sampled = np.array([False] * prompt + [True] * len(versions))
    return Trajectory(
        trajectory_id=name,
        group_id="g",
        prompt_id="p",
        tokens=np.arange(len(sampled)),
        trainable=sampled,
        logprobs=np.where(sampled, -0.5, np.nan),
        versions=np.array([-1] * prompt + list(versions)),
        prompt_length=prompt,
        **other,
    )


def group(*trajectories: Trajectory) -> Group:
    return Group(group_id="g", index=0, prompt=Prompt(prompt_id="p", text="2+2="), trajectories=trajectories)


def failure(kind: Any) -> Failure:
    return Failure(kind=kind, where="f", message="m")


def test_docs_hold_the_catalogue_as_it_is() -> None:
    assert markdown_table() in DOCS.read_text(encoding="utf-8"), "docs/metrics.md is out of date: paste markdown_table() into it"


def test_every_metric_is_documented_with_a_unit_in_one_line_that_a_table_can_hold() -> None:
    for metric in METRICS.values():
        assert metric.doc.endswith(".") and metric.unit and not set("|\n") & set(metric.doc)


@pytest.mark.parametrize(
    "name", ["step", "reward/exact_match/mean", "reward/my/own/mean", "memory/trainer_peak_gib", "reward_metrics/length"]
)
def test_documented_names_pass(name: str) -> None:
    validate_record({name: 1.0})


@pytest.mark.parametrize("name", ["reward/exact_match", "reward//mean", "train/loss2", "xtrain/loss", "memory/_peak_gib", "time/generate"])
def test_undocumented_names_are_named(name: str) -> None:
    with pytest.raises(AssertionError, match=f"'{name}'"):
        validate_record({"step": 1, name: 1.0})


def test_what_the_package_itself_emits_is_documented() -> None:
    clock = PhaseClock()
    clock.start_step()
    validate_record(clock.finish_step())
    parts: dict[str, Any] = {"reward_parts": {"exact": 1.0}, "reward_metrics": {"length": 3.0}}
    validate_record(summarise_rollouts([group(trajectory("a", reward=1.0, **parts))], policy_version=3, generate_s=1.0))


def test_a_failed_reward_is_counted_and_is_not_a_zero_in_the_mean() -> None:
    record = summarise_rollouts(
        [
            group(trajectory("a", reward=1.0), trajectory("b", failure=failure("raised"))),
            group(
                trajectory("c", reward=0.0), trajectory("d", failure=failure("not_scorable")), trajectory("e", failure=failure("timeout"))
            ),
            group(trajectory("f", reward=0.8)),
        ]
    )
    assert record["reward/mean"] == pytest.approx(0.6)
    assert record["reward/std"] == pytest.approx(math.sqrt((0.16 + 0.36 + 0.04) / 3))
    assert record["reward/failed"] == 2
    assert record["reward/not_scorable"] == 1


def test_part_means_leave_out_the_trajectories_that_the_part_did_not_score() -> None:
    record = summarise_rollouts(
        [
            group(
                trajectory("a", reward=1.0, reward_parts={"exact": 1.0, "format": 0.5}, reward_metrics={"length": 4}),
                trajectory("b", failure=failure("raised"), reward_parts={"exact": None, "format": 0.25}),
            )
        ]
    )
    assert record["reward/exact/mean"] == 1.0
    assert record["reward/format/mean"] == 0.375
    assert record["reward_metrics/length"] == 4


def test_nothing_scored_is_no_number_and_not_zero() -> None:
    record = summarise_rollouts([group(trajectory("a", failure=failure("raised"), reward_parts={"exact": None}))])
    assert math.isnan(record["reward/mean"]) and math.isnan(record["reward/std"]) and math.isnan(record["reward/exact/mean"])
    empty = summarise_rollouts([], policy_version=1, generate_s=0.0)
    assert math.isnan(empty["reward/mean"])
    assert (empty["rollout/tokens"], empty["rollout/tokens_per_s"], empty["rollout/staleness_max"]) == (0, 0, 0)


def test_token_counts_are_of_sampled_tokens_only() -> None:
    record = summarise_rollouts(
        [
            group(
                trajectory("a", prompt=5, versions=(1, 1, 1), turns=1, prompt_tokens_requested=5, prompt_tokens_cached=0),
                trajectory("b", prompt=5, versions=(1,), turns=3, truncated=True, prompt_tokens_requested=19, prompt_tokens_cached=15),
            )
        ],
        generate_s=0.5,
        groups_dropped=2,
    )
    assert record["rollout/tokens"] == 4
    assert record["rollout/tokens_per_s"] == 8
    assert (record["rollout/prompt_tokens"], record["rollout/cached_prompt_tokens"]) == (24, 15)
    assert (record["rollout/truncated_fraction"], record["rollout/turns_mean"], record["rollout/groups_dropped"]) == (0.5, 2, 2)


def test_staleness_looks_at_sampled_tokens_and_at_the_version_trained_on() -> None:
    groups = [group(trajectory("a", versions=(2, 4)), trajectory("b", versions=(4, 4)))]
    record = summarise_rollouts(groups, policy_version=4)
    assert (record["rollout/staleness_max"], record["rollout/staleness_mean"]) == (2, 0.5)
    assert "rollout/staleness_max" not in summarise_rollouts(groups)
    with pytest.raises(AssertionError, match="sampled by version 4, but the trainer is at version 3"):
        summarise_rollouts(groups, policy_version=3)


def test_read_metrics_survives_a_torn_line_and_merges_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [{"step": 1, "reward/mean": 0.1}, {"step": 0, "evaluate/reward": 0.3}, {"step": 1, "evaluate/reward": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 2, "rew', encoding="utf-8")
    assert read_metrics(tmp_path) == [
        {"step": 0, "evaluate/reward": 0.3},
        {"step": 1, "reward/mean": 0.1, "evaluate/reward": 0.4},
    ]
    assert "metrics.jsonl:4" in caplog.text
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        read_metrics(tmp_path / "elsewhere")
