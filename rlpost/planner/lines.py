"""What a plan's numbers consist of: a process's memory line by line, and the coefficients that were used."""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.planner.coefficients import COEFFICIENTS, Calibration
from rlpost.planner.footprint import Process
from rlpost.planner.plan import Plan
from rlpost.planner.quantities import GIB
from rlpost.planner.roles import PHASES, Phase


@dataclass(frozen=True, kw_only=True)
class StandingLine:
    """Something that stands in a process's memory in ``phases``, equally large in each of them."""

    role: str
    name: str
    bytes: float
    formula: str
    basis: str
    phases: tuple[Phase, ...]


def memory_coefficients(process: Process) -> tuple[tuple[str, ...], str]:
    """Names of the coefficients of a process's base (several of roles that share a GPU), and of its factor."""
    kind = "engine" if process.roles == ("engine",) else "trainer"
    bases = ("trainer", "engine") if len(process.roles) > 1 else (kind,)
    return tuple(f"{base}_base_bytes" for base in bases), f"{kind}_memory_factor"


def standing_lines(process: Process, calibration: Calibration) -> tuple[StandingLine, ...]:
    """All lines, each once with its phases: those of a phase add up to the process's bytes in it."""
    bases, factor = memory_coefficients(process)
    phases: dict[tuple[str, str, float, str, str], list[Phase]] = {}
    base_formula = " + ".join(f"{name} {calibration.value(name) / GIB:.4g} GiB" for name in bases)
    phases[("", "before it has a model", process.base_bytes, base_formula, process.basis)] = list(PHASES)
    for entry in process.table.entries:
        for line in entry.lines:
            if line.bytes:
                phases.setdefault((entry.role, line.name, line.bytes, line.formula, line.basis), []).append(entry.phase)
    if process.factor != 1:
        for phase in PHASES:
            size = process.table.phase_bytes(phase)
            formula = f"({factor} {process.factor:g} - 1) x {size / GIB:.4g} GiB of lines"
            phases.setdefault(("", "held beyond that", (process.factor - 1) * size, formula, calibration.basis(factor)), []).append(phase)
    return tuple(
        StandingLine(role=role, name=name, bytes=size, formula=formula, basis=basis, phases=tuple(some))
        for (role, name, size, formula, basis), some in phases.items()
    )


def used_coefficients(plan: Plan) -> list[str]:
    """Names of all coefficients that a number of the plan rests on, in the order in which they are documented."""
    works = [work for phase in plan.step.phases for work in phase.works]
    if plan.sync is not None:
        works += [work for some in plan.sync.works.values() for work in some]
    used = {work.coefficient for work in works} | {"checkpoint_bytes", "checkpoint_s"}
    for process in plan.memory.processes:
        bases, factor = memory_coefficients(process)
        used |= {*bases, factor}
    return [name for name in COEFFICIENTS if name in used]


def engine_gpus(plan: Plan) -> int:
    """GPUs of one engine; 1 on CPU, 0 without engines."""
    process = plan.memory.process("engine") or plan.memory.process("trainer and engine")
    return process.count // plan.derived.engines if process else 0


def planned_steps(plan: Plan) -> int:
    """Steps of the whole run."""
    return plan.derived.optimizer_steps // (plan.derived.algorithm.minibatches * plan.derived.algorithm.epochs)
