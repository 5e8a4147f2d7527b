"""What a Ray job is told besides the run's configuration, and which of it cannot work. ``--help`` prints these words."""
# ruff: noqa: RUF009  option() makes fields.

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rlpost.config.fields import Place, children, clean, joined
from rlpost.config.schema import RunConfig, option
from rlpost.jobs.secrets import is_secret_variable, secret_keys, shows_secret
from rlpost.types import ConfigError

LOCAL_DASHBOARD = "http://127.0.0.1:8265"
"""Where Ray's dashboard listens on the head, unless it is told otherwise."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass
class RaySettings:
    """All optional but gpus_per_node."""

    address: str | None = option(
        None, "URL of the cluster's dashboard, http://HEAD:8265; null is RAY_API_SERVER_ADDRESS, a URL in RAY_ADDRESS, or this machine's."
    )
    gpus_per_node: int | None = option(None, "GPUs that one node of the cluster has; 0 for a run on CPUs.")
    working_directory: str | None = option(
        None, "Directory that is sent to the cluster, where the job starts; null is where this command runs."
    )
    job_name: str | None = option(None, "Name of the job, and of its run directory below output_dir; null is the run's name.")
    exclude: list[str] = option([], "More of the working directory to leave out, in .gitignore's form: *.csv, name/, /path/from/the/top.")
    max_mib: float = option(100.0, "Largest package in MiB, before it is compressed (Ray's own limit is 512, compressed).")
    packages: list[str] = option([], "Packages that pip installs for the job on every node, into an environment over the cluster's own.")
    export: list[str] = option(
        [], "Names of variables of this shell that the job gets. Ray shows their values to all who may see jobs, so secrets are refused."
    )
    driver_cpus: float = option(0.0, "CPUs reserved for the driver: 0 runs it on the head, more on any node that has them free.")
    preflight: bool = option(
        True, "Run `rlpost.doctor cluster` before the training; what it finds failed ends the job. Not with placement.wait_for_nodes."
    )
    elsewhere: list[str] = option([], "Directories that only the nodes see: what the run names below them is not looked for here.")
    stop_wait_s: int = option(600, "Seconds that a job which is told to stop has for its step in progress and a checkpoint.")

    def url(self) -> str:
        """The dashboard's address. Raises ConfigError when it is none of a dashboard."""
        ray_address = os.environ.get("RAY_ADDRESS", "")
        found = self.address or os.environ.get("RAY_API_SERVER_ADDRESS") or (ray_address if "http" in ray_address else LOCAL_DASHBOARD)
        url = found if "://" in found else f"http://{found}"
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise ConfigError(f"address is {found!r}, expected the URL of the cluster's dashboard: set address=http://HEAD:8265")
        return url.rstrip("/")


def job_name(config: RunConfig, settings: RaySettings) -> str:
    """The name of the job and of its run directory."""
    return settings.job_name or re.sub(r"[^A-Za-z0-9._-]+", "-", config.name)


def run_directory(config: RunConfig, settings: RaySettings) -> str:
    """Where the run is, the same for each job of this name, so that the next one resumes it."""
    if config.resume not in ("never", "auto"):
        return config.resume
    return config.run_dir or f"{config.output_dir.rstrip('/')}/{job_name(config, settings)}"


def check_settings(settings: RaySettings, config: RunConfig) -> None:
    """Raise ConfigError with everything that is missing, has a wrong type, cannot work, or would show a secret."""
    problems: list[str] = []
    for child in children(RaySettings):
        clean(getattr(settings, child.key), child, Place(source="ray"), problems)
    if not problems:
        problems += [*_values(settings), *_directories(config), *_secrets(settings, config)]
    if problems:
        raise ConfigError(joined(problems, lambda count: f"{count} problems in the settings of the job:"))


def _values(settings: RaySettings) -> Iterator[str]:
    if settings.gpus_per_node is None:
        yield "gpus_per_node is not given; expected the GPUs that one node has, or 0 for a run on CPUs: set gpus_per_node=..."
    least = {"gpus_per_node": 0, "driver_cpus": 0, "stop_wait_s": 1}
    for name, smallest in least.items():
        value = getattr(settings, name)
        if value is not None and value < smallest:
            yield f"{name} is {value}, expected at least {smallest}; change {name}"
    if settings.max_mib <= 0:
        yield f"max_mib is {settings.max_mib:g}, expected more than 0; change max_mib"
    if settings.job_name is not None and not _NAME.fullmatch(settings.job_name):
        yield f"job_name is {settings.job_name!r}, expected letters, digits, dots, dashes and underscores; rename it"


def _directories(config: RunConfig) -> Iterator[str]:
    """A job starts in a copy of its working directory, on a disk of one node, that Ray deletes."""
    given = {"run_dir": config.run_dir} if config.run_dir is not None else {"output_dir": config.output_dir}
    if config.resume not in ("never", "auto"):
        given = {"resume": config.resume}
    if config.weights.directory is not None and "://" not in config.weights.directory:
        given["weights.directory"] = config.weights.directory
    for name, path in given.items():
        if not path.startswith("/"):
            yield (
                f"{name} is {path!r}, which begins in the job's working directory: a copy on one node, that Ray deletes after the job; "
                f"set {name} to an absolute path on a disk that all nodes see: {name}=/..."
            )


def _secrets(settings: RaySettings, config: RunConfig) -> Iterator[str]:
    """Ray keeps the command and the variables of a job, and its dashboard, command and library show them to whoever may see jobs."""
    for name in settings.export:
        variable, equals, _ = name.partition("=")
        if equals:
            yield f"export has a value for {variable}; give the name alone, the value is taken from this shell: export=[{variable}]"
        elif not _VARIABLE.fullmatch(name):
            yield f"export has {name!r}, expected the name of a variable; change it"
        elif is_secret_variable(name):
            yield (
                f"export has {name}, which reads like a secret, and Ray shows the values of a job's variables; set it in the environment "
                f"of `ray start` on every node (in a pod: from a Secret), where all processes of the node find it, and leave {name} out"
            )
    for package in settings.packages:
        if shows_secret(package):
            yield (
                "packages has a URL with a password or token, which Ray shows with the job; let pip on the nodes find it (~/.netrc, "
                "PIP_INDEX_URL in the environment of `ray start`), and leave it out of the URL"
            )
    for key in secret_keys(asdict(config)):
        yield (
            f"the run's {key} reads like a secret, and goes along with the job; let the code read an environment variable that is set "
            "on the nodes before `ray start`"
        )
