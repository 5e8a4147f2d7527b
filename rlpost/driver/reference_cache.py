"""Reference logprobs that were computed once: before the first step the trained model is its own reference."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlpost.types import ConfigError, LossTerms

FILE = "reference_logprobs.npz"


class ReferenceCache:
    """Logprobs of the trained tokens of each sequence, in memory and in the run's directory.

    By content: ids repeat between training and held-out rows, and a data set may change under a run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self._known: dict[str, np.ndarray] = {}

    def load(self, *, required: bool) -> bool:
        """Read what an earlier part of the run computed; False when there is nothing.

        Raises ConfigError when it is ``required`` (the model is trained already, so it cannot be computed again), or damaged.
        """
        if not self.path.is_file():
            if required:
                raise ConfigError(f"{self.path} is missing: a run with algorithm.reference=precomputed cannot be resumed without it")
            return False
        try:
            with np.load(self.path) as stored:
                values = np.split(stored["values"], stored["ends"][:-1])
                self._known = dict(zip(stored["names"].tolist(), values, strict=True))
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{self.path} is damaged ({type(error).__name__}: {error}); put a copy back, or start a new run (before the first step it "
                "is enough to remove it)"
            ) from error
        return True

    def save(self) -> None:
        """Write all of it, under its name only when it is whole."""
        partial = self.path.with_suffix(".partial.npz")
        values = list(self._known.values())
        np.savez(
            partial,
            names=np.array(list(self._known)),
            values=np.concatenate([np.zeros(0, np.float32), *values]),
            ends=np.cumsum([len(one) for one in values]),
        )
        os.replace(partial, self.path)

    def add(self, terms: Sequence[LossTerms], logprobs: Sequence[np.ndarray]) -> None:
        """Remember ``logprobs`` ``[tokens]`` of these sequences; only trained tokens are kept."""
        for term, values in zip(terms, logprobs, strict=True):
            self._known[_key(term)] = values[term.trainable].astype(np.float32)

    def read(self, terms: Sequence[LossTerms]) -> list[np.ndarray]:
        """``[tokens]`` each, NaN where nothing is trained."""
        result = []
        for term in terms:
            known = self._known.get(_key(term))
            if known is None:
                raise ConfigError(
                    f"{self.path} does not fit the data: no reference logprobs of {term.trajectory_id}; the data set changed since the run "
                    "began, start a new one"
                )
            values = np.full(len(term.tokens), np.nan, np.float32)
            values[term.trainable] = known
            result.append(values)
        return result


def _key(term: LossTerms) -> str:
    return hashlib.sha256(term.tokens.tobytes() + term.trainable.tobytes()).hexdigest()
