"""The endless stream of prompt indices of a run: seeded, epoch by epoch, and exactly resumable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlpost.types import ConfigError


class PromptCursor:
    """Yields every index of ``range(count)`` once an epoch, without end.

    The order of epoch e is a permutation that depends on (``seed``, e) alone (numpy PCG64 seeded with
    ``SeedSequence([seed, e])``); with ``shuffle`` false it is 0, 1, 2 ... An epoch's end is not a batch's end: the
    batch that crosses it takes the rest of one epoch and the start of the next, so nothing is skipped or repeated.
    A cursor restored from :meth:`state` continues with exactly the index that the saved one would have given next.

    Raises:
        ConfigError: ``count`` below 1 or ``seed`` below 0.
    """

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        if count < 1:
            raise ConfigError(f"the data set has {count} prompts; at least 1 is needed (check data.train and data.limit)")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; it must be 0 or more")
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._permutation(0)

    def next(self) -> tuple[int, int]:
        """The next ``(epoch, index)``; epoch counts from 0."""
        if self._position == self.count:
            self._epoch += 1
            self._position = 0
            self._order = self._permutation(self._epoch)
        index = int(self._order[self._position])
        self._position += 1
        return self._epoch, index

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs, as plain JSON values."""
        return {"count": self.count, "seed": self.seed, "shuffle": self.shuffle, "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where the cursor that gave ``state`` stood.

        Raises:
            ConfigError: the state is of another data set size, seed or order (going on would skip and repeat prompts
                unseen), or is damaged.
        """
        causes = {
            "count": "the data set or data.limit, data.max_prompt_tokens changed",
            "seed": "the run's seed changed",
            "shuffle": "data.shuffle changed",
        }
        for key, cause in causes.items():
            if state.get(key) != getattr(self, key):
                raise ConfigError(
                    f"cannot resume the data order: the checkpoint was made with {key} {state.get(key)}, this run has {getattr(self, key)} "
                    f"({cause}). Use the old value to resume, or start a new run (resume=never)"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or not 0 <= position <= self.count:
            raise ConfigError(
                f"cannot resume the data order: the checkpoint has epoch {epoch!r} and position {position!r}, "
                f"expected a position from 0 to {self.count}; the checkpoint is damaged, resume from an older one"
            )
        self._epoch, self._position = epoch, position
        self._order = self._permutation(epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.count)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))).permutation(self.count)
