"""Reward models: everybody gets his own score, few large batches, no wait without an end; and the sum with reward functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from virtual_time import play

from rlpost.rewards.model_reward import CombinedRewards, ModelReward, ScoreBatch, check_same_tokenizer
from rlpost.types import ConfigError, Failure, InfrastructureError, RewardItem, RewardOutcome

BATCH_S = 5.0
"""Virtual seconds of one batch of :class:`Model`."""
DEADLINE_S = 60.0


def item(*tokens: int) -> RewardItem:
    """Its score is the number that its tokens spell."""
    return RewardItem(trajectory_id=spelt(tokens), prompt_id="p", prompt="?", completion="!", trajectory_tokens=np.array(tokens, np.int32))


def spelt(tokens: Iterable[int]) -> str:
    return "".join(str(token) for token in tokens)


class Model:
    """Scores sequences by what they spell; remembers its batches, and never computes two at a time."""

    def __init__(self, error: Exception | None = None) -> None:
        self.batches: list[list[str]] = []
        self.error, self.busy = error, False

    async def __call__(self, sequences: list[np.ndarray]) -> list[float]:
        assert not self.busy
        self.busy = True
        try:
            self.batches.append([spelt(tokens) for tokens in sequences])
            await asyncio.sleep(BATCH_S)
            if self.error is not None:
                raise self.error
            return [float(spelt(tokens)) for tokens in sequences]
        finally:
            self.busy = False


def reward(score_batch: ScoreBatch, *, max_tokens: int = 1000, weight: float = 1.0, name: str = "rm") -> ModelReward:
    return ModelReward(name=name, weight=weight, score_batch=score_batch, max_tokens=max_tokens, timeout_s=DEADLINE_S)


async def later(seconds: float, coroutine: Coroutine[Any, Any, Any]) -> Any:
    await asyncio.sleep(seconds)
    return await coroutine


# ---- batches -----------------------------------------------------------------------------------------------------------


def test_calls_of_one_moment_and_calls_during_a_batch_become_one_batch_each_and_everybody_gets_his_own_scores() -> None:
    model = Model()
    rm = reward(model)

    async def run() -> list[Any]:
        moments = (0.0, 0.001, 1.0, 2.0, 4.9, 30.0)
        return await asyncio.gather(*(later(moment, rm.score([item(1, n), item(2, n)])) for n, moment in enumerate(moments)))

    assert play(run()) == [[10.0 + n, 20.0 + n] for n in range(6)]
    assert model.batches == [["10", "20", "11", "21"], ["12", "22", "13", "23", "14", "24"], ["15", "25"]]


def test_batches_hold_at_most_max_tokens_in_the_order_of_asking_and_a_longer_sequence_comes_alone() -> None:
    model = Model()
    items = [item(1, 1, 1), item(2, 2), item(3), item(4, 4, 4, 4, 4, 4, 4), item(5, 5, 5, 5, 5)]
    assert play(reward(model, max_tokens=5).score(items)) == [111.0, 22.0, 3.0, 4444444.0, 55555.0]
    assert model.batches == [["111", "22"], ["3"], ["4444444"], ["55555"]]


def test_no_items_ask_for_nothing() -> None:
    model = Model()
    assert play(reward(model).score([])) == [] and model.batches == []


def test_an_error_reaches_everybody_who_waits_and_the_next_call_is_served_again() -> None:
    """Those in the batch and those that were collected meanwhile: nobody is left with a future that is never set."""
    model = Model(RuntimeError("the actor died"))
    rm = reward(model)

    async def run() -> tuple[list[Any], list[float | None]]:
        waiting = [later(moment, rm.score([item(number)])) for number, moment in enumerate((0.0, 0.0, 1.0))]
        failed = await asyncio.gather(*waiting, return_exceptions=True)
        model.error = None
        return failed, await rm.score([item(7)])

    failed, scores = play(run())
    assert [type(error) for error in failed] == [InfrastructureError] * 3
    assert all("reward model rm: RuntimeError: the actor died" in str(error) for error in failed)
    assert scores == [7.0] and model.batches == [["0", "1"], ["7"]]


def test_a_batch_that_is_late_is_an_error_with_the_deadline() -> None:
    async def hang(_: list[np.ndarray]) -> list[float]:
        await asyncio.sleep(1e6)
        return []

    with pytest.raises(InfrastructureError, match=r"reward model rm: it did not score 2 trajectories within 60 s"):
        play(reward(hang).score([item(1), item(2)]))


def test_a_wrong_number_of_scores_is_an_error_and_shifts_nobodys_score() -> None:
    async def short(sequences: list[np.ndarray]) -> list[float]:
        return [1.0] * (len(sequences) - 1)

    with pytest.raises(InfrastructureError, match="gave 2 scores for 3 trajectories"):
        play(reward(short).score([item(1), item(2), item(3)]))


def test_a_caller_that_gives_up_costs_the_others_nothing() -> None:
    model = Model()
    rm = reward(model)

    async def run() -> list[float | None]:
        first = asyncio.create_task(rm.score([item(1)]))
        await asyncio.sleep(1.0)
        abandoned = asyncio.create_task(rm.score([item(2)]))
        other = asyncio.create_task(rm.score([item(3)]))
        await asyncio.sleep(1.0)
        abandoned.cancel()
        first.cancel()
        return await other

    assert play(run()) == [3.0]
    assert model.batches == [["1"], ["3"]]


def test_an_item_without_tokens_is_refused() -> None:
    bare = RewardItem(trajectory_id="t", prompt_id="p", prompt="?", completion="!")
    with pytest.raises(AssertionError, match="trajectory_tokens"):
        play(reward(Model()).score([bare]))


# ---- the sum -----------------------------------------------------------------------------------------------------------


async def functions(items: Sequence[RewardItem]) -> list[RewardOutcome]:
    """0.5 for all but trajectories 3 (answered None) and 4 (raised)."""
    await asyncio.sleep(1.0)
    failures = {"3": Failure(kind="not_scorable", where="f", message="None"), "4": Failure(kind="raised", where="f", message="bug")}
    return [
        RewardOutcome(
            trajectory_id=one.trajectory_id,
            value=None if one.trajectory_id in failures else 0.5,
            parts={"f": None if one.trajectory_id in failures else 0.25},
            metrics={"f/steps": 2.0},
            failure=failures.get(one.trajectory_id),
        )
        for one in items
    ]


def test_functions_and_models_are_added_by_weight_and_no_failure_becomes_a_number() -> None:
    async def broken(sequences: list[np.ndarray]) -> list[float]:
        values = {"1": 1.0, "2": float("nan"), "3": float("inf"), "4": float("nan")}
        return [values[spelt(tokens)] for tokens in sequences]

    rewards = CombinedRewards(functions=functions, models=[reward(Model(), weight=10.0, name="a"), reward(broken, weight=-2.0, name="b")])
    good, nan, none, raised = play(rewards.score([item(1), item(2), item(3), item(4)]))
    assert good.value == 0.5 + 10.0 * 1.0 - 2.0 * 1.0 and good.failure is None
    assert good.parts == {"f": 0.25, "a": 1.0, "b": 1.0} and good.metrics == {"f/steps": 2.0}
    assert [outcome.value for outcome in (nan, none, raised)] == [None] * 3
    assert nan.parts == {"f": 0.25, "a": 2.0, "b": None}
    assert nan.failure == Failure(kind="not_a_number", where="b", message="reward model b gave a score that is not finite")
    assert none.failure is not None and none.failure.where == "b", "a fault is told rather than an answer of None"
    assert raised.failure is not None and raised.failure.where == "f", "of two faults the first"


def test_a_models_score_does_not_mend_a_functions_none() -> None:
    rewards = CombinedRewards(functions=functions, models=[reward(Model())])
    [outcome] = play(rewards.score([item(3)]))
    assert outcome.value is None and outcome.parts == {"f": None, "rm": 3.0}
    assert outcome.failure is not None and outcome.failure.kind == "not_scorable"


def test_models_alone_are_the_whole_reward() -> None:
    rewards = CombinedRewards(functions=None, models=[reward(Model(), weight=0.5)])
    assert play(rewards.score([item(3), item(4)])) == [
        RewardOutcome(trajectory_id="3", value=1.5, parts={"rm": 3.0}),
        RewardOutcome(trajectory_id="4", value=2.0, parts={"rm": 4.0}),
    ]


def test_a_dead_reward_model_is_no_data_failure() -> None:
    rewards = CombinedRewards(functions=functions, models=[reward(Model(RuntimeError("gone")))])
    with pytest.raises(InfrastructureError, match="gone"):
        play(rewards.score([item(1)]))


# ---- the tokenizer -----------------------------------------------------------------------------------------------------

POLICY: dict[str, Any] = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"id": 3, "content": "<eos>"}]}


def tokenizer(directory: Path, content: Any) -> Path:
    directory.mkdir()
    (directory / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    "other",
    [
        {**POLICY, "normalizer": None},
        {**POLICY, "added_tokens": [*POLICY["added_tokens"], {"id": 4, "content": "<pad>"}]},
        {**POLICY, "model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}},
    ],
    ids=["equal", "one more token", "unigram"],
)
def test_a_reward_model_with_the_policys_tokens_is_taken(tmp_path: Path, other: dict[str, Any]) -> None:
    check_same_tokenizer(tokenizer(tmp_path / "policy", POLICY), tokenizer(tmp_path / "other", other), "rewards[0].model")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({**POLICY, "model": {"vocab": {"a": 0, "c": 1, "b": 2}}}, r"2 of 4 tokens differ, the first is 1, 'b' here and 'c' there"),
        ({**POLICY, "added_tokens": []}, r"1 of 4 tokens differ, the first is 3, '<eos>' here and missing there"),
        ({**POLICY, "added_tokens": [{"id": 3, "content": "<end>"}]}, r"'<eos>' here and '<end>' there"),
        ({**POLICY, "added_tokens": [*POLICY["added_tokens"], {"id": 2, "content": "<x>"}]}, r"the first is 2, 'c' here and '<x>' there"),
        ("{", r"rewards\[1\]\.model: .*tokenizer\.json cannot be read as a tokenizer"),
        ({"model": {}}, r"rewards\[1\]\.model: .*tokenizer\.json cannot be read as a tokenizer"),
    ],
    ids=["order", "fewer", "other end token", "a token replaced", "no JSON", "no vocabulary"],
)
def test_a_reward_model_that_would_read_the_policys_tokens_otherwise_is_refused(tmp_path: Path, other: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_same_tokenizer(tokenizer(tmp_path / "policy", POLICY), tokenizer(tmp_path / "other", other), "rewards[1].model")
    assert str(tmp_path / "other") in str(caught.value) and "rewards[1].model" in str(caught.value)


def test_a_directory_without_a_tokenizer_is_named_with_its_configuration_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: .*policy/tokenizer\.json"):
        check_same_tokenizer(tmp_path / "policy", tokenizer(tmp_path / "other", POLICY), "rewards[1].model")
