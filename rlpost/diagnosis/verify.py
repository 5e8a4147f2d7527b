"""``python -m rlpost.doctor verify config=... key=value``: does the framework compute the right thing with this configuration, here?

The user's own configuration and architecture, scaled down, go through five checks: accumulation, packing, resume, sync, parity. Comes in:
the words of a ``train`` command. Goes out: findings, what was scaled, and an exit code.

    verify_config.py    which settings become small;   verify_model.py   the small model;   verify_plan.py   both, loaded and checked
    verify_trainer.py   accumulation, packing: trainer ranks (verify_rank.py) in plain processes (verify_ranks.py) do the driver's steps
                        (verify_batch.py)
    verify_run.py       resume, sync, parity: whole runs of rlpost.train
    verify_compare.py   when two results are equal;   verify_guard.py   a check that breaks is a failed finding
    verify_reward.py    a reward for models that know nothing
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rlpost.diagnosis.report import Finding, exit_code, format_findings, to_json
from rlpost.diagnosis.verify_config import NotChecked
from rlpost.diagnosis.verify_guard import AREA
from rlpost.diagnosis.verify_plan import Plan, prepare
from rlpost.diagnosis.verify_run import run_findings
from rlpost.diagnosis.verify_trainer import trainer_findings


def verify_command(words: Sequence[str], as_json: bool) -> int:
    """Run all checks, print findings on standard output and progress on standard error; returns the exit code.

    Raises ConfigError when the configuration cannot be checked at all.
    """
    started = time.monotonic()
    # No network: read when the hub's libraries are imported, here and in the run.
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    directory = Path(tempfile.mkdtemp(prefix="rlpost-verify-"))

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    kept = False
    # Like an interrupt from the keyboard: processes end and the directory goes, instead of staying behind.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        plan = prepare(words, directory, say)
        for change in plan.changes:
            if not change.quiet:
                print(f"scaled  {change}", file=sys.stderr)
        found = [*asyncio.run(trainer_findings(plan, say)), *run_findings(plan, say), *map(unchecked_finding, plan.not_checked)]
        kept = exit_code(found) != 0
        print(json.dumps({**to_json(found), "scaled": scaled(plan)}, indent=1) if as_json else format_findings(found))
    finally:
        signal.signal(signal.SIGTERM, before)
        if kept:
            say(f"kept what the checks wrote, because something failed: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return exit_code(found)


def scaled(plan: Plan) -> dict[str, object]:
    """The changed settings by key, for programs."""
    return {change.key: {"found": change.found, "value": change.value, "why": change.why} for change in plan.changes}


def unchecked_finding(one: NotChecked) -> Finding:
    """What cannot run here is never said to be right."""
    return Finding(
        area=AREA,
        name=one.name,
        status="unknown",
        found=f"not checked here, because {one.because}: the run has {one.wanted}, the checks had {one.instead}",
        expected=f"{one.wanted} gives the same",
        fix="run doctor verify where the run will take place",
    )
