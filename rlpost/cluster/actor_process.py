"""Each actor's output goes to a file of its own in the run directory, so that a user finds what a library printed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "RLPOST_LOG_FILE"


def redirect_output() -> None:
    """In an actor: append stdout and stderr to the file that the driver named. Keeps Ray's own logs when it cannot be opened."""
    name = os.environ.get(VARIABLE)
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
