"""Options among the words of a run: told apart by name, checked like settings, also from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rlpost.config.fields import children
from rlpost.config.options import option_help, split_options
from rlpost.config.schema import REQUIRED, RunConfig, option
from rlpost.jobs.kube_settings import KubeSettings
from rlpost.jobs.ray_settings import RaySettings
from rlpost.jobs.slurm_settings import SlurmSettings
from rlpost.launch import FILE_WORD, GPU_WORD
from rlpost.planner.options import PlanOptions
from rlpost.types import ConfigError


@dataclass
class Kind:
    """Options of a test."""

    partition: str | None = option(None, "Where it runs.")
    nodes: int = option(1, "How many.")
    mode: str = option("whole", "How.", ("whole", "shared"))
    export: list[str] = option([], "Names.")  # noqa: RUF009
    image: str = option(REQUIRED, "What.")


def test_options_are_told_from_settings_of_the_run_by_their_names() -> None:
    options, others = split_options(["config=a", "nodes=2", "training.ranks=4", "export=[A,B]", "seed=1"], Kind, "a test")
    assert options == Kind(nodes=2, export=["A", "B"])
    assert others == ["config=a", "training.ranks=4", "seed=1"]


def test_words_come_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 3\npartition: gpu\n")
    options, _ = split_options(["nodes=5"], Kind, "a test", file)
    assert (options.nodes, options.partition, options.mode) == (5, "gpu", "whole")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["partitoin=a"], r"unknown option partitoin; did you mean partition=\?"),
        (["zzz=a"], r"unknown option zzz; options of a test are partition, nodes"),
        (["nodes=two"], r"command line: nodes is 'two' \(text\), expected a whole number"),
        (["mode=hole"], r"expected one of whole, shared; did you mean whole"),
        (["export=A"], r"export is 'A' \(text\), expected a list"),
        (["nodes=x", "mode=y"], r"2 problems in the options of a test:"),
    ],
)
def test_slips_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_options(words, Kind, "a test")


def test_slips_in_the_file_are_named_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: 3\npartitoin: gpu\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml:2: unknown option partitoin; did you mean partition="):
        split_options([], Kind, "a test", file)


def test_help_names_every_option_with_its_choices_and_what_is_required() -> None:
    text = option_help(Kind)
    assert "How. (whole, shared)" in text and "What. (text; required)" in text
    assert [line.split()[0] for line in text.splitlines()] == [child.key for child in children(Kind)]


@pytest.mark.parametrize("kind", [PlanOptions, SlurmSettings, KubeSettings, RaySettings])
def test_no_option_has_the_name_of_a_setting_of_the_run(kind: type) -> None:
    run = {child.key for child in children(RunConfig)} | {"config", "base", FILE_WORD}
    own = {child.key for child in children(kind)} | ({GPU_WORD} if kind is not PlanOptions else set())
    assert not run & own
