"""The planner's memory against what trainer ranks and engines need on a CPU, for settings of 5 to 150 M parameters.

    python -m benchmarks.plan_memory [--only trainer|engine] [--phases] [--json FILE]

Each setting runs in processes of its own, with the environment of a run's actors but without Ray: a trainer rank loads, computes
logprobs, makes three updates, computes logprobs again, writes its weights for a sync and a checkpoint; an engine generates two batches.
Measured is the peak of resident memory (VmHWM, which a process can reset; ``ru_maxrss`` also counts what the parent had when it started
the child). What a process has before its model is measured once for each kind, on a setting of its own: a tiny model, so that it is
nearly all.

``--phases`` runs trainers again with a malloc that gives freed memory back at once, so that what is resident is what is in use, and
compares every phase apart. The last line printed is a JSON object; the exit code is 1 when a peak is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.models.shapes import SHAPES, Shape, write_model
from rlpost.planner.memory import adapter_parameters, find_recipe, kv_bytes_per_token
from rlpost.planner.quantities import MIB
from rlpost.planner.roles import PHASES, EngineSetup, MemoryTable, TrainerSetup, engine_table, trainer_table
from rlpost.planner.shapes import load_shape

TOLERANCE = 0.10
UPDATES = 3
"""The first makes the optimizer's states, the second has them from its start; the third shows that nothing grows."""

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 10)}
"""Environment in which glibc's malloc keeps no freed piece above 64 KiB."""

FIRST_ID = 4
OWN_SHAPES = {
    "5m": Shape(hidden=192, layers=8, heads=3, kv_heads=1, head_dim=64, feed_forward=640, vocabulary=4096),
    "34m": Shape(hidden=512, layers=8, heads=8, kv_heads=4, head_dim=64, feed_forward=1536, vocabulary=16384),
    "53m": Shape(hidden=512, layers=12, heads=8, kv_heads=2, head_dim=64, feed_forward=1536, vocabulary=16384, tied=False),
}
"""Beside those of rlpost.models.shapes."""


@dataclass(frozen=True, kw_only=True)
class TrainerCase:
    """A trainer's settings. ``tokens`` of a micro-batch, in sequences of ``sequence``, of which the first quarter is the prompt."""

    shape: str
    tokens: int
    sequence: int
    ranks: int = 1
    micro_batches: int = 1
    optimizer: str = "adamw"
    lora: int = 0
    dtype: str = "float32"
    head: str = "logprob"
    reference: str = "none"
    training: dict[str, Any] = field(default_factory=dict)
    """Further fields of TrainingConfig."""


@dataclass(frozen=True, kw_only=True)
class EngineCase:
    """An engine's settings, and a batch that fills it."""

    shape: str
    kv_cache_mib: int
    max_num_seqs: int
    prompt: int
    new: int = 6
    dtype: str = "float32"

    @property
    def batched_tokens(self) -> int:
        """Prompt tokens that one step computes: all, or vLLM's limit (rollout/engine.py)."""
        return min(8192, self.max_num_seqs * self.prompt)


TRAINERS = {
    "calibration": TrainerCase(shape="1m", tokens=256, sequence=64),
    "25m": TrainerCase(shape="25m", tokens=1024, sequence=128),
    "5m, long rows": TrainerCase(shape="5m", tokens=4096, sequence=256),
    "10m, checkpointed": TrainerCase(shape="10m", tokens=2048, sequence=512, training={"gradient_checkpointing": True}),
    "25m, 4 micro-batches": TrainerCase(shape="25m", tokens=512, sequence=128, micro_batches=4),
    "25m, 2 ranks, 2 micro-batches": TrainerCase(shape="25m", tokens=1024, sequence=128, ranks=2, micro_batches=2),
    "25m, bfloat16": TrainerCase(shape="25m", tokens=512, sequence=128, dtype="bfloat16"),
    "25m, critic": TrainerCase(shape="25m", tokens=1024, sequence=128, head="value"),
    "34m, muon": TrainerCase(shape="34m", tokens=1024, sequence=256, optimizer="muon"),
    "34m, adamw_bf16": TrainerCase(
        shape="34m", tokens=1024, sequence=128, optimizer="adamw_bf16", training={"logprob_chunk_tokens": 256}
    ),
    "34m, 2 ranks, gathered weights kept": TrainerCase(
        shape="34m", tokens=512, sequence=128, ranks=2, training={"reshard_after_forward": False}
    ),
    "53m, adamw_8bit": TrainerCase(shape="53m", tokens=1024, sequence=128, optimizer="adamw_8bit"),
    "53m, reference inside": TrainerCase(shape="53m", tokens=512, sequence=128, reference="initial"),
    "100m, LoRA": TrainerCase(shape="100m", tokens=512, sequence=128, lora=16, training={"logprob_chunk_tokens": 128}),
    "150m": TrainerCase(shape="150m", tokens=512, sequence=128, training={"logprob_chunk_tokens": 256}),
}  # fmt: skip
ENGINES = {
    "calibration": EngineCase(shape="1m", kv_cache_mib=32, max_num_seqs=16, prompt=16),
    "25m": EngineCase(shape="25m", kv_cache_mib=128, max_num_seqs=64, prompt=64),
    "5m, 256 sequences": EngineCase(shape="5m", kv_cache_mib=64, max_num_seqs=256, prompt=32),
    "10m, bfloat16": EngineCase(shape="10m", kv_cache_mib=96, max_num_seqs=32, prompt=64, dtype="bfloat16"),
    "34m, large cache": EngineCase(shape="34m", kv_cache_mib=512, max_num_seqs=32, prompt=48),
    "53m, untied": EngineCase(shape="53m", kv_cache_mib=128, max_num_seqs=128, prompt=32),
    "100m, vocabulary 32768": EngineCase(shape="100m", kv_cache_mib=256, max_num_seqs=64, prompt=100),
    "150m": EngineCase(shape="150m", kv_cache_mib=192, max_num_seqs=16, prompt=64),
}


# ---- in a process of its own -----------------------------------------------------------------------------------------


class Peaks:
    """Peak resident bytes of each phase, which ends with :meth:`end`."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def end(self, phase: str) -> None:
        """The phase is over, or a part of it."""
        [peak] = [row.split()[1] for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM")]
        self.bytes[phase] = max(self.bytes.get(phase, 0), int(peak) * 1024)
        self._reset()


def make_terms(case: TrainerCase, vocabulary: int) -> list[Any]:
    """Sequences of random tokens that fill all micro-batches of all ranks."""
    from rlpost.types import LossTerms

    random, terms = np.random.default_rng(0), []
    trained = np.arange(case.sequence) >= case.sequence // 4
    for number in range(case.tokens // case.sequence * case.micro_batches * case.ranks):
        noise = random.normal(size=case.sequence).astype(np.float32)
        terms.append(
            LossTerms(
                trajectory_id=f"t{number}", group_id=f"g{number}", prompt_length=case.sequence // 4,
                tokens=random.integers(FIRST_ID, vocabulary, case.sequence).astype(np.int32), trainable=trained,
                weight=trained.astype(np.float32), advantage=noise, columns={"returns": noise, "old_values": noise},
            )
        )  # fmt: skip
    return terms


def measure_rank(case: TrainerCase, rank: int, model: str, address: Any, peaks: Any) -> None:
    """One rank from load to checkpoint; puts its phases' peaks into ``peaks``."""
    found = Peaks()
    from rlpost.config.schema import LoraConfig, OptimizerConfig, TrainingConfig
    from rlpost.training.packing import pack
    from rlpost.training.protocol import UpdateRequest, WorkerSettings
    from rlpost.training.worker import TrainerRank
    from rlpost.types import LossComponent

    training = TrainingConfig(micro_batch_tokens=case.tokens, ranks=case.ranks, **case.training)
    training.optimizer, training.lora = OptimizerConfig(name=case.optimizer), LoraConfig(rank=case.lora)
    worker = TrainerRank(
        rank,
        case.ranks,
        WorkerSettings(
            model_path=model, training=training, dtype=case.dtype, device="cpu", attention="padded", total_updates=UPDATES, seed=0,
            timeout_s=120.0, head=case.head, reference_mode=case.reference,  # type: ignore[arg-type]
        ),
    )  # fmt: skip
    if rank == 0:
        for _ in range(case.ranks):
            address.put(worker.address())
    worker.setup(*address.get())
    found.end("load")
    terms = make_terms(case, load_shape(model).vocabulary)
    mine = pack(terms, ranks=case.ranks, micro_batch_tokens=case.tokens)[rank]
    assert len(mine) == case.micro_batches, f"{len(mine)} micro-batches"

    def answer() -> None:
        if case.head == "logprob":
            worker.logprobs(mine, 1.0)
        else:
            worker.values(mine)
        if case.reference != "none":
            worker.reference_logprobs(mine, 1.0)
        found.end("logprob")

    answer()
    policy = LossComponent(term="policy_clip", parameters={"clip_low": 0.2, "clip_high": 0.2})
    component = policy if case.head == "logprob" else LossComponent(term="value", parameters={"clip": 0.2})
    denominators = {"weight": float(sum(term.weight.sum() for term in terms))}
    for _ in range(UPDATES):
        worker.update(
            UpdateRequest(
                micro_batches=mine, denominators=denominators, components=[component], temperature=1.0, measure_parity=False
            )
        )  # fmt: skip
    found.end("update")
    answer()
    with tempfile.TemporaryDirectory(dir=Path(model).parent) as scratch:
        if case.head == "logprob" and not case.lora:
            _send_weights(worker, case.dtype, scratch)
            found.end("sync")
        shared = Path(model).parent / "checkpoint"
        shared.mkdir(exist_ok=True)
        worker.save(str(shared))
        found.end("checkpoint")
    peaks.put(found.bytes)


def _send_weights(worker: Any, dtype: str, directory: str) -> None:
    """A sync over the disk, which needs no engine at the other end."""
    from rlpost.types import SyncPlan
    from rlpost.weights.links import LinkSettings

    worker.open_weights(dtype, 8 * MIB, False)
    worker.weights("serve", [LinkSettings(name="engines", carrier="disk", world=2, timeout_s=120.0, directory=directory)])
    worker.weights("join", "engines")
    worker.weights("send_weights", SyncPlan(version=1, mode="full", base_version=0, link="engines", verify=True, senders=(0,)))


def measure_trainer(case: TrainerCase, model: str) -> dict[str, int]:
    """All ranks, each in a process; of each phase the largest peak."""
    context = multiprocessing.get_context("spawn")
    address, peaks = context.Queue(), context.Queue()
    ranks = [context.Process(target=measure_rank, args=(case, rank, model, address, peaks)) for rank in range(case.ranks)]
    for process in ranks:
        process.start()
    found = [peaks.get(timeout=240.0) for _ in ranks]
    for process in ranks:
        process.join()
    return {phase: max(one[phase] for one in found) for phase in found[0]}


async def measure_engine(case: EngineCase, model: str) -> dict[str, int]:
    """An engine from load to the end of its second batch."""
    found = Peaks()
    from rlpost.rollout.engine import EngineSettings, VllmEngine
    from rlpost.types import GenerateRequest, SamplingSettings

    engine = VllmEngine(
        EngineSettings(
            name="engine", model_path=model, dtype=case.dtype, device="cpu", in_actor=True, max_model_len=512,
            max_num_seqs=case.max_num_seqs, block_size=32, prefix_caching=True, kv_cache_mib=case.kv_cache_mib,
        )
    )  # fmt: skip
    await engine.start()
    found.end("load")
    random, vocabulary = np.random.default_rng(0), load_shape(model).vocabulary
    for batch in range(2):
        requests = [
            GenerateRequest(
                request_id=f"{batch}.{number}", tokens=random.integers(FIRST_ID, vocabulary, case.prompt).tolist(), seed=number,
                sampling=SamplingSettings(temperature=1.0, max_new_tokens=case.new, stop_token_ids=()),
            )
            for number in range(case.max_num_seqs)
        ]  # fmt: skip
        await engine.submit(requests)
        ended = 0
        while ended < len(requests):
            ended += len(await engine.collect(1.0))
        found.end("generate")
    await engine.stop()
    return found.bytes


# ---- the comparison --------------------------------------------------------------------------------------------------


def trainer_prediction(case: TrainerCase, model: str) -> MemoryTable:
    """What the planner says of a rank."""
    shape, config = load_shape(model), case.training
    setup = TrainerSetup(
        ranks=case.ranks,
        recipe=find_recipe(case.optimizer),
        micro_batch_tokens=case.tokens,
        target_tokens=case.tokens - case.tokens // 4,
        micro_batches=case.micro_batches,
        logprob_chunk_tokens=config.get("logprob_chunk_tokens", 1024),
        checkpointing="full" if config.get("gradient_checkpointing") else "selective",
        reshard_after_forward=config.get("reshard_after_forward", True),
        compute_bytes={"float32": 4, "bfloat16": 2}[case.dtype],
        padded_attention=True,
        adapters=adapter_parameters(shape.linears, case.lora) if case.lora else 0,
        reference="initial" if case.reference == "initial" else "none",
        device="cpu",
    )
    return trainer_table(shape, setup, role="critic" if case.head == "value" else "policy")


def engine_prediction(case: EngineCase, model: str) -> MemoryTable:
    """What the planner says of an engine."""
    shape, each = load_shape(model), {"float32": 4, "bfloat16": 2}[case.dtype]
    tokens = int(case.kv_cache_mib * MIB / kv_bytes_per_token(shape, bytes_per_element=each))
    setup = EngineSetup(
        kv_tokens=tokens,
        weight_bytes_per_parameter=each,
        kv_bytes_per_element=each,
        max_num_seqs=case.max_num_seqs,
        batched_tokens=case.batched_tokens,
        device="cpu",
    )
    return engine_table(shape, setup)


def run_case(kind: str, name: str, model: Path, malloc: Mapping[str, str]) -> dict[str, int]:
    """A case in a process of its own; the peaks of its phases, bytes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", **malloc}
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--case", kind, name, str(model)]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind} {name} failed:\n{done.stderr[-3000:]}")
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def make_model(name: str, directory: Path) -> Path:
    """Random weights of a shape, made once."""
    path = directory / name / "model"
    if not path.exists():
        path.mkdir(parents=True)
        write_model(OWN_SHAPES.get(name) or SHAPES[name], path)
    return path


def compare(kind: str, cases: Mapping[str, Any], directory: Path, malloc: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each case's peak, predicted and measured, after the first gave the base."""
    rows: list[dict[str, Any]] = []
    base = 0.0
    for name, case in cases.items():
        model = make_model(case.shape, directory)
        table = trainer_prediction(case, str(model)) if kind == "trainer" else engine_prediction(case, str(model))
        found = run_case(kind, name, model, malloc)
        measured, phase = max(found.values()), max(found, key=table.phase_bytes)  # type: ignore[arg-type]
        lines = table.phase_bytes(phase)  # type: ignore[arg-type]
        if name == "calibration":
            base = measured - lines
            print(f"{kind}_base_bytes: {base / MIB:.0f} MiB, from {asdict(case)}", flush=True)
            continue
        error = (base + lines) / measured - 1
        rows.append({"kind": kind, "name": name, "phase": phase, "predicted": round(base + lines), "measured": measured, "error": error})
        print(f"  {name:<38}{(base + lines) / MIB:>7.0f} MiB predicted, {measured / MIB:>6.0f} measured: {error:+.1%}", flush=True)
    return rows


def compare_phases(cases: Mapping[str, TrainerCase], directory: Path) -> list[dict[str, Any]]:
    """The same phase by phase for trainers, with a malloc that keeps nothing: lines against bytes in use."""
    rows: list[dict[str, Any]] = []
    base = 0.0
    for name, case in cases.items():
        model = make_model(case.shape, directory)
        table = trainer_prediction(case, str(model)).without_surplus()
        found = run_case("trainer", name, model, GIVE_BACK)
        if name == "calibration":
            base = found["update"] - table.phase_bytes("update")
            continue
        errors = {phase: (base + table.phase_bytes(phase)) / found[phase] - 1 for phase in PHASES if phase in found}
        rows.append({"name": name, "errors": errors})
        print(f"  {name:<38}" + "  ".join(f"{phase} {error:+.1%}" for phase, error in errors.items()), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("trainer", "engine"), help="one kind of process")
    parser.add_argument("--phases", action="store_true", help="trainers also phase by phase")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the last line there too")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        kind, name, model = options.case
        found = measure_trainer(TRAINERS[name], model) if kind == "trainer" else asyncio.run(measure_engine(ENGINES[name], model))
        print(json.dumps(found), flush=True)
        os._exit(0)  # vLLM's threads would keep the process
    from rlpost.cluster.session import KEEP_FREED_MEMORY

    rows, phases = [], []
    with tempfile.TemporaryDirectory(prefix="rlpost-bench-") as scratch:
        directory = Path(scratch)
        if options.only != "engine":
            rows += compare("trainer", TRAINERS, directory, KEEP_FREED_MEMORY)
            phases = compare_phases(TRAINERS, directory) if options.phases else []
        if options.only != "trainer":
            rows += compare("engine", ENGINES, directory, KEEP_FREED_MEMORY)
    worst = max(abs(row["error"]) for row in rows)
    text = json.dumps({"settings": rows, "phases": phases, "worst_error": worst, "within_tolerance": worst <= TOLERANCE})
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
