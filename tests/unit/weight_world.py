"""A small world around the real WeightSync, EnginePool, VllmEngine and TrainerGroup; Ray and what is in weight_fakes.py are fakes.

Faults are planned by engine and stage, and happen one a call, in order. Stages:

    describe  telling where tensors lie          apply     bringing the weights in
    enter     joining a link                     answer    the acknowledgement
    stage     receiving a message                commit    stamping the version
    drain     finishing what runs                resume    generating again
    pause     before the weights come in         sums      naming what differs

Kinds of fault:

    refuse    takes what comes, then says no
    error     fails at once; where a link needs all its members, the others wait for this one
    late      does it just after the driver gave it up
    stuck     never ends
    lost      the engine's process dies
    wrong, missing, version    says that it is done, but an element, a tensor or the version is not right
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
from virtual_time import play
from weight_fakes import (
    DRAIN_S,
    NAMES,
    POLL_S,
    SIZE,
    TIMEOUT_S,
    TRAINED,
    UNDISTURBED_S,
    FakeCore,
    FakeLink,
    FakeRank,
    Weights,
    elements,
    put,
)

from rlpost.rollout.engine import EngineSettings, VllmEngine
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.types import SyncAcknowledgement, SyncPlan, SyncReport, WeightsManifest
from rlpost.weights.coordinator import WeightSync
from rlpost.weights.policy import SyncSettings


class QuietSettings(EngineSettings):
    """Of an engine that is no process of its own."""

    def environment(self) -> dict[str, str]:
        """Nothing: it would be this process's."""
        return {}


class Engine(VllmEngine):
    """The real engine over a fake vLLM."""

    def __init__(self, settings: EngineSettings, core: FakeCore, world: World) -> None:
        super().__init__(settings)
        self.core, self._world = core, world

    async def start(self) -> dict[str, Any]:
        """As the real one, after it loaded the model."""
        self.llm = self.core
        self.version = self.core.stamp = 0
        self._adapter = object()  # vLLM's request for it, which is not asked for again
        return {}

    async def drain(self) -> None:
        """As the real one."""
        await self.core.meets("drain")
        await super().drain()

    async def apply_weights(self, plan: SyncPlan) -> SyncAcknowledgement:
        """As the real one; the answer may be another."""
        answer = await super().apply_weights(plan)
        wrong = self._world.next_fault(self.core.index, "answer") == "version"
        return replace(answer, version=answer.version - 1) if wrong else answer


def heard(task: asyncio.Task[Any]) -> None:
    """Nobody need ask how it ended."""
    if not task.cancelled():
        task.exception()


class FakeActor:
    """Ray's handle of an actor: ``actor.method.remote(...)``. A call that nobody waits for any more goes on all the same."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._died: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            task = asyncio.ensure_future(self._run(method, arguments))
            task.add_done_callback(heard)
            return asyncio.shield(task)

        return SimpleNamespace(remote=remote)

    async def _run(self, method: str, arguments: Any) -> Any:
        if not self._died.done():
            call = asyncio.ensure_future(getattr(self.target, method)(*arguments))
            call.add_done_callback(heard)
            await asyncio.wait({call, self._died}, return_when=asyncio.FIRST_COMPLETED)
            if not self._died.done():
                try:
                    return call.result()
                except Exception as error:
                    raise ray.exceptions.RayTaskError(method, "", error) from error
            call.cancel()
        raise ray.exceptions.RayActorError()

    def die(self) -> None:
        """Calls that run, and later ones, fail."""
        if not self._died.done():
            self._died.set_result(None)


class Pool(EnginePool):
    """The real pool over fake actors."""

    world: World

    def _spawn(self, index: int) -> FakeActor:
        settings = self.settings[index]
        return FakeActor(Engine(settings, FakeCore(index, settings.tensor_parallel, self.world), self.world))


class World:
    """Trainer ranks and engines around one WeightSync. Use it inside :func:`virtual_time.play`; begin with :meth:`start`."""

    def __init__(
        self,
        *,
        engines: Sequence[int] = (1, 1),
        ranks: int = 2,
        carrier: str = "collective",
        eager: bool = True,
        frozen: bool = True,
        drain: bool = False,
        **settings: Any,
    ) -> None:
        """``engines``: the tensor-parallel workers of each. ``frozen``: training never changes one of the tensors."""
        self.eager, self._drain = eager, drain
        self.base: Weights = {name: tuple(range(SIZE)) for name in NAMES}
        self.trainer, self.truth = dict(self.base), {0: dict(self.base)}
        self.violations: list[str] = []
        self.hits: list[tuple[int, str, str]] = []
        """Faults that happened: engine, stage, kind."""
        self.packed: dict[int, str] = {}
        self.opened: list[tuple[Any, ...]] = []
        """What the trainer's ranks were asked to prepare for."""
        self.links: list[FakeLink] = []
        self.directory: dict[int, tuple[SyncPlan, Any]] = {}
        self.broken_sends = 0
        self.calls_to_live: int | None = None
        """How many calls the trainer lives to answer; None: for ever."""
        self.cuts = [SIZE * rank // ranks for rank in range(ranks + 1)]
        self.manifest = WeightsManifest(
            names=NAMES, shapes=((SIZE,),) * len(NAMES), dtypes=("float32",) * len(NAMES), cuts=(tuple(self.cuts),) * len(NAMES),
            trained=TRAINED if frozen else (True,) * len(NAMES), bucket_bytes=1 << 20,
        )  # fmt: skip
        self.settings = SyncSettings(
            **{
                "carrier": carrier, "deltas": True, "engine_dtype": "float32", "bucket_bytes": 1 << 20, "timeout_s": TIMEOUT_S,
                "verify": "every_sync", "directory": "somewhere", "drain_s": DRAIN_S if drain else 0.0, **settings,
            }
        )  # fmt: skip
        self.workers = list(engines)
        self.ranks: list[FakeRank] = []
        self._faults: dict[tuple[int, str], deque[str]] = {}
        self.trainer_is_dead = False

    async def start(self) -> SyncReport:
        """Everything comes up, and the first sync is done."""
        await self.connect()
        return await self.sync.sync(0)

    async def step(self, version: int, changed: int = 1) -> SyncReport:
        """The trainer comes to ``version``, and the engines must too."""
        self.train(version, changed)
        report = await self.sync.sync(version)
        self.assert_synced(version, version + 1)
        return report

    async def repair(self, version: int) -> dict[str, int]:
        """Lost engines are replaced and get ``version``. Returns the reasons counted."""
        counted: dict[str, int] = {}

        async def give(gone: list[int]) -> None:
            counted.update(await self.sync.give(gone, version))

        await self.pool.repair(give)
        return counted

    async def connect(self) -> None:
        """Everything comes up."""
        self.ranks = [FakeRank(index, self) for index in range(len(self.cuts) - 1)]
        self.rank_actors = [FakeActor(rank) for rank in self.ranks]
        common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "in_actor": True, "max_model_len": 8, "max_num_seqs": 8}
        common |= {"pause": "drain" if self._drain else "keep"}
        settings = [
            QuietSettings(name=f"engine-{index}", model_path="", block_size=32, prefix_caching=True, tensor_parallel=workers, **common)
            for index, workers in enumerate(self.workers)
        ]
        self.pool = Pool(settings, [{}] * len(settings), request_timeout_s=900, start_timeout_s=900, max_restarts=9)
        self.pool.world = self
        await self.pool.start()
        self.sync = WeightSync(TrainerGroup("trainer", self.rank_actors, 1800), self.pool, self.settings)
        await self.sync.connect()

    async def around(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        """Run a scenario; at its end the engines are stopped."""
        try:
            return await scenario
        finally:
            await self.pool.stop()

    def train(self, version: int, changed: int = 1) -> None:
        """The trainer comes to ``version``; that many elements of its tensors change."""
        keys = list(elements(self.trainer, trained_only=True))
        self.trainer = put(self.trainer, {keys[(version + step) % len(keys)]: 100 * version + step for step in range(changed)})
        self.truth[version] = dict(self.trainer)
        for core in self.cores:
            core.pauses, core.fulls, core.longest_pause_s = 0, 0, 0.0

    @property
    def cores(self) -> list[FakeCore]:
        """Of all engines."""
        return [actor.target.core for actor in self.pool.actors]

    @property
    def live(self) -> list[int]:
        """Engines that the pool takes to be alive."""
        return [index for index, alive in enumerate(self.pool.router.alive) if alive]

    # ---- faults ----------------------------------------------------------------------------------------------------

    def plan(self, engine: int, stage: str, *faults: str) -> None:
        """The next calls of this stage meet these faults."""
        self._faults.setdefault((engine, stage), deque()).extend(faults)

    def next_fault(self, engine: int, stage: str) -> str:
        """The planned fault of this call, or ""."""
        planned = self._faults.get((engine, stage))
        if not planned:
            return ""
        fault = planned.popleft()
        self.hits.append((engine, stage, fault))
        return fault

    def set_back(self, engine: int) -> tuple[str, str]:
        """An engine is at its start again, and nobody noticed. Returns the kind of this fault."""
        core = self.cores[engine]
        core.weights, core.stamp, self.pool.actors[engine].target.version = dict(self.base), 0, 0
        return "before", "behind"

    def kill(self, engine: int) -> None:
        """The process of an engine dies."""
        self.pool.actors[engine].die()
        for link in self.links:
            if engine in link.members:
                link.break_off(f"connection closed by peer {engine}")

    def trainer_works(self) -> None:
        """Rank 0 gets a call; it may be its last."""
        if self.calls_to_live is not None:
            self.calls_to_live -= 1
            if self.calls_to_live < 0:
                self.trainer_is_dead = True
                self.rank_actors[0].die()
                for link in self.links:
                    link.break_off("connection closed by the trainer")

    # ---- what must hold --------------------------------------------------------------------------------------------

    def check_all_hold(self, version: int) -> None:
        """Asked when a baseline advances."""
        for index in self.live:
            core = self.cores[index]
            if (core.weights, core.stamp) != (self.trainer, version):
                self.violations.append(f"the baseline moved to {version}, but engine {index} holds {core.weights} as {core.stamp}")

    def assert_synced(self, version: int, syncs: int) -> None:
        """After a sync that returned, the ``syncs``-th."""
        assert self.violations == []
        for index in self.live:
            core, engine = self.cores[index], self.pool.actors[index].target
            assert (core.weights, core.stamp, engine.version, core.paused) == (self.trainer, version, version, False), f"engine {index}"
        for rank in self.ranks:
            assert len(rank.advanced) == syncs and rank.advanced[-1] == version
            assert self.settings.deltas is False or rank.baseline == {
                key: value for key, value in elements(self.trainer, trained_only=True).items() if key[1] in rank.rows
            }
        assert self.sync.version == version

    def assert_not_synced(self, before: int, syncs: int) -> None:
        """After a sync that raised; ``before`` is the version of the last one that returned."""
        assert self.violations == []
        assert all(len(rank.advanced) == syncs for rank in self.ranks if not self.trainer_is_dead)
        assert self.sync.version == before
        # One that is late may yet do what it was told before; the run ends, and with it the engine.
        behind = {engine for engine, stage, kind in self.hits if kind in ("late", "stuck", "lost") or stage == "resume"}
        assert [index for index in self.live if index not in behind and self.cores[index].paused] == []


@contextmanager
def fake_ray() -> Iterator[None]:
    """Actors can be killed, and virtual time does not go by in thousandths."""
    with patch.object(ray, "kill", lambda actor: actor.die()), patch("rlpost.rollout.engine.STAGE_POLL_S", POLL_S):
        yield


Scenario = Callable[[World], Awaitable[None]]


def in_world(scenario: Scenario, **options: Any) -> None:
    """Play a scenario that begins after the first sync."""
    world = World(**options)

    async def everything() -> None:
        report = await world.start()
        assert (report.mode, report.verified, report.fallbacks) == ("full", True, {}), "the first sync of a run"
        await scenario(world)

    with fake_ray():
        play(world.around(everything()))


def assert_undisturbed(world: World, engine: int, fulls: int = 0) -> None:
    """It took part like all others, was paused once and for no time, and needed no sync of its own."""
    core = world.cores[engine]
    assert (core.fulls, core.pauses) == (fulls, 1)
    assert core.longest_pause_s < UNDISTURBED_S
