"""What ``python -m rlpost.launch kuberay`` does with kubectl: submit a job, say how it is, follow its log, stop it.

A job is suspended to be stopped, not deleted: KubeRay then takes the pods away, whose ``preStop`` lets the run save, and keeps the
RayJob, which goes on when it is resumed. Deleting a RayJob makes KubeRay stop the Ray job besides, with a signal of its own to the driver
and all that it started. A job in a queue of Kueue is deactivated there: Kueue owns ``suspend`` and would set it back.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.jobs import kubectl
from rlpost.jobs.kube_settings import KubeSettings
from rlpost.jobs.kuberay import GPU, INSTANCE_LABEL, KUEUE_QUEUE, Manifest, kube_needs, render, to_yaml
from rlpost.jobs.manifest_checks import NodeSize, amount, check_manifests, node_problems
from rlpost.jobs.needs import JobNeeds
from rlpost.jobs.packaging import paths_of
from rlpost.types import ConfigError

ANSWER_TIMEOUT = "10s"
"""For the first question, which finds out whether there is a cluster at all."""

NODE_S = 900
"""A cloud's machine and a large image take as long."""

ASK_S = 3.0
"""Between two questions about a job that is followed; KubeRay itself looks at it as often."""

RESOURCES = {"RayJob": "rayjobs.ray.io", "RayCluster": "rayclusters.ray.io"}
WORKLOADS, JOB_UID = "workloads.kueue.x-k8s.io", "kueue.x-k8s.io/job-uid"
"""What Kueue keeps of a job in a queue, and the label that leads to it."""
SUBMITTER_CONTAINER = "ray-job-submitter"

OWN_PACKAGE = "rlpost"
"""In every image."""

FAILED, STOPPED = 1, 75
"""Exit codes when the run's own is not known; 75 is what rlpost.train gives when it was told to stop and has saved."""


def files(config: RunConfig, words: Sequence[str], settings: KubeSettings) -> dict[str, str]:
    """The ConfigMap and the RayJob or RayCluster, checked. Raises ConfigError as render and check_manifests do."""
    manifests = render(load_config(words).yaml, config, settings)
    check_manifests(manifests, device=kube_needs(config, settings).device)
    return {"job.yaml": to_yaml(manifests)}


def warnings(config: RunConfig, words: Sequence[str], settings: KubeSettings, step_s: float | None) -> list[str]:
    """What can run but may lose work; ``step_s`` are the planned seconds of a step with its checkpoint."""
    return list(_warnings(config, settings, step_s))


def _warnings(config: RunConfig, settings: KubeSettings, step_s: float | None) -> Iterator[str]:
    if step_s is not None and settings.grace_s < step_s:
        yield (
            f"grace_s={settings.grace_s}, but a step and its checkpoint take {step_s:.0f} s: a run that is told to end may be killed "
            f"before it has saved; set grace_s={int(step_s) + 1} or more"
        )
    if settings.autoscales and config.placement.timeout_s < NODE_S:
        yield (
            f"placement.timeout_s={config.placement.timeout_s:g} is short for the autoscaler, whose nodes may take minutes to come; "
            f"set placement.timeout_s={NODE_S} or more"
        )
    nodes = kube_needs(config, settings).nodes
    if settings.gang == "none" and nodes > 1:
        yield (
            f"gang=none starts {nodes} nodes one by one: two such jobs can each hold half of the GPUs and wait for the other until "
            "placement.timeout_s; set gang=kueue, volcano or yunikorn, whichever the cluster has"
        )
    if config.run_dir and not PurePosixPath(settings.volume_path, config.run_dir).is_relative_to(settings.volume_path):
        yield (
            f"run_dir={config.run_dir} is not on the volume at {settings.volume_path}, so checkpoints may end with the pod, and a retry "
            "then begins anew; give a directory on the volume, or leave run_dir out"
        )
    yield from _off_the_volume(config, settings)


def _off_the_volume(config: RunConfig, settings: KubeSettings) -> Iterator[str]:
    """What the configuration names and pods may not find: they have the volume and the image, and nothing of this machine."""
    named = paths_of(config, Path())
    for key, path in {**named.inside, **named.absolute}.items():
        there = PurePosixPath(settings.volume_path, path)
        if Path(path).expanduser().exists() and path != OWN_PACKAGE:
            yield f"{key}={path} is here; the job's pods look for it at {there}: put it on the volume"
        elif not there.is_relative_to(settings.volume_path):
            yield f"{key}={path} is not on the volume at {settings.volume_path}: put it there, or have it in the image"
    for key, module in named.installed.items():
        if module.partition(".")[0] != OWN_PACKAGE:
            yield f"{key}={module} must be in the image: install it there, or put its file on the volume and name that ({key}=FILE.py:NAME)"


def needs(config: RunConfig, settings: KubeSettings) -> JobNeeds:
    """The nodes of the job. Raises ConfigError as :func:`~rlpost.jobs.needs.job_needs` does."""
    return kube_needs(config, settings)


def ask(paths: Sequence[Path], settings: KubeSettings) -> str | None:
    """What the cluster that kubectl knows says to the objects of the file, as lines; nothing is made there. None without a kubectl.

    The API server is asked (``--dry-run=server``): fields, namespace, rights, admission. ``--dry-run=client`` needs a cluster too, to
    learn what kinds there are, and leaves fields to the server. Pods that no node can hold are told too.
    Raises ConfigError with what it said when it refuses an object.
    """
    (path,) = paths
    if not kubectl.installed():
        return None
    version = kubectl.run(["version", f"--request-timeout={ANSWER_TIMEOUT}"])
    if version.returncode:
        return f"kubectl reaches no cluster from here, so none was asked about the objects: {kubectl.said(version).splitlines()[-1]}"
    done = kubectl.run(["apply", "--dry-run=server", "--validate=strict", f"--filename={path}"])
    if done.returncode:
        raise ConfigError(f"the cluster refuses objects of {path}: {kubectl.with_hint(kubectl.said(done))}")
    large = node_problems(list(yaml.safe_load_all(path.read_text())), _node_sizes())
    unless = ["unless an autoscaler adds such nodes, these pods wait for ever"] if large else []
    return "\n".join(
        ["the cluster takes the objects (kubectl apply --dry-run=server)", *(f"warning: {line}" for line in [*large, *unless])]
    )


def _node_sizes() -> list[NodeSize]:
    """The kinds of nodes that take pods; none where one may not list nodes, which belong to no namespace."""
    done = kubectl.run(["get", "nodes", "--output=json"])
    nodes = json.loads(done.stdout or "{}").get("items", []) if done.returncode == 0 else []
    sizes = {
        NodeSize(cpus=amount(free.get("cpu", 0)), memory_gib=amount(free.get("memory", 0)) / 1024**3, gpus=int(amount(free.get(GPU, 0))))
        for free in (node["status"]["allocatable"] for node in nodes if not node["spec"].get("unschedulable"))
    }
    return sorted(sizes, key=lambda size: (size.gpus, size.memory_gib, size.cpus), reverse=True)


def submit(paths: Sequence[Path], config: RunConfig, settings: KubeSettings, say: Callable[[str], None]) -> str:
    """Make the objects of the file; the job's name. Raises ConfigError when one is there already, or with what kubectl said."""
    (path,) = paths
    name = settings.name_of(config.name)
    existing = kubectl.call(settings, "get", f"--filename={path}", "--ignore-not-found", "--output=name").split()
    if existing:
        raise ConfigError(
            f"{' and '.join(existing)} exist already; to continue that run, `kubectl delete -f {path}` (stop it first, if it runs) and "
            "submit again, or set job_name= to another name for a new run"
        )
    if line := ask(paths, settings):
        say(line)
    kubectl.call(settings, "create", "--save-config", f"--filename={path}")
    if settings.kind == "RayCluster":
        say(f"its nodes come up; then: kubectl port-forward service/{name}-head-svc 8265, and in another shell")
        say("  python -m rlpost.launch ray config=... address=http://127.0.0.1:8265")
    place = "".join(f" {key}={value}" for key, value in _words(settings).items())
    follow = (("follow its log", "--follow --logs"),) if settings.kind == "RayJob" else ()
    for what, option in (("how it is", "--status"), *follow, ("save and stop", "--stop")):
        say(f"{what}: python -m rlpost.launch kuberay {option} {name}{place}")
    return name


def status(job: str, settings: KubeSettings) -> str:
    """How the job stands, how many of its nodes are up, and kubectl's table of its pods."""
    found = _object(job, settings)
    lines = [_headline(found)]
    if message := found.get("status", {}).get("message"):
        lines.append(f"message: {message.strip().splitlines()[-1]}")
    cluster = _cluster_name(found)
    if cluster is None:
        return "\n".join([*lines, "it has no pods now"])
    nodes = found["status"].get("rayClusterStatus", found["status"])
    lines.append(f"worker nodes ready: {nodes.get('readyWorkerReplicas', 0)} of {nodes.get('desiredWorkerReplicas', 0)}")
    pods = kubectl.call(settings, "get", "pods", f"--selector=ray.io/cluster={cluster}", "--label-columns=ray.io/group", "--output=wide")
    return "\n".join([*lines, pods.rstrip() or "its pods are not there yet"])


def logs(job: str, settings: KubeSettings, follow: bool) -> int:
    """Print what the run printed; ``follow``: wait for its start, and go on to its end, over retries. Its exit code, 0 before its end.

    A job that ended has no pods: its log is in the run's directory on the volume. Raises ConfigError for a RayCluster, which runs nothing.
    """
    if settings.kind == "RayCluster":
        raise ConfigError(f"{job} is a RayCluster, which only holds nodes; `python -m rlpost.launch ray --logs` shows what runs on one")
    if follow:
        return _follow(job, settings)
    found = _object(job, settings)
    _tell(_headline(found))
    command = _log_command(found, settings, follow=False)
    if command is not None:
        return kubectl.show(settings, command, kubectl.TIMEOUT_S)
    _tell(_log_place(job, settings))
    return _exit_code(found) or 0


def _follow(job: str, settings: KubeSettings) -> int:
    """To the job's end; a log whose connection broke is printed again."""
    shown, begun, printed = "", "", ""
    while True:
        found = _object(job, settings)
        headline = _headline(found)
        if headline != shown:
            _tell(headline)
            shown = headline
        code = STOPPED if _deactivated(found, settings) else _exit_code(found)
        if code is not None:
            if not begun:
                _tell(_log_place(job, settings))
            return code
        command, run = _log_command(found, settings, follow=True), found["status"].get("jobId", "")
        if command is not None and run != printed:
            if run == begun:
                _tell("the connection to the log broke; from its beginning:")
            begun = run
            printed = run if kubectl.show(settings, command, None) == 0 else printed
        time.sleep(ASK_S)


def stop(job: str, settings: KubeSettings) -> str:
    """Suspend a job that runs, in Kueue where it has a queue there. What happens, as text."""
    found = _object(job, settings)
    if found["kind"] == "RayJob" and _exit_code(found) is not None:
        return f"nothing to stop: {_headline(found)}"
    resource, patch = f"{RESOURCES[found['kind']]}/{job}", '{"spec":{"suspend":true}}'
    again = '{"spec":{"suspend":false}}'
    if _in_kueue(found):
        uid = found["metadata"]["uid"]
        workloads = kubectl.call(settings, "get", WORKLOADS, f"--selector={JOB_UID}={uid}", "--output=name").split()
        if not workloads:
            raise ConfigError(f"{job} has a queue of Kueue, but Kueue has no workload for it yet; wait a moment and try again")
        resource, patch, again = workloads[0], '{"spec":{"active":false}}', '{"spec":{"active":true}}'
    kubectl.call(settings, "patch", resource, "--type=merge", f"--patch={patch}")
    place = f" --namespace={settings.namespace}" if settings.namespace else ""
    return (
        f"{job} is told to stop: a run in progress saves, and gives its nodes back, within the job's grace_s\n"
        f"to go on: kubectl patch {resource}{place} --type=merge --patch='{again}'\n"
        f"to remove it, once it is suspended (the volume keeps the run): kubectl delete{place} "
        f"{RESOURCES[found['kind']]},configmaps --selector={INSTANCE_LABEL}={job}"
    )


def _object(job: str, settings: KubeSettings) -> Manifest:
    """The RayJob or RayCluster as the cluster has it. Raises ConfigError when there is none."""
    found: Manifest = json.loads(kubectl.call(settings, "get", f"{RESOURCES[settings.kind]}/{job}", "--output=json"))
    return {**found, "kind": settings.kind, "status": found.get("status") or {}}


def _in_kueue(found: Manifest) -> bool:
    return KUEUE_QUEUE in found["metadata"].get("labels", {})


def _deactivated(found: Manifest, settings: KubeSettings) -> bool:
    """Whether a job that Kueue holds was stopped, and is not waiting for its turn; false where Kueue does not say."""
    if not (_in_kueue(found) and found["status"].get("jobDeploymentStatus") == "Suspended"):
        return False
    selector = f"--selector={JOB_UID}={found['metadata']['uid']}"
    done = kubectl.run([*kubectl.namespace(settings), "get", WORKLOADS, selector, "--output=json"])
    items = json.loads(done.stdout or "{}").get("items", []) if done.returncode == 0 else []
    return any(item["spec"].get("active") is False for item in items)


def _headline(found: Manifest) -> str:
    """``rayjob grpo: Running, Ray job RUNNING, failed 1 of at most 4 times``."""
    status, suspended = found["status"], found["spec"].get("suspend", False)
    state = status.get("jobDeploymentStatus") or status.get("state") or ("Suspended" if suspended else "new")
    if state == "Suspended":
        state += " (Kueue holds it until its queue has room, or it was stopped)" if _in_kueue(found) else " (it was stopped)"
    words = [f"{found['kind'].lower()} {found['metadata']['name']}: {state}"]
    if status.get("jobStatus"):
        words.append(f"Ray job {status['jobStatus']}")
    if found["kind"] == "RayJob" and status.get("reason"):
        words.append(f"reason {status['reason']}")
    if status.get("failed"):
        words.append(f"failed {status['failed']} of at most {found['spec'].get('backoffLimit', 0) + 1} times")
    return ", ".join(words)


def _log_place(job: str, settings: KubeSettings) -> str:
    return f"nothing of it runs now; what it wrote is on the volume, in {settings.volume_path}/runs/{job}/logs"


def _tell(line: str) -> None:
    """Beside the log, not in it."""
    print(line, file=sys.stderr, flush=True)


def _cluster_name(found: Manifest) -> str | None:
    """The RayCluster whose pods are the job's, where there is one."""
    if found["kind"] == "RayCluster":
        return str(found["metadata"]["name"])
    return found["status"].get("rayClusterName") or None


def _exit_code(found: Manifest) -> int | None:
    """The run's exit code when the job has ended: its own where Ray's message has it. None before."""
    status = found["status"]
    state = status.get("jobDeploymentStatus")
    if state == "Suspended":
        return None if _in_kueue(found) else STOPPED
    if state not in ("Complete", "Failed", "ValidationFailed"):
        return None
    if status.get("jobStatus") == "SUCCEEDED":
        return 0
    own = re.search(r"failed with exit code (\d+)", status.get("message", ""))
    return int(own[1]) if own else (STOPPED if status.get("jobStatus") == "STOPPED" else FAILED)


def _log_command(found: Manifest, settings: KubeSettings, follow: bool) -> list[str] | None:
    """kubectl's words that print the run's output, None while nothing runs."""
    status, cluster = found["status"], _cluster_name(found)
    if status.get("jobDeploymentStatus") != "Running" or not status.get("jobId") or cluster is None:
        return None
    mode, on = found["spec"].get("submissionMode", "K8sJobMode"), ["--follow"] if follow else []
    if mode == "K8sJobMode":
        return ["logs", f"jobs/{found['metadata']['name']}", *on]
    head = kubectl.call(settings, "get", "pods", f"--selector=ray.io/cluster={cluster},ray.io/node-type=head", "--output=name").split()
    if not head:
        return None
    if mode == "SidecarMode":
        return ["logs", head[0], f"--container={SUBMITTER_CONTAINER}", *on]
    inside = ["ray", "job", "logs", "--address=http://127.0.0.1:8265", *on, status["jobId"]]
    return ["exec", head[0], "--container=ray-head", "--", *inside]


def _words(settings: KubeSettings) -> Mapping[str, Any]:
    """Settings that a question about the job must repeat."""
    words = {"namespace": settings.namespace} if settings.namespace else {}
    return words | ({"kind": settings.kind} if settings.kind != "RayJob" else {})
