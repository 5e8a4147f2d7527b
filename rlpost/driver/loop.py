"""What every run does beside its own kind of step: checkpoints, resuming, reports. The online and the offline loop are made from it."""

from __future__ import annotations

import asyncio
import math
import resource
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.checkpoint import directory as checkpoints
from rlpost.config.derive import Derived
from rlpost.config.schema import RunConfig
from rlpost.driver.plan_check import PlanCheck
from rlpost.observe import Console, PhaseClock, Trackers, read_metrics
from rlpost.types import ConfigError

if TYPE_CHECKING:
    from rlpost.training.group import TrainerGroup

CRITIC = "critic"
"""The critic's part of a checkpoint."""


@dataclass(kw_only=True)
class Loop(ABC):
    """A run's few numbers that change, and how they are saved."""

    config: RunConfig
    derived: Derived
    run_dir: Path
    clock: PhaseClock
    console: Console
    trackers: Trackers
    stop: asyncio.Event
    """Set by a signal: wait for no more rollouts, finish an update that has begun, save, end."""
    trainers: TrainerGroup
    critic: TrainerGroup | None = None
    plan: PlanCheck | None = None
    """What the run was expected to take; None where no plan could be made."""
    step: int = 0
    """Steps done."""
    record: dict[str, Any] = field(default_factory=dict)
    """What the present step reports."""
    saved: int = -1

    # ---- what a kind of run adds -----------------------------------------------------------------------------------

    @abstractmethod
    async def run(self, checkpoint: Path | None) -> None:
        """Train to the last step, from a checkpoint or from the start."""

    def facts(self) -> dict[str, Any]:
        """What a resumed run must have in common with the saved one, by configuration key."""
        schedule, lora = self.config.schedule, self.config.training.lora
        return {
            "algorithm.name": self.config.algorithm.name,
            "schedule.prompts_per_step": schedule.prompts_per_step,
            "seed": self.config.seed,
            "training.lora.rank": lora.rank,
            **({"training.lora.alpha": lora.alpha, "training.lora.targets": lora.targets} if lora.rank else {}),
        }

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """The loop's part of a checkpoint, as JSON values."""

    @abstractmethod
    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Continue with what :meth:`own_state` gave."""

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def more(self) -> bool:
        """Whether there is another step to do."""
        return self.step < self.config.schedule.steps and not self.stop.is_set()

    async def save(self) -> None:
        """Save every ``checkpoint.every`` steps, after the last one, and when told to stop; once a step.

        Told to stop, at once after the update: a sync and an evaluation may take longer than there is time.
        """
        settings = self.config.checkpoint
        last = self.step == self.config.schedule.steps and settings.at_end
        due = last or self.stop.is_set() or (settings.every and self.step % settings.every == 0)
        if not due or self.saved == self.step:
            return
        with self.clock.phase("checkpoint"):
            partial = await asyncio.to_thread(checkpoints.begin, self.run_dir, self.step)
            await self.trainers.call("save", str(partial))
            if self.critic is not None:
                (partial / CRITIC).mkdir()
                await self.critic.call("save", str(partial / CRITIC))
            await asyncio.to_thread(checkpoints.complete, partial, self.state())
            await asyncio.to_thread(checkpoints.prune, self.run_dir, settings.keep)
            self.saved = self.step

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint; with it what the step reported so far."""
        return {
            "step": self.step,
            "schedule": self.facts(),
            "record": {name: value if math.isfinite(value) else None for name, value in self.record.items()},
            **self.own_state(),
        }

    async def restore(self, checkpoint: Path) -> None:
        """Go on from a complete checkpoint. Raises ConfigError when settings differ that the saved state depends on."""
        state = checkpoints.read_driver_state(checkpoint)
        saved = state["schedule"]
        changed = {name: (saved[name], new) for name, new in self.facts().items() if saved.get(name, new) != new}
        if changed:
            listed = ", ".join(f"{name} was {old} and is {new}" for name, (old, new) in changed.items())
            raise ConfigError(f"{checkpoint} cannot be resumed with other settings: {listed}; set it back, or start a new run")
        await self.trainers.call("load", str(checkpoint))
        if self.critic is not None:
            await self.critic.call("load", str(checkpoint / CRITIC))
        self.step = self.saved = int(state["step"])
        self.restore_own(state)
        # At step 0 the evaluation is made again.
        self.trackers.truncate_after(self.step or -1)
        if self.step and not any(record.get("step") == self.step and "train/loss" in record for record in read_metrics(self.run_dir)):
            # Stopped between the checkpoint and the step's report.
            record = {name: math.nan if value is None else value for name, value in state["record"].items()}
            self.trackers.log({"step": self.step, **self.identity(), **record}, self.step)

    # ---- reports ---------------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """What every record says besides its step."""
        return {}

    def report(self) -> None:
        """Write the step's record, and begin the next."""
        record = {"step": self.step, **self.identity(), **self.clock.finish_step(), **self.record}
        record["memory/driver_peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.record = {}
        if self.plan is not None and not self.more:
            record.update(self.plan.errors(record))
        self.trackers.log(record, self.step)
        self.clock.start_step()
