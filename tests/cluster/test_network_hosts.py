"""Runs over two hosts that have nothing but a network between them: what crosses it, how fast, and what happens when it is cut.

The machine's own name leads nowhere on these hosts, as on nodes that are not in the DNS or have several networks.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from network_hosts import NetworkHosts, RayHosts, missing, network_hosts, ray_hosts
from training_runs import Command, step_records, wait_until_all_ended

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
}
SMALL = (
    "config=grpo_tiny", "schedule.prompts_per_step=8", "algorithm.group_size=4", "evaluation.every=0", "data.evaluation=null",
    "schedule.start_timeout_s=60", "run_dir=run",
)  # fmt: skip
CPUS = (3, 2)
"""Of the hosts, as Ray counts them: there is one way to lay down what the following ask for."""
ENGINE_ALONE = ("training.ranks=2", "placement.trainer_cpus=1.5", "placement.engine_cpus=2")
"""Both ranks beside the driver on host 0, the engine on host 1."""
RANKS_APART = ("training.ranks=2", "placement.trainer_cpus=2", "placement.engine_cpus=1")
"""A rank on each host, the engine on host 0."""
SLOW, FAST = 2.0, 8.0
"""Mbit/s."""
CUT_S = 3.0
WAIT_S = 60.0
"""For a start, or for some steps."""
TRAVELLED_STEPS = 12


class CommandOnHost(Command):
    """The train command, on host 0."""

    def __init__(self, directory: Path, ray: RayHosts) -> None:
        super().__init__(directory)
        self.ray = ray

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**self.ray.environment, "RAY_ADDRESS": self.ray.address}
        return self.ray.hosts.start(
            0, sys.executable, "-m", "rlpost.train", *arguments, cwd=self.directory, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.fixture(scope="module")
def ray() -> Iterator[RayHosts]:
    """Two hosts; one that does not answer is given up after half a minute."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as directory:
        with ray_hosts(Path(directory), CPUS, {**HEALTH, "RAY_health_check_failure_threshold": "15"}) as running:
            yield running


@pytest.fixture
def on_host(tmp_path: Path, ray: RayHosts) -> CommandOnHost:
    ray.hosts.unlimit()
    return CommandOnHost(tmp_path, ray)


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory, ray: RayHosts) -> dict[str, Any]:
    """One run: three steps on a slow link, three on a faster one, then a short cut, then a fast link to the end."""
    command = CommandOnHost(tmp_path_factory.mktemp("travelled"), ray)
    before = ray.hosts.sent_bytes(0)
    ray.hosts.limit(SLOW)
    with command.watched(*SMALL, *ENGINE_ALONE, f"schedule.steps={TRAVELLED_STEPS}") as run:
        run.wait_for(f"step 3/{TRAVELLED_STEPS} ", WAIT_S)
        ray.hosts.limit(FAST)
        run.wait_for(f"step 6/{TRAVELLED_STEPS} ", WAIT_S)
        ray.hosts.unlimit()
        ray.hosts.cut(1)
        time.sleep(CUT_S)
        ray.hosts.restore(1)
        output = run.finish(0, WAIT_S)
    crossed = ray.hosts.sent_bytes(0) - before
    directory = command.directory / "run"
    wait_until_all_ended(directory)
    return {"output": output, "records": step_records(directory), "crossed": crossed}


CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 22000), timeout=0.5).close()"
LISTEN = "import socket; server = socket.create_server(('', 22000)); print(flush=True)\nwhile True: server.accept()"


def test_a_cut_host_is_out_of_reach_until_it_is_restored_and_hosts_end_with_all_that_runs_there() -> None:
    def reaches(hosts: NetworkHosts) -> bool:
        try:
            hosts.run(1, sys.executable, "-c", CONNECT, hosts.addresses[0])
        except RuntimeError:
            return False
        return True

    with pytest.raises(KeyError), network_hosts(2) as hosts:
        server = hosts.start(0, sys.executable, "-c", LISTEN, stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline()
        assert reaches(hosts)
        hosts.cut(1)
        assert not reaches(hosts)
        hosts.restore(1)
        assert reaches(hosts)
        raise KeyError
    assert server.wait(10) == -signal.SIGKILL
    present = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert hosts.command(0)[3].rsplit("-", 1)[0] not in present


def test_weights_cross_the_network_between_hosts_whose_name_leads_nowhere(travelled: dict[str, Any]) -> None:
    moved = sum(record["sync/bytes"] for record in travelled["records"])
    assert moved > 1e6 and travelled["crossed"] > moved


def test_sync_seconds_follow_the_bandwidth(travelled: dict[str, Any]) -> None:
    seconds = {record["step"]: record["sync/seconds"] for record in travelled["records"]}
    slow, fast = median([seconds[2], seconds[3]]), median([seconds[5], seconds[6]])
    assert 0.5 * FAST / SLOW < slow / fast < 2 * FAST / SLOW
    assert slow > 0.8 * travelled["records"][2]["sync/bytes"] * 8 / (SLOW * 1e6), "nothing is faster than the link"


def test_run_goes_on_after_a_short_cut_and_computes_what_it_should(travelled: dict[str, Any]) -> None:
    records = travelled["records"]
    assert [record["step"] for record in records] == list(range(1, TRAVELLED_STEPS + 1))
    assert max(record["time/step_s"] for record in records[6:]) > 0.8 * CUT_S, "some step waited for the network"
    for record in records:
        assert record["parity/logprob_abs_mean"] < 1e-4 and record["reward/failed"] == 0
        assert record["engine/restarts"] == 0
    assert "warning" not in travelled["output"]


def test_doctor_looks_at_both_hosts_and_measures_the_link_between_them(ray: RayHosts, tmp_path: Path) -> None:
    ray.hosts.limit(1000)
    command = [sys.executable, "-m", "rlpost.doctor", "cluster", "--json", "--address", ray.address]
    with subprocess.Popen(
        ray.hosts.command(0, *command), cwd=tmp_path, env=ray.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as doctor:
        output, _ = doctor.communicate(timeout=200)
    findings = json.loads(output)["findings"]
    own = sorted((finding["found"].partition(":")[0], finding["status"]) for finding in findings if finding["name"] == "own address")
    assert own == [(address, "ok") for address in ray.hosts.addresses]
    [broadcast] = [finding for finding in findings if finding["area"] == "bandwidth" and finding["name"] == "broadcast"]
    measured = broadcast["values"]["broadcast_bytes_s"]
    assert 0.25 * 1e9 / 8 < measured < 1.05 * 1e9 / 8, broadcast


@pytest.mark.slow
def test_sync_that_is_cut_in_its_middle_is_given_up_at_its_deadline_and_made_again(on_host: CommandOnHost) -> None:
    """At 1 Mbit/s a step is nearly all sync."""
    hosts = on_host.ray.hosts
    hosts.limit(1)
    with on_host.watched(*SMALL, *ENGINE_ALONE, "schedule.steps=4", "weights.timeout_s=8") as run:
        run.wait_for("step 2/4 ", WAIT_S)
        time.sleep(1.5)
        hosts.cut(1)
        time.sleep(14)
        hosts.restore(1)
        hosts.unlimit()
        output = run.finish(0, WAIT_S)
    assert "1 engine(s) needed a full weight sync: broken" in output
    records = step_records(on_host.directory / "run")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(record["parity/logprob_abs_mean"] < 1e-4 and record["engine/restarts"] == 0 for record in records)


@pytest.mark.slow
def test_ranks_that_cannot_reach_each_other_say_so_at_the_deadline_and_start_again_when_they_can(on_host: CommandOnHost) -> None:
    hosts = on_host.ray.hosts
    settings = (*SMALL, *RANKS_APART, "schedule.steps=20", "schedule.phase_timeout_s=6", "checkpoint.every=4")
    with on_host.watched(*settings) as run:
        run.wait_for("step 5/20 ", WAIT_S)
        hosts.cut(1)
        run.wait_for("starting again from step_0000", WAIT_S)
        hosts.restore(1)
        output = run.finish(0, WAIT_S)
    [warning] = [line for line in output.splitlines() if "starting again" in line]
    # Of the two that wait as long, gloo in a rank or the driver may be the first.
    assert re.search(r"trainer ranks? .* update\b.*schedule\.phase_timeout_s", warning), warning
    assert [record["step"] for record in step_records(on_host.directory / "run")] == list(range(1, 21))


@pytest.mark.slow
def test_host_that_stays_cut_ends_the_run_with_an_error_that_tells_of_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="hosts-") as directory:
        with ray_hosts(Path(directory), CPUS, {**HEALTH, "RAY_health_check_failure_threshold": "3"}) as ray:
            command = CommandOnHost(tmp_path, ray)
            with command.watched(
                *SMALL, *ENGINE_ALONE, "schedule.steps=30", "schedule.start_timeout_s=30", "placement.timeout_s=10"
            ) as run:
                run.wait_for("step 5/30 ", WAIT_S)
                ray.hosts.cut(1)
                output = run.finish(1, timeout_s=120)
    [error] = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "engine-0" in error and "schedule.start_timeout_s" in error and "given up: 10.77.0.2" in error, error
    assert "Traceback" not in output
