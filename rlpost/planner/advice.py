"""The smallest change of a configuration that makes its run fit, and what fits but wastes the machine.

Changes come in four classes, and a dearer one is only looked at when no cheaper one is enough: those that change neither the result nor
the GPUs, those that round optimizer states, those that take more of the machine, and LoRA, which trains another thing. Within a class the
one with the shortest step wins, of equal ones the first in the order below. One change is better than several, unless it is LoRA. All
that is proposed passes rlpost.config.checks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from rlpost.config.algorithms import PAIRED
from rlpost.config.checks import check
from rlpost.config.derive import derive, longest_sequence
from rlpost.config.schema import RunConfig
from rlpost.planner.coefficients import work_seconds
from rlpost.planner.compare import state_bytes
from rlpost.planner.footprint import DTYPE_BYTES, Footprint, engine_setup, footprint
from rlpost.planner.memory import gpus_for, kv_bytes_per_token
from rlpost.planner.options import PlanOptions
from rlpost.planner.parts import StepPlan, plan_step
from rlpost.planner.plan import Plan, make_plan, used_gpus
from rlpost.planner.quantities import GB, GIB, MIB
from rlpost.planner.seconds import Job, sync_works, training_works
from rlpost.types import ConfigError

Settings = Mapping[str, Any]
"""New values by their keys in the configuration."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """``fits``: the configuration as it is, which also asks that an engine's KV cache holds one longest sequence (vLLM refuses less).

    ``changes`` are ``key=value`` words of the command line, together the smallest change found; none when it fits, or nothing is enough.
    """

    fits: bool
    changes: tuple[str, ...]
    cost: str
    """What the changes cost, in words; empty without changes."""
    fits_with_changes: bool
    notes: tuple[str, ...]
    """What fits but is wasteful or near the edge; when nothing is enough, what it would take."""


def propose(config: RunConfig, options: PlanOptions, plan: Plan | None = None) -> Advice:
    """Advice for a checked configuration; ``plan`` is its plan where that was made already. Raises ConfigError like make_plan."""
    search = Search(config, options, plan or make_plan(config, options))
    if search.lack_bytes == 0:
        return Advice(fits=True, changes=(), cost="", fits_with_changes=True, notes=tuple(notes(search)))
    classes = knob_classes(search)
    # Several changes that keep what is trained come before the one that does not.
    whole, lora = classes[:-1], classes[-1:]
    found = _single(search, whole) or _several(search, whole) or _single(search, lora) or _several(search, classes)
    if found is None:
        return Advice(fits=False, changes=(), cost="", fits_with_changes=False, notes=tuple(_what_it_would_take(search)))
    settings = merged(found)
    changes = tuple(f"{key}={override_text(value)}" for key, value in settings.items())
    return Advice(
        fits=False, changes=changes, cost=_cost(search, found, settings), fits_with_changes=True, notes=tuple(_kv_note(search))
    )  # fmt: skip


# ---- configurations with other settings ------------------------------------------------------------------------------


def with_settings(config: RunConfig, settings: Settings) -> RunConfig:
    """A copy of ``config`` with these values; the keys must exist."""
    changed = copy.deepcopy(config)
    for key, value in settings.items():
        *sections, name = key.split(".")
        target = reduce(getattr, sections, changed)
        assert hasattr(target, name), f"the configuration has no {key}"
        setattr(target, name, value)
    return changed


def override_text(value: Any) -> str:
    """``value`` as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One thing that can be changed: ``steps`` are its settings, the mildest first; ``price`` what it costs beside time."""

    steps: tuple[Settings, ...]
    price: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A knob and the setting that was chosen."""

    knob: Knob
    settings: Settings


def merged(choices: Iterable[Choice]) -> dict[str, Any]:
    """All settings together."""
    return {key: value for choice in choices for key, value in choice.settings.items()}


class Search:
    """The configuration's plan, and the memory of the same run with other settings: only footprints are worked out again."""

    def __init__(self, config: RunConfig, options: PlanOptions, plan: Plan) -> None:
        self.config, self.options, self.plan = config, options, plan
        # A plan may be for another kind of device than this machine's, and checks go by the configuration's.
        self.on_device = {"placement.device": plan.hardware.device}
        self.gpus = max(plan.hardware.gpus, used_gpus(plan.derived))
        self.lack_bytes = self._lack(config)

    def lack(self, settings: Settings) -> float:
        """Bytes that are missing with these settings; infinite when the run would be refused, or the machine has not the GPUs."""
        changed = with_settings(self.config, {**self.on_device, **settings})
        try:
            found = self._lack(changed)
            if found < self.lack_bytes:  # checks take as long as all the rest, so what does not help is not checked
                check(changed)
        except ConfigError:
            return math.inf
        return found

    def _lack(self, config: RunConfig) -> float:
        job = self.job(config)
        if used_gpus(job.derived) > self.gpus:
            return math.inf
        return missing_bytes(self.footprint(job)) + self.missing_kv_bytes(job)

    def job(self, config: RunConfig) -> Job:
        """The same step under another configuration. Raises ConfigError when it cannot be derived."""
        plan = self.plan
        derived = derive(config, device=plan.hardware.device)
        return Job(config=config, derived=derived, shape=plan.shape, hardware=plan.hardware, workload=plan.workload)

    def footprint(self, job: Job) -> Footprint:
        """Its memory."""
        return footprint(job.config, job.derived, job.shape, job.hardware, self.plan.calibration, job.workload)

    def missing_kv_bytes(self, job: Job) -> float:
        """What all engines' KV caches lack to hold one longest sequence each."""
        if job.derived.offline:
            return 0.0
        setup = engine_setup(job.config, job.derived, job.shape, job.hardware, self.plan.calibration, job.workload)
        each = kv_bytes_per_token(job.shape, bytes_per_element=setup.kv_bytes_per_element, tensor_parallel=setup.tensor_parallel)
        return max(0, job.derived.max_model_len - setup.kv_tokens) * each * setup.tensor_parallel * job.derived.engines

    def training_seconds(self, settings: Settings) -> float:
        """Of a step, what is not generation: the part that a trainer's settings change, and quick to work out."""
        job = self.job(with_settings(self.config, settings))
        works = training_works(job)
        if not job.derived.offline:
            works += sync_works(job, job.derived.weight_carrier, delta=job.derived.weight_deltas, changed=self.options.changed)
        return work_seconds(works, self.plan.calibration)

    def step(self, settings: Settings) -> StepPlan:
        """A whole step with these settings."""
        return plan_step(self.job(with_settings(self.config, settings)), self.plan.calibration, self.options)


def missing_bytes(memory: Footprint) -> float:
    """Bytes that all processes lack together; 0 when everything fits."""
    if memory.shared:
        return max(0.0, memory.total_peak_bytes - memory.shared_bytes)
    return sum(one.count * max(0.0, -one.margin_bytes) for one in memory.processes)


# ---- what can be changed ---------------------------------------------------------------------------------------------

LEAST_BUCKET_MIB = 8
LEAST_CHUNK_TOKENS = 128
"""Smaller chunks of logits leave a GPU idle between kernels."""
SHARES = tuple(round(0.95 - 0.05 * index, 2) for index in range(14))
"""Of engine.gpu_memory_utilization, 0.95 to 0.3."""
LORA_RANK = 16


def knob_classes(search: Search) -> tuple[tuple[Knob, ...], ...]:
    """The four classes, each in the order in which equally quick changes are preferred."""
    gpu = search.plan.hardware.device == "gpu"
    engines = _engine_share_knobs if gpu else _engine_cache_knobs
    more = (_tensor_parallel_knobs, _rank_knobs, _split_knobs) if gpu else (_engine_count_knobs,)
    makers: tuple[tuple[Callable[[Search], Iterator[Knob]], ...], ...] = (
        (_trainer_knobs, engines, *((_packed_tensor_parallel_knobs,) if gpu else ())), (_optimizer_knobs,), more, (_lora_knobs,),
    )  # fmt: skip
    return tuple(tuple(knob for maker in group for knob in maker(search) if knob.steps) for group in makers)


def _halved(key: str, value: int, least: int) -> tuple[Settings, ...]:
    steps = []
    while value // 2 >= least:
        value //= 2
        steps.append({key: value})
    return tuple(steps)


def _trainer_knobs(search: Search) -> Iterator[Knob]:
    config, training = search.config, search.config.training
    if not search.plan.derived.offline:
        yield Knob(
            steps=_halved("weights.bucket_mib", config.weights.bucket_mib, LEAST_BUCKET_MIB), price="weights travel in smaller pieces"
        )
    yield Knob(
        steps=_halved("training.logprob_chunk_tokens", training.logprob_chunk_tokens, LEAST_CHUNK_TOKENS),
        price="logits are computed in smaller pieces",
    )
    if not training.reshard_after_forward:
        yield Knob(steps=({"training.reshard_after_forward": True},), price="weights are gathered twice a micro-batch")
    yield Knob(steps=tuple(_smaller_rows(config)), price="more and smaller micro-batches")
    if not training.gradient_checkpointing:
        yield Knob(steps=({"training.gradient_checkpointing": True},), price="every layer's forward is computed twice")


def _smaller_rows(config: RunConfig) -> Iterator[Settings]:
    """Three quarters, a half, and so on, down to the longest sequence (of a pair: two of them)."""
    most, key = config.training.micro_batch_tokens, "training.micro_batch_tokens"
    least = longest_sequence(config)[0] * (2 if config.algorithm.name in PAIRED else 1)
    parts = (most * part // 2**power for power in range(2, 24) for part in (3, 2))
    yield from ({key: part} for part in parts if least < part)
    if least < most:
        yield {key: least}


def _engine_share_knobs(search: Search) -> Iterator[Knob]:
    if search.plan.derived.offline:
        return
    key, present = "engine.gpu_memory_utilization", search.config.engine.gpu_memory_utilization
    if search.missing_kv_bytes(search.job(search.config)):
        yield Knob(steps=tuple({key: share} for share in reversed(SHARES) if share > present), price="engines take more of their GPUs")
    else:
        yield Knob(steps=tuple({key: share} for share in SHARES if share < present), price="engines hold fewer sequences at once")


def _engine_cache_knobs(search: Search) -> Iterator[Knob]:
    """Of CPU engines, down to what one longest sequence needs, or up to it."""
    if search.plan.derived.offline:
        return
    key, present, derived = "engine.kv_cache_mib", search.config.engine.kv_cache_mib, search.plan.derived
    each = kv_bytes_per_token(
        search.plan.shape, bytes_per_element=DTYPE_BYTES[derived.dtype], tensor_parallel=search.config.engine.tensor_parallel
    )
    least = math.ceil(derived.max_model_len * each / MIB)
    if present < least:
        yield Knob(steps=({key: least},), price="engines hold one longest sequence at a time")
    else:
        steps = [*_halved(key, present, least + 1), *([{key: least}] if least < present else [])]
        yield Knob(steps=tuple(steps), price="engines hold fewer sequences at once")


def _degrees(search: Search) -> list[int]:
    """Larger tensor-parallel degrees that a node holds whole engines of; those that do not divide the model are refused like all else."""
    present, node = search.config.engine.tensor_parallel, search.plan.hardware.gpus_per_node
    return [] if search.plan.derived.offline else [degree for degree in range(present + 1, node + 1) if node % degree == 0]


def _packed_tensor_parallel_knobs(search: Search) -> Iterator[Knob]:
    """Fewer engines of more GPUs each, on the same GPUs."""
    engine, key = search.config.engine, "engine.tensor_parallel"
    gpus = engine.count * engine.tensor_parallel
    steps = ({key: degree, "engine.count": gpus // degree} for degree in _degrees(search) if gpus % degree == 0)
    yield Knob(steps=tuple(steps), price="fewer engines, whose GPUs wait for one another")


def _optimizer_knobs(search: Search) -> Iterator[Knob]:
    key, smaller = "training.optimizer.name", {"adamw": ("adamw_bf16", "adamw_8bit"), "adamw_bf16": ("adamw_8bit",)}
    names = smaller.get(search.config.training.optimizer.name, ())
    yield Knob(steps=tuple({key: name} for name in names), price="the optimizer's moments are rounded")


def _tensor_parallel_knobs(search: Search) -> Iterator[Knob]:
    yield Knob(steps=tuple({"engine.tensor_parallel": degree} for degree in _degrees(search)), price="engines of more GPUs")


def _rank_knobs(search: Search) -> Iterator[Knob]:
    """Multiples of the ranks while the machine has GPUs; a colocated engine comes with each."""
    config, derived = search.config, search.plan.derived
    together = config.placement.mode == "colocated" and not derived.offline
    most = search.gpus - used_gpus(derived) + derived.ranks
    ranks = range(2 * derived.ranks, most + 1, derived.ranks)
    steps = ({"training.ranks": count, **({"engine.count": count} if together else {})} for count in ranks)
    yield Knob(steps=tuple(steps), price="more GPUs")
    critics = range(2 * derived.critic_ranks, most - derived.ranks + derived.critic_ranks + 1, derived.critic_ranks or 1)
    if derived.critic_ranks:
        yield Knob(steps=tuple({"algorithm.critic.ranks": count} for count in critics), price="more GPUs")


def _split_knobs(search: Search) -> Iterator[Knob]:
    if search.config.placement.mode == "colocated" and not search.plan.derived.offline:
        yield Knob(steps=({"placement.mode": "split"},), price="engines get GPUs of their own, and trainers wait for them")


def _engine_count_knobs(search: Search) -> Iterator[Knob]:
    if not search.plan.derived.offline:
        yield Knob(steps=_halved("engine.count", search.config.engine.count, 1), price="fewer engines")


def _lora_knobs(search: Search) -> Iterator[Knob]:
    if not search.config.training.lora.rank:
        yield Knob(steps=({"training.lora.rank": LORA_RANK},), price="only adapters are trained, not the model")


# ---- the search ------------------------------------------------------------------------------------------------------


Classes = Sequence[Sequence[Knob]]


def _single(search: Search, classes: Classes) -> tuple[Choice, ...] | None:
    """The cheapest change of one knob that is enough."""
    for knobs in classes:
        enough = [choice for knob in knobs if (choice := _mildest(search, knob, {}))]
        if enough:
            return (min(enough, key=lambda choice: search.training_seconds(choice.settings)),)
    return None


def _mildest(search: Search, knob: Knob, others: Settings) -> Choice | None:
    """The mildest setting of a knob that is enough together with ``others``."""
    steps = (step for step in knob.steps if search.lack({**others, **step}) == 0)
    return next((Choice(knob=knob, settings=step) for step in steps), None)


def _several(search: Search, classes: Classes) -> tuple[Choice, ...] | None:
    """Knobs turned as far as helps, the cheapest first, until it fits; then those that are not needed go, and the others are eased."""
    chosen: list[Choice] = []
    lack = search.lack_bytes
    for knob in (knob for knobs in classes for knob in knobs):
        before = merged(chosen)
        reached, place = min((search.lack({**before, **step}), place) for place, step in enumerate(knob.steps))
        if reached < lack:
            chosen, lack = [*chosen, Choice(knob=knob, settings=knob.steps[place])], reached
        if lack == 0:
            return _reduced(search, chosen)
    return None


def _reduced(search: Search, chosen: Sequence[Choice]) -> tuple[Choice, ...]:
    kept = list(chosen)
    for choice in reversed(chosen):
        others = [one for one in kept if one is not choice]
        if search.lack(merged(others)) == 0:
            kept = others
    for place, choice in enumerate(kept):
        others = kept[:place] + kept[place + 1 :]
        kept[place] = _mildest(search, choice.knob, merged(others)) or choice
    return tuple(kept)


def _cost(search: Search, found: Sequence[Choice], settings: Settings) -> str:
    """Prices in words, and the step before and after."""
    before, after = search.plan.step.seconds, search.step(settings).seconds
    parts = [choice.knob.price for choice in found]
    parts.append(f"a step of {after:.3g} s in place of {before:.3g} s ({after / before:.2f} times as long)")
    old, new = used_gpus(search.plan.derived), used_gpus(search.job(with_settings(search.config, settings)).derived)
    if new != old:
        parts.append(f"{new} GPUs in place of {old}")
    return "; ".join(parts)


# ---- notes -----------------------------------------------------------------------------------------------------------

USED_SHARE = 0.9
"""Of a GPU's memory that training states may fill, with the rest for activations."""
NEAR = 0.05
"""A margin below this share of the memory is less than what formulas are off by."""
FEW = 0.5
"""Below this share of the sequences that an engine gets at once, those that it can hold are far too few."""
FAR_BELOW = 0.5
IDLE = 0.5
MOST_SHARE = SHARES[0]


def _what_it_would_take(search: Search) -> Iterator[str]:
    """When nothing is enough: how much more machine."""
    plan = search.plan
    yield from _kv_note(search)
    if plan.memory.shared:
        yield (
            f"no change of the configuration is enough: all processes need {plan.memory.total_peak_bytes / GIB:.1f} GiB together, and "
            f"{plan.hardware.name} has {plan.memory.shared_bytes / GIB:.1f} GiB; take a machine with more memory, or a smaller model"
        )
        return
    lacking = [process for process in plan.memory.processes if process.margin_bytes < 0]
    named = ", ".join(f"{process.name} lacks {-process.margin_bytes / GIB:.1f} GiB" for process in lacking)
    yield f"no change of the configuration is enough on {plan.hardware.name}" + (f": as it is, {named} of each GPU" if lacking else "")
    trained = {role for process in lacking for role in process.roles} & {"policy", "critic"}
    states = sum(size for role, size in state_bytes(search.config, plan).items() if role in trained)
    if states:
        one = plan.hardware.accelerator.memory_bytes
        yield (
            f"weights, gradients and optimizer of what is trained are {states / GB:.1f} GB: {gpus_for(states, one, USED_SHARE)} GPUs of "
            f"{one / GIB:.0f} GiB hold them in {USED_SHARE:.0%} of their memory, before activations; take a larger machine and more "
            "training.ranks, shorter sequences, or a smaller model"
        )


def notes(search: Search) -> Iterator[str]:
    """What fits, but is wasteful or near the edge."""
    yield from _near_notes(search.plan)
    if search.plan.engine is not None:
        yield from _concurrency_note(search)
        yield from _idle_note(search)
    yield from _row_note(search)


def _kv_note(search: Search) -> Iterator[str]:
    """vLLM does not start an engine whose cache cannot hold one sequence of max_model_len."""
    engine, longest = search.plan.engine, search.plan.derived.max_model_len
    if engine is not None and engine.kv_tokens < longest:
        yield (
            f"an engine's KV cache holds {engine.kv_tokens:,} tokens, and the longest sequence may have {longest:,}: vLLM would refuse to "
            "start; give engines more memory, or shorten data.max_prompt_tokens or sampling.max_new_tokens"
        )


def _near_notes(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    margins = [("all processes together", memory.shared_bytes - memory.total_peak_bytes, memory.shared_bytes)]
    if not memory.shared:
        margins = [(one.name, one.margin_bytes, one.capacity_bytes) for one in memory.processes]
    for name, margin, capacity in margins:
        if margin < NEAR * capacity:
            yield f"near: {name} would leave {margin / GIB:.1f} of {capacity / GIB:.1f} GiB free, and a plan may be off by more"


def _concurrency_note(search: Search) -> Iterator[str]:
    engine, config = search.plan.engine, search.config
    assert engine is not None, "of runs with rollouts"
    if engine.concurrency_mean >= FEW * engine.wanted:
        return
    if search.plan.hardware.device == "cpu":
        remedy = (
            f"engine.kv_cache_mib={math.ceil(config.engine.kv_cache_mib * engine.wanted / max(1, engine.concurrency_mean))} would hold all"
        )
    elif engine.memory_share is not None and engine.memory_share <= MOST_SHARE:
        remedy = f"engine.gpu_memory_utilization={math.ceil(100 * engine.memory_share) / 100:g} would hold all"
    else:
        remedy = f"set engine.max_num_seqs={max(1, engine.concurrency_mean)}, or take more engines"
    yield (
        f"an engine gets {engine.wanted:,} sequences at once, and its KV cache holds {engine.concurrency_mean:,} of mean length: the "
        f"others wait or are preempted, which computes their tokens again; {remedy}"
    )


def _row_note(search: Search) -> Iterator[str]:
    plan, job = search.plan, search.job(search.config)
    present, largest = plan.derived.micro_batch_tokens, plan.largest_micro_batch_tokens
    if job.micro_batches <= plan.derived.algorithm.minibatches or present >= FAR_BELOW * largest:
        return
    yield (
        f"training.micro_batch_tokens={present} makes {job.micro_batches:g} micro-batches a rank and pass, and up to {largest} tokens "
        "would fit: larger ones spend less time on collectives and kernel launches"
    )


def _idle_note(search: Search) -> Iterator[str]:
    plan, step = search.plan, search.plan.step
    if plan.split is None or search.config.placement.mode == "colocated":
        return
    generate, sync = step.phase_s("generate"), step.phase_s("sync")
    train = sum(phase.seconds for phase in step.phases) - generate - sync
    for who, busy in (("trainers", train), ("engines", generate)):
        idle = 1 - busy / step.seconds
        if idle > IDLE:
            best = plan.split.best
            yield (
                f"{who} idle {idle:.0%} of a step (generation {generate:.3g} s, training {train:.3g} s); by time alone, "
                f"{best.trainer_gpus} trainer and {best.rollout_gpus} rollout of these GPUs are the best split with {best.step_s:.3g} s a "
                f"step, and colocated it would be {plan.split.colocated_s:.3g} s"
            )
