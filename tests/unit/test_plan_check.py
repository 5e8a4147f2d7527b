"""A run's plan is written before it begins and compared at its end; where no plan can be made the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.derive import derive
from rlpost.config.load import load_config
from rlpost.driver.plan_check import PLAN_FILE, PlanCheck, this_machine
from rlpost.observe.metrics import validate_record
from rlpost.types import ConfigError
from tests.unit.test_planner_measured import record


class Heard:
    """A console."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []


def started(tmp_path: Path, heard: Heard, *words: str) -> PlanCheck | None:
    config = load_config(["config=grpo_tiny", *words]).config
    return PlanCheck.start(config, derive(config, device="cpu"), tmp_path, heard.said.append)


def finished(tmp_path: Path, heard: Heard, records: list[dict[str, Any]], *, jsonl: bool = True) -> dict[str, float]:
    check = started(tmp_path, heard)
    assert check is not None
    if jsonl:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records[:-1]))
    errors = check.errors(records[-1])
    check.report(heard.said.append, heard.warned.append)
    validate_record({"step": 1, **errors})
    return errors


def test_the_plan_is_written_at_the_start_and_a_resume_keeps_the_first(tmp_path: Path) -> None:
    assert started(tmp_path, Heard()) is not None
    first = (tmp_path / PLAN_FILE).read_text()
    assert json.loads(first)["fits"] is True
    started(tmp_path, Heard(), "algorithm.group_size=4")
    assert (tmp_path / PLAN_FILE).read_text() == first


def test_errors_of_all_phases_and_of_memory_are_part_of_the_last_record(tmp_path: Path) -> None:
    heard = Heard()
    errors = finished(tmp_path, heard, [record(1), record(2, **{"time__update_s": 3.0}), record(3, **{"time__update_s": 5.0})])
    assert {"plan/error_generate", "plan/error_update", "plan/error_sync", "plan/error_step", "plan/error_memory_trainer"} <= set(errors)
    assert any("plan against run" in line for line in heard.said)
    # The record that is not written yet counts: the median of 3 and 5.
    [update] = [line for line in heard.said if line.startswith("update")]
    assert " 4 s" in update


def test_without_a_metrics_file_the_last_step_alone_is_compared(tmp_path: Path) -> None:
    assert "plan/error_update" in finished(tmp_path, Heard(), [record(1), record(2)], jsonl=False)


@pytest.mark.parametrize("used_gib", [50.0, 0.01])
def test_memory_that_is_far_off_is_warned_of_with_the_way_to_calibrate(tmp_path: Path, used_gib: float) -> None:
    heard = Heard()
    finished(tmp_path, heard, [record(1, **{"memory__trainer_peak_gib": used_gib})])
    [warning] = heard.warned
    assert "memory_trainer" in warning and "more than 10% off" in warning and f"rlpost.plan calibrate {tmp_path}" in warning


def test_memory_as_planned_is_not_warned_of(tmp_path: Path) -> None:
    check = started(tmp_path, Heard())
    assert check is not None
    planned = {one.name: one.peak[1] / 2**30 for one in check.plan.memory.processes}
    heard = Heard()
    values = {"memory__trainer_peak_gib": planned["trainer"], "memory__engine_peak_gib": planned["engine"]}
    finished(tmp_path, heard, [record(1, **values)])
    assert not heard.warned


def test_a_run_without_finished_steps_ends_without_a_table(tmp_path: Path) -> None:
    heard = Heard()
    assert not finished(tmp_path, heard, [{"step": 0, "evaluate/reward": 0.1}])
    assert not heard.warned and not heard.said


def test_a_model_that_the_planner_does_not_cover_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba2", "state_size": 16}))
    heard = Heard()
    assert started(tmp_path / "run", heard, f"model.path={tmp_path}") is None
    [line] = heard.said
    assert line.startswith("no plan of this run: ") and "Mamba" in line


def test_a_machine_without_gpus_cannot_be_planned_for_as_one_that_has(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["config=grpo_qwen"]).config
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="nvidia-smi does not answer"):
        this_machine(derive(config, device="gpu"))


def test_gpus_are_known_by_what_nvidia_smi_calls_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + 'echo "NVIDIA H100 80GB HBM3"\n' * 4)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + ":/bin:/usr/bin")
    found = this_machine(derive(load_config(["config=grpo_qwen"]).config, device="gpu"))
    assert found.accelerator.name == "H100-80GB" and (found.nodes, found.gpus_per_node) == (2, 4)


def test_a_fault_of_the_planner_neither_keeps_a_run_from_starting_nor_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **named: Any) -> Any:
        raise ZeroDivisionError("division by zero")

    check = started(tmp_path, Heard())
    assert check is not None
    monkeypatch.setattr("rlpost.driver.plan_check.measure", broken)
    assert check.errors(record(1)) == {}
    monkeypatch.setattr("rlpost.driver.plan_check.make_plan", broken)
    heard = Heard()
    assert started(tmp_path, heard) is None and "ZeroDivisionError" in heard.said[0]
