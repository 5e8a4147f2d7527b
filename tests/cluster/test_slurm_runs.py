"""Whole runs under a real Slurm on two nodes: submitted, pre-empted, cancelled, stopped, robbed of a node, at their time limit.

The driver, Ray and the engine are the real ones. The two nodes are slurmd's of one host, so jobs share them (exclusive=false), and Ray
runs twice on the host, with ports of its own.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_host import ENDED, Cluster, missing, slurm_host
from slurm_jobs import RUN, RUN_TIMEOUT_S, STEPS, Site, assert_equal_steps, newest_checkpoint
from training_runs import actors, step_records

from rlpost.jobs import slurm_commands
from rlpost.jobs.slurm_settings import SlurmSettings
from rlpost.launch import main

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

# Ray counts one CPU of each node, and the run needs one and a half: it takes both.
SETTINGS = ("gpus_per_node=0", "cpus_per_node=1", "nodes=2", "exclusive=false", "time_limit=10", "signal_s=60", "join_timeout_s=90")
EXIT_STOPPED = 75


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # Below /tmp: sockets have short paths. A pre-emption gives its victim a minute to save.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as place:
        with slurm_host(Path(place) / "slurm", Cluster(cpus=4, grace_s=60, kill_wait_s=20, signal_user=True)) as slurm:
            yield Site(slurm, Path(place) / "shared", *SETTINGS)


@pytest.fixture(autouse=True)
def slurm_of_the_test(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that are called here ask the test's Slurm."""
    monkeypatch.setenv("SLURM_CONF", site.slurm.environment["SLURM_CONF"])


@pytest.fixture(scope="module")
def whole(site: Site) -> str:
    """A job that ran to its end without an interruption."""
    job = site.launch()
    ended = site.finish(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), site.log(job)[-4000:]
    return job


def test_a_submitted_run_learns_to_its_end_on_both_nodes(site: Site, whole: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = site.log(whole)
    positions = [
        log.index(text) for text in ("Ray runs on 2 node(s)", "preflight: python -m rlpost.doctor cluster", " 0 failed", "step 1/")
    ]
    assert positions == sorted(positions)
    records = step_records(site.run(whole))
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    rewards = [record["reward/mean"] for record in records]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
    site.assert_nothing_left(whole)
    assert main(["slurm", "--logs", whole]) == 0
    assert capsys.readouterr().out == log
    assert "COMPLETED" in slurm_commands.status(whole, SlurmSettings())


def test_a_cancelled_job_leaves_no_process_and_stops_nobody_elses(site: Site, tmp_path: Path) -> None:
    # What a plain `ray stop` would take for a Ray of the same user.
    with bystander(tmp_path / "gcs_server"), bystander(tmp_path / "raylet"):
        job = site.launch("preflight=false")
        site.wait_until(job, lambda: "starting 2 trainer rank(s)" in site.log(job))
        assert any("raylet" in command for command in site.processes(job).values())
        site.slurm.run("scancel", job)
        assert site.finish(job)["JobState"] == "CANCELLED"
        site.assert_nothing_left(job)


@contextlib.contextmanager
def bystander(program: Path) -> Iterator[None]:
    """A process of this name that must still run at the end of the block."""
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen([program, "600"])
    try:
        yield
        assert process.poll() is None, f"{program.name} was ended with {process.returncode}"
    finally:
        process.kill()
        process.wait()


def test_an_allocation_that_does_not_hold_the_run_is_refused_before_it_is_asked_for(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = site.slurm.run("squeue", "--noheader")
    assert main(["slurm", *RUN, *site.settings, "nodes=1"]) == 2
    assert "nodes=1 with 0 GPUs and 1 CPUs each do not hold the run" in capsys.readouterr().err
    assert main(["slurm", *RUN, *site.settings, "nodes=3", "--dry-run"]) == 2
    assert "Slurm refuses the job: allocation failure: Requested node configuration is not available" in capsys.readouterr().err
    assert site.slurm.run("squeue", "--noheader") == before


def test_a_script_on_fewer_nodes_than_it_was_made_for_says_so(site: Site, tmp_path: Path) -> None:
    assert main(["slurm", *RUN, *site.settings, "--dry-run", f"--out={tmp_path}"]) == 0
    (site.directory / "logs").mkdir(exist_ok=True)
    job = site.slurm.submit(tmp_path / "job.sbatch", "--nodes=1")
    ended = site.finish(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "1:0")
    assert "the allocation has 1 nodes (n1), but GROUP_NODES asks for 2" in site.log(job)


def test_a_job_for_nodes_that_the_partition_never_has_waits_and_status_says_why(site: Site) -> None:
    job = site.launch("nodes=3")
    said = slurm_commands.status(job, SlurmSettings())
    # Slurm says the one or the other, as it looks first at the partition or at its nodes.
    assert re.search(r"PENDING \(Partition\w+\): partition low (never gives 3 nodes to one job|does not hold such a job): stop it", said), (
        said
    )
    assert slurm_commands.stop(job, SlurmSettings())
    assert site.finish(job)["JobState"] == "CANCELLED"


# ---- stopped and resumed ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pre_empted_run_saves_is_requeued_and_resumes_exactly(site: Site, whole: str) -> None:
    job = site.launch("preflight=false")
    site.wait_until(job, lambda: site.steps(job) >= 4)
    urgent = site.slurm.submit("#!/bin/bash\nsleep 1\n", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null")
    site.slurm.wait_for(job, ("PENDING",), RUN_TIMEOUT_S)
    saved = site.steps(job)
    assert 4 <= saved < STEPS and newest_checkpoint(site.run(job)) == saved
    assert "restarts: 1" in slurm_commands.status(job, SlurmSettings())
    assert site.slurm.wait_for(urgent)["JobState"] == "COMPLETED"
    site.slurm.start_requeued(job)
    ended = site.finish(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), site.log(job)[-4000:]
    assert "the driver ended with 75" in site.log(job) and f"from step_{saved:06d}" in site.log(job)
    assert [record["step"] for record in step_records(site.run(job))] == list(range(1, STEPS + 1))
    assert_equal_steps(site.run(job), site.run(whole))
    site.assert_nothing_left(job)


@pytest.mark.slow
def test_a_job_that_loses_a_node_resumes_and_when_stopped_for_good_saves_and_is_not_requeued(site: Site, whole: str) -> None:
    job = site.launch("preflight=false", "checkpoint.every=4")
    site.wait_until(job, lambda: site.steps(job) >= 5)
    site.slurm.lose_node("n2")
    site.slurm.wait_for(job, ("PENDING",), RUN_TIMEOUT_S)
    saved = newest_checkpoint(site.run(job))
    site.slurm.start_node("n2")
    site.slurm.wait_for_node("n2", ("idle", "mixed"))
    site.slurm.start_requeued(job)
    site.wait_until(job, lambda: f"step {saved + 2}/" in site.log(job).partition(f"from step_{saved:06d}")[2])
    assert main(["slurm", "--stop", job]) == 0
    ended = site.finish(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", f"{EXIT_STOPPED}:0", "1"), site.log(job)[-4000:]
    assert saved < newest_checkpoint(site.run(job)) == site.steps(job) < STEPS
    assert f"submit it again with run_dir={site.run(job)}" in site.log(job)
    assert_equal_steps(site.run(job), site.run(whole))
    site.assert_nothing_left(job)


@pytest.mark.slow
def test_a_run_saves_before_its_time_limit_and_is_requeued(site: Site) -> None:
    job = site.launch("preflight=false", "schedule.steps=5000", "time_limit=3", "signal_s=80")
    site.wait_until(job, lambda: site.steps(job) > 0)
    site.slurm.wait_for(job, ("PENDING", *ENDED), RUN_TIMEOUT_S)
    # Slurm gives the reason a moment after the state.
    site.wait_until(job, lambda: "PENDING (BeginTime): it may not start before" in slurm_commands.status(job, SlurmSettings()))
    assert "restarts: 1" in slurm_commands.status(job, SlurmSettings())
    assert newest_checkpoint(site.run(job)) == site.steps(job) > 0
    assert "TIME LIMIT" not in site.log(job)
    assert main(["slurm", "--stop", job]) == 0
    assert site.finish(job)["JobState"] == "CANCELLED"
    site.assert_nothing_left(job)


@pytest.mark.slow
def test_trainers_and_engines_get_nodes_of_their_own(site: Site) -> None:
    # Three of a node's four CPUs each.
    job = site.launch("preflight=false", "separate_roles=true", "nodes=null", "cpus_per_node=3")
    site.wait_until(job, lambda: {"trainer-0", "trainer-1", "engine-0"} <= {*actors(site.run(job))})
    nodes = {name: node_of(process) for name, process in actors(site.run(job)).items()}
    assert nodes["trainer-0"] == nodes["trainer-1"] != nodes["engine-0"]
    assert main(["slurm", "--stop", job]) == 0
    assert site.finish(job)["ExitCode"] == f"{EXIT_STOPPED}:0", site.log(job)[-4000:]
    site.assert_nothing_left(job)


def node_of(process: int) -> str:
    """The Slurm node that a process runs on."""
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    return next(one for one in variables if one.startswith("SLURMD_NODENAME="))
