"""``rlpost.launch kuberay``: what it asks of kubectl, in which order, and what it makes of the answers.

A program of this test stands for kubectl; where there is a real one, what it does without a cluster is tried with it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.jobs import kube_commands
from rlpost.jobs.kube_commands import ask, files, logs, status, stop, submit, warnings
from rlpost.jobs.kube_settings import KubeSettings
from rlpost.types import ConfigError

PROGRAM = """#!{python}
import json, pathlib, sys
here, words = pathlib.Path(__file__).parent, sys.argv[1:]
with (here / "calls").open("a") as file:
    file.write(json.dumps(words) + "\\n")
answers = json.loads((here / "answers.json").read_text())
found = next((one for one in answers if one[0] in " ".join(words)), None)
if found is None:
    sys.exit(0)
code, out, err = found[1][0]
if len(found[1]) > 1:  # the last answer stays
    found[1].pop(0)
    (here / "answers.json").write_text(json.dumps(answers))
print(out, end="")
print(err, end="", file=sys.stderr)
sys.exit(code)
"""


class Kubectl:
    """A kubectl that remembers its words, and answers as it was told: nothing, with 0, where it was told nothing."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.answers: list[tuple[str, list[tuple[int, str, str]]]] = []
        program = directory / "kubectl"
        program.write_text(PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
        self._write()

    def answer(self, mark: str, *answers: tuple[int, str, str]) -> None:
        """To words that contain ``mark``: one answer after the other, the last for ever."""
        self.answers.append((mark, list(answers)))
        self._write()

    def objects(self, *objects: dict[str, Any]) -> None:
        """What the cluster has under the job's name, one question after the other."""
        self.answer("get ray", *((0, json.dumps(one), "") for one in objects))

    def _write(self) -> None:
        (self.directory / "answers.json").write_text(json.dumps(self.answers))

    @property
    def calls(self) -> list[str]:
        file = self.directory / "calls"
        return [" ".join(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    """The only kubectl on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(kube_commands, "ASK_S", 0.01)
    return Kubectl(directory)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A job's file."""
    path = tmp_path / "job.yaml"
    path.write_text(files(run_config(), WORDS, settings())["job.yaml"])
    return path


WORDS = ["config=grpo_qwen_multinode"]


def settings(**values: Any) -> KubeSettings:
    return KubeSettings(**{"image": "registry.example/rlpost:1", "volume_claim": "rlpost", "gpus_per_node": 8, **values})


def run_config(*words: str) -> RunConfig:
    return load_config([*WORDS, *words]).config


def ray_job(state: str = "", **values: Any) -> dict[str, Any]:
    """A RayJob as the cluster has it; ``values`` are of its status, but ``queue``, ``suspend`` and ``mode``."""
    queue, suspend, mode = values.pop("queue", None), values.pop("suspend", False), values.pop("mode", "HTTPMode")
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    status = {"jobDeploymentStatus": state, "rayClusterName": "run-abc12", "jobId": "run-1", **values}
    spec = {"submissionMode": mode, "suspend": suspend, "backoffLimit": 3}
    return {"kind": "RayJob", "metadata": {"name": "run", "uid": "u-1", "labels": labels}, "spec": spec, "status": status}


# ---- files and warnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "nodes"), [((), 4), (("training.ranks=64", "engine.count=32"), 16)])
def test_file_holds_the_run_with_its_words_on_4_and_16_nodes(words: tuple[str, ...], nodes: int) -> None:
    text = files(run_config(*words), [*WORDS, *words], settings(gang="kueue", queue="team"))
    assert list(text) == ["job.yaml"]
    config_map, job = yaml.safe_load_all(text["job.yaml"])
    assert yaml.safe_load(config_map["data"]["config.yaml"])["training"]["ranks"] == (64 if words else 16)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == nodes


def test_file_is_checked_before_it_is_given_out() -> None:
    with pytest.raises(ConfigError, match="set job_name="):
        files(run_config(), WORDS, settings(job_name="My_Job"))
    with pytest.raises(ConfigError, match="image is not given"):
        files(run_config(), WORDS, settings(image="???"))


def test_warnings_name_what_may_lose_work_and_nothing_else(tmp_path: Path) -> None:
    quiet = settings(gang="kueue", queue="team")
    assert warnings(run_config(), WORDS, quiet, 599.0) == []
    (slow,) = warnings(run_config(), WORDS, quiet, 700.2)
    assert "grace_s=600" in slow and "set grace_s=701" in slow
    (gang,) = warnings(run_config(), WORDS, settings(), None)
    assert "gang=none starts 4 nodes one by one" in gang
    (place,) = warnings(run_config("run_dir=/scratch/a"), WORDS, quiet, None)
    assert "run_dir=/scratch/a is not on the volume at /workspace" in place
    assert warnings(run_config("run_dir=/workspace/runs/a"), WORDS, quiet, None) == []
    scaled = settings(gang="kueue", queue="team", separate_roles=True, rollout_min=1)
    (short,) = warnings(run_config("placement.timeout_s=120"), WORDS, scaled, None)
    assert "placement.timeout_s=120 is short for the autoscaler" in short
    assert warnings(run_config("placement.timeout_s=900"), WORDS, scaled, None) == []
    data = tmp_path / "prompts.jsonl"
    data.touch()
    (local,) = warnings(run_config(f"data.train={data}"), WORDS, quiet, None)
    assert f"data.train={data} is here" in local and "put it on the volume" in local


def test_every_path_of_the_configuration_that_pods_may_not_find_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine/reward.py", "games.py", "chat.jinja", "table.jsonl", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    words = ["rewards=[{function: mine/reward.py:score}, {function: far.away:score}, {function: rlpost.rewards:x}]", "weights.directory=/w",
             "model.chat_template=chat.jinja", "environment.name=games:Chess", "environment.options={table: table.jsonl}",
             "model.path=./model", "data.train=/workspace/train.jsonl"]  # fmt: skip
    found = dict(line.split("=", 1) for line in warnings(run_config(*words), WORDS, settings(gang="kueue", queue="team"), None))
    for key, path in {"rewards.0.function": "mine/reward.py", "model.chat_template": "chat.jinja", "environment.name": "games.py",
                      "environment.options.table": "table.jsonl", "model.path": "model"}.items():  # fmt: skip
        assert f"look for it at /workspace/{path}: put it on the volume" in found.pop(key)
    assert "must be in the image" in found.pop("rewards.1.function")
    assert found.pop("weights.directory").startswith("/w is not on the volume at /workspace")
    assert found == {}


# ---- submit ----------------------------------------------------------------------------------------------------------


def test_submit_looks_for_the_name_asks_the_cluster_then_creates(kubectl: Kubectl, written: Path) -> None:
    said: list[str] = []
    assert submit([written], run_config(), settings(namespace="team"), said.append) == "grpo-qwen-multinode"
    assert kubectl.calls == [
        f"--namespace=team get --filename={written} --ignore-not-found --output=name",
        "version --request-timeout=10s",
        f"apply --dry-run=server --validate=strict --filename={written}",
        "get nodes --output=json",
        f"--namespace=team create --save-config --filename={written}",
    ]
    assert said[0].startswith("the cluster takes the objects")
    assert "how it is: python -m rlpost.launch kuberay --status grpo-qwen-multinode namespace=team" in said
    assert "follow its log: python -m rlpost.launch kuberay --follow --logs grpo-qwen-multinode namespace=team" in said


def test_a_cluster_without_a_run_says_how_to_give_it_one(kubectl: Kubectl, written: Path) -> None:
    said: list[str] = []
    submit([written], run_config(), settings(kind="RayCluster"), said.append)
    assert "service/grpo-qwen-multinode-head-svc 8265" in "\n".join(said)
    assert said[-1].endswith("--stop grpo-qwen-multinode kind=RayCluster") and not any("--logs" in line for line in said)


def test_a_name_that_is_taken_is_refused_before_anything_is_made(kubectl: Kubectl, written: Path) -> None:
    kubectl.answer("--ignore-not-found", (0, "configmap/a-config\nrayjob.ray.io/a\n", ""))
    with pytest.raises(ConfigError, match=r"configmap/a-config and rayjob\.ray\.io/a exist already.*kubectl delete.*job_name="):
        submit([written], run_config(), settings(), print)
    assert len(kubectl.calls) == 1


def test_what_the_cluster_refuses_is_said_and_nothing_is_made(kubectl: Kubectl, written: Path) -> None:
    kubectl.answer("--dry-run=server", (1, "", 'strict decoding error: unknown field "spec.x"\n'))
    with pytest.raises(ConfigError, match=r'the cluster refuses objects of .*job\.yaml: .*unknown field "spec\.x"'):
        submit([written], run_config(), settings(), print)
    assert not [call for call in kubectl.calls if "create" in call]


@pytest.mark.parametrize(
    ("stderr", "hint"),
    [
        ('resource mapping not found: no matches for kind "RayJob" in version "ray.io/v1"', "KubeRay is not installed"),
        ("The connection to the server localhost:8080 was refused - did you specify the right host or port?", "reaches no cluster"),
        ("Error from server (Forbidden): rayjobs.ray.io is forbidden", "you may not do that in this namespace"),
        ("something else", "failed: something else"),
    ],
)
def test_an_error_of_kubectl_is_said_with_what_to_do(kubectl: Kubectl, written: Path, stderr: str, hint: str) -> None:
    kubectl.answer("get", (1, "", f"E1201 memcache.go:265] noise\n{stderr}\n"))
    with pytest.raises(ConfigError, match=hint) as caught:
        submit([written], run_config(), settings(), print)
    assert stderr in str(caught.value) and "memcache" not in str(caught.value)


def test_without_kubectl_the_check_is_left_out_and_a_submission_says_what_to_do(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask([written], KubeSettings()) is None
    with pytest.raises(ConfigError, match=r"no kubectl here; install it.*--out DIRECTORY"):
        submit([written], run_config(), settings(), print)


def test_a_dry_run_without_a_cluster_says_so_and_goes_on(kubectl: Kubectl, written: Path) -> None:
    kubectl.answer("version", (1, "Client Version: v1", "Unable to connect to the server: dial tcp: no such host\n"))
    assert ask([written], KubeSettings()) == (
        "kubectl reaches no cluster from here, so none was asked about the objects: Unable to connect to the server: dial tcp: no such host"
    )
    assert len(kubectl.calls) == 1


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl on PATH; install it to see what the real one does without a cluster"
)
def test_the_real_kubectl_without_a_cluster(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "config"
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": ""}}
    nowhere.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context],
                                       "current-context": "c"}))  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(nowhere))
    assert "127.0.0.1:1 was refused" in str(ask([written], KubeSettings()))
    for action in (lambda: submit([written], run_config(), settings(), print), lambda: status("run", settings())):
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1.*kubectl reaches no cluster") as caught:
            action()
        assert "memcache" not in str(caught.value)


def node(cpus: str, memory: str, gpus: int, **spec: Any) -> dict[str, Any]:
    return {"spec": spec, "status": {"allocatable": {"cpu": cpus, "memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}}}


def test_pods_that_no_node_can_hold_are_told_and_not_refused_because_larger_nodes_may_come(kubectl: Kubectl, written: Path) -> None:
    small, closed = node("15900m", "64Gi", 4), node("200", "2000Gi", 8, unschedulable=True)
    kubectl.answer("get nodes", (0, json.dumps({"items": [node("3", "8Gi", 0), small, closed]}), ""))
    answer = str(ask([written], KubeSettings())).splitlines()
    assert answer[0].startswith("the cluster takes the objects")
    (group,) = [line for line in answer if "worker group shared" in line]
    assert group.startswith("warning: ") and "8 GPUs, which no node has (the largest: 15.9 CPUs, 64 GiB, 4 GPUs)" in group
    assert answer[-1] == "warning: unless an autoscaler adds such nodes, these pods wait for ever"


@pytest.mark.parametrize(
    "answer", [(0, json.dumps({"items": [node("96", "1000Gi", 8)]}), ""), (1, "", 'Error from server (Forbidden): nodes is forbidden')]
)  # fmt: skip
def test_nodes_that_suffice_or_may_not_be_listed_are_no_trouble(kubectl: Kubectl, written: Path, answer: tuple[int, str, str]) -> None:
    kubectl.answer("get nodes", answer)
    assert ask([written], KubeSettings()) == "the cluster takes the objects (kubectl apply --dry-run=server)"


# ---- status ----------------------------------------------------------------------------------------------------------


def test_status_says_how_the_job_stands_and_shows_its_pods(kubectl: Kubectl) -> None:
    nodes = {"readyWorkerReplicas": 3, "desiredWorkerReplicas": 4}
    kubectl.objects(ray_job("Running", jobStatus="RUNNING", failed=1, rayClusterStatus=nodes, message="a\nlast line"))
    kubectl.answer("get pods", (0, "NAME  READY\nhead  1/1\n", ""))
    assert status("run", settings(namespace="team")).splitlines() == [
        "rayjob run: Running, Ray job RUNNING, failed 1 of at most 4 times",
        "message: last line",
        "worker nodes ready: 3 of 4",
        "NAME  READY",
        "head  1/1",
    ]
    assert kubectl.calls[0] == "--namespace=team get rayjobs.ray.io/run --output=json"
    assert "--selector=ray.io/cluster=run-abc12 " in kubectl.calls[1]


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (
            ray_job("Suspended", queue="team", suspend=True, rayClusterName=""),
            "rayjob run: Suspended (Kueue holds it until its queue has room",
        ),
        (ray_job("", queue="team", suspend=True, rayClusterName=""), "rayjob run: Suspended (Kueue holds it"),
        (ray_job("Suspended", suspend=True, rayClusterName=""), "rayjob run: Suspended (it was stopped)"),
        (ray_job("Failed", reason="DeadlineExceeded", rayClusterName=""), "rayjob run: Failed, reason DeadlineExceeded"),
        ({"kind": "RayJob", "metadata": {"name": "run"}, "spec": {}}, "rayjob run: new"),
    ],
)
def test_status_of_a_job_without_pods(kubectl: Kubectl, job: dict[str, Any], line: str) -> None:
    kubectl.objects(job)
    first, second = status("run", settings()).splitlines()
    assert first.startswith(line) and second == "it has no pods now"


def test_status_of_a_cluster_without_a_run(kubectl: Kubectl) -> None:
    kubectl.objects(
        {"metadata": {"name": "run"}, "spec": {}, "status": {"state": "ready", "readyWorkerReplicas": 2, "desiredWorkerReplicas": 2}}
    )
    assert status("run", settings(kind="RayCluster")).splitlines()[:2] == ["raycluster run: ready", "worker nodes ready: 2 of 2"]
    assert kubectl.calls[0] == "get rayclusters.ray.io/run --output=json"


def test_an_unknown_job_is_said_with_how_to_find_it(kubectl: Kubectl) -> None:
    kubectl.answer("get ray", (1, "", 'Error from server (NotFound): rayjobs.ray.io "run" not found'))
    with pytest.raises(ConfigError, match=r'"run" not found.*--all-namespaces.*set namespace= and kind='):
        status("run", settings())


# ---- logs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "command"),
    [
        ("HTTPMode", "exec pod/head --container=ray-head -- ray job logs --address=http://127.0.0.1:8265 run-1"),
        ("SidecarMode", "logs pod/head --container=ray-job-submitter"),
        ("K8sJobMode", "logs jobs/run"),
    ],
)
def test_log_is_where_the_way_of_submission_puts_it(kubectl: Kubectl, capfd: Any, mode: str, command: str) -> None:
    kubectl.objects(ray_job("Running", mode=mode))
    kubectl.answer("get pods", (0, "pod/head\n", ""))
    kubectl.answer(command, (0, "step 1\n", ""))
    assert logs("run", settings(), follow=False) == 0
    assert kubectl.calls[-1] == command
    assert capfd.readouterr().out == "step 1\n", "how the job stands goes to stderr, not among the lines of the log"


def test_follow_waits_for_the_start_and_goes_on_over_a_broken_connection_and_a_retry(kubectl: Kubectl, capfd: Any) -> None:
    kubectl.objects(
        ray_job("Initializing", jobId=""),
        ray_job("Running"),
        ray_job("Running"),
        ray_job("Running"),  # the log has ended, KubeRay has not noticed yet: it is not printed again
        ray_job("Retrying", jobId=""),
        ray_job("Running", jobId="run-2"),
        ray_job("Complete", jobId="run-2", jobStatus="SUCCEEDED"),
    )
    kubectl.answer("get pods", (0, "pod/head\n", ""))
    kubectl.answer("exec", (1, "half\n", ""), (0, "whole\n", ""), (0, "second try\n", ""))
    assert logs("run", settings(), follow=True) == 0
    printed = capfd.readouterr()
    assert printed.out == "half\nwhole\nsecond try\n"
    assert printed.err.splitlines() == [
        "rayjob run: Initializing",
        "rayjob run: Running",
        "the connection to the log broke; from its beginning:",
        "rayjob run: Retrying",
        "rayjob run: Running",
        "rayjob run: Complete, Ray job SUCCEEDED",
    ]
    assert all("--follow" in call for call in kubectl.calls if call.startswith("exec"))


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (ray_job("Complete", jobStatus="SUCCEEDED"), 0),
        (ray_job("Failed", jobStatus="FAILED", message="Job entrypoint command failed with exit code 75, last available logs"), 75),
        (ray_job("Failed", jobStatus="FAILED", message="Job entrypoint command failed with exit code 2. No logs"), 2),
        (ray_job("Failed", reason="DeadlineExceeded"), 1),
        (ray_job("Complete", jobStatus="STOPPED"), 75),
        (ray_job("Suspended", suspend=True), 75),
        (ray_job("ValidationFailed", reason="ValidationFailed", jobId=""), 1),
    ],
)
@pytest.mark.parametrize("follow", [False, True])
def test_log_of_a_job_that_ended_ends_with_its_exit_code(
    kubectl: Kubectl, capsys: Any, job: dict[str, Any], code: int, follow: bool
) -> None:
    kubectl.objects(job)
    assert logs("run", settings(), follow) == code
    assert "it wrote is on the volume, in /workspace/runs/run/logs" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [(0, '{"items": [{"spec": {"active": true}}]}', ""), (0, '{"items": [{"spec": {}}]}', ""),
                                    (0, '{"items": []}', ""), (1, "", "Error from server (Forbidden)")])  # fmt: skip
def test_a_job_that_waits_in_the_queue_has_not_ended(kubectl: Kubectl, answer: tuple[int, str, str]) -> None:
    kubectl.objects(ray_job("Suspended", queue="team", suspend=True), ray_job("Complete", queue="team", jobStatus="SUCCEEDED"))
    kubectl.answer("get workloads", answer)
    assert logs("run", settings(), follow=True) == 0
    assert len(kubectl.calls) == 3


def test_a_job_that_was_stopped_in_its_queue_has_ended(kubectl: Kubectl) -> None:
    """It would be followed for ever: Kueue keeps it as one that waits."""
    kubectl.objects(ray_job("Running", queue="team", jobId=""), ray_job("Suspended", queue="team", suspend=True),
                    ray_job("Complete", queue="team", jobStatus="SUCCEEDED"))  # fmt: skip
    kubectl.answer("get workloads", (0, '{"items": [{"spec": {"active": false}}]}', ""))
    assert logs("run", settings(namespace="team"), follow=True) == 75
    assert kubectl.calls[-1] == "--namespace=team get workloads.kueue.x-k8s.io --selector=kueue.x-k8s.io/job-uid=u-1 --output=json"


# ---- stop ------------------------------------------------------------------------------------------------------------


def test_stop_suspends_so_that_the_run_saves_and_can_go_on(kubectl: Kubectl) -> None:
    kubectl.objects(ray_job("Running", jobStatus="RUNNING"))
    text = stop("run", settings(namespace="team"))
    assert kubectl.calls[-1] == '--namespace=team patch rayjobs.ray.io/run --type=merge --patch={"spec":{"suspend":true}}'
    assert "saves" in text and '--namespace=team --type=merge --patch=\'{"spec":{"suspend":false}}\'' in text
    assert not [call for call in kubectl.calls if "delete" in call]


def test_stop_under_kueue_asks_kueue_which_would_undo_it_otherwise(kubectl: Kubectl) -> None:
    kubectl.objects(ray_job("Running", queue="team"))
    kubectl.answer("get workloads", (0, "workload.kueue.x-k8s.io/rayjob-run-1234\n", ""))
    text = stop("run", settings())
    assert kubectl.calls[1].startswith("get workloads.kueue.x-k8s.io --selector=kueue.x-k8s.io/job-uid=u-1 ")
    assert kubectl.calls[2] == 'patch workload.kueue.x-k8s.io/rayjob-run-1234 --type=merge --patch={"spec":{"active":false}}'
    assert '{"spec":{"active":true}}' in text
    kubectl.answers.clear()
    kubectl.objects(ray_job("", queue="team"))
    with pytest.raises(ConfigError, match="Kueue has no workload for it yet"):
        stop("run", settings())


@pytest.mark.parametrize("job", [ray_job("Complete", jobStatus="SUCCEEDED"), ray_job("Suspended", suspend=True)])
def test_stop_of_a_job_that_ended_changes_nothing(kubectl: Kubectl, job: dict[str, Any]) -> None:
    kubectl.objects(job)
    assert stop("run", settings()).startswith("nothing to stop: rayjob run: ")
    assert len(kubectl.calls) == 1
