"""A rank's part of a checkpoint. Sharded tensors go through torch's distributed checkpoint, which reshards on load."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rlpost.training.model import reshard
from rlpost.training.optimizer import settings_kept
from rlpost.types import RlpostError


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _state(model: Any, optimizer: Any, reference: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """All sharded tensors by name. Of an optimizer that has not stepped, torch makes zeros for it and puts them into it."""
    with _quiet():
        model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, **({"reference": dict(reference)} if reference else {})}


def save_rank(directory: Path, rank: int, model: Any, optimizer: Any, schedule: Any, reference: Mapping[str, torch.Tensor]) -> None:
    """Collective over all ranks. The schedule is the same on every rank; RNG states are not.

    ``reference`` are the tensors of training.reference.Reference.state.
    """
    reshard(model)
    stepped = bool(optimizer.state)
    with _quiet():
        dcp.save(_state(model, optimizer, reference), checkpoint_id=str(directory / "tensors"))
    if not stepped:
        optimizer.state.clear()
    extra = {
        "schedule": schedule.state_dict(),
        "optimizer": type(optimizer).__name__,
        "stepped": stepped,
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
    }
    if torch.cuda.is_available():
        extra["rng"]["cuda"] = torch.cuda.get_rng_state()
    torch.save(extra, directory / f"rank_{rank:05d}.pt")


def load_rank(directory: Path, rank: int, model: Any, optimizer: Any, schedule: Any, reference: Mapping[str, torch.Tensor]) -> None:
    """Collective over all ranks, of any number. A rank that the checkpoint does not have takes rank 0's schedule and keeps its RNG.

    Hyperparameters (learning rate, betas, eps, weight decay, the schedule's shape) stay those that optimizer and schedule were made
    with; weights, moments, step counts and the schedule's position are the checkpoint's, which also go into the tensors of
    ``reference``. Raises RlpostError when the checkpoint was written with another optimizer, or has no such reference.
    """
    reshard(model)
    own = directory / f"rank_{rank:05d}.pt"
    # Our own file, in the user's run directory; it holds numpy and Python RNG states that weights_only refuses.
    extra = torch.load(own if own.exists() else directory / "rank_00000.pt", weights_only=False)
    tensors = str(directory / "tensors")
    _check(directory, extra["optimizer"], type(optimizer).__name__, reference)
    with _quiet(), settings_kept(optimizer, schedule):
        state = _state(model, optimizer, reference)
        dcp.load(state, checkpoint_id=tensors)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(extra["schedule"])
    if not extra["stepped"]:
        optimizer.state.clear()
    if own.exists():
        torch.set_rng_state(extra["rng"]["torch"])
        np.random.set_state(extra["rng"]["numpy"])
        random.setstate(extra["rng"]["python"])
        if "cuda" in extra["rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(extra["rng"]["cuda"])


def _check(directory: Path, written: str, present: str, reference: Mapping[str, torch.Tensor]) -> None:
    """Is in the checkpoint what this run will ask for? torch would name a missing tensor, not the setting."""
    if written != present:
        raise RlpostError(
            f"{directory} holds the state of the optimizer {written}, and this run has {present}: set training.optimizer.name to what the "
            "checkpoint was written with, or start a new run from its exported model"
        )
    if reference and not any(
        name.startswith("reference.") for name in dcp.FileSystemReader(directory / "tensors").read_metadata().state_dict_metadata
    ):
        raise RlpostError(
            f"{directory} holds no moving average of the weights: it was written with another algorithm.reference than moving_average; "
            "set that one, or start a new run from its exported model"
        )
