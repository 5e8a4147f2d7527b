"""Room and speed of the disks that a run writes to, and what Ray left there."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlpost.diagnosis.host import Host
from rlpost.diagnosis.needs import Needs
from rlpost.diagnosis.report import Finding, Status
from rlpost.planner.quantities import GB, GIB, MIB

AREA = "disk"

PROBE_BYTES = 64 * MIB
"""Enough that the start of a write does not count, and written in a second by a disk that is fast enough."""

BLOCK_BYTES = MIB

LEAST_BYTES_S = 50e6
"""A checkpoint of a model of 1 B parameters (12 GB) takes four minutes at this speed."""

MOST_USED = 0.95
"""Ray stops to spill objects and to start tasks above this share (local_fs_capacity_threshold)."""

LEAST_FREE_BYTES = 5 * GIB
"""For compiled kernels and a small model in a cache directory, or the logs of a long run."""

RAY_DIRECTORY = "/tmp/ray"
OLD_SESSIONS_BYTES = 5 * GIB
WALK_S = 5.0
"""Sizes of old sessions are added up for so long; beyond it the sum is a lower bound."""


def check_room(host: Host, needs: Needs) -> Iterator[Finding]:
    """Free room where the run, its temporary files, Ray's and the models' go."""
    yield _run_room(host, needs)
    cache = host.environment.get("HF_HOME") or "~/.cache/huggingface"
    own = host.environment.get("RLPOST_CACHE") or "~/.cache/rlpost"
    places = {"temporary files": tempfile.gettempdir(), "Ray's files": RAY_DIRECTORY, "model cache": cache, "embedded models": own}
    for name, place in places.items():
        yield _least_room(host, name, str(Path(place).expanduser()))


def _run_room(host: Host, needs: Needs) -> Finding:
    """The run's directory against its checkpoints."""
    room = host.room(needs.directory)
    if room is None:
        return Finding(area=AREA, name="run directory", status="unknown", found=f"{needs.directory} cannot be looked at", expected="room")
    _, free = room
    needed = needs.disk_bytes
    short = needed is not None and free < needed
    little = free < LEAST_FREE_BYTES
    untold = needed is None and needs.device is not None
    status: Status = "failed" if short else "warning" if little else "unknown" if untold else "ok"
    expected = (
        f"{needed / GIB:.2f} GiB: {needs.disk_formula}" if needed is not None else f"size of checkpoints not known: {needs.disk_formula}"
    )
    return Finding(
        area=AREA, name="run directory", status=status, found=f"{free / GIB:.1f} GiB free in {needs.directory}", expected=expected,
        fix="make room, set output_dir elsewhere, or keep fewer checkpoints (checkpoint.keep)" if short or little else "",
        values={"free_bytes": free, **({"needed_bytes": needed} if needed is not None else {})},
    )  # fmt: skip


def _least_room(host: Host, name: str, place: str) -> Finding:
    """A directory whose contents nobody can foretell."""
    expected = f"{LEAST_FREE_BYTES / GIB:.0f} GiB free, and less than {MOST_USED:.0%} used (Ray stops there)"
    room = host.room(place)
    if room is None or not room[0]:
        return Finding(area=AREA, name=name, status="unknown", found=f"{place} cannot be looked at", expected=expected)
    total, free = room
    used = 1 - free / total
    status: Status = "failed" if used > MOST_USED and place == RAY_DIRECTORY else "warning" if free < LEAST_FREE_BYTES else "ok"
    return Finding(
        area=AREA, name=name, status=status, found=f"{free / GIB:.1f} GiB free, {used:.0%} used at {place}", expected=expected,
        fix="" if status == "ok" else "make room, or set another place: TMPDIR, HF_HOME, RLPOST_CACHE, ray start --temp-dir",
        values={"free_bytes": free, "used_share": used},
    )  # fmt: skip


def measure_disk(directory: str) -> tuple[float, float]:
    """Write a file there down to the disk, read it again, remove it. Bytes/s of both. Raises OSError.

    The directory, or else its nearest parent that is there, gets the file. The system is asked to forget what it holds of the file
    before it is read; where it does not, the read is one from memory.
    """
    place = Path(directory).absolute()
    parent = next(one for one in (place, *place.parents) if one.is_dir())
    block = os.urandom(BLOCK_BYTES)
    with tempfile.NamedTemporaryFile(dir=parent, prefix=".rlpost-doctor-") as file:
        started = time.perf_counter()
        for _ in range(PROBE_BYTES // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        reading = time.perf_counter()
        while file.read(BLOCK_BYTES):
            pass
        read = time.perf_counter()
    return PROBE_BYTES / (written - started), PROBE_BYTES / (read - reading)


def check_speed(directory: str, measure: Callable[[str], tuple[float, float]] = measure_disk) -> Finding:
    """Speed of the disk that checkpoints go to."""
    expected = f"{LEAST_BYTES_S / 1e6:.0f} MB/s or more, written and read"
    try:
        write, read = measure(directory)
    except OSError as error:
        return Finding(
            area=AREA, name="speed", status="failed", found=f"nothing can be written in {directory}: {error.strerror or error}",
            expected=expected, fix="set output_dir to a directory that this user may write to",
        )  # fmt: skip
    slow = min(write, read) < LEAST_BYTES_S
    return Finding(
        area=AREA, name="speed", status="warning" if slow else "ok",
        found=f"{write / GB:.3g} GB/s written, {read / GB:.3g} GB/s read in {directory}", expected=expected,
        fix="set output_dir to a faster disk, or save less often (checkpoint.every)" if slow else "",
        values={"write_bytes_s": write, "read_bytes_s": read},
    )  # fmt: skip


def session_sizes(directory: str = RAY_DIRECTORY) -> tuple[int, int, bool]:
    """Directories of Ray's sessions except the newest, their bytes on disk, and whether all were counted."""
    root, bytes_on_disk, deadline = Path(directory), 0, time.monotonic() + WALK_S
    newest = (root / "session_latest").resolve()
    sessions = [one for one in root.glob("session_2*") if one.resolve() != newest] if root.is_dir() else []
    for session in sessions:
        for folder, _, files in os.walk(session):
            if time.monotonic() > deadline:
                return len(sessions), bytes_on_disk, False
            for name in files:
                try:
                    bytes_on_disk += os.lstat(os.path.join(folder, name)).st_blocks * 512
                except OSError:  # a session that is alive removes files
                    continue
    return len(sessions), bytes_on_disk, True


def check_sessions(measure: Callable[[], tuple[int, int, bool]] = session_sizes) -> Finding:
    """What earlier sessions of Ray left in its directory."""
    count, size, whole = measure()
    much = size > OLD_SESSIONS_BYTES
    return Finding(
        area=AREA, name="old Ray sessions", status="warning" if much else "ok" if whole else "unknown",
        found=f"{count} in {RAY_DIRECTORY} beside the newest, {'' if whole else 'at least '}{size / GIB:.2f} GiB",
        expected=f"less than {OLD_SESSIONS_BYTES / GIB:.0f} GiB", values={"sessions": count, "bytes": size},
        fix=f"remove the directories {RAY_DIRECTORY}/session_* of sessions that have ended" if much else "",
    )  # fmt: skip
