"""Seconds of a weight sync over each transport, and when a delta pays. Bandwidths in bytes/s, all to be measured (``bench sync``).

Transfers alone are a lower bound: producing whole tensors from shards, casting, encoding and applying are ``overhead_s``.
"""

from __future__ import annotations

from rlpost.planner.quantities import TimeLine, require_at_least, require_positive, require_share
from rlpost.types import ConfigError

RAW_DELTA_BYTES = 6
"""A changed element sent plainly: an int32 index and a bfloat16 value."""

RLPOST_DELTA_BYTES = 2.6
"""A changed bfloat16 element as rlpost encodes it (docs/weight-sync.md: 2.4 to 2.8)."""


def full_bytes(parameters: int, bytes_per_parameter: float = 2) -> float:
    """Bytes of all weights in the engines' dtype; of an adapter, give its parameters."""
    require_at_least(0, parameters=parameters)
    require_positive(bytes_per_parameter=bytes_per_parameter)
    return parameters * bytes_per_parameter


def delta_bytes(parameters: int, changed_share: float, bytes_per_change: float = RLPOST_DELTA_BYTES) -> float:
    """Bytes of the elements that changed; ``changed_share`` grows with the learning rate and must be measured."""
    require_at_least(0, parameters=parameters)
    require_share(changed_share=changed_share)
    require_positive(bytes_per_change=bytes_per_change)
    return parameters * changed_share * bytes_per_change


def mean_bytes_with_keyframes(full: float, delta: float, keyframe_every: int) -> float:
    """Bytes of a sync on average when one of ``keyframe_every`` is full and the others are deltas."""
    require_at_least(0, full=full, delta=delta)
    require_at_least(1, keyframe_every=keyframe_every)
    return (full + (keyframe_every - 1) * delta) / keyframe_every


def link_line(name: str, size_bytes: float, bytes_per_second: float, overhead_s: float = 0.0) -> TimeLine:
    """One pass over a link: a broadcast, a copy between processes of one machine (``ipc``), a delta."""
    require_at_least(0, size_bytes=size_bytes, overhead_s=overhead_s)
    require_positive(bytes_per_second=bytes_per_second)
    formula = f"{size_bytes / 1e9:.4g} GB / {bytes_per_second / 1e9:g} GB/s" + (f" + {overhead_s:g} s" if overhead_s else "")
    return TimeLine(name=name, seconds=size_bytes / bytes_per_second + overhead_s, formula=formula)


def disk_line(size_bytes: float, write_bytes_per_second: float, read_bytes_per_second: float, load_s: float = 0.0) -> TimeLine:
    """Written once, read by the engines, loaded."""
    require_at_least(0, size_bytes=size_bytes, load_s=load_s)
    require_positive(write_bytes_per_second=write_bytes_per_second, read_bytes_per_second=read_bytes_per_second)
    seconds = size_bytes / write_bytes_per_second + size_bytes / read_bytes_per_second + load_s
    rates = f"{write_bytes_per_second / 1e9:g} GB/s + the same / {read_bytes_per_second / 1e9:g} GB/s"
    formula = f"{size_bytes / 1e9:.4g} GB / {rates} + {load_s:g} s"
    return TimeLine(name="disk", seconds=seconds, formula=formula)


def break_even_bytes_per_second(full: float, delta: float, delta_overhead_s: float) -> float:
    """Bandwidth below which a delta is quicker than a full sync over the same link.

    full / B = delta / B + overhead, so B = (full - delta) / overhead, the overhead being what a delta costs besides its transfer
    (compare, encode, patch) beyond a full sync's. With a delta over a link of its own, give delta 0 and its whole seconds. Infinite
    when a delta has no overhead and is smaller: it always pays. Raises ConfigError when it is larger: it never does.
    """
    require_at_least(0, full=full, delta=delta, delta_overhead_s=delta_overhead_s)
    if delta >= full:
        raise ConfigError(
            f"a delta of {delta:.4g} bytes is no smaller than a full sync of {full:.4g}, so it pays at no bandwidth; "
            "expected a smaller one: lower the changed share, or take a full sync"
        )
    return (full - delta) / delta_overhead_s if delta_overhead_s else float("inf")
