"""The driver's side of a weight sync: stage, apply, compare, commit, and heal the engines that could not take part.

before   the trainer holds the weights of a new version; engines hold the one before it and may be generating
stage    a delta's message reaches every engine and is checked; files are written. Generation goes on
apply    each engine pauses, brings the weights in, and answers with the fingerprint of what it now holds
commit   an engine whose fingerprint equals the trainer's is stamped with the version and generates again, whatever others do
heal     every other engine gets a full sync of its own, counted by reason and capped
after    all live engines hold the version: the trainer's baseline and the policy version move. Or the run stops and says why
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlpost.rollout.client import EngineLateError, EngineLostError
from rlpost.rollout.pool import EnginePool
from rlpost.training.group import TrainerGroup
from rlpost.types import InfrastructureError, Layout, SyncAcknowledgement, SyncPlan, SyncRefusedError, SyncReport, WeightsManifest
from rlpost.weights.links import LinkSettings, carrier
from rlpost.weights.policy import Fallbacks, SyncPolicy, SyncSettings

GRACE_S = 30.0
"""Beyond the links' own deadlines: an error that tells more is waited for."""

MODULUS = 1 << 128

NO_VERSION = -1
"""What engines say they hold between the steps of a sync."""


@dataclass
class _Tally:
    """What one sync cost so far."""

    bytes: int = 0
    stage_s: float = 0.0
    gather_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    apply_s: float = 0.0
    paused_s: float = 0.0
    memory_gib: float = 0.0
    sums: list[int] = field(default_factory=list)
    """The trainer's fingerprint for each layout."""

    def add_reports(self, reports: Sequence[Any]) -> None:
        """Of all trainer ranks: the slowest's seconds, the sum of fingerprints."""
        self.bytes += max(report.bytes for report in reports)
        for name in ("gather_s", "encode_s", "transfer_s"):
            setattr(self, name, getattr(self, name) + max(getattr(report, name) for report in reports))
        self.sums = _totals([report.sums for report in reports]) or self.sums

    def add_acknowledgement(self, acknowledgement: SyncAcknowledgement) -> None:
        """Of one engine."""
        self.apply_s = max(self.apply_s, acknowledgement.apply_s)
        self.memory_gib = max(self.memory_gib, acknowledgement.peak_memory_gib)


def _totals(shares: Sequence[Sequence[int]]) -> list[int]:
    """The trainer's fingerprint for each layout, from its ranks' shares."""
    return [sum(column) % MODULUS for column in zip(*shares, strict=True)]


class LinkError(Exception):
    """A link could not be made; ``errors`` by engine."""

    def __init__(self, errors: dict[int, Any]) -> None:
        super().__init__(errors)
        self.errors = errors

    @property
    def culprits(self) -> dict[int, Any]:
        """Engines that did not answer at all; the others only waited for them. All, when none is told apart so."""
        silent = {index: error for index, error in self.errors.items() if isinstance(error, EngineLateError | EngineLostError)}
        return silent or self.errors


class WeightSync:
    """Moves the trainer's weights to all live engines of the pool."""

    def __init__(self, trainers: TrainerGroup, engines: EnginePool, settings: SyncSettings) -> None:
        self.trainers, self.engines, self.settings = trainers, engines, settings
        self.carrier = carrier(settings.carrier)
        self.fallbacks = Fallbacks(settings.max_consecutive_fallbacks)
        self.version = -1
        """The newest version that all live engines hold."""
        self.proof = ""
        """``live`` when every engine proves its live parameters, else ``received``."""
        self._manifest: WeightsManifest | None = None
        self._policy: SyncPolicy | None = None
        self._layouts: list[Layout] = []
        self._workers: dict[int, list[int]] = {}
        """For each engine that described itself: the layouts of its workers."""
        self._links: set[str] = set()

    # ---- the two ends meet -----------------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Agree on the tensors with the trainer and learn where each engine keeps them."""
        settings = self.settings
        arguments = (settings.engine_dtype, settings.bucket_bytes, settings.deltas)
        self._manifest = (await self.trainers.call("open_weights", *arguments))[0]
        await self._describe(range(len(self.engines.settings)))
        # A reload through the engine's loader needs every tensor.
        self._policy = SyncPolicy(settings, frozen=not all(self._manifest.trained) and self.proof == "live")

    async def _describe(self, indices: Sequence[int]) -> None:
        """Learn the layouts of these engines' workers. Raises InfrastructureError when deltas cannot be applied there."""
        answers = await self.engines.outcomes("describe_weights", dict.fromkeys(indices, (self._manifest,)), timeout_s=self._patience)
        known = len(self._layouts)
        for index, answer in answers.items():
            if isinstance(answer, EngineLostError):  # to be replaced, and then described again
                self._workers.pop(index, None)
                continue
            if isinstance(answer, Exception):
                raise answer
            for worker in answer:
                if worker["proof"] != "live" and (self.settings.deltas or self.settings.adapters):
                    name = self.engines.settings[index].name
                    what, instead = ("weights.transport=delta", "weights.transport=collective")
                    if self.settings.adapters:
                        what, instead = ("training.lora.sync=adapter", "training.lora.sync=merged")
                    raise InfrastructureError(
                        f"{what} needs engines whose weights lie as they are loaded, but those of {name} do not: "
                        f"{worker['why']}; use {instead}"
                    )
                if worker["layout"] not in self._layouts:
                    self._layouts.append(worker["layout"])
            self._workers[index] = [self._layouts.index(worker["layout"]) for worker in answer]
            self.proof = "received" if self.proof == "received" or any(w["proof"] != "live" for w in answer) else "live"
        if len(self._layouts) > known:
            await self.trainers.call("weights", "set_layouts", self._layouts)

    @property
    def _patience(self) -> float:
        return self.settings.timeout_s + GRACE_S

    async def _link(self, indices: Sequence[int]) -> str:
        """The link to these engines, made when there is none. Raises LinkError when it cannot be."""
        name = "engines-" + "-".join(map(str, indices))
        if name in self._links:
            return name
        settings = self.settings
        sizes = {index: self.engines.settings[index].tensor_parallel for index in indices}
        pairs = settings.shared_gpu and settings.carrier == "ipc"
        groups = {index: [index] for index in indices} if pairs else {0: list(indices)}
        links = [
            LinkSettings(
                name=name, carrier=settings.carrier, world=1 + sum(sizes[i] for i in members), timeout_s=settings.timeout_s, sender=sender,
                backend=settings.backend, directory=settings.directory, model_path=settings.model_path,
            )
            for sender, members in groups.items()
        ]  # fmt: skip
        addresses = await self.trainers.call("weights", "serve", links, timeout_s=self._patience)
        entering: dict[int, tuple[LinkSettings, int]] = {}
        for link, members in zip(links, groups.values(), strict=True):
            host, port = addresses[link.sender]
            rank = 1
            for index in members:
                entering[index] = (replace(link, host=host, port=port), rank)
                rank += sizes[index]
        joined, answers = await self._both(
            self._unless_refused(self.trainers.call("weights", "join", name, timeout_s=self._patience)),
            self.engines.outcomes("enter_link", entering, timeout_s=self._patience),
        )
        errors = {index: answer for index, answer in answers.items() if isinstance(answer, Exception)}
        if errors or joined is not None:
            await self._drop(indices)
            raise LinkError(errors or dict.fromkeys(indices, joined))
        self._links.add(name)
        return name

    async def _unless_refused(self, call: Awaitable[Any]) -> SyncRefusedError | None:
        """A link that broke on the trainer's side is a value; any other failure of the trainer is raised."""
        try:
            await call
        except SyncRefusedError as error:
            return error
        return None

    async def _drop(self, indices: Sequence[int]) -> None:
        """Give up every link that one of these engines is a member of: something went wrong on it."""
        gone = {name for name in self._links if set(map(str, indices)) & set(name.split("-")[1:])} | {
            "engines-" + "-".join(map(str, indices))
        }
        self._links -= gone
        for name in gone:
            await self.trainers.call("weights", "close", name)

    async def _both(self, sending: Awaitable[Any], *engines: Awaitable[Any]) -> list[Any]:
        """The results, the trainer's first, when all have ended: what still runs on one side would disturb what comes next.

        What was raised is raised then, the trainer's failure before others.
        """
        tasks = [asyncio.ensure_future(one) for one in (sending, *engines)]
        await asyncio.gather(*tasks, return_exceptions=True)
        return [task.result() for task in tasks]

    # ---- a sync ----------------------------------------------------------------------------------------------------

    async def sync(self, version: int) -> SyncReport:
        """Bring every live engine to the trainer's weights as ``version``.

        An engine that dies meanwhile is left to :meth:`EnginePool.repair`. Raises InfrastructureError when an engine cannot be healed
        or the trainer fails; generation is resumed first (tokens of undefined weights are refused where they are sampled).
        """
        assert self._policy is not None, "connect() comes first"
        started = time.perf_counter()
        tally = _Tally()
        self.fallbacks.begin_sync()
        live = [index for index, alive in enumerate(self.engines.router.alive) if alive]
        try:
            plan, changed = await self._plan(version, tally)
            failed = await self._transfer(plan, live, tally)
            for index in live:
                if index not in failed:
                    self.fallbacks.went_well(self.engines.settings[index].name)
            await self._heal(failed, version, tally)
            await self.trainers.call("weights", "advance", version)
        except BaseException:
            await self._resume_quietly()
            raise
        self._policy.committed(plan.mode)
        self.version = version
        return SyncReport(
            version=version, mode=plan.mode, bytes=tally.bytes, seconds=time.perf_counter() - started, paused_s=tally.paused_s,
            stage_s=tally.stage_s, gather_s=tally.gather_s, encode_s=tally.encode_s, transfer_s=tally.transfer_s, apply_s=tally.apply_s,
            changed_fraction=changed, verified=plan.verify, fallbacks=dict(self.fallbacks.reasons),
            engine_peak_memory_gib=tally.memory_gib,
        )  # fmt: skip

    async def give(self, indices: Sequence[int], version: int) -> dict[str, int]:
        """Bring restarted engines to ``version``, which the trainer holds and the others have. Returns the reasons counted."""
        self.fallbacks.begin_sync()
        await self._drop(indices)
        await self._describe(indices)
        name = self.engines.settings
        restarted = {index: ("restarted", f"{name[index].name} was restarted") for index in indices if index in self._workers}
        await self._heal(restarted, version, _Tally())
        return dict(self.fallbacks.reasons)

    async def _plan(self, version: int, tally: _Tally) -> tuple[SyncPlan, float]:
        """What moves; a delta is encoded here, for only then it is known whether it pays. With it, the share of elements that changed."""
        assert self._policy is not None
        mode, changed = self._policy.mode(), float("nan")
        size = 0
        if mode == "adapter":
            size = await self._encode_adapter(self._policy.verify(mode), tally)
        if mode == "delta":
            reports = await self.trainers.call("weights", "encode_delta", self._policy.verify("delta"))
            compared = sum(report.compared for report in reports)
            changed = sum(report.changed for report in reports) / max(compared, 1)
            if self._policy.delta_pays(sum(report.changed for report in reports), compared):
                size = reports[0].bytes
                tally.add_reports(reports)
                tally.bytes = 0
            else:
                await self.trainers.call("weights", "forget_delta")
                tally.encode_s = max(report.encode_s for report in reports)
                mode = self._policy.without_delta()
        verify = self._policy.verify(mode)
        return SyncPlan(version=version, mode=mode, base_version=self.version, link="", verify=verify, message_bytes=size), changed

    def _full_plan(self, version: int) -> SyncPlan:
        return SyncPlan(version=version, mode="full", base_version=self.version, link="", verify=True)

    async def _transfer(self, plan: SyncPlan, indices: Sequence[int], tally: _Tally) -> dict[int, tuple[str, str]]:
        """Stage, apply, compare and commit on these engines. Returns those that failed: reason and message. Lost ones are not listed."""
        started = time.perf_counter()
        # Before a link is made: nobody is to wait in a broadcast for an engine that does not come. A message is sent while they generate.
        undrained = {} if plan.mode in ("delta", "adapter") else await self._undrained(indices)
        indices = [index for index in indices if index not in undrained]
        if not indices:
            return self._failures(undrained)
        try:
            link = await self._link(indices)
        except LinkError as error:
            rest = [index for index in indices if index not in error.culprits]
            return {**self._failures(undrained | error.culprits), **await self._transfer(plan, rest, tally)}
        senders = tuple(indices) if self.settings.shared_gpu and self.settings.carrier == "ipc" else (0,)
        plan = replace(plan, link=link, senders=senders)
        if plan.mode in ("delta", "adapter"):
            outcomes = await self._move_message(plan, indices, tally, started)
        elif self.settings.adapters:
            outcomes = await self._move_weights_and_adapter(plan, indices, tally, started)
        else:
            outcomes = await self._move_weights(plan, indices, tally, started)
        failed = self._failures(outcomes)
        if failed or any(isinstance(outcome, Exception) for outcome in outcomes.values()):
            await self._drop(indices)
        return failed | self._failures(undrained)

    async def _encode_adapter(self, verify: bool, tally: _Tally) -> int:
        reports = await self.trainers.call("weights", "encode_adapter", verify)
        tally.add_reports(reports)
        size: int = reports[0].bytes
        tally.bytes -= size  # counted when it is sent
        return size

    async def _send(self, method: str, plan: SyncPlan, tally: _Tally) -> SyncRefusedError | None:
        """The trainer's part. None, or how the link broke: an engine may have got everything all the same."""

        async def send() -> None:
            tally.add_reports(await self.trainers.call("weights", method, plan, timeout_s=self._patience))

        error = await self._unless_refused(send())
        if error is not None and plan.verify:
            tally.sums = _totals(await self.trainers.call("weights", "sums"))
        return error

    async def _move_weights_and_adapter(self, plan: SyncPlan, indices: Sequence[int], tally: _Tally, started: float) -> dict[int, Any]:
        """The weights under an adapter, then the adapter, in one pause; what is proven covers both."""
        bare = replace(plan, verify=False)
        sending = asyncio.ensure_future(self._send("send_weights", bare, tally))
        if not self.carrier.live and (error := await sending):
            return dict.fromkeys(indices, error)
        broken, applied = await self._both(sending, self._on(indices, "apply_weights", bare))
        ready = [index for index, answer in applied.items() if not isinstance(answer, Exception)]
        if broken or len(ready) < len(indices):  # on this link the adapter would wait for those that failed
            await self._drop(indices)
            if not ready:
                return applied
            try:
                plan = replace(plan, link=await self._link(ready), senders=tuple(ready) if plan.senders != (0,) else (0,))
            except LinkError as error:
                others = SyncRefusedError("broken", "a link for the adapter could not be made")
                return {**applied, **{index: error.errors.get(index, others) for index in ready}}
        size = await self._encode_adapter(plan.verify, tally)
        adapter = replace(plan, mode="adapter", base_version=NO_VERSION, message_bytes=size)
        return {**applied, **await self._move_message(adapter, ready, tally, started)}

    async def _move_message(self, plan: SyncPlan, indices: Sequence[int], tally: _Tally, started: float) -> dict[int, Any]:
        """A delta or an adapter: it reaches every engine while generation goes on; then each applies it."""
        sending = asyncio.ensure_future(self._send("send_message", plan, tally))
        if not self.carrier.live and (error := await sending):
            return dict.fromkeys(indices, error)
        _, staged = await self._both(sending, self._on(indices, "stage_weights", plan))
        tally.stage_s = time.perf_counter() - started
        ready = [index for index, answer in staged.items() if not isinstance(answer, Exception)]
        undrained = await self._undrained(ready)
        ready = [index for index in ready if index not in undrained]
        return {**staged, **undrained, **await self._bring_in(plan, ready, sending, tally)}

    async def _move_weights(self, plan: SyncPlan, indices: Sequence[int], tally: _Tally, started: float) -> dict[int, Any]:
        """All weights: engines load what comes while they are paused, or, from a directory, when all of it is there."""
        sending = asyncio.ensure_future(self._send("send_weights", plan, tally))
        if not self.carrier.live and (error := await sending):
            return dict.fromkeys(indices, error)
        tally.stage_s = time.perf_counter() - started
        return await self._bring_in(plan, indices, sending, tally)

    async def _bring_in(self, plan: SyncPlan, indices: Sequence[int], sending: asyncio.Future[Any], tally: _Tally) -> dict[int, Any]:
        """Apply, compare, commit: each engine by itself, so that none is paused while another is late. By engine: None, or the error."""

        async def one(index: int) -> Exception | None:
            answer = (await self._on([index], "apply_weights", plan))[index]
            if isinstance(answer, Exception):
                return answer
            await sending  # the trainer's fingerprint is known when all was sent
            refused = await self._compare(plan, index, answer, tally)
            if refused is not None:
                return refused
            committed = (await self.engines.outcomes("commit_weights", {index: (plan.version,)}, timeout_s=self._patience))[index]
            if isinstance(committed, Exception):
                return committed
            tally.paused_s = max(tally.paused_s, committed)
            return None

        _, *outcomes = await self._both(sending, *(one(index) for index in indices))
        return dict(zip(indices, outcomes, strict=True))

    async def _undrained(self, indices: Sequence[int]) -> dict[int, Any]:
        """With weights.pause=drain: let these engines finish their requests. Errors of those that did not."""
        if self.settings.drain_s <= 0:
            return {}
        answers = await self.engines.outcomes("drain", dict.fromkeys(indices, ()), timeout_s=self.settings.drain_s + GRACE_S)
        return {index: answer for index, answer in answers.items() if isinstance(answer, Exception)}

    async def _on(self, indices: Sequence[int], method: str, plan: SyncPlan) -> dict[int, Any]:
        return await self.engines.outcomes(method, dict.fromkeys(indices, (plan,)), timeout_s=self._patience)

    async def _compare(self, plan: SyncPlan, index: int, acknowledgement: SyncAcknowledgement, tally: _Tally) -> SyncRefusedError | None:
        """None when the engine holds what the trainer holds; else an error that names the tensors that differ."""
        assert self._manifest is not None
        tally.add_acknowledgement(acknowledgement)
        name = acknowledgement.engine
        if (acknowledgement.version, acknowledgement.tensors) != (plan.version, len(self._manifest.names)):
            return SyncRefusedError(
                "wrong_version",
                f"{name} acknowledged {acknowledgement.tensors} tensors of version {acknowledgement.version} instead of "
                f"{len(self._manifest.names)} of {plan.version}",
            )
        if not plan.verify:
            return None
        expected = tuple(f"{tally.sums[layout]:032x}" for layout in self._workers[index])
        if acknowledgement.fingerprints == expected:
            return None
        return SyncRefusedError(
            "wrong_fingerprint",
            f"{name} holds {list(acknowledgement.fingerprints)} as version {plan.version}, the trainer {list(expected)}; "
            f"different: {await self._name_differences(index)}",
        )

    async def _name_differences(self, index: int) -> str:
        answers = await self.engines.outcomes("tensor_sums", {index: ()}, timeout_s=self._patience)
        if isinstance(answers[index], Exception):
            return "unknown"
        names: list[str] = []
        for layout, held in zip(self._workers[index], answers[index], strict=True):
            parts = await self.trainers.call("weights", "tensor_sums", layout)
            right = {name: sum(part.get(name, 0) for part in parts) % MODULUS for name in {name for part in parts for name in part}}
            names += [name for name in sorted(right) if held.get(name) != right[name] and name not in names]
        return f"{len(names)} tensors, {names[:5]}"

    def _failures(self, outcomes: dict[int, Any]) -> dict[int, tuple[str, str]]:
        """Reason and message of every engine that is alive and failed."""
        failed = {}
        for index, outcome in outcomes.items():
            if isinstance(outcome, EngineLateError):
                failed[index] = ("timeout", str(outcome))
            elif isinstance(outcome, SyncRefusedError):
                failed[index] = (outcome.reason, str(outcome))
            elif isinstance(outcome, Exception) and not isinstance(outcome, EngineLostError):
                failed[index] = ("error", str(outcome))
        return failed

    async def _heal(self, failed: dict[int, tuple[str, str]], version: int, tally: _Tally) -> None:
        """Give these engines a full sync, together, then those that fail again one by one, until each took it or had too many in a row."""
        together = True
        while failed:
            for index, (reason, message) in failed.items():
                self.fallbacks.count(self.engines.settings[index].name, reason, message)
            groups = [list(failed)] if together else [[index] for index in failed]
            together, failed = False, {}
            for group in groups:
                failed |= await self._transfer(self._full_plan(version), group, tally)

    async def _resume_quietly(self) -> None:
        # So that requests end (an engine whose weights are undefined refuses what it samples); the run stops with the reasons.
        with contextlib.suppress(InfrastructureError):
            await self.engines.call("resume", timeout_s=self.settings.timeout_s)
