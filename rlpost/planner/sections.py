"""A plan as sections of sentences and tables: what its text and its page both show. Cells are text, every number carries its unit.

Every number is the plan's, rounded; what is worth less than a glance is marked as detail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlpost.planner.coefficients import BYTES, COEFFICIENTS, Calibration, Work
from rlpost.planner.footprint import Process
from rlpost.planner.lines import engine_gpus, standing_lines, used_coefficients
from rlpost.planner.parts import SplitPlan, SyncPlan, phase_times
from rlpost.planner.plan import Plan
from rlpost.planner.roles import PHASES
from rlpost.planner.split import Split
from rlpost.planner.tables import Section, Table, digits, gib, percent

# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(plan: Plan) -> Section:
    memory = plan.memory
    rows = [row for one in memory.processes for row in _process_rows(one, shared=memory.shared)]
    if memory.shared:
        rows.append(
            ("all processes", "", *("" for _ in PHASES), gib(memory.total_peak_bytes), gib(memory.shared_bytes),
             gib(memory.shared_bytes - memory.total_peak_bytes))
        )  # fmt: skip
    columns = ("process", ">count", *(f">{phase}" for phase in PHASES), ">peak", ">capacity", ">margin")
    details = tuple(_lines_table(one, plan.calibration) for one in memory.processes)
    most = plan.largest_micro_batch_tokens
    now = f"training.micro_batch_tokens is {plan.derived.micro_batch_tokens:,}"
    largest = f"largest micro-batch that fits: {most:,} tokens ({now})" if most else f"not even the smallest micro-batch fits ({now})"
    return Section(
        title=f"memory, GiB of each {'process' if memory.shared else 'GPU'}",
        sentences=(largest, *_engine_sentences(plan)),
        tables=(Table(columns=columns, rows=tuple(rows)), *details),
    )


def _process_rows(process: Process, *, shared: bool) -> list[tuple[str, ...]]:
    limits = ("", "") if shared else (gib(process.capacity_bytes), gib(process.margin_bytes))
    rows = [(process.name, str(process.count), *(gib(process.phase_bytes(phase)) for phase in PHASES), gib(process.peak[1]), *limits)]
    if len(process.roles) == 1:
        return rows
    for role in process.roles:
        sizes = (sum(one.bytes for one in process.table.entries if (one.role, one.phase) == (role, phase)) for phase in PHASES)
        rows.append((f"  of it {role}", "", *(gib(process.factor * size) for size in sizes), "", "", ""))
    return [*rows, ("  of it before models", "", *(gib(process.base_bytes) for _ in PHASES), "", "", "")]


def _lines_table(process: Process, calibration: Calibration) -> Table:
    rows = tuple(
        (one.role, one.name, gib(one.bytes), "all" if one.phases == PHASES else ", ".join(one.phases), one.basis, one.formula)
        for one in standing_lines(process, calibration)
    )
    columns = ("role", "line", ">GiB", "phases", "basis", "formula")
    return Table(columns=columns, rows=rows, caption=f"lines of {process.name}", detail=True)


def _engine_sentences(plan: Plan) -> tuple[str, ...]:
    engine = plan.engine
    if engine is None:
        return ()
    held = (
        f"KV cache of an engine: {engine.kv_tokens:,} tokens, which are {engine.concurrency_mean:,} sequences of mean length or "
        f"{engine.concurrency_longest:,} of the longest; a step wants {engine.wanted:,} at once"
    )
    if engine.memory_share is None:
        return (held,)
    if engine.memory_share > 1:
        return (held, f"for these it would need {engine.memory_share:.2f} of a GPU: raise engine.tensor_parallel or shorten sequences")
    return (held, f"engine.gpu_memory_utilization={math.ceil(100 * engine.memory_share) / 100:.2f} is enough for these")


# ---- time and sync ---------------------------------------------------------------------------------------------------


def _work_row(work: Work, calibration: Calibration) -> tuple[str, ...]:
    value = calibration.value(work.coefficient)
    product = f"{work.amount:.4g} x {value:.4g}"
    return (work.phase, work.coefficient, product, digits(work.amount * value), calibration.basis(work.coefficient), work.formula)


WORK_COLUMNS = ("phase", "coefficient", "amount x value", ">seconds", "basis", "formula of the amount")


def _time(plan: Plan) -> Section:
    step = plan.step
    rows = [(one.name, digits(one.seconds), percent(one.seconds / step.seconds), one.basis) for one in step.phases]
    rows.append(("whole step", digits(step.seconds), percent(1), ""))
    rows += [
        (f"one {name} (beside)", digits(value), percent(value / step.seconds), "")
        for name, value in (("evaluation", step.evaluation_s), ("checkpoint", step.checkpoint_s)) if value
    ]  # fmt: skip
    said = "phases follow one another"
    if step.overlap:
        generate, sync = step.phase_s("generate"), step.phase_s("sync")
        other = sum(one.seconds for one in step.phases) - generate - sync
        said = (
            f"generation ({digits(generate)} s) goes on beside training ({digits(other)} s): a step is the longer of them and the sync "
            f"({digits(sync)} s), so that shares exceed 100 %"
        )
    works = tuple(_work_row(work, plan.calibration) for one in step.phases for work in one.works)
    return Section(
        title="time of a step",
        sentences=(said,),
        tables=(
            Table(columns=("phase", ">seconds", ">of the step", "basis"), rows=tuple(rows)),
            Table(columns=WORK_COLUMNS, rows=works, caption="works of the phases", detail=True),
        ),
    )


def _sync(sync: SyncPlan, calibration: Calibration) -> Section:
    rows = []
    for name, value in sync.seconds.items():
        basis = phase_times(sync.works[name], calibration)[0].basis
        rows.append((name, digits(value), "this run's" if name == sync.chosen else "", basis))
    works = tuple((name, *_work_row(work, calibration)[1:]) for name, some in sync.works.items() for work in some)
    return Section(
        title="sync of weights",
        sentences=(f"in full {sync.full_gb:.4g} GB, as a delta {sync.delta_gb:.4g} GB; {break_even_words(sync)}",),
        tables=(
            Table(columns=("transport", ">seconds", "", "basis"), rows=tuple(rows)),
            Table(columns=("transport", *WORK_COLUMNS[1:]), rows=works, caption="works of a sync", detail=True),
        ),
    )


def break_even_words(sync: SyncPlan) -> str:
    """When a delta pays."""
    if sync.break_even_bytes_per_second is None:
        return "a delta does not pay at any bandwidth"
    if math.isinf(sync.break_even_bytes_per_second):
        return "a delta is quicker at every bandwidth"
    return f"a delta is quicker below {digits(sync.break_even_bytes_per_second / 1e9)} GB/s"


# ---- split -----------------------------------------------------------------------------------------------------------

SHOWN_SPLITS = 12


def thinned(split: SplitPlan) -> list[Split]:
    """At most ``SHOWN_SPLITS`` of the curve: the best, the present, their neighbours, then others evenly."""
    curve = list(split.curve)
    marked = [place for place, one in enumerate(curve) if one == split.best or _present(one, split)]
    near = {place + step for place in marked for step in (-1, 0, 1) if 0 <= place + step < len(curve)}
    others = SHOWN_SPLITS - len(near)
    kept = sorted(near | {round(part * (len(curve) - 1) / (others - 1)) for part in range(others)})
    return [curve[place] for place in kept]


def _present(one: Split, split: SplitPlan) -> bool:
    return (one.trainer_gpus, one.rollout_gpus) == split.present


def _split(plan: Plan, split: SplitPlan) -> Section:
    rows = []
    for one in thinned(split):
        marks = [word for word, true in (("best", one == split.best), ("present", _present(one, split))) if true]
        numbers = (str(one.trainer_gpus), str(one.rollout_gpus), *(digits(value) for value in (one.train_s, one.generate_s, one.step_s)))
        rows.append((*numbers, percent(one.trainer_idle), percent(one.rollout_idle), ", ".join(marks)))
    best = split.best
    columns = (">trainer GPUs", ">rollout GPUs", ">train s", ">generate s", ">step s", ">trainer idle", ">rollout idle", "")
    return Section(
        title="split of the GPUs",
        sentences=(
            f"balance point: {best.trainer_gpus} trainer and {best.rollout_gpus} rollout GPUs, {digits(best.step_s)} s a step, pipelined; "
            f"colocated, {digits(split.colocated_s)} s; the longest answer alone takes {digits(split.floor_s)} s on any number of engines",
            split_verdict(plan, split),
        ),
        tables=(Table(columns=columns, rows=tuple(rows)),),
    )


def split_verdict(plan: Plan, split: SplitPlan) -> str:
    """The quicker placement, and the settings that make it."""
    verdict, degree, best = split.verdict, engine_gpus(plan), split.best
    total = best.trainer_gpus + best.rollout_gpus
    pipelined, colocated = verdict.mode == "split", plan.memory.process("trainer and engine") is not None
    said = f"{verdict.mode} is quicker, the other takes {percent(verdict.gain)} longer"
    if colocated if not pipelined else plan.step.overlap and _present(best, split):
        return f"{said}: the run does so already"
    if pipelined:
        settings = f"training.ranks={best.trainer_gpus} engine.count={best.rollout_gpus // degree}"
        settings += "" if plan.step.overlap else " schedule.max_staleness=1"
    else:
        settings = f"training.ranks={total} engine.count={total} schedule.max_staleness=0"
        settings += " engine.tensor_parallel=1, if an engine has room on one GPU" if degree > 1 else ""
    return f"{said}: set placement.mode={verdict.mode} {settings}"


# ---- the rest --------------------------------------------------------------------------------------------------------


def _prefill(prefill: Mapping[str, int]) -> Section:
    most = prefill["none"]
    rows = tuple((reuse, f"{tokens:,}", percent(1 - tokens / most if most else 0)) for reuse, tokens in prefill.items())
    columns = ("reuse", ">prompt tokens computed", ">saved")
    return Section(title="agents: reuse of prefixes in a step", tables=(Table(columns=columns, rows=rows),))


def _imbalance(imbalance: Mapping[float, float]) -> Section:
    rows = tuple((f"{violation:g}", f"{factor:.3f}") for violation, factor in imbalance.items())
    sentence = "how much longer training takes when the fullest rank of experts has that much more than the mean (MaxVio)"
    return Section(title="mixture", sentences=(sentence,), tables=(Table(columns=(">MaxVio", ">x time"), rows=rows),))


def _packing(plan: Plan) -> tuple[Section, ...]:
    packing = plan.packing
    if packing is None:
        return ()
    rows = (("padded as they come", packing.padded), ("padded by length", packing.by_length), ("packed", packing.packed))
    sentence = (
        f"{packing.sequences:,} sequences of the length file; {packing.truncated:.1%} are longer than a micro-batch and would be refused; "
        f"the fewest rows that could hold them are {percent(packing.efficiency)} of those that packing fills"
    )
    table = Table(columns=("rows", ">occupied"), rows=tuple((name, f"{share:.1%}") for name, share in rows))
    return (Section(title="packing", sentences=(sentence,), tables=(table,)),)


def _rests_on(plan: Plan) -> Section:
    """What was given, and every coefficient that was used."""
    used, calibration = used_coefficients(plan), plan.calibration
    inputs = Table(columns=("input", ">value", "basis"), rows=tuple((one.name, one.value, one.basis) for one in plan.given))
    rows = tuple((name, *_coefficient_value(calibration, name), calibration.basis(name)) for name in used)
    words = Table(columns=("coefficient", "what it is"), rows=tuple((name, COEFFICIENTS[name].doc) for name in used), detail=True)
    measured = [name for name in used if name in calibration.measured]
    said = f"{len(measured)} of {len(used)} coefficients are measured, the others assumed"
    if measured:
        said += f"; sources: {', '.join(sorted({calibration.measured[name].source for name in measured}))}"
    else:
        said += f"; {HOW_TO_CALIBRATE}"
    return Section(
        title="assumed and measured",
        sentences=(said,),
        tables=(inputs, Table(columns=("coefficient", ">value", "unit", "basis"), rows=rows), words),
    )


HOW_TO_CALIBRATE = (
    "to measure them: run a few steps on this machine, `python -m rlpost.plan calibrate RUN`, and plan with calibration=calibration.yaml"
)


def _coefficient_value(calibration: Calibration, name: str) -> tuple[str, str]:
    value, unit = calibration.value(name), COEFFICIENTS[name].unit
    return (gib(value), "GiB") if unit == BYTES else (f"{value:.4g}", unit)


def sections(plan: Plan) -> tuple[Section, ...]:
    """All that apply to the run, in the order in which they are read."""
    return (
        _memory(plan),
        _time(plan),
        *((_sync(plan.sync, plan.calibration),) if plan.sync else ()),
        *((_split(plan, plan.split),) if plan.split else ()),
        *((_prefill(plan.prefill),) if plan.prefill else ()),
        *((_imbalance(plan.imbalance),) if plan.imbalance else ()),
        *_packing(plan),
        Section(title="cost", sentences=(plan.cost.formula,)),
        _rests_on(plan),
    )
