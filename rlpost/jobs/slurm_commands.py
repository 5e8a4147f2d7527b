"""What ``python -m rlpost.launch slurm`` does with Slurm's own programs: submit a job, say how it is, follow its log, stop it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlpost.config.schema import RunConfig
from rlpost.jobs.needs import JobNeeds
from rlpost.jobs.slurm import check, job_name, path_warnings, render, slurm_needs
from rlpost.jobs.slurm_settings import SlurmSettings
from rlpost.types import ConfigError

COMMAND_TIMEOUT_S = 120
"""A busy controller answers late, but it answers."""

LOOK_S = 0.5
"""Between two looks at a log."""
ASK_S = 5.0
"""Between two questions to the controller, which all users share."""
COMPLETING_S = 60.0
"""Slurm has ended a job by then, unless a node does not answer."""

ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
)
"""States in which a job stays; one that is requeued is COMPLETING until it is PENDING again."""

REASONS = {
    "Resources": "it waits for nodes or GPUs that other jobs use",
    "Priority": "other jobs come first",
    "BeginTime": "it may not start before {StartTime}; Slurm holds a requeued job back for two minutes",
    "Dependency": "it waits for another job",
    "JobHeldUser": "it is held: scontrol release {JobId}",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "partition {Partition} starts no jobs now",
    "PartitionInactive": "partition {Partition} starts no jobs now",
    "PartitionNodeLimit": "partition {Partition} never gives {NumNodes} nodes to one job: stop it, and set nodes or partition",
    "PartitionTimeLimit": "partition {Partition} never runs a job for {TimeLimit}: stop it, and set time_limit or partition",
    "PartitionConfig": "partition {Partition} does not hold such a job: stop it, and set nodes, time_limit or partition",
    "BadConstraints": "no nodes are as asked for: stop it, and change nodes, constraint, gpus_per_node, cpus_per_node or memory_gib",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "nodes that it needs are down",
    "Reservation": "it waits for its reservation",
    "Licenses": "it waits for licences",
    "AssociationJobLimit": "the account runs as many jobs as it may",
    "AssocGrpGRES": "the account uses as many GPUs as it may",
    "QOSMaxJobsPerUserLimit": "you run as many jobs as this quality of service allows",
    "launch_failed_requeued_held": "its nodes could not start it; when they are mended: scontrol release {JobId}",
}
"""Slurm's words (squeue's manual, JOB REASON CODES), for a user. Names in braces are scontrol's."""


def files(config: RunConfig, words: Sequence[str], settings: SlurmSettings) -> dict[str, str]:
    """The script for sbatch. Raises ConfigError as :func:`~rlpost.jobs.slurm.check` does."""
    return {"job.sbatch": render(config, words, settings)}


def warnings(config: RunConfig, words: Sequence[str], settings: SlurmSettings, step_s: float | None) -> list[str]:
    """See :func:`~rlpost.jobs.slurm.check` and :func:`~rlpost.jobs.slurm.path_warnings`."""
    return [*check(config, settings, step_s=step_s), *path_warnings(config, words, settings)]


def needs(config: RunConfig, settings: SlurmSettings) -> JobNeeds:
    """The nodes of the job. Raises ConfigError as :func:`~rlpost.jobs.slurm.slurm_needs` does."""
    return slurm_needs(config, settings)


def ask(paths: Sequence[Path], settings: SlurmSettings) -> str | None:
    """When Slurm would start the job, as it says itself; None without an sbatch. Raises ConfigError when it never would."""
    (path,) = paths
    if shutil.which("sbatch") is None:
        return None
    reached = _run("scontrol", "ping")
    if reached.returncode:
        return f"no Slurm is reached from here, so none was asked about the job: {_said(reached)}"
    done = _run("sbatch", "--test-only", str(path))
    if done.returncode:
        raise ConfigError(f"Slurm refuses the job: {_said(done)}; change nodes, cpus_per_node, gpus_per_node, memory_gib or partition")
    return _said(done)


def submit(paths: Sequence[Path], config: RunConfig, settings: SlurmSettings, say: Callable[[str], None]) -> str:
    """Give the script to sbatch; the job's id. Raises ConfigError when there is no sbatch, with what it said, and for a variable of
    ``export`` that this shell does not have."""
    if missing := [name for name in settings.export if name not in os.environ]:
        raise ConfigError(f"export has {', '.join(missing)}, which is not set in this shell; set it, or leave it out")
    try:
        Path(settings.logs).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the directory for the logs, {settings.logs}, cannot be made: {error.strerror}; set working_directory or "
            "log_directory to a directory that all nodes see and that you may write to"
        ) from error
    (path,) = paths
    job = _call("sbatch", "--parsable", str(path)).strip().split(";")[0]
    say(f"its log: {settings.logs}/{job_name(config, settings)}-{job}.log")
    for what, option in (("how it is", "--status"), ("follow its log", "--logs"), ("save and stop", "--stop")):
        say(f"{what}: python -m rlpost.launch slurm {option} {job}")
    return job


def status(job: str, settings: SlurmSettings) -> str:
    """A line for each component of the job: its state, its nodes or why it waits, how often it was restarted; then where its log is."""
    components = _job(job)
    return "\n".join([*(_described(one) for one in components), f"log: {components[0].get('StdOut', 'none')}"])


def logs(job: str, settings: SlurmSettings, follow: bool) -> int:
    """Print the job's log; ``follow``: on until the job has ended, over requeues too. The job's exit code, 0 while it has none.

    Raises ConfigError for a job without a log, and one that has ended without a log that is seen from here.
    """
    known = _job(job)[0]
    if "StdOut" not in known:
        raise ConfigError(f"{_described(known)}; it has no log, as sbatch did not submit it (salloc, srun); give the id of another job")
    path, place, asked = Path(known["StdOut"]), 0, time.monotonic()
    while True:
        ended = known["JobState"] in ENDED
        place = _print_from(path, place)
        if ended and not path.exists():
            raise ConfigError(
                f"{_described(known)}; its log, {path}, is not here: it has not started, or only its nodes see that directory"
            )
        if ended or not follow:
            return _exit_code(known["ExitCode"]) if ended else 0
        time.sleep(LOOK_S)
        if time.monotonic() - asked > ASK_S:
            known, asked = _job(job)[0], time.monotonic()


def stop(job: str, settings: SlurmSettings) -> str:
    """A job that runs saves, ends with 75 and is not requeued; one that waits is cancelled. What happens, as text."""
    components, deadline = _job(job), time.monotonic() + COMPLETING_S
    # It has ended, or is about to wait for its next start, which a signal would not prevent.
    while components[0]["JobState"] == "COMPLETING" and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        components = _job(job)
    first = components[0]
    if first["JobState"] in ENDED:
        return f"job {job} has ended already: {_described(first)}"
    if first["JobState"] == "PENDING":
        _call("scancel", job)
        return f"job {job} waited, and is cancelled; what it has saved before stays"
    for one in components:
        _call("scontrol", "update", f"JobId={one['JobId']}", "Requeue=0")
    _call("scancel", "--batch", "--signal=TERM", job)
    return f"job {job} saves and ends, and is not requeued; `scancel {job}` ends it at once, unsaved"


def _described(component: Mapping[str, str]) -> str:
    """``job 7 (grpo): RUNNING for 0:01:20 of 1-00:00:00 on n[1-4] (restarts: 2)``."""
    state, words = component["JobState"], [f"job {component['JobId']} ({component['JobName']}): {component['JobState']}"]
    if state == "PENDING":
        reason = component["Reason"].split(",")[0].split(":")[0]
        text = REASONS.get(reason)
        nodes = component["NumNodes"].split("-")[0]  # it says 3-3 before it has chosen them
        words.append(f"({component['Reason']})" + (f": {text.format_map({**component, 'NumNodes': nodes})}" if text else ""))
    else:
        words.append(f"for {component['RunTime']} of {component['TimeLimit']} on {component['NodeList']}")
    if state in ENDED:
        words.append(f"with exit code {_exit_code(component['ExitCode'])}")
    if component["Restarts"] != "0":
        words.append(f"(restarts: {component['Restarts']})")
    return " ".join(words)


def _print_from(path: Path, place: int) -> int:
    """Print what stands in the file after byte ``place``; where it ends. A job that has not started has no file."""
    try:
        with path.open("rb") as file:
            file.seek(place)
            text = file.read()
    except FileNotFoundError:
        return place
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return place + len(text)


def _exit_code(pair: str) -> int:
    """Slurm's CODE:SIGNAL as a shell gives it."""
    code, number = (int(part) for part in pair.split(":"))
    return code or (128 + number if number else 0)


def _job(job: str) -> list[dict[str, str]]:
    """What ``scontrol show job`` says of each component (one, but for a heterogeneous job). Raises ConfigError for an unknown job."""
    lines = _call("scontrol", "--oneliner", "show", "job", job).splitlines()
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line.strip()]


def _call(program: str, *arguments: str) -> str:
    """Output of one of Slurm's programs. Raises ConfigError with what it said when it fails, and as :func:`_run` does."""
    done = _run(program, *arguments)
    if done.returncode:
        hint = "; Slurm forgets a job some minutes after its end (sacct may know it)" if "Invalid job id" in _said(done) else ""
        raise ConfigError(f"`{' '.join([program, *arguments])}` failed: {_said(done)}{hint}")
    return done.stdout


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs. Raises ConfigError when it is missing or does not end in time."""
    command = [program, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"no {program} here; this needs Slurm's programs: run it where you submit jobs (a login node), "
            "or write the script with --out DIRECTORY and run sbatch there"
        ) from None
    except subprocess.TimeoutExpired:
        submits = program == "sbatch" and "--test-only" not in arguments
        then = "it may have been submitted; look with squeue --me first" if submits else "try again"
        raise ConfigError(f"{program} has not answered within {COMMAND_TIMEOUT_S} s; is Slurm up? (sinfo); {then}") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """In one line, without the program's name."""
    text = done.stderr.strip() or done.stdout.strip()
    return "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in text.splitlines())
