"""Makes or mends ``.venv`` from ``requirements/cpu.lock``. The Makefile runs it with the system's Python: standard library only.

What it guarantees: when it ends well, the environment holds the locked versions of the list, a torch without CUDA, and rlpost
itself (editable), and the stamp is there. When it ends badly or is killed, no stamp is there, and the next call starts from an
empty environment: an interrupted pip leaves half a package that looks whole. A working environment made by hand is never emptied.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU builds: asked only where plain pip does not find the locked torch."""

UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
"""A plain resolution of the cpu extra brings them; the lock's comment says why they are not in it."""

PROBE = """
import torch, transformers
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build, the CPU build is needed"
transformers.PreTrainedModel  # loaded on first use: this is what a wrong torchvision breaks
"""

NEW_ENVIRONMENT = ("-m", "venv", "--clear")

STAMP = ".made"
IN_PROGRESS = ".being-made"
LOG = "install.log"
PROGRESS_EVERY_S = 15.0
SHOWN_LOG_LINES = 15
SHOWN_LINE_LENGTH = 200


class SetupError(Exception):
    """A step failed; the message says which, and what to do."""


class Environment:
    """One virtual environment and the steps that make it. Paths are absolute."""

    def __init__(self, directory: Path, project: Path) -> None:
        self.directory = directory
        self.project = project
        self.python = directory / "bin" / "python"
        self.stamp = directory / STAMP
        self.in_progress = directory / IN_PROGRESS
        self.log = directory / LOG
        self.started = time.monotonic()

    def make(self, lock: Path) -> None:
        """Run all steps. Raises SetupError."""
        requirements = read_lock(lock)
        self.prepare()
        self.install_torch(torch_requirement(requirements))
        self.pip(f"installing {len(requirements)} locked packages", ["install", "--no-deps", "-r", str(lock)])
        self.remove_unwanted()
        self.pip("installing rlpost (editable)", ["install", "--no-deps", "--no-build-isolation", "-e", str(self.project)])
        self.check()
        self.in_progress.unlink()
        self.stamp.touch()
        self.say(f"{self.directory.name} is ready")

    def prepare(self) -> None:
        """An environment to install into: a new one, unless there is one that is whole or was made by hand."""
        half_made = self.in_progress.exists() or (self.directory.exists() and self.run([str(self.python), "--version"]) != 0)
        if half_made:
            self.say("the last attempt did not end well: starting afresh (downloads are kept in pip's cache)")
        if half_made or not self.directory.exists():
            self.say(f"making {self.directory.name} with Python {sys.version.split()[0]}")
            self.directory.mkdir(parents=True, exist_ok=True)
            self.in_progress.touch()
            command = [sys.executable, *NEW_ENVIRONMENT, str(self.directory)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
            if done.returncode:
                # `venv --clear` took the mark away with all the rest.
                self.directory.mkdir(parents=True, exist_ok=True)
                self.in_progress.touch()
                raise SetupError("no virtual environment could be made; on Debian and Ubuntu install python3.11-venv, then run make again")
        self.stamp.unlink(missing_ok=True)
        self.in_progress.touch()

    def install_torch(self, requirement: str) -> None:
        """The locked CPU build from plain pip, else from PyTorch's own CPU index."""
        install = ["install", "--no-deps", requirement]
        try:
            self.pip(f"installing {requirement}", install, show_log=False)
        except SetupError:
            self.say(f"plain pip does not find {requirement}: trying PyTorch's own CPU index")
            self.pip(f"installing {requirement}", [*install, "--extra-index-url", TORCH_CPU_INDEX])

    def remove_unwanted(self) -> None:
        """Take out what a plain resolution may have brought into an environment made by hand."""
        site_packages = self.directory / "lib"
        present = [name for name in UNWANTED if any(site_packages.glob(f"python*/site-packages/{name}-*.dist-info"))]
        if present:
            self.pip(f"removing {', '.join(present)}", ["uninstall", "-y", *present])

    def check(self) -> None:
        """The two things whose absence is understood late: a torch without CUDA, a transformers that can be imported."""
        self.step("checking torch and transformers", [str(self.python), "-c", PROBE])

    def pip(self, what: str, arguments: Sequence[str], show_log: bool = True) -> None:
        """One pip command in the environment. Raises SetupError."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        self.step(what, command, show_log=show_log)

    def step(self, what: str, command: Sequence[str], show_log: bool = True) -> None:
        """Run one command with its output in the log. Raises SetupError; ``show_log`` prints the log's end before."""
        self.say(what)
        code = self.run(command, progress=True)
        if code == 0:
            return
        if show_log and self.log.exists():
            lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LOG_LINES:]
            print("\n".join(line[:SHOWN_LINE_LENGTH] for line in lines), flush=True)
        how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        raise SetupError(f"failed ({what}, {how}; all output is in {self.log}); after mending the cause run make again")

    def run(self, command: Sequence[str], progress: bool = False) -> int:
        """Run a command, its output appended to the log; the exit code, 127 when there is no such program."""
        with self.log.open("a") as output:
            output.write(f"$ {shlex.join(command)}\n")
            output.flush()
            log_start = output.tell()
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            except OSError:
                return 127
            while True:
                try:
                    return process.wait(timeout=PROGRESS_EVERY_S)
                except subprocess.TimeoutExpired:
                    if progress:
                        self.say(f"  {describe_progress(self.log, log_start)}")
                except BaseException:
                    process.terminate()
                    process.wait()
                    raise

    def say(self, text: str) -> None:
        """One line with the seconds since the start."""
        print(f"[{time.monotonic() - self.started:4.0f} s] {text}", flush=True)


def describe_progress(log: Path, start: int) -> str:
    """What pip is doing, from its output after byte ``start`` of the log."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    if any(line.startswith("Installing collected packages") for line in lines):
        return "unpacking"
    collected = sum(line.startswith("Collecting ") for line in lines)
    return f"{collected} packages collected" if collected else "working"


def read_lock(lock: Path) -> list[str]:
    """The requirements of a lock file, without comments. Raises SetupError for a line that does not pin a version."""
    lines = [line.strip() for line in lock.read_text().splitlines()]
    requirements = [line for line in lines if line and not line.startswith("#")]
    for requirement in requirements:
        if "==" not in requirement:
            raise SetupError(f"{lock}: {requirement!r} pins no version; each line must be NAME==VERSION")
    return requirements


def torch_requirement(requirements: Sequence[str]) -> str:
    """The lock's line of torch. Raises SetupError when it is missing or could be a CUDA build."""
    found = [requirement for requirement in requirements if requirement.startswith("torch==")]
    if len(found) != 1 or not found[0].endswith("+cpu"):
        raise SetupError(f"the lock must have one line torch==VERSION+cpu, found {found}; without +cpu pip may take a CUDA build (GBs)")
    return found[0]


def main() -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(description="Make or mend a virtual environment from a lock file.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lock", type=Path, required=True)
    options = parser.parse_args()
    project = Path(__file__).resolve().parent.parent
    # An exception, so that pip is ended too: left alone it would go on in an environment that the next make empties.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        # Not resolve(): the environment may be a symbolic link to a larger disk.
        Environment(options.directory.absolute(), project).make(options.lock.absolute())
    except SetupError as error:
        print(f"make_venv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_venv: interrupted; the next make starts afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
