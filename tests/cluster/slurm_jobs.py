"""Whole runs as jobs of a test's Slurm: submitted as a user does, watched through what they leave."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from slurm_host import ENDED, Slurm
from training_runs import rollouts, step_records

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 24
RUN = ("config=grpo_tiny", f"schedule.steps={STEPS}", "evaluation.every=0", "data.evaluation=null")
RUN_TIMEOUT_S = 240.0
END_TIMEOUT_S = 20.0
"""Slurm calls a job ended when its own processes have ended; what they started follows."""
POLL_S = 0.1


class Site:
    """A Slurm, a directory that its nodes see, and the settings that a user gives with every job."""

    def __init__(self, slurm: Slurm, directory: Path, *settings: str) -> None:
        directory.mkdir()
        self.slurm, self.directory = slurm, directory
        path = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1"
        self.settings = (*settings, f"working_directory={directory}", f"setup=['{path}']")

    def launch(self, *words: str) -> str:
        """The id of the job that the command submits."""
        script = tempfile.mkdtemp(prefix="script-", dir=self.directory)
        command = [sys.executable, "-m", "rlpost.launch", "slurm", *RUN, *self.settings, *words, f"--out={script}"]
        output = self.slurm.run(*command, environment={"PYTHONPATH": str(REPOSITORY)})
        return output.strip().splitlines()[-1].removeprefix("job: ")

    def log(self, job: str) -> str:
        """What the job has said, over all its starts."""
        path = self.directory / "logs" / f"grpo_tiny-{job}.log"
        return path.read_text() if path.exists() else ""

    def run(self, job: str) -> Path:
        """The job's run directory."""
        return self.directory / "runs" / f"grpo_tiny-{job}"

    def steps(self, job: str) -> int:
        """Steps that the run has reported."""
        with contextlib.suppress(FileNotFoundError):
            return len(step_records(self.run(job)))
        return 0

    def wait_until(self, job: str, happened: Callable[[], bool]) -> None:
        """Until something has happened that the running job does."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not happened():
            assert time.monotonic() < deadline and self.slurm.job(job)["JobState"] not in ENDED, self.log(job)[-4000:]
            time.sleep(POLL_S)

    def finish(self, job: str) -> dict[str, str]:
        """What Slurm says of the job when it has ended."""
        return self.slurm.wait_for(job, timeout_s=RUN_TIMEOUT_S)

    def processes(self, job: str) -> dict[int, str]:
        """What runs of a job, process -> command line."""
        found, own = {}, {f"SLURM_JOB_ID={job}", f"SLURM_CONF={self.slurm.environment['SLURM_CONF']}"}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if own <= {*(path / "environ").read_text(errors="replace").split("\0")}:
                    found[int(path.name)] = (path / "cmdline").read_text(errors="replace").replace("\0", " ")
        return found

    def assert_nothing_left(self, job: str) -> None:
        """All processes end with the job, and Ray's directories are gone."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while left := self.processes(job):
            assert time.monotonic() < deadline, left
            time.sleep(POLL_S)
        assert list(Path("/tmp").glob(f"ray-{job}-*")) == []


def newest_checkpoint(run: Path) -> int:
    """The step that was saved last, completely."""
    return max(int(mark.parent.name.removeprefix("step_")) for mark in run.glob("checkpoints/step_*/COMPLETE"))


def assert_equal_steps(run: Path, reference: Path) -> None:
    """Each step of ``run`` is the reference's: prompts, tokens, loss, gradient, learning rate. Prints how equal (pytest -s)."""
    largest = 0.0
    expected = {record["step"]: record for record in step_records(reference)}
    for record in step_records(run):
        step = record["step"]
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/lr", "reward/mean", "rollout/tokens"):
            difference = abs(record[name] - expected[step][name])
            assert difference <= 1e-6, (step, name)
            largest = max(largest, difference)
        rows = [[(row["prompt_id"], row["tokens"]) for row in rollouts(one, step)] for one in (run, reference)]
        assert rows[0] == rows[1]
    print(f"largest difference to the uninterrupted run: {largest}")
