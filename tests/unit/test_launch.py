"""``python -m rlpost.launch``: what it checks before anything is submitted, what it writes, what it hands over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlpost.launch
from rlpost.config.schema import RunConfig, option
from rlpost.jobs.needs import JobNeeds, job_needs
from rlpost.launch import EXIT_OK, EXIT_USER_ERROR, main
from rlpost.types import ConfigError


@dataclass
class Settings:
    """Of a scheduler that runs nothing."""

    gpus_per_node: int = option(0, "GPUs.")
    elsewhere: list[str] = option([], "Not here.")  # noqa: RUF009
    queue: str | None = option(None, "Queue.")


class Scheduler:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.submitted: list[Path] = []
        self.steps: list[float | None] = []
        self.devices: list[str] = []
        self.asked: list[str] = []

    def files(self, config: RunConfig, words: Sequence[str], settings: Settings) -> dict[str, str]:
        self.devices.append(config.placement.device)
        if settings.queue == "closed":
            raise ConfigError("the queue is closed")
        return {"job.txt": f"{' '.join(words)} in {settings.queue}\n"}

    def needs(self, config: RunConfig, settings: Settings) -> JobNeeds:
        return job_needs(config, gpus_per_node=settings.gpus_per_node)

    def warnings(self, config: RunConfig, words: Sequence[str], settings: Settings, step_s: float | None) -> list[str]:
        self.steps.append(step_s)
        return ["mind the gap"]

    def ask(self, paths: Sequence[Path], settings: Settings) -> str | None:
        self.asked += [path.read_text() for path in paths]
        return "the scheduler would take it"

    def submit(self, paths: Sequence[Path], config: RunConfig, settings: Settings, say: Callable[[str], None]) -> str:
        self.submitted += paths
        say("submitted")
        return "job-7"

    def status(self, job: str, settings: Settings) -> str:
        return f"{job} waits in {settings.queue}"

    def logs(self, job: str, settings: Settings, follow: bool) -> int:
        print(f"logs of {job}, follow {follow}")
        return 75

    def stop(self, job: str, settings: Settings) -> str:
        return f"{job} saves and ends"


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scheduler:
    """Stands in for Slurm; the working directory is empty."""
    fake = Scheduler()
    commands = SimpleNamespace(
        **{name: getattr(fake, name) for name in ("files", "needs", "warnings", "ask", "submit", "status", "logs", "stop")}
    )
    monkeypatch.setitem(sys.modules, "fake_commands", commands)
    monkeypatch.setitem(sys.modules, "fake_settings", SimpleNamespace(Settings=Settings))
    monkeypatch.setitem(rlpost.launch.SCHEDULERS, "slurm", ("a fake job", "fake_commands", "fake_settings:Settings"))
    monkeypatch.chdir(tmp_path)
    return fake


def test_dry_run_prints_the_job_and_leaves_nothing_behind(scheduler: Scheduler, tmp_path: Path, capsys: Any) -> None:
    assert main(["slurm", "config=grpo_tiny", "queue=night", "schedule.steps=3", "--dry-run"]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "config=grpo_tiny schedule.steps=3 in night" in printed and "warning: mind the gap" in printed
    assert printed.rstrip().endswith("the scheduler would take it\ndry run: everything checked, nothing submitted")
    assert scheduler.asked == ["config=grpo_tiny schedule.steps=3 in night\n"], "the scheduler saw what would be submitted"
    assert not scheduler.submitted and not list(tmp_path.iterdir())


def test_job_is_written_and_submitted(scheduler: Scheduler, tmp_path: Path, capsys: Any) -> None:
    assert main(["slurm", "config=grpo_tiny", "queue=night"]) == EXIT_OK
    (path,) = scheduler.submitted
    assert path.parent.parent == Path("runs/jobs") and path.parent.name.startswith("grpo_tiny-")
    assert path.read_text() == "config=grpo_tiny in night\n"
    assert capsys.readouterr().out.rstrip().endswith("job: job-7")


def test_copy_of_a_job_whose_disk_is_not_mounted_here_stays_here(scheduler: Scheduler, tmp_path: Path, capsys: Any) -> None:
    assert main(["slurm", "config=grpo_tiny", "output_dir=/not/mounted"]) == EXIT_OK
    (path,) = scheduler.submitted
    assert path.parent.parent == Path("jobs") and not Path("/not").exists()


def test_out_with_a_dry_run_writes_without_submitting_and_overwrites_nothing(scheduler: Scheduler, tmp_path: Path, capsys: Any) -> None:
    words = ["slurm", "config=grpo_tiny", "--dry-run", "--out", str(tmp_path / "here")]
    assert main(words) == EXIT_OK and main(words) == EXIT_OK, "the same content again is fine"
    file = tmp_path / "here" / "job.txt"
    file.write_text("changed by hand")
    assert main(words) == EXIT_USER_ERROR
    assert file.read_text() == "changed by hand" and "--out" in capsys.readouterr().err
    assert not scheduler.submitted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "config=grpo_tiny", "queue=closed"], "the queue is closed"),
        (["slurm", "config=grpo_tiny", "training.rank=2"], "training.ranks"),
        (["slurm", "config=grpo_tiny", "data.train=./missing.jsonl"], "missing.jsonl"),
        (["slurm", "config=grpo_tiny", "quue=a"], "did you mean queue="),
        (["config=grpo_tiny"], "expected one of slurm, kuberay, ray"),
        (["config=grpo_tiny", "slurm"], "the first word is 'config=grpo_tiny'"),
        (["slurm", "--status", "3", "config=grpo_tiny"], "of no use here"),
        (["slurm", "config=grpo_tiny", "job=missing.yaml"], "missing.yaml"),
        (["slurm", "config=grpo_tiny", "--out", "/dev/null/jobs"], "cannot be written to /dev/null/jobs"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    scheduler: Scheduler, tmp_path: Path, capsys: Any, words: list[str], message: str
) -> None:
    assert main(words) == EXIT_USER_ERROR
    assert message in capsys.readouterr().err
    assert not scheduler.submitted and not list(tmp_path.iterdir())


def test_settings_of_a_cluster_come_from_its_file(scheduler: Scheduler, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "cluster.yaml").write_text("queue: night\n")
    assert main(["slurm", "config=grpo_tiny", "job=cluster.yaml", "--dry-run"]) == EXIT_OK
    assert "in night" in capsys.readouterr().out


def test_questions_about_a_job_go_to_the_scheduler(scheduler: Scheduler, capsys: Any) -> None:
    assert main(["slurm", "--status", "3", "queue=night"]) == EXIT_OK
    assert main(["slurm", "--stop", "3"]) == EXIT_OK
    assert main(["slurm", "--logs", "3", "--follow"]) == 75, "the exit code is the job's"
    assert capsys.readouterr().out.splitlines() == ["3 waits in night", "3 saves and ends", "logs of 3, follow True"]


def test_following_a_new_job_ends_with_its_exit_code(scheduler: Scheduler, capsys: Any) -> None:
    assert main(["slurm", "config=grpo_tiny", "--follow"]) == 75
    assert "logs of job-7, follow True" in capsys.readouterr().out


def test_device_is_that_of_the_nodes_not_of_this_machine(scheduler: Scheduler, capsys: Any) -> None:
    assert main(["slurm", "config=grpo_qwen", "placement.device=auto", "gpus_per_node=8", "--dry-run"]) == EXIT_OK
    assert main(["slurm", "config=grpo_tiny", "placement.device=auto", "gpus_per_node=0", "--dry-run"]) == EXIT_OK
    assert scheduler.devices == ["gpu", "cpu"]


def test_data_on_a_disk_that_only_the_nodes_see_is_warned_of_and_not_refused(scheduler: Scheduler, capsys: Any) -> None:
    words = ["slurm", "config=grpo_tiny", "data.train=/nodes/x.jsonl", "--dry-run"]
    assert main(words) == EXIT_USER_ERROR
    assert main([*words, "elsewhere=[/nodes]"]) == EXIT_OK
    assert "not checked here, only the run sees it: data.train=/nodes/x.jsonl" in capsys.readouterr().out


def test_kind_of_gpu_tells_whether_the_run_fits_and_how_long_a_step_takes(scheduler: Scheduler, capsys: Any) -> None:
    assert main(["slurm", "config=grpo_qwen", "gpus_per_node=8", "gpu=H100-80GB", "--dry-run"]) == EXIT_OK
    assert "plan: fits; a step takes" in capsys.readouterr().out
    assert scheduler.steps[0] is not None and scheduler.steps[0] > 1
    assert main(["slurm", "config=grpo_qwen", "gpus_per_node=8", "gpu=nonsense", "--dry-run"]) == EXIT_USER_ERROR
