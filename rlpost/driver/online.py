"""The online loop: rollouts, rewards, update, weight sync; synchronous at max_staleness 0, overlapped above, the same lines."""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.checkpoint import directory as checkpoints
from rlpost.config.derive import Derived
from rlpost.config.schema import RunConfig
from rlpost.data.cursor import PromptCursor
from rlpost.driver.batch import Minibatch, build_minibatch, split, with_old_logprobs, with_reference_logprobs
from rlpost.driver.evaluate import evaluate
from rlpost.driver.failures import FailureBudget
from rlpost.driver.setup import Inputs, Parts
from rlpost.observe import Console, PhaseClock, RolloutWriter, Trackers, read_metrics, summarise_rollouts
from rlpost.observe.rollouts import prompt_text
from rlpost.rollout.buffer import StalenessBuffer
from rlpost.rollout.collector import Collector
from rlpost.training.group import TrainerGroup
from rlpost.training.packing import occupancy, pack, unpack
from rlpost.training.protocol import UpdateRequest
from rlpost.types import ConfigError, Group, SyncReport

SYNC_MODES = {"full": 0, "trained": 1, "delta": 2, "adapter": 3}
"""The numbers of ``sync/mode``."""

NOT_MEASURED: dict[str, float] = {
    "train/tokens": 0,
    "train/kl": 0.0,
    **dict.fromkeys(("train/loss", "train/grad_norm", "train/lr", "train/occupancy", "train/entropy"), math.nan),
    **dict.fromkeys(("train/ratio_max", "train/clip_fraction", "parity/logprob_abs_mean", "parity/logprob_abs_max"), math.nan),
}
"""What a step reports of what its updates do not: nothing was to be trained on, there is no reference, or (parity) every token is stale."""


@dataclass(kw_only=True)
class OnlineRun:
    """One run: its parts, and the few numbers that change."""

    config: RunConfig
    derived: Derived
    inputs: Inputs
    parts: Parts
    run_dir: Path
    clock: PhaseClock
    console: Console
    trackers: Trackers
    stop: asyncio.Event
    """Set by a signal: finish the step, save, end."""
    step: int = 0
    """Steps done, and the policy version."""
    record: dict[str, Any] = field(default_factory=dict)
    """What the present step reports."""

    def __post_init__(self) -> None:
        schedule = self.config.schedule
        self.buffer = StalenessBuffer(schedule.prompts_per_step, schedule.max_staleness)
        self.cursor = PromptCursor(len(self.inputs.prompts), self.config.seed, self.config.data.shuffle)
        self.collector = Collector(self.parts.rollout, self.inputs.prompts, self.cursor, self.buffer)
        self.budget = FailureBudget(self.config.reward_runner.max_failed_fraction)
        self.rollouts = RolloutWriter(self.run_dir, self.config.observe.rollouts)
        self.colocated = self.config.placement.mode == "colocated"
        # Variable-length kernels take sequences that lie end to end, so there a prompt is computed for each sample.
        self.share = self.derived.attention == "padded"
        self.saved = -1
        self.unfinished: dict[int, tuple[int, int]] = {}

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def run(self, checkpoint: Path | None) -> None:
        """Train to the last step. The first sync is full and comes before the first rollout, after a resume too."""
        if checkpoint is not None:
            await self.restore(checkpoint)
        self.clock.start_step()
        await self.sync()
        self.collector.resume(self.unfinished)
        if self.step == 0:
            await self.evaluate()
        while self.step < self.config.schedule.steps and not self.stop.is_set():
            self.collector.fill()
            groups = await self.next_batch()
            await self.learn(groups)
            self.step += 1
            await self.save()
            await self.sync()
            await self.evaluate()
            self.buffer.version = self.step
            self.report(groups)
        await self.save(at_stop=True)

    async def next_batch(self) -> list[Group]:
        """The next groups, at most ``max_staleness`` versions old. An engine that is lost meanwhile is replaced."""
        with self.clock.phase("generate"):
            while True:
                lost = self.parts.engines.lost
                groups = await self.collector.take(self.config.schedule.rollout_timeout_s, interrupted=lost.is_set)
                if groups is not None:
                    break
                await self.repair_engines()
        # What came after the last generation was waiting for rewards.
        scoring = max(0.0, time.perf_counter() - self.collector.generated_at)
        self.clock.attribute("generate", "reward", min(scoring, self.clock.seconds_in("generate")))
        if self.colocated:
            await self.parts.engines.call("sleep", timeout_s=self.config.weights.timeout_s)
            await self.parts.trainers.call("onload")
        return groups

    async def learn(self, groups: Sequence[Group]) -> None:
        """One optimizer step for each minibatch, unless nothing in the batch can be trained on."""
        algorithm, components = self.inputs.algorithm, self.inputs.algorithm.components()
        settings = self.config.algorithm
        batches = [
            build_minibatch(
                part,
                algorithm,
                version=self.step,
                aggregation=settings.loss_aggregation,
                constant=self.config.sampling.max_new_tokens,
                old=self.derived.old_logprobs,
            )
            for part in split(groups, settings.minibatches)
        ]
        self.budget.check(groups, trained=sum(len(batch.terms) for batch in batches))
        batches = [await self._complete(batch) for batch in batches]
        filled = [batch for batch in batches if batch.terms]
        with self.clock.phase("update"):
            metrics = [await self._update(batch, components, first=index == 0) for index, batch in enumerate(filled)]
        self.record.update(summarise_rollouts(groups, policy_version=self.step, generate_s=self.collector.take_busy_s()))
        self.record.update({**NOT_MEASURED, **merge(metrics)})

    async def _complete(self, batch: Minibatch) -> Minibatch:
        """Add the logprobs that the loss needs and that only a forward gives."""
        if not batch.terms:
            return batch
        if self.derived.old_logprobs == "recompute":
            with self.clock.phase("old_logprob"):
                batch = with_old_logprobs(batch, await self._logprobs(self.parts.trainers, "logprobs", batch))
        if self.derived.reference != "none":
            with self.clock.phase("reference"):
                group = self.parts.reference or self.parts.trainers
                method = "logprobs" if self.parts.reference else "reference_logprobs"
                batch = with_reference_logprobs(batch, await self._logprobs(group, method, batch))
        return batch

    async def _logprobs(self, group: TrainerGroup, method: str, batch: Minibatch) -> list[Any]:
        packed = pack(batch.terms, ranks=group.world, micro_batch_tokens=self.config.training.micro_batch_tokens, share=self.share)
        values = await group.call_each(method, [(micros, self.config.sampling.temperature) for micros in packed])
        return unpack(packed, values, batch.terms)

    async def _update(self, batch: Minibatch, components: Sequence[Any], *, first: bool) -> dict[str, float]:
        packed = pack(
            batch.terms, ranks=self.parts.trainers.world, micro_batch_tokens=self.config.training.micro_batch_tokens, share=self.share
        )
        requests = [
            (
                UpdateRequest(
                    micro_batches=micros,
                    denominator=batch.denominator,
                    components=components,
                    temperature=self.config.sampling.temperature,
                    measure_parity=first,
                ),
            )
            for micros in packed
        ]
        metrics: dict[str, float] = (await self.parts.trainers.call_each("update", requests))[0]
        return {**metrics, "train/occupancy": occupancy(packed)}

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
                await self.parts.trainers.call("offload")
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

    async def save(self, at_stop: bool = False) -> None:
        """Save every ``checkpoint.every`` steps and after the last one; ``at_stop``: what a signal interrupted, if not saved yet.

        It comes before the sync: what is saved is the trainer after its update, and a resume begins with a sync.
        """
        settings = self.config.checkpoint
        last = self.step == self.config.schedule.steps and settings.at_end
        due = self.stop.is_set() if at_stop else (last or (settings.every and self.step % settings.every == 0))
        if not due or self.saved == self.step:
            return
        with self.clock.phase("checkpoint"):
            partial = await asyncio.to_thread(checkpoints.begin, self.run_dir, self.step)
            await self.parts.trainers.call("save", str(partial))
            await asyncio.to_thread(checkpoints.complete, partial, self.state())
            await asyncio.to_thread(checkpoints.prune, self.run_dir, settings.keep)
            self.saved = self.step

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint: the cursor, the groups that are under way, and what the step reported so far."""
        return {
            "step": self.step,
            "schedule": self._schedule_facts(),
            "dispatched": self.buffer.dispatched,
            "cursor": dict(self.cursor.state()),
            "unfinished": {str(index): list(row) for index, row in self.collector.rows.items()},
            "record": {name: value if math.isfinite(value) else None for name, value in self.record.items()},
        }

    def _schedule_facts(self) -> dict[str, Any]:
        """What a resumed run must have in common with the saved one: the groups under way, the data order, and what is trained."""
        schedule, lora = self.config.schedule, self.config.training.lora
        return {
            "schedule.prompts_per_step": schedule.prompts_per_step,
            "schedule.max_staleness": schedule.max_staleness,
            "algorithm.group_size": self.config.algorithm.group_size,
            "seed": self.config.seed,
            "training.lora.rank": lora.rank,
            **({"training.lora.alpha": lora.alpha, "training.lora.targets": lora.targets} if lora.rank else {}),
        }

    async def restore(self, checkpoint: Path) -> None:
        """Go on from a complete checkpoint: trainer state, cursor, and the groups that were under way."""
        state = checkpoints.read_driver_state(checkpoint)
        saved = state["schedule"]
        changed = {name: (saved[name], new) for name, new in self._schedule_facts().items() if saved.get(name, new) != new}
        if changed:
            listed = ", ".join(f"{name} was {old} and is {new}" for name, (old, new) in changed.items())
            raise ConfigError(f"{checkpoint} cannot be resumed with other settings: {listed}; set it back, or start a new run")
        await self.parts.trainers.call("load", str(checkpoint))
        self.step = self.saved = self.buffer.version = int(state["step"])
        self.buffer.dispatched = int(state["dispatched"])
        self.cursor.restore(state["cursor"])
        self.unfinished = {int(index): (row[0], row[1]) for index, row in state["unfinished"].items()}
        self.trackers.truncate_after(self.step)
        if not any(record.get("step") == self.step and "train/loss" in record for record in read_metrics(self.run_dir)):
            # Stopped between the checkpoint and the step's report.
            record = {name: math.nan if value is None else value for name, value in state["record"].items()}
            self.trackers.log({"step": self.step, "policy_version": self.step, **record}, self.step)

    def report(self, groups: Sequence[Group]) -> None:
        """Write the step's record and rollouts."""
        if (self.step - 1) % self.config.observe.rollouts_every == 0:
            self.rollouts.write(self.step, groups)
        record = {"step": self.step, "policy_version": self.step, **self.clock.finish_step(), **self.record}
        record["memory/driver_peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        record["engine/restarts"] = self.parts.engines.restarts
        self.record = {}
        self.trackers.log(record, self.step)
        if self.config.observe.print_sample:
            first = groups[0].trajectories[0]
            self.console.sample(prompt_text(groups[0].prompt), first.completion, first.reward)
        self.clock.start_step()


def merge(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: maxima of maxima, sums of tokens, the last learning rate, means of the rest."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for one in metrics for name in one):
        values = [one[name] for one in metrics if name in one]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name == "train/tokens":
            result[name] = sum(values)
        elif name == "train/lr":
            result[name] = values[-1]
        else:
            result[name] = sum(values) / len(values)
    return result
