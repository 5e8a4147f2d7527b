"""One answer to the prompt."""

from __future__ import annotations

from rlpost.environments.protocol import Step
from rlpost.types import Prompt


class SingleTurn:
    """Ends after the first turn; rewards come from reward functions."""

    instant = True
    """Both methods return at once, so they need no thread."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Nothing to add to the prompt."""

    def step(self, action: str) -> Step:
        """The episode is over."""
        return Step(terminated=True)
