"""Ray jobs on a real cluster of two nodes with a dashboard, through the command: a user's own reward and data go along, the log is
followed, a stop saves, the same name resumes, and what is wrong with the cluster is said."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray_nodes import MARK, Node, RayNodes, ray_nodes
from training_runs import WatchedRun, actors, step_records

from rlpost.checkpoint.directory import find_newest
from rlpost.config.load import load_config
from rlpost.jobs import ray_commands
from rlpost.jobs.ray_commands import ENDED, ENTRYPOINT, connect, files, logs, status, stop
from rlpost.jobs.ray_settings import RaySettings
from rlpost.types import ConfigError

COMMAND_TIMEOUT_S = 120.0

CONFIG = """\
base: grpo_tiny
name: mine
data: {train: ./tasks.jsonl, evaluation: null}
rewards: [{function: my_reward.py:score}]
evaluation: {every: 0}
algorithm: {group_size: 4}
schedule: {prompts_per_step: 8}
checkpoint: {every: 0}
"""

REWARD = """\
import os
from pathlib import Path

files = sorted(str(path) for path in Path().rglob("*") if path.is_file() and "__pycache__" not in str(path))
Path(os.environ["LISTING"]).write_text("\\n".join(files))


def score(prompt, completion, answer):
    return float(completion.strip() == answer)
"""


@dataclass(frozen=True, kw_only=True)
class Project:
    """A user's directory, and the cluster that the jobs go to."""

    directory: Path
    shared: Path
    cluster: RayNodes

    @contextlib.contextmanager
    def launched(self, *words: str) -> Iterator[WatchedRun]:
        """``python -m rlpost.launch ray WORDS`` in the background. A cluster of the user's, which variables name, is not for it."""
        environment = {
            **self.cluster.environment, "LISTING": str(self.shared / "listing"), "RAY_ADDRESS": "http://127.0.0.1:1",
            "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:1", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "rlpost.launch", "ray", *words, f"address={self.cluster.dashboard}"], cwd=self.directory,
            env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        run = WatchedRun(process)
        try:
            yield run
        finally:
            run.end()

    def launch(self, *words: str, code: int = 0) -> str:
        """Its output."""
        with self.launched(*words) as run:
            return run.finish(code, COMMAND_TIMEOUT_S)

    def run_words(self, *words: str) -> list[str]:
        return ["config=mine.yaml", f"output_dir={self.shared}", "gpus_per_node=0", "preflight=false", "export=[LISTING]", *words]


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    """Two nodes of one CPU each: the two ranks and the engine, half a CPU each, do not fit on one."""
    place = Path(tempfile.mkdtemp(prefix="rj", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # Ray is started with its environment activated
        patch.delenv("LISTING", raising=False)
        cluster = stack.enter_context(ray_nodes(place / "ray", [Node(cpus=1), Node(cpus=1)], dashboard=True))
        made = Project(directory=place / "project", shared=place / "shared", cluster=cluster)
        for path in (made.shared, made.directory / "data [1]", made.directory / "model"):
            path.mkdir(parents=True)
        rows = [{"prompt": f"sort {digits}=", "answer": "".join(sorted(digits))} for digits in ("40913", "55102", "98761", "31415")]
        texts = {"mine.yaml": CONFIG, "my_reward.py": REWARD, "tasks.jsonl": "\n".join(json.dumps(row) for row in rows * 4)}
        texts |= {"data [1]/a b.txt": "x", "data [1]/a?.jsonl": "x", "model/w.safetensors": "x", "more.jsonl": "x"}
        for name, text in texts.items():
            (made.directory / name).write_text(text)
        yield made


def nodes_of_actors(run_dir: Path) -> dict[str, str]:
    """Name of each actor -> number of its node."""
    found = {}
    for name, pid in actors(run_dir).items():
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        [mark] = [variable for variable in variables if variable.startswith(f"{MARK}=")]
        found[name] = mark.rpartition(":")[2]
    return found


@pytest.mark.slow
def test_a_job_uses_both_nodes_saves_when_it_is_stopped_and_the_same_name_resumes(project: Project) -> None:
    run_dir = project.shared / "mine"
    with project.launched(*project.run_words("schedule.steps=10000"), "--follow") as run:
        run.wait_for("step 2/10000", COMMAND_TIMEOUT_S)
        [job] = [line.removeprefix("job: ") for line in run.output.splitlines() if line.startswith("job: ")]
        where = nodes_of_actors(run_dir)
        assert set(where) == {"trainer-0", "trainer-1", "engine-0"} and set(where.values()) == {"0", "1"}
        assert (project.shared / "listing").read_text().splitlines() == ["data [1]/a b.txt", "mine.yaml", "my_reward.py", "tasks.jsonl"]
        assert f"job {job}: RUNNING" in project.launch("--status", job)
        for option in ([], ["--dry-run"]):
            said = project.launch(*project.run_words("schedule.steps=5"), *option, code=2)
            assert f"job {job} is RUNNING with the same run directory" in said
        assert "is killed after 600 s" in project.launch("--stop", job)
        output = run.finish(75, COMMAND_TIMEOUT_S)
    assert "rlpost.train ended with exit code 75" in output and output.count("step 2/10000") == 1
    assert f"job {job}: STOPPED" in project.launch("--status", job)
    assert "has ended already: STOPPED" in project.launch("--stop", job)
    done = len(step_records(run_dir))
    newest, _ = find_newest(run_dir)
    assert done >= 2 and newest is not None and newest.name.endswith(str(done))

    output = project.launch(*project.run_words(f"schedule.steps={done + 2}", "preflight=true"), "--follow")
    assert 0 < output.index("checks: ") < output.index(", 0 failed") < output.index("resuming"), "the doctor looked first"
    assert f"resuming {run_dir} from {newest.name}" in output and f"step {done + 2}/{done + 2}" in output
    assert "SUCCEEDED" in output
    assert [record["step"] for record in step_records(run_dir)] == list(range(1, done + 3))


def test_a_job_that_fails_gives_the_drivers_code_and_its_message(project: Project) -> None:
    """Here the variable is set, and on the cluster it is not."""
    words = [word for word in project.run_words("schedule.steps=2", "job_name=fails") if not word.startswith("export")]
    output = project.launch(*words, "--follow", code=2)
    assert "KeyError: 'LISTING'" in output and "rlpost.train ended with exit code 2" in output
    assert "FAILED" in output and "hint: rlpost.train refused the configuration" in output
    [job] = [line.removeprefix("job: ") for line in output.splitlines() if line.startswith("job: ")]
    assert "KeyError: 'LISTING'" in project.launch("--logs", job, code=2)


def test_a_driver_that_needs_longer_than_rays_own_3_seconds_to_save_is_waited_for(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.directory)
    words = ["config=mine.yaml", f"output_dir={project.shared}"]
    settings = RaySettings(address=project.cluster.dashboard, gpus_per_node=0, stop_wait_s=60)
    variables = json.loads(files(load_config(words).config, words, settings)["job.json"])["runtime_env"]["env_vars"]
    client = connect(settings)
    slow = """sh -c 'trap "sleep 5; exit 75" TERM; echo ready; while :; do sleep 0.1; done'"""
    job = client.submit_job(entrypoint=ENTRYPOINT.format(command=slow, ended=ENDED), runtime_env={"env_vars": variables})
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    while "ready\n" not in client.get_job_logs(job):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert "killed after 60 s" in stop(job, settings)
    assert logs(job, settings, follow=True) == 75


def test_an_unknown_job_is_said(project: Project) -> None:
    settings = RaySettings(address=project.cluster.dashboard)
    for ask in (lambda: status("nobody", settings), lambda: logs("nobody", settings, follow=True), lambda: stop("nobody", settings)):
        with pytest.raises(ConfigError, match="nobody does not exist"):
            ask()


def test_a_variable_that_this_shell_lacks_is_said(project: Project) -> None:
    words = [word for word in project.run_words("schedule.steps=2") if not word.startswith("export")]
    assert "export has NOT_SET_HERE, which is not set" in project.launch(*words, "export=[NOT_SET_HERE]", code=2)


# ---- what is wrong with the cluster ------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(code: int, text: str) -> Iterator[str]:
    """The URL of a server that always answers so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (200, '{"ray_version": "2.9.3"}', "runs Ray 2.9.3, but rlpost needs 2.60 or newer"),
        (200, "<html>", "no Ray dashboard answers at .*--dashboard-host=0.0.0.0"),
        (200, "{}", "no Ray dashboard answers at"),
        (502, "bad gateway", "no Ray dashboard answers at .*502"),
        (401, "Unauthorized: Missing authentication token", "wants a token.*RAY_AUTH_MODE=token"),
        (403, "Forbidden: Invalid authentication token", "wants a token.*auth_token"),
    ],
)
def test_whatever_else_answers_is_told_from_a_cluster_that_can_run_the_job(code: int, text: str, said: str) -> None:
    with answering(code, text) as url, pytest.raises(ConfigError, match=said):
        connect(RaySettings(address=url))


def test_nobody_there_is_said_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no Ray dashboard answers at http://127.0.0.1:1 .*address=http://HEAD:8265.*ssh -L"):
        connect(RaySettings(address="http://127.0.0.1:1"))


def test_another_version_of_ray_that_may_work_is_told() -> None:
    lines: list[str] = []
    with answering(200, '{"ray_version": "2.99.1"}') as url:
        connect(RaySettings(address=url), lines.append)
    assert "the cluster runs Ray 2.99.1" in lines[0]


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_commands, "ANSWER_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ConfigError, match=r"no Ray dashboard answers at .*ReadTimeout"):
            connect(RaySettings(address=f"http://127.0.0.1:{server.getsockname()[1]}"))
