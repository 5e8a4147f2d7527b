"""From names to objects: four forms, and an error for each way to get them wrong."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpost.plugins import resolve
from rlpost.rewards import load_rewards, resolve_reward
from rlpost.rewards.resolve import reward_names
from rlpost.types import ConfigError


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; imports from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_file_beside_a_helper_module_is_loaded_relative_to_the_current_directory(directory: Path) -> None:
    (directory / "my").mkdir()
    (directory / "my" / "helper_of_reward.py").write_text("VALUE = 7\n")
    (directory / "my" / "rewards.py").write_text(
        "from dataclasses import dataclass\nfrom helper_of_reward import VALUE\n@dataclass\nclass C:\n    x: int = VALUE\n"
        "    @staticmethod\n    def reward(prompt, completion):\n        return VALUE\n"
    )
    assert resolve_reward("my/rewards.py:C.reward")("", "") == 7
    assert resolve_reward(f"{directory}/my/rewards.py:C") is resolve_reward("my/rewards.py:C")  # loaded once


def test_two_files_of_one_name_do_not_get_mixed_up(directory: Path) -> None:
    for name in ("a", "b"):
        (directory / name).mkdir()
        (directory / name / "reward.py").write_text(f"NAME = {name!r}\n")
    assert (resolve_reward("a/reward.py:NAME"), resolve_reward("b/reward.py:NAME")) == ("a", "b")


def test_installed_module_and_builtin_are_found() -> None:
    from rlpost.rewards.builtin import tag_format

    assert resolve_reward("rlpost.rewards.builtin:tag_format") is tag_format
    assert resolve_reward("format") is tag_format


@pytest.fixture
def installed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed entry points: one that works and one whose module is missing."""
    points = [
        importlib.metadata.EntryPoint("judge_of_acme", "rlpost.rewards.builtin:exact_match", "rlpost.rewards"),
        importlib.metadata.EntryPoint("broken", "acme_is_not_installed.rewards:f", "rlpost.rewards"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point for point in points if point.group == group])


@pytest.mark.usefixtures("installed_plugins")
def test_entry_points_are_found_in_their_own_group_only() -> None:
    from rlpost.rewards.builtin import exact_match

    assert resolve_reward("judge_of_acme") is exact_match
    with pytest.raises(ConfigError, match="no environment is named 'judge_of_acme'"):
        resolve("judge_of_acme", kind="environment", group="rlpost.environments", catalogue={})
    with pytest.raises(ConfigError, match="Nearest known: judge_of_acme"):
        resolve_reward("judge_of_acm")


@pytest.mark.usefixtures("installed_plugins")
def test_entry_point_that_fails_to_load_shows_why() -> None:
    with pytest.raises(ConfigError, match=r"(?s)entry point 'acme_is_not_installed.rewards:f'.*No module named 'acme_is_not_installed'"):
        resolve_reward("broken")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact_mach", r"no reward is named 'exact_mach'. Nearest known: exact_match.*entry point \(group rlpost.rewards\)"),
        ("zzz", "Known: exact_match, format"),
        ("my_pkg.module.fn", "Did you mean my_pkg.module:fn"),
        ("my.py", "my.py:NAME"),
        ("missing/reward.py:f", r"'missing/reward.py' does not exist: looked for .*missing/reward.py"),
        ("no_such_package.module:f", "there is no module 'no_such_package'"),
        ("rlpost.no_such_module:f", "there is no module 'rlpost.no_such_module'"),
        ("present:f", "For a file, write its path: present.py:f"),
        ("present.py:functoin", "present.py has no attribute 'functoin'. Nearest: function"),
        ("present.py:zzz", "It defines: function"),
        ("present.py:", "there is nothing after the colon"),
        (":f", "there is nothing before the colon"),
        ("syntax.py:f", "(?s)raised SyntaxError while it was imported.*syntax.py.*line 2"),
        ("bug.py:f", r"(?s)raised ZeroDivisionError while it was imported.*bug.py., line 3.*1 / 0"),
        ("imports.py:f", "(?s)raised ModuleNotFoundError.*No module named 'not_there'"),
        ("exits.py:f", "raised SystemExit"),
    ],
)
def test_what_cannot_be_found_is_named_with_the_remedy(directory: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # `present` is a file here, not an importable module
    (directory / "present.py").write_text("from os import getcwd\ndef function(prompt, completion):\n    return 1.0\n")
    (directory / "syntax.py").write_text("x = 1\ndef f(:\n")
    (directory / "bug.py").write_text("def f(prompt, completion):\n    return 1.0\n1 / 0\n")
    (directory / "imports.py").write_text("import not_there\n")
    (directory / "exits.py").write_text("import sys\nsys.exit('no arguments')\n")
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_reward(spec)
    assert "importlib" not in str(caught.value)


def test_error_names_the_entry_of_the_configuration() -> None:
    from rlpost.config.schema import RewardConfig

    with pytest.raises(ConfigError, match=r"^rewards\[1\]: no reward is named 'nope'"):
        load_rewards([RewardConfig(function="exact_match"), RewardConfig(function="nope")])


def test_models_are_named_beside_functions_and_only_functions_are_loaded() -> None:
    from rlpost.config.schema import RewardConfig

    configs = [
        RewardConfig(model="runs/reward/exported/"),
        RewardConfig(function="exact_match"),
        RewardConfig(model="other/exported", name="second"),
        RewardConfig(function="my/rewards.py:C.reward"),
        RewardConfig(model="embedded:tiny-random"),
    ]
    assert reward_names(configs) == ["exported", "exact_match", "second", "C.reward", "tiny-random"]
    assert [reward.name for reward in load_rewards(configs[:3])] == ["exact_match"]
    with pytest.raises(ConfigError, match=r"^rewards\[1\]: no reward is named 'nope'"):
        load_rewards([RewardConfig(model="exported"), RewardConfig(function="nope")])
    with pytest.raises(ConfigError, match=r"rewards\[0\] and rewards\[1\] are both named 'exported'"):
        reward_names([RewardConfig(model="a/exported"), RewardConfig(model="b/exported")])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, r"rewards\[1\] has neither function nor model; give exactly one"),
        ({"function": "format", "model": "rm"}, r"rewards\[1\] has function='format' and model='rm'; give exactly one"),
        (
            {"model": "rm", "options": {"scale": 2}},
            r"rewards\[1\]: options \{'scale': 2\} are given to functions only, and 'rm' is a model",
        ),
    ],
)
def test_a_reward_is_exactly_one_of_a_function_and_a_model(entries: dict[str, Any], message: str) -> None:
    from rlpost.config.schema import RewardConfig

    with pytest.raises(ConfigError, match=message):
        load_rewards([RewardConfig(function="exact_match"), RewardConfig(**entries)])


def test_importing_rewards_loads_nothing_heavy() -> None:
    # A worker imports just this; torch or vllm would make each restart after a time-out cost ten seconds.
    code = "import sys, rlpost.rewards.runner, rlpost.rewards.worker, rlpost.plugins; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rlpost.rewards.worker" in loaded
    assert not {"torch", "ray", "vllm", "transformers", "sympy", "omegaconf"} & set(loaded)
