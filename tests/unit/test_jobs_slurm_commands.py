"""Submit, status, logs and stop, with stand-ins for Slurm's programs; tests/cluster has the real ones."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rlpost.config.load import load_config
from rlpost.jobs import slurm_commands
from rlpost.jobs.slurm_settings import SlurmSettings
from rlpost.types import ConfigError

# As scontrol prints them, with less on the line.
LINE = (
    "JobId={job} JobName=grpo JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} ExitCode={code} "
    "RunTime=00:01:20 TimeLimit=1-00:00:00 StartTime=2026-12-01T04:00:00 Partition=gpu NodeList={nodes} NumNodes=4-4 StdOut={log}"
)


class Slurm:
    """The programs, in a directory on PATH; ``state`` is what scontrol answers."""

    def __init__(self, place: Path) -> None:
        self.place, self.log = place, place / "logs" / "grpo-7.log"
        self.log.parent.mkdir()
        self.program("scontrol", 'if [[ $* == *"show job"* ]]; then cat "$PLACE/state"; else echo "scontrol $*" >>"$PLACE/calls"; fi')
        self.program("scancel", 'echo "scancel $*" >>"$PLACE/calls"')
        self.state("RUNNING")

    def program(self, name: str, body: str) -> None:
        path = self.place / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def state(self, state: str, *, jobs: tuple[int, ...] = (7,), reason: str = "None", restarts: int = 0, code: str = "0:0") -> None:
        nodes = "(null)" if state == "PENDING" else "n[1-4]"
        values = {"state": state, "reason": reason, "restarts": restarts, "code": code, "nodes": nodes, "log": self.log}
        (self.place / "new").write_text("".join(LINE.format(job=job, **values) + "\n" for job in jobs))
        (self.place / "new").rename(self.place / "state")

    @property
    def calls(self) -> list[str]:
        path = self.place / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.setattr(slurm_commands, "LOOK_S", 0.01)
    monkeypatch.setattr(slurm_commands, "ASK_S", 0.05)
    return Slurm(tmp_path)


@pytest.mark.parametrize(
    ("state", "values", "said"),
    [
        ("RUNNING", {}, "job 7 (grpo): RUNNING for 00:01:20 of 1-00:00:00 on n[1-4]\n"),
        ("RUNNING", {"restarts": 2}, "on n[1-4] (restarts: 2)\n"),
        ("PENDING", {"reason": "Resources"}, "job 7 (grpo): PENDING (Resources): it waits for nodes or GPUs that other jobs use\n"),
        ("PENDING", {"reason": "BeginTime", "restarts": 1}, "it may not start before 2026-12-01T04:00:00; Slurm holds a requeued job"),
        ("PENDING", {"reason": "PartitionNodeLimit"}, "partition gpu never gives 4 nodes to one job: stop it, and set nodes or partition"),
        ("PENDING", {"reason": "ReqNodeNotAvail,_UnavailableNodes:n3"}, "UnavailableNodes:n3): nodes that it needs are down"),
        ("PENDING", {"reason": "SomethingNew"}, "job 7 (grpo): PENDING (SomethingNew)\n"),
        ("FAILED", {"code": "75:0"}, "FAILED for 00:01:20 of 1-00:00:00 on n[1-4] with exit code 75\n"),
        ("CANCELLED", {"code": "0:9"}, "with exit code 137\n"),
        ("REVOKED", {}, "with exit code 0\n"),
    ],
)  # fmt: skip
def test_status_says_how_a_job_is_and_why_it_waits(slurm: Slurm, state: str, values: dict[str, object], said: str) -> None:
    slurm.state(state, **values)  # type: ignore[arg-type]
    text = slurm_commands.status("7", SlurmSettings())
    assert said in text and text.endswith(f"log: {slurm.log}")


def test_status_shows_every_component_of_a_heterogeneous_job(slurm: Slurm) -> None:
    slurm.state("RUNNING", jobs=(7, 8))
    assert [line.split(" (")[0] for line in slurm_commands.status("7", SlurmSettings()).splitlines()[:-1]] == ["job 7", "job 8"]


def test_a_log_is_followed_over_a_requeue_to_the_end(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.state("PENDING", reason="Resources")
    codes: list[int] = []
    reader = threading.Thread(target=lambda: codes.append(slurm_commands.logs("7", SlurmSettings(), True)))
    reader.start()
    for state, line in (("RUNNING", "one\n"), ("COMPLETING", "saved\n"), ("PENDING", ""), ("RUNNING", "two\n"), ("FAILED", "end\n")):
        with slurm.log.open("a") as log:
            log.write(line)
        slurm.state(state, code="3:0")
        time.sleep(0.1)
        assert reader.is_alive() or state == "FAILED"
    reader.join(timeout=30)
    assert codes == [3]
    assert capsys.readouterr().out == "one\nsaved\ntwo\nend\n"


def test_following_ends_with_a_job_that_stays_preempted(slurm: Slurm) -> None:
    slurm.log.write_text("so far\n")
    slurm.state("PREEMPTED", code="0:15")
    codes: list[int] = []
    threading.Thread(target=lambda: codes.append(slurm_commands.logs("7", SlurmSettings(), True)), daemon=True).start()
    deadline = time.monotonic() + 10
    while not codes and time.monotonic() < deadline:
        time.sleep(0.02)
    assert codes == [143]


def test_a_job_without_a_log_is_said_to_have_none(slurm: Slurm) -> None:
    """One of salloc."""
    state = slurm.place / "state"
    state.write_text(state.read_text().partition(" StdOut=")[0] + "\n")
    assert slurm_commands.status("7", SlurmSettings()).endswith("\nlog: none")
    with pytest.raises(ConfigError, match=r"job 7 \(grpo\): RUNNING.*it has no log, as sbatch did not submit it"):
        slurm_commands.logs("7", SlurmSettings(), False)


def test_a_log_that_is_not_followed_is_printed_as_far_as_it_is(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.log.write_text("so far\n")
    assert slurm_commands.logs("7", SlurmSettings(), False) == 0
    assert capsys.readouterr().out == "so far\n"


def test_a_job_that_ended_without_a_log_is_said_to_have_none(slurm: Slurm) -> None:
    slurm.state("CANCELLED")
    with pytest.raises(ConfigError, match=r"CANCELLED.*its log, .*grpo-7.log, is not here"):
        slurm_commands.logs("7", SlurmSettings(), True)


def test_a_job_that_runs_is_kept_from_its_requeue_before_it_is_told_to_stop(slurm: Slurm) -> None:
    """The other way round it could be requeued in between."""
    slurm.state("RUNNING", jobs=(7, 8))
    assert "saves and ends, and is not requeued" in slurm_commands.stop("7", SlurmSettings())
    assert slurm.calls == ["scontrol update JobId=7 Requeue=0", "scontrol update JobId=8 Requeue=0", "scancel --batch --signal=TERM 7"]


def test_a_job_that_waits_is_cancelled_and_one_that_has_ended_is_left_alone(slurm: Slurm) -> None:
    slurm.state("COMPLETED")
    assert "has ended already" in slurm_commands.stop("7", SlurmSettings()) and slurm.calls == []
    slurm.state("PENDING", reason="BeginTime", restarts=1)
    assert "is cancelled" in slurm_commands.stop("7", SlurmSettings()) and slurm.calls == ["scancel 7"]


def test_a_job_on_its_way_to_a_requeue_is_cancelled_when_it_waits(slurm: Slurm) -> None:
    slurm.state("COMPLETING")
    said: list[str] = []
    stopper = threading.Thread(target=lambda: said.append(slurm_commands.stop("7", SlurmSettings())))
    stopper.start()
    time.sleep(0.1)
    assert slurm.calls == []
    slurm.state("PENDING", reason="BeginTime", restarts=1)
    stopper.join(timeout=30)
    assert slurm.calls == ["scancel 7"] and "is cancelled" in said[0]


def submitted(slurm: Slurm, said: list[str] | None = None, export: tuple[str, ...] = ()) -> str:
    settings = SlurmSettings(log_directory=str(slurm.place / "made" / "logs"), export=list(export))
    say = (said if said is not None else []).append
    return slurm_commands.submit([slurm.place / "job.sbatch"], load_config(["config=grpo_tiny"]).config, settings, say)


def test_a_submitted_job_has_its_log_directory(slurm: Slurm) -> None:
    slurm.program("sbatch", 'echo "7;cluster"')
    assert submitted(slurm) == "7"
    assert (slurm.place / "made" / "logs").is_dir()


def test_the_id_of_a_submitted_job_is_told_when_the_controller_answers_no_more(slurm: Slurm) -> None:
    slurm.program("sbatch", "echo 7")
    slurm.program("scontrol", "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1")
    said: list[str] = []
    assert submitted(slurm, said) == "7"
    assert said[0] == f"its log: {slurm.place}/made/logs/grpo_tiny-7.log"


def test_a_submission_without_an_answer_is_not_to_be_repeated_blindly(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "COMMAND_TIMEOUT_S", 0.2)
    slurm.program("sbatch", "exec sleep 60")
    with pytest.raises(ConfigError, match=r"it may have been submitted; look with squeue --me first"):
        submitted(slurm)
    slurm.program("scontrol", "exec sleep 60")
    with pytest.raises(ConfigError, match=r"try again"):
        slurm_commands.status("7", SlurmSettings())


def test_a_variable_that_this_shell_does_not_have_is_refused(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.program("sbatch", "echo 7")
    monkeypatch.delenv("MISSING_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=r"export has MISSING_TOKEN, which is not set in this shell"):
        submitted(slurm, export=("PLACE", "MISSING_TOKEN"))
    assert submitted(slurm, export=("PLACE",)) == "7"


def test_what_slurm_says_when_it_refuses_is_told(slurm: Slurm) -> None:
    slurm.program("sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid qos specification" >&2; exit 1')
    with pytest.raises(ConfigError, match="Batch job submission failed: Invalid qos specification"):
        submitted(slurm)
    slurm.program("scontrol", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    with pytest.raises(ConfigError, match="Invalid job id specified; Slurm forgets a job some minutes after its end"):
        slurm_commands.status("7", SlurmSettings())


def test_a_dry_run_asks_slurm_where_one_is_reached(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.program("sbatch", 'echo "sbatch: Job 8 to start at noon" >&2')
    assert slurm_commands.ask([slurm.place / "job.sbatch"], SlurmSettings()) == "Job 8 to start at noon"
    slurm.program("scontrol", "echo 'Slurmctld(primary) at x is DOWN'; exit 1")
    said = slurm_commands.ask([slurm.place / "job.sbatch"], SlurmSettings())
    assert said == "no Slurm is reached from here, so none was asked about the job: Slurmctld(primary) at x is DOWN"
    monkeypatch.setenv("PATH", str(slurm.place / "logs"))
    assert slurm_commands.ask([slurm.place / "job.sbatch"], SlurmSettings()) is None


def test_without_slurm_the_message_says_where_to_go(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(slurm.place / "logs"))
    with pytest.raises(ConfigError, match=r"no sbatch here.*login node.*--out DIRECTORY"):
        submitted(slurm)
