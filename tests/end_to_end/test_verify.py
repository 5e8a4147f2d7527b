"""``doctor verify``, as a user starts it: right settings pass all five checks, a fault fails the check that looks for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 400

FAULTY_LOSS = '''
"""A loss that is a mean over the micro-batch and not a sum: the framework divides by the whole step's tokens already."""
from rlpost.algorithms.losses import Term
from rlpost.algorithms.policy import policy_clip


def mean_of_micro_batch(targets, **parameters):
    return Term(loss=policy_clip(targets, **parameters).loss / len(targets.logprobs))
'''


def verify(directory: Path, *words: str, code: int) -> tuple[dict[str, Any], str]:
    """The command's JSON, and what it said on standard error; fails when the exit code is another one."""
    # Ray's sockets would have too long a path below the test's directory.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory), "RAY_TMPDIR": tempfile.gettempdir()}
    done = subprocess.run(
        [sys.executable, "-m", "rlpost.doctor", "verify", *words, "--json"], cwd=directory, env=environment, text=True, capture_output=True,
        stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_the_embedded_default_passes_every_check_and_leaves_nothing_behind(tmp_path: Path) -> None:
    report, said = verify(tmp_path, "config=grpo_tiny", code=0)
    found = {one["name"]: one for one in report["findings"]}
    assert sorted(found) == ["accumulation on 1 rank", "accumulation on 2 ranks", "packing", "parity", "resume", "sync"]
    assert {one["status"] for one in found.values()} == {"ok"}
    for ranks in ("1 rank", "2 ranks"):
        counts = [int(name.split("_")[1]) for name in found[f"accumulation on {ranks}"]["values"] if name.endswith("micro_batches")]
        assert counts[:3] == [1, 2, 3] and counts[3] > 10, counts
    assert found["packing"]["values"]["grad_norm"] > 0
    assert 0 < found["parity"]["values"]["logprob_abs_mean"] < 1e-4, "0 would mean that nothing was compared"
    assert report["scaled"]["schedule.steps"]["value"] == 4 and "schedule.steps: 80 -> 4" in said
    assert not list(tmp_path.glob("rlpost-verify-*"))


def test_a_wrong_denominator_and_a_run_that_cannot_start_are_found_each_by_its_own_check(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FAULTY_LOSS)
    words = ("config=grpo_tiny", "algorithm.policy_loss=own.py:mean_of_micro_batch", "engine.extra={no_such_argument: 1}")
    report, said = verify(tmp_path, *words, code=1)
    found = {one["name"]: one for one in report["findings"]}
    assert {name for name, one in found.items() if one["status"] == "failed"} == set(found)
    for name in ("accumulation on 1 rank", "accumulation on 2 ranks", "packing"):
        assert found[name]["values"]["difference"] > 0.1, found[name]
    assert found["packing"]["values"]["logprobs_gap"] < 1e-4, "the forward is right, only the loss is wrong"
    assert "no_such_argument" in found["resume"]["found"]
    [kept] = tmp_path.glob("rlpost-verify-*")
    assert f"because something failed: {kept}" in said
    assert (kept / "whole" / "config.yaml").is_file()
    shutil.rmtree(kept)
