"""Weight sync against its aims: how little a delta moves, how short it pauses, how near the collective transport is to a bare broadcast.

    python -m benchmarks.sync [--model 150m] [--engines 1] [--repeats 5]

Runs ``python -m rlpost.bench sync`` in bfloat16 with 1 % and with 0.1 % of the elements changed, and in float32, where the trainer need
not cast. Every figure is a ratio within one of these runs, whose transports take turns, because the machine may be shared. The last
line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.step import last_json

MOST_PAUSE = 0.5
"""Pause of a delta over that of a full collective sync."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """``most_bytes``: bytes of a delta over those of a full sync, at most (None: no delta is sent)."""

    dtype: str
    changed: float
    most_bytes: float | None = None
    least_of_bare: float | None = None
    """Throughput of the collective transport over that of a bare broadcast of the same bytes. In bfloat16 there is no aim: the trainer
    reads its float32 weights, twice the bytes, which a bare broadcast of what is sent need not."""


CASES = (
    Case(dtype="bfloat16", changed=0.01, most_bytes=0.04),
    Case(dtype="bfloat16", changed=0.001, most_bytes=0.006),
    Case(dtype="float32", changed=0.01, least_of_bare=0.7),
)


@dataclass(frozen=True, kw_only=True)
class Target:
    """One aim and what was found."""

    what: str
    found: float
    aim: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether it was reached."""
        return self.found <= self.aim if self.at_most else self.found >= self.aim

    def line(self) -> str:
        """For people."""
        bound = "at most" if self.at_most else "at least"
        return f"  {'met   ' if self.met else 'MISSED'}  {self.what}: {self.found:.4f}, aim {bound} {self.aim}"


def targets(case: Case, result: dict[str, Any]) -> list[Target]:
    """The aims of one case."""
    collective = result["transports"]["collective"]
    of_bare = collective["ratio_to_bare_broadcast"]
    found = []
    if case.least_of_bare is not None:
        found.append(Target(what="collective over a bare broadcast", found=of_bare, aim=case.least_of_bare, at_most=False))
    if case.most_bytes is not None:
        delta = result["transports"]["delta"]
        found += [
            Target(
                what="bytes of a delta over a full sync's", found=delta["bytes"] / collective["bytes"], aim=case.most_bytes, at_most=True
            ),
            Target(
                what="pause of a delta over a full sync's", found=delta["paused_s"] / collective["paused_s"], aim=MOST_PAUSE, at_most=True
            ),
        ]
    return found


def run(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """One case in a process of its own."""
    transports = "collective" if case.most_bytes is None else "collective,delta"
    words = ["--model", options.model, "--engines", options.engines, "--repeats", options.repeats, "--transport", transports]
    words += ["--dtype", case.dtype, "--changed", str(case.changed)]
    return last_json([sys.executable, "-m", "rlpost.bench", "sync", *words])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="150m", help="see python -m rlpost.bench sync (default: %(default)s)")
    parser.add_argument("--engines", default="1", help="engines (default: %(default)s)")
    parser.add_argument("--repeats", default="5", help="measured syncs of each transport (default: %(default)s)")
    options = parser.parse_args()
    cases: list[dict[str, Any]] = []
    for case in CASES:
        result = run(case, options)
        reached = targets(case, result)
        print(
            f"{result['model']}, {result['parameters']:,} parameters, {case.dtype}, {case.changed:.1%} changed, {options.engines} engine(s)"
        )
        print("\n".join(target.line() for target in reached), flush=True)
        figures = {target.what: {"found": target.found, "aim": target.aim, "met": target.met} for target in reached}
        cases.append({"dtype": case.dtype, "changed": case.changed, "targets": figures, "result": result})
    print(json.dumps({"all_met": all(figure["met"] for one in cases for figure in one["targets"].values()), "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
