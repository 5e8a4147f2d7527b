"""Rollouts one version ahead on two engines, two optimizer steps a batch, KL to the initial weights, an entropy bonus."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from training_runs import Command, Finished, finished_run

from rlpost.models.embedded import embedded_rows

STEPS, PROMPTS, SAMPLES = 8, 12, 6
BLOCK = 32
"""Tokens that the engine's prefix cache shares at once."""

NO_DELTAS = "sync/changed_fraction"
"""Only a run with deltas measures it."""

PARITY = {"parity/logprob_abs_mean", "parity/logprob_abs_max"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    command = Command(tmp_path_factory.mktemp("stale_rollouts"))
    rows = embedded_rows("sort5")
    # Each prompt begins with solved items, its own, so that it fills more than one block of the prefix cache and shares none.
    prompts = [
        {"prompt": "".join(f"{row['prompt']}{row['answer']}" for row in rows[3 * i : 3 * i + 2]) + last["prompt"], "answer": last["answer"]}
        for i, last in enumerate(rows[1000 : 1000 + STEPS * PROMPTS * 2])
    ]
    (command.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (command.directory / "variety.py").write_text("def variety(prompt, completion):\n    return len(set(completion)) / 7\n")
    return finished_run(
        command, "config=grpo_tiny", "data={train: rows.jsonl, max_prompt_tokens: 48}", "evaluation.every=0",
        f"schedule.prompts_per_step={PROMPTS}", f"algorithm.group_size={SAMPLES}", "schedule.max_staleness=1", "engine.count=2",
        "algorithm.minibatches=2", "training.optimizer.lr=2.0e-4", "algorithm.kl_coefficient=0.05",
        "algorithm.entropy_coefficient=0.01", "checkpoint.at_end=false",
        "rewards=[{function: 'variety.py:variety'}]", steps=STEPS,
    )  # fmt: skip


def test_no_token_is_older_than_the_bound_and_rollouts_do_run_ahead(run: Finished) -> None:
    stalest = [record["rollout/staleness_max"] for record in run.records]
    assert max(stalest) == 1 and stalest[0] == 0
    for step, rows in run.rollouts.items():
        versions = {version for row in rows for version in row["versions"] if version >= 0}
        assert versions <= {step - 1, step - 2} and min(versions) >= 0
        stale = max(step - 1 - version for version in versions)
        assert stale == stalest[step - 1], "the metric and the tokens' own versions tell the same"


def test_every_group_is_whole_and_none_is_trained_twice(run: Finished) -> None:
    groups = Counter(row["group_id"] for rows in run.rollouts.values() for row in rows)
    assert len(groups) == STEPS * PROMPTS and set(groups.values()) == {SAMPLES}
    for rows in run.rollouts.values():
        assert len({row["group_id"] for row in rows}) == PROMPTS


def test_all_metrics_are_there_and_finite_but_parity_of_a_wholly_stale_step(run: Finished) -> None:
    """Only tokens of the present version can show parity; a step that has none says null."""
    names = set(run.records[0])
    for record in run.records:
        # What the plan got wrong is told at the end.
        assert {name for name in record if not name.startswith("plan/")} == names
        missing = {name for name, value in record.items() if value is None or not math.isfinite(value)} - {NO_DELTAS}
        stale = all(version != record["step"] - 1 for row in run.rollouts[record["step"]] for version in row["versions"])
        # The first optimizer step measures it; fresh tokens that are all in the second one's groups do not count.
        assert missing in (PARITY, set()) and (missing == PARITY or not stale)
        assert missing or record["parity/logprob_abs_mean"] < 1e-4
    assert run.records[0]["parity/logprob_abs_mean"] is not None


def test_second_optimizer_step_of_a_batch_is_off_policy(run: Finished) -> None:
    assert all(record["train/ratio_max"] > 1.001 for record in run.records)


def test_kl_to_the_initial_weights_is_measured_in_every_step(run: Finished) -> None:
    kl = [record["train/kl"] for record in run.records]
    # How it grows depends on which rollouts a step got; the first step's is half before and half after an update.
    assert all(value > 0 for value in kl)
    assert all(record["time/reference_s"] > 0 for record in run.records)


def test_samples_of_a_group_share_the_prompts_cache_on_one_engine(run: Finished) -> None:
    """All samples but the first find the prompt's full blocks; were a group spread over both engines, all but two would."""
    cached = sum(record["rollout/cached_prompt_tokens"] for record in run.records)
    full_blocks = sum(row["prompt_length"] // BLOCK * BLOCK for rows in run.rollouts.values() for row in rows)
    assert full_blocks == STEPS * PROMPTS * SAMPLES * BLOCK
    assert cached == pytest.approx(full_blocks * (SAMPLES - 1) / SAMPLES, rel=0.1)
