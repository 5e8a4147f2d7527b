"""`make .venv`: where torch comes from, and what a second try finds after a first one that was interrupted."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0+cpu"


def load_make_venv() -> ModuleType:
    """The script as a module: it belongs to no package, because it runs before there is an environment."""
    specification = importlib.util.spec_from_file_location("make_venv", PROJECT / "requirements" / "make_venv.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


make_venv = load_make_venv()


class PipStandIn:
    """Stands in the place of ``Environment.run``: notes the commands, and says which of them fail."""

    def __init__(self, *failing: str) -> None:
        self.commands: list[list[str]] = []
        self.failing = failing

    def __call__(self, command: Sequence[str], progress: bool = False) -> int:
        self.commands.append(list(command))
        return 1 if any(part in " ".join(command) for part in self.failing) else 0

    def pip_arguments(self) -> list[list[str]]:
        """What came after ``pip install``, in order."""
        return [command[command.index("install") + 1 :] for command in self.commands if "install" in command]


def environment_in(directory: Path, monkeypatch: pytest.MonkeyPatch, pip: PipStandIn) -> Any:
    """An environment whose every command goes to the stand-in."""
    environment = make_venv.Environment(directory / ".venv", directory)
    monkeypatch.setattr(environment, "run", pip)
    # A new environment is really made; without pip that takes no seconds.
    monkeypatch.setattr(make_venv, "NEW_ENVIRONMENT", (*make_venv.NEW_ENVIRONMENT, "--without-pip"))
    return environment


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock of two packages."""
    path = tmp_path / "cpu.lock"
    path.write_text(f"# a comment\n{TORCH}\nray==2.60.0\n")
    return path


@pytest.fixture
def existing(tmp_path: Path) -> Path:
    """An environment's directory with one file that tells whether it was emptied."""
    directory = tmp_path / ".venv"
    directory.mkdir()
    (directory / "mine").touch()
    return directory


# ---- where torch comes from ------------------------------------------------------------------------------------------


def test_plain_pip_that_finds_torch_is_never_given_another_index(existing: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = PipStandIn()
    environment_in(existing.parent, monkeypatch, pip).make(lock)
    assert not any("--extra-index-url" in command for command in pip.commands)
    assert pip.pip_arguments()[0] == ["--no-deps", TORCH]


def test_torch_alone_falls_back_to_the_cpu_index(existing: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PlainPipKnowsNoCpuTorch(PipStandIn):
        def __call__(self, command: Sequence[str], progress: bool = False) -> int:
            super().__call__(command, progress)
            return int(command[-1] == TORCH)

    pip = PlainPipKnowsNoCpuTorch()
    environment_in(existing.parent, monkeypatch, pip).make(lock)
    with_index = [arguments for arguments in pip.pip_arguments() if "--extra-index-url" in arguments]
    assert with_index == [["--no-deps", TORCH, "--extra-index-url", make_venv.TORCH_CPU_INDEX]]


def test_everything_is_installed_without_dependencies(existing: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = PipStandIn()
    environment_in(existing.parent, monkeypatch, pip).make(lock)
    assert len(pip.pip_arguments()) == 3
    assert all("--no-deps" in arguments for arguments in pip.pip_arguments())


@pytest.mark.parametrize("line", ["torch==2.13.0", "torch==2.13.0+cu130", ""])
def test_lock_whose_torch_may_be_a_cuda_build_is_refused(line: str, tmp_path: Path) -> None:
    path = tmp_path / "cpu.lock"
    path.write_text(f"{line}\nray==2.60.0\n")
    with pytest.raises(make_venv.SetupError, match=r"torch==VERSION\+cpu"):
        make_venv.torch_requirement(make_venv.read_lock(path))


def test_unpinned_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu.lock"
    path.write_text(f"{TORCH}\nray\n")
    with pytest.raises(make_venv.SetupError, match="'ray' pins no version"):
        make_venv.read_lock(path)


# ---- a second try ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [TORCH, "cpu.lock", "-e ", "transformers"])
def test_a_failed_step_leaves_no_stamp_and_the_next_make_starts_afresh(
    failing: str, existing: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (existing / make_venv.STAMP).touch()
    with pytest.raises(make_venv.SetupError):
        environment_in(existing.parent, monkeypatch, PipStandIn(failing)).make(lock)
    assert not (existing / make_venv.STAMP).exists()
    assert (existing / "mine").exists(), "a whole environment is updated, not emptied"

    environment_in(existing.parent, monkeypatch, PipStandIn()).make(lock)
    assert not (existing / "mine").exists(), "half a package may lie in it"
    assert (existing / make_venv.STAMP).exists()


def test_environment_made_by_hand_is_kept_and_its_harmful_packages_removed(
    existing: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site_packages = existing / "lib" / "python3.11" / "site-packages"
    (site_packages / "torchvision-0.28.0.dist-info").mkdir(parents=True)
    pip = PipStandIn()
    environment_in(existing.parent, monkeypatch, pip).make(lock)
    assert (existing / "mine").exists()
    assert [command[-3:] for command in pip.commands if "uninstall" in command] == [["uninstall", "-y", "torchvision"]]
    assert (existing / make_venv.STAMP).exists()


def test_environment_whose_python_is_gone_is_made_again(existing: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment_in(existing.parent, monkeypatch, PipStandIn("--version")).prepare()
    assert not (existing / "mine").exists()
    assert (existing / "bin" / "python").exists()


def test_no_python_venv_module_is_said_and_the_next_make_starts_afresh(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    environment = environment_in(tmp_path, monkeypatch, PipStandIn())
    with pytest.raises(make_venv.SetupError, match=r"install python3\.11-venv"):
        environment.make(lock)
    assert environment.in_progress.exists()
    assert not environment.stamp.exists()


def test_failure_shows_the_end_of_pips_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = make_venv.Environment(tmp_path, tmp_path)
    program = "print('a line of pip'); raise SystemExit(3)"
    with pytest.raises(make_venv.SetupError, match="exit code 3"):
        environment.step("a step", [sys.executable, "-c", program])
    assert "a line of pip" in capsys.readouterr().out


def test_killed_step_says_by_which_signal(tmp_path: Path) -> None:
    environment = make_venv.Environment(tmp_path, tmp_path)
    with pytest.raises(make_venv.SetupError, match="killed by SIGTERM"):
        environment.step("a step", [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])


def test_ending_the_script_ends_its_pip(tmp_path: Path) -> None:
    """Left alone, pip would go on writing into an environment that the next make empties."""
    pid_file = tmp_path / "pid"
    step = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
    program = (
        f"import sys; sys.path.insert(0, {str(PROJECT / 'requirements')!r}); import make_venv\n"
        f"make_venv.Environment.make = lambda self, lock: self.step('a step', [sys.executable, '-c', {step!r}])\n"
        f"sys.argv = ['make_venv', {str(tmp_path)!r}, '--lock', 'none']\n"
        "sys.exit(make_venv.main())\n"
    )
    script = subprocess.Popen([sys.executable, "-B", "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline and script.poll() is None
            time.sleep(0.05)
        script.terminate()
        assert script.wait(timeout=60) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)
    finally:
        script.kill()


def test_progress_counts_what_this_command_collected(tmp_path: Path) -> None:
    log = tmp_path / "install.log"
    earlier = "Collecting a\nInstalling collected packages: a\n"
    log.write_text(earlier + "Collecting b\nCollecting c\n")
    assert make_venv.describe_progress(log, len(earlier)) == "2 packages collected"
