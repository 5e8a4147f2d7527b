"""A plan as JSON: every number of its text, unrounded, with its unit in its key and what it rests on in ``basis``.

Top level (keys that do not apply to a run are null):

- ``name``, ``fits``, ``warnings``, ``advice`` (``changes``, ``cost``, ``fits_with_changes``, ``notes``)
- ``inputs`` (``name``, ``value`` as text, ``basis``)
- ``model``, ``machine``, ``algorithm``: what the run is; counts of parameters, GPUs, ranks, engines, samples
- ``memory``: ``processes`` with ``phases_bytes`` (phase -> bytes), ``peak_bytes``, ``capacity_bytes``, ``margin_bytes`` and ``lines``
  (``role``, ``name``, ``bytes``, ``phases``, ``basis``, ``formula``). Where all share one memory (CPU) it is ``shared_bytes``, and a
  process's capacity and margin are null
- ``engine``: KV cache in tokens, sequences at once
- ``time``: ``step_s``, ``phases`` with ``seconds`` and ``works``; a work is ``amount`` x ``value`` of ``coefficient``
- ``sync``: ``transports``; ``delta_pays`` is ``always``, ``never`` or ``below_break_even``
- ``split``: the whole ``curve``; ``prefill_tokens`` (reuse -> tokens), ``imbalance`` (``max_violation``, ``time_factor``)
- ``packing``: occupancies and shares, 0 to 1
- ``cost``: ``hours``, ``gpu_hours`` (on CPU of the machine), ``money`` in the price's currency, null without a price
- ``coefficients``: ``name``, ``value``, ``unit``, ``basis`` of each that was used
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlpost.planner.coefficients import COEFFICIENTS, Calibration, Work
from rlpost.planner.footprint import Process
from rlpost.planner.lines import engine_gpus, planned_steps, standing_lines, used_coefficients
from rlpost.planner.parts import SplitPlan, SyncPlan, phase_times
from rlpost.planner.plan import Plan, used_gpus
from rlpost.planner.roles import PHASES
from rlpost.planner.split import Split

if TYPE_CHECKING:
    from rlpost.planner.advice import Advice


def plan_to_json(plan: Plan, *, advice: Advice | None = None) -> dict[str, Any]:
    """What the module's words describe: only dicts, lists, text, finite numbers, booleans and None."""
    calibration = plan.calibration
    return {
        "name": plan.name,
        "fits": plan.fits,
        "advice": None if advice is None else {**asdict(advice), "changes": list(advice.changes), "notes": list(advice.notes)},
        "warnings": list(plan.warnings),
        **_run(plan),
        "memory": {
            "processes": [_process(one, calibration, shared=plan.memory.shared) for one in plan.memory.processes],
            "total_peak_bytes": plan.memory.total_peak_bytes,
            "shared_bytes": plan.memory.shared_bytes if plan.memory.shared else None,
            "micro_batch_tokens": plan.derived.micro_batch_tokens,
            "largest_micro_batch_tokens": plan.largest_micro_batch_tokens,
        },
        "engine": None if plan.engine is None else {
            "kv_tokens": plan.engine.kv_tokens,
            "mean_sequences": plan.engine.concurrency_mean,
            "longest_sequences": plan.engine.concurrency_longest,
            "wanted_sequences": plan.engine.wanted,
            "gpu_memory_utilization": plan.engine.memory_share,
        },
        "time": _time(plan),
        "sync": None if plan.sync is None else _sync(plan.sync, calibration),
        "split": None if plan.split is None else _split(plan.split),
        "prefill_tokens": None if plan.prefill is None else dict(plan.prefill),
        "imbalance": None if plan.imbalance is None else [
            {"max_violation": violation, "time_factor": factor} for violation, factor in plan.imbalance.items()
        ],
        "packing": None if plan.packing is None else asdict(plan.packing),
        "cost": {"steps": planned_steps(plan), **asdict(plan.cost)},
        "inputs": [asdict(one) for one in plan.given],
        "coefficients": [
            {"name": name, "value": calibration.value(name), "unit": COEFFICIENTS[name].unit, "basis": calibration.basis(name)}
            for name in used_coefficients(plan)
        ],
    }  # fmt: skip


def _run(plan: Plan) -> dict[str, Any]:
    """The model, the machine, and what runs on it."""
    derived, shape = plan.derived, plan.shape
    return {
        "model": {
            "name": shape.name, "family": shape.family, "parameters": shape.parameters, "active_parameters": shape.active_parameters,
            "dtype": derived.dtype,
        },
        "machine": {
            "name": plan.hardware.name, "device": plan.hardware.device, "nodes": plan.hardware.nodes,
            "gpus": plan.hardware.gpus if derived.device == "gpu" else 0, "used_gpus": used_gpus(derived) if derived.device == "gpu" else 0,
        },
        "algorithm": {
            "name": derived.algorithm.name, "offline": derived.offline, "samples_per_step": plan.workload.samples,
            "sampled_tokens_per_step": 0 if derived.offline else plan.step.sampled_tokens, "trainer_ranks": derived.ranks,
            "critic_ranks": derived.critic_ranks, "engines": derived.engines, "gpus_per_engine": engine_gpus(plan),
        },
    }  # fmt: skip


def _process(process: Process, calibration: Calibration, *, shared: bool) -> dict[str, Any]:
    return {
        "name": process.name,
        "roles": list(process.roles),
        "count": process.count,
        "phases_bytes": {phase: process.phase_bytes(phase) for phase in PHASES},
        "peak_phase": process.peak[0],
        "peak_bytes": process.peak[1],
        "capacity_bytes": None if shared else process.capacity_bytes,
        "margin_bytes": None if shared else process.margin_bytes,
        "basis": process.basis,
        "lines": [{**asdict(one), "phases": list(one.phases)} for one in standing_lines(process, calibration)],
    }


def _works(works: Sequence[Work], calibration: Calibration) -> list[dict[str, Any]]:
    return [
        {
            "coefficient": one.coefficient, "amount": one.amount, "value": calibration.value(one.coefficient),
            "seconds": one.amount * calibration.value(one.coefficient), "basis": calibration.basis(one.coefficient), "formula": one.formula,
        }
        for one in works
    ]  # fmt: skip


def _time(plan: Plan) -> dict[str, Any]:
    step = plan.step
    return {
        "step_s": step.seconds,
        "overlap": step.overlap,
        "generation_share": None if plan.derived.offline else step.generation_share,
        "sampled_tokens_per_s": None if plan.derived.offline else step.tokens_per_second,
        "phases": [
            {
                "name": one.name, "seconds": one.seconds, "share": one.seconds / step.seconds, "basis": one.basis,
                "works": _works(one.works, plan.calibration),
            }
            for one in step.phases
        ],
        "evaluation_s": step.evaluation_s,
        "checkpoint_s": step.checkpoint_s,
    }  # fmt: skip


def _sync(sync: SyncPlan, calibration: Calibration) -> dict[str, Any]:
    bandwidth = sync.break_even_bytes_per_second
    pays = "never" if bandwidth is None else "always" if math.isinf(bandwidth) else "below_break_even"
    return {
        "transports": [
            {
                "name": name, "seconds": value, "chosen": name == sync.chosen,
                "basis": phase_times(sync.works[name], calibration)[0].basis, "works": _works(sync.works[name], calibration),
            }
            for name, value in sync.seconds.items()
        ],
        "full_bytes": sync.full_gb * 1e9,
        "delta_bytes": sync.delta_gb * 1e9,
        "delta_pays": pays,
        "break_even_bytes_per_second": bandwidth if pays == "below_break_even" else None,
    }  # fmt: skip


def _split(split: SplitPlan) -> dict[str, Any]:
    return {
        "curve": [_point(one) for one in split.curve],
        "best": _point(split.best),
        "present_trainer_gpus": split.present[0],
        "present_rollout_gpus": split.present[1],
        "colocated_s": split.colocated_s,
        "longest_answer_s": split.floor_s,
        "quicker": split.verdict.mode,
        "gain": split.verdict.gain,
    }


def _point(one: Split) -> dict[str, Any]:
    return {**asdict(one), "trainer_idle": one.trainer_idle, "rollout_idle": one.rollout_idle}
