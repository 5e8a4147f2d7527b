"""Writes small GGUF files for tests: the format again, from its specification, sharing nothing with the reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

F32, Q4_1, Q8_0 = 0, 3, 8


class Stored(NamedTuple):
    """A tensor as it lies in the file: type number, shape in numpy order, bytes."""

    type_number: int
    shape: tuple[int, ...]
    data: bytes


def f32(array: np.ndarray) -> Stored:
    return Stored(F32, array.shape, array.astype("<f4").tobytes())


def q4_1(scales: np.ndarray, minima: np.ndarray, nibbles: np.ndarray, shape: tuple[int, ...]) -> Stored:
    """``scales``, ``minima`` [blocks]; ``nibbles`` [blocks, 32] of 0 to 15 in value order."""
    data = b""
    for scale, minimum, block in zip(scales, minima, nibbles, strict=True):
        data += struct.pack("<ee", scale, minimum) + bytes(int(block[i]) | int(block[i + 16]) << 4 for i in range(16))
    return Stored(Q4_1, shape, data)


def q8_0(scales: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> Stored:
    """``scales`` [blocks]; ``values`` [blocks, 32] of -128 to 127."""
    return Stored(Q8_0, shape, b"".join(struct.pack("<e32b", scale, *map(int, block)) for scale, block in zip(scales, values, strict=True)))


def string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value(content: Any) -> bytes:
    """Type number and content: bool, int (u32), float (f32), text, or a non-empty list of one of them."""
    if isinstance(content, bool):
        return struct.pack("<I?", 7, content)
    if isinstance(content, int):
        return struct.pack("<II", 4, content)
    if isinstance(content, float):
        return struct.pack("<If", 6, content)
    if isinstance(content, str):
        return struct.pack("<I", 8) + string(content)
    elements = [value(element) for element in content]
    return struct.pack("<I", 9) + elements[0][:4] + struct.pack("<Q", len(elements)) + b"".join(element[4:] for element in elements)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3, alignment: int = 32) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, content in metadata.items():
        header += string(key) + value(content)
    data = b""
    for name, stored in tensors.items():
        dimensions = tuple(reversed(stored.shape))
        header += string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, stored.type_number, len(data))
        data += stored.data + b"\0" * (-len(stored.data) % alignment)
    path.write_bytes(header + b"\0" * (-len(header) % alignment) + data)
    return path
