"""What a sync moves and when it is proven: pure decisions, apart from the machinery that carries them out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlpost.types import InfrastructureError, SyncMode


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """How a run brings weights to its engines; derived from the configuration by the driver."""

    carrier: str
    """``collective``, ``ipc`` or ``disk``: what carries full syncs and deltas."""
    deltas: bool
    adapters: bool = False
    """LoRA adapters travel alone, beside weights that never change."""
    engine_dtype: str
    bucket_bytes: int
    timeout_s: float
    drain_s: float = 0.0
    """Above 0: engines finish their running requests before a sync, and have this long for it."""
    backend: str = "gloo"
    directory: str = ""
    model_path: str = ""
    verify: str = "auto"
    verify_every: int = 20
    keyframe_every: int = 50
    max_changed: float = 0.5
    max_consecutive_fallbacks: int = 3
    shared_gpu: bool = False
    """Engine i is on trainer rank i's GPU: memory is shared pairwise, and sleeping engines lose their weights, so every sync is full."""


@dataclass
class SyncPolicy:
    """Counts syncs and decides about the next. ``frozen``: the manifest has tensors that training never changes."""

    settings: SyncSettings
    frozen: bool
    done: int = 0
    """Syncs that were committed."""
    since_keyframe: int = 0

    def mode(self) -> SyncMode:
        """What the next sync moves, as long as all engines hold the version before it."""
        if self.done == 0 or self.settings.shared_gpu:
            return "full"
        if self.settings.adapters:
            return "adapter"
        if self.settings.deltas and self.since_keyframe < self.settings.keyframe_every:
            return "delta"
        return self.without_delta()

    def without_delta(self) -> SyncMode:
        """The next best when a delta does not pay or a keyframe is due."""
        # A directory holds whole models, which users and other engines can load.
        return "trained" if self.frozen and self.done and self.settings.carrier != "disk" and not self.settings.shared_gpu else "full"

    def delta_pays(self, changed: int, compared: int) -> bool:
        """False above ``max_changed``: an index and a value would cost more than the values of a full sync."""
        return changed <= self.settings.max_changed * compared

    def verify(self, mode: SyncMode) -> bool:
        """Whether the next sync is to be proven."""
        match self.settings.verify:
            case "every_sync":
                return True
            case "first":
                return self.done == 0
            case "every_n":
                return self.done % self.settings.verify_every == 0
            case _:
                return mode == "delta" or self.done % self.settings.verify_every == 0

    def committed(self, mode: SyncMode) -> None:
        """A sync is done."""
        self.done += 1
        self.since_keyframe = self.since_keyframe + 1 if mode == "delta" else 0


@dataclass
class Fallbacks:
    """Full syncs that single engines needed: in this sync by reason, and in a row by engine."""

    most: int
    reasons: Counter[str] = field(default_factory=Counter)
    _in_a_row: dict[str, list[str]] = field(default_factory=dict)

    def begin_sync(self) -> None:
        """Reasons are counted for each sync anew."""
        self.reasons = Counter()

    def count(self, engine: str, reason: str, message: str) -> None:
        """One more. Raises InfrastructureError when this engine needed more than ``most`` in a row."""
        self.reasons[reason] += 1
        row = self._in_a_row.setdefault(engine, [])
        row.append(message)
        if len(row) > self.most:
            listed = "; ".join(f"({number}) {text}" for number, text in enumerate(row, 1))
            raise InfrastructureError(
                f"{engine} needed a full weight sync {len(row)} times in a row, more than "
                f"weights.max_consecutive_fallbacks={self.most}: {listed}"
            )

    def went_well(self, engine: str) -> None:
        """A sync that needed no fallback ends the row."""
        self._in_a_row.pop(engine, None)
