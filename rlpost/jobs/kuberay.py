"""A RayJob (or RayCluster) and the ConfigMap with the run's configuration, as plain mappings; ``to_yaml`` writes them.

Fields are those of KubeRay's API (ray.io/v1); labels and annotations of the gang schedulers are those of the pages on Kueue, Volcano and
YuniKorn in Ray's documentation. Four things are not obvious:

- The command names files only: what a job changes in the configuration stands in a file over it, and the preflight before the training in
  a script, because the ways of submission differ in how they quote.
- The driver runs on the head (Ray puts jobs there), where nothing else is placed (``num-cpus: 0``).
- When pods are told to end, the head's ``preStop`` sends SIGTERM to the driver and waits for it, and workers wait for the head, so that
  ranks are there while the checkpoint is written. ``ray job stop`` gives as much time (RAY_JOB_STOP_WAIT_TIME_S).
- The group's role is a label of its Ray nodes (ROLE_LABEL) by the field ``labels``; KubeRay (from 1.5) refuses it in ``rayStartParams``.
"""

from __future__ import annotations

from typing import Any

import yaml

from rlpost.config.derive import ROLE_LABEL
from rlpost.config.schema import RunConfig
from rlpost.jobs.kube_settings import HEAD, KubeSettings, check_settings
from rlpost.jobs.needs import ROLLOUT_GROUP, JobNeeds, NodeGroup, job_needs, overrides_in_job
from rlpost.types import ConfigError

GPU = "nvidia.com/gpu"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_ELASTIC = "kueue.x-k8s.io/elastic-job"
INSTANCE_LABEL = "app.kubernetes.io/instance"
CONFIG_DIRECTORY = "/etc/rlpost"
RUN_FILE, JOB_FILE, SCRIPT_FILE = "config.yaml", "job.yaml", "run.sh"
TRAIN = f"python3 -m rlpost.train config={CONFIG_DIRECTORY}/{JOB_FILE}"

SCRIPT = f"""\
# Looks at all nodes, then trains. What the doctor finds failed ends the job; told to stop meanwhile, there is nothing to save.
python3 -m rlpost.doctor cluster config={CONFIG_DIRECTORY}/{JOB_FILE} &
doctor=$!
trap 'kill $doctor; exit 75' TERM
wait $doctor || {{ code=$?; echo "preflight: no training (preflight=false leaves it out)"; exit $code; }}
trap - TERM
exec {TRAIN}
"""

STOP_DRIVER = (
    "for pid in $(grep -lzx 'rlpost[.]train' /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3); "
    "do kill -TERM $pid && tail --pid=$pid -f /dev/null; done"
)
"""Of the head: the process that has ``rlpost.train`` as an argument, which this shell itself has not."""

WAIT_FOR_HEAD = "while grep -qs ':18EB 01 ' /proc/net/tcp /proc/net/tcp6; do sleep 2; done"
"""Of workers: as long as there is a connection (01: established) to the head's port, 6379 (18EB). A head that saves is about to end, and
the name of its service may not lead to it any more."""

SPARE_GRACE_S = 30
"""Pods live this much longer than the driver may need: Ray's own processes end after it."""

Manifest = dict[str, Any]


def render(config_yaml: str, config: RunConfig, settings: KubeSettings) -> list[Manifest]:
    """The ConfigMap and the RayJob or RayCluster that hold the run of ``config``, whose text is ``config_yaml``.

    Raises ConfigError for settings that cannot work, and as :func:`~rlpost.jobs.needs.job_needs` does.
    """
    check_settings(settings, config)
    needs = kube_needs(config, settings)
    _check_roles(needs, settings)
    name = settings.name_of(config.name)
    cluster = _cluster_spec(name, needs, settings)
    spec = cluster if settings.kind == "RayCluster" else _job_spec(cluster, settings)
    job: Manifest = {"apiVersion": "ray.io/v1", "kind": settings.kind, "metadata": _metadata(name, name, settings), "spec": spec}
    _add_gang(job["metadata"], name, settings)
    return [_config_map(name, config_yaml, config, needs, settings), job]


def _check_roles(needs: JobNeeds, settings: KubeSettings) -> None:
    """Raise ConfigError for selectors of roles whose nodes the job does not have."""
    roles = (HEAD, *(group.role for group in needs.groups))
    if absent := [role for role in settings.node_selectors if role not in roles]:
        raise ConfigError(
            f"node_selectors names {', '.join(absent)}, but the nodes of this job are {', '.join(roles)}; use these roles, or set "
            f"separate_roles={'false' if settings.separate_roles else 'true'}"
        )


def kube_needs(config: RunConfig, settings: KubeSettings) -> JobNeeds:
    """The nodes of the job. Raises ConfigError as :func:`~rlpost.jobs.needs.job_needs` does."""
    return job_needs(
        config,
        gpus_per_node=settings.gpus_per_node or 0,
        cpus_per_node=settings.cpus_per_node,
        memory_gib_per_node=settings.memory_gib,
        separate_roles=settings.separate_roles,
    )


def to_yaml(manifests: list[Manifest]) -> str:
    """The manifests as one YAML stream for ``kubectl apply -f``; text of several lines stays readable."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and a value that stands in two places twice (no anchors)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _metadata(name: str, job: str, settings: KubeSettings) -> Manifest:
    """INSTANCE_LABEL is the job's name on all its objects: one label finds and deletes them."""
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    return {"name": name, **namespace, "labels": {"app.kubernetes.io/name": "rlpost", INSTANCE_LABEL: job}}


def _config_map(name: str, config_yaml: str, config: RunConfig, needs: JobNeeds, settings: KubeSettings) -> Manifest:
    """The run's configuration as it is, and over it what the job changes."""
    changes: dict[str, Any] = {"base": RUN_FILE}
    directory = () if config.run_dir else (f"run_dir={settings.volume_path}/runs/{name}",)
    for word in (*directory, *overrides_in_job(config, needs.device)):
        key, _, value = word.partition("=")
        section, _, field = key.rpartition(".")
        (changes.setdefault(section, {}) if section else changes)[field] = value
    if settings.autoscales:
        changes["placement"]["wait_for_nodes"] = True
    data = {RUN_FILE: config_yaml, JOB_FILE: yaml.safe_dump(changes, sort_keys=False)}
    if settings.looks_first:
        data[SCRIPT_FILE] = SCRIPT
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(_config_map_name(name), name, settings), "data": data}


def _config_map_name(name: str) -> str:
    return f"{name}-config"


def _job_spec(cluster: Manifest, settings: KubeSettings) -> Manifest:
    deadline = {"activeDeadlineSeconds": settings.active_deadline_s} if settings.active_deadline_s else {}
    return {
        "entrypoint": f"bash {CONFIG_DIRECTORY}/{SCRIPT_FILE}" if settings.looks_first else TRAIN,
        "submissionMode": settings.submission,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": settings.ttl_s,
        "backoffLimit": settings.backoff_limit,
        **deadline,
        "rayClusterSpec": cluster,
    }


def _add_gang(metadata: Manifest, name: str, settings: KubeSettings) -> None:
    """Labels of the job; KubeRay hands them on to its cluster and pods."""
    queue = {"kueue": KUEUE_QUEUE, "volcano": "volcano.sh/queue-name", "yunikorn": "yunikorn.apache.org/queue"}
    labels = {
        "none": {},
        "kueue": {},
        "volcano": {"ray.io/scheduler-name": "volcano"},
        "yunikorn": {"ray.io/gang-scheduling-enabled": "true", "yunikorn.apache.org/app-id": name},
    }[settings.gang]
    metadata["labels"] |= labels
    if settings.queue:
        metadata["labels"][queue[settings.gang]] = settings.queue
    if settings.gang == "kueue" and settings.autoscales:
        # Kueue refuses the autoscaler but for jobs that it may resize (its feature ElasticJobsViaWorkloadSlices).
        metadata["annotations"] = {KUEUE_ELASTIC: "true"}


def _cluster_spec(name: str, needs: JobNeeds, settings: KubeSettings) -> Manifest:
    head = {
        "rayStartParams": {"num-cpus": "0"},
        "template": _pod(name, HEAD, {"cpu": needs.head_cpus, "memory": _gib(settings.head_memory_gib)}, STOP_DRIVER, settings),
    }
    scaling = {"enableInTreeAutoscaling": True} if settings.autoscales else {}
    workers = [_worker_group(name, group, settings) for group in needs.groups]
    return {"rayVersion": settings.ray_version, **scaling, "headGroupSpec": head, "workerGroupSpecs": workers}


def _worker_group(name: str, group: NodeGroup, settings: KubeSettings) -> Manifest:
    scaled = settings.autoscales and group.role == ROLLOUT_GROUP
    least, most = _bounds(group, settings) if scaled else (group.nodes, group.nodes)
    resources: dict[str, Any] = {"cpu": group.cpus}
    if group.memory_gib is not None:
        resources["memory"] = _gib(group.memory_gib)
    if group.gpus:
        resources[GPU] = group.gpus
        if settings.rdma_resource:
            resources[settings.rdma_resource] = settings.rdma_count
    # A node that the autoscaler takes away has no checkpoint to wait for.
    pod = _pod(name, group.role, resources, None if scaled else WAIT_FOR_HEAD, settings)
    if settings.topology:
        annotation = f"kueue.x-k8s.io/podset-{settings.topology_mode}-topology"
        pod = {"metadata": {"annotations": {annotation: settings.topology}}, **pod}
    return {
        "groupName": group.role,
        "replicas": group.nodes,
        "minReplicas": least,
        "maxReplicas": most,
        "rayStartParams": {},
        "labels": {ROLE_LABEL: group.role},
        "template": pod,
    }


def _bounds(group: NodeGroup, settings: KubeSettings) -> tuple[int, int]:
    """Fewest and most nodes of an autoscaled group. Raises ConfigError when the run's own number is not between them."""
    least = settings.rollout_min if settings.rollout_min is not None else group.nodes
    most = settings.rollout_max if settings.rollout_max is not None else group.nodes
    if not least <= group.nodes <= most:
        raise ConfigError(
            f"rollout_min={least} and rollout_max={most} do not enclose the {group.nodes} rollout nodes that the run needs; "
            "change them, or engine.count"
        )
    return least, most


def _pod(name: str, role: str, resources: Manifest, before_stop: str | None, settings: KubeSettings) -> Manifest:
    """A pod template whose container asks for exactly what it may use: GPUs demand it, and the node then ends others first."""
    container: Manifest = {
        "name": "ray-head" if role == HEAD else "ray-worker",
        "image": settings.image,
        "workingDir": settings.volume_path,
        "env": _environment(role, settings),
    }
    if settings.secret_sets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in settings.secret_sets]
    container["resources"] = {"requests": dict(resources), "limits": dict(resources)}
    if settings.rdma_resource in resources:
        # Registered memory is pinned, beyond the limit that a container has.
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    if before_stop is not None:
        container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/bash", "-c", before_stop]}}}
    container["volumeMounts"] = [
        {"name": "workspace", "mountPath": settings.volume_path},
        {"name": "config", "mountPath": CONFIG_DIRECTORY, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    spec: Manifest = {"terminationGracePeriodSeconds": settings.grace_s + SPARE_GRACE_S}
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if role in settings.node_selectors:
        spec["nodeSelector"] = dict(settings.node_selectors[role])
    if settings.tolerations and role != HEAD:
        spec["tolerations"] = list(settings.tolerations)
    spec["containers"] = [container]
    spec["volumes"] = [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": settings.volume_claim}},
        {"name": "config", "configMap": {"name": _config_map_name(name)}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _gib(_shared_memory(role, settings))}},
    ]
    return {"spec": spec}


def _environment(role: str, settings: KubeSettings) -> list[Manifest]:
    """Models are fetched or built once, into the volume, where all pods see them; secrets come by reference."""
    caches = {"HF_HOME": f"{settings.volume_path}/huggingface", "RLPOST_CACHE": f"{settings.volume_path}/cache"}
    variables = {**caches, **settings.env}
    if role == HEAD:
        variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(settings.grace_s)
    references = []
    for name, reference in settings.secrets.items():
        secret, _, key = reference.partition("/")
        references.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return [*({"name": name, "value": str(value)} for name, value in variables.items()), *references]


def _shared_memory(role: str, settings: KubeSettings) -> int:
    """GiB of /dev/shm. The head holds few of Ray's objects, and has less memory than shm_gib on large nodes."""
    return min(settings.shm_gib, max(1, settings.head_memory_gib // 2)) if role == HEAD else settings.shm_gib


def _gib(amount: int) -> str:
    return f"{amount}Gi"
