"""An actor's process: it works in the driver's directory, and its output goes to a file of its own in the run directory.

So relative paths of a configuration mean the same in every process, and a user finds what a library printed.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

LOG_FILE = "RLPOST_LOG_FILE"
DIRECTORY = "RLPOST_DIRECTORY"


def variables(log: Path) -> dict[str, str]:
    """For the environment of an actor of this driver."""
    return {LOG_FILE: str(log.absolute()), DIRECTORY: str(Path.cwd())}


def settle() -> None:
    """In an actor: output to its file, and into the driver's directory. What this node does not have is said, and left."""
    _redirect_output()
    directory = os.environ.get(DIRECTORY)
    if not directory:
        return
    try:
        os.chdir(directory)
    except OSError as error:
        print(
            f"rlpost: {socket.gethostname()} has not the driver's directory {directory} ({error.strerror}); relative paths begin in "
            f"{Path.cwd()} here",
            file=sys.stderr,
        )


def _redirect_output() -> None:
    """Append stdout and stderr to the file that the driver named. Keeps Ray's own logs when it cannot be opened."""
    name = os.environ.get(LOG_FILE)
    if not name:
        return
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:  # the run directory is not visible on this node
        print(f"rlpost: {name} cannot be written ({error}); output stays in Ray's logs", file=sys.stderr)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
