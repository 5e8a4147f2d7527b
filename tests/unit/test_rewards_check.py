"""`python -m rlpost.rewards`: a reward on data, without training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpost.rewards.__main__ import main

ROOT = Path(__file__).parents[2]


def write_rows(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_the_example_of_the_documentation_runs_from_the_repository_root() -> None:
    command = [sys.executable, "-m", "rlpost.rewards", "check", "examples/rewards/my_reward.py:my_reward"]
    done = subprocess.run([*command, "--data", "examples/rewards/data.jsonl"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 rows" in done.stdout and "mean 0.75 over 4 scored; 1 not scorable (None); 0 failed" in done.stdout


@pytest.mark.parametrize("function", ["brevity", "judged"])
def test_the_other_functions_of_the_example_file_run_too(function: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = ROOT / "examples" / "rewards"
    assert main(["check", f"{directory}/my_reward.py:{function}", "--data", f"{directory}/data.jsonl"]) == 0
    assert "0 failed" in capsys.readouterr().out


def test_failures_are_shown_with_traceback_and_give_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def f(prompt, completion, n):\n    print('NOISE')\n    return 1 / n\n")
    write_rows(tmp_path / "rows.jsonl", {"question": "q1", "n": 2}, "", {"question": "q2", "n": 0}, {"question": "q3", "n": 4})
    command = [sys.executable, "-m", "rlpost.rewards", "check", "reward.py:f", "--data", "rows.jsonl", "--prompt-field", "question"]
    command += ["--completion", "x", "--workers", "2"]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert "mean 0.375 over 2 scored; 0 not scorable (None); 1 failed (raised 1)" in done.stdout
    assert "line 3: raised" in done.stdout and 'reward.py", line 3, in f' in done.stdout
    assert "NOISE" not in done.stdout and "NOISE" in done.stderr  # what rewards print does not mix with the table


def test_options_limit_and_token_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q", "completion": "x", "completion_tokens": n} for n in (4, 8, 16)]
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    assert main(["check", "length_penalty", "--data", data, "--option", "limit=10", "--option", "span=4", "--limit", "2"]) == 0
    assert "mean -0.25 over 2 scored" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        ([{"prompt": "q", "completion": "c"}, "{broken"], [], "rows.jsonl:2: not JSON"),
        ([[1]], [], "rows.jsonl:1: found a JSON list"),
        (["", {"prompt": "q", "completions": "c"}], [], "rows.jsonl:2: no column 'completion' (nearest: completions)"),
        ([{"question": "q", "completion": "c"}], [], "rows.jsonl:1: no column 'prompt'"),
        ([{"prompt": 3, "completion": "c"}], [], "rows.jsonl:1: 'prompt' is int"),
        ([{"prompt": "q", "completion": ["c"]}], [], "rows.jsonl:1: 'completion' is list"),
        ([], [], "has no rows"),
        ([{"prompt": "q", "completion": "c"}], [], "nothing provides 'answer'"),
        ([{"prompt": "q", "completion": "c", "answer": 1}], ["--option", "limit"], "expected KEY=VALUE"),
        ([{"prompt": "q", "completion": "c", "answer": 1}], ["--option", "limit=3"], "accepts no option 'limit'"),
        ([{"prompt": "q", "completion": "c", "answer": 1}], ["--workers", "0"], "expected at least 1"),
    ],
)
def test_what_the_user_got_wrong_gives_exit_code_2_and_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Any], arguments: list[str], message: str
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", *rows)
    assert main(["check", "exact_match", "--data", data, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_missing_file_gives_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "exact_match", "--data", "nowhere.jsonl"]) == 2
    assert "'nowhere.jsonl' does not exist" in capsys.readouterr().err


def test_list_names_built_ins_with_their_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    assert "length_penalty" in output and "1 when the completion equals the field `answer`" in output
