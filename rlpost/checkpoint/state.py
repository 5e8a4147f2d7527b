"""A rank's part of a checkpoint. Sharded tensors go through torch's distributed checkpoint, which reshards on load."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rlpost.training.optimizer import settings_kept


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_rank(directory: Path, rank: int, model: Any, optimizer: Any, schedule: Any) -> None:
    """Collective over all ranks. The schedule is the same on every rank; RNG states are not."""
    model.reshard()
    with _quiet():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(directory / "tensors"))
    extra = {
        "schedule": schedule.state_dict(),
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()},
    }
    if torch.cuda.is_available():
        extra["rng"]["cuda"] = torch.cuda.get_rng_state()
    torch.save(extra, directory / f"rank_{rank:05d}.pt")


def load_rank(directory: Path, rank: int, model: Any, optimizer: Any, schedule: Any) -> None:
    """Collective over all ranks, of any number. A rank that the checkpoint does not have takes rank 0's schedule and keeps its RNG.

    Hyperparameters (learning rate, betas, eps, weight decay, the schedule's shape) stay those that optimizer and schedule were made
    with; weights, moments, step counts and the schedule's position are the checkpoint's.
    """
    model.reshard()
    own = directory / f"rank_{rank:05d}.pt"
    # Our own file, in the user's run directory; it holds numpy and Python RNG states that weights_only refuses.
    extra = torch.load(own if own.exists() else directory / "rank_00000.pt", weights_only=False)
    with _quiet(), settings_kept(optimizer, schedule):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=str(directory / "tensors"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(extra["schedule"])
    if own.exists():
        torch.set_rng_state(extra["rng"]["torch"])
        np.random.set_state(extra["rng"]["numpy"])
        random.setstate(extra["rng"]["python"])
        if "cuda" in extra["rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(extra["rng"]["cuda"])
