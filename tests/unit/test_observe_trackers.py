"""Where records go, and what happens to a run when a tracker fails."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpost.observe import Console, Trackers, make_trackers
from rlpost.types import ConfigError


def start(run_dir: Path, *names: str, stream: io.StringIO | None = None) -> Trackers:
    console = Console(steps=10, run_dir=run_dir, stream=stream or io.StringIO(), live=False)
    return make_trackers(names, run_dir, config={"seed": 1, "model": {"path": "m"}}, project="rlpost", run_name="test", console=console)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Failing:
    """A tracker whose every call raises."""

    def log(self, record: Mapping[str, Any], step: int) -> None:
        raise ConnectionError("server gone")

    def truncate_after(self, step: int) -> None:
        raise ConnectionError("server gone")

    def close(self) -> None:
        raise ConnectionError("server gone")


class Collecting:
    """A tracker that remembers what it was given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, record: Mapping[str, Any], step: int) -> None:
        self.steps.append(step)

    def truncate_after(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_jsonl_records_are_on_disk_at_once_and_are_strict_json(tmp_path: Path) -> None:
    trackers = start(tmp_path, "jsonl")
    a_float32: Any = np.float32(0.5)  # no subclass of float: json alone would refuse it
    trackers.log({"reward/mean": a_float32, "train/loss": float("nan"), "train/grad_norm": np.float64("inf"), "note": "x"}, 3)
    line = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")  # not closed yet: what a kill -9 would leave
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 3,
        "reward/mean": 0.5,
        "train/loss": None,
        "train/grad_norm": None,
        "note": "x",
    }
    trackers.close()


def test_a_new_process_appends_and_never_glues_a_record_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew', encoding="utf-8")
    trackers = start(tmp_path, "jsonl")
    trackers.log({}, 3)
    trackers.close()
    assert path.read_text(encoding="utf-8").splitlines() == ['{"step": 1}', '{"step": 2, "rew', '{"step": 3}']


def test_a_resume_sets_later_records_aside_without_losing_any(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = start(tmp_path, "jsonl")
    for step in range(1, 6):
        first.log({"try": 1}, step)
    first.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "tr')
    for attempt, after in ((2, 3), (3, 2)):
        trackers = start(tmp_path, "jsonl")
        trackers.truncate_after(after)
        trackers.log({"try": attempt}, after + 1)
        trackers.close()
    assert records(path) == [{"step": 1, "try": 1}, {"step": 2, "try": 1}, {"step": 3, "try": 3}]
    aside = path.with_name("metrics.jsonl.discarded-1").read_text(encoding="utf-8").splitlines()
    assert aside == ['{"step": 4, "try": 1}', '{"step": 5, "try": 1}', '{"step": 6, "tr']
    assert records(path.with_name("metrics.jsonl.discarded-2")) == [{"step": 3, "try": 1}, {"step": 4, "try": 2}]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.discarded-1", "metrics.jsonl.discarded-2"]


def test_a_resume_with_nothing_to_discard_makes_no_file(tmp_path: Path) -> None:
    trackers = start(tmp_path, "jsonl")
    trackers.log({}, 1)
    trackers.truncate_after(1)
    trackers.close()
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_kill_between_the_two_renames_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers = start(tmp_path, "jsonl")
    for step in (1, 2, 3):
        trackers.log({}, step)
    replaced: list[Path] = []
    real_replace = os.replace

    def die_at_the_second(source: Path, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target)
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", die_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        trackers.truncate_after(1)
    assert [record["step"] for record in records(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_failing_tracker_is_reported_once_and_the_others_go_on() -> None:
    warnings: list[str] = []
    good, jsonl = Collecting(), Collecting()
    trackers = Trackers({"wandb": Failing(), "console": good, "jsonl": jsonl}, warnings.append)
    trackers.truncate_after(0)
    for step in (1, 2, 3):
        trackers.log({}, step)
    trackers.close()
    assert good.steps == jsonl.steps == [1, 2, 3]
    assert good.closed and jsonl.closed
    assert len(warnings) == 1 and "wandb" in warnings[0] and "server gone" in warnings[0]


def test_a_failing_jsonl_raises_after_the_others_had_the_record() -> None:
    other = Collecting()
    trackers = Trackers({"jsonl": Failing(), "console": other}, pytest.fail)
    with pytest.raises(ConnectionError):
        trackers.log({}, 1)
    assert other.steps == [1]


def test_unknown_and_doubled_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord'.*did you mean 'tensorboard'"):
        start(tmp_path, "jsonl", "tensorbord")
    assert not (tmp_path / "metrics.jsonl").exists(), "names are checked before anything is opened"
    trackers = start(tmp_path, "jsonl", "jsonl")
    trackers.log({}, 1)
    trackers.close()
    assert len(records(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboard.compat.proto"), ("wandb", "wandb")])
def test_a_missing_package_is_refused_at_the_start_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"'{name}' needs.*pip install 'rlpost\[trackers\]'"):
        start(tmp_path, "jsonl", name)


def test_console_tracker_shows_the_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    trackers = start(tmp_path, "console", stream=stream)
    trackers.log({"reward/mean": 0.25}, 4)
    trackers.close()
    assert stream.getvalue() == "step 4/10 reward 0.25\n"


def tensorboard_scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    return [(event.step, round(event.value, 4)) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_what_was_logged_before_close(tmp_path: Path) -> None:
    trackers = start(tmp_path, "tensorboard")
    trackers.log({"reward/mean": 0.25, "policy_version": 1, "note": "text is left out"}, 1)
    trackers.log({"reward/mean": 0.5, "policy_version": 2}, 2)
    assert tensorboard_scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5)]
    assert tensorboard_scalars(tmp_path, "policy_version") == [(1, 1), (2, 2)]
    trackers.close()


def test_tensorboard_forgets_the_steps_that_a_resume_redoes(tmp_path: Path) -> None:
    first = start(tmp_path, "tensorboard")
    for step in (1, 2, 3, 4):
        first.log({"reward/mean": 0.1}, step)
    first.close()
    second = start(tmp_path, "tensorboard")
    second.truncate_after(2)
    second.log({"reward/mean": 0.9}, 3)
    second.close()
    assert tensorboard_scalars(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.1), (3, 0.9)]


@pytest.fixture
def wandb_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_is_offline_without_a_key_says_so_and_keeps_its_run_over_a_resume(tmp_path: Path) -> None:
    stream = io.StringIO()
    for step in (1, 2):
        trackers = start(tmp_path, "wandb", stream=stream)
        trackers.log({"reward/mean": 0.25}, step)
        trackers.close()
    said = stream.getvalue().splitlines()
    assert len(said) == 2 and all("wandb is offline" in line and "wandb sync" in line for line in said)
    run_id = (tmp_path / "wandb-run-id").read_text(encoding="utf-8").strip()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert files and {file.name for file in files} == {f"run-{run_id}.wandb"}
    assert b"reward/mean" in files[0].read_bytes()


def test_wandb_mode_is_respected_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    stream = io.StringIO()
    trackers = start(tmp_path, "wandb", stream=stream)
    trackers.log({"reward/mean": 0.25}, 1)
    trackers.close()
    assert stream.getvalue() == ""
    assert not (tmp_path / "wandb").exists()


def test_wandb_that_cannot_start_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sideways")
    with pytest.raises(ConfigError, match=r"wandb could not start.*observe\.trackers"):
        start(tmp_path, "wandb")


def test_observing_needs_neither_torch_nor_ray_nor_vllm(tmp_path: Path) -> None:
    code = (
        "import io, sys, pathlib, rlpost.report, rlpost.observe as o\n"
        "console = o.Console(steps=1, stream=io.StringIO(), live=True)\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "t = o.make_trackers(['jsonl', 'console', 'tensorboard'], path, config={}, project='p', run_name='r', console=console)\n"
        "t.log({'reward/mean': 1.0}, 1); t.close(); console.close()\n"
        "o.RolloutWriter(path, 'parquet').write(1, [])\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'tensorflow') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
