"""What a sync benchmark is to measure, and whether this machine can: all of it checked before Ray starts. Pure."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpost.checkpoint.directory import MARK, checkpoint_root, step_of
from rlpost.models import shapes
from rlpost.models.embedded import EMBEDDED_PREFIX, local_model
from rlpost.types import ConfigError
from rlpost.weights.buckets import DTYPE_BYTES

TRANSPORTS = ("collective", "ipc", "disk", "delta")
CARRIERS = ("auto", "collective", "ipc", "disk")

MASTER_BYTES = 4
"""Trainer ranks hold float32."""
RANK_GIB, ENGINE_GIB, REST_GIB = 0.6, 1.3, 1.0
"""A trainer rank and an engine without any weights, and the driver with Ray; measured."""
BUFFER_GIB = 0.5
"""The bare limits' largest buffer; rank 0 has two of them, or it and each engine one."""
FREE_SHARE = 0.95
"""Of the memory that is free now."""
VERSIONS_ON_DISK = 2


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model that lies ready, or a shape that can be built."""

    label: str
    path: str
    """Empty for a shape that is not built yet."""
    parameters: int
    shape: str = ""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is to be measured. ``changed`` is the share of elements that change between syncs (None: checkpoints are replayed)."""

    model: str
    model_path: str
    transports: tuple[str, ...]
    explicit: bool
    """The user named the transports: one that cannot run is an error, else it is left out with the reason."""
    carrier: str
    engines: int
    ranks: int
    dtype: str
    device: str
    bucket_mib: int
    repeats: int
    changed: float | None
    checkpoints: tuple[str, ...] = ()
    trainable: str = "all"
    directory: str = ""
    """Where the disk carrier writes."""
    logs: str = ""
    timeout_s: float = 600.0


def parse_transports(text: str) -> tuple[tuple[str, ...], bool]:
    """The transports in the order of the catalogue, and whether they were named one by one. Raises ConfigError for an unknown one."""
    if text == "all":
        return TRANSPORTS, False
    asked = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in asked if name not in TRANSPORTS]
    if unknown or not asked:
        raise ConfigError(
            f"--transport {text!r}: {unknown[0] if unknown else 'nothing'!r} is no transport; all, or any of {', '.join(TRANSPORTS)}"
        )
    return tuple(name for name in TRANSPORTS if name in asked), True


def check_changed(changed: float) -> None:
    """Raises ConfigError unless it is a share."""
    if not 0 < changed <= 1:
        raise ConfigError(
            f"--changed {changed}: expected the share of elements that change, above 0 and at most 1 (0.01 is one in a hundred)"
        )


def check_trainable(pattern: str) -> None:
    """Raises ConfigError when it is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--trainable {pattern!r} is no regular expression: {error}") from error


# ---- the model -------------------------------------------------------------------------------------------------------


def find_model(name: str) -> ModelFacts:
    """A named shape, an ``embedded:`` model (built on first use), or a Hugging Face directory. Raises ConfigError for anything else."""
    if name in shapes.SHAPES:
        shape, path = shapes.SHAPES[name], shapes.shape_path(name)
        return ModelFacts(
            label=name,
            path=str(path) if path.exists() else "",
            parameters=shape.parameters,
            shape=name,
        )
    if name.startswith(EMBEDDED_PREFIX):
        return _directory_facts(name, Path(local_model(name)))
    path = Path(name)
    if not (path / "config.json").is_file():
        known = ", ".join(f"{shape} ({facts.parameters:,})" for shape, facts in shapes.SHAPES.items())
        found = "has no config.json" if path.is_dir() else "is no directory"
        raise ConfigError(
            f"--model {name!r} {found}, and no shape is called so; give a Hugging Face model directory, embedded:NAME, "
            f"or a shape (with its parameters): {known}"
        )
    return _directory_facts(path.resolve().name, path.resolve())


def _directory_facts(label: str, path: Path) -> ModelFacts:
    sizes = [math.prod(shape) for file in sorted(path.glob("*.safetensors")) for shape in _stored_shapes(file)]
    if not sizes:
        raise ConfigError(f"--model {label}: {path} holds no .safetensors file; convert the model to safetensors first")
    return ModelFacts(label=label, path=str(path), parameters=sum(sizes))


def _stored_shapes(file: Path) -> list[list[int]]:
    """The shapes in a safetensors file, from its header."""
    with file.open("rb") as handle:
        [length] = struct.unpack("<Q", handle.read(8))
        header = json.loads(handle.read(length))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]


# ---- memory and room -------------------------------------------------------------------------------------------------


def memory_estimate_gib(model: ModelFacts, *, dtype: str, ranks: int, engines: int, deltas: bool) -> dict[str, float]:
    """Most resident memory on one CPU machine, by what needs it. Rank 0's whole copy while loading is freed before the rest."""
    element, size = DTYPE_BYTES[dtype], model.parameters / 2**30
    loading = size * MASTER_BYTES
    later = (size * element if deltas else 0.0) + (1 + engines) * BUFFER_GIB
    return {
        "trainer weights (float32)": size * MASTER_BYTES,
        f"engine weights ({dtype})": engines * size * element,
        "while loading, or else the delta's baseline and the bare limits' buffers": max(loading, later),
        "processes": ranks * RANK_GIB + engines * ENGINE_GIB + REST_GIB,
    }


def free_memory_gib() -> float | None:
    """What this machine, and the control group that we are in, can still give; None where it cannot be told."""
    free: list[float] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) / 2**20)
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        free.append((int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())) / 2**30)
    return min(free) if free else None


def check_memory(needs: Mapping[str, float], free_gib: float | None, model: str) -> None:
    """Raises ConfigError with the sum when it is more than this machine has."""
    total = sum(needs.values())
    if free_gib is None or total <= free_gib * FREE_SHARE:
        return
    parts = "\n".join(f"  {gib:7.1f} GiB  {what}" for what, gib in needs.items())
    smaller = "a smaller shape" if model in shapes.SHAPES else "a smaller model"
    raise ConfigError(
        f"model {model} needs about {total:.1f} GiB for all parts on this machine, which has {free_gib:.1f} GiB free:\n{parts}\n"
        f"take {smaller}, fewer --engines, --dtype bfloat16, or leave delta out of --transport"
    )


def check_directory(directory: str, needed_bytes: int) -> None:
    """Raises ConfigError when the disk carrier could not write there. An fsspec URL is tried by the transport itself."""
    if "://" in directory:
        return
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"--directory {directory} cannot be written: {error.strerror}; choose another one") from error
    free = shutil.disk_usage(path).free
    if needed_bytes * VERSIONS_ON_DISK > free:
        raise ConfigError(
            f"--directory {directory} has {free / 2**30:.1f} GiB left, and {VERSIONS_ON_DISK} versions of the weights take "
            f"{needed_bytes * VERSIONS_ON_DISK / 2**30:.1f} GiB; choose another one, or leave disk out of --transport"
        )


def check_json(file: Path | None) -> None:
    """Raises ConfigError when the result could not be written, which would be known only after minutes."""
    if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.absolute().parent, os.W_OK)):
        raise ConfigError(f"--json {file} cannot be written; choose a file in a directory that is there and that you may write to")


# ---- a run's checkpoints ---------------------------------------------------------------------------------------------


def find_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run in order. Raises ConfigError for fewer than two."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"from-run {run_dir}: there is no config.yaml; give the directory that rlpost.train printed last")
    root = checkpoint_root(run_dir)
    found = sorted((d for d in root.iterdir() if step_of(d) >= 0 and (d / MARK).exists()), key=step_of) if root.is_dir() else []
    if len(found) < 2:
        raise ConfigError(
            f"from-run {run_dir}: {len(found)} complete checkpoints are there, and a change needs two; "
            "train with checkpoint.every=1 and checkpoint.keep=10"
        )
    return found


def run_model(run_dir: Path) -> tuple[str, str]:
    """``model.path`` and ``training.trainable`` of a run."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(run_dir / "config.yaml")
    return str(config.model.path), str(config.training.trainable)


def names_of(checkpoints: Sequence[str]) -> list[str]:
    """Their directories' names."""
    return [Path(checkpoint).name for checkpoint in checkpoints]
