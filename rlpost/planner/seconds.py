"""The works of every phase of a run's step: amounts of arithmetic, bytes and pieces, each with the coefficient that it costs.

Amounts are nominal seconds at the data sheet's rates of the hardware (of CPU: of a process's threads), or counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.derive import Derived
from rlpost.config.schema import RunConfig
from rlpost.planner.coefficients import Work
from rlpost.planner.collectives import all_reduce_seconds, fsdp_line
from rlpost.planner.footprint import DTYPE_BYTES, trained_parameters
from rlpost.planner.hardware import Hardware
from rlpost.planner.memory import checkpoint_line, find_recipe
from rlpost.planner.shapes import ModelShape
from rlpost.planner.sync import RLPOST_DELTA_BYTES, delta_bytes, full_bytes, mean_bytes_with_keyframes
from rlpost.planner.timing import EngineSpeed, Generation, attention_flops, forward_flops, generate
from rlpost.planner.workload import Workload

TRAINER_BYTES = 4
"""Of a weight in the trainer, which is float32."""
HIDDEN_SHARE = 0.9
"""Of collectives and arithmetic that go on at once, what of the shorter one hides behind the longer (assumed)."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the hardware's data sheet promises one process."""

    flops_per_second: float
    bytes_per_second: float


def process_rates(hardware: Hardware, threads: int, busy: int) -> Rates:
    """Of a GPU; of a CPU process with that many threads when ``busy`` such processes work at once on the machine's cores."""
    one = hardware.accelerator
    if hardware.device == "gpu":
        return Rates(flops_per_second=one.flops_per_second, bytes_per_second=one.bytes_per_second)
    cores = min(float(threads), hardware.cores / max(1, busy))
    return Rates(flops_per_second=cores * one.flops_per_second, bytes_per_second=cores * one.bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that the phases' works follow from."""

    config: RunConfig
    derived: Derived
    shape: ModelShape
    hardware: Hardware
    workload: Workload

    @property
    def share(self) -> bool:
        """Whether the trainer computes a group's prompt once."""
        return self.derived.attention == "padded"

    @property
    def attended(self) -> list[int]:
        """Lengths as attention has them: padded to the longest, or their own."""
        lengths = self.workload.lengths
        return [max(lengths)] * len(lengths) if self.share else lengths

    @property
    def micro_batches(self) -> float:
        """Of one rank in one pass over the batch."""
        return self.workload.micro_batches(
            self.share, ranks=self.derived.ranks, minibatches=self.derived.algorithm.minibatches,
            micro_batch_tokens=self.derived.micro_batch_tokens,
        )  # fmt: skip

    def trainer_rates(self, ranks: int) -> Rates:
        """Of one of ``ranks`` trainer ranks."""
        return process_rates(self.hardware, self.config.training.threads, ranks)


# ---- trainer ---------------------------------------------------------------------------------------------------------


def _layer_flops(job: Job, shape: ModelShape, logits: int) -> tuple[float, float]:
    """Of one forward over the batch, all ranks: everything but attention's scores and sums, and these."""
    attention = attention_flops(shape, job.attended)
    return forward_flops(shape, job.attended, row_tokens=job.workload.row_tokens(job.share), logit_tokens=logits) - attention, attention


def forward_works(job: Job, phase: str, *, ranks: int | None = None) -> list[Work]:
    """One forward over the batch, for logprobs or values."""
    ranks = ranks or job.derived.ranks
    rates = job.trainer_rates(ranks)
    linear, attention = _layer_flops(job, job.shape, 0 if phase == "values" else job.workload.sampled_tokens)
    pieces = job.shape.layers * job.micro_batches * job.derived.ranks / ranks
    return [
        _flops_work(phase, "forward_flops", linear / ranks, rates),
        _flops_work(phase, "attention_flops", attention / ranks, rates),
        Work(phase=phase, coefficient="forward_layer_s", amount=pieces, formula=f"{pieces:g} layers of micro-batches"),
    ]


def update_works(job: Job, *, ranks: int | None = None, phase: str = "update") -> list[Work]:
    """All optimizer steps of one batch; of the critic when ``ranks`` are its."""
    critic = ranks is not None
    ranks, shape, config = ranks or job.derived.ranks, job.shape, job.config
    algorithm, rates = job.derived.algorithm, job.trainer_rates(ranks)
    logits = 0 if critic else job.workload.sampled_tokens
    linear, attention = _layer_flops(job, shape, 0)
    output = _layer_flops(job, shape, logits)[0] - linear
    # Forward and backward are three products; frozen weights get no gradient, and logits are always computed again.
    products = 2 if config.training.lora.rank and not critic else 3
    trained_flops = algorithm.epochs * (products * linear + (products + 1) * output) / ranks
    again = algorithm.epochs * linear / ranks if config.training.gradient_checkpointing else 0.0
    attended = algorithm.epochs * (4 if again else 3) * attention / ranks
    steps, micros = algorithm.epochs * algorithm.minibatches, algorithm.epochs * job.micro_batches * job.derived.ranks / ranks
    recipe = find_recipe(config.training.optimizer.name)
    trained = shape.parameters if critic else trained_parameters(config, shape)
    # Gradients are written, read to clip, read by the step; weights and moments are read and written.
    each = 3 * recipe.gradients + 2 * (recipe.weights + recipe.optimizer)
    moved = steps * trained / ranks * each
    layers = f"{shape.layers} layers x {micros:g} micro-batches"
    bytes_formula = f"{steps} steps x {trained:,} parameters x {each:g} B / {ranks} ranks / {rates.bytes_per_second / 1e9:g} GB/s"
    works = [
        _flops_work(phase, "train_flops", trained_flops, rates),
        _flops_work(phase, "attention_flops", attended, rates),
        Work(phase=phase, coefficient="train_layer_s", amount=shape.layers * micros, formula=layers),
        Work(phase=phase, coefficient="optimizer_bytes", amount=moved / rates.bytes_per_second, formula=bytes_formula),
        Work(phase=phase, coefficient="update_s", amount=steps, formula=f"{steps} optimizer steps"),
    ]
    if again:
        works.append(_flops_work(phase, "forward_flops", again, rates))
    if ranks > 1:
        arithmetic = (trained_flops + again + attended) / rates.flops_per_second
        works.append(_collectives(job, phase, ranks, micros, steps, arithmetic))
    return works


def _flops_work(phase: str, coefficient: str, flops: float, rates: Rates) -> Work:
    return Work(phase=phase, coefficient=coefficient, amount=flops / rates.flops_per_second, formula=_flops(flops, rates))


def _collectives(job: Job, phase: str, ranks: int, micros: float, steps: int, arithmetic: float) -> Work:
    reshard = job.config.training.reshard_after_forward
    traffic = fsdp_line(
        job.shape.parameters,
        ranks,
        job.hardware.bus_bytes_per_second(ranks),
        micro_batches=max(1, round(micros)),
        gradient_reductions=max(1, round(micros)) if reshard else steps,
        reshard_after_forward=reshard,
        weight_bytes=DTYPE_BYTES[job.derived.dtype],
    )
    hidden = HIDDEN_SHARE * min(traffic.seconds, arithmetic)
    formula = f"{traffic.formula} - {hidden:.3g} s behind arithmetic"
    return Work(phase=phase, coefficient="collectives", amount=traffic.seconds - hidden, formula=formula)


def _flops(flops: float, rates: Rates) -> str:
    return f"{flops:.4g} FLOP / {rates.flops_per_second:.3g} FLOP/s"


# ---- engines ---------------------------------------------------------------------------------------------------------


def engine_rates(job: Job, engines: int) -> Rates:
    """Of one engine, all its GPUs together."""
    one = process_rates(job.hardware, job.config.engine.threads, engines)
    degree = job.config.engine.tensor_parallel if job.hardware.device == "gpu" else 1
    return Rates(flops_per_second=degree * one.flops_per_second, bytes_per_second=degree * one.bytes_per_second)


def slowest_share(lengths: Sequence[int], engines: int) -> list[int]:
    """The answers of the engine that has the longest one, when they are dealt out in turn."""
    place = max(range(len(lengths)), key=lambda index: lengths[index])
    return list(lengths[place % engines :: engines]) if engines <= len(lengths) else [lengths[place]]


def simulate(job: Job, engines: int) -> Generation:
    """Decoding on the slowest of ``engines``, at nominal rates."""
    rates, work = engine_rates(job, engines), job.workload
    dtype = DTYPE_BYTES[job.derived.dtype]
    speed = EngineSpeed(
        bytes_per_second=rates.bytes_per_second, flops_per_second=rates.flops_per_second, weight_bytes_per_parameter=dtype,
        kv_bytes_per_element=dtype,
    )  # fmt: skip
    lengths = slowest_share(work.answers, engines)
    return generate(job.shape, speed, work.prompt + work.observations // 2, lengths, job.config.engine.max_num_seqs)


def generate_works(job: Job, engines: int | None = None, phase: str = "generate") -> list[Work]:
    """Prefill and decoding of a batch on the slowest engine."""
    engines = engines or job.derived.engines
    rates, work, done = engine_rates(job, engines), job.workload, simulate(job, engines)
    prefill = 2.0 * job.shape.multiplied_parameters * work.prefill / engines
    samples = math.ceil(work.samples / engines)
    prompts = f"{work.prefill:,} tokens / {engines} engines: {_flops(prefill, rates)}"
    rate = f"{rates.bytes_per_second / 1e9:g} GB/s"
    reading, kept = f"weights in {done.steps:,} steps, {done.weights_s:.4g} s at {rate}", f"KV, {done.kv_s:.4g} s at {rate}"
    computing = f"{done.tokens:,} tokens, {done.arithmetic_s:.4g} s at {rates.flops_per_second:.3g} FLOP/s"
    steps = f"{done.steps:,} decoding steps; longest answer {max(work.answers):,} tokens"
    works = [
        Work(phase=phase, coefficient="prefill_flops", amount=prefill / rates.flops_per_second, formula=prompts),
        Work(phase=phase, coefficient="decode_bytes", amount=done.weights_s, formula=reading),
        Work(phase=phase, coefficient="decode_kv_bytes", amount=done.kv_s, formula=kept),
        Work(phase=phase, coefficient="decode_flops", amount=done.arithmetic_s, formula=computing),
        Work(phase=phase, coefficient="decode_step_s", amount=done.steps, formula=steps),
        Work(phase=phase, coefficient="sample_s", amount=samples, formula=f"{samples:,} samples"),
    ]  # fmt: skip
    degree = job.config.engine.tensor_parallel
    if degree > 1:
        size = job.shape.hidden * DTYPE_BYTES[job.derived.dtype]
        tokens = done.tokens + work.prefill / engines
        each = all_reduce_seconds(size, degree, job.hardware.bus_bytes_per_second(degree))
        amount = 2 * job.shape.layers * tokens * each
        formula = f"2 x {job.shape.layers} all-reduces x {tokens:,.0f} tokens over {degree} GPUs"
        works.append(Work(phase=phase, coefficient="collectives", amount=amount, formula=formula))
    return works


def evaluation_works(job: Job) -> list[Work]:
    """One evaluation: its prompts, sampled like the training's (a mean of greedy lengths is not known before)."""
    evaluation, work = job.config.evaluation, job.workload
    count = evaluation.prompts * evaluation.samples
    if job.derived.offline:
        return []
    answers = tuple(work.answers[index % work.samples] for index in range(count))
    prefill = round(work.prefill / work.groups * evaluation.prompts)
    held_out = Workload(
        groups=evaluation.prompts, group_size=evaluation.samples, prompt=work.prompt, answers=answers, turns=work.turns,
        observations=work.observations, prefill=prefill,
    )  # fmt: skip
    return generate_works(
        Job(config=job.config, derived=job.derived, shape=job.shape, hardware=job.hardware, workload=held_out), phase="evaluate"
    )


# ---- sync, checkpoints, and the rest ---------------------------------------------------------------------------------


def sync_parameters(job: Job) -> int:
    """Parameters that a sync moves in full: the adapters', or all."""
    lora = job.config.training.lora
    return trained_parameters(job.config, job.shape) if lora.rank and lora.sync == "adapter" else job.shape.parameters


def link_work(hardware: Hardware, carrier: str, size: float, members: int, formula: str) -> Work:
    """``size`` bytes over a carrier; ``members`` of the collective link are trainer ranks and engines' GPUs.

    A network between nodes has a coefficient of its own: what gloo or NVLink reach within a node says nothing of it. CPUs count as one
    machine until their network is given.
    """
    if carrier == "disk":
        seconds = size / hardware.disk_write_bytes_per_second + size / hardware.disk_read_bytes_per_second
    elif carrier == "ipc":
        seconds = size / hardware.accelerator.bytes_per_second
    else:
        seconds = size / hardware.bus_bytes_per_second(members)
        several_nodes = members > hardware.gpus_per_node if hardware.device == "gpu" else "network_bytes_per_second" in hardware.given
        carrier = "network" if several_nodes else carrier
    return Work(phase="sync", coefficient=f"sync_{carrier}", amount=seconds, formula=formula)


def sync_works(job: Job, carrier: str, *, delta: bool, changed: float) -> list[Work]:
    """One sync: everything, or (``delta``) what changed, with a full one every weights.keyframe_every."""
    each = DTYPE_BYTES[job.derived.dtype]
    parameters = sync_parameters(job)
    size = full_bytes(parameters, each)
    works = []
    what = f"{parameters:,} parameters x {each} B"
    if delta:
        small = delta_bytes(parameters, changed, RLPOST_DELTA_BYTES * each / 2)
        size = mean_bytes_with_keyframes(size, small, job.config.weights.keyframe_every + 1)
        what = f"{changed:.3g} of {parameters:,} parameters, one sync of {job.config.weights.keyframe_every + 1} in full"
        scan = parameters / job.derived.ranks / 1e9
        works.append(Work(phase="sync", coefficient="delta_scan", amount=scan, formula=f"{scan:.4g} billion parameters a rank"))
        works.append(Work(phase="sync", coefficient="delta_s", amount=1, formula="one delta"))
    else:
        read = TRAINER_BYTES * parameters / job.derived.ranks / job.trainer_rates(job.derived.ranks).bytes_per_second
        formula = f"{parameters:,} parameters x {TRAINER_BYTES} B / {job.derived.ranks} ranks"
        works.append(Work(phase="sync", coefficient="sync_read", amount=read, formula=formula))
    members = job.derived.ranks + job.derived.engines * job.config.engine.tensor_parallel
    works.append(link_work(job.hardware, carrier, size, members, f"{what} = {size / 1e9:.4g} GB, {carrier}"))
    works.append(Work(phase="sync", coefficient="sync_s", amount=1, formula="one sync"))
    return works


def checkpoint_works(job: Job) -> list[Work]:
    """One checkpoint."""
    recipe = find_recipe(job.config.training.optimizer.name)
    size = checkpoint_line(trained_parameters(job.config, job.shape), recipe).bytes * (2 if job.derived.critic_ranks else 1)
    if job.config.training.lora.rank:
        size += round(recipe.weights * job.shape.parameters)  # the frozen weights are written too
    seconds = size / job.hardware.disk_write_bytes_per_second
    formula = f"{size / 1e9:.4g} GB at {job.hardware.disk_write_bytes_per_second / 1e9:g} GB/s"
    return [
        Work(phase="checkpoint", coefficient="checkpoint_bytes", amount=seconds, formula=formula),
        Work(phase="checkpoint", coefficient="checkpoint_s", amount=1, formula="one checkpoint"),
    ]  # fmt: skip


def wait_works(job: Job) -> list[Work]:
    """What is in no phase."""
    samples = job.workload.samples
    return [
        Work(phase="wait", coefficient="wait_s", amount=1, formula="one step"),
        Work(phase="wait", coefficient="wait_sample_s", amount=samples, formula=f"{samples:,} samples"),
    ]


def training_works(job: Job) -> list[Work]:
    """Everything between the rollouts and the sync."""
    derived, works = job.derived, []
    if not derived.offline:
        works.append(
            Work(phase="reward", coefficient="reward_sample_s", amount=job.workload.samples, formula=f"{job.workload.samples:,} samples")
        )
        if derived.old_logprobs == "recompute":
            works += forward_works(job, "old_logprob")
        if derived.algorithm.filter.top_entropy < 1:
            works += forward_works(job, "old_logprob")
    if derived.reference not in ("none", "precomputed"):
        works += forward_works(job, "reference", ranks=1 if derived.reference == "actor" else None)
    if derived.critic_ranks:
        works += forward_works(job, "values", ranks=derived.critic_ranks)
    works += update_works(job)
    if derived.critic_ranks:
        works += update_works(job, ranks=derived.critic_ranks)
    return works
