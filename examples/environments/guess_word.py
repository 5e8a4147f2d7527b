"""Copy this file to write an environment of your own: the model guesses a word, each answer shows which letters were right.

Use it in a run's configuration (paths are relative to where you start the run; guess_word.yaml beside this file does it):

    environment:
      name: examples/environments/guess_word.py:GuessWord
      max_turns: 4
      options: {partial_credit: 0.5}
    rewards: []

One object is made for each episode, so it may keep the episode's state in attributes. The constructor gets ``environment.options``; it
is also called once before the run starts, as a check, so it must be cheap and have no effect outside the object.
"""

from __future__ import annotations

from rlpost.environments.protocol import Step
from rlpost.types import Prompt


class GuessWord:
    """The prompt's field ``word`` is what to guess. Reward 1 for the word, else ``partial_credit`` x the share of right letters.

    With ``chat`` the answers are chat messages, which the model's chat template writes; without it they are plain text.
    """

    # Both methods return at once. Leave this out when they wait (a sandbox, a web page): they then run in a thread of their own.
    # Methods that are `async def` need no thread either way.
    instant = True

    def __init__(self, partial_credit: float = 0.5, chat: bool = False) -> None:
        self.partial_credit = partial_credit
        self.chat = chat
        self.word = ""
        self.best = 0.0
        self.guesses = 0

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Begin an episode. What is returned is appended to the prompt; None adds nothing.

        Take the task from ``prompt.fields``: ``seed`` is another one for each sample, and the samples of a prompt are compared with
        each other, so they must have the same task. The seed is for chance inside the episode (an opponent's moves).
        """
        self.word = str(prompt.fields["word"]).strip().lower()

    def step(self, action: str) -> Step:
        """Judge one guess. ``action`` is the text of the model's turn, without special tokens."""
        guess = action.strip().lower()
        self.guesses += 1
        right = sum(mine == theirs for mine, theirs in zip(guess, self.word, strict=False))
        share = 1.0 if guess == self.word else self.partial_credit * right / len(self.word)
        # The rewards of all steps are added up, so each step pays only what this guess improved.
        gain, self.best = max(0.0, share - self.best), max(share, self.best)
        metrics = {"guesses": float(self.guesses), "solved": float(guess == self.word)}
        if guess == self.word:
            return Step(reward=gain, terminated=True, metrics=metrics)
        shown = "".join(letter if letter == theirs else "_" for letter, theirs in zip(self.word, guess.ljust(len(self.word)), strict=False))
        return Step(observation=self._say(f"{shown}\n"), reward=gain, metrics=metrics)

    def _say(self, text: str) -> str | list[dict[str, str]]:
        return [{"role": "user", "content": text.strip()}] if self.chat else text
