"""``python -m rlpost.report``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from rlpost.observe import PHASES, Console, make_trackers
from rlpost.report import main


def write_run(run_dir: Path, steps: int = 12, unaccounted_s: float = 0.0) -> None:
    """A run of ``steps`` steps of 2 s, reward rising from 0.0 by 0.05, evaluated before the first and with the last step."""
    console = Console(steps=steps, stream=io.StringIO(), live=False)
    trackers = make_trackers(["jsonl"], run_dir, config={}, project="p", run_name="r", console=console)
    trackers.log({"evaluate/reward": 0.1}, 0)
    for index in range(steps):
        record: dict[str, float] = {f"time/{phase}_s": 0.0 for phase in PHASES}
        record |= {"time/generate_s": 1.2, "time/update_s": 0.6, "time/wait_s": 0.2, "time/step_s": 2.0 + unaccounted_s}
        record |= {"reward/mean": 0.05 * index, "parity/logprob_abs_mean": 1e-6, "parity/logprob_abs_max": 1e-5 * (index + 1)}
        record |= {"rollout/tokens": 1000, "rollout/tokens_per_s": 800, "train/tokens": 900}
        if index == steps - 1:
            record["evaluate/reward"] = 0.8
        trackers.log(record, index + 1)
    trackers.close()


def test_json_holds_the_figures_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main([str(tmp_path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["first_step"], summary["last_step"]) == (12, 1, 12)
    assert summary["seconds"] == pytest.approx(24)
    assert summary["phases"]["generate"] == {"mean_s": pytest.approx(1.2), "total_s": pytest.approx(14.4), "share": pytest.approx(0.6)}
    assert sum(phase["share"] for phase in summary["phases"].values()) == pytest.approx(1)
    assert summary["phase_sum_deviation"] == pytest.approx(0, abs=1e-9)
    assert summary["reward"] == {"first": pytest.approx(0.1), "last": pytest.approx(0.45), "window": 5}
    assert summary["parity"] == {"mean": pytest.approx(1e-6), "max": pytest.approx(1.2e-4)}
    assert summary["tokens"] == {"sampled": 12000, "trained": 10800, "sampled_per_s": pytest.approx(500), "generate_tokens_per_s": 800}
    assert summary["evaluation"] == {"first": 0.1, "first_step": 0, "last": 0.8, "last_step": 12}


def test_text_shows_where_the_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path)
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert str(tmp_path) in text
    assert "generate          1.200s       14.4s   60.0 %" in text
    assert "checkpoint" not in text, "phases that took no time are left out"
    assert "0.100 (first 5 steps) -> 0.450 (last 5 steps)" in text
    assert "0.100 (step 0) -> 0.800 (step 12)" in text
    assert text.isascii() or not str(tmp_path).isascii()


def test_seconds_in_no_phase_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, unaccounted_s=0.5)
    main([str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["phase_sum_deviation"] == pytest.approx(0.2)
    main([str(tmp_path)])
    assert "within 20.000 %" in capsys.readouterr().out


def test_a_run_in_its_first_steps_has_a_report_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step_s": 0.0, "reward/mean": null}\n{"step": 2, "ti', encoding="utf-8")
    assert main([str(tmp_path)]) == 0
    assert "reward      - (first 0 steps) -> - (last 0 steps)" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", '{"step": 0, "evaluate/reward": 0.1}\n'])
def test_a_directory_without_a_finished_step_is_exit_code_2_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, encoding="utf-8")
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and str(tmp_path) in printed.err and "metrics.jsonl" in printed.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "run_dir" in capsys.readouterr().out
