"""A tool between the turns, a reference model in an actor of its own, and colocated placement (phases never overlap)."""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from typing import Any

import pytest
from training_runs import Command, Finished, finished_run

from rlpost.data.tokenizer import PromptTokenizer
from rlpost.models.embedded import build

STEPS, PROMPTS, SAMPLES = 5, 16, 4
CALL = re.compile(r"calc (\d+)\*(\d+)")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    command = Command(tmp_path_factory.mktemp("tool_use"))
    return finished_run(
        command, "config=grpo_tiny_tools", f"schedule.prompts_per_step={PROMPTS}", f"algorithm.group_size={SAMPLES}",
        "evaluation.every=0", "checkpoint.at_end=false", "placement.mode=colocated", "algorithm.reference=actor",
        "algorithm.kl_coefficient=0.05", steps=STEPS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer(build("tiny-calc"))


def spans(row: dict[str, Any]) -> list[tuple[bool, list[int]]]:
    """What follows the prompt, in stretches of sampled and not sampled tokens."""
    after = list(zip(row["trainable"], row["tokens"], strict=True))[row["prompt_length"] :]
    return [(sampled, [token for _, token in stretch]) for sampled, stretch in groupby(after, key=lambda pair: pair[0])]


def test_tool_answers_are_in_the_tokens_and_never_trained(run: Finished, tokenizer: PromptTokenizer) -> None:
    """Each stretch that no engine sampled is what the calculator said to the call before it, token by token."""
    answers = 0
    for row in (row for rows in run.rollouts.values() for row in rows):
        stretches = spans(row)
        assert stretches[0][0], "the model speaks first"
        for (_, before), (sampled, tokens) in pairwise(stretches):
            if sampled:
                continue
            call = CALL.fullmatch(tokenizer.decode(before))
            assert call is not None
            assert tokens == tokenizer.encode_text(f"{int(call[1]) * int(call[2])}\n")
            answers += 1
    assert answers > STEPS * PROMPTS * SAMPLES / 10


def test_only_sampled_tokens_have_logprobs_versions_and_weight(run: Finished) -> None:
    for record in run.records:
        rows = run.rollouts[record["step"]]
        for row in rows:
            known = [value is not None for value in row["logprobs"]]
            assert row["trainable"] == known == [version >= 0 for version in row["versions"]]
        sampled = sum(sum(row["trainable"]) for row in rows)
        assert record["train/tokens"] == record["rollout/tokens"] == sampled
        assert sampled < sum(len(row["tokens"]) - row["prompt_length"] for row in rows)


def test_turns_are_counted_and_every_turns_prompt_is_paid(run: Finished) -> None:
    for record in run.records:
        rows = run.rollouts[record["step"]]
        turns = [sum(sampled for sampled, _ in spans(row)) for row in rows]
        assert [row["turns"] for row in rows] == turns
        assert record["rollout/turns_mean"] == pytest.approx(sum(turns) / len(turns)) and record["rollout/turns_mean"] > 1
        assert record["rollout/prompt_tokens"] > sum(row["prompt_length"] for row in rows), "a second turn sends the first one again"


def test_reward_comes_from_the_environment_and_right_tool_use_earns_it(run: Finished) -> None:
    rows = [row for rows in run.rollouts.values() for row in rows]
    assert all(row["reward"] == row["reward_parts"]["environment"] and row["failure_kind"] is None for row in rows)
    used = [row["reward"] for row in rows if row["reward_metrics"].get("used_tool") == 1.0]
    unused = [row["reward"] for row in rows if row["reward_metrics"].get("used_tool") == 0.0]
    assert sum(used) / len(used) > 0.5 > sum(unused) / len(unused)
    assert all("reward_metrics/used_tool" in record for record in run.records)


def test_engine_and_trainer_agree_across_turns(run: Finished) -> None:
    """The second turn's logprobs depend on the tool's answer: another tokenisation or position would show here."""
    assert max(record["parity/logprob_abs_mean"] for record in run.records) < 1e-4
    assert max(record["rollout/staleness_max"] for record in run.records) == 0


def test_reference_actor_holds_the_initial_weights(run: Finished) -> None:
    """No KL before the first update, and some after it; a reference that followed the policy would stay at 0."""
    kl = [record["train/kl"] for record in run.records]
    assert abs(kl[0]) < 1e-6 and kl[-1] > 1e-5
    assert all(record["time/reference_s"] > 0 for record in run.records)
    assert "reference-0.log" in {path.name for path in (run.directory / "logs").iterdir()}
