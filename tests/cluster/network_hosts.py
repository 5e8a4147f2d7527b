"""Network namespaces of this one machine as hosts: each with an address of its own, all of them on one switch that tests can slow and cut.

Nothing of it is seen outside: the switch is a bridge in a namespace of its own, so no address or route of the machine is touched. Files,
processes and /dev/shm are common to all hosts. ``localhost`` is each host's own, and the machine's name leads every host to itself or to
nowhere, as on a node whose name is not in the DNS. By hand (as root):

    python tests/cluster/network_hosts.py DIRECTORY 1 1 [MEGABIT]     # Ray on two hosts of 1 CPU; prints how to run something there
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CARD = "net0"
"""The network card of every host."""
NETWORK = "10.77.0"
LATENCY = "50ms"
"""What waits longer before a slow link is dropped, as in a switch."""
BURST_S = 0.005
LEAST_BURST = 128 << 10
"""Bytes that a slow link lets through at once: what it brings in BURST_S, and two of the largest packets at least."""
COMMAND_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.1

RAY_PORT = 6379
RAY_START_TIMEOUT_S = 90.0
RAY_STARTED = "Ray runtime started."
"""Said by ``ray start`` when the cluster knows the node."""
STORE_BYTES = 100 << 20


def missing() -> str | None:
    """Why there can be no such hosts here, with what to do about it; None when there can."""
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"no {' and '.join(absent)} here: install iproute2 (Debian: apt-get install -y iproute2)"
    if os.geteuid() != 0:
        return "only root makes network namespaces: run these tests as root"
    probe = f"probe-{secrets.token_hex(4)}"
    try:
        _run("ip", "netns", "add", probe)
        try:
            _run("ip", "-n", probe, "link", "add", "name", "switch", "type", "bridge")
            _run("ip", "-n", probe, "link", "add", CARD, "type", "veth", "peer", "name", "port0")
            _run("tc", "-n", probe, "qdisc", "add", "dev", CARD, "root", "tbf", "rate", "10mbit", "burst", "64kb", "latency", LATENCY)
        finally:
            _run("ip", "netns", "del", probe)
    except RuntimeError as error:
        return f"this kernel or container has no network namespaces, bridges, veth pairs or tbf ({error}): run these tests on a machine"
    return None


def _run(*command: str, timeout_s: float = COMMAND_TIMEOUT_S, **options: Any) -> str:
    """Output of a command. Raises RuntimeError with what it said when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL, **options)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed with {done.returncode}: {(done.stdout + done.stderr).strip()[-3000:]}")
    return done.stdout


class NetworkHosts:
    """Hosts that are there; see :func:`network_hosts`. They are told apart by number, from 0."""

    def __init__(self, count: int) -> None:
        name = f"rlpost-{os.getpid()}-{secrets.token_hex(3)}"
        self._switch = f"{name}-switch"
        self._names = [f"{name}-{host}" for host in range(count)]
        self.addresses = [f"{NETWORK}.{host + 1}" for host in range(count)]

    def make(self) -> None:
        """Hosts, switch and cables."""
        _run("ip", "netns", "add", self._switch)
        self._in_switch("link", "add", "name", "switch", "type", "bridge")
        self._in_switch("link", "set", "switch", "up")
        for host, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", CARD, "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", self._switch)
            self._in_switch("link", "set", f"port{host}", "master", "switch", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", CARD)
            for card in ("lo", CARD):
                _run("ip", "-n", name, "link", "set", card, "up")

    def _in_switch(self, *words: str) -> None:
        _run("ip", "-n", self._switch, *words)

    def command(self, host: int, *command: str) -> list[str]:
        """The words that run ``command`` on a host; the process is the command's own, not one around it."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def run(self, host: int, *command: str, timeout_s: float = COMMAND_TIMEOUT_S, **options: Any) -> str:
        """Output of a command on a host. Raises RuntimeError with what it said when it fails."""
        return _run(*self.command(host, *command), timeout_s=timeout_s, **options)

    def start(self, host: int, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host; all that is left of it is killed with the host."""
        return subprocess.Popen(self.command(host, *command), stdin=subprocess.DEVNULL, **options)

    def limit(self, megabit: float) -> None:
        """Every host sends at most so many Mbit/s."""
        burst = max(LEAST_BURST, int(megabit * 1e6 / 8 * BURST_S))
        for name in self._names:
            words = ("rate", f"{megabit:g}mbit", "burst", str(burst), "latency", LATENCY)
            _run("tc", "-n", name, "qdisc", "replace", "dev", CARD, "root", "tbf", *words)

    def unlimit(self) -> None:
        """As fast as the machine is."""
        for name in self._names:
            with contextlib.suppress(RuntimeError):  # there is no limit
                _run("tc", "-n", name, "qdisc", "del", "dev", CARD, "root")

    def cut(self, host: int) -> None:
        """Nothing reaches the host or comes from it, and nobody is told, as with a cable that is pulled at a switch between them."""
        self._in_switch("link", "set", f"port{host}", "nomaster")

    def restore(self, host: int) -> None:
        """The cable is in again; connections that waited go on within about as long as they waited."""
        self._in_switch("link", "set", f"port{host}", "master", "switch")

    def sent_bytes(self, host: int) -> int:
        """All that the host has sent to others since it was made, with the headers of packets."""
        [card] = json.loads(_run("ip", "-n", self._names[host], "-s", "-j", "link", "show", CARD))
        sent: int = card["stats64"]["tx"]["bytes"]
        return sent

    def processes(self, host: int) -> list[int]:
        """Everything that runs on a host."""
        return [int(word) for word in _run("ip", "netns", "pids", self._names[host]).split()]

    def kill(self, host: int) -> None:
        """End everything that runs on a host; again until none is left: a process may start another before it gets the signal."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while pids := self.processes(host):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of host {host} do not end: {pids}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def remove(self) -> None:
        """Hosts with all that runs there, and the switch; cables go with their ends."""
        present = {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.split()}
        for host, name in enumerate(self._names):
            if name in present:
                try:
                    self.kill(host)
                finally:
                    _run("ip", "netns", "del", name)
        if self._switch in present:
            _run("ip", "netns", "del", self._switch)


@contextlib.contextmanager
def network_hosts(count: int = 2) -> Iterator[NetworkHosts]:
    """Hosts on one switch, without a limit; ask :func:`missing` first. Whatever still runs there at the end is killed."""
    hosts = NetworkHosts(count)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


# ---- Ray on the hosts ------------------------------------------------------------------------------------------------


class RayHosts:
    """A Ray node on each host, the head on host 0. ``environment`` is the whole one of a process that joins."""

    def __init__(self, hosts: NetworkHosts, directory: Path, variables: Mapping[str, str]) -> None:
        self.hosts, self.directory = hosts, directory
        self.address = f"{hosts.addresses[0]}:{RAY_PORT}"
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # A cluster, a network card and an address of the machine's own are none of these hosts'.
        foreign = ("RAY_ADDRESS", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "RAY_AUTH_TOKEN_PATH")
        self.environment = {name: value for name, value in os.environ.items() if name not in foreign} | own | dict(variables)

    def start(self, host: int, cpus: float) -> subprocess.Popen[Any]:
        """Begin to start the node of a host; each has a session directory of its own, as the disks of two machines."""
        directory = self.directory / str(host)
        directory.mkdir(parents=True, exist_ok=True)
        words = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if host == 0 else [f"--address={self.address}"]
        words += [f"--node-ip-address={self.hosts.addresses[host]}", f"--num-cpus={cpus:g}", f"--object-store-memory={STORE_BYTES}"]
        words += ["--block", f"--temp-dir={directory}", "--disable-usage-stats"]
        with self._output(host).open("wb") as output:
            return self.hosts.start(
                host, sys.executable, "-m", "ray.scripts.scripts", "start", *words, env=self.environment, cwd=directory,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_until_started(self, host: int, node: subprocess.Popen[Any]) -> None:
        """Return when the cluster knows the node. Raises RuntimeError with what ``ray start`` said when it ends or takes too long."""
        deadline = time.monotonic() + RAY_START_TIMEOUT_S
        while RAY_STARTED not in (said := self._output(host).read_text(errors="replace")):
            if node.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray did not start on host {host} within {RAY_START_TIMEOUT_S:.0f} s:\n{said[-3000:]}")
            time.sleep(POLL_S)

    def _output(self, host: int) -> Path:
        return self.directory / f"{host}.output"


@contextlib.contextmanager
def ray_hosts(directory: Path, cpus: Sequence[float], variables: Mapping[str, str] | None = None) -> Iterator[RayHosts]:
    """Hosts with so many CPUs each, as Ray counts them, and a Ray cluster of all; ``variables`` are added to the environment of its nodes.

    ``directory`` is made; keep its path short, for Ray's sockets lie below it. Raises RuntimeError when a node does not come up.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with network_hosts(len(cpus)) as hosts:
        ray = RayHosts(hosts, directory, variables or {})
        ray.wait_until_started(0, ray.start(0, cpus[0]))
        for host, node in [(host, ray.start(host, one)) for host, one in enumerate(cpus) if host]:
            ray.wait_until_started(host, node)
        yield ray


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    with ray_hosts(Path(sys.argv[1]).resolve(), [float(sys.argv[2]), float(sys.argv[3])]) as running:
        if len(sys.argv) > 4:
            running.hosts.limit(float(sys.argv[4]))
        token = running.environment["RAY_AUTH_TOKEN"]
        print(f"export RAY_ADDRESS={running.address} RAY_AUTH_MODE=token RAY_AUTH_TOKEN={token}")
        print(f"{shlex.join(running.hosts.command(0))} COMMAND ...", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
