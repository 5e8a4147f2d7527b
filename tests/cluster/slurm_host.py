"""A real Slurm on this one machine: munged, slurmctld and several slurmd, each of which is a node of its own.

Everything lies in one directory: configuration, key, state, spool and logs. Every daemon runs in the foreground as a child of the
test, and is stopped by its process id; a Slurm that runs here already is neither used nor touched. By hand:

    python tests/cluster/slurm_host.py DIRECTORY        # prints the line that points sinfo, sbatch ... at it; Ctrl-C ends it

Nodes are called n1, n2 ...; partition ``low`` (the default) is pre-empted by ``high`` and requeues what it pre-empts. Where there are
network namespaces, each node can be a host of its own, with its own address and processes.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from network_hosts import NetworkHosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 60.0
POLL_S = 0.2
SOCKET_PATH_LIMIT = 107
"""Longest path of a unix socket."""

ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY"})
"""States in which a job stays."""

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({controller_address})
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
# Short, so that a test does not wait for what takes minutes on a cluster.
KillWait={kill_wait_s}
SlurmdTimeout={node_timeout_s}
MinJobAge=300
# Jobs name ports and directories of the machine by their id; those of another Slurm here get others.
FirstJobId={first_job}
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{controller_parameters}
{node_lines}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s} State=UP
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the Slurm of a test looks like. Seconds are short: a test waits for them."""

    nodes: int = 2
    cpus: int = 1
    """CPUs of a node; they need not be there."""
    grace_s: int = 0
    """Between a pre-emption's first signal and the end of the job."""
    kill_wait_s: int = 5
    """Between TERM and KILL of a job that is cancelled or has reached its limit."""
    node_timeout_s: int = 10
    """After which a node that does not answer is down."""
    signal_user: bool = False
    """A pre-emption sends the job's own ``--signal`` (SlurmctldParameters=preempt_send_user_signal) instead of TERM to its steps."""


def missing() -> str | None:
    """Why no Slurm can be started here, with what to do about it; None when it can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)} here: install Slurm and munge (Debian: apt-get install -y slurm-wlm munge)"
    if os.geteuid() != 0:
        return f"slurmd starts jobs as root only, and this is {getpass.getuser()}: run these tests as root"
    return None


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens at."""
    for first in range(21000 + 20 * (os.getpid() % 400), 31000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(contextlib.closing(socket.socket())).bind(("", port))
            except OSError:
                continue
            return first
    raise RuntimeError(f"no {count} free ports in a row")


class Slurm:
    """A Slurm that runs; ``environment`` points Slurm's commands at it. With ``hosts`` the controller is on host 0, node n1 too."""

    def __init__(self, directory: Path, cluster: Cluster, hosts: NetworkHosts | None = None) -> None:
        self.directory = directory
        self.cluster = cluster
        self.hosts = hosts
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        for name in [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_")) and name != "SLURM_CONF"]:
            del self.environment[name]  # of a job in which the tests run
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """Output of one of Slurm's commands, or one that calls them. Raises RuntimeError with what it said when it fails."""
        variables = {**self.environment, **(environment or {})}
        reaching = self._on_host(0, *command)
        done = subprocess.run(reaching, env=variables, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}: {(done.stdout + done.stderr).strip()}")
        return done.stdout

    def submit(self, script: str | Path, *options: str, environment: Mapping[str, str] | None = None) -> str:
        """The id of the job that ``sbatch OPTIONS SCRIPT`` makes; a text is written to a file first."""
        if isinstance(script, str):
            path = self.directory / f"job-{len(list(self.directory.glob('job-*')))}.sbatch"
            path.write_text(script)
            script = path
        return self.run("sbatch", "--parsable", *options, str(script), environment=environment).strip().split(";")[0]

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job: JobState, Restarts, ExitCode, Reason, NodeList ... (of its first component)."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, states: Sequence[str] | frozenset[str] = ENDED, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, str]:
        """What is known of the job as soon as it is in one of ``states``. Raises TimeoutError with its state and the controller's log."""
        deadline = time.monotonic() + timeout_s
        while True:
            known = self.job(job)
            if known["JobState"] in states:
                return known
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"job {job} is {known['JobState']} ({known.get('Reason')}) after {timeout_s:.0f} s, expected {sorted(states)}; "
                    f"slurmctld:\n{self.log('slurmctld', 8)}"
                )
            time.sleep(POLL_S)

    def start_requeued(self, job: str, timeout_s: float = COMMAND_TIMEOUT_S) -> dict[str, str]:
        """Wait until a requeued job is pending again, and let it start soon: Slurm holds it back for two minutes.

        Not at once: within a second of a job's end slurmd refuses its credential (`Job credential revoked`).
        """
        self.wait_for(job, ("PENDING",), timeout_s)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")
        return self.wait_for(job, frozenset({"RUNNING"}) | ENDED, timeout_s)

    def node(self, name: str) -> str:
        """The state of a node: idle, allocated, down ..., with Slurm's marks (``*`` does not answer)."""
        return self.run("sinfo", "--noheader", "--Node", f"--nodes={name}", "--partition=low", "--format=%T").strip()

    def wait_for_node(self, name: str, states: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Return when the node is in one of ``states``. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (state := self.node(name)) not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {name} is {state} after {timeout_s:.0f} s, expected {list(states)}")
            time.sleep(POLL_S)

    def log(self, daemon: str, lines: int = 30) -> str:
        """The last lines of a daemon's log: slurmctld, slurmd.n1 ..., munged."""
        path = self.directory / f"{daemon}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def start(self, name: str, *command: str) -> None:
        """Start a daemon, in a process group of its own: Ctrl-C in the terminal is for the test, which then stops it."""
        with (self.directory / f"{name}.output").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start_controller(self) -> None:
        """Start slurmctld, with no jobs."""
        self.start("slurmctld", *self._on_host(0, "slurmctld", "-D", "-i", "-f", str(self.directory / "slurm.conf")))

    def start_node(self, name: str) -> None:
        """Start (again) the slurmd of a node. On a host of its own it sees no processes but the node's."""
        # A shell is the node's init: it takes leave of processes whose parents have ended, which slurmd does not.
        init = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", '"$@" & wait', "init"]
        daemon = ("slurmd", "-D", "-N", name, "-f", str(self.directory / "slurm.conf"))
        self.start(name, *self._on_host(int(name[1:]) - 1, *(init if self.hosts is not None else []), *daemon))

    def _on_host(self, host: int, *command: str) -> Sequence[str]:
        return command if self.hosts is None else self.hosts.command(host, *command)

    def lose_node(self, name: str) -> None:
        """The node is gone, with all that ran on it: its slurmd, the steps of its jobs and their processes get KILL."""
        for pid in [self.daemons[name].pid, *self.processes(name)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons.pop(name).wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Cancel all jobs, wait until they are gone, stop the daemons, the nodes' first."""
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            self.run("scancel", "--user", getpass.getuser())
            deadline = time.monotonic() + STOP_TIMEOUT_S + self.cluster.kill_wait_s
            while self.run("squeue", "--noheader").strip() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        left = [pid for name in self.daemons for pid in self.processes(name)]
        for name in reversed(self.daemons):
            daemon = self.daemons[name]
            # unshare does not pass TERM on; with its end all processes of the node end.
            (daemon.terminate if self.hosts is None else daemon.kill)()
            try:
                daemon.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.daemons.clear()

    def processes(self, node: str) -> list[int]:
        """Processes of this Slurm's jobs on a node: all that were started with its configuration and the node's name."""
        own, found = f"SLURM_CONF={self.directory / 'slurm.conf'}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (path / "environ").read_bytes().split(b"\0")
                if own in variables and f"SLURMD_NODENAME={node}".encode() in variables:
                    found.append(int(path.name))
        return found


@contextlib.contextmanager
def slurm_host(directory: Path, cluster: Cluster | None = None, hosts: NetworkHosts | None = None) -> Iterator[Slurm]:
    """A Slurm whose nodes are all idle, in ``directory`` (made; keep its path short); with ``hosts`` each node is on one of its own.

    Ask :func:`missing` first. Raises RuntimeError with the daemons' logs when it does not come up.
    """
    cluster = cluster or Cluster()
    if len(str(directory / "munge.socket")) > SOCKET_PATH_LIMIT - 10:
        raise RuntimeError(f"{directory} is too long for munge's socket; use a directory with a shorter path")
    directory.mkdir(parents=True, exist_ok=True)
    slurm = Slurm(directory, cluster, hosts)
    _write_configuration(directory, cluster, hosts.addresses if hosts is not None else ["127.0.0.1"] * cluster.nodes)
    try:
        slurm.start("munged", *_munged(directory))
        slurm.start_controller()
        names = [f"n{index + 1}" for index in range(cluster.nodes)]
        for name in names:
            slurm.start_node(name)
        _wait_until_idle(slurm, names)
        yield slurm
    finally:
        slurm.stop()


def _write_configuration(directory: Path, cluster: Cluster, addresses: Sequence[str]) -> None:
    """slurm.conf, the key of munge, and the directories that Slurm does not make. ``addresses`` are the nodes'."""
    port, host = free_ports(cluster.nodes + 1), socket.gethostname().split(".")[0]
    nodes = [
        f"NodeName=n{index + 1} NodeHostname={host} NodeAddr={address} Port={port + 1 + index} CPUs={cluster.cpus} RealMemory=4000"
        for index, address in enumerate(addresses)
    ]
    text = CONFIGURATION.format(
        host=host,
        user=getpass.getuser(),
        directory=directory,
        controller_address=addresses[0],
        controller_port=port,
        first_job=1000 + secrets.randbelow(1_000_000),
        node_lines="\n".join(nodes),
        controller_parameters="SlurmctldParameters=preempt_send_user_signal" if cluster.signal_user else "",
        **asdict(cluster),
    )
    (directory / "slurm.conf").write_text(text)
    # Control groups are not used; to look for those of the machine fails where a node has a view of its own.
    (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (directory / "state").mkdir(exist_ok=True)
    for index in range(cluster.nodes):
        (directory / f"spool.n{index + 1}").mkdir(exist_ok=True)
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)


def _munged(directory: Path) -> list[str]:
    """munged with a key of its own. ``--force``: the directory of a test may be writable for others."""
    files = {
        "socket": "munge.socket",
        "key-file": "munge.key",
        "pid-file": "munged.pid",
        "seed-file": "munged.seed",
        "log-file": "munged.log",
    }
    return ["munged", "--foreground", "--force", *(f"--{option}={directory / name}" for option, name in files.items())]


def _wait_until_idle(slurm: Slurm, names: Sequence[str]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        dead = [name for name, daemon in slurm.daemons.items() if daemon.poll() is not None]
        try:
            if not dead and all(slurm.node(name) == "idle" for name in names):
                return
        except RuntimeError:
            pass  # the controller does not answer yet
        if dead or time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(slurm.directory.glob("*.output")))
            raise RuntimeError(f"Slurm did not start within {START_TIMEOUT_S:.0f} s; ended by themselves: {dead}\n{logs}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    with slurm_host(Path(sys.argv[1]).resolve()) as running, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={running.environment['SLURM_CONF']}", flush=True)
        signal.pause()
