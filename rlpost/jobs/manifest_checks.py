"""What is wrong with the manifests of a job, found without a cluster: fields first, then what fields cannot say.

Limits are KubeRay's (names: a RayJob's cluster and services have longer ones), Kueue's and Kubernetes' own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator
from jsonschema.exceptions import ValidationError

from rlpost.config.derive import Device
from rlpost.config.fields import joined
from rlpost.jobs.kube_schema import SCHEMAS, Schema, crd_schema
from rlpost.jobs.kube_settings import NAME_LENGTHS
from rlpost.jobs.kuberay import GPU, KUEUE_ELASTIC, KUEUE_QUEUE, Manifest
from rlpost.jobs.needs import ROLLOUT_GROUP
from rlpost.types import ConfigError

LABEL_LENGTH = 63
KUEUE_POD_SETS = 18
"""Kinds of pods of a workload: the head, a submitter pod, and then 17 or 16 worker groups. Older releases of Kueue take 8."""
KUEUE_RESERVED = ("head", "submitter")

CONFIG_MAP_BYTES = 1 << 20
"""Kubernetes takes no larger one."""

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""DNS-1035, as KubeRay asks: DNS-1123 that begins with a letter, since services get these names."""
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_UNITS = {unit: 1000**power for power, unit in enumerate(["", "k", "M", "G", "T", "P", "E"])}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate(["K", "M", "G", "T", "P", "E"], start=1)}
_UNITS |= {"m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, kw_only=True)
class NodeSize:
    """What pods can ask of one kind of node at most (``kubectl describe node``: allocatable)."""

    cpus: float
    memory_gib: float
    gpus: int = 0

    def __str__(self) -> str:
        return f"{self.cpus:g} CPUs, {self.memory_gib:.4g} GiB, {self.gpus} GPUs"


def check_manifests(manifests: Sequence[Manifest], *, device: Device | None = None, crds: Sequence[Path] = ()) -> None:
    """Raise ConfigError with every fault that :func:`find_problems` sees."""
    problems = find_problems(manifests, device=device, crds=crds)
    if problems:
        raise ConfigError(joined(problems, lambda count: f"{count} problems in the manifests:"))


def find_problems(manifests: Sequence[Manifest], *, device: Device | None = None, crds: Sequence[Path] = ()) -> list[str]:
    """Every fault as text: where, what was found, what was expected, what to change.

    ``device=gpu`` asks for GPUs in every worker group.
    ``crds`` are files of CustomResourceDefinitions that are read in place of this package's excerpt of them.
    Manifests whose fields are wrong are not looked at further.
    """
    schemas = SCHEMAS | dict(crd_schema(path) for path in crds)
    faults = [fault for manifest in manifests for fault in _field_faults(manifest, schemas)]
    if faults:
        return faults
    config_maps = {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == "ConfigMap"}
    problems = [problem for manifest in manifests for problem in _metadata_problems(manifest)]
    problems += [problem for name, manifest in config_maps.items() for problem in _config_map_problems(name, manifest)]
    for manifest in manifests:
        if manifest["kind"] != "ConfigMap":
            problems += [*_job_problems(manifest), *_group_problems(manifest)]
            for where, template in _templates(manifest):
                problems += [*_pod_problems(where, template, config_maps), *_resource_problems(where, template, device)]
    return problems


def _field_faults(manifest: Manifest, schemas: Mapping[str, Schema]) -> Iterator[str]:
    """Unknown fields, missing ones, wrong types and values that are none of those allowed, each with its path."""
    kind = str(manifest.get("kind"))
    if kind not in schemas:
        hint = ": Secrets are referred to (secrets=, secret_sets=), never rendered" if kind == "Secret" else ""
        yield f"kind is {kind!r}, expected one of {', '.join(schemas)}{hint}; take the manifest out"
        return
    for error in Draft7Validator(schemas[kind]).iter_errors(manifest):
        where = f"{kind} " + ".".join(str(part) for part in error.absolute_path)
        yield f"{where.strip()}: {_fault(error)}"


def _fault(error: ValidationError) -> str:
    known = sorted(error.schema.get("properties", {})) if isinstance(error.schema, dict) else []
    if error.validator == "additionalProperties":
        unknown = sorted(set(error.instance) - set(known))
        return f"unknown field {', '.join(unknown)}, which a cluster drops without a word; expected {', '.join(known)}: rename or remove it"
    if error.validator == "required":
        return f"{error.message}; add it"
    if error.validator == "enum":
        return f"found {error.instance!r}, expected one of {', '.join(map(str, error.validator_value))}; change it"
    if error.validator == "anyOf":
        return f"found {error.instance!r}, expected an amount, such as 8, 500m or 16Gi; change it"
    if error.validator == "type":
        return f"found {error.instance!r}, expected {error.validator_value}; change it (text that looks like a number is written in quotes)"
    return f"{error.message}; change it"


def _metadata_problems(manifest: Manifest) -> Iterator[str]:
    kind, metadata = manifest["kind"], manifest["metadata"]
    name, most = metadata["name"], NAME_LENGTHS[kind]
    if len(name) > most or not _DNS_LABEL.fullmatch(name):
        yield (
            f"{kind} metadata.name is {name!r} ({len(name)} characters), expected at most {most} of a-z, 0-9 and -, with a letter first; "
            "set job_name= to a shorter or plainer one"
        )
    for key, value in metadata.get("labels", {}).items():
        if len(value) > LABEL_LENGTH or not _LABEL_VALUE.fullmatch(value):
            yield f"{kind} metadata.labels.{key} is {value!r}, expected at most {LABEL_LENGTH} of A-Z, a-z, 0-9, -, _ and .; change it"


def _config_map_problems(name: str, manifest: Manifest) -> Iterator[str]:
    size = sum(len(key) + len(text.encode()) for key, text in manifest["data"].items())
    if size > CONFIG_MAP_BYTES:
        yield f"ConfigMap {name} has {size} bytes, expected at most {CONFIG_MAP_BYTES}; put large parts into files on the volume"


def _job_problems(manifest: Manifest) -> Iterator[str]:
    """What the queue and the end of the job ask for."""
    metadata, spec, cluster = manifest["metadata"], manifest["spec"], _cluster(manifest)
    queued = KUEUE_QUEUE in metadata.get("labels", {})
    job = manifest["kind"] == "RayJob"
    ends = spec.get("shutdownAfterJobFinishes", False)
    if job and queued and not ends:
        yield "RayJob spec.shutdownAfterJobFinishes is false, but Kueue takes only jobs that give their nodes back; set it to true"
    if job and not ends and spec.get("ttlSecondsAfterFinished", 0):
        yield "RayJob spec.ttlSecondsAfterFinished has no effect without spec.shutdownAfterJobFinishes; set that to true, or remove it"
    if queued and cluster.get("enableInTreeAutoscaling") and metadata.get("annotations", {}).get(KUEUE_ELASTIC) != "true":
        yield f'enableInTreeAutoscaling is true, which Kueue refuses without the annotation {KUEUE_ELASTIC}: "true"; add it'
    if not queued:
        return
    submitter = job and spec.get("submissionMode", "K8sJobMode") == "K8sJobMode"
    most = KUEUE_POD_SETS - 1 - submitter
    groups = [group["groupName"] for group in cluster.get("workerGroupSpecs", [])]
    if len(groups) > most:
        yield f"there are {len(groups)} worker groups, but Kueue takes at most {most}; put nodes of the same kind into one group (replicas)"
    for name in groups:
        if name in KUEUE_RESERVED:
            yield f"worker group {name} has a name that Kueue keeps for itself; rename it"


def _group_problems(manifest: Manifest) -> Iterator[str]:
    """Worker groups: names, labels and numbers of nodes."""
    cluster = _cluster(manifest)
    groups = cluster.get("workerGroupSpecs", [])
    for name, count in Counter(group["groupName"] for group in groups).items():
        if count > 1:
            yield f"{count} worker groups are called {name}, expected each name once; rename them"
        if len(name) > LABEL_LENGTH or not _DNS_LABEL.fullmatch(name):
            yield f"worker group {name!r}: expected a name of at most {LABEL_LENGTH} of a-z, 0-9 and -, with a letter first; rename it"
    for group in (cluster["headGroupSpec"], *groups):
        if "labels" in group.get("rayStartParams", {}):
            yield f"{group.get('groupName', 'headGroupSpec')}: rayStartParams.labels is refused by KubeRay; move them to the field labels"
    for group in groups:
        name, least, most = group["groupName"], group["minReplicas"], group["maxReplicas"]
        nodes = group.get("replicas", 0)
        if not least <= nodes <= most:
            yield f"worker group {name}: replicas {nodes} are not between minReplicas {least} and maxReplicas {most}; change one of them"
        if cluster.get("enableInTreeAutoscaling") and least != most and name != ROLLOUT_GROUP:
            yield (
                f"worker group {name} is scaled from {least} to {most} nodes, but only the group {ROLLOUT_GROUP} may be: trainer ranks are "
                "as many as the run was started with; make minReplicas and maxReplicas equal"
            )


def _pod_problems(where: str, template: Manifest, config_maps: Mapping[str, Manifest]) -> Iterator[str]:
    """Images, and volumes that are mounted or taken from a ConfigMap."""
    pod = template["spec"]
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod["containers"]:
        if container.get("image", "") in ("", "???"):
            yield f"{where}, container {container['name']}: there is no image; expected one with rlpost: set image="
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where}: the volume {mount['name']} is mounted, but there are {', '.join(sorted(volumes))}; rename it or add it"
    for volume in pod.get("volumes", []):
        name = volume.get("configMap", {}).get("name")
        if name is not None and name not in config_maps:
            yield f"{where}: the ConfigMap {name} is mounted, but it is none of the manifests ({', '.join(config_maps)}); add or rename it"


def _resource_problems(where: str, template: Manifest, device: Device | None) -> Iterator[str]:
    """Of the Ray container, which is the first: amounts that contradict one another."""
    pod = template["spec"]
    resources = pod["containers"][0].get("resources", {})
    requests, limits = ({name: amount(text) for name, text in resources.get(part, {}).items()} for part in ("requests", "limits"))
    gpus = limits.get(GPU, 0)
    worker = not where.startswith("headGroupSpec")
    if not gpus and ((worker and device == "gpu") or requests.get(GPU)):
        yield f"{where}: there is no limit of {GPU}, so the pod gets no GPU; set resources.limits (gpus_per_node=)"
    if gpus or requests.get(GPU):
        for name in sorted({*requests, *limits}):
            if requests.get(name) != limits.get(name):
                yield (
                    f"{where}: of {name} it asks for {resources.get('requests', {}).get(name, 'nothing')} but may use "
                    f"{resources.get('limits', {}).get(name, 'any amount')}; with GPUs both have to be equal: make them so"
                )
    yield from _shared_memory_problems(where, pod, limits.get("memory"))


def node_problems(manifests: Sequence[Manifest], nodes: Sequence[NodeSize]) -> list[str]:
    """Pods that no node can hold, with the first of ``nodes``, the largest; nothing without nodes."""
    jobs = [manifest for manifest in manifests if manifest["kind"] != "ConfigMap"] if nodes else []
    templates = (one for job in jobs for one in _templates(job))
    return [problem for where, template in templates for problem in _node_problems(where, template, nodes)]


def _node_problems(where: str, template: Manifest, nodes: Sequence[NodeSize]) -> Iterator[str]:
    resources = template["spec"]["containers"][0].get("resources", {})
    given = {**resources.get("limits", {}), **resources.get("requests", {})}
    asked = {name: amount(given.get(name, 0)) for name in ("cpu", "memory", GPU)}
    if not any(_holds(node, asked) for node in nodes):
        yield (
            f"{where}: a pod asks for {asked['cpu']:g} CPUs, {asked['memory'] / 1024**3:g} GiB, {asked[GPU]:g} GPUs, which no node has "
            f"(the largest: {nodes[0]}); lower cpus_per_node, memory_gib or gpus_per_node (of the head: head_memory_gib)"
        )


def _shared_memory_problems(where: str, pod: Manifest, memory: float | None) -> Iterator[str]:
    for volume in pod.get("volumes", []):
        directory = volume.get("emptyDir", {})
        if directory.get("medium") != "Memory":
            continue
        size = directory.get("sizeLimit")
        if size is None:
            yield f"{where}: the volume {volume['name']} in memory has no sizeLimit, so it may take the node's; set it (shm_gib=)"
        elif memory is not None and amount(size) >= memory:
            yield (
                f"{where}: the volume {volume['name']} in memory may take {size}, and the pod {memory / 1024**3:g} GiB with it, which ends "
                "the pod before the volume is full; lower shm_gib, or raise memory_gib (of the head: head_memory_gib)"
            )


def _holds(node: NodeSize, asked: Mapping[str, float]) -> bool:
    return asked["cpu"] <= node.cpus and asked["memory"] <= node.memory_gib * 1024**3 and asked[GPU] <= node.gpus


def amount(quantity: str | int) -> float:
    """A Kubernetes quantity as a number: ``500m`` is 0.5, ``16Gi`` is 16 * 1024**3."""
    text = str(quantity)
    digits = text.rstrip("KMGTPEikmnu") if not re.search(r"[eE][+-]?\d+$", text) else text
    return float(digits) * _UNITS[text[len(digits) :]]


def _cluster(manifest: Manifest) -> Manifest:
    spec: Manifest = manifest["spec"]
    return spec["rayClusterSpec"] if manifest["kind"] == "RayJob" else spec


def _templates(manifest: Manifest) -> Iterator[tuple[str, Any]]:
    """Every pod template, with what to call it in a message."""
    cluster = _cluster(manifest)
    yield "headGroupSpec", cluster["headGroupSpec"]["template"]
    for group in cluster.get("workerGroupSpecs", []):
        yield f"worker group {group['groupName']}", group["template"]
