"""What only a measurement gives: how far a machine stays below its data sheet, and what a process costs before it does anything.

Every second of a predicted phase is an amount of work times one coefficient: nominal seconds (FLOPs or bytes over the data sheet's
rate) times how many times longer it takes in truth, or a count (micro-batches, decoding steps, samples) times seconds each. So a phase
is linear in its coefficients, and ``calibrate`` can fit them. Without a calibration the values below are assumed, and every line says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlpost.config.derive import Device
from rlpost.planner.quantities import GIB, require_choice, require_positive
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """One of them, with what is assumed of a GPU and of a CPU core."""

    name: str
    unit: str
    gpu: float
    cpu: float
    doc: str


TIMES, SECONDS, BYTES, SHARE, PER_BILLION = "x nominal", "s", "B", "x", "s/1e9"

_ROWS = (
    ("trainer_base_bytes", BYTES, 1.5 * GIB, 0.42 * GIB, "A trainer process before it has a model (GPU: context and communicators)."),
    ("trainer_memory_factor", SHARE, 1.05, 1.0, "What the allocator holds, over what was asked for."),
    ("engine_base_bytes", BYTES, 1.5 * GIB, 0.63 * GIB, "An engine process before it has a model."),
    ("engine_memory_factor", SHARE, 1.0, 1.0, "The same for an engine."),
    ("train_flops", TIMES, 2.5, 0.5, "Forward and backward (2.5: 40 % of the data sheet's FLOPs are reached)."),
    ("train_layer_s", SECONDS, 1e-4, 5e-4, "Of one layer in one micro-batch, beyond its FLOPs."),
    ("optimizer_bytes", TIMES, 1.5, 1.0, "Reading and writing weights, gradients and moments."),
    ("update_s", SECONDS, 0.05, 0.02, "Of one optimizer step, whatever its size: packing, calls, collectives' start."),
    ("forward_flops", TIMES, 2.2, 0.4, "Forwards for logprobs and values."),
    ("forward_layer_s", SECONDS, 5e-5, 2e-4, "Of one layer in one micro-batch of such a forward."),
    ("attention_flops", TIMES, 3.0, 1.2, "Attention's scores and sums in the trainer, forward or backward."),
    ("collectives", TIMES, 1.2, 2.0, "Traffic of sharded weights and gradients that does not hide behind arithmetic."),
    ("prefill_flops", TIMES, 2.2, 0.7, "Prompt tokens in an engine."),
    ("decode_bytes", TIMES, 1.4, 2.0, "Reading weights in decoding."),
    ("decode_kv_bytes", TIMES, 1.8, 1.0, "Reading KV in decoding."),
    ("decode_flops", TIMES, 1.0, 0.5, "Arithmetic of decoding, as far as it does not hide behind reading."),
    ("decode_step_s", SECONDS, 3e-3, 8e-3, "Of one decoding step, beyond both: scheduler, kernel launches, sampling."),
    ("sample_s", SECONDS, 5e-4, 1e-3, "Of one sample, whatever its length: request, result, episode."),
    ("reward_sample_s", SECONDS, 1e-4, 1e-4, "Of one sample's reward that nothing else hides."),
    ("sync_read", TIMES, 2.0, 1.0, "Reading and casting the trainer's float32 weights."),
    ("sync_collective", TIMES, 1.4, 0.5, "Weights over the collective link, within a node."),
    ("sync_network", TIMES, 1.4, 1.05, "The same between nodes, of the network's bandwidth (1.05: the headers of TCP's packets)."),
    ("sync_ipc", TIMES, 2.0, 2.0, "Weights through memory of one machine or GPU."),
    ("sync_disk", TIMES, 1.3, 1.3, "Weights written to a directory and read from it."),
    ("delta_scan", PER_BILLION, 2.5, 2.5, "Of 1e9 parameters of a rank: comparing with what engines hold, coding changes (a CPU core)."),
    ("delta_s", SECONDS, 0.05, 0.04, "Of one delta, whatever its size, beyond a full sync: it is staged first."),
    ("sync_s", SECONDS, 0.2, 0.02, "Of one sync, whatever its size."),
    ("checkpoint_bytes", TIMES, 1.3, 2.5, "Writing a checkpoint."),
    ("checkpoint_s", SECONDS, 0.5, 0.12, "Of one checkpoint, whatever its size."),
    ("wait_s", SECONDS, 0.1, 0.02, "Of a step outside all phases."),
    ("wait_sample_s", SECONDS, 2e-4, 2e-4, "Of one sample outside all phases: building batches, writing rollouts."),
)  # fmt: skip
COEFFICIENTS = {row[0]: Coefficient(name=row[0], unit=row[1], gpu=row[2], cpu=row[3], doc=row[4]) for row in _ROWS}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A value and where it comes from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Coefficients of one kind of device: measured ones, and for the others what is assumed."""

    device: Device
    measured: Mapping[str, Measured] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """The coefficient's value."""
        return self.measured[name].value if name in self.measured else getattr(COEFFICIENTS[name], self.device)

    def basis(self, name: str) -> str:
        """``assumed``, or ``measured (from RUN)``."""
        return f"measured (from {self.measured[name].source})" if name in self.measured else "assumed"

    def with_values(self, values: Mapping[str, float], source: str) -> Calibration:
        """With further measured values."""
        return Calibration(
            device=self.device, measured={**self.measured, **{name: Measured(value=v, source=source) for name, v in values.items()}}
        )


HEADER = "# Coefficients of rlpost.plan, measured. Give it to later plans: python -m rlpost.plan config=... calibration=THIS_FILE\n"


def write_calibration(calibration: Calibration, path: Path) -> None:
    """As YAML that :func:`read_calibration` reads. Never overwrites: raises ConfigError when the file exists."""
    document = {
        "device": calibration.device,
        "coefficients": {
            name: {"value": float(f"{one.value:.6g}"), "unit": COEFFICIENTS[name].unit, "source": one.source}
            for name, one in calibration.measured.items()
        },
    }
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(HEADER + yaml.safe_dump(document, sort_keys=False))
    except FileExistsError:
        raise ConfigError(f"{path} exists already; move it away, or name another file with out=FILE") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; name another file with out=FILE") from error


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError for a file that is none, and for unknown or impossible coefficients."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"calibration={path} cannot be read: {error}; expected the file that rlpost.plan calibrate writes") from error
    if not isinstance(document, dict) or not isinstance(document.get("coefficients"), dict):
        raise ConfigError(f"calibration={path} has no mapping `coefficients`; expected the file that rlpost.plan calibrate writes")
    require_choice(f"{path}: device", str(document.get("device")), ("cpu", "gpu"))
    measured = {str(name): _entry(path, str(name), entry) for name, entry in document["coefficients"].items()}
    return Calibration(device=document["device"], measured=measured)


MAY_BE_ZERO = (SECONDS, TIMES, PER_BILLION)
"""Units of what a fit may find to cost nothing."""


def _entry(path: Path, name: str, entry: Any) -> Measured:
    require_choice(f"{path}: coefficient", name, COEFFICIENTS)
    value = entry.get("value") if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{path}: {name} is {entry!r}; expected a mapping with a number `value`")
    if not (value == 0 and COEFFICIENTS[name].unit in MAY_BE_ZERO):
        require_positive(**{f"{path}: {name}": value})
    return Measured(value=float(value), source=str(entry.get("source", path)))


@dataclass(frozen=True, kw_only=True)
class Work:
    """One summand of a phase: ``amount`` nominal seconds or pieces, each costing ``coefficient``."""

    phase: str
    coefficient: str
    amount: float
    formula: str


def work_seconds(works: Sequence[Work], calibration: Calibration) -> float:
    """Seconds of works that follow one another."""
    return sum(work.amount * calibration.value(work.coefficient) for work in works)
