"""What ``python -m rlpost.launch ray`` does with the job API of a Ray cluster that runs: submit, say how a job is, follow it, stop it.

Ray copies the working directory to every node and starts the driver in the copy on the head. A job's id is new each time; its run
directory goes by its name, so a job of the same name resumes what an earlier one has saved.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.config.load import find_config, split_arguments
from rlpost.config.schema import RunConfig
from rlpost.jobs.needs import JobNeeds, job_needs, overrides_in_job
from rlpost.jobs.packaging import Named, Package, config_word, make_package, named_by
from rlpost.jobs.ray_settings import RaySettings, check_settings, job_name, run_directory
from rlpost.types import ConfigError

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

JOB_FILE = "job.json"
RUN_DIRECTORY = "run_directory"
"""Metadata of a job."""

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 10.0, 120.0
RECONNECT_S = 0.5
TALKATIVE = ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
"""Loggers of Ray's client, which tell of each connection and package. Their handlers are others' too (a program's, pytest's)."""
LEAST_RAY = (2, 60)
"""What rlpost needs on the cluster."""

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Read by Ray's supervisor of the job, which has the job's own variables; without it a job is killed 3 s after it was told to stop."""

ENTRYPOINT = """trap stopped=75 TERM; {command}; code=$?; echo "{ended} $code"; exit $code"""
"""A stop signals the shell too: it waits for the driver. Ray keeps no exit code of a job that was stopped, so it stands in the log."""
PREFLIGHT = """{doctor}; code=${{stopped:-$?}}; if [ $code = 0 ]; then {command}; else echo "preflight: no training"; (exit $code); fi"""
"""In the place of ENTRYPOINT's command; a stop reaches the doctor too, and then there is nothing to save."""
ENDED = "rlpost.train ended with exit code"

FAILED = 1
"""Exit code when the driver's own is not known."""

HINTS = {
    "No module named 'rlpost'": "rlpost is not on the cluster: install it in the nodes' environment (or image), name it in packages, or "
    "submit from a checkout of rlpost, which then goes along",
    "exit code 127,": "the job's shell finds no python: start Ray on the nodes with its environment activated",
    "runtime_env setup failed": "Ray could not prepare the job's environment: a package that pip does not find, or no way to an index",
    "exit code 2,": "rlpost.train refused the configuration; its message is above",
}
"""What Ray says of a failed job -> what to do."""


def files(config: RunConfig, words: Sequence[str], settings: RaySettings) -> dict[str, str]:
    """The job as Ray's job API takes it, and what is packaged. Raises ConfigError for what cannot work or would not be on the cluster."""
    check_settings(settings, config)
    package, _ = packaged(config, words, settings)
    package.check_size(settings.max_mib)
    command = _command(config, words, package, settings)
    runtime_env: dict[str, Any] = {
        "working_dir": str(package.directory),
        "excludes": list(package.excludes),
        "env_vars": {STOP_WAIT: str(settings.stop_wait_s)},
    }
    if settings.packages:
        runtime_env["pip"] = settings.packages
    job = {
        "entrypoint": ENTRYPOINT.format(command=command, ended=ENDED),
        "entrypoint_num_cpus": settings.driver_cpus,
        "metadata": {"name": job_name(config, settings), RUN_DIRECTORY: run_directory(config, settings)},
        "runtime_env": runtime_env,
        "export": settings.export,
        "package": {"files": len(package.files), "bytes": package.size, "contents": package.contents()},
    }
    return {JOB_FILE: json.dumps(job, indent=2) + "\n"}


def packaged(config: RunConfig, words: Sequence[str], settings: RaySettings) -> tuple[Package, Named]:
    """What is sent to the cluster, and what the configuration names. Raises ConfigError."""
    directory = Path(settings.working_directory or ".").expanduser().absolute()
    named = named_by(config, _source(words), directory)
    return make_package(directory, named.inside, settings.exclude, [run_directory(config, settings), config.output_dir]), named


def warnings(config: RunConfig, words: Sequence[str], settings: RaySettings, step_s: float | None) -> list[str]:
    """What can run but may lose work, and what only the cluster can tell; ``step_s``: planned seconds of a step with its checkpoint."""
    return list(_warnings(config, words, settings, step_s))


def _warnings(config: RunConfig, words: Sequence[str], settings: RaySettings, step_s: float | None) -> Iterator[str]:
    package, named = packaged(config, words, settings)
    if named.absolute:
        yield "every node must see " + ", ".join(f"{key}={path}" for key, path in named.absolute.items())
    if named.installed:
        modules = ", ".join(f"{module} ({key})" for key, module in named.installed.items())
        yield f"the cluster must have {modules}, which does not lie in the working directory"
    if "rlpost/train.py" not in package.files:
        yield "the working directory is no checkout of rlpost: the job uses the rlpost that is installed on the cluster"
    if step_s is not None and settings.stop_wait_s < step_s:
        yield (
            f"stop_wait_s={settings.stop_wait_s}, but a step and its checkpoint take {step_s:.0f} s: a job that is told to stop may be "
            "killed unsaved; raise stop_wait_s"
        )
    if config.checkpoint.every == 0:
        yield "checkpoint.every=0: a job that loses its driver or the head begins again from the start; set checkpoint.every"


def _source(words: Sequence[str]) -> Path:
    return find_config(split_arguments(words)[0]).resolve()


def needs(config: RunConfig, settings: RaySettings) -> JobNeeds:
    """What the job takes of the cluster."""
    return job_needs(config, gpus_per_node=settings.gpus_per_node or 0)


def _command(config: RunConfig, words: Sequence[str], package: Package, settings: RaySettings) -> str:
    """A line of shell."""
    run = [f"{key}={text}" for key, text in split_arguments(words)[1]]
    place = [f"run_dir={run_directory(config, settings)}"] if config.resume in ("never", "auto") else []
    source = config_word(_source(words), package.directory)
    common = [source, *run, *overrides_in_job(config, needs(config, settings).device), *place]
    train = shlex.join(["python", "-m", "rlpost.train", *common])
    if not settings.preflight or config.placement.wait_for_nodes:  # nodes that come later have no room now
        return train
    output = f"output_dir={os.path.dirname(run_directory(config, settings).rstrip('/'))}"  # where it writes, also with run_dir=
    return PREFLIGHT.format(doctor=shlex.join(["python", "-m", "rlpost.doctor", "cluster", *common, output]), command=train)


def ask(paths: Sequence[Path], settings: RaySettings) -> str:
    """What the cluster says without a job, as a line. Raises ConfigError when a job with the same run directory still runs there."""
    try:
        client = connect(settings)
    except ConfigError as error:
        return f"the cluster was not asked about the job: {error}"
    with _asking(settings):
        _check_alone(client.list_jobs(), _job_of(paths)["metadata"][RUN_DIRECTORY])
    return f"the cluster at {settings.url()} answers, and no job there writes to this run directory"


def submit(paths: Sequence[Path], config: RunConfig, settings: RaySettings, say: Callable[[str], None]) -> str:
    """Send the working directory and start the job; its id. Raises ConfigError when the cluster does not answer or refuses, when a
    job with the same run directory still runs there, and for a variable of ``export`` that this shell does not have."""
    job = _job_of(paths)
    if missing := [name for name in job["export"] if name not in os.environ]:
        raise ConfigError(f"export has {', '.join(missing)}, which is not set in this shell; set it, or leave it out")
    runtime_env = job["runtime_env"]
    runtime_env["env_vars"] |= {name: os.environ[name] for name in job["export"]}
    client = connect(settings, say)
    with _asking(settings):
        _check_alone(client.list_jobs(), job["metadata"][RUN_DIRECTORY])
        say(f"sending {job['package']['files']} files, {job['package']['bytes'] / (1 << 20):.1f} MiB, to {settings.url()}")
        identity = f"{job['metadata']['name']}-{time.strftime('%Y%m%d-%H%M%S')}"
        with _environment({"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1"}):  # excludes say all, and data that the run names may be ignored
            client.submit_job(
                entrypoint=job["entrypoint"], submission_id=identity, runtime_env=runtime_env, metadata=job["metadata"],
                entrypoint_num_cpus=job["entrypoint_num_cpus"],
            )  # fmt: skip
    say(f"run directory: {job['metadata'][RUN_DIRECTORY]}; what an earlier job has saved there is resumed (another job_name= begins anew)")
    for what, option in (("how it is", "--status"), ("follow its log", "--logs"), ("save and stop", "--stop")):
        say(f"{what}: python -m rlpost.launch ray {option} {identity} address={settings.url()}")
    return identity


def _job_of(paths: Sequence[Path]) -> dict[str, Any]:
    (path,) = paths
    job: dict[str, Any] = json.loads(path.read_text())
    return job


def _check_alone(jobs: Sequence[JobDetails], directory: str) -> None:
    """Raise ConfigError when another job writes to the run directory."""
    for job in jobs:
        if not job.status.is_terminal() and (job.metadata or {}).get(RUN_DIRECTORY) == directory:
            raise ConfigError(
                f"job {job.submission_id} is {job.status.value} with the same run directory {directory}; stop it first "
                f"(--stop {job.submission_id}), or give this one a name of its own: job_name=..."
            )


def status(job: str, settings: RaySettings) -> str:
    """Lines about a job: its state and since when, its command, its run directory, and what Ray says of it."""
    with _asking(settings):
        info = connect(settings).get_job_info(job)
    return "\n".join(_described(job, info))


def _described(job: str, info: JobDetails) -> Iterator[str]:
    begin, end = (info.start_time or 0) / 1000, (info.end_time or 0) / 1000
    yield f"job {job}: {info.status.value}, submitted {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(begin))}" + (
        f", ended after {end - begin:.0f} s" if end else f", {time.time() - begin:.0f} s ago"
    )
    yield f"run directory: {(info.metadata or {}).get(RUN_DIRECTORY, 'not known')}"
    yield f"command: {info.entrypoint}"
    yield info.message or ""
    yield from _hints(info)


def logs(job: str, settings: RaySettings, follow: bool) -> int:
    """Print the job's log; ``follow``: on until the job has ended. The driver's exit code, 0 while it runs.

    Raises ConfigError for an unknown job, and when the cluster does not answer any more.
    """
    with _asking(settings):
        client = connect(settings)
        text = asyncio.run(follow_log(client, job)) if follow else client.get_job_logs(job)
        if not follow:
            _print(text)
        info = client.get_job_info(job)
    if not info.status.is_terminal():
        return 0
    told = re.findall(rf"^{ENDED} (\d+)$", text, re.MULTILINE)
    print(f"job {job}: {info.status.value}", file=sys.stderr)
    if info.status.value == "STOPPED" and not told:
        print("it was stopped before it ran, or killed before it had saved (stop_wait_s)", file=sys.stderr)
    for hint in _hints(info):
        print(hint, file=sys.stderr)
    if info.status.value == "SUCCEEDED":
        return 0
    return int(told[-1]) if told else info.driver_exit_code or FAILED


async def follow_log(client: JobSubmissionClient, job: str) -> str:
    """Print the log as it grows, and return it. A connection that breaks (a proxy's time limit) is made again while the job runs."""
    from aiohttp import ClientError

    printed = ""
    while not client.get_job_status(job).is_terminal():
        seen = 0
        with contextlib.suppress(ClientError, OSError, RuntimeError):
            async for text in client.tail_job_logs(job):  # from the beginning
                new = text[max(0, len(printed) - seen) :]
                seen += len(text)
                printed += new
                _print(new)
        await asyncio.sleep(RECONNECT_S)
    text = client.get_job_logs(job)
    _print(text[len(printed) :])
    return text


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def stop(job: str, settings: RaySettings) -> str:
    """The run saves and ends with 75; what happens, as text."""
    with _asking(settings):
        client = connect(settings)
        info = client.get_job_info(job)
        if info.status.is_terminal():
            return f"job {job} has ended already: {info.status.value}"
        client.stop_job(job)
    wait = ((info.runtime_env or {}).get("env_vars") or {}).get(STOP_WAIT, "3")
    return (
        f"job {job} is told to stop: it saves and ends, and is killed after {wait} s; "
        f"submitted again with the same job_name it resumes from {(info.metadata or {}).get(RUN_DIRECTORY, 'its run directory')}"
    )


def _hints(info: JobDetails) -> Iterator[str]:
    if info.status.value == "FAILED":
        yield from [f"hint: {hint}" for said, hint in HINTS.items() if said in (info.message or "")][:1]


def connect(settings: RaySettings, say: Callable[[str], None] | None = None) -> JobSubmissionClient:
    """A client of the cluster's job API, each of whose questions has a deadline; ``say`` is told when its Ray differs from this one.

    Raises ConfigError when there is no dashboard, it wants a token, or its Ray is too old.
    """
    import ray
    from ray.job_submission import JobSubmissionClient

    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)

    class Client(JobSubmissionClient):
        """Ray's own waits for ever."""

        def _do_request(self, method: str, endpoint: str, **given: Any) -> Any:
            return super()._do_request(method, endpoint, **{"timeout": (CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S), **given})

        @property
        def version(self) -> str:
            """Of the cluster's Ray."""
            return self._server_ray_version or ""

    url = settings.url()
    with _asking(settings), _environment({"RAY_API_SERVER_ADDRESS": None, "RAY_ADDRESS": None}):  # they would win over the address
        client = Client(url)
    if tuple(int(part) for part in client.version.split(".")[:2]) < LEAST_RAY:
        raise ConfigError(f"the cluster at {url} runs Ray {client.version}, but rlpost needs {'.'.join(map(str, LEAST_RAY))} or newer")
    if say is not None and client.version != ray.__version__:
        say(f"the cluster runs Ray {client.version}, this machine {ray.__version__}: the job uses the cluster's")
    return client


@contextlib.contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """With other variables, for what Ray reads only from there; None takes one away."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _asking(settings: RaySettings) -> Iterator[None]:
    """Turn what goes wrong with the cluster's dashboard into a ConfigError that says what to do."""
    from ray.exceptions import AuthenticationError
    from requests import RequestException

    url = settings.url()
    try:
        yield
    except AuthenticationError as error:
        raise ConfigError(
            f"the cluster at {url} wants a token, or another one than this machine has: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or "
            f"copy the head's ~/.ray/auth_token here ({str(error).splitlines()[0]})"
        ) from None
    except (ConnectionError, RequestException, KeyError) as error:
        raise ConfigError(
            f"no Ray dashboard answers at {url} ({type(error).__name__}: {str(error)[:200]}); set address=http://HEAD:8265 to the head's, "
            "start the head with --dashboard-host=0.0.0.0, or open a way to it (ssh -L 8265:127.0.0.1:8265 HEAD, kubectl port-forward)"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the cluster at {url} refused: {str(error)[:2000]}") from None
    except OSError as error:
        raise ConfigError(f"the working directory cannot be packed: {error}; make it readable, or leave it out: exclude=[...]") from None
