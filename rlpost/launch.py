"""``python -m rlpost.launch slurm|kuberay|ray config=NAME key=value ...``: the job that holds a run, rendered, checked and submitted.

Exit codes: 0, 1 (something broke, or the job that was followed failed), 2 (the command, the configuration or the scheduler's answer).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rlpost.config.checks import check
from rlpost.config.inputs import out_of_reach
from rlpost.config.load import load_config
from rlpost.config.options import option_help, split_options
from rlpost.config.schema import RunConfig
from rlpost.jobs.needs import JobNeeds
from rlpost.planner.options import PlanOptions
from rlpost.types import ConfigError, RlpostError

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

SCHEDULERS = {
    "slurm": ("a Slurm job", "rlpost.jobs.slurm_commands", "rlpost.jobs.slurm_settings:SlurmSettings"),
    "kuberay": ("a KubeRay job", "rlpost.jobs.kube_commands", "rlpost.jobs.kube_settings:KubeSettings"),
    "ray": ("a Ray job", "rlpost.jobs.ray_commands", "rlpost.jobs.ray_settings:RaySettings"),
}
"""Name on the command line -> what its jobs are called, the module with its commands, the class of its settings."""

FILE_WORD, GPU_WORD = "job", "gpu"

USAGE = """python -m rlpost.launch slurm|kuberay|ray config=NAME [setting=value ...] [key.sub=value ...] [job=FILE]
                                                      [--dry-run] [--out DIR] [--follow]
       python -m rlpost.launch slurm|kuberay|ray (--status | --logs | --stop) JOB [setting=value ...] [--follow]
       python -m rlpost.launch slurm|kuberay|ray --help        lists the scheduler's settings"""

DESCRIPTION = """Makes the job that holds a run from the run's own configuration (ranks, engines, GPUs, placement), checks both, and
hands it to the scheduler that you have. All nodes of the job are granted together or none; a job that was stopped, pre-empted or
lost a node resumes."""

EXAMPLES = """examples:
  python -m rlpost.launch slurm config=grpo_qwen_multinode gpus_per_node=8 partition=gpu --dry-run     print the script, submit nothing
  python -m rlpost.launch slurm config=grpo_qwen_multinode job=my_cluster.yaml schedule.steps=500      settings of your cluster in a file
  python -m rlpost.launch kuberay config=grpo_qwen_multinode gpus_per_node=8 image=IMAGE volume_claim=CLAIM --out manifests
  python -m rlpost.launch ray config=grpo_qwen address=http://HEAD:8265 gpus_per_node=8 output_dir=/shared/runs --follow
  python -m rlpost.launch slurm --stop 1234                                                            save, then end
"""

COMMON = """  job=FILE                YAML file with settings of the job, those below; words on the command line come over it
  gpu=KIND                kind of GPU (H100-80GB ...): says whether the run fits, and how long a step takes (rlpost.plan)"""


class Commands(Protocol):
    """What a scheduler's module offers. ``words`` are those of the run only. ``settings`` is its own class, which has at least
    ``gpus_per_node`` (None: not given) and ``elsewhere``, directories that only the nodes see."""

    def files(self, config: RunConfig, words: Sequence[str], settings: Any) -> dict[str, str]:
        """The job as text, by file name. Raises ConfigError for what cannot work."""

    def needs(self, config: RunConfig, settings: Any) -> JobNeeds:
        """The nodes of the job. Raises ConfigError when none hold the run."""

    def warnings(self, config: RunConfig, words: Sequence[str], settings: Any, step_s: float | None) -> list[str]:
        """What can run but may lose work; ``step_s`` are the planned seconds of a step with its checkpoint."""

    def ask(self, paths: Sequence[Path], settings: Any) -> str | None:
        """What the scheduler itself says to the written files, without a job; None where it cannot be asked. Raises ConfigError."""

    def submit(self, paths: Sequence[Path], config: RunConfig, settings: Any, say: Callable[[str], None]) -> str:
        """Hand the written files over; the job's id. Raises ConfigError with what the scheduler said."""

    def status(self, job: str, settings: Any) -> str:
        """Lines about a job."""

    def logs(self, job: str, settings: Any, follow: bool) -> int:
        """Print what the run printed, with ``follow`` until its end; the job's exit code where it is known, else 0."""

    def stop(self, job: str, settings: Any) -> str:
        """Let the run save and end; what happens now."""


def make_parser(name: str | None) -> argparse.ArgumentParser:
    """The command line; ``name`` is the scheduler whose settings ``--help`` lists."""
    details = ""
    if name is not None:
        details = f"\nsettings of {SCHEDULERS[name][0]}:\n{COMMON}\n{option_help(_settings_class(name))}"
    details += "\n  KEY.SUB                 any setting of the run's configuration (python -m rlpost.train --help)" if name else ""
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.launch", usage=USAGE, description=DESCRIPTION, epilog=EXAMPLES + details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="slurm, kuberay or ray first; then setting=value and key=value, in any order"
    )
    parser.add_argument("--dry-run", action="store_true", help="print (with --out write) the job and submit nothing")
    parser.add_argument(
        "--out", metavar="DIR", help="directory for the job's files (default: OUTPUT_DIR/jobs/NAME-TIME, or jobs/NAME-TIME here)"
    )
    parser.add_argument("--follow", action="store_true", help="print the run's output until its end; the exit code is the run's")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", metavar="JOB", help="where a job stands")
    action.add_argument("--logs", metavar="JOB", help="what its run printed")
    action.add_argument("--stop", metavar="JOB", help="let its run save, and end it")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = next((word for word in given if word in SCHEDULERS), None)
    parsed = make_parser(name).parse_intermixed_args(given)
    try:
        if name is None or parsed.words[:1] != [name]:
            raise ConfigError(f"the first word is {(parsed.words or ['missing'])[0]!r}, expected one of {', '.join(SCHEDULERS)}")
        return command(name, parsed.words[1:], parsed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RlpostError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; a job that was submitted goes on", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def command(name: str, words: Sequence[str], parsed: argparse.Namespace) -> int:
    """Ask about a job, or make one."""
    commands = cast(Commands, importlib.import_module(SCHEDULERS[name][1]))
    own = {key: text for key, _, text in (word.partition("=") for word in words) if key in (FILE_WORD, GPU_WORD)}
    rest = [word for word in words if word.partition("=")[0] not in own]
    file = Path(own[FILE_WORD]).expanduser() if FILE_WORD in own else None
    settings, run_words = split_options(rest, _settings_class(name), SCHEDULERS[name][0], file)
    job = parsed.status or parsed.logs or parsed.stop
    if job is None:
        return launch(commands, settings, run_words, own.get(GPU_WORD), parsed)
    if run_words:
        raise ConfigError(f"{' '.join(run_words)} is of no use here: with --status, --logs and --stop give settings of the job only")
    if parsed.logs:
        return commands.logs(job, settings, parsed.follow)
    print(commands.status(job, settings) if parsed.status else commands.stop(job, settings))
    return EXIT_OK


def launch(commands: Commands, settings: Any, words: Sequence[str], gpu: str | None, parsed: argparse.Namespace) -> int:
    """Check, render, write, submit; a dry run prints instead of submitting."""
    from rlpost.driver.preflight import preflight

    config = _for_nodes(load_config(words).config, settings)
    found = check(config, settings.elsewhere)
    _, more = preflight(config, settings.elsewhere)
    files = commands.files(config, words, settings)
    lines, step_s = plan_lines(config, settings, commands.needs(config, settings), gpu)
    if parsed.dry_run and parsed.out is None:
        for file, text in files.items():
            print(f"---- {file}" if len(files) > 1 else "", text.rstrip(), "", sep="\n")
    for line in [*lines, *(f"warning: {one}" for one in [*found, *more, *commands.warnings(config, words, settings, step_s)])]:
        print(line, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        kept = parsed.out or not parsed.dry_run
        paths = write(files, Path(parsed.out or (directory if parsed.dry_run else _own_directory(config))))
        for path in paths if kept else []:
            print(f"written: {path}", flush=True)
        if parsed.dry_run:
            answer = commands.ask(paths, settings)
            print(*([answer] if answer else []), "dry run: everything checked, nothing submitted", sep="\n")
            return EXIT_OK
    job = commands.submit(paths, config, settings, lambda line: print(line, flush=True))
    print(f"job: {job}", flush=True)
    return commands.logs(job, settings, True) if parsed.follow else EXIT_OK


def plan_lines(config: RunConfig, settings: Any, needs: JobNeeds, gpu: str | None) -> tuple[list[str], float | None]:
    """Whether the run fits its nodes, in a line or two, and the seconds of a step with its checkpoint; nothing without a kind of GPU.

    Raises ConfigError for a kind that is not known.
    """
    if gpu is None or not settings.gpus_per_node:
        return [], None
    from rlpost.planner.plan import make_plan

    if "model.path" in out_of_reach(config, settings.elsewhere):
        return ["plan: none, model.path is not here"], None
    sizes = {group.node_gpus for group in needs.groups}
    if len(sizes) > 1:
        return ["plan: none is made for nodes of two sizes; python -m rlpost.plan takes nodes=, gpus= and gpu= of one"], None
    (per_node,), nodes = sizes, needs.nodes
    plan = make_plan(config, PlanOptions(nodes=nodes, gpus=per_node, gpu=gpu))
    step_s = plan.step.seconds + plan.step.checkpoint_s
    fits = "fits" if plan.fits else "DOES NOT FIT"
    more = f"python -m rlpost.plan with nodes={nodes} gpus={per_node} gpu={gpu} says more"
    return [f"plan: {fits}; a step takes some {plan.step.seconds:.3g} s, a checkpoint {plan.step.checkpoint_s:.3g} s ({more})"], step_s


def write(files: Mapping[str, str], directory: Path) -> list[Path]:
    """The files in ``directory``. Raises ConfigError when one is there already with another content, or cannot be written."""
    paths = [directory / file for file in files]
    try:
        for path, text in zip(paths, files.values(), strict=True):
            if path.exists() and path.read_text() != text:
                raise ConfigError(f"{path} exists already and differs; move it away, or name another directory with --out")
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"the job's files cannot be written to {directory}: {error.strerror}; name another directory with --out"
        ) from error
    return paths


def _own_directory(config: RunConfig) -> Path:
    """Among the runs; here, where the nodes' disk is not mounted."""
    output = Path(config.output_dir)
    place = output if output.absolute().parent.is_dir() else Path()
    return place / "jobs" / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _for_nodes(config: RunConfig, settings: Any) -> RunConfig:
    """With the device that the job's nodes have, whatever this machine has: the job itself sets it so too."""
    if config.placement.device != "auto" or settings.gpus_per_node is None:
        return config
    device = "gpu" if settings.gpus_per_node else "cpu"
    return dataclasses.replace(config, placement=dataclasses.replace(config.placement, device=device))


def _settings_class(name: str) -> type[Any]:
    module, _, attribute = SCHEDULERS[name][2].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


if __name__ == "__main__":
    sys.exit(main())
