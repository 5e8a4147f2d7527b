"""A calculator between the turns: the model may call it once or more, then answers; or it answers at once."""

from __future__ import annotations

import re

from rlpost.environments.protocol import Step
from rlpost.types import Prompt

_CALL = re.compile(r"calc (\d{1,6})\*(\d{1,6})")


class Calc:
    """The prompt's fields hold ``answer``. Reward 1 when the last turn is exactly the answer, else 0."""

    instant = True

    def __init__(self, call_reward: float = 0.0) -> None:
        self.call_reward = call_reward
        self.answer = ""
        self.calls = 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Remember the answer."""
        self.answer = str(prompt.fields["answer"])

    def step(self, action: str) -> Step:
        """A call gives its product as the observation; anything else is the answer."""
        call = _CALL.fullmatch(action.strip())
        if call:
            self.calls += 1
            return Step(observation=f"{int(call[1]) * int(call[2])}\n", reward=self.call_reward)
        return Step(
            reward=float(action.strip() == self.answer),
            terminated=True,
            metrics={"tool_calls": float(self.calls), "used_tool": float(self.calls > 0)},
        )
