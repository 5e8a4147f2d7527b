"""An sbatch script that starts Ray on every node of the allocation and rlpost.train on the first: ``launch/slurm/job.sbatch``, filled in.

That file says what the script does, and can be used by hand. Two parts of it are written here: its ``#SBATCH`` lines (``header``) and the
variables that the rest reads (``settings``). Everything of the user's is quoted for the shell, so a word arrives as it was given.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from rlpost.config.load import CONFIG_KEY, config_directories, find_config, split_arguments
from rlpost.config.schema import RunConfig
from rlpost.jobs.needs import ROLLOUT_GROUP, JobNeeds, NodeGroup, job_needs, overrides_in_job
from rlpost.jobs.packaging import paths_of
from rlpost.jobs.slurm_settings import ROLLOUT_SETTINGS, SlurmSettings, check_settings
from rlpost.types import ConfigError

TEMPLATE = "slurm/job.sbatch"

SIGNAL_RESERVE_S = 60
"""The script ends 45 s before the limit, to end Ray and to requeue. (The signal comes up to a minute earlier than asked for, not later.)"""

MOST_SHARED_CPUS = 100
"""Of a node that is shared: Ray starts a process for each at once, and their ports are the 120 that the script gives it."""


def render(config: RunConfig, words: Sequence[str], settings: SlurmSettings) -> str:
    """The text for sbatch; ``words`` are the ``config=... key=value`` of rlpost.train that made ``config``.

    Raises ConfigError as :func:`check` does.
    """
    check(config, settings)
    needs = slurm_needs(config, settings)
    parts = {"header": _header(config, needs, settings), "settings": _settings(config, words, needs, settings)}
    text = template()
    for name, lines in parts.items():
        text = _with_part(text, name, lines)
    return text


def _with_part(text: str, name: str, lines: Iterator[str]) -> str:
    """The template with other lines between the marks of a part."""
    first, last = f"# >>> {name}\n", f"# <<< {name}\n"
    before, _, rest = text.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise AssertionError(f"{TEMPLATE} has no part called {name}")
    return before + first + "".join(f"{line}\n" for line in lines) + last + after


def template() -> str:
    """``launch/slurm/job.sbatch``: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "launch" / TEMPLATE
    return (shipped if shipped.is_file() else package.parent / "launch" / TEMPLATE).read_text()


def check(config: RunConfig, settings: SlurmSettings, *, step_s: float | None = None) -> list[str]:
    """Warnings about a job that can run but may lose work. ``step_s``: seconds of a step and its checkpoint, where a plan knows them.

    Raises ConfigError for settings that cannot work, a job that does not hold the run, and as :func:`~rlpost.jobs.needs.job_needs` does.
    """
    check_settings(settings, config)
    needs = slurm_needs(config, settings)
    most = max(_node_cpus(index, needs, settings) for index in range(len(needs.groups)))
    if not settings.exclusive and most > MOST_SHARED_CPUS:
        raise ConfigError(
            f"exclusive=false with {most} CPUs of a node, but on a shared node Ray has ports for {MOST_SHARED_CPUS}; "
            f"set exclusive=true, or cpus_per_node={MOST_SHARED_CPUS} or less"
        )
    return list(_warnings(config, needs, settings, step_s))


def _warnings(config: RunConfig, needs: JobNeeds, settings: SlurmSettings, step_s: float | None) -> Iterator[str]:
    wanted = needs.groups[0].bundle_cpus + needs.head_cpus
    if settings.cpus_per_node is not None and settings.cpus_per_node < wanted:
        yield (
            f"cpus_per_node={settings.cpus_per_node}, but the first node's parts need {needs.groups[0].bundle_cpus} CPUs, the driver and "
            f"its reward workers {needs.head_cpus}: they share cores; raise cpus_per_node to {wanted}"
        )
    if settings.export and "PATH" not in settings.export and not settings.setup and settings.container is None:
        yield (
            f"export=[{','.join(settings.export)}] gives the job these variables and a login's alone: an environment that is activated "
            "in this shell is not found there; set setup=[source .../bin/activate], or add PATH to export"
        )
    if settings.signal_s:
        time_left = settings.signal_s - SIGNAL_RESERVE_S
        if time_left < (step_s or 1.0):
            need = "a step and its checkpoint" if step_s is None else f"a step and its checkpoint, which take {step_s:.0f} s"
            least = f"more than {SIGNAL_RESERVE_S} by as much" if step_s is None else f"{int(step_s) + SIGNAL_RESERVE_S + 1} or more"
            yield (
                f"signal_s={settings.signal_s} leaves {max(time_left, 0)} s before the time limit for {need}; set signal_s to {least}, "
                "or the job resumes from an older checkpoint"
            )
    elif settings.requeue:
        yield "signal_s=0: at its time limit the job ends without saving, and is not started again"
    if settings.requeue and config.checkpoint.every == 0:
        yield (
            "checkpoint.every=0: a job that loses a node, or is pre-empted without its signal, begins again from the start; "
            "set checkpoint.every"
        )


def slurm_needs(config: RunConfig, settings: SlurmSettings) -> JobNeeds:
    """Groups of nodes; those of rollout engines may be of another kind. Raises ConfigError as job_needs does, and for settings of
    rollout nodes where the run has none."""
    needs = job_needs(
        config,
        gpus_per_node=settings.gpus_per_node or 0,
        cpus_per_node=settings.cpus_per_node,
        memory_gib_per_node=settings.memory_gib or None,
        separate_roles=settings.separate_roles,
        rollout_gpus_per_node=settings.rollout_gpus_per_node,
        nodes=settings.nodes,
    )
    given = [name for name in ROLLOUT_SETTINGS if getattr(settings, name) is not None]
    if given and all(group.role != ROLLOUT_GROUP for group in needs.groups):
        raise ConfigError(f"{', '.join(given)} given, but the run has no rollout engines; leave it out")
    return needs


def _node_gpus(group: NodeGroup, settings: SlurmSettings) -> int:
    """GPUs to ask of each node: all of whole nodes, else those that are needed."""
    return group.node_gpus if settings.exclusive else group.gpus


def _node_cpus(index: int, needs: JobNeeds, settings: SlurmSettings) -> int:
    """CPUs to ask of each node; the driver runs on a node of the first group."""
    if settings.cpus_per_node is not None:
        return settings.cpus_per_node
    return needs.groups[index].cpus + (needs.head_cpus if index == 0 else 0)


def job_name(config: RunConfig, settings: SlurmSettings) -> str:
    """Slurm's name for the job, without what Slurm would read as something else."""
    return settings.job_name or re.sub(r"[^A-Za-z0-9._-]+", "-", config.name)


def _header(config: RunConfig, needs: JobNeeds, settings: SlurmSettings) -> Iterator[str]:
    """The ``#SBATCH`` lines. What stands only in the first component of a heterogeneous job, Slurm takes for the others too."""
    yield f"#SBATCH --job-name={job_name(config, settings)}"
    for index, group in enumerate(needs.groups):
        if index:
            yield "#SBATCH hetjob"
        rollout = group.role == ROLLOUT_GROUP
        named = {
            "partition": (settings.rollout_partition if rollout else None) or settings.partition,
            "constraint": (settings.rollout_constraint if rollout else None) or settings.constraint,
            "account": None if index else settings.account,
            "qos": None if index else settings.qos,
            "nodes": group.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": _node_cpus(index, needs, settings),
            "gpus-per-node": _node_gpus(group, settings) or None,
            "mem": None if settings.memory_gib is None else f"{settings.memory_gib}G" if settings.memory_gib else "0",
        }
        yield from (f"#SBATCH --{name}={value}" for name, value in named.items() if value is not None)
        if settings.exclusive:
            yield "#SBATCH --exclusive"
        if index == 0:
            yield from _job_lines(settings)


def _job_lines(settings: SlurmSettings) -> Iterator[str]:
    yield f"#SBATCH --time={settings.time_limit}"
    if settings.signal_s:
        yield f"#SBATCH --signal=B:TERM@{settings.signal_s}"
    yield f"#SBATCH --{'requeue' if settings.requeue else 'no-requeue'}"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --chdir={settings.directory}"
    yield f"#SBATCH --output={settings.logs}/%x-%j.log"
    yield f"#SBATCH --export={','.join(settings.export) or 'ALL'}"
    yield from (f"#SBATCH {line}" for line in settings.extra)


def _settings(config: RunConfig, words: Sequence[str], needs: JobNeeds, settings: SlurmSettings) -> Iterator[str]:
    """Variables of the script, and the lines that prepare its shell."""
    groups = range(len(needs.groups))
    if settings.setup:
        yield _SETUP_TRAP
        yield from settings.setup
        yield "trap - ERR"
    common = [*job_words(words), *overrides_in_job(config, needs.device)]
    yield _array("COMMAND", _quoted("python", "-m", "rlpost.train", *common), *_run_directory(config, settings))
    doctor = _quoted("python", "-m", "rlpost.doctor", "cluster", *common, f"output_dir={_output_directory(config, settings)}")
    yield _array("PREFLIGHT", *([doctor] if settings.preflight else []))
    yield f"LOGS={shlex.quote(settings.logs)}"
    yield _array("GROUP_ROLES", *(group.role for group in needs.groups)) + " # one entry a component of a heterogeneous job"
    yield _array("GROUP_NODES", *(str(group.nodes) for group in needs.groups))
    yield _array("GROUP_CPUS", *(str(_node_cpus(index, needs, settings)) for index in groups))
    yield _array("GROUP_GPUS", *(str(_node_gpus(group, settings)) for group in needs.groups))
    yield f"SHARED_NODES={int(not settings.exclusive)}"
    yield f"INTERFACE={settings.interface or ''}"
    yield f"JOIN_TIMEOUT_S={settings.join_timeout_s}"
    yield f"MAX_REQUEUES={settings.max_requeues}"
    pyxis, inside = _container(config, needs, settings)
    yield _array("CONTAINER", _quoted(*pyxis)) + " # options of srun (Pyxis)"
    yield _array("INSIDE", _quoted(*inside)) + " # a command that runs another in a container (Apptainer)"


_SETUP_TRAP = """trap '((${#BASH_SOURCE[@]} > 1)) || { echo "a line of setup failed: $BASH_COMMAND"; exit 1; }' ERR"""
"""Not in the files that a line reads, which may go on after a command that fails."""


def job_words(words: Sequence[str]) -> list[str]:
    """The words, with the configuration's file by its absolute path, or by its name when it comes with rlpost."""
    name, overrides = split_arguments(words)
    source = _source(name)
    return [f"{CONFIG_KEY}={source.stem if _is_shipped(source) else source}", *(f"{key}={text}" for key, text in overrides)]


def _is_shipped(source: Path) -> bool:
    return source.parent == config_directories()[-1]


def _source(name: str) -> Path:
    """The configuration's file, by the links by which it was named: the nodes may not know what they lead to."""
    found, given = find_config(name), Path(os.path.abspath(Path(name).expanduser()))
    return given if given.resolve() == found else found


def path_warnings(config: RunConfig, words: Sequence[str], settings: SlurmSettings) -> Iterator[str]:
    """What the run names in the file system and would not find in the job: by a relative path, or in the container."""
    here = Path.cwd()
    source = _source(split_arguments(words)[0])
    named = paths_of(config, here)
    if named.inside and Path(settings.directory).resolve() != here:
        yield (
            f"{_pairs(named.inside)} was checked in {here}, and the job looks for it in {settings.directory}; "
            "start launch there, or give absolute paths"
        )
    own = {} if _is_shipped(source) else {CONFIG_KEY: str(source)}
    inside = [[part for part in mount.split(":") if part.startswith("/")][-1] for mount in _mounts(config, settings)]
    hidden = {key: path for key, path in {**own, **named.absolute}.items() if not _is_below(path, inside)}
    if settings.container is not None and hidden:
        yield f"{_pairs(hidden)} is not in the container; add it to container_mounts"


def _is_below(path: str, directories: Sequence[str]) -> bool:
    return any(Path(path).expanduser().is_relative_to(one) for one in directories)


def _pairs(paths: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={path}" for key, path in paths.items())


def _array(name: str, *texts: str) -> str:
    return f"{name}=({' '.join(text for text in texts if text)})"


def _quoted(*words: str) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _output_directory(config: RunConfig, settings: SlurmSettings) -> str:
    """Where runs are made; relative paths begin in the working directory."""
    return str(PurePosixPath(settings.directory, config.output_dir))


def _run_directory(config: RunConfig, settings: SlurmSettings) -> Iterator[str]:
    """The job's own run directory, the same after each requeue, where the user gave none."""
    if config.run_dir is None and config.resume in ("never", "auto"):
        yield shlex.quote(f"run_dir={_output_directory(config, settings)}/{config.name}-") + '"$SLURM_JOB_ID"'


def _container(config: RunConfig, needs: JobNeeds, settings: SlurmSettings) -> tuple[list[str], list[str]]:
    """Options of srun, and the command around the program on a node."""
    if settings.container is None:
        return [], []
    mounts = ",".join(_mounts(config, settings))
    if settings.container_runtime == "pyxis":
        directory = f"--container-workdir={settings.directory}"
        return [f"--container-image={settings.container}", f"--container-mounts={mounts}", directory], []
    gpus = ["--nv"] if needs.device == "gpu" else []
    return [], ["apptainer", "exec", *gpus, "--bind", mounts, "--pwd", settings.directory, settings.container]


def _mounts(config: RunConfig, settings: SlurmSettings) -> list[str]:
    """HOST:CONTAINER paths: the directories that the job writes to, then the user's."""
    places = [settings.directory, settings.logs, config.run_dir and str(PurePosixPath(config.run_dir).parent)]
    places.append(_output_directory(config, settings))
    own = [place for place in dict.fromkeys(places) if place]
    covered = [place for place in own if not any(place != other and PurePosixPath(place).is_relative_to(other) for other in own)]
    return [*(f"{place}:{place}" for place in covered), *settings.container_mounts]
