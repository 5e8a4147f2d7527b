"""Reads GGUF files: metadata, and tensors as float32 arrays. Only numpy; nothing is copied before it is asked for.

Format (version 2 and 3, little-endian), from the GGUF specification of the ggml project:

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata count x ( key string | value type u32 | value )
    tensor count   x ( name string | rank u32 | rank x u64 dimensions, fastest first | type u32 | offset u64 )
    padding up to ``general.alignment`` (32 unless the metadata says otherwise) | tensor data
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.types import ConfigError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
BLOCK_VALUES = 32
"""Values of one quantisation block, the same for Q4_1 and Q8_0."""

STRING_TYPE = 8
ARRAY_TYPE = 9
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct format of each scalar metadata type."""

Q4_1_BLOCK = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", (BLOCK_VALUES // 2,))])
Q8_0_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", (BLOCK_VALUES,))])


def dequantize_q4_1(blocks: np.ndarray) -> np.ndarray:
    """Blocks ``[blocks]`` of :data:`Q4_1_BLOCK` to float32 ``[blocks, 32]``: nibble x scale + minimum.

    The low nibbles of the 16 bytes are values 0 to 15, the high nibbles values 16 to 31.
    """
    nibbles = np.concatenate([blocks["nibbles"] & 0x0F, blocks["nibbles"] >> 4], axis=1).astype(np.float32)
    scale = blocks["scale"].astype(np.float32)[:, None]
    minimum = blocks["minimum"].astype(np.float32)[:, None]
    return nibbles * scale + minimum


def dequantize_q8_0(blocks: np.ndarray) -> np.ndarray:
    """Blocks ``[blocks]`` of :data:`Q8_0_BLOCK` to float32 ``[blocks, 32]``: value x scale."""
    return blocks["values"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]


@dataclass(frozen=True)
class TensorType:
    """How one ggml type is stored: its name, its block, the values of a block, and the way to float32."""

    name: str
    block: np.dtype
    block_values: int
    to_float32: Callable[[np.ndarray], np.ndarray]


TENSOR_TYPES = {
    0: TensorType("F32", np.dtype("<f4"), 1, lambda blocks: blocks.astype(np.float32)),
    3: TensorType("Q4_1", Q4_1_BLOCK, BLOCK_VALUES, dequantize_q4_1),
    8: TensorType("Q8_0", Q8_0_BLOCK, BLOCK_VALUES, dequantize_q8_0),
}
"""ggml type number to how it is read; only what our models use."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is in numpy order (slowest dimension first), ``start`` is a byte of the file."""

    shape: tuple[int, ...]
    type_number: int
    start: int


class GGUFFile:
    """A GGUF file: ``metadata`` (key to Python value) and ``tensors`` (name to :class:`TensorInfo`), read at once;
    tensor data is mapped and converted when :meth:`tensor` asks for it.

    Raises:
        ConfigError: no such file, not a GGUF file, an unknown version, or a file that ends early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read as a GGUF file: {error}") from error
        self._position = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the file ends early or is damaged at byte {self._position}: {error}") from error

    def _read_header(self) -> None:
        magic = self._take(len(MAGIC))
        if magic != MAGIC:
            raise ConfigError(f"{self.path}: starts with {magic!r}, a GGUF file starts with {MAGIC!r}")
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ConfigError(f"{self.path}: GGUF version {version}; this reader knows {SUPPORTED_VERSIONS} (little-endian)")
        tensor_count, metadata_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        relative: dict[str, TensorInfo] = {}
        for _ in range(tensor_count):
            name = self._string()
            fastest_first = [self._scalar("Q") for _ in range(self._scalar("I"))]
            relative[name] = TensorInfo(tuple(reversed(fastest_first)), self._scalar("I"), self._scalar("Q"))
        alignment = int(self.metadata.get("general.alignment", DEFAULT_ALIGNMENT))
        data_start = -(-self._position // alignment) * alignment
        self.tensors = {name: TensorInfo(info.shape, info.type_number, data_start + info.start) for name, info in relative.items()}

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as float32 in numpy order (``[out, in]`` for a linear layer), exactly as ggml dequantises it.

        Raises:
            ConfigError: no tensor of that name, a type that this reader does not know, or a file that ends early.
        """
        if name not in self.tensors:
            raise ConfigError(f"{self.path}: no tensor {name!r}; it has {len(self.tensors)} tensors, such as {sorted(self.tensors)[:3]}")
        info = self.tensors[name]
        kind = TENSOR_TYPES.get(info.type_number)
        if kind is None:
            known = ", ".join(f"{number} ({known.name})" for number, known in TENSOR_TYPES.items())
            raise ConfigError(f"{self.path}: tensor {name!r} has ggml type {info.type_number}; this reader knows {known}")
        values = int(np.prod(info.shape, dtype=np.int64))
        if (info.shape and info.shape[-1] % kind.block_values) or values % kind.block_values:
            raise ConfigError(f"{self.path}: tensor {name!r} of shape {info.shape} is not whole {kind.name} blocks of {kind.block_values}")
        stop = info.start + values // kind.block_values * kind.block.itemsize
        if stop > len(self._bytes):
            raise ConfigError(f"{self.path}: tensor {name!r} ends at byte {stop}, the file at {len(self._bytes)}: it was cut")
        blocks = np.frombuffer(self._bytes, dtype=kind.block, count=values // kind.block_values, offset=info.start)
        return kind.to_float32(blocks).reshape(info.shape)

    def _take(self, count: int) -> bytes:
        if self._position + count > len(self._bytes):
            raise struct.error(f"{count} bytes wanted, {len(self._bytes) - self._position} left")
        taken = self._bytes[self._position : self._position + count]
        self._position += count
        return taken

    def _scalar(self, format_letter: str) -> Any:
        return struct.unpack("<" + format_letter, self._take(struct.calcsize(format_letter)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _value(self, type_number: int) -> Any:
        if type_number == STRING_TYPE:
            return self._string()
        if type_number == ARRAY_TYPE:
            element_type, count = self._scalar("I"), self._scalar("Q")
            return [self._value(element_type) for _ in range(count)]
        if type_number not in SCALAR_FORMATS:
            raise ConfigError(f"{self.path}: unknown metadata type {type_number} at byte {self._position}")
        return self._scalar(SCALAR_FORMATS[type_number])
