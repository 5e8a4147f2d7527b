"""Stage, compare, commit: the driver's side of a weight sync.

before   the trainer holds the weights of one version; engines hold those of an earlier one and may be generating
stage    engines freeze, all receive and load; each acknowledges with the fingerprint of what it received
commit   only if every fingerprint equals the trainer's: engines set the version and go on generating
after    the policy version moved on all engines, or on none and the run stops (or a full sync is tried again)
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from rlpost.rollout.client import EngineLostError
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.types import InfrastructureError, SyncAcknowledgement, SyncReport, WeightsManifest

ATTEMPTS = 2
"""A sync whose fingerprints differ is made once more before the run stops."""


class WeightSync:
    """Moves the trainer's weights to all engines of the pool."""

    def __init__(
        self,
        trainers: TrainerGroup,
        engines: EnginePool,
        *,
        backend: str,
        engine_dtype: str,
        bucket_bytes: int,
        timeout_s: float,
        verify: bool,
    ) -> None:
        self.trainers, self.engines = trainers, engines
        self.backend, self.engine_dtype, self.bucket_bytes = backend, engine_dtype, bucket_bytes
        self.timeout_s, self.verify = timeout_s, verify
        self._manifest: WeightsManifest | None = None

    async def connect(self) -> None:
        """Form the group of trainer rank 0 and all engine workers; again after an engine was replaced."""
        sizes = [settings.tensor_parallel for settings in self.engines.settings]
        world = 1 + sum(sizes)
        host, port = (await self.trainers.call("serve_weights", world, self.timeout_s))[0]
        joins = [(host, port, 1 + sum(sizes[:index]), world, self.backend, self.timeout_s) for index in range(len(sizes))]
        await asyncio.gather(
            self.trainers.call("join_weights", world, self.backend, self.timeout_s, timeout_s=self.timeout_s + 30),
            self.engines.call_each("join_weights", joins, timeout_s=self.timeout_s + 30),
        )
        self._manifest = (await self.trainers.call("manifest", self.engine_dtype, self.bucket_bytes))[0]

    async def full(self, version: int) -> SyncReport:
        """Send everything and make it ``version``. Raises InfrastructureError when the engines cannot be brought to it."""
        for attempt in range(1, ATTEMPTS + 1):
            started = time.perf_counter()
            try:
                fingerprint, size, memory = await self._stage(version)
            except InfrastructureError:
                await self._resume_quietly()
                raise
            if fingerprint is not None:
                await self.engines.call("commit_weights", version, timeout_s=self.timeout_s)
                seconds = time.perf_counter() - started
                return SyncReport(
                    version=version, mode="full", bytes=size, seconds=seconds, paused_s=seconds, fingerprint=fingerprint,
                    engine_peak_memory_gib=memory,
                )  # fmt: skip
            if attempt == ATTEMPTS:
                await self._resume_quietly()
        raise InfrastructureError(f"weight sync to version {version} failed {ATTEMPTS} times: {self._difference}")

    async def _stage(self, version: int) -> tuple[str | None, int, float]:
        assert self._manifest is not None, "connect() comes first"
        manifest = replace(self._manifest, version=version)
        sent, acknowledged = await asyncio.gather(
            self.trainers.call("send_weights", manifest, timeout_s=self.timeout_s),
            self.engines.call("stage_weights", manifest, timeout_s=self.timeout_s),
        )
        fingerprint, size = sent[0]
        self._difference = describe_difference(fingerprint, len(manifest.names), acknowledged)
        memory = max(a.peak_memory_gib for a in acknowledged)
        return (None if self.verify and self._difference else fingerprint), size, memory

    async def _resume_quietly(self) -> None:
        try:
            await self.engines.call("resume", timeout_s=self.timeout_s)
        except (InfrastructureError, EngineLostError):
            return  # the error that brought us here is the one to tell


def describe_difference(fingerprint: str, tensors: int, acknowledged: list[SyncAcknowledgement]) -> str:
    """Which engines do not hold what was sent; empty when all do."""
    wrong = [
        f"{a.engine} has {a.tensors} of {tensors} tensors, fingerprint {a.fingerprint}"
        for a in acknowledged
        if a.fingerprint != fingerprint or a.tensors != tensors
    ]
    return f"trainer sent {fingerprint}; " + "; ".join(wrong) if wrong else ""
