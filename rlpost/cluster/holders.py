"""Who holds a cluster's resources, as far as Ray's head tells without a dashboard: placement groups by job, and the rest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rlpost.cluster.layout import ROUNDING, Node, amounts, living, node_names

RESOURCES = ("CPU", "GPU")
MOST_OF_COMMAND = 120
"""Characters of a job's command."""


def holders(
    groups: Mapping[str, Mapping[str, Any]],
    jobs: Sequence[Mapping[str, Any]],
    nodes: Sequence[Node],
    free: Mapping[str, Mapping[str, float]],
) -> str:
    """Lines that say by node what the placement groups of jobs hold and what is used outside them, who waits too, and what these jobs are.

    ``groups`` and ``jobs`` are Ray's ``placement_group_table()`` and ``jobs()``; ``free`` is by node id. Empty when nothing is held.
    """
    held = {node["NodeID"]: _held(node["NodeID"], groups) for node in living(nodes)}
    lines = []
    for name, node in zip(node_names(nodes), living(nodes), strict=True):
        shares = held[node["NodeID"]]
        parts = [f"{amounts(share)} by job {job}" for job, share in shares.items()]
        used = {
            kind: node["Resources"].get(kind, 0.0) - free.get(node["NodeID"], {}).get(kind, 0.0) - sum(one[kind] for one in shares.values())
            for kind in RESOURCES
        }
        if outside := amounts({kind: round(amount, 4) for kind, amount in used.items() if amount > ROUNDING}):
            parts.append(f"{outside} by actors and tasks outside placement groups")
        lines += [f"  {name}: {'; '.join(parts)}"] if parts else []
    waiting = [f"  job {_job(key)}: {len(group['bundles'])} bundles" for key, group in groups.items() if group["state"] == "PENDING"]
    shown = {job for shares in held.values() for job in shares} | {_job(key) for key, one in groups.items() if one["state"] == "PENDING"}
    commands = [f"  job {one['JobID']}: {_command(one)}" for one in jobs if one["JobID"] in shown]
    sections = {"held:": lines, "waiting too:": waiting, "jobs:": commands}
    return "\n".join(line for title, rows in sections.items() if rows for line in (title, *rows))


def _held(node_id: str, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What placement groups hold of a node, by job."""
    by_job: dict[str, dict[str, float]] = {}
    for key, group in groups.items():
        for index, where in group["bundles_to_node_id"].items():
            if where == node_id and group["state"] != "REMOVED":
                share = by_job.setdefault(_job(key), dict.fromkeys(RESOURCES, 0.0))
                for kind in RESOURCES:
                    share[kind] += group["bundles"][index].get(kind, 0.0)
    return by_job


def _job(group_id: str) -> str:
    """The id of the job that made a placement group is the end of the group's."""
    return group_id[-8:]


def _command(job: Mapping[str, Any]) -> str:
    """How the job was started, without the directories of its program, and where."""
    words = [PurePath(word).name if word.startswith("/") else word for word in job["Entrypoint"].split()]
    return f"{' '.join(words)[:MOST_OF_COMMAND]} (process {job['DriverPid']} on {job['DriverIPAddress']})"
