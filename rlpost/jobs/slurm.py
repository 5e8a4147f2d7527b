"""An sbatch script that starts Ray on every node of the allocation and rlpost.train on the first: ``launch/slurm/job.sbatch``, filled in.

That file says what the script does, and can be used by hand. Two parts of it are written here: its ``#SBATCH`` lines (``header``) and the
variables that the rest reads (``settings``). Everything of the user's is quoted for the shell, so a word arrives as it was given.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from rlpost.config.derive import Bundle
from rlpost.config.schema import RunConfig
from rlpost.jobs.needs import ROLLOUT_GROUP, JobNeeds, NodeGroup, job_needs, overrides_in_job
from rlpost.jobs.slurm_settings import SlurmSettings, check_settings
from rlpost.types import ConfigError

TEMPLATE = "slurm/job.sbatch"

SIGNAL_RESERVE_S = 60
"""The script ends 45 s before the limit, to end Ray and to requeue. (The signal comes up to a minute earlier than asked for, not later.)"""

_ROUNDING = 1e-6


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
    if settings.nodes is not None:
        _check_nodes(needs.groups[0], settings.nodes, settings)
    return list(_warnings(config, settings, step_s))


def _warnings(config: RunConfig, settings: SlurmSettings, step_s: float | None) -> Iterator[str]:
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
    """Groups of nodes; those of rollout engines may be of another kind. Raises ConfigError."""
    gpus = settings.gpus_per_node or 0
    common = {"cpus_per_node": settings.cpus_per_node, "memory_gib_per_node": settings.memory_gib or None}
    needs = job_needs(config, gpus_per_node=gpus, separate_roles=settings.separate_roles, **common)
    other = settings.rollout_gpus_per_node
    if other is None:
        return needs
    rollout = job_needs(config, gpus_per_node=other, separate_roles=True, **common)
    groups = [
        next(one for one in (rollout if group.role == ROLLOUT_GROUP else needs).groups if one.role == group.role) for group in needs.groups
    ]
    return JobNeeds(groups=tuple(groups), head_cpus=needs.head_cpus, device=needs.device)


def _node_gpus(group: NodeGroup, settings: SlurmSettings) -> int:
    """GPUs to ask of each node: all of whole nodes, else those that are needed."""
    if not settings.exclusive or group.gpus == 0:
        return group.gpus
    rollout = group.role == ROLLOUT_GROUP and settings.rollout_gpus_per_node is not None
    return (settings.rollout_gpus_per_node if rollout else settings.gpus_per_node) or 0


def _node_cpus(index: int, needs: JobNeeds, settings: SlurmSettings) -> int:
    """CPUs to ask of each node; the driver runs on a node of the first group."""
    if settings.cpus_per_node is not None:
        return settings.cpus_per_node
    return needs.groups[index].cpus + (needs.head_cpus if index == 0 else 0)


def _check_nodes(group: NodeGroup, nodes: int, settings: SlurmSettings) -> None:
    """Raise ConfigError when ``nodes`` nodes do not hold the run; it names the first bundle, largest first, that finds no place."""
    gpus = _node_gpus(group, settings)
    free = [{"GPU": float(gpus), "CPU": float(group.cpus)} for _ in range(nodes)]
    for bundle in sorted(group.bundles, key=lambda one: [-one.resources.get(name, 0.0) for name in ("GPU", "CPU")]):
        place = next((node for node in free if all(node.get(n, 0.0) + _ROUNDING >= a for n, a in bundle.resources.items())), None)
        if place is None:
            raise ConfigError(
                f"nodes={nodes} with {gpus} GPUs and {group.cpus} CPUs each do not hold the run: {_named(bundle)} finds no place beside "
                f"the others; set nodes={group.nodes}, or lower training.ranks or engine.count"
            )
        for name, amount in bundle.resources.items():
            place[name] -= amount


def _named(bundle: Bundle) -> str:
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.resources.items(), reverse=True) if amount)
    return f"{bundle.role} {bundle.index} ({amounts})"


def _node_count(group: NodeGroup, settings: SlurmSettings) -> int:
    return group.nodes if settings.nodes is None else settings.nodes


def _job_name(config: RunConfig, settings: SlurmSettings) -> str:
    return settings.job_name or re.sub(r"[^A-Za-z0-9._-]+", "-", config.name)


def _header(config: RunConfig, needs: JobNeeds, settings: SlurmSettings) -> Iterator[str]:
    """The ``#SBATCH`` lines. What stands only in the first component of a heterogeneous job, Slurm takes for the others too."""
    yield f"#SBATCH --job-name={_job_name(config, settings)}"
    for index, group in enumerate(needs.groups):
        if index:
            yield "#SBATCH hetjob"
        rollout = group.role == ROLLOUT_GROUP
        named = {
            "partition": (settings.rollout_partition if rollout else None) or settings.partition,
            "constraint": (settings.rollout_constraint if rollout else None) or settings.constraint,
            "account": None if index else settings.account,
            "qos": None if index else settings.qos,
            "nodes": _node_count(group, settings),
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
    if settings.export:
        yield f"#SBATCH --export={','.join(settings.export)}"
    yield from (f"#SBATCH {line}" for line in settings.extra)


def _settings(config: RunConfig, words: Sequence[str], needs: JobNeeds, settings: SlurmSettings) -> Iterator[str]:
    """Variables of the script, and the lines that prepare its shell."""
    groups = range(len(needs.groups))
    yield from settings.setup
    common = [*words, *overrides_in_job(config, needs.device)]
    yield _array("COMMAND", _quoted("python", "-m", "rlpost.train", *common), *_run_directory(config, settings))
    doctor = _quoted("python", "-m", "rlpost.doctor", "cluster", *common, f"output_dir={_output_directory(config, settings)}")
    yield _array("PREFLIGHT", *([doctor] if settings.preflight else []))
    yield f"LOGS={shlex.quote(settings.logs)}"
    yield _array("GROUP_ROLES", *(group.role for group in needs.groups)) + " # one entry a component of a heterogeneous job"
    yield _array("GROUP_NODES", *(str(_node_count(group, settings)) for group in needs.groups))
    yield _array("GROUP_CPUS", *(str(_node_cpus(index, needs, settings)) for index in groups))
    yield _array("GROUP_GPUS", *(str(_node_gpus(group, settings)) for group in needs.groups))
    yield f"SHARED_NODES={int(not settings.exclusive)}"
    yield f"INTERFACE={settings.interface or ''}"
    yield f"JOIN_TIMEOUT_S={settings.join_timeout_s}"
    yield f"MAX_REQUEUES={settings.max_requeues}"
    pyxis, inside = _container(config, needs, settings)
    yield _array("CONTAINER", _quoted(*pyxis)) + " # options of srun (Pyxis)"
    yield _array("INSIDE", _quoted(*inside)) + " # a command that runs another in a container (Apptainer)"


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
    """Options of srun, and the command around the program on a node. Directories that the job writes to are mounted."""
    if settings.container is None:
        return [], []
    places = [settings.directory, settings.logs, config.run_dir and str(PurePosixPath(config.run_dir).parent)]
    places.append(_output_directory(config, settings))
    own = [place for place in dict.fromkeys(places) if place]
    covered = [place for place in own if not any(place != other and PurePosixPath(place).is_relative_to(other) for other in own)]
    mounts = ",".join([*(f"{place}:{place}" for place in covered), *settings.container_mounts])
    if settings.container_runtime == "pyxis":
        directory = f"--container-workdir={settings.directory}"
        return [f"--container-image={settings.container}", f"--container-mounts={mounts}", directory], []
    gpus = ["--nv"] if needs.device == "gpu" else []
    return [], ["apptainer", "exec", *gpus, "--bind", mounts, "--pwd", settings.directory, settings.container]
