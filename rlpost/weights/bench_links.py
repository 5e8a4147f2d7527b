"""Several transports on the same trainer ranks and engines: each has a WeightSync, a sender on every rank and links of its own.

A run has one transport and one WeightSync. Here a transport's calls to the trainer go to its own senders, and its links carry its name
at the engines, so that transports can take turns without connecting anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.types import SyncPlan, SyncReport
from rlpost.weights.bench_plan import BenchSettings
from rlpost.weights.coordinator import WeightSync
from rlpost.weights.links import LinkSettings
from rlpost.weights.policy import SyncSettings

OF_A_SENDER = ("open_weights", "weights")


class TransportTrainers(TrainerGroup):
    """All ranks, as one transport sees them. The actors are MeasuredRankActors."""

    def __init__(self, group: TrainerGroup, transport: str) -> None:
        super().__init__(group.role, group.actors, group.timeout_s)
        self._transport = transport

    async def call_each(self, method: str, arguments: Sequence[Sequence[Any]], timeout_s: float | None = None) -> list[Any]:
        """See TrainerGroup; what concerns the sender goes to the transport's own."""
        if method in OF_A_SENDER:
            arguments = [(self._transport, method, *args) for args in arguments]
            method = "of_transport"
        return await super().call_each(method, arguments, timeout_s)


class TransportEngines(EnginePool):
    """All engines of a started pool, as one transport sees them."""

    def __init__(self, pool: EnginePool, transport: str) -> None:
        self.__dict__.update(vars(pool))
        self._transport = transport

    async def outcomes(self, method: str, arguments: Mapping[int, Sequence[Any]], *, timeout_s: float) -> dict[int, Any]:
        """See EnginePool; links are named after the transport."""
        renamed = {index: [self._renamed(argument) for argument in given] for index, given in arguments.items()}
        return await super().outcomes(method, renamed, timeout_s=timeout_s)

    def _renamed(self, argument: Any) -> Any:
        if isinstance(argument, LinkSettings):
            return replace(argument, name=f"{self._transport}:{argument.name}")
        if isinstance(argument, SyncPlan):
            return replace(argument, link=f"{self._transport}:{argument.link}")
        return argument


class Transport:
    """One way to bring the trainer's weights to the engines."""

    def __init__(self, name: str, trainers: TrainerGroup, engines: EnginePool, settings: SyncSettings) -> None:
        self.name, self.carrier = name, settings.carrier
        self._trainers = TransportTrainers(trainers, name)
        self._sync = WeightSync(self._trainers, TransportEngines(engines, name), settings)

    async def connect(self) -> None:
        """Both ends meet."""
        await self._sync.connect()

    async def sync(self, version: int) -> SyncReport:
        """One sync, as a run would do it."""
        return await self._sync.sync(version)

    async def observe(self, version: int) -> None:
        """Another transport brought the trainer's present weights to the engines as ``version``: a delta starts from there."""
        await self._trainers.call("weights", "advance", version)
        self._sync.version = version


def sync_settings(settings: BenchSettings, transport: str) -> SyncSettings:
    """A transport as a run's configuration would give it."""
    deltas = transport == "delta"
    carrier = transport if not deltas else ("collective" if settings.carrier == "auto" else settings.carrier)
    return SyncSettings(
        carrier=carrier,
        deltas=deltas,
        engine_dtype=settings.dtype,
        bucket_bytes=settings.bucket_mib << 20,
        timeout_s=settings.timeout_s,
        backend="gloo" if settings.device == "cpu" else "nccl",
        directory=f"{settings.directory.rstrip('/')}/{transport}",
        model_path=settings.model_path,
        keyframe_every=1 << 30,  # repeats are to be alike
    )
