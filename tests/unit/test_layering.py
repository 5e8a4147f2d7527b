"""DESIGN, section 4: imports point downwards only, and the pure parts import neither Ray nor vLLM. Read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import rlpost

ROOT = Path(rlpost.__file__).parent

LAYERS = [
    {"train", "plan", "doctor", "bench", "report", "launch"},
    {"diagnosis"},
    {"driver"},
    {"rollout", "training", "weights", "checkpoint", "cluster"},
    {"algorithms", "data", "environments", "rewards", "observe", "planner", "models", "jobs"},
    {"plugins"},
    {"types", "config"},
]
"""From the top. ``diagnosis`` (what rlpost.doctor checks), ``jobs`` (what launches a run in a scheduler), ``models`` (the embedded models
and tasks, read by ``data``) and ``plugins`` (names to objects) are not named there."""

ENTRY_POINTS = {"rewards.__main__", "models.__main__", "checkpoint.__main__"}
"""``python -m rlpost.PACKAGE``: entry points that live in their package."""

PURE = [
    "algorithms", "planner", "config", "types", "data",
    "jobs.needs", "jobs.slurm", "jobs.slurm_commands", "jobs.kuberay", "jobs.kube_commands", "jobs.manifest_checks", "jobs.packaging",
    "rollout.buffer", "rollout.router", "rollout.episode", "rollout.collector",
    "weights.buckets", "weights.fingerprint", "weights.delta", "weights.policy",
    "weights.sender", "weights.collective", "weights.ipc", "weights.disk",
]  # fmt: skip
"""Packages and modules that must import neither Ray nor vLLM."""

WITHOUT_TORCH = [
    "types", "config", "data", "observe", "rewards", "environments", "plugins", "planner", "jobs",
    "rollout.buffer", "rollout.collector", "training.packing", "driver.batch",
]  # fmt: skip
"""What the driver process loads before a run starts, or a reward worker does: torch costs seconds and memory there."""


@dataclass(frozen=True)
class Import:
    """``importer`` imports ``target`` (a module of rlpost without its prefix, or another top-level package)."""

    importer: str
    target: str
    own: bool
    line: int
    at_import: bool
    """At module level, so that importing ``importer`` imports it."""


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for statement in child.orelse:
                yield from _walk(statement, at_import)
        else:
            yield from _walk(child, at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


@cache
def imports_of(module: str) -> list[Import]:
    found = []
    for statement, at_import in _walk(ast.parse(MODULES[module].read_text()), True):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            assert statement.level == 0, f"{module}:{statement.lineno}: a relative import"
            source = statement.module or ""
            # `from rlpost.x import y` imports y as well when it is a module.
            names = [f"{source}.{a.name}" if f"{source}.{a.name}".removeprefix("rlpost.") in MODULES else source for a in statement.names]
        for name in names:
            own = name == "rlpost" or name.startswith("rlpost.")
            target = name.removeprefix("rlpost").removeprefix(".") if own else name.split(".")[0]
            found.append(Import(module, target, own, statement.lineno, at_import))
    return found


def layer(module: str) -> int:
    if module in ENTRY_POINTS:
        return 0
    return next(depth for depth, names in enumerate(LAYERS) if module.split(".")[0] in names)


def modules_in(*names: str) -> list[str]:
    return [module for module in MODULES if any(module == name or module.startswith(name + ".") for name in names)]


def reached_when_importing(module: str) -> Iterator[tuple[list[str], Import]]:
    """Every import that runs when ``module`` is imported, with the way to it; parents' ``__init__`` run too."""
    seen: set[str] = set()
    todo = [[module]]
    while todo:
        way = todo.pop()
        current = way[-1]
        if current in seen or current not in MODULES:
            continue
        seen.add(current)
        if "." in current:
            todo.append([*way, current.rpartition(".")[0]])
        for found in imports_of(current):
            if found.at_import:
                yield way, found
                if found.own:
                    todo.append([*way, found.target])


def test_every_module_has_a_layer() -> None:
    known = set().union(*LAYERS)
    assert {module.split(".")[0] for module in MODULES if module} <= known


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m))
def test_imports_point_downwards_only(module: str) -> None:
    """Inside functions too: a late import upwards is still a dependency upwards."""
    upwards = [f"line {i.line}: rlpost.{i.target}" for i in imports_of(module) if i.own and i.target and layer(i.target) < layer(module)]
    assert not upwards, f"rlpost.{module} imports from a layer above: {upwards}"


@pytest.mark.parametrize("package", PURE)
def test_pure_parts_import_neither_ray_nor_vllm_by_whatever_way(package: str) -> None:
    for module in modules_in(package):
        for way, found in reached_when_importing(module):
            assert found.target not in ("ray", "vllm") or found.own, f"{' -> '.join(way)} imports {found.target} (line {found.line})"
        for found in imports_of(module):
            assert found.own or found.target not in ("ray", "vllm"), f"{module}:{found.line} imports {found.target} in a function"


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_what_a_driver_or_a_reward_worker_loads_does_not_bring_torch(package: str) -> None:
    for module in modules_in(package):
        for way, found in reached_when_importing(module):
            assert found.own or found.target != "torch", f"{' -> '.join(way)} imports torch (line {found.line})"


def test_the_driver_does_not_bring_torch() -> None:
    """It would hold some 200 MB beside the trainers, and take two seconds to start."""
    ways = [" -> ".join(way) for way, found in reached_when_importing("driver.run") if found.target.split(".")[0] == "torch"]
    assert ways == []


def test_only_loss_terms_among_the_algorithms_use_torch() -> None:
    """What the driver calls (advantages, filters, weights) works without it."""
    users = {module for module in modules_in("algorithms") for found in imports_of(module) if found.target == "torch" and not found.own}
    assert users <= {f"algorithms.{name}" for name in ("losses", "policy", "kl", "value", "preference", "correction")}


def test_the_check_sees_what_it_must() -> None:
    """A module level import of Ray, found through another module, and a late one of vLLM: the check can fail."""
    assert any(found.target == "ray" and len(way) > 1 for way, found in reached_when_importing("weights.coordinator"))
    late = [found for found in imports_of("weights.receiver") if found.target == "vllm"]
    assert late and not any(found.own or found.at_import for found in late)
    assert layer("driver.online") < layer("rollout.pool") < layer("algorithms.online") < layer("types")
