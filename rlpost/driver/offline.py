"""The offline loop: rows of a data set, update; no engine is started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpost.algorithms.protocol import OfflineBatch, OfflineRow
from rlpost.data.cursor import PromptCursor
from rlpost.driver.batch import with_reference_logprobs
from rlpost.driver.inputs import OfflineInputs
from rlpost.driver.loop import Loop
from rlpost.driver.reference_cache import ReferenceCache
from rlpost.driver.updates import AMOUNTS, Packing, forward, update
from rlpost.types import LossTerms

if TYPE_CHECKING:
    from rlpost.training.group import TrainerGroup

CACHED_AT_ONCE = 64
"""Rows whose reference logprobs are computed in one call, before the first step."""


NOT_EVALUATED = (*AMOUNTS, "train/occupancy", "memory/trainer_peak_gib")
"""What a measurement reports that says nothing of the model."""


@dataclass(kw_only=True)
class OfflineRun(Loop):
    """A run without engines."""

    inputs: OfflineInputs
    reference: TrainerGroup | None
    """An actor of its own; None: the trainers compute reference logprobs themselves."""

    def __post_init__(self) -> None:
        config = self.config
        self.algorithm = self.inputs.algorithm
        self.cursor = PromptCursor(len(self.inputs.rows), config.seed, config.data.shuffle)
        self.packing = Packing(
            micro_batch_tokens=config.training.micro_batch_tokens,
            share=self.derived.attention == "padded",
            together=self.algorithm.together,
        )
        self.needs_reference = self.algorithm.needs_reference
        precomputed = self.needs_reference and config.algorithm.reference == "precomputed"
        self.cache = ReferenceCache(self.run_dir) if precomputed else None

    async def run(self, checkpoint: Path | None) -> None:
        """Train to the last step."""
        if checkpoint is not None:
            await self.restore(checkpoint)
        self.clock.start_step()
        if self.cache is not None:
            await self._fill_cache(self.cache)
        if self.step == 0 and self.more:
            await self.evaluate()
        while self.more:
            rows = [self.inputs.rows[self.cursor.next()[1]] for _ in range(self.config.schedule.prompts_per_step)]
            batch, baseline = await self._complete(self.algorithm.terms(rows))
            with self.clock.phase("update"):
                components = self.algorithm.components(baseline)
                self.record.update(await update(self.trainers, batch.terms, batch.denominators, components, self.packing))
            self.step += 1
            await self.save()
            await self.evaluate()
            self.report()
        await self.save()

    # ---- reference logprobs ----------------------------------------------------------------------------------------

    async def _complete(self, batch: OfflineBatch) -> tuple[OfflineBatch, float]:
        """With reference logprobs, where the loss reads them; and the baseline, where it asks for one."""
        if not self.needs_reference:
            return batch, 0.0
        with self.clock.phase("reference"):
            batch = replace(batch, terms=with_reference_logprobs(batch.terms, await self._reference(batch.terms)))
            if not batch.estimate:
                return batch, 0.0
            own = await forward(self.trainers, "logprobs", batch.estimate, self.packing)
            other = await self._reference(batch.estimate)
        ratios = [float(np.nansum(a - b)) for a, b in zip(own, other, strict=True)]
        return batch, max(0.0, sum(ratios) / len(ratios))

    async def _reference(self, terms: Sequence[LossTerms]) -> list[np.ndarray]:
        if self.cache is not None:
            return self.cache.read(terms)
        method = "logprobs" if self.reference is not None else "reference_logprobs"
        return await forward(self.reference or self.trainers, method, terms, self.packing)

    async def _fill_cache(self, cache: ReferenceCache) -> None:
        """Before the first step the trainers hold the reference itself."""
        if await asyncio.to_thread(cache.load, required=self.step > 0):
            return
        with self.clock.phase("reference"):
            rows: list[OfflineRow] = [*self.inputs.rows, *self.inputs.held_out]
            for start in range(0, len(rows), CACHED_AT_ONCE):
                terms = self.algorithm.terms(rows[start : start + CACHED_AT_ONCE]).terms
                cache.add(terms, await forward(self.trainers, "logprobs", terms, self.packing))
                done = min(start + CACHED_AT_ONCE, len(rows))
                if done == len(rows) or done % (16 * CACHED_AT_ONCE) == 0:
                    self.console.message(f"reference logprobs of {done} of {len(rows)} rows")
            await asyncio.to_thread(cache.save)

    # ---- evaluation and state --------------------------------------------------------------------------------------

    async def evaluate(self) -> None:
        """The loss and its metrics on held-out rows, at both ends and every ``evaluation.every`` steps."""
        every = self.config.evaluation.every
        if not every or (self.step % every and self.step != self.config.schedule.steps):
            return
        with self.clock.phase("evaluate"):
            batch, baseline = await self._complete(self.algorithm.terms(self.inputs.held_out))
            components = self.algorithm.components(baseline)
            found = await update(self.trainers, batch.terms, batch.denominators, components, self.packing, method="measure")
        metrics = {f"evaluate/{name.removeprefix('train/')}": value for name, value in found.items() if name not in NOT_EVALUATED}
        if self.step == 0:
            self.trackers.log(metrics, 0)
        else:
            self.record.update(metrics)

    def own_state(self) -> dict[str, Any]:
        """See Loop."""
        return {"cursor": dict(self.cursor.state())}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """See Loop."""
        self.cursor.restore(state["cursor"])
