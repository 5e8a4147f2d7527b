"""Every node of a Ray cluster: an actor on each looks at its machine, and what only several nodes can have wrong is checked between them.

Each answer has a deadline; a node that does not answer, or whose probe breaks, is a failed finding with its name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlpost.cluster import session
from rlpost.diagnosis import cluster_checks as checks
from rlpost.diagnosis import links
from rlpost.diagnosis.host import Host
from rlpost.diagnosis.machine import Say, machine_findings
from rlpost.diagnosis.needs import Needs
from rlpost.diagnosis.report import Finding
from rlpost.diagnosis.software import compared_versions
from rlpost.types import ConfigError

START_TIMEOUT_S = 120.0
"""For an actor to start on a node and to read the package from its disk."""

ANSWER_TIMEOUT_S = 30.0
MACHINE_TIMEOUT_S = 300.0
"""For all checks of a machine; each has a deadline of its own."""

GROUP_TIMEOUT_S = 30.0
"""For two processes to meet, and for each collective."""

PINGS = 5


class NodeProbe:
    """The actor on one node."""

    def versions(self) -> dict[str, str]:
        """See compared_versions."""
        return compared_versions(Host())

    def now(self) -> float:
        """This node's clock."""
        return time.time()

    def look(self, file: str) -> checks.Seen:
        """What the driver wrote into ``file``, and whether something can be written beside it."""
        path, token, problem = Path(file), None, ""
        with contextlib.suppress(OSError):
            token = path.read_text()
        try:
            with TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            problem = error.strerror or str(error)
        return checks.Seen(token, problem)

    def without(self, directories: Sequence[str]) -> list[str]:
        """Those that this node does not have."""
        return [one for one in directories if not Path(one).is_dir()]

    def machine(self, needs: Needs, addresses: list[str], where: str) -> list[Finding]:
        """All checks of this machine; ``addresses`` are those of all nodes, this one's first."""
        host = Host()
        # Ray hides the GPUs from an actor that asked for none.
        host.environment = {name: value for name, value in host.environment.items() if name != "CUDA_VISIBLE_DEVICES"}
        return machine_findings(needs, lambda _: None, host=host, addresses=addresses, where=where)


def cluster_findings(needs: Needs, address: str | None, expected_gb_s: float | None, say: Say) -> list[Finding]:
    """Everything about the cluster at ``address`` (or RAY_ADDRESS); without one, Ray is started here for it.

    Raises ConfigError when nothing answers at the address, InfrastructureError when Ray does not start here.
    """
    address = address or needs.ray_address or os.environ.get("RAY_ADDRESS")
    say(f"connecting to {address or 'Ray'} ...")
    try:
        session.connect(address)
    except (ConfigError, RuntimeError) as error:  # a RuntimeError: Ray or Python have other versions there
        place = links.host_and_port(address or "")
        if isinstance(error, ConfigError) and (place is None or links.reach(*place)):
            raise
        return [
            Finding(
                area="nodes", name="connection", status="failed", found=f"somebody listens at {address}, but: {error}",
                expected="a cluster that takes this driver",
                fix="is it Ray's port? Use the same Python and Ray here as there; where the head has an authentication token "
                "(~/.ray/auth_token), export RAY_AUTH_MODE=token here and on every node, with the same token",
            )
        ]  # fmt: skip
    # After Ray's start, which puts in a handler of its own: what was written and started goes when this is told to end, too.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return list(_findings(needs, expected_gb_s, say))
    finally:
        signal.signal(signal.SIGTERM, before)
        session.disconnect()


def _findings(needs: Needs, expected_gb_s: float | None, say: Say) -> Iterator[Finding]:
    nodes = ray.nodes()
    names = checks.node_names(nodes)
    yield from checks.check_nodes(nodes, names)
    yield checks.check_resources(needs.bundles, nodes, ray.available_resources())
    say(f"starting a probe on {len(names)} nodes ...")
    actor: Any = ray.remote(NodeProbe)
    probes = {key: actor.options(**_on_node(key)).remote() for key in names}
    versions, failed = gather({names[key]: probe.versions.remote() for key, probe in probes.items()}, "start", START_TIMEOUT_S)
    yield from failed
    yield from checks.check_same_versions({"driver": compared_versions(Host()), **versions})
    probes = {key: probe for key, probe in probes.items() if names[key] in versions}
    for key, probe in probes.items():
        yield _skew(names[key], probe)
    with _token(needs.directory) as (file, token):
        say(f"looking for {needs.directory} on every node ...")
        seen, failed = gather({names[key]: probe.look.remote(str(file)) for key, probe in probes.items()}, "shared disk", ANSWER_TIMEOUT_S)
        yield from failed
        yield from (checks.check_shared(where, needs.directory, token, one) for where, one in seen.items())
        missing, failed = gather(
            {names[key]: probe.without.remote(needs.models) for key, probe in probes.items()}, "models", ANSWER_TIMEOUT_S
        )
        yield from failed
        for where, one in missing.items():
            yield from checks.check_models(where, needs.models, one)
        say("looking at every machine (disk speed, GPUs, limits) ...")
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["NodeID"] in names}
        # What the parts ask for is a matter of the whole cluster, not of one node.
        own = replace(needs, threads=0, bundles=(), ray_address=None)
        asked = {
            names[key]: probe.machine.remote(own, [addresses[key], *addresses.values()], names[key]) for key, probe in probes.items()
        }  # fmt: skip
        found, failed = gather(asked, "machine", MACHINE_TIMEOUT_S)
        yield from failed
        yield from (finding for one in found.values() for finding in one)
    yield from _bandwidth(needs, {key: names[key] for key in probes}, expected_gb_s, say)


def _on_node(key: str) -> dict[str, Any]:
    """Ray options of an actor that looks at one node; it takes no CPU, so that a busy cluster can be looked at."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(key, soft=False)}


def gather(references: Mapping[str, Any], what: str, timeout_s: float) -> tuple[dict[str, Any], list[Finding]]:
    """Answers by node, and a failed finding for each node that gives none in time, or an error."""
    done, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=timeout_s) if references else ([], [])
    answers, failed = {}, []
    for where, reference in references.items():
        try:
            if reference not in done:
                raise TimeoutError(f"no answer within {timeout_s:.0f} s")
            answers[where] = ray.get(reference)
        except Exception as error:  # noqa: BLE001 - whatever happened to a node is what the user wants to know
            failed.append(
                Finding(
                    area="probe", name=what, status="failed", where=where, found=_short(error), expected="an answer",
                    fix="is rlpost installed there, and does the node answer (ray list nodes, dmesg)?",
                )
            )  # fmt: skip
    return answers, failed


def _short(error: Exception) -> str:
    """Ray's errors carry a traceback between what happened and why: the first line and the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]]))


def _skew(where: str, probe: Any) -> Finding:
    """A few short questions for the time."""
    samples = []
    for _ in range(PINGS):
        asked = time.time()
        answer, failed = gather({where: probe.now.remote()}, "clock", ANSWER_TIMEOUT_S)
        if failed:
            return failed[0]
        samples.append((asked, answer[where], time.time()))
    return checks.check_skew(where, samples)


@contextlib.contextmanager
def _token(directory: str) -> Iterator[tuple[Path, str]]:
    """A file with a text that nobody can guess, in the run's directory; it and the directories made for it are removed afterwards.

    Where it cannot be written here the nodes will not find it.
    """
    place, token = Path(directory), uuid.uuid4().hex
    file = place / f".rlpost-doctor-{token[:8]}"
    made = [one for one in (place, *place.parents) if not one.exists()]
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    try:
        yield file, token
    finally:
        with contextlib.suppress(OSError):  # it could not be written, or something else came into the directory meanwhile
            file.unlink(missing_ok=True)
            for one in made:
                one.rmdir()


def _bandwidth(needs: Needs, names: Mapping[str, str], expected_gb_s: float | None, say: Say) -> Iterator[Finding]:
    """Between each node and the next; with one node between two processes on it."""
    if not names:
        return
    backend = "nccl" if needs.device == "gpu" else "gloo"
    keys = [*names] if len(names) > 1 else [*names, *names]
    gpus = {"num_gpus": 1} if backend == "nccl" else {}
    free = ray.available_resources().get("GPU", 0.0)
    if gpus and free < len(keys):
        yield Finding(
            area="bandwidth", name=backend, status="unknown", found=f"{free:g} GPUs are free", expected=f"{len(keys)} to measure with",
            fix="look again when no run holds the GPUs",
        )  # fmt: skip
        return
    actor: Any = ray.remote(links.LinkMember)
    members = [actor.options(**_on_node(key), **gpus).remote(backend, GROUP_TIMEOUT_S) for key in keys]
    say(f"loading torch in {len(members)} processes ...")
    loaded, failed = gather(
        {f"{names[key]} (process {i})": members[i].load.remote() for i, key in enumerate(keys)}, backend, START_TIMEOUT_S
    )
    yield from failed
    ready = [f"{names[key]} (process {i})" in loaded for i, key in enumerate(keys)]
    for place in range(len(keys) - 1):
        if not (ready[place] and ready[place + 1]):
            continue
        pair = names[keys[place]], names[keys[place + 1]]
        say(f"measuring {backend} between {pair[0]} and {pair[1]} ...")
        served, failed = gather({pair[0]: members[place].serve.remote()}, backend, ANSWER_TIMEOUT_S)
        if not failed:
            host, port = served[pair[0]]
            ends = {f"{pair[rank]} (rank {rank})": members[place + rank].measure.remote(rank, host, port) for rank in (0, 1)}
            seconds, failed = gather(ends, f"{backend} with {pair[1]}", START_TIMEOUT_S)
        yield from failed
        if not failed:
            yield from links.check_bandwidth(pair, backend, links.bus_bandwidth([*seconds.values()]), expected_gb_s)
