"""kubectl's answers, and what to do when it gives none."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from rlpost.jobs.kube_settings import KubeSettings
from rlpost.types import ConfigError

TIMEOUT_S = 120

HINTS = {
    "no matches for kind": "KubeRay is not installed in this cluster; its operator's Helm chart is kuberay-operator",
    "the server doesn't have a resource type": "KubeRay is not installed in this cluster; its operator's Helm chart is kuberay-operator",
    "NotFound": "`kubectl get rayjobs,rayclusters --all-namespaces -l app.kubernetes.io/name=rlpost` lists jobs; set namespace= and kind= "
    "to the job's",
    "connection to the server": "kubectl reaches no cluster: `kubectl config get-contexts` lists those it knows",
    "connection refused": "kubectl reaches no cluster: `kubectl config get-contexts` lists those it knows",
    "Forbidden": "you may not do that in this namespace; ask who runs the cluster, or set namespace=",
}
"""What kubectl says -> what to do."""


def installed() -> bool:
    """Whether there is a kubectl here."""
    return shutil.which("kubectl") is not None


def call(settings: KubeSettings, *arguments: str) -> str:
    """What kubectl printed. Raises ConfigError when it is missing, and with what it said when it fails."""
    if not installed():
        raise ConfigError(
            "no kubectl here; install it (https://kubernetes.io/docs/tasks/tools), or write the objects with --out DIRECTORY "
            "and run `kubectl create -f DIRECTORY/job.yaml` where it is"
        )
    done = run([*namespace(settings), *arguments])
    if done.returncode:
        raise ConfigError(f"`kubectl {' '.join(arguments)}` failed: {with_hint(said(done))}")
    return done.stdout


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """kubectl's answer. Raises ConfigError when there is none in time."""
    try:
        return subprocess.run(
            ["kubectl", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise _late() from None


def _late() -> ConfigError:
    return ConfigError(f"kubectl has not answered within {TIMEOUT_S} s; is the cluster up? (kubectl version); try again")


def show(settings: KubeSettings, arguments: Sequence[str], timeout_s: float | None) -> int:
    """Let kubectl print; its exit code. ``timeout_s`` None follows a log to its end. Raises ConfigError when it takes longer."""
    command = ["kubectl", *namespace(settings), *arguments]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        raise _late() from None


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Without the lines in which its libraries report the same."""
    lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if "memcache.go" not in line]
    return "\n".join(lines) or f"exit code {done.returncode}"


def with_hint(said: str) -> str:
    """What kubectl said, and what to do where that is known."""
    hint = next((hint for mark, hint in HINTS.items() if mark in said), None)
    return said + (f"; {hint}" if hint else "")


def namespace(settings: KubeSettings) -> list[str]:
    """The option for the job's namespace, where one is given."""
    return [f"--namespace={settings.namespace}"] if settings.namespace else []
