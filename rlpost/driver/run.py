"""One run from the cluster's start to its end, and again from the last checkpoint when a part of the cluster failed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.checkpoint.directory import find_newest
from rlpost.config.derive import Derived
from rlpost.config.schema import RunConfig
from rlpost.driver import setup
from rlpost.driver.inputs import Inputs, OfflineInputs
from rlpost.driver.loop import Loop
from rlpost.driver.offline import OfflineRun
from rlpost.driver.online import OnlineRun
from rlpost.driver.plan_check import PlanCheck
from rlpost.observe import Console, PhaseClock, Trackers
from rlpost.types import InfrastructureError

EXIT_AT_ONCE = 1


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What stays the same when a run is started again."""

    config: RunConfig
    derived: Derived
    inputs: Inputs | OfflineInputs
    run_dir: Path
    console: Console
    trackers: Trackers
    plan: PlanCheck | None = None
    stop_requested: threading.Event = field(default_factory=threading.Event)
    """Set by the first signal; unlike the loop's own event it outlives the attempt that the signal came in."""


def run_with_restarts(context: RunContext, checkpoint: Path | None) -> bool:
    """Run to the end; True when a signal stopped it early.

    A failure that the loop cannot repair (a dead trainer rank, a lost node) ends everything that runs; then all of it is started
    again from the newest complete checkpoint, at most ``checkpoint.max_restarts`` times. Without a checkpoint it is raised.
    After a signal nothing is started again: the newest checkpoint is what the stopped run has saved.
    """
    restarts = 0
    while True:
        try:
            return asyncio.run(run_once(context, checkpoint))
        except InfrastructureError as error:
            newest, _ = find_newest(context.run_dir)
            if newest is not None and context.stop_requested.is_set():
                context.console.warning(
                    f"{error}; a signal had asked to stop, so the run ends here; its newest checkpoint is {newest.name}"
                )
                return True
            if newest is None or restarts >= context.config.checkpoint.max_restarts:
                raise
            restarts += 1
            checkpoint = newest
            most = context.config.checkpoint.max_restarts
            context.console.warning(f"{error}; starting again from {newest.name} ({restarts} of checkpoint.max_restarts={most})")


async def start(context: RunContext, stack: AsyncExitStack, stop: asyncio.Event) -> Loop:
    """All parts, and the loop that uses them."""
    common: dict[str, Any] = {
        "config": context.config, "derived": context.derived, "run_dir": context.run_dir, "console": context.console,
        "clock": PhaseClock(on_change=context.console.phase), "trackers": context.trackers, "stop": stop,
        "plan": context.plan,
    }  # fmt: skip
    run: Loop
    if isinstance(context.inputs, OfflineInputs):
        offline = await setup.start_offline_parts(
            context.config, context.derived, context.inputs, context.run_dir, stack, context.console.message
        )
        size = offline.reports["trainer"]
        run = OfflineRun(**common, inputs=context.inputs, trainers=offline.trainers, reference=offline.reference)
    else:
        parts = await setup.start_parts(context.config, context.derived, context.inputs, context.run_dir, stack, context.console.message)
        size = parts.reports["trainer"]
        run = online = OnlineRun(**common, inputs=context.inputs, parts=parts, trainers=parts.trainers, critic=parts.critic)
        stack.push_async_callback(online.collector.close)
    millions = f"{size['parameters'] / 1e6:.1f} M parameters, {size['trained'] / 1e6:.1f} M trained"
    context.console.message(f"model of {millions}; all parts are up")
    return run


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, Loop]) -> Loop | None:
    """What ``work`` gives; None when it is told to stop before its end, which cancels it."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


async def run_once(context: RunContext, checkpoint: Path | None) -> bool:
    """Start all parts, train, take them down; True when a signal stopped the run before its last step."""
    config, console = context.config, context.console
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        if stop.is_set():
            # The second Ctrl-C ends at once. SIGTERM comes more than once from schedulers that want no more than the first time:
            # a deleted RayJob is stopped by KubeRay and then by its pod, and a scheduler that means it has SIGKILL.
            if number == signal.SIGINT:
                os._exit(EXIT_AT_ONCE)
            return
        stop.set()
        context.stop_requested.set()
        console.warning("stopping: an update that has begun is finished, then the run is saved; a second Ctrl-C ends at once")

    where = setup.connect(config)
    async with AsyncExitStack() as stack:
        stack.callback(setup.close_session)
        # After Ray's start, which puts in a SIGTERM handler of its own that ends the process at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, request_stop, number)
        console.message(f"Ray on {where['where']}")
        run = await unless(stop, start(context, stack, stop))
        if run is None:  # the newest checkpoint is as good as what would be saved now
            return True
        await run.run(checkpoint)
        return stop.is_set() and run.step < config.schedule.steps
