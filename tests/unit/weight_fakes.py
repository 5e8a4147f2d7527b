"""Fakes around the driver's side of a weight sync: links, trainer ranks and vLLM, small but with real state (weights are dictionaries of
integers). What must hold is checked at each change; weight_world.py puts them together.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpost.types import Layout, SyncPlan, SyncRefusedError, WeightsManifest
from rlpost.weights.coordinator import GRACE_S, MODULUS
from rlpost.weights.links import LinkSettings, carrier
from rlpost.weights.sender import SendReport

if TYPE_CHECKING:
    from weight_world import World

NAMES, TRAINED = ("embed", "layer", "frozen"), (True, True, False)
SIZE = 4
"""Elements of each tensor, all of one dimension."""

TIMEOUT_S = 300.0
DRAIN_S = 900.0
LATE_S, LATE_DRAIN_S = TIMEOUT_S + GRACE_S + 1, DRAIN_S + GRACE_S + 1
FOREVER_S = 1e9
POLL_S = 10.0
UNDISTURBED_S = 2 * POLL_S
"""Virtual seconds. In this world only waiting takes time: for others, until a deadline of minutes, or for the next look at a stage."""

Weights = dict[str, tuple[int, ...]]
Element = tuple[str, int]


def elements(weights: Weights, trained_only: bool = False) -> dict[Element, int]:
    """All elements by name and index."""
    chosen = [name for name, trained in zip(NAMES, TRAINED, strict=True) if trained or not trained_only]
    return {(name, index): weights[name][index] for name in chosen for index in range(SIZE)}


def tensor_sums(weights: Weights, layout: Layout, rows: range = range(SIZE)) -> dict[str, int]:
    """Each tensor's part in the fingerprint, of the rows of one trainer rank (all: of what an engine worker holds)."""
    sums = dict.fromkeys(NAMES, 0)
    for name, box in zip(NAMES, layout, strict=True):
        for index in range(*(box[0] if box is not None else (0, SIZE))):
            if index in rows:
                digest = hashlib.sha256(f"{name} {index} {weights[name][index]}".encode()).digest()
                sums[name] = (sums[name] + int.from_bytes(digest[:16], "big")) % MODULUS
    return sums


def put(weights: Weights, changes: Mapping[Element, int]) -> Weights:
    """The weights with single elements overwritten."""
    return {name: tuple(changes.get((name, index), value) for index, value in enumerate(weights[name])) for name in NAMES}


class FakeLink:
    """A link as both ends see it. ``eager``: a member has its bytes at once, else when all members came for them."""

    def __init__(self, settings: LinkSettings, world: World) -> None:
        self.settings, self._world = settings, world
        self.live = carrier(settings.carrier).live
        self.members: dict[int, range] = {}
        self.broken = ""
        self._joined = False
        self._sent: list[tuple[SyncPlan, Any]] = []
        self._taken: dict[int, int] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + self.settings.timeout_s
        while not self.broken and not holds():
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            await asyncio.wait({future}, timeout=deadline - asyncio.get_running_loop().time())
            self._waiting.discard(future)
            if not future.done():
                self.break_off(f"timed out after {self.settings.timeout_s:.0f} s")
        if self.broken:
            raise SyncRefusedError("broken", self.broken)

    def _changed(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    def break_off(self, why: str) -> None:
        """Whoever waits, or comes later, hears of it."""
        self.broken = self.broken or why
        self._changed()

    def _complete(self) -> bool:
        return self._joined and sum(map(len, self.members.values())) == self.settings.world - 1

    async def join(self) -> None:
        """The trainer rank comes."""
        self._joined = True
        self._changed()
        if self.live:
            await self._until(self._complete)

    async def enter(self, engine: int, ranks: range) -> None:
        """An engine's workers come."""
        taken = [rank for other in self.members.values() for rank in other]
        if set(ranks) & set(taken) or ranks.start < 1 or ranks.stop > self.settings.world:
            self._world.violations.append(f"{self.settings.name}: engine {engine} came as ranks {ranks}, others as {taken}")
        self.members[engine] = ranks
        self._changed()
        if self.live:
            await self._until(self._complete)

    async def send(self, plan: SyncPlan, payload: Any) -> None:
        """All members get it, or the link breaks."""
        if not self.live:
            self._world.directory[plan.version] = (plan, payload)
            return
        self._sent.append((plan, payload))
        self._changed()
        await self._until(lambda: all(self._taken.get(engine, 0) >= len(self._sent) for engine in self.members))

    async def receive(self, engine: int, plan: SyncPlan) -> Any:
        """The next payload."""
        if not self.live:
            sent, payload = self._world.directory.get(plan.version, (None, None))
        else:
            turn = self._taken.get(engine, 0)
            await self._until(lambda: len(self._sent) > turn)
            self._taken[engine] = turn + 1
            self._changed()
            if not self._world.eager:
                await self._until(lambda: all(self._taken.get(other, 0) > turn for other in self.members))
            sent, payload = self._sent[turn]
        if sent is None or (sent.version, sent.mode, sent.base_version) != (plan.version, plan.mode, plan.base_version):
            raise SyncRefusedError("broken", f"engine {engine} waits for {plan} and finds {sent}")
        return payload


class FakeRank:
    """One trainer rank: what TrainerRank.open_weights and WeightSender do. It owns some rows of every tensor."""

    def __init__(self, index: int, world: World) -> None:
        self.index, self._world = index, world
        self.rows = range(world.cuts[index], world.cuts[index + 1])
        self.layouts: list[Layout] = [(None,) * len(NAMES)]
        self.baseline: dict[Element, int] | None = None
        self.advanced: list[int] = []
        self.calls: list[str] = []
        self._pending: dict[Element, int] | None = None
        self._message: dict[Element, int] | None = None
        self._sums: list[dict[str, int]] = []
        self._doors: dict[str, FakeLink] = {}
        self.outlets: dict[str, FakeLink] = {}

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """As RankActor.call."""
        if method == "open_weights":
            self._world.opened.append(tuple(arguments))
            return self._world.manifest
        name, *rest = arguments
        self.calls.append(name)
        if self.index == 0:
            self._world.trainer_works()
        result = getattr(self, name)(*rest)
        return await result if asyncio.iscoroutine(result) else result

    def _mine(self, trained_only: bool = True) -> dict[Element, int]:
        return {key: value for key, value in elements(self._world.trainer, trained_only).items() if key[1] in self.rows}

    def _hash(self, verify: bool) -> None:
        self._sums = [tensor_sums(self._world.trainer, layout, self.rows) for layout in self.layouts] if verify else []

    def _report(self, **values: Any) -> SendReport:
        return SendReport(sums=tuple(sum(sums.values()) % MODULUS for sums in self._sums), **values)

    def sums(self) -> tuple[int, ...]:
        """Of the last plan that asked for proof."""
        return self._report().sums

    def set_layouts(self, layouts: Sequence[Layout]) -> None:
        self.layouts = list(layouts)

    def serve(self, links: Sequence[LinkSettings]) -> tuple[str, int]:
        self.close(links[0].name)
        mine = [settings for settings in links if settings.sender == self.index]
        if not mine:
            return "", 0
        self._doors[mine[0].name] = FakeLink(mine[0], self._world)
        self._world.links.append(self._doors[mine[0].name])
        return "trainer", len(self._world.links) - 1

    async def join(self, name: str) -> None:
        if name in self._doors:
            link = self._doors.pop(name)
            await link.join()
            self.outlets[name] = link

    def close(self, name: str) -> None:
        for ends in (self._doors, self.outlets):
            link = ends.pop(name, None)
            if link is not None:
                link.break_off("the trainer left")

    async def _send(self, plan: SyncPlan, payload: Any) -> None:
        if self.index not in plan.senders:
            return
        link = self.outlets[plan.link]
        if self._world.broken_sends:
            self._world.broken_sends -= 1
            link.break_off("no route to host")
        try:
            await link.send(plan, payload)
        except SyncRefusedError as error:
            self.close(plan.link)
            raise SyncRefusedError("broken", f"weights could not be sent to all engines: {error}") from error

    async def send_weights(self, plan: SyncPlan) -> SendReport:
        self._pending = None
        self._hash(plan.verify)
        payload = elements(self._world.trainer, trained_only=plan.mode == "trained")
        if self._world.settings.adapters:  # the model under it, as it was
            payload |= elements(self._world.base)
        await self._send(plan, payload)
        return self._report(bytes=4 * len(payload))

    def encode_delta(self, verify: bool) -> SendReport:
        assert self.baseline is not None, "there is no baseline before the first full sync"
        self._hash(verify)
        mine = self._mine()
        self._pending = {key: value for key, value in mine.items() if self.baseline[key] != value}
        self._message = {key: value for rank in self._world.ranks for key, value in rank.changed().items()}
        return self._report(
            bytes=8 * len(self._message) if self.index == 0 else 0, changed=len(self._pending), compared=len(mine), encode_s=1.0
        )

    def encode_adapter(self, verify: bool) -> SendReport:
        self._hash(verify)
        self._message = elements(self._world.trainer, trained_only=True)
        return self._report(bytes=8 * len(self._message) if self.index == 0 else 0)

    def changed(self) -> dict[Element, int]:
        """What this rank's part of a delta is."""
        assert self.baseline is not None
        return {key: value for key, value in self._mine().items() if self.baseline[key] != value}

    async def send_message(self, plan: SyncPlan) -> SendReport:
        assert self._message is not None and plan.message_bytes == 8 * len(self._message), "another message than was encoded"
        await self._send(plan, self._message)
        return SendReport(bytes=plan.message_bytes) if self.index in plan.senders else SendReport()

    def forget_delta(self) -> None:
        self._pending = self._message = None

    def advance(self, version: int) -> None:
        self._world.check_all_hold(version)
        # As Baseline.advance: only what the encoded delta says, unless there is none.
        self.baseline = {**(self.baseline or {}), **(self._mine() if self._pending is None or not self.baseline else self._pending)}
        self._pending = self._message = None
        self.advanced.append(version)
        for link in self.outlets.values():
            if not link.live:
                self._world.directory = {old: sent for old, sent in self._world.directory.items() if old >= version}

    def tensor_sums(self, layout: int) -> dict[str, int]:
        return dict(self._sums[layout])


class FakeCore:
    """What an engine sees of vLLM: one thing at a time, weights, the stamp on what it samples, paused or not. Every change is checked."""

    def __init__(self, index: int, workers: int, world: World) -> None:
        self.index, self.workers, self._world = index, workers, world
        self.weights, self.stamp, self.paused = dict(world.base), -1, False
        self.pauses, self.fulls, self.longest_pause_s = 0, 0, 0.0
        """Since the present sync began."""
        self.links: dict[str, FakeLink] = {}
        self.engine_core = self
        self._paused_at = 0.0
        self._staged: dict[Element, int] | None = None
        self._staging: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    def _check(self) -> None:
        truth = self._world.truth.get(self.stamp)
        if not self.paused and self.stamp >= 0 and self.weights != truth:
            self._world.violations.append(f"engine {self.index} generates with {self.weights} as version {self.stamp}, which is {truth}")

    async def meets(self, stage: str) -> str:
        """The planned fault of this call, or "". What concerns only the call itself happens here."""
        fault = self._world.next_fault(self.index, stage)
        if fault == "late":
            await asyncio.sleep(LATE_DRAIN_S if stage == "drain" else LATE_S)
        elif fault == "stuck":
            await asyncio.sleep(FOREVER_S)
        elif fault == "lost":
            self._world.kill(self.index)
            await asyncio.sleep(FOREVER_S)
        elif fault == "error":
            raise RuntimeError(f"{stage} went wrong")
        return fault

    async def update_weight_version(self, version: str) -> None:
        async with self._turn:
            if int(version) >= 0:
                await self.meets("commit")
            self.stamp = int(version)
            self._check()

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        async with self._turn:
            await self.meets("pause")
            if not self.paused:
                self.pauses += 1
                self._paused_at = asyncio.get_running_loop().time()
            self.paused = True

    async def resume_generation(self) -> None:
        async with self._turn:
            await self.meets("resume")
            if self.paused:
                self.longest_pause_s = max(self.longest_pause_s, asyncio.get_running_loop().time() - self._paused_at)
            self.paused = False
            self._check()

    async def collective_rpc(self, _method: str, args: tuple[str, bytes]) -> list[bytes]:
        """A call of every worker's WeightReceiver; its errors come back as values."""
        async with self._turn:
            try:
                answers = await getattr(self, f"_{args[0]}")(*pickle.loads(args[1]))
            except SyncRefusedError as error:
                answers = [error] * self.workers
        return [pickle.dumps(answer) for answer in answers]

    async def _describe(self, manifest: WeightsManifest) -> list[dict[str, Any]]:
        await self.meets("describe")
        why = self._world.packed.get(self.index, "")
        return [{"layout": layout, "proof": "received" if why else "live", "why": why} for layout in self._layouts()]

    def _layouts(self) -> list[Layout]:
        part = SIZE // self.workers
        return [(None,) * len(NAMES) if self.workers == 1 else (((part * w, part * (w + 1)),),) * len(NAMES) for w in range(self.workers)]

    async def _enter(self, settings: LinkSettings, first_rank: int) -> list[None]:
        await self.meets("enter")
        link = self._world.links[settings.port]
        if (link.settings.name, link.settings.world, link.settings.sender) != (settings.name, settings.world, settings.sender):
            self._world.violations.append(f"engine {self.index} was sent to {link.settings} as {settings}")
        await link.enter(self.index, range(first_rank, first_rank + self.workers))
        self.links[settings.name] = link
        return [None] * self.workers

    def _link(self, plan: SyncPlan) -> FakeLink:
        if plan.link not in self.links:
            raise SyncRefusedError("broken", f"the link {plan.link!r} was not joined before this sync")
        return self.links[plan.link]

    async def _skip(self, plan: SyncPlan) -> list[None]:
        await self._link(plan).receive(self.index, plan)
        return [None] * self.workers

    async def _begin_stage(self, plan: SyncPlan) -> list[None]:
        self._staged = None
        self._staging = asyncio.create_task(self._receive(plan))
        return [None] * self.workers

    async def _receive(self, plan: SyncPlan) -> None:
        fault = await self.meets("stage")
        message = await self._link(plan).receive(self.index, plan)
        if fault == "refuse":
            raise SyncRefusedError("corrupt", "the delta that came is damaged")
        self._staged = message

    async def _stage_done(self) -> list[bool]:
        assert self._staging is not None
        if self._staging.done():
            error = self._staging.exception()
            if error is not None:
                raise error if isinstance(error, SyncRefusedError) else SyncRefusedError("broken", str(error))
        return [self._staging.done()] * self.workers

    async def _apply(self, plan: SyncPlan) -> list[dict[str, Any]]:
        if not self.paused and self.stamp >= 0:
            self._world.violations.append(f"engine {self.index} generates as version {self.stamp} while its weights change")
        self.fulls += plan.mode == "full"
        fault = await self.meets("apply")
        try:
            if plan.mode in ("delta", "adapter"):
                changes, self._staged = self._staged, None
                if changes is None:
                    raise SyncRefusedError("broken", f"nothing is staged for version {plan.version}")
            else:
                changes = await self._link(plan).receive(self.index, plan)
            if fault == "refuse":
                raise SyncRefusedError("missing", "1 parameters never came: ['layer']")
        except SyncRefusedError:
            self.weights = put(self.weights, {("embed", 0): -1})  # half new
            raise
        self.weights = put(self.weights, changes)
        if fault == "wrong":
            self.weights = put(self.weights, {("frozen", 1): self.weights["frozen"][1] + 1})
        self._check()
        sums = [sum(sums.values()) % MODULUS for sums in self._sums()] if plan.verify else []
        return [
            {"fingerprint": f"{sums[worker]:032x}" if sums else "", "tensors": len(NAMES) - (fault == "missing"), "apply_s": 0.5}
            for worker in range(self.workers)
        ]

    def _sums(self) -> list[dict[str, int]]:
        return [tensor_sums(self.weights, layout) for layout in self._layouts()]

    async def _tensor_sums(self) -> list[dict[str, int]]:
        await self.meets("sums")
        return self._sums()
