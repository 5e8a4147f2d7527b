"""The wire format of a sparse weight delta: which elements of which tensors changed, and their new bits.

In go the changes of one trainer rank (:func:`encode`); one blob a rank is joined to one message (:func:`join`). At the receiving
end :func:`split` and :func:`decode` give back the same changes, or refuse. A blob, all integers little-endian:

    magic "RLWD"      4 bytes
    format version    uint16
    digest            16 bytes, xxh3-128 of everything after it
    tensors           uint32
    table length      uint32, in bytes
    table             a frame: the rows of TABLE, one for each tensor
    frame lengths     uint64 each; how many there are follows from the table
    frames            the gaps of all tensors, then the values of all tensors

The gaps of a tensor are its first index and then the differences of neighbours, as the narrowest unsigned integers that hold the
largest. Tensors whose gaps (or values) have the same width lie end to end, cut into byte planes: all lowest bytes, then all
second bytes, and so on. A plane is one zstd frame. So the sign and exponent of bfloat16 values are compressed apart from the
mantissa, which is noise; hundreds of small tensors share one frame; and a single far outlier, which widens all gaps of its tensor,
costs planes of zeros, that is next to nothing.

A message has the magic "RLWM", version and digest as above, then the number of blobs (uint32), their lengths (uint64 each), and the blobs.

Guaranteed: what ``decode`` returns was encoded with the same bits; a flipped byte, a cut or an appended byte is a
:class:`CorruptDeltaError` before anything is returned. The digest is against accidents, not against forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

BLOB_MAGIC = b"RLWD"
MESSAGE_MAGIC = b"RLWM"
FORMAT_VERSION = 1
SEAL = struct.Struct("<4sH16s")
"""Magic, format version, digest of what follows."""
BLOB_HEAD = struct.Struct("<II")
"""Tensors, bytes of the compressed table."""
MESSAGE_HEAD = struct.Struct("<I")
"""Blobs."""
LENGTH = np.dtype("<u8")

UNSIGNED = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
"""Bytes of an element to the dtype of its bits."""

TABLE = np.dtype([("tensor", "<i8"), ("numel", "<i8"), ("changed", "<i8"), ("gap_width", "u1"), ("value_width", "u1")])
"""One row for each tensor: the fields of its TensorChange, its number of changes, and the bytes of one gap and of one value."""


class CorruptDeltaError(Exception):
    """A blob or message is not what was sent; the message says what was wrong. Nothing of it may be used."""


@dataclass(frozen=True, kw_only=True)
class TensorChange:
    """Elements of one tensor whose bits changed: absolute new values at flat indices (overwriting twice is harmless).

    ``tensor`` is the index in the manifest; a tensor may come in several changes. ``numel`` counts the elements of the whole
    tensor. ``indices`` ``[changed]`` are flat, strictly ascending, below ``numel``, of ``index_dtype(numel)``. ``values``
    ``[changed]`` are the new bits as uint8, uint16, uint32 or uint64, whichever has the size of the tensor's elements.
    Worked example: elements 2 and 7 of a bfloat16 tensor of shape [3, 4] become 1.0 and -0.0:

        TensorChange(tensor=5, numel=12, indices=[2, 7] as int32, values=[0x3F80, 0x8000] as uint16)
    """

    tensor: int
    numel: int
    indices: np.ndarray
    values: np.ndarray


def index_dtype(numel: int) -> np.dtype:
    """int32 for a tensor of fewer than 2**31 elements, else int64. ValueError when ``numel`` fits neither."""
    if not 0 <= numel < 2**63:
        raise ValueError(f"a tensor of {numel} elements; expected 0 to 2**63 - 1")
    return np.dtype(np.int32 if numel < 2**31 else np.int64)


def encode(changes: Sequence[TensorChange], level: int = 1) -> bytes:
    """One blob of ``changes``, whose order is kept; ``level`` is zstd's.

    ValueError, naming the tensor, for indices that are out of range or not strictly ascending, for other dtypes than
    TensorChange documents, and for indices and values of different length.
    """
    for change in changes:
        _check_change(change)
    codec = pa.Codec("zstd", compression_level=level)
    gaps = [_gaps_of(change.indices) for change in changes]
    rows = [
        (change.tensor, change.numel, len(change.values), gap.itemsize, change.values.itemsize)
        for change, gap in zip(changes, gaps, strict=True)
    ]
    table: bytes = codec.compress(np.ascontiguousarray(_bytes_of(np.array(rows, TABLE)).T), asbytes=True)
    frames = _compress(codec, gaps) + _compress(codec, [change.values for change in changes])
    lengths = np.array([len(frame) for frame in frames], LENGTH).tobytes()
    return _sealed(BLOB_MAGIC, [BLOB_HEAD.pack(len(changes), len(table)), table, lengths, *frames])


def decode(blob: bytes | memoryview) -> list[TensorChange]:
    """The changes that were encoded, in order; CorruptDeltaError when ``blob`` is anything else.

    The arrays are writable and not views of ``blob``; the values of all tensors of one element size share one buffer.
    """
    payload = _opened(BLOB_MAGIC, blob)
    tensors, table_length = _head(BLOB_HEAD, payload)
    frames_at = BLOB_HEAD.size + table_length
    codec = pa.Codec("zstd")
    rows = _table(codec, payload[BLOB_HEAD.size : frames_at], tensors)
    changed = rows["changed"].tolist()
    gap_widths, value_widths = rows["gap_width"].tolist(), rows["value_width"].tolist()
    planes = sum(sum(_used(widths, changed)) for widths in (gap_widths, value_widths))
    frames = iter(_pieces(payload[frames_at:], planes))
    gaps = _decompress(codec, frames, gap_widths, changed)
    values = _decompress(codec, frames, value_widths, changed)
    return [
        TensorChange(tensor=tensor, numel=numel, indices=_indices_of(gaps[place], tensor, numel), values=values[place])
        for place, (tensor, numel) in enumerate(zip(rows["tensor"].tolist(), rows["numel"].tolist(), strict=True))
    ]


def join(blobs: Sequence[bytes]) -> bytes:
    """One message of one blob a trainer rank; the order is kept. The blobs are not looked into."""
    lengths = np.array([len(blob) for blob in blobs], LENGTH).tobytes()
    return _sealed(MESSAGE_MAGIC, [MESSAGE_HEAD.pack(len(blobs)), lengths, *blobs])


def split(message: bytes | memoryview) -> list[memoryview]:
    """The blobs of a message, in order, as views into it. CorruptDeltaError when any byte of it is not what was joined."""
    payload = _opened(MESSAGE_MAGIC, message)
    (blobs,) = _head(MESSAGE_HEAD, payload)
    return _pieces(payload[MESSAGE_HEAD.size :], blobs)


def _sealed(magic: bytes, parts: Sequence[bytes]) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return b"".join([SEAL.pack(magic, FORMAT_VERSION, digest.digest()), *parts])


def _opened(magic: bytes, sealed: bytes | memoryview) -> memoryview:
    """What was sealed, once magic, version and digest agree."""
    view = memoryview(sealed).cast("B")
    found_magic, version, digest = _head(SEAL, view)
    if found_magic != magic:
        raise CorruptDeltaError(f"starts with {found_magic!r}, expected {magic!r} (a blob is decoded, a message is split)")
    if version != FORMAT_VERSION:
        raise CorruptDeltaError(f"format version {version}, expected {FORMAT_VERSION}: both ends must run the same rlpost")
    payload = view[SEAL.size :]
    found = xxhash.xxh3_128_digest(payload)
    if found != digest:
        raise CorruptDeltaError(
            f"digest of {len(payload)} bytes is {found.hex()}, the sender's was {digest.hex()}: cut or changed on the way"
        )
    return payload


def _head(layout: struct.Struct, view: memoryview) -> tuple:
    if len(view) < layout.size:
        raise CorruptDeltaError(f"ends after {len(view)} bytes, expected at least {layout.size}")
    return layout.unpack_from(view)


def _pieces(view: memoryview, count: int) -> list[memoryview]:
    """``view`` is ``count`` lengths and then as many pieces, which fill it exactly."""
    start = count * LENGTH.itemsize
    if len(view) < start:
        raise CorruptDeltaError(f"{count} lengths need {start} bytes, found {len(view)}")
    lengths = np.frombuffer(view[:start], LENGTH).tolist()
    if start + sum(lengths) != len(view):
        raise CorruptDeltaError(f"{count} pieces have {sum(lengths)} bytes together, found {len(view) - start}")
    pieces = []
    for length in lengths:
        pieces.append(view[start : start + length])
        start += length
    return pieces


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """``[elements, bytes of an element]``, a view of a contiguous ``array``; its columns are the planes."""
    return array.view(np.uint8).reshape(len(array), array.itemsize)


def _used(widths: Sequence[int], changed: Sequence[int]) -> list[int]:
    """The widths of tensors that are not empty: these have planes."""
    return sorted({width for width, count in zip(widths, changed, strict=True) if count})


def _compress(codec: pa.Codec, arrays: Sequence[np.ndarray]) -> list[bytes]:
    """One frame a plane, the planes of the narrowest arrays first."""
    frames = []
    for width in _used([array.itemsize for array in arrays], [array.size for array in arrays]):
        elements = _bytes_of(np.concatenate([array for array in arrays if array.itemsize == width]))
        frames += [codec.compress(np.ascontiguousarray(elements[:, byte]), asbytes=True) for byte in range(width)]
    return frames


def _decompress(codec: pa.Codec, frames: Iterator[memoryview], widths: Sequence[int], changed: Sequence[int]) -> list[np.ndarray]:
    """The arrays that ``_compress`` was given, of ``changed`` elements of ``widths`` bytes; takes their frames from ``frames``."""
    arrays = [np.empty(0, UNSIGNED[width]) for width in widths]
    for width in _used(widths, changed):
        members = [place for place, count in enumerate(changed) if count and widths[place] == width]
        elements = np.empty(sum(changed[place] for place in members), UNSIGNED[width])
        planes = _bytes_of(elements)
        for byte in range(width):
            planes[:, byte] = _plane(codec, next(frames), len(elements))
        start = 0
        for place in members:
            arrays[place] = elements[start : start + changed[place]]
            start += changed[place]
    return arrays


def _plane(codec: pa.Codec, frame: memoryview, size: int) -> np.ndarray:
    try:
        return np.frombuffer(codec.decompress(frame, size), np.uint8)
    except OSError as error:
        raise CorruptDeltaError(f"a frame of {len(frame)} bytes does not decompress to {size}: {error}") from error


def _table(codec: pa.Codec, frame: memoryview, tensors: int) -> np.ndarray:
    """``[tensors]`` of TABLE, with numbers that ``encode`` could have written."""
    planes = _plane(codec, frame, tensors * TABLE.itemsize).reshape(TABLE.itemsize, tensors)
    rows = np.ascontiguousarray(planes.T).reshape(-1).view(TABLE)
    range_wrong = (rows["tensor"] < 0) | (rows["changed"] < 0) | (rows["changed"] > rows["numel"])
    width_wrong = ~(np.isin(rows["gap_width"], list(UNSIGNED)) & np.isin(rows["value_width"], list(UNSIGNED)))
    wrong = range_wrong | width_wrong
    if wrong.any():
        place = int(wrong.argmax())
        raise CorruptDeltaError(f"row {place} of the table is {rows[place]}, of {TABLE.names}: no tensor changes like that")
    return rows


def _check_change(change: TensorChange) -> None:
    name = f"tensor {change.tensor}"
    if not 0 <= change.tensor < 2**63:
        raise ValueError(f"{name}: expected an index in the manifest, 0 or above")
    try:
        expected = index_dtype(change.numel)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    indices, values = change.indices, change.values
    if indices.dtype != expected:
        raise ValueError(f"{name}: indices are {indices.dtype}, expected {expected} for {change.numel} elements (index_dtype)")
    if values.dtype not in UNSIGNED.values():
        raise ValueError(f"{name}: values are {values.dtype}, expected bits as uint8, uint16, uint32 or uint64: take a view")
    if indices.ndim != 1 or indices.shape != values.shape:
        raise ValueError(f"{name}: indices {indices.shape} and values {values.shape}, expected one length and one dimension")
    if not indices.size:
        return
    if not (indices[1:] > indices[:-1]).all():
        raise ValueError(f"{name}: indices are not strictly ascending: sort them and keep one value for each")
    if indices[0] < 0 or indices[-1] >= change.numel:
        raise ValueError(f"{name}: indices {indices[0]} to {indices[-1]}, expected 0 to {change.numel - 1}")


def _gaps_of(indices: np.ndarray) -> np.ndarray:
    """``[changed]`` the first index, then the differences, in the narrowest dtype; ``indices`` were checked."""
    gaps = indices.copy()
    gaps[1:] -= indices[:-1]
    return gaps.astype(np.min_scalar_type(int(gaps.max(initial=0))))


def _indices_of(gaps: np.ndarray, tensor: int, numel: int) -> np.ndarray:
    """``[changed]`` the indices whose gaps these are.

    A sum that overflows has a negative element and so descends, because no gap reaches ``numel``: it cannot pass as in range.
    """
    dtype = index_dtype(numel)
    if not gaps.size:
        return np.empty(0, dtype)
    if int(gaps.max()) >= numel:
        raise CorruptDeltaError(f"tensor {tensor}: a gap of {gaps.max()} in {numel} elements")
    indices = np.cumsum(gaps, dtype=dtype)
    if not (indices[1:] > indices[:-1]).all():
        raise CorruptDeltaError(f"tensor {tensor}: indices are not strictly ascending within {numel} elements")
    if indices[-1] >= numel:
        raise CorruptDeltaError(f"tensor {tensor}: index {indices[-1]} in {numel} elements")
    return indices
