"""Weight syncs under any faults: whatever engines, links and the trainer do, no engine generates with wrong weights under a known version,
and a sync either brings all live engines to the trainer's weights or stops with a reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_time import play
from weight_fakes import UNDISTURBED_S
from weight_world import World, fake_ray

from rlpost.types import InfrastructureError, SyncReport

MODES: dict[str, dict[str, Any]] = {
    "full": {"deltas": False, "frozen": False},
    "trained": {"deltas": False},
    "delta": {},
    "adapter": {"deltas": False, "adapters": True},
}
STAGES: dict[str, tuple[str, ...]] = {
    "enter": ("error", "late", "stuck", "lost"),
    "stage": ("refuse", "error", "late", "stuck", "lost"),
    "drain": ("error", "late", "lost"),
    "pause": ("error", "late", "lost"),
    "apply": ("refuse", "error", "late", "stuck", "lost", "wrong", "missing"),
    "answer": ("version",),
    "commit": ("error", "late", "stuck", "lost"),
    "resume": ("error", "late"),
    "sums": ("error", "late", "lost"),
    "describe": ("lost",),
    "before": ("behind",),
}
REASONS = {
    ("stage", "refuse"): "corrupt", ("stage", "error"): "broken", ("stage", "late"): "timeout", ("apply", "refuse"): "missing",
    ("apply", "error"): "error", ("apply", "late"): "timeout", ("apply", "wrong"): "wrong_fingerprint",
    ("apply", "missing"): "wrong_version",
    ("answer", "version"): "wrong_version", ("commit", "error"): "error", ("commit", "late"): "timeout", ("resume", "error"): "error",
    ("resume", "late"): "timeout",
}  # fmt: skip
"""How one such fault, alone, is counted."""

SYNCS = 3
TOO_MANY = re.compile(
    r"(engine-\d) needed a full weight sync (\d+) times in a row, more than weights\.max_consecutive_fallbacks=(\d+): \(1\) .*"
)

faults = st.sampled_from([(stage, kind) for stage, kinds in STAGES.items() for kind in kinds])


@dataclass(frozen=True)
class Plan:
    """A run, and what goes wrong in each of its syncs."""

    mode: str
    carrier: str
    engines: tuple[int, ...]
    eager: bool
    shared_gpu: bool = False
    drain: bool = False
    max_fallbacks: int = 3
    faults: list[tuple[int, int, tuple[str, str]]] = field(default_factory=list)
    """Sync, engine, stage and kind."""
    trainer_dies: tuple[int, int] | None = None
    """Sync, and calls in it that are still answered."""
    broken_sends: tuple[int, int] = (0, 0)
    """Sync, and how many sends break."""

    def world(self) -> World:
        """Without faults yet."""
        return World(
            engines=self.engines, ranks=max(2, len(self.engines)), carrier=self.carrier, eager=self.eager,
            shared_gpu=self.shared_gpu,
            drain=self.drain, max_consecutive_fallbacks=self.max_fallbacks, **MODES[self.mode],
        )  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any run; colocated ones share memory pairwise and know neither deltas nor adapters."""
    shared = draw(st.sampled_from([False, False, False, True]))
    engines = draw(st.lists(st.just(1) if shared else st.sampled_from([1, 2]), min_size=1, max_size=3))
    return Plan(
        mode="full" if shared else draw(st.sampled_from(list(MODES))),
        carrier="ipc" if shared else draw(st.sampled_from(["collective", "disk"])),
        engines=tuple(engines),
        eager=draw(st.booleans()),
        shared_gpu=shared,
        drain=draw(st.booleans()),
        max_fallbacks=draw(st.integers(0, 3)),
        faults=draw(st.lists(st.tuples(st.integers(0, SYNCS - 1), st.integers(0, len(engines) - 1), faults), max_size=5)),
        trainer_dies=draw(st.none() | st.none() | st.tuples(st.integers(0, SYNCS - 1), st.integers(0, 12))),
        broken_sends=draw(st.tuples(st.integers(0, SYNCS - 1), st.sampled_from([0, 0, 1, 2]))),
    )


def shared_by_others(plan: Plan, mode: str, stage: str, kind: str) -> bool:
    """Whether one engine's fault is everybody's: one that does not take what is sent holds up the sender, and so the others."""
    if kind in ("refuse", "wrong", "missing", "version", "behind"):
        return False
    if plan.mode == "adapter" and mode == "full" and stage in ("stage", "pause", "apply"):
        return True  # the first sync, before anything is generated: the model, then the adapter, in one pause of all
    if plan.carrier == "disk":
        return False
    if stage == "enter":
        return kind == "error" and not plan.shared_gpu  # who is silent is told apart from those who waited for it
    return stage == "stage" or (stage in ("pause", "apply") and mode in ("full", "trained"))


def check_innocent(plan: Plan, world: World, mode: str, touched: set[int]) -> None:
    """An engine without a fault of its own was paused once, for no time, and got nothing but what all got."""
    for engine in set(world.live) - touched:
        core = world.cores[engine]
        assert (core.fulls, core.pauses) == (int(mode == "full"), 1), f"engine {engine} was disturbed by others' faults"
        assert core.longest_pause_s < UNDISTURBED_S, f"engine {engine} was paused {core.longest_pause_s} s for others' faults"


def check_fallbacks(world: World, report: SyncReport, hits: list[tuple[int, str, str]], sharing: bool) -> None:
    counted = dict(report.fallbacks)
    assert sum(counted.values()) >= sum(max(0, core.fulls - (report.mode == "full")) for core in world.cores if world.pool.router.alive)
    if not hits and not sharing:
        assert counted == {}
    unread = world.settings.adapters and report.mode == "full"  # the answer about the model under the adapter
    if len(hits) == 1 and not sharing and hits[0][1:] in REASONS and not (unread and hits[0][2] in ("missing", "version")):
        assert counted == {REASONS[hits[0][1], hits[0][2]]: 1}


def check_stop(world: World, error: InfrastructureError, plan: Plan) -> None:
    """Only a dead trainer or an engine that cannot be healed stops a run, and the message says which and why."""
    if world.trainer_is_dead:
        assert "trainer rank 0 died in weights" in str(error)
        return
    found = TOO_MANY.fullmatch(str(error))
    assert found is not None, f"stopped by: {error}"
    assert int(found[2]) == plan.max_fallbacks + 1 == str(error).count("; (") + 1
    assert int(found[3]) == plan.max_fallbacks


async def run(plan: Plan, world: World) -> None:
    """Some syncs, each with its faults, until one raises. After each: what must hold."""
    await world.connect()
    for version in range(SYNCS):
        if version:
            world.train(version)
        for sync, engine, (stage, kind) in plan.faults:
            if sync == version and kind != "behind":
                world.plan(engine, stage, kind)
        world.hits = [(engine, *world.set_back(engine)) for sync, engine, fault in plan.faults if sync == version and fault[1] == "behind"]
        world.broken_sends = plan.broken_sends[1] if plan.broken_sends[0] == version else 0
        world.calls_to_live = plan.trainer_dies[1] if plan.trainer_dies and plan.trainer_dies[0] == version else None
        breaking = world.broken_sends
        try:
            report = await world.sync.sync(version)
        except InfrastructureError as error:
            world.assert_not_synced(before=version - 1, syncs=version)
            check_stop(world, error, plan)
            return
        world.assert_synced(version, syncs=version + 1)
        sharing = breaking > world.broken_sends or any(shared_by_others(plan, report.mode, *hit[1:]) for hit in world.hits)
        check_fallbacks(world, report, world.hits, sharing)
        if not sharing:
            check_innocent(plan, world, report.mode, {hit[0] for hit in world.hits})
        if not await repaired(plan, world, version):
            return


async def repaired(plan: Plan, world: World, version: int) -> bool:
    """Lost engines are replaced and get the version; the others notice nothing. False when that stopped the run."""
    others = [core for index, core in enumerate(world.cores) if world.pool.router.alive[index]]
    before = [(core.pauses, core.fulls) for core in others]
    while world.pool.lost.is_set():
        try:
            await world.repair(version)
        except InfrastructureError as error:
            assert world.violations == []
            check_stop(world, error, plan)
            return False
    assert world.live == list(range(len(plan.engines)))
    world.assert_synced(version, syncs=version + 1)
    assert [(core.pauses, core.fulls) for core in others] == before
    return True


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_whatever_goes_wrong_no_engine_has_wrong_weights_and_every_live_one_ends_with_the_trainers(plan: Plan) -> None:
    world = plan.world()
    with fake_ray():
        play(world.around(run(plan, world)))
