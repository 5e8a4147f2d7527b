"""The offline loop among fakes: which rows a step trains, what it knows of the reference, when it evaluates, and an exact resume."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainer_fakes
from trainer_fakes import Asked, FakeTrainers, answer

from rlpost.algorithms.catalogue import make_offline_algorithm
from rlpost.algorithms.protocol import OfflineRow, TokenSequence
from rlpost.checkpoint import directory as checkpoints
from rlpost.config.algorithms import with_defaults
from rlpost.config.derive import derive
from rlpost.config.schema import RunConfig
from rlpost.data.cursor import PromptCursor
from rlpost.driver import offline as module
from rlpost.driver.inputs import OfflineInputs
from rlpost.driver.offline import OfflineRun
from rlpost.observe import Console, PhaseClock, make_trackers, read_metrics
from rlpost.observe.metrics import METRICS_FILE
from rlpost.types import ConfigError

KINDS = {"dpo": "pair", "simpo": "pair", "reward_model": "pair", "kto": "labelled"}
ROWS, HELD_OUT = 7, 3
METRICS = {"train__loss": 1.0, "train__accuracy": 0.5, "train__tokens": 8.0, "train__lr": 0.1}


def rows_of(count: int, kind: str, first: int) -> list[OfflineRow]:
    """Token ids tell the row: 100 times its number and the place. Ids of rows begin at 0 in every data set."""

    def sequence(number: int, offset: int, length: int) -> TokenSequence:
        tokens = np.array([number * 100, number * 100 + 1, *(number * 100 + offset + place for place in range(length))], np.int32)
        return TokenSequence(tokens=tokens, trainable=np.arange(len(tokens)) >= 2, prompt_length=2)

    rows = []
    for index in range(count):
        number = first + index
        names = {"chosen": (10, 3), "rejected": (20, 2)} if kind == "pair" else {"answer": (10, 1 + index % 3)}
        sequences = {name: sequence(number, offset, length) for name, (offset, length) in names.items()}
        rows.append(OfflineRow(row_id=str(index), sequences=sequences, wanted=index % 2 == 0))
    return rows


class Stage:
    """A run among fakes. ``settings`` are keys of the configuration, with ``__`` for dots."""

    def __init__(self, run_dir: Path, name: str = "sft", *, with_reference: bool = False, **settings: Any) -> None:
        config = RunConfig()
        config.algorithm.name = name
        config.schedule.steps, config.schedule.prompts_per_step, config.checkpoint.every = 5, 2, 0
        for key, value in settings.items():
            section, field = key.split("__")
            setattr(getattr(config, section), field, value)
        self.config, self.run_dir = config, run_dir
        self.log: list[Asked] = []
        self.console = Console(steps=config.schedule.steps, stream=io.StringIO(), live=False)
        self.trackers = make_trackers(["jsonl"], run_dir, config={}, project="p", run_name="r", console=self.console)
        kind = KINDS.get(name, "conversation")
        clock = PhaseClock()
        self.run = OfflineRun(
            config=config,
            derived=derive(config, device="cpu"),
            run_dir=run_dir,
            clock=clock,
            console=self.console,
            trackers=self.trackers,
            stop=asyncio.Event(),
            trainers=FakeTrainers("trainer", self.log, clock, **METRICS),
            inputs=OfflineInputs(
                model_path="m",
                reference_path="m",
                rows=rows_of(ROWS, kind, 1),
                dropped=0,
                held_out=rows_of(HELD_OUT, kind, 50),
                algorithm=make_offline_algorithm(with_defaults(config.algorithm)),
            ),
            reference=FakeTrainers("reference", self.log, clock) if with_reference else None,
        )

    def play(self, checkpoint: Path | None = None) -> Stage:
        asyncio.run(self.run.run(checkpoint))
        self.trackers.close()
        return self

    def rows_of(self, method: str) -> list[list[int]]:
        """For each call of ``method``, the numbers of the rows that it is about."""
        return [sorted({target // 100 for target in one.targets}) for one in self.log if one.method == method]

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        return [(one.role, one.method, one.phase) for one in self.log]


def numbers(cursor: PromptCursor, steps: int) -> list[list[int]]:
    return [sorted({cursor.next()[1] + 1, cursor.next()[1] + 1}) for _ in range(steps)]


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_come_in_the_cursors_order_over_the_end_of_an_epoch(tmp_path: Path, shuffle: bool) -> None:
    """7 rows, 2 a step: the fourth step has the last row of one epoch and the first of the next."""
    stage = Stage(tmp_path, data__shuffle=shuffle).play()
    assert stage.rows_of("update") == numbers(PromptCursor(ROWS, stage.config.seed, shuffle), 5)
    if not shuffle:
        assert stage.rows_of("update") == [[1, 2], [3, 4], [5, 6], [1, 7], [2, 3]]


@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("stopped_after", [1, 2, 4])
def test_a_resumed_run_trains_what_the_uninterrupted_one_would_have(tmp_path: Path, name: str, stopped_after: int) -> None:
    whole = Stage(tmp_path / "whole", name, schedule__steps=6).play()
    settings: dict[str, Any] = {"schedule__steps": 6, "checkpoint__every": stopped_after, "checkpoint__keep": 9}
    first = Stage(tmp_path / "run", name, **settings).play()
    checkpoint = checkpoints.checkpoint_root(first.run_dir) / f"step_{stopped_after:06d}"
    second = Stage(tmp_path / "run", name, **settings).play(checkpoint)
    assert second.calls[0] == ("trainer", "load", "wait")
    assert second.log[0].arguments == [(str(checkpoint),)]
    assert second.rows_of("update") == whole.rows_of("update")[stopped_after:]
    lines = (second.run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6], "each step is reported once"


def test_a_resume_with_another_number_of_rows_or_algorithm_is_refused(tmp_path: Path) -> None:
    checkpoint = checkpoints.checkpoint_root(tmp_path) / "step_000005"
    Stage(tmp_path).play()
    fewer = Stage(tmp_path, schedule__steps=7)
    fewer.run.cursor = PromptCursor(ROWS - 1, fewer.config.seed)
    with pytest.raises(ConfigError, match=r"count 7, this run has 6"):
        fewer.play(checkpoint)
    with pytest.raises(ConfigError, match=r"algorithm\.name was sft and is dpo"):
        Stage(tmp_path, "dpo", schedule__steps=7).play(checkpoint)
    with pytest.raises(ConfigError, match=r"schedule\.prompts_per_step was 2 and is 3"):
        Stage(tmp_path, schedule__steps=7, schedule__prompts_per_step=3).play(checkpoint)


def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint_before_anything_that_takes_long(tmp_path: Path) -> None:
    stage = Stage(tmp_path, evaluation__every=1)
    update = stage.run.trainers.call_each

    async def interrupted(method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        if method == "update":
            stage.run.stop.set()
        return await update(method, arguments)

    stage.run.trainers.call_each = interrupted  # type: ignore[method-assign, assignment]
    stage.play()
    assert stage.rows_of("update") == stage.rows_of("update")[:1]
    assert [method for _, method, _ in stage.calls][-3:] == ["update", "save", "measure"]
    assert checkpoints.find_newest(tmp_path) == (checkpoints.checkpoint_root(tmp_path) / "step_000001", [])
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]


# ---- the reference -------------------------------------------------------------------------------------------------

LIVE = [
    ({}, ("trainer", "reference_logprobs")),
    ({"with_reference": True, "algorithm__reference": "actor"}, ("reference", "logprobs")),
]


@pytest.mark.parametrize(("settings", "asked"), LIVE)
def test_a_live_reference_is_asked_before_every_update_for_its_rows(
    tmp_path: Path, settings: dict[str, Any], asked: tuple[str, str]
) -> None:
    stage = Stage(tmp_path, "dpo", checkpoint__at_end=False, **settings).play()
    assert stage.calls == [(*asked, "reference"), ("trainer", "update", "update")] * 5
    assert stage.rows_of(asked[1]) == stage.rows_of("update")
    for one in stage.log[1::2]:
        for token, value in one.by_token(lambda micro: micro.reference_logprobs).items():
            assert value == answer(asked[1], np.array(token))


def test_an_algorithm_without_a_reference_asks_nobody(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "sft", checkpoint__at_end=False, algorithm__reference="precomputed").play()
    assert stage.calls == [("trainer", "update", "update")] * 5
    assert stage.run.cache is None


PRECOMPUTED: dict[str, Any] = {"algorithm__reference": "precomputed", "evaluation__every": 5}


def test_precomputed_reference_logprobs_are_asked_before_the_first_step_and_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of training and held-out rows, whose ids are the same numbers."""
    monkeypatch.setattr(module, "CACHED_AT_ONCE", 4)
    stage = Stage(tmp_path, "dpo", **PRECOMPUTED).play()
    methods = [(role, method) for role, method, _ in stage.calls]
    step = ("trainer", "update")
    measure = ("trainer", "measure")
    assert methods == [("trainer", "logprobs")] * 3 + [measure] + [step] * 5 + [("trainer", "save"), measure]
    assert {phase for _, method, phase in stage.calls if method == "logprobs"} == {"reference"}
    assert stage.rows_of("logprobs") == [[1, 2, 3, 4], [5, 6, 7, 50], [51, 52]]
    for one in stage.log:
        if one.method in ("update", "measure"):
            for token, value in one.by_token(lambda micro: micro.reference_logprobs).items():
                assert value == answer("logprobs", np.array(token))


def test_a_resumed_run_reads_the_references_that_were_computed_and_never_asks_the_trained_model(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**PRECOMPUTED, "checkpoint__every": 2}
    first = Stage(tmp_path, "dpo", **settings).play()
    assert [method for _, method, _ in first.calls].count("logprobs") == 1
    checkpoint = checkpoints.checkpoint_root(tmp_path) / "step_000004"
    second = Stage(tmp_path, "dpo", **settings).play(checkpoint)
    assert [method for _, method, _ in second.calls] == ["load", "update", "save", "measure"]
    (tmp_path / "reference_logprobs.npz").unlink()
    with pytest.raises(ConfigError, match="cannot be resumed without it"):
        Stage(tmp_path, "dpo", **settings).play(checkpoint)


def test_a_run_that_was_killed_before_its_first_checkpoint_uses_what_it_had_computed(tmp_path: Path) -> None:
    first = Stage(tmp_path, "dpo", **PRECOMPUTED)
    first.run.stop.set()
    first.play()
    again = Stage(tmp_path, "dpo", **PRECOMPUTED).play()
    assert "logprobs" not in [method for _, method, _ in again.calls]
    assert len(again.rows_of("update")) == 5


# ---- kto's baseline ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reference", "sign"), [(-0.02, 1.0), (-0.001, 0.0)])
def test_ktos_baseline_is_the_mean_log_ratio_of_mismatched_answers_and_never_below_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: float, sign: float
) -> None:
    monkeypatch.setitem(trainer_fakes.SLOPES, "reference_logprobs", reference)
    stage = Stage(tmp_path, "kto", data__shuffle=False, schedule__steps=1, checkpoint__at_end=False).play()
    assert stage.calls == [
        ("trainer", "reference_logprobs", "reference"),
        ("trainer", "logprobs", "reference"),
        ("trainer", "reference_logprobs", "reference"),
        ("trainer", "update", "update"),
    ]
    _, own, other, update = stage.log
    assert own.targets == other.targets, "the same sequences"
    sums = [sum((-0.01 - reference) * token for token in tokens) for tokens in ([110], [210, 211])]
    [component] = update.updates[0].components
    assert component.parameters["baseline"] == pytest.approx(sign * sum(sums) / 2, rel=1e-5)


# ---- evaluation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "steps"), [(2, [0, 2, 4, 5]), (5, [0, 5]), (1, [0, 1, 2, 3, 4, 5]), (9, [0, 5]), (0, [])])
def test_evaluation_is_at_both_ends_and_every_few_steps(tmp_path: Path, every: int, steps: list[int]) -> None:
    stage = Stage(tmp_path, evaluation__every=every).play()
    evaluated = [record["step"] for record in read_metrics(tmp_path) if "evaluate/loss" in record]
    assert evaluated == steps
    assert stage.rows_of("measure") == [[50, 51, 52]] * len(steps)
    assert {phase for _, method, phase in stage.calls if method == "measure"} <= {"evaluate"}


def test_evaluation_reports_the_model_under_names_of_its_own_and_the_steps_stay_theirs(tmp_path: Path) -> None:
    Stage(tmp_path, evaluation__every=5).play()
    start, *_, last = read_metrics(tmp_path)
    assert {name: value for name, value in start.items() if "/" in name} == {
        "evaluate/loss": 1.0,
        "evaluate/accuracy": 0.5,
        "evaluate/lr": 0.1,
    }
    assert last["evaluate/loss"] == 2.0
    assert last["train/loss"] == 5.0, "of the step's update"
    assert last["train/tokens"] == 40.0
    assert not any(name.startswith("evaluate/") and name.endswith(("tokens", "occupancy")) for name in last)


def test_a_resumed_run_does_not_evaluate_its_start_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"evaluation__every": 3, "checkpoint__every": 1, "checkpoint__keep": 9}
    Stage(tmp_path, **settings).play()
    second = Stage(tmp_path, **settings).play(checkpoints.checkpoint_root(tmp_path) / "step_000003")
    assert [method for _, method, _ in second.calls if method != "save"] == ["load", "update", "update", "measure"]


# ---- what an update is given ---------------------------------------------------------------------------------------


def test_an_update_has_the_denominators_and_components_of_its_batch(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "dpo", data__shuffle=False, schedule__steps=1, checkpoint__at_end=False).play()
    [update] = [one for one in stage.log if one.method == "update"]
    [request] = update.updates
    assert request.denominators == {"weight": 10.0, "pair_weight": 2.0, "likelihood_weight": 6.0}
    assert [one.term for one in request.components] == ["preference"]
    assert (request.temperature, request.measure_parity) == (1.0, False)


def test_both_answers_of_a_pair_share_a_micro_batch(tmp_path: Path) -> None:
    """Seven tokens a pair: in rows of ten an answer of another pair would fit besides."""
    stage = Stage(tmp_path, "dpo", schedule__prompts_per_step=4, checkpoint__at_end=False)
    stage.run.packing = replace(stage.run.packing, micro_batch_tokens=10)
    stage.play()
    for one in stage.log:
        for micro in one.micros:
            answers = {(int(token) // 100, int(token) % 100 // 10) for token in micro.target}
            assert answers == {(row, side) for row, _ in answers for side in (1, 2)}


@pytest.mark.parametrize(("name", "together"), [("sft", False), ("kto", False), ("dpo", True), ("simpo", True), ("reward_model", True)])
def test_only_rows_whose_answers_are_compared_are_kept_whole(tmp_path: Path, name: str, together: bool) -> None:
    """Others pack better apart."""
    assert Stage(tmp_path, name).run.packing.together == together
