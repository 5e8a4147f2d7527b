"""A Ray job's package and command: what the run reads is there, what is large or private is not, and no secret is shown."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.config.load import load_config
from rlpost.jobs.packaging import MIB, Package, config_word, make_package, matches, named_by
from rlpost.jobs.ray_commands import ENDED, files, follow_log, warnings
from rlpost.jobs.ray_settings import LOCAL_DASHBOARD, RaySettings
from rlpost.types import ConfigError

CONFIG = """\
base: grpo_tiny
name: mine
output_dir: /shared/runs
data: {train: ./tasks.jsonl, evaluation: null}
evaluation: {every: 0}
rewards: [{function: my_reward.py:score}]
"""


UNWANTED = ("other.jsonl", "model/w.safetensors", "runs/x/metrics.jsonl", ".git/HEAD", ".venv/lib/a.py", "other_env/pyvenv.cfg",
            "other_env/lib/b.py", "helpers/__pycache__/text.pyc")  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's directory, where the command runs: a configuration over one of rlpost's, a reward, data; and what nobody wants sent."""
    place = tmp_path / "project"
    for path in ("my_reward.py", "tasks.jsonl", "helpers/text.py", "notes.txt", *UNWANTED):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text("x")
    (place / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(place)
    return place


def job(*words: str, config: str = "mine.yaml", **settings: Any) -> dict[str, Any]:
    """What is handed to Ray."""
    given = [f"config={config}", *words]
    texts = files(load_config(given).config, given, RaySettings(**{"gpus_per_node": 0, **settings}))
    loaded: dict[str, Any] = json.loads(texts["job.json"])
    return loaded


def warned(*words: str, **settings: Any) -> str:
    return "\n".join(warnings(load_config(words).config, words, RaySettings(**{"gpus_per_node": 0, **settings}), 100.0))


def package(directory: Path, named: dict[str, str] | None = None, exclude: tuple[str, ...] = ()) -> Package:
    return make_package(directory, named or {}, exclude, ["/shared/runs"])


# ---- what is packaged --------------------------------------------------------------------------------------------------


def test_code_and_named_data_are_sent_and_neither_runs_nor_weights_nor_environments(project: Path) -> None:
    sent = package(project, {"data.train": "./tasks.jsonl"})
    assert set(sent.files) == {"mine.yaml", "my_reward.py", "tasks.jsonl", "helpers/text.py", "notes.txt"}
    assert job()["package"]["files"] == 5 and job()["package"]["contents"]["helpers/"] == "1 file(s), 0.0 KiB"


def test_git_says_what_is_sent_but_named_data_that_it_ignores_is_sent_too(project: Path) -> None:
    (project / ".git/HEAD").unlink()
    git = ["git", "-C", str(project), "-c", "user.name=x", "-c", "user.email=x"]
    (project / ".gitignore").write_text("notes.txt\ntasks.jsonl\nhelpers/\n")
    subprocess.run([*git, "init", "-q"], check=True)
    (project / "inner").mkdir()
    (project / "inner/deep.py").write_text("x")
    subprocess.run(["git", "-C", str(project / "inner"), "init", "-q"], check=True)  # a checkout inside another one
    subprocess.run([*git, "add", "-f", "helpers/text.py"], check=True)  # ignored, but tracked
    sent = package(project, {"data.train": "./tasks.jsonl"})
    assert set(sent.files) == {"mine.yaml", "my_reward.py", "tasks.jsonl", "helpers/text.py", ".gitignore", "inner/deep.py"}


def test_what_the_user_excludes_is_left_out(project: Path) -> None:
    sent = package(project, exclude=("*.txt", "helpers/", "/my_reward.py"))
    assert set(sent.files) == {"mine.yaml"}
    with pytest.raises(ConfigError, match=r"exclude has '!notes.txt', expected"):
        package(project, exclude=("!notes.txt",))


STRANGE = [
    "a [1].jsonl",
    "a*b.jsonl",
    "#x.jsonl",
    "!y.jsonl",
    "end .jsonl",
    "back\\slash.jsonl",
    "q?.jsonl",
    "deep/d[0]/w.pt",
    "k[0]/keep.py",
]


def test_whoever_packs_with_the_excludes_gets_these_files_and_no_others(project: Path) -> None:
    """Ray packs by gitignore's rules; here git itself does, which also shows that odd names are quoted."""
    for path in STRANGE:
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text("x")
    (project / ".git/HEAD").unlink()
    sent = package(project, {"data.train": "a*b.jsonl", "reward": "tasks.jsonl"}, exclude=("*.txt",))
    assert "k[0]/keep.py" in sent.files and "a*b.jsonl" in sent.files and "a [1].jsonl" not in sent.files
    (project.parent / "excludes").write_text("\n".join(sent.excludes))
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    done = subprocess.run(
        ["git", "-C", str(project), "ls-files", "-z", "--others", f"--exclude-from={project.parent / 'excludes'}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert set(done.stdout.split("\0")[:-1]) == set(sent.files)


def test_links_are_not_followed_into_other_directories_but_a_named_file_behind_one_is_sent(project: Path) -> None:
    disk = project.parent / "disk"
    disk.mkdir()
    for name in ("big.py", "rows.jsonl"):
        (disk / name).write_text("x")
    (project / "linked").symlink_to(disk)
    (project / "self").symlink_to(project)
    assert not any(path.startswith(("linked", "self")) for path in package(project).files)
    sent = package(project, {"data.train": "linked/rows.jsonl"})
    assert [path for path in sent.files if path.startswith("linked")] == ["linked/rows.jsonl"] and "/linked/big.py" in sent.excludes


def test_a_run_that_writes_into_the_working_directory_is_not_sent_with_the_next_one(project: Path) -> None:
    (project / "out/mine").mkdir(parents=True)
    (project / "out/mine/log.txt").write_text("x")
    assert "out/" not in job(f"output_dir={project}/out")["package"]["contents"]
    assert "out/" in job()["package"]["contents"]


@pytest.mark.parametrize(
    ("pattern", "path", "left_out"),
    [
        ("*.bin", "a/b.bin", True), ("*.bin", "a/b.bin/c", True), ("*.bin", "a/bin", False), ("runs/", "a/runs/x", True),
        ("runs/", "a/runs", False), ("/runs/", "a/runs/x", False), ("/runs/", "runs/x", True), ("a/*.py", "a/x.py", True),
        ("a/*.py", "b/a/x.py", False), ("/a", "a/b/c", True), ("a/b", "a", False),
    ],
)  # fmt: skip
def test_patterns_mean_what_they_mean_in_gitignore(pattern: str, path: str, left_out: bool) -> None:
    assert matches(path, [pattern]) is left_out


def test_a_package_that_is_too_large_names_what_is_large(project: Path) -> None:
    for name, mib in {"big/a.csv": 3, "big/b.csv": 1, "c.csv": 2}.items():
        (project / name).parent.mkdir(exist_ok=True)
        with (project / name).open("wb") as file:
            file.truncate(mib * MIB)
    with pytest.raises(ConfigError, match=r"8 files, 6.0 MiB, more than max_mib=5; the largest: big/ 4.0 MiB, big/a.csv 3.0 MiB, c.csv"):
        job(max_mib=5)
    assert job(max_mib=5, exclude=["big/"])["package"]["files"] == 6


# ---- what the configuration names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "settings", "said"),
    [
        (["data.train=../outside.jsonl"], {}, r"data.train: ../outside.jsonl lies outside the working directory .*/project; move"),
        ([], {"exclude": ["*.jsonl"]}, r"data.train: ./tasks.jsonl is left out of the package by \*.jsonl"),
        ([], {"working_directory": "elsewhere"}, r"config: .*/mine.yaml lies outside the working directory .*/elsewhere; copy it there"),
        (["model.path=./model"], {}, r"model.path=./model is a directory of this machine, and models are not packaged"),
        (["rewards.0.function=.venv/lib/a.py:score"], {}, r"rewards.0.function: .venv/lib/a.py is left out of the package by .venv\*/"),
        (["model.chat_template=../t.jinja"], {}, r"model.chat_template: ../t.jinja lies outside"),
    ],
)
def test_what_would_not_be_on_the_cluster_is_refused_by_name(project: Path, words: list[str], settings: dict[str, Any], said: str) -> None:
    (project / "elsewhere").mkdir()
    for name in ("outside.jsonl", "t.jinja"):
        (project.parent / name).write_text("x")
    with pytest.raises(ConfigError, match=said):
        job(*words, **settings)


def test_a_base_in_another_directory_is_refused(project: Path) -> None:
    (project.parent / "base.yaml").write_text(CONFIG)
    (project / "over.yaml").write_text("base: ../base.yaml\n")
    with pytest.raises(ConfigError, match=r"base: .*/base.yaml lies outside the working directory"):
        job(config="over.yaml")


def test_modules_files_and_directories_that_the_run_names_are_found(project: Path) -> None:
    (project / "helpers/table.jsonl").write_text("x")
    words = ["config=mine.yaml", "environment.name=helpers.text:Game", "algorithm.policy_loss=elsewhere.loss:fn",
             'environment.options={table: helpers/table.jsonl, url: "http://x/y.jsonl"}', "weights.directory=/shared/w"]  # fmt: skip
    config = load_config(words).config
    named = named_by(config, project / "mine.yaml", project)
    assert named.inside == {
        "config (mine.yaml)": "mine.yaml", "data.train": "./tasks.jsonl", "rewards.0.function": "my_reward.py",
        "environment.name": "helpers", "environment.options.table": "helpers/table.jsonl",
    }  # fmt: skip
    assert named.installed == {"algorithm.policy_loss": "elsewhere.loss"} and named.absolute == {"weights.directory": "/shared/w"}
    assert "helpers/table.jsonl" in package(project, dict(named.inside)).files


def test_a_config_that_comes_with_rlpost_goes_by_its_name_and_one_of_the_user_by_its_place(project: Path) -> None:
    shipped = load_config(["config=grpo_tiny"]).source
    assert config_word(shipped, project) == "config=grpo_tiny"
    assert config_word(project / "mine.yaml", project) == "config=./mine.yaml"


def test_what_only_the_cluster_can_tell_is_said(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = warned("config=mine.yaml", "data.train=/shared/rows.jsonl", "environment.name=games.chess:Chess", stop_wait_s=50)
    parts = "every node must see data.train=/shared/rows.jsonl", "games.chess (environment.name)", "no checkout of rlpost", "stop_wait_s=50"
    assert [part for part in parts if part not in said] == []
    monkeypatch.chdir(load_config(["config=grpo_tiny"]).source.parents[1])
    assert warned("config=grpo_tiny", "output_dir=/shared/runs") == ""


# ---- settings ----------------------------------------------------------------------------------------------------------


def test_no_value_of_this_shell_stands_in_the_job(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TABLE", "value-of-mine")
    made = job(export=["MY_TABLE"])
    assert made["export"] == ["MY_TABLE"] and "value-of-mine" not in json.dumps(made)


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    ([], {"export": ["HF_TOKEN"]}, r"export has HF_TOKEN, which reads like a secret.*`ray start` on every node"),
    ([], {"export": ["TABLE=x"]}, r"export has a value for TABLE; give the name alone"),
    ([], {"export": ["a b"]}, r"export has 'a b', expected the name"),
    ([], {"packages": ["x @ https://me:pass@host/x.whl"]}, r"packages has a URL with a password or token"),
    (["environment.options={api_key: abc}"], {}, r"the run's environment.options.api_key reads like a secret"),
    (["output_dir=runs"], {}, r"output_dir is 'runs', which begins in the job's working directory: a copy on one node, that Ray deletes"),
    (["run_dir=./x"], {}, r"run_dir is './x'.*run_dir=/"),
    (["resume=runs/x"], {}, r"resume is 'runs/x'"),
    (["weights.directory=w"], {}, r"weights.directory is 'w'"),
    ([], {"gpus_per_node": None}, r"gpus_per_node is not given"),
    ([], {"job_name": "a b"}, r"job_name is 'a b', expected letters"),
    ([], {"stop_wait_s": 0}, r"stop_wait_s is 0, expected at least 1"),
    ([], {"max_mib": 0.0}, r"max_mib is 0, expected more than 0"),
    ([], {"driver_cpus": "many"}, r"ray: driver_cpus is 'many'"),
    ([], {"working_directory": "nowhere"}, r"config: .* lies outside|no directory"),
]


@pytest.mark.parametrize(("words", "settings", "said"), REFUSED)
def test_what_cannot_work_or_would_show_a_secret_is_refused(project: Path, words: list[str], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job(*words, **settings)


def test_the_run_directory_goes_by_the_name_so_that_the_same_name_resumes(project: Path) -> None:
    assert job()["metadata"] == {"name": "mine", "run_directory": "/shared/runs/mine"}
    assert "resume=auto run_dir=/shared/runs/mine;" in job()["entrypoint"]
    assert job(job_name="night-2")["metadata"]["run_directory"] == "/shared/runs/night-2"
    assert job("run_dir=/shared/x")["metadata"]["run_directory"] == "/shared/x"
    assert "run_dir" not in job("resume=/shared/old")["entrypoint"]


def test_a_stop_gets_the_time_that_was_asked_for(project: Path) -> None:
    assert job(stop_wait_s=77)["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "77"}
    assert job(packages=["math-verify"])["runtime_env"]["pip"] == ["math-verify"]


def test_the_dashboard_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # of a driver, no dashboard
    assert RaySettings().url() == LOCAL_DASHBOARD
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265/")
    assert RaySettings().url() == "http://head:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://other")
    assert RaySettings().url() == "https://other" and RaySettings(address="host:8265").url() == "http://host:8265"
    with pytest.raises(ConfigError, match=r"address is 'ray://head:10001', expected the URL of the cluster's dashboard"):
        RaySettings(address="ray://head:10001").url()


# ---- the command, run by a shell as Ray does it ------------------------------------------------------------------------

DRIVER = """#!/bin/sh
trap 'echo TERM; OWN' TERM
for word in "$@"; do printf '<%s>\\n' "$word"; done
[ "$2" = rlpost.doctor ] && [ -n "$DOCTOR" ] && exit "$DOCTOR"
echo ready
[ -n "$CODE" ] && exit "$CODE"
while :; do sleep 0.05; done
"""


def started(project: Path, entrypoint: str, at_stop: str = "exit 75", **environment: str) -> subprocess.Popen[str]:
    (project / "bin").mkdir()
    (project / "bin/python").write_text(DRIVER.replace("OWN", at_stop))
    (project / "bin/python").chmod(0o755)
    variables = {**environment, "PATH": f"{project / 'bin'}:{os.environ['PATH']}"}
    return subprocess.Popen(entrypoint, shell=True, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_words_arrive_as_they_were_given_and_the_drivers_code_is_the_jobs(project: Path) -> None:
    words = ['environment.options={text: "it\'s $HOME; `x`"}', "schedule.steps=7"]
    process = started(project, job(*words, preflight=False)["entrypoint"], CODE="3")
    output, _ = process.communicate(timeout=30)
    given = output.split("ready")[0].strip().splitlines()
    assert given[:5] == ["<-m>", "<rlpost.train>", "<config=./mine.yaml>", *(f"<{word}>" for word in words)]
    assert "<placement.ray_address=auto>" in given and "<placement.device=cpu>" in given
    assert process.returncode == 3 and output.endswith(f"{ENDED} 3\n")


@pytest.mark.parametrize(("doctor", "code", "trains"), [("0", 3, True), ("1", 1, False), ("2", 2, False)])
def test_the_doctor_sees_the_runs_words_first_and_what_it_finds_failed_is_not_trained(
    project: Path, doctor: str, code: int, trains: bool
) -> None:
    words = ['environment.options={text: "it\'s $HOME; `x`"}', "run_dir=/shared/of mine/x"]
    process = started(project, job(*words)["entrypoint"], CODE="3", DOCTOR=doctor)
    output, _ = process.communicate(timeout=30)
    asked, _, trained = output.partition("<-m>\n<rlpost.train>\n")
    assert asked.splitlines()[:4] == ["<-m>", "<rlpost.doctor>", "<cluster>", "<config=./mine.yaml>"]
    given = [line for line in asked.splitlines() if line.startswith("<output_dir=")]
    assert given[-1] == "<output_dir=/shared/of mine>", "the disk that the run writes to is the one that is looked at"
    assert all(f"<{word}>" in asked.splitlines() for word in words)
    assert bool(trained) is trains is ("preflight: no training" not in output)
    assert process.returncode == code and output.endswith(f"{ENDED} {code}\n")


def test_nodes_that_come_later_are_not_missed_by_a_preflight(project: Path) -> None:
    assert "rlpost.doctor" in job()["entrypoint"]
    for left_out in (job("placement.wait_for_nodes=true"), job(preflight=False)):
        assert "rlpost.doctor" not in left_out["entrypoint"] and "rlpost.train" in left_out["entrypoint"]


@pytest.mark.parametrize("during", ["rlpost.doctor", "rlpost.train"])
@pytest.mark.parametrize("own", ["exit 75", "exit 1", "exit 0"])
def test_a_stop_that_signals_every_process_ends_a_preflight_with_75_and_a_run_with_its_own_code(
    project: Path, during: str, own: str
) -> None:
    process = started(project, job()["entrypoint"], own, DOCTOR="" if during == "rlpost.doctor" else "0")
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    code, then = (75, "preflight: no training\n") if during == "rlpost.doctor" else (int(own.split()[1]), "")
    assert process.returncode == code and output.endswith(f"TERM\n{then}{ENDED} {code}\n") and "rlpost.train>" not in output


# ---- following the log -------------------------------------------------------------------------------------------------


class Jobs:
    """A cluster's job API whose connection breaks, as behind a proxy with a time limit."""

    def __init__(self, *tails: list[str]) -> None:
        self.tails = list(tails)

    def get_job_status(self, _: str) -> Any:
        return SimpleNamespace(is_terminal=lambda: not self.tails)

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for text in self.tails.pop(0):
            yield text
        if self.tails:
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

    def get_job_logs(self, _: str) -> str:
        return "one\ntwo\nthree\nfour\n"


def test_a_log_whose_connection_breaks_is_printed_once_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    jobs: Any = Jobs(["one\n", "two\n"], ["one\ntw"], ["one\ntwo\nthr", "ee\n"])
    assert asyncio.run(follow_log(jobs, "x")) == "one\ntwo\nthree\nfour\n"
    assert capsys.readouterr().out == "one\ntwo\nthree\nfour\n"
