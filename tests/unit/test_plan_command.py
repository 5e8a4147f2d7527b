"""``python -m rlpost.plan``: what it prints, what it refuses, and that it needs neither torch nor a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.config.fields import children
from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.plan import main
from rlpost.planner.options import PlanOptions
from rlpost.planner.plan import make_plan
from tests.unit.test_planner_measured import record

QWEN = ["config=grpo_qwen", "hardware=h100-8"]


def test_a_plan_is_printed_without_torch_ray_or_vllm() -> None:
    code = (
        "import sys; from rlpost.plan import main; assert main(['config=grpo_qwen', 'hardware=h100-8']) == 0; "
        "bad = {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4.02 billion parameters" in done.stdout and "MEMORY" in done.stdout and "SPLIT" in done.stdout


def test_json_has_the_numbers_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "price=2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = make_plan(load_config(["config=grpo_qwen"]).config, PlanOptions(hardware="h100-8", price=2))
    assert found["time"]["step_s"] == pytest.approx(plan.step.seconds) and found["cost"]["money"] == pytest.approx(plan.cost.money)
    assert {one["name"]: one["peak_bytes"] for one in found["memory"]["processes"]} == {
        one.name: pytest.approx(one.peak[1]) for one in plan.memory.processes
    }


def test_a_plan_that_does_not_fit_exits_with_1_and_proposes_a_change_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["config=grpo_qwen", "hardware=h100-16", "model.path=Qwen/Qwen3-32B", "engine.tensor_parallel=2"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert "fits       NO" in text and "change " in text
    assert main([*words, "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["advice"]["changes"]
    assert changes and all("=" in change for change in changes)
    assert main([*words, *changes]) == 0


def test_explain_prints_every_line_of_memory_and_every_work(capsys: pytest.CaptureFixture[str]) -> None:
    main([*QWEN])
    short = capsys.readouterr().out
    main([*QWEN, "--explain"])
    long = capsys.readouterr().out
    plan = make_plan(load_config(["config=grpo_qwen"]).config, PlanOptions(hardware="h100-8"))
    lines = {line.name for process in plan.memory.processes for entry in process.table.entries for line in entry.lines if line.bytes}
    coefficients = {work.coefficient for phase in plan.step.phases for work in phase.works}
    assert not [name for name in lines | coefficients if name.split()[0] not in long]
    assert "output weight" in long and "output weight" not in short  # one that only --explain tells


def test_html_is_one_page_without_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QWEN, "--html"]) == 0
    page = capsys.readouterr().out
    assert page.lstrip().startswith("<!") and page.count("<svg") >= 3 and "src=" not in page and "@import" not in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no config is given"),
        (["config=grpo_qwen"], "no machine is named; expected hardware=h100-8"),
        (["config=grpo_qwen", "hardware=h900-8"], "h900"),
        (["config=grpo_qwen", "hardware=h100-8", "model.path=/absent/model"], "/absent/model"),
        (["config=grpo_qwen", "hardware=h100-8", "engine.tensor_parallel=3"], "tensor_parallel"),
        (["config=grpo_qwen", "hardware=h100-8", "training.rank=2"], "did you mean"),
        (["config=grpo_qwen", "hardwear=h100-8"], "did you mean hardware="),
        (["compare"], "compare needs config=A config=B"),
        (["calibrate"], "calibrate takes run directories"),
        (["calibrate", "config=grpo_qwen"], "calibrate takes run directories"),
        (["calibrate", "/absent/run"], "/absent/run"),
    ],
)
def test_wrong_commands_exit_with_2_and_say_what_to_change(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err and not captured.out


def test_no_option_of_a_plan_hides_a_setting_of_the_run() -> None:
    assert not {child.key for child in children(PlanOptions)} & {child.key for child in children(RunConfig)}


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n  {child.key} " in text for child in children(PlanOptions))


# ---- compare ---------------------------------------------------------------------------------------------------------


def test_two_configs_are_compared_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "config=grpo_tiny", "config=sft_tiny", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 2
    assert main(["compare", "config=grpo_tiny", "config=sft_tiny"]) == 0
    text = capsys.readouterr().out
    assert "grpo_tiny" in text and "sft_tiny" in text


def test_variants_of_one_config_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *QWEN, "--algorithms", "sft,dpo,grpo,ppo", "--methods", "full,lora"]
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 8
    assert main([*words, "config=grpo_tiny"]) == 2


# ---- calibrate -------------------------------------------------------------------------------------------------------


def make_run(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.yaml").write_text(load_config(["config=grpo_tiny"]).yaml)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2, 3)))
    return directory


def test_a_run_calibrates_later_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run")
    assert main(["config=grpo_tiny", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert main(["calibrate", str(run)]) == 0
    text = capsys.readouterr().out
    assert "update" in text and "memory_engine" in text and "calibration: calibration.yaml" in text
    assert main(["config=grpo_tiny", "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["time"]["step_s"] != pytest.approx(before["time"]["step_s"], rel=0.05)
    assert any("measured (from" in one["basis"] for one in after["coefficients"])
    assert main(["calibrate", str(run)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["calibrate", str(run), "out=second.yaml", "--json"]) == 0
    comparisons = json.loads(capsys.readouterr().out)["comparisons"]
    assert {"update", "generate", "memory_trainer"} <= {one["name"] for one in comparisons} and (tmp_path / "second.yaml").exists()


def test_a_sync_benchmark_calibrates_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"carrier": "collective", "mode": "full", "bytes": 2e9, "seconds": 8.0}
    document = {
        "benchmark": "sync",
        "device": "cpu",
        "full_bytes": 2e9,
        "parameters": 10**9,
        "ranks": 1,
        "engines": 1,
        "transports": {"collective": row},
    }
    (tmp_path / "sync.json").write_text(json.dumps(document))
    assert main(["calibrate", "sync.json"]) == 0
    assert "sync_collective" in (tmp_path / "calibration.yaml").read_text()
    capsys.readouterr()
    (tmp_path / "other.json").write_text("[]")
    assert main(["calibrate", "other.json", "out=x.yaml"]) == 2 and not (tmp_path / "x.yaml").exists()
