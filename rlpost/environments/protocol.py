"""The episode protocol. ``reset`` and ``step`` may be plain or ``async``; a plain one runs in a thread, so it may block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlpost.types import Prompt

Observation = str | Sequence[Mapping[str, Any]]
"""Text that follows the model's tokens as it is, or chat messages that the template renders after an assistant turn."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What an action led to. ``observation`` is needed unless the episode ends; ``reward`` counts at the end (the sum of all steps').

    ``terminated``: the task is over. ``truncated``: the environment gave up (its own budget).
    """

    observation: Observation | None = None
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. Raising anywhere marks the trajectory as failed (no reward, no gradient), it does not end the run."""

    def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        """Begin; an observation is appended to the prompt, None adds nothing."""
        ...

    def step(self, action: str) -> Step:
        """Take the model's turn (special tokens left out) and answer it."""
        ...
