"""Several Ray nodes on this one machine, each started by ``ray start`` as on a machine of its own. By hand:

    python tests/cluster/ray_nodes.py DIRECTORY 1 1 2       # nodes of 1, 1 and 2 CPUs; Ctrl-C or TERM ends them

The first node is the head. Its processes and those of the others carry a mark in their environment, by which they are found and
stopped: other Rays of this user are neither used nor touched, and nothing of these nodes is left. A driver on this machine joins
through the head, so losing another node leaves it alive. Ray's session lies in the given directory, so ``auto`` does not find it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_host import free_ports

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1
HOST = "127.0.0.1"
STARTED = "Ray runtime started."
"""Said by ``ray start`` when the cluster knows the node."""
MARK = "RLPOST_TEST_RAY_NODE"
"""Variable of every process of a node: directory and number of the node."""
SESSION_PATH_LIMIT = 36
"""Ray's sockets (at most 107 characters) lie up to 70 below."""
FAST_DEATH = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "2"}
"""A node is dead when nobody answers there for a second (Ray's own: 15 s); one that is only slow still has ten seconds a check."""
STORE_BYTES = 100 << 20
"""Object store of a node; batches are small."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node. CPUs and GPUs are what Ray counts; they need not be there."""

    cpus: int = 1
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


class RayNodes:
    """Nodes that run. ``address`` is HOST:PORT of the head (placement.ray_address), ``dashboard`` its URL or None,
    ``environment`` the whole environment of a process that joins."""

    def __init__(self, directory: Path, dashboard: bool) -> None:
        self.directory = directory
        gcs, client, web = range(first := free_ports(3), first + 3)
        self.address = f"{HOST}:{gcs}"
        self.dashboard = f"http://{HOST}:{web}" if dashboard else None
        self._head = ["--head", f"--port={gcs}", f"--ray-client-server-port={client}", f"--dashboard-port={web}"]
        self._head += [f"--include-dashboard={dashboard}"]
        # Ray sets the mode in a process in which it started a cluster before; a joiner and a node of different modes refuse each other.
        mode = {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled"), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        self.environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | mode
        self._nodes: list[subprocess.Popen[bytes]] = []

    def add(self, node: Node) -> int:
        """Start one more node and wait for it; returns its number."""
        index = self.start(node)
        self.wait_until_started(index)
        return index

    def start(self, node: Node) -> int:
        """Start a node; see :meth:`wait_until_started`."""
        index = len(self._nodes)
        labels = ",".join(f"{name}={value}" for name, value in node.labels.items())
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--temp-dir={self.directory}/n{index}"]
        command += self._head if index == 0 else [f"--address={self.address}"]
        command += [f"--num-cpus={node.cpus}", f"--num-gpus={node.gpus}", f"--object-store-memory={STORE_BYTES}"]
        command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0", "--disable-usage-stats"]
        command += [f"--labels={labels}"] if labels else []
        with self._output(index).open("wb") as output:
            process = subprocess.Popen(
                command, env={**self.environment, **FAST_DEATH, MARK: self._mark(index)}, cwd=self.directory, start_new_session=True,
                preexec_fn=_end_with_parent, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._nodes.append(process)
        return index

    def wait_until_started(self, index: int) -> None:
        """Return when the cluster knows the node. Raises RuntimeError with what ``ray start`` said when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while STARTED not in (said := self._output(index).read_text(errors="replace")):
            code = self._nodes[index].poll()
            if code is not None or time.monotonic() > deadline:
                raise RuntimeError(f"node {index} of Ray did not start within {START_TIMEOUT_S:.0f} s (exit code {code}):\n{said[-3000:]}")
            time.sleep(POLL_S)

    def lose(self, index: int) -> None:
        """The node is gone with all that runs on it: KILL to each of its processes."""
        self._kill(f"{MARK}={self._mark(index)}".encode())
        self._nodes[index].wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """All nodes are gone."""
        self._kill(*(f"{MARK}={self._mark(index)}".encode() for index in range(len(self._nodes))))
        for node in self._nodes:
            node.wait(STOP_TIMEOUT_S)

    def _mark(self, index: int) -> str:
        return f"{self.directory}:{index}"

    def _output(self, index: int) -> Path:
        return self.directory / f"node{index}.output"

    def _kill(self, *marks: bytes) -> None:
        """Again until none is left: a process may start another before it gets the signal."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while pids := _marked(marks):
            assert time.monotonic() < deadline, f"processes of Ray nodes do not end: {pids}"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


def _marked(marks: Sequence[bytes]) -> list[int]:
    """Processes with one of ``marks`` (NAME=VALUE) in their environment; those that have ended have none left."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if not set(marks).isdisjoint((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def _end_with_parent() -> None:
    """Let the kernel KILL this process when the test is killed; what `ray start --block` starts ends with it in the same way."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def ray_nodes(directory: Path, nodes: Sequence[Node], *, dashboard: bool = False) -> Iterator[RayNodes]:
    """A Ray cluster of ``nodes``, all alive, the first of them the head; ``directory`` is made (keep its path short).

    Raises RuntimeError with what ``ray start`` said when one does not come up.
    """
    if len(str(directory)) > SESSION_PATH_LIMIT:
        raise RuntimeError(f"{directory} is too long for Ray's sockets; use a directory with at most {SESSION_PATH_LIMIT} characters")
    directory.mkdir(parents=True, exist_ok=True)
    running = RayNodes(directory, dashboard)
    try:
        running.add(nodes[0])
        for index in [running.start(node) for node in nodes[1:]]:
            running.wait_until_started(index)
        yield running
    finally:
        running.stop()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell lets its background jobs ignore Ctrl-C
        signal.signal(number, lambda *_: sys.exit())
    with ray_nodes(Path(sys.argv[1]).resolve(), [Node(cpus=int(cpus)) for cpus in sys.argv[2:]], dashboard=True) as cluster:
        print(json.dumps({"address": cluster.address, "dashboard": cluster.dashboard}), flush=True)
        signal.pause()
