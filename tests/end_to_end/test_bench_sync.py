"""The sync benchmark as a user starts it: real trainer ranks, real engines, every transport; and the checkpoints of a real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from training_runs import Command

TIMEOUT_S = 400
TRANSPORTS = {"collective", "ipc", "disk", "delta"}
SECONDS = ("seconds", "paused_s", "stage_s", "gather_s", "encode_s", "transfer_s", "apply_s")


def bench(directory: Path, *words: str, code: int = 0) -> tuple[str, str]:
    """Runs ``python -m rlpost.bench sync``; returns what it printed on standard output and error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, "-m", "rlpost.bench", "sync", *words], cwd=directory, env=environment, text=True, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout, done.stderr


def last_object(output: str) -> dict[str, Any]:
    """The JSON object of the last line."""
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def every_transport(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """All transports between two ranks and two engines: standard output and error, and the directory."""
    directory = tmp_path_factory.mktemp("bench")
    output, errors = bench(
        directory, "--model", "1m", "--ranks", "2", "--engines", "2", "--changed", "0.02", "--repeats", "2", "--directory", "weights",
        "--json", "sync.json",
    )  # fmt: skip
    return output, errors, directory


def test_every_transport_brings_the_weights_without_any_fallback(every_transport: tuple[str, str, Path]) -> None:
    """Each takes over from another: a delta from a wrong baseline would be refused, or have a wrong fingerprint, and be healed."""
    found = last_object(every_transport[0])
    assert set(found["transports"]) == TRANSPORTS
    assert found["left_out"] == {}
    assert {name: one["fallbacks"] for name, one in found["transports"].items()} == dict.fromkeys(TRANSPORTS, 0)
    assert {name: one["mode"] for name, one in found["transports"].items()} == {
        "collective": "full", "ipc": "full", "disk": "full", "delta": "delta",
    }  # fmt: skip
    assert found["transports"]["delta"]["verified"]


def test_a_delta_tells_the_share_that_was_asked_for_in_few_bytes(every_transport: tuple[str, str, Path]) -> None:
    transports = last_object(every_transport[0])["transports"]
    assert transports["delta"]["changed_fraction"] == pytest.approx(0.02, rel=0.1)
    for name in TRANSPORTS - {"delta"}:
        assert transports[name]["bytes"] == 918_912 * 2
    assert 918_912 * 0.02 * 2 < transports["delta"]["bytes"] < 0.06 * 918_912 * 2


def test_the_figures_that_a_planner_reads_are_all_there(every_transport: tuple[str, str, Path]) -> None:
    output, _, directory = every_transport
    found = last_object(output)
    assert json.loads((directory / "sync.json").read_text()) == found
    assert (found["parameters"], found["dtype"], found["engines"], found["ranks"], found["changed"]) == (918_912, "bfloat16", 2, 2, 0.02)
    for name, one in found["transports"].items():
        assert all(one[field] >= 0 for field in SECONDS), name
        assert one["seconds"] >= one["apply_s"] > 0
        assert one["ratio_to_copy"] > 0
        assert one["extra_peak_gib"] is not None and one["engine_extra_peak_gib"] is not None
    assert found["transports"]["collective"]["ratio_to_bare_broadcast"] > 0
    assert found["transports"]["delta"]["encode_s"] > 0


def test_the_table_is_above_the_object_and_progress_beside_it(every_transport: tuple[str, str, Path]) -> None:
    output, errors, _ = every_transport
    table = output.splitlines()[:-1]
    assert {line.split()[0] for line in table} >= TRANSPORTS
    assert "round 2 of 2" in errors
    assert "round 2 of 2" not in output


def test_nothing_but_the_newest_version_is_left_on_disk(every_transport: tuple[str, str, Path]) -> None:
    """Versions pile up nowhere, although other transports' syncs lie between those of the disk."""
    left = [path.name for path in (every_transport[2] / "weights").rglob("version-*")]
    assert len(left) <= 1


def test_consecutive_checkpoints_of_a_run_are_replayed(command: Command, tmp_path: Path) -> None:
    output = command.run(
        "config=grpo_tiny", "schedule.steps=3", "checkpoint.every=1", "checkpoint.keep=5", "evaluation.every=0", "run_dir=run",
        "training.optimizer.lr=1e-5", "training.optimizer.warmup_steps=0",
    )  # fmt: skip
    assert command.run_directory(output).name == "run"
    printed, errors = bench(tmp_path, "--transport", "collective,delta", "--ranks", "2", "from-run", "run")
    found = last_object(printed)
    assert [entry["step"] for entry in found["transitions"]] == ["step_000001 -> step_000002", "step_000002 -> step_000003"]
    for entry in found["transitions"]:
        assert entry["delta"]["mode"] == "delta"
        # Small updates are lost in bfloat16's rounding, but not all of them.
        assert 0.001 < entry["delta"]["changed_fraction"] < 0.5
        assert 0 < entry["delta"]["bytes"] < entry["collective"]["bytes"]
    assert found["changed"] is None
    assert found["transports"]["delta"]["fallbacks"] == 0
    assert "step_000002 -> step_000003" in errors


def test_a_pattern_that_matches_no_parameter_ends_with_exit_code_2(tmp_path: Path) -> None:
    """Known only once the model is there, and still the user's to correct."""
    _, errors = bench(tmp_path, "--model", "1m", "--transport", "delta", "--trainable", "nothing_is_called_so", code=2)
    assert "nothing_is_called_so" in errors.splitlines()[-1]
