"""Stage, compare, commit: the driver's side of a weight sync.

before   the trainer holds the weights of one version; engines hold those of an earlier one and may be generating
stage    engines freeze, all receive and load; each acknowledges with the fingerprint of what it received
commit   only if every fingerprint equals the trainer's: engines set the version and go on generating
after    the policy version moved on all engines; or a full sync is made again, counted and capped; or the run stops
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from rlpost.rollout.client import EngineLostError
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.types import InfrastructureError, SyncAcknowledgement, SyncReport, WeightsManifest

ATTEMPTS = 2
"""A sync that fails is made once more before the run stops."""


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
    ) -> None:
        self.trainers, self.engines = trainers, engines
        self.backend, self.engine_dtype, self.bucket_bytes = backend, engine_dtype, bucket_bytes
        self.timeout_s = timeout_s
        self.repeats = 0
        """Syncs that had to be made once more."""
        self._manifest: WeightsManifest | None = None

    async def connect(self) -> None:
        """Form the group of trainer rank 0 and all engine workers; again after an engine was replaced or a sync broke off."""
        sizes = [settings.tensor_parallel for settings in self.engines.settings]
        world = 1 + sum(sizes)
        host, port = (await self.trainers.call("serve_weights", world, self.timeout_s))[0]
        joins = [(host, port, 1 + sum(sizes[:index]), world, self.backend, self.timeout_s) for index in range(len(sizes))]
        await _both(
            self.trainers.call("join_weights", world, self.backend, self.timeout_s, timeout_s=self.timeout_s + 30),
            self.engines.call_each("join_weights", joins, timeout_s=self.timeout_s + 30),
        )
        self._manifest = (await self.trainers.call("manifest", self.engine_dtype, self.bucket_bytes))[0]

    async def full(self, version: int) -> SyncReport:
        """Send everything and make it ``version``.

        A sync that breaks off or whose fingerprints differ is made once more, over a new group; until one is committed the
        engines stay paused, for their weights may be half new. Raises EngineLostError at once when an engine died (it is to be
        replaced, then comes the next full sync), and InfrastructureError with every reason when the attempts are used up.
        """
        reasons: list[str] = []
        while len(reasons) < ATTEMPTS:
            started = time.perf_counter()
            try:
                if reasons:
                    self.repeats += 1
                    await self.connect()
                fingerprint, size, memory = await self._stage(version)
                await self.engines.call("commit_weights", version, timeout_s=self.timeout_s)
            except EngineLostError:
                raise
            except InfrastructureError as error:
                reasons.append(str(error))
                continue
            seconds = time.perf_counter() - started
            return SyncReport(
                version=version, mode="full", bytes=size, seconds=seconds, paused_s=seconds, fingerprint=fingerprint,
                engine_peak_memory_gib=memory,
            )  # fmt: skip
        await self._resume_quietly()
        listed = "; ".join(f"attempt {number}: {reason}" for number, reason in enumerate(reasons, 1))
        raise InfrastructureError(f"weight sync to version {version} failed {ATTEMPTS} times: {listed}")

    async def _stage(self, version: int) -> tuple[str, int, float]:
        """Fingerprint, bytes, and the engines' largest memory peak. Raises InfrastructureError when any engine holds something else."""
        assert self._manifest is not None, "connect() comes first"
        manifest = replace(self._manifest, version=version)
        sent, acknowledged = await _both(
            self.trainers.call("send_weights", manifest, timeout_s=self.timeout_s),
            self.engines.call("stage_weights", manifest, timeout_s=self.timeout_s),
        )
        fingerprint, size = sent[0]
        difference = describe_difference(fingerprint, manifest, acknowledged)
        if difference:
            raise InfrastructureError(difference)
        return fingerprint, size, max(a.peak_memory_gib for a in acknowledged)

    async def _resume_quietly(self) -> None:
        # So that requests end (an engine whose weights are undefined refuses what it samples); the run stops with the reasons.
        with contextlib.suppress(InfrastructureError):
            await self.engines.call("resume", timeout_s=self.timeout_s)


async def _both(trainers: Awaitable[list[Any]], engines: Awaitable[list[Any]]) -> tuple[list[Any], list[Any]]:
    """Both results, when both have ended: what still runs on one side would disturb the next attempt.

    A lost engine is raised before anything else: it is what the caller can repair, and the usual cause of the other side's failure.
    """
    results = await asyncio.gather(trainers, engines, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    lost = [error for error in errors if isinstance(error, EngineLostError)]
    for error in [*lost, *errors]:
        raise error
    return results[0], results[1]  # type: ignore[return-value]


def describe_difference(fingerprint: str, manifest: WeightsManifest, acknowledged: list[SyncAcknowledgement]) -> str:
    """Which engines do not hold what was sent; empty when all do."""
    tensors = len(manifest.names)
    wrong = [
        f"{a.engine} has {a.tensors} of {tensors} tensors of version {a.version}, fingerprint {a.fingerprint}"
        for a in acknowledged
        if (a.fingerprint, a.tensors, a.version) != (fingerprint, tensors, manifest.version)
    ]
    return f"trainer sent {fingerprint} as version {manifest.version}; " + "; ".join(wrong) if wrong else ""
