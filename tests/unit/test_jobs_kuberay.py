"""Manifests of a job: they hold the run, pass the schemas, name secrets without holding one; and faulty ones are refused with the fix.

Fields are checked against the package's excerpt of KubeRay's CRDs always, and against the CRDs themselves where ``shared/schemas`` holds
them above this directory (they are no part of the project).
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.jobs.kube_schema import SCHEMAS, Schema, crd_schema
from rlpost.jobs.kube_settings import KubeSettings
from rlpost.jobs.kuberay import GPU, SCRIPT, STOP_DRIVER, WAIT_FOR_HEAD, Manifest, render, to_yaml
from rlpost.jobs.manifest_checks import NodeSize, amount, check_manifests, find_problems, node_problems
from rlpost.types import ConfigError

PROJECT = Path(__file__).resolve().parents[2]
TEMPLATES = PROJECT / "launch" / "kuberay"


def crd_files() -> list[Path]:
    """The CRDs of RayJob and RayCluster, or nothing where they are not."""
    found = (parent / "shared" / "schemas" for parent in PROJECT.parents)
    directory = next((path for path in found if path.is_dir()), None)
    return sorted(directory.glob("ray.io_ray*.yaml")) if directory else []


@cache
def schema_sources() -> dict[str, dict[str, Schema]]:
    sources = {"excerpt": SCHEMAS}
    if crd_files():
        sources["CRDs"] = SCHEMAS | dict(crd_schema(path) for path in crd_files())
    return sources


@pytest.fixture(params=["excerpt", *(["CRDs"] if crd_files() else [])])
def schemas(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fields are checked against each of the sources in turn."""
    monkeypatch.setattr("rlpost.jobs.manifest_checks.SCHEMAS", schema_sources()[request.param])
    return str(request.param)


def settings(**values: Any) -> KubeSettings:
    return KubeSettings(**{"image": "registry.example/rlpost:1", "volume_claim": "rlpost", "gpus_per_node": 8, **values})


@cache
def run_config(*words: str) -> RunConfig:
    return load_config(words).config


def rendered(*overrides: str, config: str = "grpo_qwen_multinode", **values: Any) -> list[Manifest]:
    return render(f"base: {config}\n", run_config(f"config={config}", *overrides), settings(**values))


def groups(manifests: list[Manifest]) -> list[dict[str, Any]]:
    spec = manifests[1]["spec"]
    return list(spec.get("rayClusterSpec", spec)["workerGroupSpecs"])


def container(group: dict[str, Any]) -> dict[str, Any]:
    return dict(group["template"]["spec"]["containers"][0])


SIXTEEN = ("training.ranks=64", "engine.count=32")
FULL: dict[str, Any] = {
    "namespace": "team", "memory_gib": 900, "separate_roles": True, "gang": "kueue", "queue": "team", "topology": "cloud/rack",
    "rdma_resource": "rdma/ib", "service_account": "trainer", "rollout_min": 1, "rollout_max": 9, "active_deadline_s": 3600,
    "node_selectors": {"trainer": {"gpu": "h100"}, "head": {"pool": "cpu"}}, "tolerations": [{"key": GPU, "operator": "Exists"}],
    "env": {"NCCL_DEBUG": "INFO"}, "secrets": {"HF_TOKEN": "hugging-face/token"}, "secret_sets": ["trackers"],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
@pytest.mark.parametrize("overrides", [(), SIXTEEN], ids=["4 nodes", "16 nodes"])
@pytest.mark.parametrize("values", [{}, {"separate_roles": True, "gang": "volcano"}, {"gang": "yunikorn", "queue": "root.a"}, FULL])
def test_what_is_rendered_passes_every_check(schemas: str, kind: str, overrides: tuple[str, ...], values: dict[str, Any]) -> None:
    manifests = rendered(*overrides, kind=kind, **values)
    nodes = [NodeSize(cpus=48, memory_gib=1000, gpus=8), NodeSize(cpus=32, memory_gib=64)]
    assert find_problems(manifests, device="gpu") == [] == node_problems(manifests, nodes)
    assert [manifest["kind"] for manifest in manifests] == ["ConfigMap", kind]


def test_pods_hold_the_run_on_4_and_16_nodes() -> None:
    for overrides, nodes in (((), 4), (SIXTEEN, 16)):
        (shared,) = groups(rendered(*overrides))
        assert (shared["groupName"], shared["replicas"], shared["minReplicas"], shared["maxReplicas"]) == ("shared", nodes, nodes, nodes)
        assert container(shared)["resources"]["limits"] == container(shared)["resources"]["requests"] == {"cpu": 32, GPU: 8}
        trainer, rollout = groups(rendered(*overrides, separate_roles=True))
        assert [(g["groupName"], g["replicas"]) for g in (trainer, rollout)] == [("trainer", nodes // 2), ("rollout", nodes // 2)]


def test_every_setting_reaches_its_field() -> None:
    config_map, job = rendered(**FULL)
    cluster = job["spec"]["rayClusterSpec"]
    head, (trainer, rollout) = cluster["headGroupSpec"]["template"]["spec"], groups([config_map, job])
    assert config_map["metadata"]["namespace"] == job["metadata"]["namespace"] == "team"
    assert trainer["template"]["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-required-topology": "cloud/rack"}
    assert (head["nodeSelector"], trainer["template"]["spec"]["nodeSelector"]) == ({"pool": "cpu"}, {"gpu": "h100"})
    assert "nodeSelector" not in rollout["template"]["spec"] and "tolerations" not in head
    assert {pod["serviceAccountName"] for pod in (head, trainer["template"]["spec"])} == {"trainer"}
    assert container(trainer)["resources"]["limits"] == {"cpu": 32, "memory": "900Gi", GPU: 8, "rdma/ib": 1}
    assert container(trainer)["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert GPU not in head["containers"][0]["resources"]["limits"] and "rdma/ib" not in head["containers"][0]["resources"]["limits"]
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container(rollout)["env"]
    assert container(rollout)["envFrom"] == [{"secretRef": {"name": "trackers"}}]
    spec = {key: value for key, value in job["spec"].items() if key not in ("entrypoint", "rayClusterSpec")}
    assert spec == {
        "submissionMode": "HTTPMode", "shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": 0, "backoffLimit": 3,
        "activeDeadlineSeconds": 3600,
    }  # fmt: skip


def test_only_rollout_nodes_are_scaled() -> None:
    manifests = rendered(**FULL)
    assert [(g["minReplicas"], g["replicas"], g["maxReplicas"]) for g in groups(manifests)] == [(2, 2, 2), (1, 2, 9)]
    assert manifests[1]["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True
    assert "enableInTreeAutoscaling" not in rendered(separate_roles=True)[1]["spec"]["rayClusterSpec"]
    with pytest.raises(ConfigError, match=r"rollout_min=3.*2 rollout nodes.*engine\.count"):
        rendered(separate_roles=True, rollout_min=3)


@pytest.mark.parametrize(
    ("gang", "labels"),
    [
        ("kueue", {"kueue.x-k8s.io/queue-name": "q"}),
        ("volcano", {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": "q"}),
        (
            "yunikorn",
            {
                "ray.io/gang-scheduling-enabled": "true",
                "yunikorn.apache.org/app-id": "grpo-qwen-multinode",
                "yunikorn.apache.org/queue": "q",
            },
        ),
    ],
)
def test_a_gang_scheduler_finds_its_labels(gang: str, labels: dict[str, str]) -> None:
    plain = rendered()[1]["metadata"]["labels"]
    assert rendered(gang=gang, queue="q")[1]["metadata"]["labels"] == plain | labels


@pytest.mark.parametrize(("config", "size"), [("grpo_qwen_multinode", 8), ("grpo_tiny", 0)])
def test_the_config_map_loads_as_the_run_that_joins_its_ray_and_resumes(tmp_path: Path, config: str, size: int) -> None:
    """Read back from the YAML that kubectl gets, as the driver in the pod reads it."""
    loaded = load_config([f"config={config}", "seed=7"])
    text = to_yaml(render(loaded.yaml, loaded.config, settings(job_name="run-1", gpus_per_node=size)))
    config_map, job = yaml.safe_load_all(text)
    for name, content in config_map["data"].items():
        (tmp_path / name).write_text(content)
    assert job["spec"]["entrypoint"] == "bash /etc/rlpost/run.sh"
    assert config_map["data"]["run.sh"].endswith("exec python3 -m rlpost.train config=/etc/rlpost/job.yaml\n")
    inside = load_config([f"config={tmp_path / 'job.yaml'}"]).config
    assert (inside.run_dir, inside.resume, inside.placement.ray_address) == ("/workspace/runs/run-1", "auto", "auto")
    assert inside.placement.device == ("gpu" if size else "cpu")
    inside.run_dir, inside.resume = loaded.config.run_dir, loaded.config.resume
    inside.placement = loaded.config.placement
    assert inside == loaded.config


@pytest.mark.parametrize("values", [{"preflight": False}, {"separate_roles": True, "rollout_min": 1}])
def test_without_a_preflight_the_command_is_the_training_alone(values: dict[str, Any]) -> None:
    """An autoscaler's nodes may still come: the doctor would miss them."""
    config_map, job = rendered(**values)
    assert job["spec"]["entrypoint"] == "python3 -m rlpost.train config=/etc/rlpost/job.yaml"
    assert set(config_map["data"]) == {"config.yaml", "job.yaml"}


PYTHON = """#!/bin/bash
echo "$2" >>"$LOG"
if [[ $2 == rlpost.train ]]; then exit 75; fi
if [[ $DOCTOR == hangs ]]; then exec sleep 1000; fi
exit "$DOCTOR"
"""


@pytest.mark.parametrize(("doctor", "code", "ran"), [("0", 75, ["rlpost.doctor", "rlpost.train"]), ("1", 1, ["rlpost.doctor"])])
def test_the_doctor_looks_before_the_training_and_what_it_finds_failed_ends_the_job(
    tmp_path: Path, doctor: str, code: int, ran: list[str]
) -> None:
    done = subprocess.run(["bash", "-c", SCRIPT], env=stand_in(tmp_path, doctor), check=False, timeout=30)
    assert (done.returncode, (tmp_path / "log").read_text().split()) == (code, ran)


def test_a_job_that_is_told_to_stop_during_its_preflight_ends_at_once_without_training(tmp_path: Path) -> None:
    process = subprocess.Popen(["bash", "-c", SCRIPT], env=stand_in(tmp_path, "hangs"), start_new_session=True)
    try:
        while not (tmp_path / "log").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 75
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "log").read_text().split() == ["rlpost.doctor"]


def stand_in(directory: Path, doctor: str) -> dict[str, str]:
    """The environment of a shell whose python3 notes what it is asked for."""
    program = directory / "python3"
    program.write_text(PYTHON)
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "LOG": str(directory / "log"), "DOCTOR": doctor}


def test_a_run_waits_for_nodes_of_the_autoscaler_instead_of_calling_the_cluster_too_small() -> None:
    changes = [yaml.safe_load(rendered(**values)[0]["data"]["job.yaml"])["placement"] for values in ({}, FULL)]
    assert "wait_for_nodes" not in changes[0] and changes[1]["wait_for_nodes"] is True


@pytest.mark.parametrize("values", [{}, FULL])
def test_yaml_says_what_was_rendered(values: dict[str, Any]) -> None:
    manifests = rendered(**values)
    text = to_yaml(manifests)
    assert list(yaml.safe_load_all(text)) == manifests
    assert "&id" not in text, "an anchor is hard to edit by hand"


@pytest.mark.parametrize(
    ("name", "config", "values"),
    [
        (
            "rayjob-cpu",
            "grpo_tiny",
            {"gpus_per_node": 0, "cpus_per_node": 2, "memory_gib": 8, "head_memory_gib": 4, "shm_gib": 2},
        ),
        ("rayjob", "grpo_qwen_multinode", {"gang": "kueue", "queue": "team", "secrets": {"HF_TOKEN": "hugging-face/token"}}),
        (
            "raycluster-roles",
            "grpo_qwen_multinode",
            {
                "kind": "RayCluster", "gang": "volcano", "queue": "team", "separate_roles": True, "rollout_min": 1, "rollout_max": 4,
                "rdma_resource": "rdma/ib", "node_selectors": {"trainer": {"pool": "training"}, "rollout": {"pool": "inference"}},
            },
        ),
    ],
)  # fmt: skip
def test_a_template_for_the_hand_is_what_is_rendered(schemas: str, name: str, config: str, values: dict[str, Any]) -> None:
    large = {"memory_gib": 512, "shm_gib": 64, "tolerations": [{"key": GPU, "operator": "Exists"}]}
    written = list(yaml.safe_load_all((TEMPLATES / f"{name}.yaml").read_text()))
    common = {"image": "registry.example/rlpost:latest", **(large if "gpus_per_node" not in values else {})}
    assert written == rendered(config=config, **{**common, **values})
    assert find_problems(written) == []


def test_there_is_no_other_template() -> None:
    assert sorted(path.stem for path in TEMPLATES.iterdir()) == ["raycluster-roles", "rayjob", "rayjob-cpu"]


def test_secrets_are_named_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "planted-value")
    manifests = rendered(secrets={"HF_TOKEN": "hugging-face/token"}, secret_sets=["trackers"])
    assert "planted-value" not in to_yaml(manifests)
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hugging-face", "key": "token"}}} in container(groups(manifests)[0])[
        "env"
    ]
    assert "Secret" not in [manifest["kind"] for manifest in manifests]


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "password", "GIT_CREDENTIALS"])
def test_a_secret_among_the_plain_variables_is_refused_without_repeating_it(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"env has {name}.*secrets=") as caught:
        rendered(env={name: "planted-value"})
    assert "planted-value" not in str(caught.value)


def test_a_secret_in_the_configuration_or_in_place_of_its_name_is_refused() -> None:
    judge = "rewards=[{function: exact_match, options: {judge: {api_key: planted-value}}}]"
    with pytest.raises(ConfigError, match=r"rewards\.0\.options\.judge\.api_key.*ConfigMap") as caught:
        rendered(judge)
    with pytest.raises(ConfigError, match=r"secrets\.HF_TOKEN is no reference.*secret-name/key") as direct:
        rendered(secrets={"HF_TOKEN": "planted-value"})
    assert "planted-value" not in f"{caught.value}{direct.value}"
    rendered("rewards=[{function: exact_match, options: {eos_token: x}}]")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image": "???"}, "image is not given.*set image="),
        ({"volume_claim": ""}, "volume_claim is not given"),
        ({"gpus_per_node": None}, "gpus_per_node is not given.*0 for a run on CPUs"),
        ({"gpus_per_node": 0}, r"placement\.device is gpu, but gpus_per_node=0"),
        ({"gang": "kueu"}, "gang is 'kueu'.*did you mean kueue"),
        ({"gang": "kueue"}, "gang=kueue has no queue.*LocalQueue"),
        ({"queue": "q"}, "queue=q has no effect with gang=none"),
        ({"topology": "rack", "gang": "volcano"}, "topology=rack is read by Kueue only.*node_selectors"),
        ({"rollout_max": 3}, "rollout_min and rollout_max.*separate_roles=true"),
        ({"node_selectors": {"engine": {"a": "b"}}}, "role 'engine', expected one of head, trainer, rollout, shared"),
        (
            {"node_selectors": {"trainer": {"a": "b"}, "head": {"a": "b"}}},
            r"names trainer, but the nodes of this job are head, shared; .*separate_roles=true",
        ),
        (
            {"node_selectors": {"shared": {"a": "b"}}, "separate_roles": True},
            r"names shared, but the nodes of this job are head, trainer, rollout; .*separate_roles=false",
        ),
        ({"env": {"WANDB_KEY": "abc"}}, "env has WANDB_KEY, which reads like a secret"),
        ({"env": {"URL": "https://u:p@h"}}, "env has URL, which reads like a secret"),
        ({"node_selectors": {"head": "b"}}, r"node_selectors\.head is 'b'"),
        ({"shm_gib": 0}, "shm_gib is 0, expected at least 1"),
        ({"grace_s": -1}, "grace_s is -1"),
        ({"volume_path": "work"}, "volume_path is 'work', expected an absolute path"),
        ({"backoff_limit": "3"}, "backoff_limit is '3'"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rendered(**values)


def at(manifest: Manifest, *path: str | int) -> Any:
    found: Any = manifest
    for part in path:
        found = found[part]
    return found


CLUSTER = ("spec", "rayClusterSpec")
WORKER = (*CLUSTER, "workerGroupSpecs", 0)
POD = (*WORKER, "template", "spec")
BOX = (*POD, "containers", 0)


@pytest.mark.parametrize(
    ("path", "key", "value", "message"),
    [
        (("spec",), "shutDownAfterJobFinishes", True, r"RayJob spec: unknown field shutDownAfterJobFinishes, .*shutdownAfterJobFinishes"),
        (BOX, "volumeMount", [], r"spec\.rayClusterSpec\.workerGroupSpecs\.0\.template\.spec\.containers\.0: unknown field volumeMount, "),
        (("metadata",), "lables", {}, "RayJob metadata: unknown field lables"),
        (("spec",), "backoffLimit", "3", r"RayJob spec\.backoffLimit: found '3', expected integer"),
        (WORKER, "replicas", 1.5, r"workerGroupSpecs\.0\.replicas: found 1\.5, expected integer"),
        (CLUSTER, "rayVersion", 2.6, r"rayVersion: found 2\.6, expected string.*quotes"),
        ((*BOX, "resources", "limits"), "memory", "16 GB", r"limits\.memory: (found '16 GB', expected an amount|'16 GB' does not match)"),
        (WORKER, "groupName", None, r"groupName: found None, expected string"),
    ],
)
def test_a_wrong_field_is_refused_by_its_path(schemas: str, path: tuple[Any, ...], key: str, value: Any, message: str) -> None:
    """A cluster drops an unknown field without a word, and the job runs otherwise than was meant."""
    manifests = rendered()
    at(manifests[1], *path)[key] = value
    with pytest.raises(ConfigError, match=message):
        check_manifests(manifests)


@pytest.mark.parametrize(
    ("path", "key"), [(WORKER, "groupName"), (POD, "containers"), (BOX, "name"), ((), "spec"), (("metadata",), "name")]
)
def test_a_missing_field_is_refused(schemas: str, path: tuple[Any, ...], key: str) -> None:
    manifests = rendered()
    del at(manifests[1], *path)[key]
    with pytest.raises(ConfigError, match=f"'{key}' is a required property; add it"):
        check_manifests(manifests)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [(("spec",), "submissionMode", "JobMode"), (("spec",), "submissionMode", ""), ((), "apiVersion", "ray.io/v1alpha1")],
)
def test_a_value_that_is_none_of_those_allowed_is_refused(path: tuple[Any, ...], key: str, value: str) -> None:
    """The CRD itself takes any text there; the operator then fails."""
    manifests = rendered()
    at(manifests[1], *path)[key] = value
    with pytest.raises(ConfigError, match=f"{key}: found '{value}', expected one of"):
        check_manifests(manifests)


def test_a_secret_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kind is 'Secret'.*never rendered"):
        check_manifests([*rendered(), {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}])


def more_groups(job: Manifest, number: int, submission: str = "HTTPMode") -> None:
    job["spec"]["submissionMode"] = submission
    first = at(job, *WORKER)
    at(job, *CLUSTER)["workerGroupSpecs"] = [{**copy.deepcopy(first), "groupName": f"rollout{i}"} for i in range(number)]


def twice(job: Manifest) -> None:
    at(job, *CLUSTER)["workerGroupSpecs"].append(copy.deepcopy(at(job, *WORKER)))


def asking(**amounts: Any) -> Callable[[Manifest], Any]:
    """Other requests and limits of a worker pod."""
    return lambda job: at(job, *BOX).update(resources={"requests": amounts, "limits": dict(amounts)})


def scaled(job: Manifest) -> None:
    at(job, *CLUSTER)["enableInTreeAutoscaling"] = True
    at(job, *WORKER)["maxReplicas"] = 9


FAULTS: list[tuple[str, Callable[[Manifest], Any], str]] = [
    ("too many groups", lambda job: more_groups(job, 18), "18 worker groups, but Kueue takes at most 17; put nodes"),
    (
        "a submitter pod takes a place",
        lambda job: more_groups(job, 17, "K8sJobMode"),
        "17 worker groups, but Kueue takes at most 16",
    ),
    ("a reserved name", lambda job: at(job, *WORKER).update(groupName="head"), "worker group head has a name that Kueue keeps"),
    ("held after the end", lambda job: job["spec"].update(shutdownAfterJobFinishes=False), "shutdownAfterJobFinishes is false, but Kueue"),
    ("scaled under Kueue", scaled, 'refuses without the annotation kueue.x-k8s.io/elastic-job: "true"'),
    ("trainers scaled", scaled, "worker group shared is scaled from 4 to 9 nodes, but only the group rollout may be"),
    ("no GPU limit", lambda job: at(job, *BOX)["resources"]["limits"].pop(GPU), "worker group shared: there is no limit of nvidia.com/gpu"),
    ("no GPU at all", lambda job: at(job, *BOX).pop("resources"), "worker group shared: there is no limit of nvidia.com/gpu"),
    (
        "requests are not limits",
        lambda job: at(job, *BOX)["resources"]["requests"].update(cpu=16),
        "of cpu it asks for 16 but may use 32; with GPUs both have to be equal",
    ),
    ("larger than any node", asking(cpu=32, memory="64Gi", **{GPU: 9}),
     "worker group shared: a pod asks for 32 CPUs, 64 GiB, 9 GPUs, which no node has (the largest: 64 CPUs, 512 GiB, 8 GPUs)"),
    ("more memory than any node", asking(cpu=1, memory="513Gi", **{GPU: 1}),
     "a pod asks for 1 CPUs, 513 GiB, 1 GPUs, which no node has"),
    ("a large shm", asking(cpu=32, memory="8Gi", **{GPU: 8}),
     "shm in memory may take 8Gi, and the pod 8 GiB with it"),
    ("an endless shm", lambda job: at(job, *POD)["volumes"][2]["emptyDir"].pop("sizeLimit"), "shm in memory has no sizeLimit"),
    ("a long name", lambda job: job["metadata"].update(name="a" * 48), "(48 characters), expected at most 47"),
    ("an underscore", lambda job: job["metadata"].update(name="grpo_tiny"), "metadata.name is 'grpo_tiny'"),
    ("a number first", lambda job: job["metadata"].update(name="7b"), "with a letter first; set job_name="),
    ("a long label", lambda job: job["metadata"]["labels"].update(a="b" * 64), "metadata.labels.a is"),
    ("a group's name", lambda job: at(job, *WORKER).update(groupName="My_Group"), "worker group 'My_Group': expected a name"),
    ("twice the same group", twice, "2 worker groups are called shared"),
    ("replicas outside", lambda job: at(job, *WORKER).update(replicas=5), "replicas 5 are not between minReplicas 4 and maxReplicas 4"),
    ("no image", lambda job: at(job, *BOX).pop("image"), "container ray-worker: there is no image"),
    ("another config map", lambda job: at(job, *POD)["volumes"][1]["configMap"].update(name="other"), "ConfigMap other is mounted, but"),
    ("an unknown volume", lambda job: at(job, *BOX)["volumeMounts"][0].update(name="work"), "the volume work is mounted, but there are"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [pytest.param(change, message, id=name) for name, change, message in FAULTS])
def test_what_a_cluster_would_refuse_or_never_start_is_refused_here(change: Callable[[Manifest], Any], message: str) -> None:
    manifests = rendered(gang="kueue", queue="team")
    nodes = [NodeSize(cpus=64, memory_gib=512, gpus=8)]
    assert find_problems(manifests, device="gpu") == [] == node_problems(manifests, nodes)
    change(manifests[1])
    assert message in "\n".join([*find_problems(manifests, device="gpu"), *node_problems(manifests, nodes)])


def test_17_groups_are_taken_and_without_kueue_more() -> None:
    manifests = rendered(gang="kueue", queue="team")
    more_groups(manifests[1], 17)
    assert find_problems(manifests) == []
    plain = rendered()
    more_groups(plain[1], 30)
    assert find_problems(plain) == []


def test_a_config_map_that_kubernetes_does_not_take_is_refused() -> None:
    manifests = rendered()
    manifests[0]["data"]["table"] = "é" * (1 << 19)
    (problem,) = find_problems(manifests)
    assert "expected at most 1048576" in problem


@pytest.mark.parametrize(
    ("run", "job", "cluster"),
    [
        ("grpo_tiny", "grpo-tiny", "grpo-tiny"),
        ("Qwen3 14B/try 2.", "qwen3-14b-try-2", "qwen3-14b-try-2"),
        ("7b", "run-7b", "run-7b"),
        ("___", "run", "run"),
        ("a" * 46 + "-bc", "a" * 46, "a" * 46 + "-bc"),
    ],
)
def test_any_run_has_a_name_that_kubernetes_takes(run: str, job: str, cluster: str) -> None:
    for kind, expected in (("RayJob", job), ("RayCluster", cluster)):
        manifests = rendered(f"name={run}", kind=kind)
        assert find_problems(manifests) == []
        assert [manifest["metadata"]["name"] for manifest in manifests] == [f"{expected}-config", expected]
        assert yaml.safe_load(manifests[0]["data"]["job.yaml"])["run_dir"] == f"/workspace/runs/{expected}"


def test_an_impossible_job_name_is_refused_for_all_objects_with_the_setting_to_change() -> None:
    problems = find_problems(rendered(job_name="My_Job"))
    assert len(problems) == 2 and all("set job_name=" in problem for problem in problems)


def test_nodes_carry_the_role_of_their_group_as_a_label_of_ray() -> None:
    """Ray places a bundle on the nodes of its role by it; KubeRay refuses labels among rayStartParams."""
    manifests = rendered(separate_roles=True)
    assert [group["labels"] for group in groups(manifests)] == [{"rlpost-role": "trainer"}, {"rlpost-role": "rollout"}]
    assert groups(rendered())[0]["labels"] == {"rlpost-role": "shared"}
    for group in (manifests[1]["spec"]["rayClusterSpec"]["headGroupSpec"], groups(manifests)[1]):
        group["rayStartParams"]["labels"] = "rlpost-role=rollout"
    problems = find_problems(manifests)
    assert len(problems) == 2 and all("rayStartParams.labels is refused by KubeRay" in problem for problem in problems)


@pytest.mark.parametrize(
    ("text", "value"), [(8, 8), ("8", 8), ("500m", 0.5), ("16Gi", 16 * 2**30), ("1.5G", 1.5e9), ("2k", 2000), ("1e3", 1000), ("3E", 3e18)]
)
def test_amounts(text: str | int, value: float) -> None:
    assert amount(text) == value


def test_pods_live_longer_than_the_driver_needs_to_save() -> None:
    _, job = rendered(grace_s=900)
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "900"} in head["containers"][0]["env"]
    for pod in (head, at(job, *POD)):
        assert pod["terminationGracePeriodSeconds"] > 900
    assert [hook(pod) for pod in (head, at(job, *POD))] == [STOP_DRIVER, WAIT_FOR_HEAD]
    _, rollout = groups(rendered(**FULL))
    assert "lifecycle" not in container(rollout), "the autoscaler's nodes need not wait for a head that goes on"


def hook(pod: Manifest) -> str:
    return str(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])


def test_the_head_ends_after_its_driver_has_saved_and_ends_nobody_else(tmp_path: Path) -> None:
    """The hook itself, over a directory that stands for /proc: this machine may have other drivers."""
    program = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.3); pathlib.Path(sys.argv[1]).write_text('saved'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end); print('ready', flush=True); signal.pause()"
    )
    lines = {
        "driver": ["-m", "rlpost.train", "config=x"],
        "trainer": ["-m", "rlpost.training"],
        "shell": ["bash", "-c", "python3 -m rlpost.train x"],
    }
    started = {}
    try:
        for name, words in lines.items():
            started[name] = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / name)], stdout=subprocess.PIPE)
            assert started[name].stdout.readline() == b"ready\n"  # type: ignore[union-attr]
            directory = tmp_path / "proc" / str(started[name].pid)
            directory.mkdir(parents=True)
            (directory / "cmdline").write_bytes(b"\0".join(word.encode() for word in ["python3", *words]) + b"\0")
        script = STOP_DRIVER.replace(" /proc/", f" {tmp_path}/proc/").replace("-d/ -f3", f"-d/ -f{len(tmp_path.parts) + 2}")
        assert script.count("/proc/") == 1
        waiting = subprocess.Popen(["/bin/bash", "-c", script])
        assert started["driver"].wait(timeout=30) == 0
        assert waiting.wait(timeout=30) == 0
        assert (tmp_path / "driver").read_text() == "saved"
        assert [started[name].poll() for name in ("trainer", "shell")] == [None, None]
    finally:
        for process in started.values():
            process.send_signal(signal.SIGKILL)
            process.wait()


def test_workers_stay_as_long_as_they_are_connected_to_the_head() -> None:
    """The hook itself, over a connection of this process: its own port stands for the head's."""
    with socket.create_server(("127.0.0.1", 0)) as head, socket.create_connection(head.getsockname()) as worker:
        accepted, _ = head.accept()
        assert f"{6379:04X}" == "18EB" and WAIT_FOR_HEAD.count("18EB") == 1
        script = WAIT_FOR_HEAD.replace("18EB", f"{head.getsockname()[1]:04X}").replace("sleep 2", "sleep 0.05")
        waiting = subprocess.Popen(["/bin/bash", "-c", script])
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(timeout=0.5)
            accepted.close()
            worker.close()
            assert waiting.wait(timeout=30) == 0, "a port that only listens is no head that answers"
        finally:
            waiting.kill()
            waiting.wait()


def test_the_default_ray_version_is_the_one_that_is_pinned() -> None:
    pins = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    (pin,) = (one.removeprefix("ray[default]==").removesuffix(".*") for one in pins if one.startswith("ray["))
    assert KubeSettings().ray_version.startswith(f"{pin}.")


def test_the_excerpt_says_what_the_crds_say() -> None:
    """Every field of the excerpt is one of the CRD, with its type, and whatever that requires is required."""
    if not crd_files():
        pytest.skip("shared/schemas with KubeRay's CRDs is not above this directory; only the excerpt was checked against")
    compared = 0

    def compare(ours: Schema, theirs: Schema, where: str) -> None:
        nonlocal compared
        compared += 1
        if "anyOf" in ours:
            assert theirs.get("x-kubernetes-int-or-string") is True, where
            return
        assert ours["type"] == theirs["type"], where
        assert set(theirs.get("required", [])) <= set(ours.get("required", [])), where
        if "enum" in ours and "enum" in theirs:
            assert set(ours["enum"]) <= set(theirs["enum"]), where
        for name, inner in ours.get("properties", {}).items():
            assert name in theirs["properties"], f"{where}.{name} is no field of the CRD"
            compare(inner, theirs["properties"][name], f"{where}.{name}")
        if "items" in ours:
            compare(ours["items"], theirs["items"], f"{where}[]")

    for kind in ("RayJob", "RayCluster"):
        compare(SCHEMAS[kind], schema_sources()["CRDs"][kind], kind)
    assert compared > 200


CRD = """
kind: CustomResourceDefinition
spec:
  names: {kind: RayJob}
  versions:
  - name: v1alpha1
    schema: {openAPIV3Schema: {type: object}}
  - name: v1
    schema:
      openAPIV3Schema:
        type: object
        properties:
          apiVersion: {type: string}
          kind: {type: string}
          metadata: {type: object}
          spec:
            type: object
            required: [entrypoint]
            properties:
              entrypoint: {type: string}
              anything: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {a: {type: string}}}
              names: {type: object, additionalProperties: {type: string}}
              containers:
                type: array
                items: {type: object, properties: {name: {type: string}, amount: {x-kubernetes-int-or-string: true}}}
"""
"""As KubeRay's files are built, with a field for each thing that they say."""


def test_a_crd_is_read_as_a_schema_that_refuses_what_it_does_not_name(tmp_path: Path) -> None:
    path = tmp_path / "crd.yaml"
    path.write_text(CRD)
    kind, schema = crd_schema(path)
    validator = Draft7Validator(schema)
    spec = {"entrypoint": "x", "anything": {"b": 1}, "names": {"any": "y"}, "containers": [{"name": "a", "amount": 3}, {"amount": "3Gi"}]}
    manifest = {"apiVersion": "ray.io/v1", "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    assert kind == "RayJob" and not list(validator.iter_errors(manifest))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"unknown": 1}, "'unknown' was unexpected"),
        ({"entrypoint": 1}, "1 is not of type 'string'"),
        ({"names": {"any": 1}}, "1 is not of type 'string'"),
        ({"containers": [{"nam": "a"}]}, "'nam' was unexpected"),
    ]
    for change, message in wrong:
        (error,) = validator.iter_errors({**manifest, "spec": {**spec, **change}})
        assert message in error.message
    assert [error.message for error in validator.iter_errors({**manifest, "spec": {}})] == ["'entrypoint' is a required property"]
    with pytest.raises(ConfigError, match="with the version v2"):
        crd_schema(path, "v2")


def test_a_file_that_is_no_crd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: Pod\n")
    with pytest.raises(ConfigError, match=r"a\.yaml holds no CustomResourceDefinition.*KeyError.*ray\.io_rayjobs\.yaml"):
        find_problems(rendered(), crds=[tmp_path / "a.yaml"])
    with pytest.raises(ConfigError, match=r"missing\.yaml holds no CustomResourceDefinition"):
        find_problems(rendered(), crds=[tmp_path / "missing.yaml"])
