"""JSON schemas of the manifests that a job may have: those of its own fields, and those in a CRD's file.

``SCHEMAS`` holds what ``kuberay.py`` writes and what a hand would most likely add; field names and types are those of KubeRay's CRDs
(ray.io/v1). A field that they have and this excerpt has not is found in the CRDs themselves: ``crd_schema`` reads one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rlpost.types import ConfigError

Schema = dict[str, Any]

QUANTITY_PATTERN = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
QUANTITY: Schema = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": QUANTITY_PATTERN}]}


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


METADATA = _object(("name",), name=TEXT, namespace=TEXT, labels=_map(TEXT), annotations=_map(TEXT))

_KEY = _object(("key",), name=TEXT, key=TEXT, optional=BOOLEAN)
_FIELD = _object(("fieldPath",), apiVersion=TEXT, fieldPath=TEXT)
_ENV = _object(("name",), name=TEXT, value=TEXT, valueFrom=_object(secretKeyRef=_KEY, configMapKeyRef=_KEY, fieldRef=_FIELD))
_NAMED = _object(name=TEXT, optional=BOOLEAN)
_RESOURCES = _object(requests=_map(QUANTITY), limits=_map(QUANTITY))
_CONTAINER = _object(
    ("name",),
    name=TEXT,
    image=TEXT,
    imagePullPolicy=_choice("Always", "IfNotPresent", "Never"),
    workingDir=TEXT,
    env=_list(_ENV),
    envFrom=_list(_object(prefix=TEXT, secretRef=_NAMED, configMapRef=_NAMED)),
    resources=_RESOURCES,
    securityContext=_object(capabilities=_object(add=_list(TEXT), drop=_list(TEXT))),
    lifecycle=_object(preStop=_object(exec=_object(command=_list(TEXT)))),
    volumeMounts=_list(_object(("name", "mountPath"), name=TEXT, mountPath=TEXT, subPath=TEXT, readOnly=BOOLEAN)),
)
_VOLUME = _object(
    ("name",),
    name=TEXT,
    persistentVolumeClaim=_object(("claimName",), claimName=TEXT, readOnly=BOOLEAN),
    configMap=_object(name=TEXT, optional=BOOLEAN),
    emptyDir=_object(medium=TEXT, sizeLimit=QUANTITY),
)
_TOLERATION = _object(
    key=TEXT,
    operator=_choice("Exists", "Equal"),
    value=TEXT,
    effect=_choice("NoSchedule", "PreferNoSchedule", "NoExecute"),
    tolerationSeconds=COUNT,
)
_POD = _object(
    ("containers",),
    containers=_list(_CONTAINER),
    volumes=_list(_VOLUME),
    nodeSelector=_map(TEXT),
    tolerations=_list(_TOLERATION),
    serviceAccountName=TEXT,
    imagePullSecrets=_list(_object(name=TEXT)),
    priorityClassName=TEXT,
    hostNetwork=BOOLEAN,
    terminationGracePeriodSeconds=COUNT,
)
_TEMPLATE = _object(("spec",), metadata=_object(labels=_map(TEXT), annotations=_map(TEXT)), spec=_POD)
_WORKER_GROUP = _object(
    ("groupName", "minReplicas", "maxReplicas", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=_map(TEXT),
    labels=_map(TEXT),
    template=_TEMPLATE,
)
_RAY_CLUSTER = _object(
    ("headGroupSpec",),
    rayVersion=TEXT,
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=_object(idleTimeoutSeconds=COUNT, version=_choice("v1", "v2")),
    headGroupSpec=_object(("template",), rayStartParams=_map(TEXT), labels=_map(TEXT), template=_TEMPLATE),
    workerGroupSpecs=_list(_WORKER_GROUP),
)
_RAY_JOB = _object(
    ("entrypoint", "rayClusterSpec"),
    entrypoint=TEXT,
    submissionMode=_choice("HTTPMode", "K8sJobMode", "SidecarMode"),
    runtimeEnvYAML=TEXT,
    suspend=BOOLEAN,
    shutdownAfterJobFinishes=BOOLEAN,
    ttlSecondsAfterFinished=COUNT,
    activeDeadlineSeconds=COUNT,
    preRunningDeadlineSeconds=COUNT,
    backoffLimit=COUNT,
    rayClusterSpec=_RAY_CLUSTER,
)


def _manifest(api: str, kind: str, **properties: Schema) -> Schema:
    names = ("apiVersion", "kind", "metadata", *properties)
    return _object(names, apiVersion=_choice(api), kind=_choice(kind), metadata=METADATA, **properties)


SCHEMAS: dict[str, Schema] = {
    "ConfigMap": _manifest("v1", "ConfigMap", data=_map(TEXT)),
    "RayCluster": _manifest("ray.io/v1", "RayCluster", spec=_RAY_CLUSTER),
    "RayJob": _manifest("ray.io/v1", "RayJob", spec=_RAY_JOB),
}
"""By kind. There is no Secret: a job refers to those that exist."""


def crd_schema(path: Path, version: str = "v1") -> tuple[str, Schema]:
    """The kind that a CustomResourceDefinition's file defines, and its schema, in which unknown fields are faults.

    Raises ConfigError when the file is no such definition or has no such version.
    """
    try:
        document = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        kind, versions = document["spec"]["names"]["kind"], document["spec"]["versions"]
        schema = next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == version)
    except (OSError, yaml.YAMLError, KeyError, TypeError, StopIteration) as error:
        raise ConfigError(
            f"{path} holds no CustomResourceDefinition with the version {version} ({type(error).__name__}: {error}); give the file of "
            "KubeRay's release, ray.io_rayjobs.yaml or ray.io_rayclusters.yaml"
        ) from error
    strict = _strict(schema)
    # The cluster itself knows what metadata has; a CRD leaves it open.
    strict["properties"]["metadata"] = METADATA
    return kind, {**strict, "required": ["apiVersion", "kind", "metadata", "spec"]}


def _strict(schema: Any) -> Any:
    """A copy that refuses fields it does not name. A cluster drops them without a word; a mapping without named fields stays open."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {name: _strict(value) for name, value in schema.items()}
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        copy.setdefault("additionalProperties", False)
    return copy
