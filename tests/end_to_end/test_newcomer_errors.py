"""What a newcomer gets wrong ends with one clear message and exit code 2, before Ray starts, and the same in a dry run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rlpost.models.embedded import build
from rlpost.train import main

Refused = Callable[..., str]


@pytest.fixture(autouse=True, scope="module")
def tokenizer_is_here() -> None:
    """Prompt lengths can only be counted with the embedded model on this machine."""
    build("tiny-sort5")


@pytest.fixture(autouse=True)
def in_an_empty_directory_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of Ray would end the test; the working directory is the test's own."""

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started although the input cannot work")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    """Runs the command, for real and (unless ``dry=False``) dry, and returns the one message."""

    def run(*arguments: str, config: str = "grpo_tiny", dry: bool = True) -> str:
        before = sorted(tmp_path.rglob("*"))
        messages = []
        for mode in ([], ["--dry-run"])[: 2 if dry else 1]:
            assert main([f"config={config}", *arguments, *mode]) == 2
            printed = capsys.readouterr()
            assert printed.err.startswith("error: ") and printed.err.count("error: ") == 1, printed.err
            assert "Traceback" not in printed.err + printed.out
            assert "run: " not in printed.out
            messages.append(printed.err)
        assert sorted(tmp_path.rglob("*")) == before, "a refused run leaves nothing behind"
        return messages[-1]

    return run


def write_rows(name: str, rows: list[dict[str, Any]]) -> str:
    """A JSONL file in the working directory."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def sort_rows(count: int = 4) -> list[dict[str, Any]]:
    """Rows that grpo_tiny can train on."""
    return [{"prompt": f"sort 5432{i}=", "answer": "".join(sorted(f"5432{i}"))} for i in range(count)]


# ---- model and data ----------------------------------------------------------------------------------------------------


def test_missing_model_directory_is_named_with_its_key(refused: Refused) -> None:
    message = refused("model.path=./no-model")
    assert "model.path" in message and "no-model" in message and "embedded:NAME" in message


def test_directory_without_a_model_is_named(refused: Refused) -> None:
    Path("not-a-model").mkdir()
    assert "config.json" in refused("model.path=./not-a-model")


def test_missing_data_file_is_named_with_its_key(refused: Refused) -> None:
    message = refused("data.train=no-data.jsonl")
    assert "data.train" in message and "no-data.jsonl" in message and ".parquet" in message


def test_row_without_the_prompt_field_is_named_by_file_and_line(refused: Refused) -> None:
    rows = sort_rows()
    rows[2] = {"question": rows[2]["prompt"], "answer": "1"}
    message = refused(f"data.train={write_rows('mine.jsonl', rows)}")
    assert "mine.jsonl:3" in message and "data.prompt_field" in message and "question" in message


def test_line_that_is_no_json_is_named_by_file_and_line(refused: Refused) -> None:
    write_rows("mine.jsonl", sort_rows())
    Path("mine.jsonl").write_text(Path("mine.jsonl").read_text() + "{prompt: 3}\n")
    assert "mine.jsonl:5" in refused("data.train=mine.jsonl")


def test_row_without_the_prompt_field_in_the_evaluation_file_too(refused: Refused) -> None:
    rows = [*sort_rows(1), {"answer": "1"}]
    assert "held-out.jsonl:2" in refused(f"data.evaluation={write_rows('held-out.jsonl', rows)}")


def test_chat_messages_without_a_chat_template_say_what_to_set(refused: Refused) -> None:
    rows = [{"prompt": [{"role": "user", "content": "sort 21543="}], "answer": "12345"}] * 4
    message = refused(f"data.train={write_rows('chat.jsonl', rows)}")
    assert "chat template" in message and "model.chat_template" in message


def test_chat_messages_only_in_the_evaluation_file_are_found_too(refused: Refused) -> None:
    rows = [{"prompt": [{"role": "user", "content": "sort 21543="}], "answer": "12345"}] * 4
    message = refused(f"data.evaluation={write_rows('chat.jsonl', rows)}")
    assert "chat template" in message and "model.chat_template" in message


def test_prompts_over_the_limit_are_refused_when_asked(refused: Refused) -> None:
    rows = [*sort_rows(3), {"prompt": "sort 1234567890123=", "answer": "0"}]
    message = refused(f"data.train={write_rows('mine.jsonl', rows)}", "data.overlong_prompts=refuse")
    assert "1 of 4 prompts" in message and "data.max_prompt_tokens=16" in message and "drop" in message


def test_no_prompt_within_the_limit_is_an_error_and_not_an_empty_run(refused: Refused) -> None:
    message = refused("data.max_prompt_tokens=3")
    assert "none is left" in message and "data.max_prompt_tokens" in message


def test_dropped_prompts_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*sort_rows(3), {"prompt": "sort 1234567890123=", "answer": "0"}]
    assert main(["config=grpo_tiny", f"data.train={write_rows('mine.jsonl', rows)}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "1 prompts of data.train longer than data.max_prompt_tokens=16" in printed
    assert "3 rows" in printed


# ---- keys and values ---------------------------------------------------------------------------------------------------


def test_unknown_key_gets_the_nearest_one(refused: Refused) -> None:
    assert "schedule.steps" in refused("schedule.step=5")
    assert "algorithm.group_size" in refused("algorithm.groupsize=5")


def test_wrong_type_says_what_was_found_and_expected(refused: Refused) -> None:
    message = refused("schedule.steps=many")
    assert "schedule.steps" in message and "many" in message and "whole number" in message


def test_unknown_config_gets_the_nearest_one(refused: Refused) -> None:
    assert "grpo_tiny" in refused(config="grpo_tny")


def test_all_problems_are_told_at_once(refused: Refused) -> None:
    message = refused("algorithm.group_size=1", "observe.trackers=[console,wandbb]", "data.train=no-data.jsonl")
    assert "algorithm.group_size" in message and "wandbb" in message and "no-data.jsonl" in message


def test_group_of_one_says_why_it_cannot_learn(refused: Refused) -> None:
    message = refused("algorithm.group_size=1")
    assert "algorithm.group_size" in message and "advantage" in message


def test_batch_that_minibatches_do_not_divide_gets_the_nearest_that_fit(refused: Refused) -> None:
    message = refused("schedule.prompts_per_step=7", "algorithm.minibatches=3")
    assert "schedule.prompts_per_step=6 or 9" in message and "algorithm.minibatches=1" in message


def test_batch_smaller_than_the_ranks_gets_the_nearest_that_fits(refused: Refused) -> None:
    message = refused("schedule.prompts_per_step=1", "algorithm.group_size=2", "training.ranks=4")
    assert "training.ranks=4" in message and "schedule.prompts_per_step=2" in message


def test_unknown_option_of_the_command(refused: Refused) -> None:
    assert "--dry-run" in refused("--dryrun")


# ---- rewards and environments ------------------------------------------------------------------------------------------


def test_missing_reward_file_is_named(refused: Refused) -> None:
    message = refused("rewards=[{function: 'rewards/mine.py:score'}]")
    assert "rewards[0]" in message and "rewards/mine.py" in message


def test_reward_whose_signature_does_not_fit_is_named_with_the_expected_one(refused: Refused) -> None:
    Path("mine.py").write_text("def score(text):\n    return 1.0\n")
    message = refused("rewards=[{function: 'mine.py:score'}]")
    assert "score" in message and "(text)" in message and "reward(prompt, completion, **fields)" in message
    assert "mine.py:1" in message


def test_reward_that_wants_a_column_that_is_not_there_gets_the_nearest_one(refused: Refused) -> None:
    Path("mine.py").write_text("def score(prompt, completion, anser):\n    return 1.0\n")
    message = refused("rewards=[{function: 'mine.py:score'}]")
    assert "anser" in message and "nearest: answer" in message


def test_evaluation_rows_that_lack_the_column_that_the_reward_wants_are_found(refused: Refused) -> None:
    """Else every evaluation would be empty, hours later."""
    Path("mine.py").write_text("def score(prompt, completion, answer):\n    return 1.0\n")
    rows = [{"prompt": "sort 21543="}] * 4
    message = refused("rewards=[{function: 'mine.py:score'}]", f"data.evaluation={write_rows('held-out.jsonl', rows)}")
    assert "answer" in message and "data.evaluation" in message


def test_reward_file_that_raises_on_import_shows_the_users_line(refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import a_package_that_is_missing\n")
    assert main(["config=grpo_tiny", "rewards=[{function: 'mine.py:score'}]"]) == 2
    printed = capsys.readouterr().err
    assert "a_package_that_is_missing" in printed and "mine.py" in printed and "line 1" in printed


def test_no_reward_at_all_is_refused(refused: Refused) -> None:
    assert "rewards" in refused("rewards=[]")


def test_unknown_environment_gets_the_nearest_one(refused: Refused) -> None:
    message = refused("environment.name=calk")
    assert "calk" in message and "calc" in message


def test_environment_that_lacks_a_method_is_refused(refused: Refused) -> None:
    Path("mine.py").write_text("class World:\n    def reset(self, prompt, seed):\n        return None\n")
    message = refused("environment.name=mine.py:World")
    assert "World" in message and "step" in message


def test_environment_whose_constructor_raises_is_a_users_error(refused: Refused) -> None:
    Path("mine.py").write_text("class World:\n    def __init__(self, level):\n        self.level = {'easy': 1}[level]\n")
    message = refused("environment.name=mine.py:World", "environment.options={level: hard}")
    assert "World" in message and "hard" in message and "KeyError" in message


# ---- run directories ---------------------------------------------------------------------------------------------------


def test_existing_run_directory_is_never_overwritten(refused: Refused) -> None:
    Path("run").mkdir()
    Path("run/config.yaml").write_text("mine: true\n")
    message = refused("run_dir=run", dry=False)
    assert "run_dir" in message and "resume=auto" in message
    assert Path("run/config.yaml").read_text() == "mine: true\n"


def test_resume_from_a_directory_that_is_no_run(refused: Refused) -> None:
    Path("run").mkdir()
    message = refused("resume=run", dry=False)
    assert "resume" in message and "config.yaml" in message
    assert "nowhere" in refused("resume=nowhere")


# ---- dry run -----------------------------------------------------------------------------------------------------------

WATCH_IMPORTS = """
import sys
from rlpost.train import main
code = main(sys.argv[1:])
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "torch", "vllm"})
print("imported:", heavy)
sys.exit(code)
"""


@pytest.mark.parametrize("config", ["grpo_tiny", "grpo_tiny_tools"])
def test_dry_run_checks_and_plans_without_importing_anything_heavy(config: str, tmp_path: Path) -> None:
    # The time-out is for a hang; what makes a dry run quick is that nothing heavy is imported.
    done = subprocess.run(
        [sys.executable, "-c", WATCH_IMPORTS, f"config={config}", "--dry-run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "imported: []"
    assert "prompts_per_step: 32" in done.stdout, "the resolved config"
    assert "256 samples" in done.stdout, "derived values"
    assert "trainer" in done.stdout and "engine" in done.stdout and "total" in done.stdout, "the placement"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("config", ["grpo_qwen", "grpo_qwen_multinode"])
def test_gpu_configs_pass_a_dry_run_on_a_machine_without_gpu(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"config={config}", "--dry-run"]) == 0
    assert "GPU each" in capsys.readouterr().out


def test_resolved_config_of_a_dry_run_loads_again_as_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config=grpo_tiny", "schedule.steps=3", "--dry-run"]) == 0
    first = capsys.readouterr().out
    Path("again.yaml").write_text(first.partition("\nderived:")[0])
    assert main(["config=./again.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == first
