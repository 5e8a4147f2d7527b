"""Weight sync against its aims: how little a delta moves, how short it pauses, how near the collective transport is to a bare broadcast.

    python -m benchmarks.sync [--model 150m] [--engines 1] [--repeats 5]

Runs ``python -m rlpost.bench sync`` in bfloat16 with 1 % and with 0.1 % of the elements changed. Every figure is a ratio within one of
these runs, whose transports take turns, because the machine may be shared. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.step import last_json

MOST_BYTES = {0.01: 0.04, 0.001: 0.006}
"""Changed share -> bytes of a delta over those of a full sync, at most."""
MOST_PAUSE = 0.5
"""Pause of a delta over that of a full collective sync."""
LEAST_OF_BARE = 0.7
"""Throughput of the collective transport over that of a bare broadcast of the same bytes."""


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


def targets(result: dict[str, Any]) -> list[Target]:
    """The aims of one case."""
    collective, delta = result["transports"]["collective"], result["transports"]["delta"]
    most = MOST_BYTES[result["changed"]]
    return [
        Target(what="bytes of a delta over a full sync's", found=delta["bytes"] / collective["bytes"], aim=most, at_most=True),
        Target(what="pause of a delta over a full sync's", found=delta["paused_s"] / collective["paused_s"], aim=MOST_PAUSE, at_most=True),
        Target(what="collective over a bare broadcast", found=collective["ratio_to_bare_broadcast"], aim=LEAST_OF_BARE, at_most=False),
    ]


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
    for changed in MOST_BYTES:
        result = last_json(
            [
                sys.executable, "-m", "rlpost.bench", "sync", "--model", options.model, "--transport", "collective,delta",
                "--dtype", "bfloat16", "--changed", str(changed), "--engines", options.engines, "--repeats", options.repeats,
            ]
        )  # fmt: skip
        reached = targets(result)
        print(f"{result['model']}, {result['parameters']:,} parameters, {changed:.1%} changed, {options.engines} engine(s)")
        print("\n".join(target.line() for target in reached), flush=True)
        figures = {target.what: {"found": target.found, "aim": target.aim, "met": target.met} for target in reached}
        cases.append({"changed": changed, "targets": figures, "result": result})
    print(json.dumps({"all_met": all(figure["met"] for case in cases for figure in case["targets"].values()), "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
