"""A fingerprint of a set of named tensors: every bit counts, the order does not."""

from __future__ import annotations

import torch
import xxhash

MODULUS = 1 << 128


class Fingerprint:
    """Sum modulo 2^128 of one xxh3-128 hash a tensor, over its name, shape, dtype and bytes."""

    def __init__(self) -> None:
        self.total = 0
        self.tensors = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count one tensor (any device; CPU tensors are not copied)."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        digest = xxhash.xxh3_128()
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}".encode())
        digest.update(flat.data)
        self.total = (self.total + digest.intdigest()) % MODULUS
        self.tensors += 1

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.total:032x}"
