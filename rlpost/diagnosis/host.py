"""What the machine checks read: files of the system, short commands, limits, this environment's packages. Tests give their own."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

COMMAND_TIMEOUT_S = 15.0
"""nvidia-smi takes seconds on a node of eight GPUs whose driver sleeps; a driver that hangs never answers."""

UNLIMITED = -1
"""A limit that is none."""

LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}

TIMEX_BYTES, TIMEX_MAXERROR_OFFSET = 208, 24
"""Linux's struct timex on 64-bit machines: its size, and where ``maxerror`` (microseconds) stands (adjtimex(2))."""


@dataclass(frozen=True)
class Answer:
    """What came of a command: its output, or that it is not there, failed or did not end in time."""

    kind: Literal["ok", "missing", "failed", "late"]
    text: str = ""


class Host:
    """This machine."""

    def __init__(self) -> None:
        self.environment: Mapping[str, str] = dict(os.environ)
        self.python = platform.python_version()

    def read(self, path: str) -> str | None:
        """A small file of the system, stripped; None where it is not there or cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return Path(path).read_text().strip()
        return None

    def names(self, path: str) -> tuple[str, ...]:
        """What a directory holds, sorted; nothing where there is none."""
        with contextlib.suppress(OSError):
            return tuple(sorted(os.listdir(path)))
        return ()

    def run(self, *words: str) -> Answer:
        """Run a command that ends soon."""
        if shutil.which(words[0]) is None:
            return Answer("missing")
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
            )
            output, errors = process.communicate(timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # and no wait: a process that hangs in a driver does not end
            return Answer("late")
        except OSError as error:
            return Answer("failed", str(error))
        return Answer("ok", output) if process.returncode == 0 else Answer("failed", (errors or output).strip())

    def room(self, path: str) -> tuple[int, int] | None:
        """Bytes of the file system of ``path``, and those that are free for this user; of the nearest parent that is there."""
        place = Path(path).absolute()
        with contextlib.suppress(OSError):
            usage = os.statvfs(next(one for one in (place, *place.parents) if one.exists()))
            return usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
        return None

    def limit(self, name: str) -> tuple[int, int]:
        """The soft and the hard limit ``nofile``, ``nproc`` or ``memlock`` (bytes) of this process; UNLIMITED where there is none."""
        soft, hard = resource.getrlimit(LIMITS[name])
        return (UNLIMITED if soft == resource.RLIM_INFINITY else soft, UNLIMITED if hard == resource.RLIM_INFINITY else hard)

    def cpus(self) -> int:
        """CPUs that this process may run on."""
        return len(os.sched_getaffinity(0))

    def version(self, package: str) -> str | None:
        """The installed version of a package; None when it is not installed. Nothing is imported."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
        return None

    def requirements(self, package: str) -> tuple[str, list[str]] | None:
        """``Requires-Python`` and the requirements of an installed package."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.distribution(package)
            return (found.metadata.get_all("Requires-Python") or [""])[0], list(found.requires or ())
        return None

    def file_of(self, package: str, path: str) -> str | None:
        """The text of a file that an installed package brought."""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return self.read(str(importlib.metadata.distribution(package).locate_file(path)))
        return None

    def clock_error_s(self) -> float | None:
        """The kernel's bound on the error of the clock in seconds; it grows to 16 and stays there when nobody sets the clock."""
        buffer = ctypes.create_string_buffer(TIMEX_BYTES)
        try:
            state = ctypes.CDLL(None).adjtimex(buffer)
        except (OSError, AttributeError):
            return None
        return None if state < 0 else ctypes.c_long.from_buffer(buffer, TIMEX_MAXERROR_OFFSET).value / 1e6
