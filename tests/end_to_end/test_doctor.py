"""The doctor of a real cluster of two nodes (two raylets on this machine): every node answers, and what is too much is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

TIMEOUT_S = 200


@pytest.fixture
def address() -> Iterator[str]:
    """Of a cluster whose two nodes have one CPU each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 128 << 20})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_both_nodes_are_looked_at_and_measured_and_the_rank_that_finds_no_cpu_is_named(address: str, tmp_path: Path) -> None:
    words = ["config=grpo_tiny", f"output_dir={tmp_path}/runs", "training.ranks=3", "placement.trainer_cpus=0.9", "placement.device=cpu"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "rlpost.doctor", "cluster", *words, "--address", address, "--json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)["findings"]

    def of(area: str, name: str) -> list[dict]:
        return [one for one in found if (one["area"], one["name"]) == (area, name)]

    nodes = {one["where"] for one in of("nodes", "node")}
    assert len(nodes) == 2
    [missing] = [one for one in found if one["area"] == "resources"]
    assert (missing["name"], missing["status"]) == ("trainer 2", "failed")
    assert "3 x trainer    CPU 0.9 each" in missing["found"]
    for area, name in (("clock", "skew"), ("disk", "shared directory"), ("versions", "torch"), ("network", "own address")):
        assert {one["where"]: one["status"] for one in of(area, name)} == dict.fromkeys(nodes, "ok"), (area, name)
    assert {one["where"] for one in of("disk", "speed") if one["values"]["write_bytes_s"] > 0} == nodes
    for name, figure in (("all-reduce", "all_reduce_bytes_s"), ("broadcast", "broadcast_bytes_s")):
        [measured] = of("bandwidth", name)
        assert measured["values"][figure] > 0
        assert all(node in measured["found"] for node in nodes), "between the two nodes"
    assert not of("same versions", "torch") and [one["status"] for one in of("same versions", "on all nodes")] == ["ok"]
    assert not [one for one in found if one["area"] == "probe"], "every probe answered"
    assert list(tmp_path.iterdir()) == [], "nothing is left where the run would go"
