"""Faults that only several nodes can have, from what made-up nodes answered: each is named, and a node that hangs holds nothing up."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import pytest

from rlpost.config.derive import Bundle
from rlpost.config.schema import RunConfig
from rlpost.diagnosis import cluster, links
from rlpost.diagnosis import cluster_checks as checks
from rlpost.diagnosis.cluster_checks import Seen
from rlpost.diagnosis.needs import Needs, needs_of
from rlpost.diagnosis.report import Finding
from rlpost.types import ConfigError


def node(key: str, *, host: str = "", alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": key * 10, "Alive": alive, "NodeManagerHostname": host or f"host-{key}", "NodeManagerAddress": f"10.0.0.{ord(key)}",
        "Resources": resources,
    }  # fmt: skip


def failed(findings: Iterable[Finding], status: str = "failed") -> Finding:
    """The only finding that is not ok."""
    [found] = [finding for finding in findings if finding.status != "ok"]
    assert found.status == status and found.fix
    return found


# ---- nodes and versions ----------------------------------------------------------------------------------------------


def test_two_nodes_on_one_machine_have_names_that_can_be_told_apart_and_a_dead_one_is_warned_of() -> None:
    same = [{**node("a", CPU=4), "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "host"} for _ in range(2)]
    same[1]["NodeID"] = "b" * 10
    nodes = [*same, node("c", alive=False)]
    names = checks.node_names(nodes)
    assert names == {"a" * 10: "host(10.0.0.1)#aaaaaa", "b" * 10: "host(10.0.0.1)#bbbbbb"}
    found = list(checks.check_nodes(nodes, names))
    assert [finding.where for finding in found if finding.status == "ok"] == list(names.values())
    assert failed(found, "warning").where == "host-c(10.0.0.99)"


def test_a_package_that_differs_is_told_with_who_has_what() -> None:
    versions = {
        "one": {"torch": "2.13.0", "ray": "2.60.0", "vllm": "0.32.0"},
        "two": {"torch": "2.13.0", "ray": "2.61.0", "vllm": "0.32.0"},
        "three": {"torch": "2.13.0", "ray": "2.60.0"},
    }
    found = {finding.name: finding for finding in checks.check_same_versions(versions)}
    assert (found["ray"].status, found["ray"].found) == ("failed", "2.60.0 on one, three\n2.61.0 on two")
    assert found["vllm"].found == "0.32.0 on one, two\nnot installed on three"
    assert found["on all nodes"].found == "torch 2.13.0"


def test_a_model_that_only_the_driver_has_is_named_with_the_node_that_lacks_it() -> None:
    found = [*checks.check_models("one", ["/models/a"], []), *checks.check_models("two", ["/models/a"], ["/models/a"])]
    assert failed(found).where == "two" and "/models/a" in failed(found).found
    assert not list(checks.check_models("one", [], [])), "nothing is said of models on a hub"


def test_cluster_of_another_version_refuses_the_driver_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with Ray: 2.59.0")

    monkeypatch.setattr(cluster.ray, "init", init)
    with pytest.raises(ConfigError, match=r"'auto' does not take this driver: Version mismatch.*same versions of Python and Ray"):
        cluster.session.connect("auto")


def test_doctor_writes_nothing_into_the_directory_that_a_new_run_must_find_empty() -> None:
    config = RunConfig()
    config.model.path, config.run_dir = "embedded:tiny-sort5", "/shared/runs/mine"
    assert needs_of(config).directory == "/shared/runs"


# ---- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "skew", "status"),
    [
        ([(100.0, 100.6, 101.0), (200.0, 200.02, 200.02)], 0.01, "ok"),
        ([(100.0, 105.0, 100.2)], 4.9, "warning"),
        ([(100.0, 90.0, 100.002)], -10.001, "warning"),
        ([(100.0, 108.0, 112.0)], 2.0, "ok"),  # it took twelve seconds to answer: nothing is known
    ],
)
def test_skew_is_told_from_the_way_that_the_question_takes(samples: list[tuple[float, float, float]], skew: float, status: str) -> None:
    found = checks.check_skew("node", samples)
    assert (found.values["skew_s"], found.status, found.where) == (pytest.approx(skew), status, "node")


# ---- the shared directory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Seen(None), "does not hold what this machine wrote there"),
        (Seen("another"), "another file"),
        (Seen("token", "Read-only file system"), "Read-only file system"),
    ],
)
def test_a_directory_that_is_not_shared_or_cannot_be_written_names_the_node(seen: Seen, words: str) -> None:
    found = failed([checks.check_shared("node", "/runs", "token", seen)])
    assert words in found.found and found.where == "node"
    assert checks.check_shared("node", "/runs", "token", Seen("token")).status == "ok"


def test_the_token_and_the_directories_made_for_it_are_gone_afterwards(tmp_path: Any) -> None:
    probe = cluster.NodeProbe()
    with cluster._token(str(tmp_path / "new" / "runs")) as (file, token):
        assert probe.look(str(file)) == Seen(token)
        assert probe.look(str(tmp_path / file.name)) == Seen(None), "the same name in a directory that is not shared"
        assert probe.look(str(tmp_path / "nowhere" / file.name)).problem
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with cluster._token(str(tmp_path / "file")) as (file, token):  # it cannot be written, which the nodes will tell
        assert probe.look(str(file)).token is None


# ---- resources -------------------------------------------------------------------------------------------------------


def asked(role: str, count: int, **resources: float) -> list[Bundle]:
    return [Bundle(role, index, resources) for index in range(count)]


@pytest.mark.parametrize(
    ("bundles", "nodes", "missing"),
    [
        (asked("trainer", 4, GPU=1) + asked("engine", 4, GPU=1), [node("a", GPU=4), node("b", GPU=3)], "engine 3"),
        (asked("trainer", 2, GPU=1) + asked("engine", 1, GPU=8), [node("a", GPU=4), node("b", GPU=8)], None),
        (asked("trainer", 5, GPU=1) + asked("engine", 1, GPU=8), [node("a", GPU=4), node("b", GPU=8)], "engine 0"),
        (asked("trainer", 3, GPU=1), [node("a", GPU=2), node("b", GPU=2, alive=False)], "trainer 2"),
        (asked("engine", 1, GPU=2, CPU=4), [node("a", GPU=2, CPU=2), node("b", CPU=64)], "engine 0"),
        ([], [node("a", CPU=1)], None),
    ],
)
def test_the_bundle_that_finds_no_place_is_named(bundles: list[Bundle], nodes: list[dict[str, Any]], missing: str | None) -> None:
    found = checks.check_resources(bundles, nodes, {"CPU": 1000.0, "GPU": 1000.0})
    if missing is None:
        assert found.status == "ok"
    else:
        assert (failed([found]).name, f"bundle {missing} (" in found.found, "present:" in found.found) == (missing, True, True)


def test_resources_that_others_hold_are_a_warning() -> None:
    bundles = asked("trainer", 2, GPU=1, CPU=1)
    assert (
        "GPU 1 of 4 free" in failed([checks.check_resources(bundles, [node("a", GPU=4, CPU=8)], {"CPU": 8.0, "GPU": 1.0})], "warning").found
    )
    assert checks.check_resources(bundles, [node("a", GPU=4, CPU=8)], {"CPU": 8.0, "GPU": 2.0}).status == "ok"


# ---- bandwidth -------------------------------------------------------------------------------------------------------


def test_bus_bandwidth_is_that_of_the_slower_rank() -> None:
    one, two = {"all_reduce": 0.5, "broadcast": 0.1}, {"all_reduce": 0.25, "broadcast": 0.2}
    assert links.bus_bandwidth([one, two]) == {"all_reduce": links.SIZE_BYTES / 0.5, "broadcast": links.SIZE_BYTES / 0.2}


@pytest.mark.parametrize(("expected", "status"), [(None, "ok"), (12.0, "ok"), (12.6, "failed")])
def test_less_than_four_fifths_of_the_expected_bandwidth_fails_and_names_both_nodes(expected: float | None, status: str) -> None:
    [found] = links.check_bandwidth(("one", "two"), "nccl", {"all_reduce": 10e9}, expected)
    assert found.status == status
    assert "one and two" in found.found and found.values == {"all_reduce_bytes_s": 10e9}


# ---- nodes that do not answer ----------------------------------------------------------------------------------------


class FakeRay:
    """References are what ``get`` gives: an answer, an exception, or HANGS."""

    HANGS = object()

    def wait(self, references: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(references) and timeout < 1000, "every wait has a deadline and waits for all"
        return [r for r in references if r is not self.HANGS], [r for r in references if r is self.HANGS]

    def get(self, reference: Any) -> Any:
        assert reference is not self.HANGS, "this would wait for ever"
        if isinstance(reference, Exception):
            raise reference
        return reference


def test_a_node_that_hangs_or_breaks_is_a_failed_finding_with_its_name_and_the_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ray", FakeRay())
    lost = ModuleNotFoundError("ray::NodeProbe.versions()\n  File ...\nModuleNotFoundError: No module named 'rlpost'\n")
    answers, problems = cluster.gather({"good": "yes", "hangs": FakeRay.HANGS, "bare": lost}, "start", 7.0)
    assert answers == {"good": "yes"}
    told = {finding.where: finding.found for finding in problems}
    assert told["hangs"] == "no answer within 7 s"
    assert "No module named 'rlpost'" in told["bare"] and "\n" not in told["bare"]
    assert {finding.status for finding in problems} == {"failed"}
    assert cluster.gather({}, "start", 7.0) == ({}, [])


@pytest.mark.parametrize("error", [RuntimeError("Version mismatch: Ray: 2.50.0"), ConfigError("no Ray cluster answers: Ray: 2.50.0")])
def test_a_cluster_that_is_there_and_refuses_the_driver_is_a_finding(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Another version, or a token that is missing: not the same as nobody there, which is a wrong command."""

    def refuse(_: str | None) -> None:
        raise error

    monkeypatch.setattr(cluster.session, "connect", refuse)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert "2.50.0" in failed(cluster.cluster_findings(Needs(), address, None, lambda _: None)).found
    if isinstance(error, ConfigError):
        with pytest.raises(ConfigError):
            cluster.cluster_findings(Needs(), address, None, lambda _: None)
