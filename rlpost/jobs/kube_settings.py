"""What a KubeRay job is told besides the run's configuration, and which of it cannot work together. ``--help`` prints these words."""
# ruff: noqa: RUF009  option() makes fields.

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlpost.config.fields import Place, children, clean, joined
from rlpost.config.schema import REQUIRED, RunConfig, option
from rlpost.jobs.needs import ROLLOUT_GROUP, SHARED_GROUP, TRAINER_GROUP
from rlpost.jobs.secrets import is_secret_variable, secret_keys, shows_secret
from rlpost.types import ConfigError

HEAD = "head"
ROLES = (HEAD, TRAINER_GROUP, ROLLOUT_GROUP, SHARED_GROUP)

_AT_LEAST_ONE = ("cpus_per_node", "memory_gib", "head_memory_gib", "shm_gib", "rdma_count", "rollout_max", "active_deadline_s")
_NOT_NEGATIVE = ("gpus_per_node", "rollout_min", "backoff_limit", "ttl_s", "grace_s")

NAME_LENGTHS = {"RayJob": 47, "RayCluster": 53, "ConfigMap": 63}
"""KubeRay adds 6 characters to a RayJob's name for its cluster, and up to 10 to a cluster's for its services, which have 63."""


@dataclass
class KubeSettings:
    """All optional but image, volume_claim and gpus_per_node."""

    kind: str = option(
        "RayJob",
        "RayJob runs the training and then gives everything back; RayCluster only holds the nodes, for `ray job submit`.",
        ("RayJob", "RayCluster"),
    )
    job_name: str | None = option(
        None, "Name of the job, and of its directory below volume_path/runs; null is the run's name as Kubernetes takes it (a_1 is a-1)."
    )
    namespace: str | None = option(None, "Namespace; null is kubectl's.")
    image: str = option(REQUIRED, "Container image with rlpost (Dockerfile).")
    ray_version: str = option("2.60.0", "Ray's version in the image.")
    volume_claim: str = option(REQUIRED, "Claim of a volume that all pods can write (ReadWriteMany): runs, checkpoints, models, data.")
    volume_path: str = option("/workspace", "Where the volume is mounted; relative paths of the run's configuration start there.")
    gpus_per_node: int | None = option(None, "GPUs that one node has; 0 for a run on CPUs.")
    cpus_per_node: int | None = option(None, "CPUs to ask of each node; null asks for what the parts need, at least 4 a GPU.")
    memory_gib: int | None = option(
        None, "Memory to ask of each worker node in GiB, /dev/shm included; null asks for none and sets no limit."
    )
    head_memory_gib: int = option(16, "Memory of the head (driver, Ray's own processes, reward workers) in GiB, /dev/shm included.")
    shm_gib: int = option(
        8, "Size of /dev/shm in GiB: Ray's objects and NCCL inside a node. It counts as memory; the head has at most half its own."
    )
    separate_roles: bool = option(False, "Give trainers and rollout engines nodes (worker groups) of their own.")
    rollout_min: int | None = option(
        None, "Let Ray's autoscaler choose the number of rollout nodes, but not fewer than this; needs separate_roles."
    )
    rollout_max: int | None = option(None, "The most rollout nodes; null with rollout_min is what the run needs.")
    gang: str = option(
        "none",
        "Who starts all pods or none: kueue (by a queue's quota), volcano or yunikorn (KubeRay's operator must know it), or nobody.",
        ("none", "kueue", "volcano", "yunikorn"),
    )
    queue: str | None = option(None, "Queue of the gang scheduler.")
    topology: str | None = option(None, "Node label of a topology level (a rack, say): Kueue puts each worker group into one domain of it.")
    topology_mode: str = option(
        "required", "Wait for such a place (required), or take another in its absence (preferred).", ("required", "preferred")
    )
    node_selectors: dict[str, Any] = option({}, "Node labels by role: {trainer: {label: value}}; roles are head, trainer, rollout, shared.")
    tolerations: list[Any] = option([], "Tolerations of worker pods, as in a pod's specification.")
    rdma_resource: str | None = option(None, "Name of the RDMA device plugin's resource (rdma/ib, say), for GPU nodes.")
    rdma_count: int = option(1, "How many of them a node asks for.")
    service_account: str | None = option(None, "Service account of the pods.")
    env: dict[str, Any] = option({}, "Environment of all pods: {NAME: value}. Secrets are refused here.")
    secrets: dict[str, Any] = option({}, "Variables from Secrets that exist in the namespace: {NAME: secret-name/key}.")
    secret_sets: list[str] = option([], "Secrets that exist in the namespace, all of whose keys become variables.")
    submission: str = option(
        "HTTPMode",
        "Who submits: the operator (HTTPMode), a pod whose log is the run's (K8sJobMode), or a container beside the head (SidecarMode).",
        ("HTTPMode", "K8sJobMode", "SidecarMode"),
    )
    preflight: bool = option(
        True, "Run `rlpost.doctor cluster` before the training; what it finds failed ends the job. Not with rollout_min, rollout_max."
    )
    backoff_limit: int = option(3, "How often a failed job is started again, on a new cluster; it resumes.")
    ttl_s: int = option(0, "Seconds that the pods are kept after the end, to look at them; their GPUs stay taken.")
    active_deadline_s: int | None = option(None, "Seconds after which the job is ended; null never does.")
    grace_s: int = option(600, "Seconds that a job which is told to end has for its step in progress and a checkpoint.")

    @property
    def elsewhere(self) -> list[str]:
        """Directories that only the pods see."""
        return [self.volume_path]

    @property
    def autoscales(self) -> bool:
        """Whether Ray's autoscaler chooses the number of rollout nodes."""
        return self.rollout_min is not None or self.rollout_max is not None

    @property
    def looks_first(self) -> bool:
        """Whether the doctor looks at all nodes before the training. Not with an autoscaler: nodes may still come."""
        return self.preflight and self.kind == "RayJob" and not self.autoscales

    def name_of(self, run: str) -> str:
        """The job's name: ``job_name``, else the run's in small letters, digits and dashes, beginning with a letter."""
        if self.job_name is not None:
            return self.job_name
        plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
        plain = plain if plain[:1].isalpha() else f"run-{plain}"
        return plain[: NAME_LENGTHS[self.kind]].rstrip("-")


def check_settings(settings: KubeSettings, config: RunConfig) -> None:
    """Raise ConfigError with everything that is missing, has a wrong type or range, does not go together, or would write a secret down."""
    problems: list[str] = []
    for child in children(KubeSettings):
        clean(getattr(settings, child.key), child, Place(source="kuberay"), problems)
    if not problems:
        problems += [*_missing(settings), *_ranges(settings), *_combinations(settings), *_secrets(settings, config)]
    if problems:
        raise ConfigError(joined(problems, lambda count: f"{count} problems in the settings of the job:"))


def _missing(settings: KubeSettings) -> Iterator[str]:
    for child in children(KubeSettings):
        if child.required and getattr(settings, child.key) in (REQUIRED, ""):
            yield f"{child.key} is not given; expected {child.doc[0].lower()}{child.doc[1:].rstrip('.')}: set {child.key}=..."
    if settings.gpus_per_node is None:
        yield "gpus_per_node is not given; expected the GPUs that one node has, or 0 for a run on CPUs: set gpus_per_node=..."


def _ranges(settings: KubeSettings) -> Iterator[str]:
    for names, least in ((_AT_LEAST_ONE, 1), (_NOT_NEGATIVE, 0)):
        for name in names:
            value = getattr(settings, name)
            if value is not None and value < least:
                yield f"{name} is {value}, expected at least {least}; change {name}"
    if not settings.volume_path.startswith("/") or settings.volume_path == "/":
        yield f"volume_path is {settings.volume_path!r}, expected an absolute path other than /; change volume_path"


def _combinations(settings: KubeSettings) -> Iterator[str]:
    if settings.gang == "kueue" and not settings.queue:
        yield "gang=kueue has no queue, and Kueue leaves jobs without one alone; set queue= to the LocalQueue of the namespace"
    if settings.gang == "none" and settings.queue:
        yield f"queue={settings.queue} has no effect with gang=none; set gang=kueue, volcano or yunikorn, or leave queue out"
    if settings.topology and settings.gang != "kueue":
        yield f"topology={settings.topology} is read by Kueue only, but gang={settings.gang}; set gang=kueue, or use node_selectors"
    if settings.autoscales and not settings.separate_roles:
        yield "rollout_min and rollout_max scale rollout nodes, but engines stand beside trainers; set separate_roles=true"
    for role, labels in settings.node_selectors.items():
        if role not in ROLES:
            yield f"node_selectors has the role {role!r}, expected one of {', '.join(ROLES)}; rename it"
        elif not isinstance(labels, dict):
            yield f"node_selectors.{role} is {labels!r}, expected {{label: value}}; change it"


def _secrets(settings: KubeSettings, config: RunConfig) -> Iterator[str]:
    """A manifest is read by everybody who may read the job; names of secrets may stand in it, their values never."""
    for name, value in settings.env.items():
        if is_secret_variable(name) or shows_secret(str(value)):
            yield f"env has {name}, which reads like a secret, in the manifest; give it as secrets={{{name}: secret-name/key}}"
    for name, reference in settings.secrets.items():
        if not (isinstance(reference, str) and re.fullmatch(r"[a-z0-9.-]+/[A-Za-z0-9._-]+", reference)):
            yield f"secrets.{name} is no reference to a Secret; expected secret-name/key, and never the secret itself"
    for key in secret_keys(asdict(config)):
        yield (
            f"the run's configuration has a value at {key}, which reads like a secret, and would stand in the ConfigMap; let the code "
            "read an environment variable, and give that as secrets={NAME: secret-name/key}"
        )
