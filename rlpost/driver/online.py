"""The online loop: rollouts, rewards, update, weight sync; synchronous at max_staleness 0, overlapped above, the same lines."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.data.cursor import PromptCursor
from rlpost.driver.batch import trained
from rlpost.driver.evaluate import evaluate
from rlpost.driver.failures import FailureBudget
from rlpost.driver.inputs import Inputs
from rlpost.driver.learning import Learner
from rlpost.driver.loop import Loop
from rlpost.driver.setup import Parts
from rlpost.driver.updates import AMOUNTS
from rlpost.observe import RolloutWriter, summarise_rollouts
from rlpost.observe.rollouts import prompt_text
from rlpost.rollout.buffer import StalenessBuffer
from rlpost.rollout.collector import Collector
from rlpost.types import Group, InfrastructureError, SyncReport

SYNC_MODES = {"full": 0, "trained": 1, "delta": 2, "adapter": 3}
"""The numbers of ``sync/mode``."""

NOT_MEASURED: dict[str, float] = {
    **dict.fromkeys(AMOUNTS, 0),
    "train/kl": 0.0,
    **dict.fromkeys(("train/loss", "train/grad_norm", "train/lr", "train/occupancy", "train/entropy"), math.nan),
    **dict.fromkeys(("train/ratio_max", "train/clip_fraction", "parity/logprob_abs_mean", "parity/logprob_abs_max"), math.nan),
}
"""What a step reports of what its updates do not: nothing was to be trained on, there is no reference, or (parity) every token is stale."""


@dataclass(kw_only=True)
class OnlineRun(Loop):
    """One run with engines. ``step`` is also the policy version."""

    inputs: Inputs
    parts: Parts

    def __post_init__(self) -> None:
        config, schedule = self.config, self.config.schedule
        self.algorithm = self.inputs.algorithm
        self.buffer = StalenessBuffer(schedule.prompts_per_step, schedule.max_staleness)
        self.cursor = PromptCursor(len(self.inputs.prompts), config.seed, config.data.shuffle)
        resample = config.algorithm.filter.zero_variance == "resample"
        self.collector = Collector(
            self.parts.rollout,
            self.inputs.prompts,
            self.cursor,
            self.buffer,
            refuses=self.algorithm.refuses if resample else None,
            most_refused=config.algorithm.filter.max_resampled * schedule.prompts_per_step,
        )
        self.budget = FailureBudget(config.reward_runner.max_failed_fraction)
        self.rollouts = RolloutWriter(self.run_dir, config.observe.rollouts)
        self.colocated = config.placement.mode == "colocated"
        self.learner = Learner(
            config=config,
            derived=self.derived,
            algorithm=self.algorithm,
            trainers=self.trainers,
            reference=self.parts.reference,
            critic=self.critic,
            clock=self.clock,
        )
        self.unfinished: dict[int, tuple[int, int]] = {}

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def run(self, checkpoint: Path | None) -> None:
        """Train to the last step. The first sync is full and comes before the first rollout, after a resume too."""
        if checkpoint is not None:
            await self.restore(checkpoint)
        self.clock.start_step()
        await self.sync()
        self.collector.resume(self.unfinished)
        if self.step == 0 and self.more:
            await self.evaluate()
        while self.more:
            self.collector.fill()
            groups = await self.next_batch()
            if groups is None:
                break
            await self.learn(groups)
            self.step += 1
            # Before the sync: what is saved is the trainer after its update, and a resume begins with a sync.
            await self.save()
            await self.sync()
            await self.evaluate()
            self.buffer.version = self.step
            self.write(groups)
        await self.save()

    async def next_batch(self) -> list[Group] | None:
        """The next groups, at most ``max_staleness`` versions old. An engine that is lost meanwhile is replaced.

        None when the run is told to stop while it waits: a checkpoint has the groups that are under way, a step may take long.
        """
        with self.clock.phase("generate"):
            while True:
                groups = await self.collector.take(
                    self.config.schedule.rollout_timeout_s, interrupted=lambda: self.parts.engines.lost.is_set() or self.stop.is_set()
                )
                if groups is not None or self.stop.is_set():
                    break
                await self.repair_engines()
        # What came after the last generation was waiting for rewards.
        scoring = max(0.0, time.perf_counter() - self.collector.generated_at)
        self.clock.attribute("generate", "reward", min(scoring, self.clock.seconds_in("generate")))
        if self.colocated:
            try:
                await self.parts.engines.call("sleep", timeout_s=self.config.weights.timeout_s)
            except InfrastructureError:
                if groups is not None:
                    raise
                # Told to stop: an engine that is lost holds no memory, and nothing more is asked of it.
            await self.trainers.call("onload")
        return groups

    async def learn(self, groups: Sequence[Group]) -> None:
        """One optimizer step for each minibatch, unless nothing in the batch can be trained on."""
        batch = self.learner.choose(groups)
        refused = self.collector.take_refused()
        # A reward that fails for whole groups makes them refused: these failures count too.
        self.budget.check([*groups, *refused], trained=len(trained(batch)))
        metrics = await self.learner.learn(batch, self.step)
        seconds = self.collector.take_busy_s()
        self.record.update(summarise_rollouts(groups, policy_version=self.step, generate_s=seconds, groups_dropped=len(refused)))
        self.record.update({**NOT_MEASURED, **metrics})

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def sync(self) -> None:
        """Bring every engine to the trainer's weights; only then is ``step`` their policy version."""
        with self.clock.phase("sync"):
            if self.colocated:
                await self.parts.engines.call("wake", ["weights"], timeout_s=self.config.weights.timeout_s)
            self._note(await self.parts.weights.sync(self.step))
            if self.parts.engines.lost.is_set():
                await self.repair_engines()
            if self.colocated:
                await self.trainers.call("offload")
                await self.parts.engines.call("wake", ["kv_cache"], timeout_s=self.config.weights.timeout_s)

    async def repair_engines(self) -> None:
        """Replace lost engines and give them the trainer's weights, which are those of version ``step`` here; others go on."""
        restarted: Counter[str] = Counter()

        async def give_weights(indices: list[int]) -> None:
            restarted.update(await self.parts.weights.give(indices, self.step))

        with self.clock.phase("sync"):
            names = await self.parts.engines.repair(give_weights)
        self._count_fallbacks(restarted)
        self.console.warning(f"replaced {', '.join(names)}; it has the weights of version {self.step}, its episodes are made again")

    def _note(self, report: SyncReport) -> None:
        seconds = ("seconds", "paused_s", "stage_s", "gather_s", "encode_s", "transfer_s", "apply_s")
        self.record.update({f"sync/{name}": getattr(report, name) for name in ("bytes", "changed_fraction", *seconds)})
        self.record.update({"sync/mode": SYNC_MODES[report.mode], "sync/verified": float(report.verified)})
        self._count_fallbacks(report.fallbacks)
        self.record["memory/engine_peak_gib"] = report.engine_peak_memory_gib

    def _count_fallbacks(self, reasons: Mapping[str, int]) -> None:
        """Added to what the step counted already."""
        self.record["sync/fallbacks"] = self.record.get("sync/fallbacks", 0) + sum(reasons.values())
        for reason, count in reasons.items():
            self.record[f"sync/fallbacks/{reason}"] = self.record.get(f"sync/fallbacks/{reason}", 0) + count
            self.console.warning(f"{count} engine(s) needed a full weight sync: {reason}")

    # ---- evaluation, checkpoints, reports --------------------------------------------------------------------------

    async def evaluate(self) -> None:
        """Evaluate at both ends and every ``evaluation.every`` steps."""
        every = self.config.evaluation.every
        if not every or (self.step % every and self.step != self.config.schedule.steps):
            return
        with self.clock.phase("evaluate"):
            metrics, groups = await evaluate(
                self.parts.evaluation,
                self.inputs.held_out,
                step=self.step,
                timeout_s=self.config.schedule.rollout_timeout_s,
                lost=self.parts.engines.lost,
                repair=self.repair_engines,
            )
        self.rollouts.write(self.step, groups, kind="evaluation")
        if self.step == 0:
            self.trackers.log(metrics, 0)
        else:
            self.record.update(metrics)

    def identity(self) -> dict[str, Any]:
        """See Loop."""
        return {"policy_version": self.step}

    def facts(self) -> dict[str, Any]:
        """See Loop: the groups under way and the data order follow from these."""
        return {
            **super().facts(),
            "schedule.max_staleness": self.config.schedule.max_staleness,
            "algorithm.group_size": self.config.algorithm.group_size,
        }

    def own_state(self) -> dict[str, Any]:
        """The cursor, the groups that are under way, and the algorithm's own numbers."""
        return {
            "dispatched": self.buffer.dispatched,
            "cursor": dict(self.cursor.state()),
            "unfinished": {str(index): list(row) for index, row in self.collector.rows.items()},
            "algorithm": self.algorithm.state(),
        }

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """See Loop."""
        self.buffer.version = self.step
        self.buffer.dispatched = int(state["dispatched"])
        self.cursor.restore(state["cursor"])
        self.unfinished = {int(index): (row[0], row[1]) for index, row in state["unfinished"].items()}
        self.algorithm.restore(state["algorithm"])

    def write(self, groups: Sequence[Group]) -> None:
        """Write the step's rollouts and record."""
        if (self.step - 1) % self.config.observe.rollouts_every == 0:
            self.rollouts.write(self.step, groups)
        self.record["engine/restarts"] = self.parts.engines.restarts
        self.report()
        if self.config.observe.print_sample:
            first = groups[0].trajectories[0]
            self.console.sample(prompt_text(groups[0].prompt), first.completion, first.reward)
