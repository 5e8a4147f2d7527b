"""Does the trainer compute one loss and one gradient, however a batch is cut into micro-batches, packed, and spread over ranks?

The weights first take one step, so that adapters, value heads and references differ from what they begin with; then the learning rate is
0, and every further step is the same computation again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rlpost.config.algorithms import is_offline
from rlpost.diagnosis.report import Finding
from rlpost.diagnosis.verify_batch import WHOLE, Batch, OfflineBatch, OnlineBatch, Parts, partitions
from rlpost.diagnosis.verify_compare import TOLERANCES, largest_difference, largest_gap
from rlpost.diagnosis.verify_guard import AREA, Say, broken, guarded
from rlpost.diagnosis.verify_plan import Plan
from rlpost.diagnosis.verify_ranks import LocalGroup, RankProcess, rank_processes
from rlpost.driver.actors import critic_settings, forward_settings, worker_settings
from rlpost.driver.inputs import Inputs, OfflineInputs
from rlpost.driver.updates import forward
from rlpost.training.packing import pack
from rlpost.training.protocol import Head, WorkerSettings

COMPARED = ("train/loss", "train/grad_norm", "train/tokens", "train/kl", "critic/loss", "critic/grad_norm")
FIX = (
    "look at what the loss of a token reads: algorithm.policy_loss or algorithm.name of your own must not divide by, count or average "
    "over the sequences that it happens to see; weights and denominators are the driver's"
)


@dataclass(kw_only=True)
class TrainerChecks:
    """The checks of one plan. ``plain`` is what every other way must give: each sequence alone, on one rank."""

    plan: Plan
    batch: Batch
    plain: dict[str, float] = field(default_factory=dict)

    @property
    def saved(self) -> Path:
        """Where the weights stand after the first step."""
        return self.plan.directory / "stepped"

    # ---- one rank ------------------------------------------------------------------------------------------------------

    async def begin(self, parts: Parts) -> None:
        """Take the one step, save it, and measure the plain way."""
        if isinstance(self.batch, OnlineBatch):
            self.batch.set_engine_logprobs(await forward(parts.policy, "logprobs", self.batch.terms(), self.batch.alone()))  # type: ignore[arg-type]
        await self.batch.learn(parts, self.batch.packing(WHOLE))
        for name, group in _trained(parts).items():
            directory = self.saved / name
            directory.mkdir(parents=True)
            await group.call("save", str(directory))
        self.plain = await self.batch.learn(parts, self.batch.alone())

    async def packing(self, parts: Parts) -> Finding:
        """What is packed, with prompts shared, against each sequence alone: every token's logprob, the loss and the gradient."""
        tolerance = TOLERANCES[self.plan.derived.dtype]
        packing, alone, terms = self.batch.packing(WHOLE), self.batch.alone(), self.batch.terms()
        tokens = sum(int(term.trainable.sum()) for term in terms)
        asked = [(parts.policy, self.batch.method, terms)]
        if self.plan.derived.reference not in ("none", "actor", "precomputed"):
            asked.append((parts.policy, "reference_logprobs", terms))
        asked += [(parts.critic, "values", terms)] if parts.critic is not None else []
        gaps = {}
        for group, method, sequences in asked:
            masks = [term.trainable for term in sequences]
            one, other = [await forward(group, method, sequences, way) for way in (alone, packing)]  # type: ignore[arg-type]
            gaps[method] = largest_gap(one, other, masks)
        name, worst = largest_difference(self.plain, await self.batch.learn(parts, packing), COMPARED)
        trained = self.plain.get("train/grad_norm", np.nan)
        good = all(gap <= tolerance.logprob for gap in gaps.values()) and worst <= tolerance.relative and trained > 0
        listed = ", ".join(f"{method} differ by at most {gap:.1e}" for method, gap in gaps.items())
        row = sum(len(micro.tokens) for micro in pack(terms, ranks=1, micro_batch_tokens=WHOLE, share=packing.share)[0])
        return Finding(
            area=AREA,
            name="packing",
            status="ok" if good else "failed",
            found=f"{len(terms)} sequences, {tokens} trained tokens, packed into {row}: {listed}; {name} differs by {worst:.1e}",
            expected=f"as each sequence alone: tokens within {tolerance.logprob:g}, loss and gradient norm within {tolerance.relative:g} "
            f"relative ({tolerance.why}); a gradient that is not 0",
            fix="" if good else FIX,
            values={"difference": worst, **{f"{method}_gap": gap for method, gap in gaps.items()}, "grad_norm": trained},
        )

    async def accumulation(self, parts: Parts) -> Finding:
        """The batch as 1, 2, 3 and many micro-batches on these ranks."""
        tolerance, ranks = TOLERANCES[self.plan.derived.dtype], parts.policy.world
        found: dict[int, tuple[str, float]] = {}
        for tokens in partitions(self.batch.terms(), self.batch.packing(WHOLE), ranks):
            metrics = await self.batch.learn(parts, self.batch.packing(tokens))
            found[parts.policy.micro_batches[-1]] = largest_difference(self.plain, metrics, COMPARED)
        name, worst = max(found.values(), key=lambda one: one[1])
        counts = ", ".join(str(count) for count in sorted(found))
        trained = self.plain.get("train/grad_norm", np.nan)
        good = worst <= tolerance.relative and trained > 0
        return Finding(
            area=AREA,
            name=f"accumulation on {ranks} rank{'s' if ranks > 1 else ''}",
            status="ok" if good else "failed",
            found=f"in {counts} micro-batches a rank: {name} differs by at most {worst:.1e} "
            f"(loss {self.plain.get('train/loss', np.nan):.6g}, gradient norm {trained:.6g})",
            expected=f"loss and gradient norm as on 1 rank, each sequence alone, within {tolerance.relative:g} relative ({tolerance.why}); "
            "a gradient that is not 0",
            fix="" if good else FIX,
            values={"difference": worst, **{f"difference_{count}_micro_batches": one for count, (_, one) in found.items()}},
        )

    async def on_ranks(self, processes: Sequence[RankProcess], ranks: int) -> Finding:
        """The same on several ranks, which load the weights after the first step."""
        parts = await start_parts(self.plan, processes[:ranks], processes[ranks:])
        for name, group in _trained(parts).items():
            await group.call("load", str(self.saved / name))
        return await self.accumulation(parts)


def _trained(parts: Parts) -> dict[str, LocalGroup]:
    return {"policy": parts.policy} | ({"critic": parts.critic} if parts.critic is not None else {})


# ---- ranks -----------------------------------------------------------------------------------------------------------


def frozen_after_one(settings: WorkerSettings) -> WorkerSettings:
    """The same ranks, whose learning rate is its peak at the first optimizer step and 0 from then on; so is a moving average's."""
    optimizer = replace(settings.training.optimizer, warmup_steps=0, decay="linear", final_ratio=0.0)
    training = replace(settings.training, optimizer=optimizer)
    return replace(settings, training=training, total_updates=2 if settings.total_updates is not None else None, reference_decay=1.0)


async def start_parts(plan: Plan, policy: Sequence[RankProcess], others: Sequence[RankProcess]) -> Parts:
    """The models of ``plan``: a rank of the policy in each of these processes, then critic and reference in one each of ``others``."""
    inputs, config, derived = plan.inputs, plan.config, plan.derived
    left = list(others)

    async def group(role: str, settings: WorkerSettings, processes: Sequence[RankProcess]) -> LocalGroup:
        made = LocalGroup(role, processes, config.schedule.phase_timeout_s)
        await made.setup(settings)
        return made

    head: Head = "value" if isinstance(inputs, OfflineInputs) and inputs.algorithm.score_head else "logprob"
    settings = worker_settings(config, derived, inputs.model_path, head=head, reference_path=inputs.reference_path)
    parts = Parts(policy=await group("trainer", frozen_after_one(settings), policy))
    if isinstance(inputs, Inputs) and derived.critic_ranks:
        settings = frozen_after_one(critic_settings(config, derived, inputs.critic_path))
        parts = replace(parts, critic=await group("critic", settings, [left.pop(0)]))
    if derived.reference == "actor":
        settings = forward_settings(config, derived, inputs.reference_path)
        parts = replace(parts, reference=await group("reference", settings, [left.pop(0)]))
    return parts


def visible_gpus(plan: Plan) -> list[str]:
    """What each process sees of GPUs: the policy's ranks one each; critic and reference share the first."""
    ranks, others = plan.config.training.ranks, int(plan.derived.critic_ranks > 0) + int(plan.derived.reference == "actor")
    if plan.machine.device == "cpu":
        return [""] * (ranks + others)
    listed = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(plan.machine.gpus))).split(",")
    return [*listed[:ranks], *[listed[0]] * others]


async def trainer_findings(plan: Plan, say: Say) -> list[Finding]:
    """Accumulation on one rank, and on two where the run has more than one; packing."""
    ranks = plan.config.training.ranks
    names = ["accumulation on 1 rank", "packing", *([f"accumulation on {ranks} ranks"] if ranks > 1 else [])]
    started = time.monotonic()
    with rank_processes(visible_gpus(plan), plan.directory / "ranks.log") as processes:
        try:
            checks = TrainerChecks(plan=plan, batch=OfflineBatch(plan) if is_offline(plan.config.algorithm) else OnlineBatch(plan))
            one = await start_parts(plan, processes[:1], processes[ranks:])
            await checks.begin(one)
        except Exception as error:  # noqa: BLE001  # see guarded
            return [broken(name, error) for name in names]
        say(f"trainer in {len(processes)} process(es), one step taken ({time.monotonic() - started:.0f} s)")
        found = [await guarded(names[0], checks.accumulation(one), say), await guarded(names[1], checks.packing(one), say)]
        if ranks > 1:
            found.append(await guarded(names[2], checks.on_ranks(processes, ranks), say))
    return found
