"""Several plans in one table: other configurations, or the same model and batch with other algorithms, methods and precisions.

Model states are counted as methods are compared by: what training holds of the models that it trains, copies in the engines' dtype, over
all GPUs, without activations and KV. FLOPs are nominal: 2 a parameter and token in a forward, 4 in a backward.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rlpost.config.algorithms import OFFLINE, ONLINE_DEFAULTS, PAIRED, is_offline
from rlpost.config.checks import check
from rlpost.config.derive import longest_sequence, needed_model_len, resolve_reference
from rlpost.config.schema import AlgorithmConfig, RewardConfig, RunConfig
from rlpost.planner.cost import SECONDS_AN_HOUR, run_cost
from rlpost.planner.footprint import DTYPE_BYTES, trained_parameters
from rlpost.planner.hardware import Hardware
from rlpost.planner.memory import MemoryLine, find_recipe, line, lora_lines, qlora_base_lines, state_lines, total_bytes
from rlpost.planner.options import PlanOptions
from rlpost.planner.plan import Plan, make_plan, plan_hardware, used_gpus
from rlpost.planner.quantities import GB, GIB, require_choice
from rlpost.planner.roles import resident_lines
from rlpost.planner.shapes import ModelShape
from rlpost.planner.workload import given_or
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan's figures; ``problem`` in place of them when there can be no such run."""

    name: str
    problem: str | None = None
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of each resident model, over all GPUs."""
    peak_gib: Mapping[str, float] = field(default_factory=dict)
    """Of one GPU of each process (on CPU: of the process)."""
    fits: bool | None = None
    flops_per_token: float | None = None
    """For each token of a sequence that is trained on."""
    flops_per_prompt: float | None = None
    """For all answers to one prompt; offline: for one row."""
    flops_formula: str = ""
    sampled_tokens: int | None = None
    """That engines sample in a step."""
    step_s: float | None = None
    generation_share: float | None = None
    gpus: int | None = None
    gpu_hours: float | None = None
    """To the configuration's last step."""
    money: float | None = None
    trained: bool = True
    """False: computed, and not what rlpost can train."""
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "notes": list(self.notes)}


def compare(plans: Sequence[tuple[str, RunConfig, Plan]]) -> list[Row]:
    """A row for each named configuration and its plan."""
    return [plan_row(name, config, plan) for name, config, plan in plans]


def plan_row(name: str, config: RunConfig, plan: Plan, *, quantised: bool = False, trained: bool = True, notes: Iterable[str] = ()) -> Row:
    """The figures of one plan. ``quantised``: the frozen model is in four bits."""
    flops, formula = flops_per_token(config, plan)
    gpus, offline = used_gpus(plan.derived), plan.derived.offline
    too_many = [f"asks for {gpus} GPUs of {plan.hardware.gpus}"] if plan.hardware.device == "gpu" and gpus > plan.hardware.gpus else []
    return Row(
        name=name,
        state_bytes=state_bytes(config, plan, quantised=quantised),
        peak_gib={one.name: one.peak[1] / GIB for one in plan.memory.processes},
        fits=plan.fits,
        flops_per_token=flops,
        flops_per_prompt=flops * sum(plan.workload.lengths) / plan.workload.groups,
        flops_formula=formula,
        sampled_tokens=0 if offline else plan.step.sampled_tokens,
        step_s=plan.step.seconds,
        generation_share=plan.step.generation_share,
        gpus=gpus,
        gpu_hours=plan.cost.gpu_hours,
        money=plan.cost.money,
        trained=trained,
        notes=(*notes, *too_many),
    )


def state_bytes(config: RunConfig, plan: Plan, *, quantised: bool = False) -> dict[str, int]:
    """Bytes of every resident model over all GPUs, all of the policy's size."""
    derived, parameters = plan.derived, plan.shape.parameters
    recipe = find_recipe(config.training.optimizer.name)
    reward = plan.memory.process("reward")
    counts: dict[str, int] = {
        "policy": 1,
        "critic": int(derived.critic_ranks > 0),
        "reference": int(derived.reference in ("initial", "actor", "moving_average")),
        "reward": reward.count if reward else 0,
        "engine": int(not derived.offline),
    }
    lines = resident_lines("ppo", parameters, recipe, copy_bytes=DTYPE_BYTES[derived.dtype])
    found = {one.name: counts[one.name] * one.bytes for one in lines if counts[one.name]}
    if config.training.lora.rank:
        base, *adapters = lora_lines(parameters, trained_parameters(config, plan.shape), recipe, base_bytes_per_parameter=recipe.weights)
        found["policy"] = total_bytes((*(quantised_lines(plan.shape) if quantised else (base,)), *adapters))
    else:
        found["policy"] = total_bytes(state_lines(parameters, recipe, matrix_parameters=plan.shape.matrix_parameters))
    return {role: found[role] for role in counts if role in found}


def flops_per_token(config: RunConfig, plan: Plan) -> tuple[float, str]:
    """Nominal FLOPs of a sequence's token, and their sum in words; P are the parameters that a token is multiplied with.

    Frozen weights get no gradient (2P less). What checkpointing computes again and attention's scores are left out, and so is what
    prefix caches save.
    """
    derived = plan.derived
    epochs = derived.algorithm.epochs
    parts = [("update", (4 if config.training.lora.rank else 6) * epochs)]
    if not derived.offline:
        parts.append(("decoding", 2))
        parts += [("old logprobs", 2)] if derived.old_logprobs == "recompute" else []
    parts += [("reference", 2)] if derived.reference not in ("none", "precomputed") else []
    if derived.critic_ranks:
        parts.append(("critic", 2 + 6 * epochs))
    parts += [("reward model", 2)] if plan.memory.process("reward") else []
    return sum(factor for _, factor in parts) * float(plan.shape.multiplied_parameters), " + ".join(f"{f}P {name}" for name, f in parts)


# ---- variants --------------------------------------------------------------------------------------------------------

METHODS = ("full", "lora", "qlora")
PRECISIONS = ("bf16", "fp8")
LORA_RANK = 16


def variants(
    config: RunConfig, options: PlanOptions, *, algorithms: Sequence[str] = (), methods: Sequence[str] = (), precisions: Sequence[str] = ()
) -> list[Row]:
    """A row for every combination of these, each otherwise like ``config``; an empty list keeps what the configuration says.

    Raises ConfigError for names that are not known or given twice; what cannot be combined is a row that says why.
    """
    own = config.algorithm.name
    _check_list("algorithms", algorithms, dict.fromkeys((own, *ONLINE_DEFAULTS, *OFFLINE)))
    _check_list("methods", methods, METHODS)
    _check_list("precisions", precisions, PRECISIONS)
    hardware = plan_hardware(config, options)
    return [
        _variant_row(config, options, hardware, chosen)
        for chosen in itertools.product(algorithms or (None,), methods or (None,), precisions or (None,))
    ]


def _check_list(name: str, given: Sequence[str], known: Iterable[str]) -> None:
    for one in given:
        require_choice(name, one, known)
        if given.count(one) > 1:
            raise ConfigError(f"{name} names {one} {given.count(one)} times; expected each once")


Chosen = tuple[str | None, str | None, str | None]
"""Algorithm, method and precision; None is the configuration's own."""


def _variant_row(config: RunConfig, options: PlanOptions, hardware: Hardware, chosen: Chosen) -> Row:
    algorithm, method, precision = chosen
    name = " ".join(part for part in chosen if part)
    changed, notes = copy.deepcopy(config), []
    changed.placement.device = hardware.device
    try:
        _refuse_impossible(hardware, method, precision)
        if algorithm is not None and algorithm != config.algorithm.name:
            notes += _switch_algorithm(changed, algorithm)
            if not is_offline(config.algorithm):  # data sets' prompts are as long as the engines' were
                options = replace(options, prompt_tokens=given_or(options.prompt_tokens, config.data.max_prompt_tokens))
        if method is not None:
            _switch_method(changed, method)
        if precision is not None:
            changed.model.dtype = "bfloat16"
        check(changed)
        plan = make_plan(changed, options, hardware=hardware)
    except ConfigError as error:
        return Row(name=name, problem=str(error))
    if method == "qlora":
        plan = _with_quantised_base(plan)
    if precision == "fp8":
        plan = _with_fp8(plan, changed, options)
    trained = method != "qlora" and precision != "fp8"
    return plan_row(name, changed, plan, quantised=method == "qlora", trained=trained, notes=notes)


def _refuse_impossible(hardware: Hardware, method: str | None, precision: str | None) -> None:
    if precision != "fp8":
        return
    one = hardware.accelerator
    if one.fp8_flops_per_second is None:
        raise ConfigError(f"precision fp8 with {one.name}: it has no FP8 arithmetic (Ada, Hopper and Blackwell GPUs have); take bf16")
    if method == "qlora":
        raise ConfigError("precision fp8 with qlora: its 4-bit weights are multiplied in bfloat16; take full or lora, or bf16")


def _switch_algorithm(config: RunConfig, name: str) -> list[str]:
    """Change ``config`` to another algorithm with the same model, batch and lengths; what had to be made up, in words."""
    before, was_offline = config.algorithm, is_offline(config.algorithm)
    after = AlgorithmConfig(name=name, group_size=before.group_size, critic=before.critic)
    if is_offline(after):
        if not was_offline:
            config.data.max_tokens = needed_model_len(config)[0]
        after.reference = "precomputed" if before.reference == "precomputed" and name == "dpo" else "initial"
    else:
        after.minibatches, after.epochs = before.minibatches, before.epochs
        after.kl_coefficient = before.kl_coefficient
        after.reference = "actor" if before.reference == "actor" and before.kl_coefficient else "initial"
        if was_offline:
            config.data.max_prompt_tokens = max(1, config.data.max_tokens // 4)
            config.sampling.max_new_tokens = max(1, config.data.max_tokens - config.data.max_prompt_tokens)
    config.algorithm = after
    notes = []
    if name == "ppo":
        after.critic.ranks = config.training.ranks
        if not any(reward.model for reward in config.rewards):
            config.rewards = [RewardConfig(model=config.model.path)]
        notes = [f"critic of the same size on {after.critic.ranks} rank(s), reward model of the same size"]
    elif not is_offline(after) and not config.rewards:
        config.rewards = [RewardConfig(function="exact_match")]
    needed = longest_sequence(config)[0] * (2 if name in PAIRED else 1)
    if config.training.micro_batch_tokens < needed:
        config.training.micro_batch_tokens = needed
        notes.append(f"micro-batches of {needed} tokens, to hold the longest sequence{' of both answers' if name in PAIRED else ''}")
    return notes


def _switch_method(config: RunConfig, method: str) -> None:
    """With adapters the frozen model is the reference, if there is one; without, a copy is."""
    algorithm, lora = config.algorithm, config.training.lora
    lora.rank = 0 if method == "full" else lora.rank or LORA_RANK
    if lora.rank and resolve_reference(config) == "initial" and algorithm.reference_path is None:
        algorithm.reference = "adapters_off"
    elif not lora.rank and algorithm.reference == "adapters_off":
        algorithm.reference = "initial"


# ---- what rlpost does not train with ---------------------------------------------------------------------------------


def _with_quantised_base(plan: Plan) -> Plan:
    """The frozen weights in NF4 wherever the policy has them. Time stays that of LoRA: what unpacking costs is not known."""
    ranks = plan.derived.ranks
    base = [line(one.name, one.bytes / ranks, f"{one.formula} / {ranks} ranks") for one in quantised_lines(plan.shape)]

    def changed(lines: tuple[MemoryLine, ...]) -> tuple[MemoryLine, ...]:
        return tuple(new for old in lines for new in (base if old.name == "frozen weights" else (old,)))

    processes = tuple(
        replace(process, table=replace(process.table, entries=tuple(replace(e, lines=changed(e.lines)) for e in process.table.entries)))
        for process in plan.memory.processes
    )
    return replace(plan, memory=replace(plan.memory, processes=processes))


def quantised_lines(shape: ModelShape) -> tuple[MemoryLine, ...]:
    """QLoRA's base: the layers' linear matrices, and experts, in NF4."""
    quantised = sum(one.elements for one in shape.linears) + shape.parts["experts"]
    return qlora_base_lines(quantised, shape.parameters - quantised)


FP8_SPEEDUPS = ((1e9, 1.05), (8e9, 1.28), (70e9, 1.43))
"""Parameters, and how many times faster FP8 training was than bfloat16: about 5 % of a small model (Karpathy; its size is taken to be 1e9),
8,532 over 6,667 tokens/s of 8B (torchtitan's benchmarks; NeMo: 1.30), 70B (NeMo). Memory was the same: 77.0 and 76.8 GiB of 8B."""
TRAINED_PHASES = ("old_logprob", "reference", "values", "update")


def fp8_speedup(parameters: float) -> float:
    """Between the measured sizes in proportion to the logarithm of the size; beyond them that of the nearest."""
    sizes, speedups = zip(*FP8_SPEEDUPS, strict=True)
    return float(np.interp(math.log(parameters), np.log(sizes), speedups))


def _with_fp8(plan: Plan, config: RunConfig, options: PlanOptions) -> Plan:
    """Trainers quicker as measured, engines and memory as they were."""
    speedup = fp8_speedup(plan.shape.active_parameters)
    phases = tuple(replace(phase, seconds=phase.seconds / speedup) if phase.name in TRAINED_PHASES else phase for phase in plan.step.phases)
    step = replace(plan.step, phases=phases)
    other = plan.cost.hours * SECONDS_AN_HOUR - config.schedule.steps * plan.step.seconds
    cost = run_cost(
        gpus=used_gpus(plan.derived), step_s=step.seconds, steps=config.schedule.steps, price_per_gpu_hour=options.price,
        other_s=max(0.0, other),
    )  # fmt: skip
    return replace(plan, step=step, cost=cost)


# ---- the table -------------------------------------------------------------------------------------------------------

COLUMNS = (
    "", "models", "states GB", "peak GiB a GPU", "fits", "FLOP/token", "FLOP/prompt", "sampled/step", "step s", "generation", "GPUs",
    "GPU-hours", "money",
)  # fmt: skip
TEXT_COLUMNS = 2


NOT_TRAINED = "* not trained by rlpost: computed from formulas and others' measurements"


def format_comparison(rows: Sequence[Row]) -> str:
    """Rows as a plain-text table; below it what is said of single ones, and why others are impossible."""
    shown = [COLUMNS, *(_cells(row) for row in rows if row.problem is None)]
    if all(row.money is None for row in rows):
        shown = [cells[:-1] for cells in shown]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = [_table_line(cells, widths) for cells in shown] if len(shown) > 1 else []
    if any(not row.trained for row in rows):
        lines.append(NOT_TRAINED)
    said = [(row.name, note) for row in rows for note in row.notes]
    said += [(row.name, f"impossible: {row.problem}") for row in rows if row.problem is not None]
    said += [(row.name, f"FLOP/token = {row.flops_formula}") for row in rows if row.problem is None]
    for text in dict.fromkeys(text for _, text in said):
        lines.append(f"{', '.join(name for name, other in said if other == text)}: {text}")
    return "\n".join(lines)


def _table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [str.ljust] * TEXT_COLUMNS + [str.rjust] * (len(cells) - TEXT_COLUMNS)
    return "  ".join(align(text, width) for align, text, width in zip(aligned, cells, widths, strict=True)).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name + ("" if row.trained else " *"),
        ", ".join(row.state_bytes),
        f"{sum(row.state_bytes.values()) / GB:.1f}",
        ", ".join(f"{name} {gib:.1f}" for name, gib in row.peak_gib.items()),
        "yes" if row.fits else "NO",
        f"{row.flops_per_token:.3g}",
        f"{row.flops_per_prompt:.3g}",
        f"{row.sampled_tokens:,}",
        f"{row.step_s:.3g}",
        f"{row.generation_share:.0%}",
        f"{row.gpus}",
        f"{row.gpu_hours:,.1f}",
        "" if row.money is None else f"{row.money:,.0f}",
    )
