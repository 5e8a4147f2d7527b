"""An actor's process: relative paths mean what they mean to the driver, output goes to the run's directory, a missing model is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlpost.cluster import actor_process
from rlpost.models.embedded import check_here
from rlpost.types import ConfigError

PROGRAM = "import os; from rlpost.cluster.actor_process import settle; settle(); print('in', os.getcwd())"


def settled(variables: dict[str, str], elsewhere: Path) -> subprocess.CompletedProcess[str]:
    """A process that starts in another directory than the driver, as Ray's workers do."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **variables}, cwd=elsewhere, capture_output=True, text=True, check=True
    )


def test_relative_paths_are_the_drivers_in_a_worker_that_ray_started_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, elsewhere = tmp_path / "driver", tmp_path / "elsewhere"
    driver.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(driver)
    variables = actor_process.variables(Path("logs/engine-0.log"))
    done = settled(variables, elsewhere)
    assert (driver / "logs" / "engine-0.log").read_text() == f"in {driver}\n" and not done.stdout


def test_node_without_the_drivers_directory_says_so_and_goes_on(tmp_path: Path) -> None:
    variables = {actor_process.LOG_FILE: str(tmp_path / "a.log"), actor_process.DIRECTORY: str(tmp_path / "gone")}
    settled(variables, tmp_path)
    said = (tmp_path / "a.log").read_text()
    assert f"has not the driver's directory {tmp_path / 'gone'}" in said and f"in {tmp_path}" in said


def test_model_directory_that_this_node_lacks_is_named_and_hub_names_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"no model directory {tmp_path}/gone, which the driver has; put it"):
        check_here(str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="no model directory"):
        check_here("./gone")
    check_here(str(tmp_path))
    check_here("Qwen/Qwen3-4B-Base")
