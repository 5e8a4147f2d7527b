"""``python -m rlpost.report RUN_DIR``: where the time of a run went, and whether its reward moved.

Reads the run's metrics.jsonl only, so it also works while the run goes on. Exit code 2 when there is nothing to read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpost.observe.summary import format_summary, summarise_run
from rlpost.types import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.report", description="Where the time of a run went, and whether its reward moved."
    )
    parser.add_argument("run_dir", type=Path, help="directory of the run: what rlpost.train prints last, after `run:`")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    options = parser.parse_args(arguments)
    try:
        summary = summarise_run(options.run_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(summary) if options.json else format_summary(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
