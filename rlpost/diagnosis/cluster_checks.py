"""What is judged of a cluster's nodes together, from what they answered: versions, clocks, the shared directory, resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.cluster.placement import fits, table
from rlpost.config.derive import Bundle
from rlpost.diagnosis.report import Finding

MOST_SKEW_S = 1.0
"""Above it, files that one node writes look old or not yet written to another, and logs cannot be put in order."""


def node_names(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A name a person knows for each living node, by id: host name and address, and the id's start where two are alike."""
    alive = [node for node in nodes if node.get("Alive", True)]
    plain = {node["NodeID"]: f"{node['NodeManagerHostname']}({node['NodeManagerAddress']})" for node in alive}
    alike = list(plain.values())
    return {key: f"{name}#{key[:6]}" if alike.count(name) > 1 else name for key, name in plain.items()}


def check_nodes(nodes: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[Finding]:
    """Each node with what it has; dead ones are warned of."""
    for node in nodes:
        resources = {name: node.get("Resources", {}).get(name, 0.0) for name in ("CPU", "GPU")}
        alive = node["NodeID"] in names
        yield Finding(
            area="nodes", name="node", status="ok" if alive else "warning",
            found=f"CPU {resources['CPU']:g}, GPU {resources['GPU']:g}" if alive else "Ray calls it dead", expected="alive",
            where=names.get(node["NodeID"], f"{node.get('NodeManagerHostname')}({node.get('NodeManagerAddress')})"),
            fix="" if alive else "start Ray there again, unless the node was taken out on purpose",
            values={} if not alive else {"cpus": resources["CPU"], "gpus": resources["GPU"]},
        )  # fmt: skip


def check_same_versions(versions: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """``versions`` by node, then by package. One finding for each that differs, with who has what; or one that says all are equal."""
    packages = dict.fromkeys(name for one in versions.values() for name in one)
    equal = []
    for package in packages:
        holders: dict[str, list[str]] = {}
        for node, one in versions.items():
            holders.setdefault(one.get(package, "not installed"), []).append(node)
        if len(holders) == 1:
            equal.append(f"{package} {next(iter(holders))}")
            continue
        lines = [f"{version} on {', '.join(nodes)}" for version, nodes in holders.items()]
        yield Finding(
            area="same versions", name=package, status="failed", found="\n".join(lines), expected="the same on every node",
            fix="make the same environment on every node, or use one container image",
        )  # fmt: skip
    yield Finding(
        area="same versions", name="on all nodes", status="ok", found=", ".join(equal) or "nothing", expected="the same on every node"
    )


def check_skew(where: str, samples: Sequence[tuple[float, float, float]]) -> Finding:
    """``samples`` are (asked, the node's time, answered), in seconds of this machine's clock and of the node's.

    The quickest question tells most: the node's time was taken somewhere between both ends of it.
    """
    asked, theirs, answered = min(samples, key=lambda one: one[2] - one[0])
    skew, doubt = theirs - (asked + answered) / 2, (answered - asked) / 2
    away = abs(skew) - doubt > MOST_SKEW_S
    return Finding(
        area="clock", name="skew", status="warning" if away else "ok", where=where,
        found=f"{skew:+.4f} s against this machine, +-{doubt:.4f} s", expected=f"at most {MOST_SKEW_S:g} s",
        fix="set the clocks of all nodes by NTP (chronyd)" if away else "", values={"skew_s": skew, "doubt_s": doubt},
    )  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What a node found in the run's directory: the content of the file that the driver wrote, and whether it can write there."""

    token: str | None
    problem: str = ""


def check_shared(where: str, directory: str, token: str, seen: Seen) -> Finding:
    """The run's directory is one and the same on all nodes: checkpoints of all ranks, logs and weights on disk go there."""
    if seen.token is None:
        found = f"{directory} does not hold what this machine wrote there"
    elif seen.token != token:
        found = f"{directory} holds another file of that name"
    else:
        found = f"{directory} cannot be written: {seen.problem}" if seen.problem else f"{directory} is shared and can be written"
    bad = seen.token != token or bool(seen.problem)
    return Finding(
        area="disk", name="shared directory", status="failed" if bad else "ok", found=found, where=where,
        expected="one directory that every node sees and may write to",
        fix="set output_dir (or run_dir) to a file system that all nodes mount at the same place, for this user" if bad else "",
    )  # fmt: skip


def check_models(where: str, models: Sequence[str], missing: Sequence[str]) -> Iterator[Finding]:
    """Every node reads the models that the driver has; ``missing`` are those that this one does not find."""
    if models:
        yield Finding(
            area="disk", name="models", status="failed" if missing else "ok", where=where,
            found=f"not there: {', '.join(missing)}" if missing else ", ".join(models), expected="the driver's models at the same place",
            fix="put the model (or RLPOST_CACHE, of embedded models) on a disk that all nodes mount at the same place" if missing else "",
        )  # fmt: skip


def missing_bundle(bundles: Sequence[Bundle], nodes: Sequence[dict[str, Any]]) -> Bundle | None:
    """The first bundle that finds no place beside those before it; None when all do."""
    return next((bundle for place, bundle in enumerate(bundles) if not fits(bundles[: place + 1], nodes)), None)


def check_resources(bundles: Sequence[Bundle], nodes: Sequence[dict[str, Any]], available: Mapping[str, float]) -> Finding:
    """All parts of the run against the cluster: what it has, then what others leave of it (``available``)."""
    expected = "room for all parts at once (one placement group)"
    asked = {name: sum(one.resources.get(name, 0.0) for one in bundles) for name in ("CPU", "GPU")}
    has = {name: sum(node["Resources"].get(name, 0.0) for node in nodes if node.get("Alive", True)) for name in asked}
    values = {f"{kind}_{name.lower()}s": amount for kind, one in (("asked", asked), ("present", has)) for name, amount in one.items()}
    missing = missing_bundle(bundles, nodes)
    if missing is not None:
        needs = ", ".join(f"{name} {amount:g}" for name, amount in missing.resources.items() if amount)
        return Finding(
            area="resources", name=f"{missing.role} {missing.index}", status="failed",
            found=f"no node has room for bundle {missing.role} {missing.index} ({needs}) beside those before it\n{table(bundles, nodes)}",
            expected=expected, values=values,
            fix="lower training.ranks, engine.count, placement.trainer_cpus or placement.engine_cpus, or use a larger cluster",
        )  # fmt: skip
    taken = [name for name, amount in asked.items() if amount > available.get(name, 0.0)]
    free = ", ".join(f"{name} {available.get(name, 0.0):g} of {amount:g} free" for name, amount in has.items())
    return Finding(
        area="resources", name="placement", status="warning" if taken else "ok", expected=expected, values=values,
        found=free + (f"; {len(bundles)} bundles asked for: " + ", ".join(f"{n} {a:g}" for n, a in asked.items()) if bundles else ""),
        fix="wait for the other run, or end it: a run waits placement.timeout_s for its resources" if taken else "",
    )  # fmt: skip
