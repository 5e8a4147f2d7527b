"""Whole nodes of a real Slurm (exclusive=true): `ray symmetric-run` on two hosts, each with an address and processes of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import network_hosts
import pytest
import slurm_host
from slurm_jobs import STEPS, Site
from training_runs import step_records

REASON = slurm_host.missing() or network_hosts.missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.slow]

# Ray counts one CPU of each node, and the run needs one and a half: it takes both.
SETTINGS = ("gpus_per_node=0", "cpus_per_node=1", "nodes=2", "exclusive=true", "time_limit=10", "signal_s=60", "join_timeout_s=90",
            f"interface={network_hosts.CARD}")  # fmt: skip


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    # Below /tmp: sockets have short paths.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as place, network_hosts.network_hosts(2) as hosts:
        with slurm_host.slurm_host(Path(place) / "slurm", slurm_host.Cluster(cpus=4, kill_wait_s=20), hosts) as slurm:
            yield Site(slurm, Path(place) / "shared", *SETTINGS)


def test_whole_nodes_start_by_symmetric_run(site: Site) -> None:
    job = site.launch("preflight=false")
    site.wait_until(job, lambda: site.steps(job) >= 4)
    site.slurm.run("scancel", "--batch", "--signal=TERM", job)
    site.slurm.start_requeued(job)
    ended = site.finish(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), site.log(job)[-4000:]
    assert [record["step"] for record in step_records(site.run(job))] == list(range(1, STEPS + 1))
    nodes = "".join(path.read_text() for path in sorted((site.directory / "logs").glob(f"grpo_tiny-{job}.*-*.log")))
    assert nodes.count("On head node.") == nodes.count("On worker node.") == 2
    site.assert_nothing_left(job)
