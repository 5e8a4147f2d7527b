"""Measures weight syncs between real trainer ranks and real engines: every transport on the same weights, in turns.

connect   each transport once: both ends meet, and its first sync, which is full
rounds    each transport in turn (so that what else runs on the machine hits all alike): change some weights, sync; beside it a plain
          memory copy of the same bytes and, for the collective transport, a bare broadcast of them
memory    once more each, now watching the peak of trainer rank 0 and of the engines
Or, instead of the changes, the consecutive checkpoints of a run are loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from rlpost.cluster import actor_process, session
from rlpost.cluster.placement import Gang
from rlpost.config.derive import Bundle
from rlpost.config.schema import TrainingConfig
from rlpost.rollout.engine import EngineSettings
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.training.protocol import WorkerSettings
from rlpost.types import InfrastructureError, SyncReport
from rlpost.weights.bench_actors import MeasuredEngine, MeasuredRankActor
from rlpost.weights.bench_links import Transport, sync_settings
from rlpost.weights.bench_plan import BenchSettings, names_of
from rlpost.weights.buckets import DTYPE_BYTES

MODEL_LEN = 128
"""Tokens of a sequence: nothing is sampled, and the engine's own memory is not what is measured."""
KV_CACHE_MIB = 256
CPUS_EACH = 0.5
"""What a run asks for by default; less where a machine has too few for all parts."""
PLACEMENT_TIMEOUT_S = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One measured sync and what was measured beside it. ``step`` names what changed: a round, or a transition between checkpoints.

    ``copy_s`` is of the weights that the sync brought up to date: what it moved, and for a delta all that training changes.
    """

    step: str
    report: SyncReport
    copy_s: float
    bare_s: float | None = None


@dataclass(kw_only=True)
class Series:
    """All that is known of one transport. Memory in GiB, None where it cannot be told."""

    transport: str
    carrier: str
    connect_s: float
    first: SyncReport
    kept_trainer_gib: float | None
    kept_engine_gib: float | None
    """What stays resident when its first sync is over."""
    turns: list[Turn] = field(default_factory=list)
    peak_trainer_gib: float | None = None
    peak_engine_gib: float | None = None
    """Above what was resident before a sync."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything that was measured, and the transports that cannot run here, with the reason."""

    settings: BenchSettings
    parameters: int
    trained: int
    series: list[Series]
    left_out: dict[str, str]


def measure(settings: BenchSettings, say: Say) -> Measured:
    """Start Ray and all parts, measure, take them down. Raises RlpostError."""
    return asyncio.run(_measure(settings, say))


async def _measure(settings: BenchSettings, say: Say) -> Measured:
    async with AsyncExitStack() as stack:
        where = session.connect(None)
        stack.callback(session.disconnect)
        say(f"Ray on {where['where']}; starting {settings.ranks} trainer rank(s) and {settings.engines} engine(s)")
        trainers, engines, size = await _start_parts(settings, where["resources"], stack)
        say(f"model of {size['parameters']:,} parameters, {size['trained']:,} trained; all parts are up")
        bench = _Bench(settings, trainers, engines, size["trained"], say)
        await bench.connect()
        if settings.checkpoints:
            await bench.replay()
        else:
            await bench.rounds()
        await bench.memory()
        return Measured(
            settings=settings, parameters=size["parameters"], trained=size["trained"], series=bench.series, left_out=bench.left_out
        )


# ---- the parts -------------------------------------------------------------------------------------------------------


async def _start_parts(
    settings: BenchSettings, resources: dict[str, float], stack: AsyncExitStack
) -> tuple[TrainerGroup, EnginePool, dict[str, Any]]:
    """Trainer ranks and engines as in a run; with them what rank 0 says of the model."""
    parts = settings.ranks + settings.engines
    gpus = 0 if settings.device == "cpu" else 1
    cpus = min(CPUS_EACH, int(resources.get("CPU", 1.0)) / parts)
    bundles = [Bundle("trainer", index, {"CPU": cpus, "GPU": gpus}) for index in range(settings.ranks)]
    bundles += [Bundle("engine", index, {"CPU": cpus, "GPU": gpus}) for index in range(settings.engines)]
    gang = await Gang.reserve(bundles, PLACEMENT_TIMEOUT_S)
    stack.callback(gang.release)

    def options(index: int, name: str, variables: dict[str, str]) -> dict[str, Any]:
        log = Path(settings.logs) / f"{name}.log"
        share = {"num_cpus": cpus, **({"num_gpus": gpus} if gpus else {})}
        return {**gang.options(index, **share), "runtime_env": {"env_vars": {**variables, **actor_process.variables(log)}}}

    variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if settings.device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", **session.KEEP_FREED_MEMORY}
    remote = ray.remote(MeasuredRankActor)
    actors = [
        remote.options(**options(rank, f"trainer-{rank}", variables)).remote(rank, settings.ranks, worker_settings(settings))
        for rank in range(settings.ranks)
    ]
    trainers = TrainerGroup("trainer", actors, settings.timeout_s)
    stack.callback(trainers.kill)
    each = [engine_settings(settings, index) for index in range(settings.engines)]
    engines = EnginePool(
        each,
        [options(settings.ranks + index, one.name, one.environment()) for index, one in enumerate(each)],
        request_timeout_s=settings.timeout_s,
        start_timeout_s=settings.timeout_s,
        max_restarts=0,
        actor_class=MeasuredEngine,
    )
    stack.push_async_callback(engines.stop)
    _, size = await asyncio.gather(engines.start(), trainers.setup(settings.timeout_s))
    return trainers, engines, size


def worker_settings(settings: BenchSettings) -> WorkerSettings:
    """A trainer rank that could train, so that its parameters count as trained; no step is taken, so AdamW holds nothing."""
    return WorkerSettings(
        model_path=settings.model_path,
        training=TrainingConfig(ranks=settings.ranks, trainable=settings.trainable),
        dtype=settings.dtype,
        device=settings.device,
        attention="padded",
        total_updates=1,
        seed=0,
        timeout_s=settings.timeout_s,
    )


def engine_settings(settings: BenchSettings, index: int) -> EngineSettings:
    """An engine with little room for sequences."""
    return EngineSettings(
        name=f"engine-{index}",
        model_path=settings.model_path,
        dtype=settings.dtype,
        device=settings.device,
        in_actor=settings.device == "cpu",
        max_model_len=MODEL_LEN,
        max_num_seqs=8,
        block_size=32,
        prefix_caching=True,
        kv_cache_mib=KV_CACHE_MIB,
        extra={"max_num_batched_tokens": MODEL_LEN} if settings.device == "cpu" else {},
    )


# ---- the measurement -------------------------------------------------------------------------------------------------


class _Bench:
    """All transports on one set of parts. ``version`` counts the syncs of all of them."""

    def __init__(self, settings: BenchSettings, trainers: TrainerGroup, engines: EnginePool, trained: int, say: Say) -> None:
        self.settings, self.trainers, self.engines, self.say = settings, trainers, engines, say
        self.trained_bytes = trained * DTYPE_BYTES[settings.dtype]
        self.version = 0
        self.changes = 0
        self.transports: list[Transport] = []
        self.series: list[Series] = []
        self.left_out: dict[str, str] = {}

    async def connect(self) -> None:
        """Open every transport. One that cannot run here is left out, or, when the user named it, an error."""
        if self.settings.checkpoints:
            await self.trainers.call("load_model", self.settings.checkpoints[0])
        for name in self.settings.transports:
            transport = Transport(name, self.trainers, self.engines, sync_settings(self.settings, name))
            try:
                await self._open(transport)
            except InfrastructureError as error:
                if self.settings.explicit:
                    raise InfrastructureError(f"the transport {name} cannot run here: {error}") from error
                self.left_out[name] = str(error)
                self.say(f"{name} is left out, it cannot run here: {error}")
                await self.trainers.call("forget", name)
        if not self.series:
            raise InfrastructureError("no transport can run here: " + "; ".join(f"{name}: {why}" for name, why in self.left_out.items()))
        if any(transport.carrier == "collective" for transport in self.transports) and self.settings.device == "cpu":
            await self._connect_bare()

    async def _open(self, transport: Transport) -> None:
        before = await self._gauge("settle")
        started = time.perf_counter()
        await transport.connect()
        connect_s = time.perf_counter() - started
        report = await self._sync(transport)
        after = await self._gauge("settle")
        kept = [b - a if a is not None and b is not None else None for a, b in zip(before, after, strict=True)]
        self.transports.append(transport)
        self.series.append(
            Series(
                transport=transport.name, carrier=transport.carrier, connect_s=connect_s, first=report, kept_trainer_gib=kept[0],
                kept_engine_gib=kept[1],
            )
        )  # fmt: skip
        self.say(f"{transport.name}: connected in {connect_s:.2f} s, first sync {report.seconds:.2f} s")

    async def rounds(self) -> None:
        """Change, sync, next transport; the order turns with each round."""
        for number in range(self.settings.repeats):
            shift = number % len(self.transports)
            for index in [*range(shift, len(self.transports)), *range(shift)]:
                await self._change()
                await self._take_turn(index, f"round {number + 1} of {self.settings.repeats}")

    async def replay(self) -> None:
        """Load checkpoint after checkpoint. Delta goes first: after it, the engines hold what the others send again."""
        names = names_of(self.settings.checkpoints)
        order = sorted(range(len(self.transports)), key=lambda index: self.transports[index].name != "delta")
        for before, after, checkpoint in zip(names[:-1], names[1:], self.settings.checkpoints[1:], strict=True):
            await self.trainers.call("load_model", checkpoint)
            for index in order:
                await self._take_turn(index, f"{before} -> {after}")

    async def memory(self) -> None:
        """One more sync of each transport, watched."""
        for transport, series in zip(self.transports, self.series, strict=True):
            self.say(f"memory of {transport.name}")
            if self.settings.checkpoints:
                # The whole of the run's change, back and forth.
                await self.trainers.call("load_model", self.settings.checkpoints[-(self.changes % 2)])
                self.changes += 1
            else:
                await self._change()
            before = await self._gauge("settle")
            await self._sync(transport)
            after = await self._gauge("peak")
            series.peak_trainer_gib, series.peak_engine_gib = (
                b - a if a is not None and b is not None else None for a, b in zip(before, after, strict=True)
            )

    async def _take_turn(self, index: int, step: str) -> None:
        transport, series = self.transports[index], self.series[index]
        report = await self._sync(transport)
        copy_s = (await self.trainers.call("copy_seconds", self.trained_bytes if report.mode == "delta" else report.bytes))[0]
        bare_s = await self._bare_broadcast(report.bytes) if transport.name == "collective" and self.settings.device == "cpu" else None
        series.turns.append(Turn(step=step, report=report, copy_s=copy_s, bare_s=bare_s))
        self.say(f"{step}: {transport.name} {report.mode} {report.seconds:.3f} s, paused {report.paused_s:.3f} s, {report.bytes:,} bytes")

    async def _change(self) -> None:
        assert self.settings.changed is not None
        self.changes += 1
        await self.trainers.call("change", self.settings.changed, self.changes)

    async def _sync(self, transport: Transport) -> SyncReport:
        """A sync, after which all other transports know what the engines hold."""
        self.version += 1
        report = await transport.sync(self.version)
        if report.fallbacks:
            self.say(f"{transport.name}: engines needed full syncs besides: {dict(report.fallbacks)}")
        for other in self.transports:
            if other is not transport:
                await other.observe(self.version)
        return report

    async def _gauge(self, method: str) -> tuple[float | None, float | None]:
        """GiB of trainer rank 0, and of the largest engine."""
        trainer = (await self.trainers.call(method))[0]
        engines = await self.engines.call(method, timeout_s=self.settings.timeout_s)
        return trainer, None if None in engines else max(engines)

    # ---- the bare broadcast ----------------------------------------------------------------------------------------

    async def _connect_bare(self) -> None:
        world, timeout_s = 1 + self.settings.engines, self.settings.timeout_s
        host, port = (await self.trainers.call("serve_bare", world, timeout_s))[0]
        entering = {index: (host, port, 1 + index, world, timeout_s) for index in range(self.settings.engines)}
        await self._both(self.trainers.call("join_bare", world, timeout_s), "join_bare", entering)

    async def _bare_broadcast(self, size: int) -> float:
        seconds = await self._both(
            self.trainers.call("bare_broadcast", size), "bare_broadcast", {index: (size,) for index in range(self.settings.engines)}
        )
        return float(seconds[0])

    async def _both(self, trainers: Any, method: str, arguments: dict[int, tuple[Any, ...]]) -> list[Any]:
        sent, received = await asyncio.gather(trainers, self.engines.outcomes(method, arguments, timeout_s=self.settings.timeout_s))
        for answer in received.values():
            if isinstance(answer, Exception):
                raise answer
        result: list[Any] = sent
        return result
