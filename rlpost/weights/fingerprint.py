"""A fingerprint of named tensors: every bit counts, neither the order nor the transport does, and ranks hash only what they own.

A tensor is hashed in segments: the rows that one trainer rank owns, cut to the part (box) that an engine worker holds. The
fingerprint is the sum modulo 2^128 of all segments' xxh3-128 hashes, so the trainer's is the sum of its ranks' sums, and an engine
computes the same number from its live parameters by hashing the same segments.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from rlpost.types import Box, WeightsManifest

MODULUS = 1 << 128


class TensorHashes:
    """Sums of segment hashes by tensor name, for one layout (``boxes`` of one engine worker)."""

    def __init__(self, manifest: WeightsManifest, boxes: tuple[Box | None, ...] | None = None) -> None:
        self.manifest, self.boxes = manifest, boxes
        self.sums: dict[str, int] = {}
        self._open: dict[tuple[int, int], tuple[xxhash.xxh3_128, int]] = {}

    def box(self, tensor: int) -> Box | None:
        """The part of a tensor that counts; None is all of it."""
        return self.boxes[tensor] if self.boxes is not None else None

    def add(self, tensor: int, owner: int, start: int, rows: torch.Tensor) -> None:
        """Count rows from ``start`` of a segment, in the engine's dtype. The rows of one segment come in order; segments may interleave."""
        name = self.manifest.names[tensor]
        cuts = self.manifest.cuts[tensor]
        first, last = cuts[owner], cuts[owner + 1]
        box = self.box(tensor)
        key = (tensor, owner)
        digest, expected = self._open.pop(key, (None, first))
        if start != expected:
            raise AssertionError(f"{name}: rows from {start} came when {expected} was due")
        if digest is None:
            digest = self._begin(tensor, owner)
        part = rows if box is None else within(rows, start, box)
        if part is not None and part.numel():
            digest.update(raw_bytes(part))
        end = start + (rows.shape[0] if rows.ndim else 1)
        if end < last:
            self._open[key] = (digest, end)
        else:
            self.sums[name] = (self.sums.get(name, 0) + digest.intdigest()) % MODULUS

    def add_held(self, tensor: int, owner: int, part: torch.Tensor | None) -> None:
        """Count a whole segment of which only ``part``, its intersection with the box, is there (None: it is empty)."""
        name, digest = self.hash_held(tensor, owner, part)
        self.sums[name] = (self.sums.get(name, 0) + digest) % MODULUS

    def hash_held(self, tensor: int, owner: int, part: torch.Tensor | None) -> tuple[str, int]:
        """The tensor's name and the hash that :meth:`add_held` would count; it changes nothing, so threads may share this object."""
        digest = self._begin(tensor, owner)
        if part is not None and part.numel():
            digest.update(raw_bytes(part))
        return self.manifest.names[tensor], digest.intdigest()

    def _begin(self, tensor: int, owner: int) -> xxhash.xxh3_128:
        manifest, cuts = self.manifest, self.manifest.cuts[tensor]
        label = (manifest.names[tensor], manifest.shapes[tensor], manifest.dtypes[tensor], cuts[owner], cuts[owner + 1], self.box(tensor))
        return xxhash.xxh3_128("|".join(map(str, label)).encode())

    def total(self) -> int:
        """The sum over all tensors. Raises AssertionError when rows are missing."""
        if self._open:
            missing = [self.manifest.names[tensor] for tensor, _ in self._open]
            raise AssertionError(f"not all rows of {missing[:5]} were counted")
        return sum(self.sums.values()) % MODULUS


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, on the CPU (no copy when they lie so already)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data


def within(rows: torch.Tensor, start: int, box: Box) -> torch.Tensor | None:
    """The part of a row block (its first row is row ``start`` of the tensor) that lies in ``box``; None when nothing does."""
    first, last = max(box[0][0], start), min(box[0][1], start + rows.shape[0])
    if first >= last:
        return None
    part = rows[first - start : last - start]
    for dimension, (low, high) in enumerate(box[1:], 1):
        part = part.narrow(dimension, low, high - low)
    return part


def combine(sums: list[Mapping[str, int]]) -> dict[str, int]:
    """The whole tensors' sums from those of all ranks."""
    result: dict[str, int] = {}
    for part in sums:
        for name, value in part.items():
            result[name] = (result.get(name, 0) + value) % MODULUS
    return result


def hexdigest(total: int) -> str:
    """32 hexadecimal digits."""
    return f"{total:032x}"
