"""What a Slurm job is told besides the run's configuration, and which of it cannot work. ``--help`` prints these words."""
# ruff: noqa: RUF009  option() makes fields.

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rlpost.config.fields import Place, children, clean, joined
from rlpost.config.schema import RunConfig, option
from rlpost.jobs.secrets import assigned_secret, secret_keys, shows_secret
from rlpost.types import ConfigError

LATEST_SIGNAL_S = 65535
"""The largest that sbatch takes."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_INTERFACE = re.compile(r"[A-Za-z0-9._@:-]+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OWN_OPTIONS = {
    "partition": "partition", "p": "partition", "account": "account", "A": "account", "qos": "qos", "q": "qos",
    "time": "time_limit", "t": "time_limit", "job-name": "job_name", "J": "job_name", "nodes": "nodes", "N": "nodes",
    "cpus-per-task": "cpus_per_node", "c": "cpus_per_node", "mem": "memory_gib", "gpus-per-node": "gpus_per_node",
    "exclusive": "exclusive", "constraint": "constraint", "C": "constraint", "export": "export", "signal": "signal_s",
    "requeue": "requeue", "no-requeue": "requeue", "chdir": "working_directory", "D": "working_directory",
    "output": "log_directory", "o": "log_directory",
}  # fmt: skip
"""Options of sbatch that a setting writes."""

ROLLOUT_SETTINGS = ("rollout_partition", "rollout_constraint", "rollout_gpus_per_node")

_TASK_OPTIONS = ("ntasks", "n", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "array", "a")


@dataclass
class SlurmSettings:
    """All optional but gpus_per_node."""

    working_directory: str | None = option(
        None,
        "Directory that all nodes see, where the job starts; relative paths of the run's configuration begin there. Null is where "
        "the job is submitted.",
    )
    log_directory: str | None = option(None, "Directory for the logs, one a node; null is working_directory/logs.")
    job_name: str | None = option(None, "Name of the job; null is the run's name.")
    partition: str | None = option(None, "Partition; null is the cluster's default.")
    account: str | None = option(None, "Account that is charged.")
    qos: str | None = option(None, "Quality of service.")
    constraint: str | None = option(None, "Features that the nodes must have.")
    time_limit: str = option("24:00:00", "Time limit as sbatch takes it: MINUTES, HH:MM:SS, DAYS-HH ...")
    gpus_per_node: int | None = option(None, "GPUs that one node has; 0 for a run on CPUs.")
    cpus_per_node: int | None = option(
        None,
        "CPUs to ask of each node, trainer and rollout nodes alike; null asks for what the parts and the driver need, at least 4 a GPU.",
    )
    memory_gib: int | None = option(None, "Memory to ask of each node in GiB; null is the cluster's default, 0 all of the node's.")
    nodes: int | None = option(None, "Nodes; null takes as few as hold the run. Not with separate_roles.")
    exclusive: bool = option(
        True, "Take whole nodes. False shares them with other jobs: Ray then gets ports of its own, and only the GPUs that are needed."
    )
    separate_roles: bool = option(False, "Give trainers and rollout engines nodes of their own, as a heterogeneous job.")
    rollout_partition: str | None = option(None, "Partition of the rollout nodes; null is partition. Needs separate_roles.")
    rollout_constraint: str | None = option(None, "Features of the rollout nodes; null is constraint. Needs separate_roles.")
    rollout_gpus_per_node: int | None = option(None, "GPUs of a rollout node; null is gpus_per_node. Needs separate_roles.")
    signal_s: int = option(
        600, "Seconds before the time limit at which the run is told to save and stop: more than a step and a checkpoint; 0 never tells it."
    )
    requeue: bool = option(True, "Start a job again that was stopped, pre-empted or lost a node; it resumes.")
    max_requeues: int = option(50, "How often the job is started again after it has stopped and saved.")
    export: list[str] = option(
        [],
        "Names of variables of this shell that the job gets, secrets too, with those of a login; without any, it gets this whole shell's "
        "(sbatch keeps them). The script has no values.",
    )
    setup: list[str] = option(
        [],
        "Lines of the script that prepare its shell: module load ..., source .../bin/activate; one that fails ends the job. With export "
        "it has only a login's PATH before them, else this shell's.",
    )
    container: str | None = option(None, "Container image that all but the batch script runs in.")
    container_runtime: str = option(
        "pyxis", "Who runs the container: srun's plugin (pyxis, with enroot), or apptainer.", ("pyxis", "apptainer")
    )
    container_mounts: list[str] = option([], "HOST:CONTAINER paths besides the working, log and run directories: data, models, HF_HOME.")
    interface: str | None = option(None, "Network interface of Ray, NCCL's sockets and gloo; null leaves it to them.")
    join_timeout_s: int = option(600, "Deadline for all nodes to have joined Ray.")
    preflight: bool = option(True, "Run `rlpost.doctor cluster` before the training; what it finds failed ends the job.")
    elsewhere: list[str] = option([], "Directories that only the nodes see: what the run names below them is not looked for here.")
    extra: list[str] = option([], "Further options of sbatch: --reservation=NAME ... (of the first component of a heterogeneous job).")

    @property
    def directory(self) -> str:
        """Where the job starts."""
        return self.working_directory or os.getcwd()

    @property
    def logs(self) -> str:
        """The directory for the logs."""
        return self.log_directory or f"{self.directory.rstrip('/')}/logs"


def seconds_of(time_limit: str) -> int | None:
    """A time limit in seconds, None for one without end. Raises ConfigError when it is none of the forms that sbatch takes."""
    text = time_limit.strip()
    if text.upper() in ("UNLIMITED", "INFINITE", "0"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        raise ConfigError(f"time_limit is {time_limit!r}, expected MINUTES, HH:MM:SS, DAYS-HH, or DAYS-HH:MM:SS; change time_limit")
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None:  # one part: minutes; two: minutes and seconds
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    else:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def check_settings(settings: SlurmSettings, config: RunConfig) -> None:
    """Raise ConfigError with everything that is missing, has a wrong type, cannot work, or would write a secret down."""
    problems: list[str] = []
    for child in children(SlurmSettings):
        clean(getattr(settings, child.key), child, Place(source="slurm"), problems)
    if not problems:
        problems += [*_missing(settings), *_times(settings), *_texts(settings), *_extras(settings), *_roles(settings)]
        problems += [*_directories(settings, config), *_secrets(settings, config)]
    if problems:
        raise ConfigError(joined(problems, lambda count: f"{count} problems in the settings of the job:"))


def _missing(settings: SlurmSettings) -> Iterator[str]:
    if settings.gpus_per_node is None:
        yield "gpus_per_node is not given; expected the GPUs that one node has, or 0 for a run on CPUs: set gpus_per_node=..."
    least = {"gpus_per_node": 0, "rollout_gpus_per_node": 0, "cpus_per_node": 1, "memory_gib": 0, "nodes": 1, "signal_s": 0,
             "max_requeues": 0, "join_timeout_s": 1}  # fmt: skip
    for name, smallest in least.items():
        value = getattr(settings, name)
        if value is not None and value < smallest:
            yield f"{name} is {value}, expected at least {smallest}; change {name}"


def _times(settings: SlurmSettings) -> Iterator[str]:
    try:
        limit = seconds_of(settings.time_limit)
    except ConfigError as error:
        yield str(error)
        return
    if settings.signal_s > LATEST_SIGNAL_S:
        yield f"signal_s is {settings.signal_s}, but sbatch takes at most {LATEST_SIGNAL_S}; lower signal_s"
    elif limit is not None and settings.signal_s >= limit:
        yield (
            f"signal_s={settings.signal_s} is not before the end of a job of time_limit={settings.time_limit} ({limit} s): it would be "
            "told to stop as it starts; lower signal_s, or raise time_limit"
        )


def _directories(settings: SlurmSettings, config: RunConfig) -> Iterator[str]:
    """Nodes do not agree on where a relative path begins, and a requeued job must find its own run again."""
    given = {"working_directory": settings.directory, "log_directory": settings.log_directory, "run_dir": config.run_dir}
    if config.resume not in ("never", "auto"):
        given["resume"] = config.resume
    for name, path in given.items():
        if path is None:
            continue
        if not path.startswith("/"):
            yield f"{name} is {path!r}, expected an absolute path on a disk that all nodes see; set {name}=/..."
        elif "%" in path:
            yield f"{name} is {path!r}, but Slurm replaces what follows a % in a path; rename the directory"


def _texts(settings: SlurmSettings) -> Iterator[str]:
    """What goes into lines that Slurm parses, not the shell."""
    if settings.job_name is not None and not _NAME.fullmatch(settings.job_name):
        yield f"job_name is {settings.job_name!r}, expected letters, digits, dots, dashes and underscores; rename it"
    single = ("partition", "account", "qos", "constraint", "rollout_partition", "rollout_constraint", "container")
    values = {name: getattr(settings, name) for name in (*single, "log_directory")} | {"working_directory": settings.directory}
    for name, value in values.items():
        if value is not None and (not value or any(character in value for character in "\n\"'\\") or " " in value):
            yield f"{name} is {value!r}, expected text without spaces, quotes and line ends; change {name}"
    if settings.interface is not None and not _INTERFACE.fullmatch(settings.interface):
        yield f"interface is {settings.interface!r}, expected the name of a network interface, such as ib0; change it"
    for name in settings.export:
        if "=" in name:
            variable = name.partition("=")[0]
            yield f"export has a value for {variable}, which others can read in the job; give the name alone: export=[{variable}]"
        elif not _VARIABLE.fullmatch(name):
            yield f"export has {name!r}, expected the name of a variable; change it"
    for index, mount in enumerate(settings.container_mounts):
        if not re.fullmatch(r"/[^:\s,]*(:/[^:\s,]*)?(:\w+)?", mount):
            yield f"container_mounts.{index} is {mount!r}, expected /HOST/PATH or /HOST/PATH:/CONTAINER/PATH; change it"
    if settings.container is None and settings.container_mounts:
        yield "container_mounts are given without a container; set container=IMAGE, or leave them out"


def _extras(settings: SlurmSettings) -> Iterator[str]:
    for line in settings.extra:
        match = re.fullmatch(r"(?:--([a-z][a-z-]*)|-([A-Za-z]))(?:[= ].*)?", line)
        if match is None:
            yield f"extra has {line!r}, expected an option of sbatch, such as --reservation=NAME; change it"
            continue
        name = match[1] or match[2]
        if name in ("wait", "W"):
            yield f"extra has {line}, with which sbatch would wait for the job's end; leave it out, and give --follow"
        elif name in _TASK_OPTIONS:
            yield f"extra has {line}, but the job has one task a node, which starts Ray there; leave it out"
        elif name in _OWN_OPTIONS:
            yield f"extra has {line}, which a setting writes; set {_OWN_OPTIONS[name]} instead"


def _roles(settings: SlurmSettings) -> Iterator[str]:
    if settings.separate_roles:
        if settings.nodes is not None:
            yield "nodes is given with separate_roles, where each role has its own number of nodes; leave nodes out"
        return
    for name in ROLLOUT_SETTINGS:
        if getattr(settings, name) is not None:
            yield f"{name} is given, but trainers and engines share nodes; set separate_roles=true, or leave {name} out"


def _secrets(settings: SlurmSettings, config: RunConfig) -> Iterator[str]:
    """The script is stored by Slurm and read by whoever may see the job; names of secrets may stand in it, their values never."""
    for line in [*settings.setup, *settings.extra]:
        if name := assigned_secret(line):
            yield f"a line of the script sets {name}, which reads like a secret; set it in your shell and give its name: export=[{name}]"
        elif shows_secret(line):
            yield "a line of the script holds a key, or a URL with a password; let it read a variable of your shell: export=[NAME]"
    for key in secret_keys(asdict(config)):
        yield (
            f"the run's {key} reads like a secret, and would stand in the script; let the code read an environment variable, and give its "
            "name: export=[NAME]"
        )
