"""Name -> algorithm. A new algorithm is one file and one line here, or `package.module:Class` in the user's config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np

from rlpost.config.schema import AlgorithmConfig
from rlpost.plugins import resolve
from rlpost.types import Group, LossComponent, Trajectory


class Algorithm(Protocol):
    """What the driver asks of an algorithm."""

    def advantages(self, group: Group) -> np.ndarray: ...

    def keep(self, group: Group) -> Sequence[Trajectory]: ...

    def components(self) -> list[LossComponent]: ...


ALGORITHMS = {"grpo": "rlpost.algorithms.grpo:Grpo"}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that ``config.name`` names. Raises ConfigError when there is none."""
    return cast(Algorithm, resolve(config.name, kind="algorithm", group="rlpost.algorithms", catalogue=ALGORITHMS)(config))
