"""Name -> environment. A new one is one file and one line here, or an import path in the user's config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from rlpost.config.schema import EnvironmentConfig
from rlpost.environments.protocol import Environment
from rlpost.plugins import resolve
from rlpost.types import ConfigError

ENVIRONMENTS = {"single_turn": "rlpost.environments.single_turn:SingleTurn", "calc": "rlpost.environments.calc:Calc"}


def environment_factory(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Makes a fresh environment for each episode. Raises ConfigError when the class is not found or does not fit."""
    cls = resolve(config.name, kind="environment", group="rlpost.environments", catalogue=ENVIRONMENTS)
    try:
        probe = cls(**config.options)
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(
            f"environment {config.name!r} cannot be made with environment.options={dict(config.options)}: {type(error).__name__}: {error}"
        ) from error
    for method in ("reset", "step"):
        if not callable(getattr(probe, method, None)):
            raise ConfigError(f"environment {config.name!r} has no method {method}; it needs reset(prompt, seed) and step(action)")
    return cast(Callable[[], Environment], partial(cls, **config.options))
