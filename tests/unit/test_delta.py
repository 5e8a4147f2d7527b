"""A sparse weight delta arrives with the same bits or not at all, and it is small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.weights import delta
from rlpost.weights.delta import CorruptDeltaError, TensorChange, decode, encode, index_dtype, join, split

VALUE_DTYPES: list[Any] = [np.uint8, np.uint16, np.uint32, np.uint64]
DIGEST_AT, PAYLOAD_AT = 6, 22


def change(tensor: int, numel: int, indices: Any, values: Any, dtype: Any = np.uint16) -> TensorChange:
    return TensorChange(
        tensor=tensor, numel=numel, indices=np.asarray(indices, index_dtype(max(numel, 0))), values=np.asarray(values, dtype)
    )


def assert_same(found: Sequence[TensorChange], expected: Sequence[TensorChange]) -> None:
    assert [(one.tensor, one.numel) for one in found] == [(one.tensor, one.numel) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.indices.dtype == other.indices.dtype and one.values.dtype == other.values.dtype
        np.testing.assert_array_equal(one.indices, other.indices)
        np.testing.assert_array_equal(one.values, other.values)


def resealed(sealed: bytes, payload: bytes) -> bytes:
    """As if the sender itself had written ``payload``: the digest agrees, so that only the checks behind it can refuse."""
    return sealed[:DIGEST_AT] + xxhash.xxh3_128_digest(payload) + payload


def bfloat16_bits(generator: np.random.Generator, count: int) -> np.ndarray:
    """Weights as a model has them: normal, deviation 0.02."""
    return (generator.normal(0.0, 0.02, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_change(tensor: int, numel: int, density: float, generator: np.random.Generator) -> TensorChange:
    indices = np.flatnonzero(generator.random(numel) < density)
    return change(tensor, numel, indices, bfloat16_bits(generator, len(indices)))


SMALL = [
    change(0, 12, [2, 7], [0x3F80, 0x8000]),
    change(3, 70_000, [0, 69_999], [1, 2**32 - 1], np.uint32),
    change(4, 5, [], []),
]
"""Two index widths, two value sizes, an empty tensor."""


@st.composite
def tensor_changes(draw: st.DrawFn) -> TensorChange:
    numel = draw(st.sampled_from([0, 1, 2, 255, 256, 257, 5000, 70_000]))
    density = draw(st.sampled_from([0.0, 0.001, 0.1, 0.9, 1.0]))
    dtype = draw(st.sampled_from(VALUE_DTYPES))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    indices = np.flatnonzero(generator.random(numel) < density)
    values = generator.integers(0, np.iinfo(dtype).max, len(indices), dtype, endpoint=True)
    return change(draw(st.integers(0, 2**40)), numel, indices, values, dtype)


@settings(max_examples=150, deadline=None)
@given(changes=st.lists(tensor_changes(), max_size=12), level=st.sampled_from([1, 3, 19]))
def test_what_was_encoded_comes_back(changes: list[TensorChange], level: int) -> None:
    assert_same(decode(encode(changes, level)), changes)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), numel=st.sampled_from([300, 2**16 + 1, 2**31 - 1, 2**31, 2**40, 2**63 - 1]))
def test_gaps_of_every_size_come_back(data: st.DataObject, numel: int) -> None:
    indices = sorted(data.draw(st.sets(st.integers(0, numel - 1) | st.sampled_from([0, 1, 255, 256, numel - 2, numel - 1]), max_size=30)))
    expected = [change(0, numel, indices, range(len(indices)))]
    assert_same(decode(encode(expected)), expected)


@pytest.mark.parametrize(
    ("numel", "dtype"),
    [(0, np.int32), (1, np.int32), (2**31 - 1, np.int32), (2**31, np.int64), (2**40, np.int64), (2**63 - 1, np.int64)],
)
def test_the_index_width_follows_the_whole_tensor_not_the_changes(numel: int, dtype: Any) -> None:
    assert index_dtype(numel) == dtype
    indices = np.array(sorted({0, numel // 2, numel - 1}) if numel else [], dtype)
    expected = [change(0, 12, [3], [9]), TensorChange(tensor=1, numel=numel, indices=indices, values=indices.astype(np.uint16))]
    found = decode(encode(expected))
    assert found[1].indices.dtype == dtype
    assert_same(found, expected)


@pytest.mark.parametrize("numel", [-1, 2**63])
def test_a_tensor_that_no_index_fits_is_refused(numel: int) -> None:
    with pytest.raises(ValueError, match=str(numel)):
        index_dtype(numel)
    with pytest.raises(ValueError, match="tensor 8: a tensor of"):
        encode([TensorChange(tensor=8, numel=numel, indices=np.empty(0, np.int32), values=np.empty(0, np.uint16))])


@pytest.mark.parametrize(
    ("dtype", "old", "new"),
    [
        (np.uint16, 0x3F80, 0xBF80),
        (np.uint16, 0x3F00, 0x4000),
        (np.uint16, 0x0000, 0x8000),
        (np.uint16, 0x7FC0, 0x7FC1),
        (np.uint16, 0x7FC0, 0xFF81),
        (np.uint32, 0x3F800000, 0xBF800000),
        (np.uint32, 0x3F000000, 0x40000000),
        (np.uint32, 0x00000000, 0x80000000),
        (np.uint32, 0x7FC00000, 0x7FC00001),
        (np.uint32, 0x7FC00000, 0x7F800001),
    ],
    ids=[f"{dtype} {what}" for dtype in ("bfloat16", "float32") for what in ("sign", "times 4", "minus zero", "NaN payload", "signalling")],
)
def test_changes_that_floats_would_hide_keep_their_bits(dtype: Any, old: int, new: int) -> None:
    """Times 4 and the sign change the top byte only, minus zero equals zero, and a NaN equals nothing or, canonicalised, any other."""
    before = np.full(100, old, dtype)
    after = before.copy()
    after[[0, 41, 99]] = new
    changed = np.flatnonzero(before != after)
    (found,) = decode(encode([change(0, 100, changed, after[changed], dtype)]))
    before[found.indices] = found.values
    assert before.tobytes() == after.tobytes()


def test_nothing_changed() -> None:
    assert decode(encode([])) == []
    empty = [
        change(tensor, numel, [], [], dtype) for tensor, (numel, dtype) in enumerate([(0, np.uint8), (9, np.uint64), (2**31, np.uint16)])
    ]
    assert_same(decode(encode(empty)), empty)


def test_one_tensor_may_come_in_two_changes_and_the_order_is_kept() -> None:
    expected = [change(7, 10, [8], [1]), change(2, 10, [0], [2], np.uint8), change(7, 10, [1], [3])]
    assert_same(decode(encode(expected)), expected)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda blob: memoryview(blob).cast("B", (1, len(blob)))])
def test_decoded_arrays_belong_to_the_caller(wrap: Any) -> None:
    """Any buffer is taken, and the arrays outlive it and can be written: torch warns of arrays that cannot."""
    found = decode(wrap(encode(SMALL)))
    assert_same(found, SMALL)
    for one in found:
        assert one.indices.flags.writeable and one.values.flags.writeable
        assert one.indices.flags.c_contiguous and one.values.flags.c_contiguous


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
@pytest.mark.parametrize(("read", "sealed"), [(decode, encode(SMALL)), (split, join([encode(SMALL), encode([])]))], ids=["blob", "message"])
def test_any_flipped_byte_is_refused(read: Any, sealed: bytes, mask: int) -> None:
    for position in range(len(sealed)):
        flipped = bytearray(sealed)
        flipped[position] ^= mask
        with pytest.raises(CorruptDeltaError):
            read(bytes(flipped))


@pytest.mark.parametrize(("read", "sealed"), [(decode, encode(SMALL)), (split, join([encode(SMALL), encode([])]))], ids=["blob", "message"])
def test_a_cut_or_longer_one_is_refused(read: Any, sealed: bytes) -> None:
    for length in range(len(sealed)):
        with pytest.raises(CorruptDeltaError):
            read(sealed[:length])
    for more in (b"\0", b"x" * 100, sealed):
        with pytest.raises(CorruptDeltaError):
            read(sealed + more)
        with pytest.raises(CorruptDeltaError):
            read(more + sealed)


@pytest.mark.parametrize(("read", "sealed"), [(decode, encode(SMALL)), (split, join([encode(SMALL), encode([])]))], ids=["blob", "message"])
def test_a_cut_that_the_digest_covers_is_refused_too(read: Any, sealed: bytes) -> None:
    """A sender that wrote too little: every length inside is checked, and nothing but CorruptDeltaError comes out."""
    payload = sealed[PAYLOAD_AT:]
    read(resealed(sealed, payload))
    for length in range(len(payload)):
        with pytest.raises(CorruptDeltaError):
            read(resealed(sealed, payload[:length]))
    with pytest.raises(CorruptDeltaError):
        read(resealed(sealed, payload + b"\0"))


def test_errors_say_what_was_found_and_expected() -> None:
    blob = encode(SMALL)
    with pytest.raises(CorruptDeltaError, match="starts with b'RLWM', expected b'RLWD'"):
        decode(join([blob]))
    with pytest.raises(CorruptDeltaError, match="starts with b'RLWD', expected b'RLWM'"):
        split(blob)
    with pytest.raises(CorruptDeltaError, match="format version 2, expected 1"):
        decode(blob[:4] + b"\x02\x00" + blob[6:])
    with pytest.raises(CorruptDeltaError, match="digest of"):
        decode(blob + b"\0")
    with pytest.raises(CorruptDeltaError, match="ends after 3 bytes"):
        decode(blob[:3])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (change(17, 10, [3, 2], [0, 0]), "not strictly ascending"),
        (change(17, 10, [3, 3], [0, 0]), "not strictly ascending"),
        (change(17, 2**31 - 1, [2**31 - 2, -(2**31)], [0, 0]), "not strictly ascending"),
        (change(17, 10, [-1, 3], [0, 0]), "indices -1 to 3, expected 0 to 9"),
        (change(17, 10, [3, 10], [0, 0]), "indices 3 to 10, expected 0 to 9"),
        (change(17, 0, [0], [0]), "indices 0 to 0"),
        (change(17, 10, [3, 4], [0]), r"indices \(2,\) and values \(1,\)"),
        (change(17, 10, [], [0]), r"indices \(0,\) and values \(1,\)"),
        (change(17, 10, [[3, 4]], [[0, 0]]), "one dimension"),
        (change(17, 10, [3], [0.5], np.float32), "values are float32"),
        (change(17, 10, [3], [1], np.int16), "values are int16"),
        (change(17, 10, [3], [1], ">u2"), "values are >u2"),
        (TensorChange(tensor=17, numel=10, indices=np.array([3]), values=np.zeros(1, np.uint16)), "indices are int64, expected int32"),
        (TensorChange(tensor=17, numel=2**31, indices=np.array([3], np.int32), values=np.zeros(1, np.uint16)), "int32, expected int64"),
        (TensorChange(tensor=17, numel=10, indices=np.array([3], np.uint32), values=np.zeros(1, np.uint16)), "indices are uint32"),
    ],
)
def test_encoding_refuses_what_no_tensor_can_have(wrong: TensorChange, says: str) -> None:
    with pytest.raises(ValueError, match=f"tensor 17: .*{says}"):
        encode([SMALL[0], wrong])


def test_encoding_refuses_a_tensor_that_no_manifest_has() -> None:
    with pytest.raises(ValueError, match="tensor -1"):
        encode([change(-1, 10, [3], [1])])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (change(17, 10, [3, 10], [0, 0]), "tensor 17: index 10 in 10 elements"),
        (change(17, 10, [3, 14], [0, 0]), "tensor 17: a gap of 11 in 10 elements"),
        (change(17, 10, [10], [0]), "tensor 17: a gap of 10 in 10 elements"),
        (change(17, 10, [3, 3], [0, 0]), "tensor 17: indices are not strictly ascending"),
        (change(17, 1, [0, 1], [0, 0]), "row 1 of the table is"),
        (change(17, 2**63 - 1, [2**62, 2**62 - 1], [0, 0]), "tensor 17: "),
        (
            TensorChange(tensor=17, numel=2**31 - 1, indices=(2**31 - 3) * np.arange(1, 5, dtype=np.int64), values=np.zeros(4, np.uint16)),
            "tensor 17: indices are not strictly ascending",
        ),
    ],
    ids=["at the end", "beyond", "first", "twice", "more than there are", "descending", "sum overflows"],
)
def test_indices_that_the_tensor_does_not_have_are_refused_by_the_receiver_too(
    monkeypatch: pytest.MonkeyPatch, wrong: TensorChange, says: str
) -> None:
    monkeypatch.setattr(delta, "_check_change", lambda change: None)
    blob = encode([SMALL[0], wrong])
    with pytest.raises(CorruptDeltaError, match=says):
        decode(blob)


@pytest.mark.parametrize(
    "row", [(-1, 9, 0, 1, 2), (0, -1, 0, 1, 2), (0, 9, -1, 1, 2), (0, 9, 10, 1, 2), (0, 9, 0, 0, 2), (0, 9, 0, 1, 3), (0, 9, 0, 16, 2)]
)
def test_an_impossible_table_is_refused(row: tuple[int, ...]) -> None:
    def of(*rows: tuple[int, ...]) -> bytes:
        columns = np.array(list(rows), delta.TABLE).view(np.uint8).reshape(len(rows), -1).T
        table = pa.compress(columns.tobytes(), codec="zstd", asbytes=True)
        return resealed(encode([]), delta.BLOB_HEAD.pack(len(rows), len(table)) + table)

    assert_same(decode(of((0, 9, 0, 1, 2))), [change(0, 9, [], [])])
    with pytest.raises(CorruptDeltaError, match="row 1 of the table"):
        decode(of((0, 9, 0, 1, 2), row))


def test_joined_blobs_come_back_in_order_without_a_copy() -> None:
    blobs = [encode(SMALL[:1]), encode([]), encode(SMALL[1:]), b""]
    message = join(blobs)
    parts = split(message)
    assert [bytes(part) for part in parts] == blobs
    assert all(part.obj is message for part in parts)
    assert_same([one for part in parts[:3] for one in decode(part)], SMALL)
    assert split(memoryview(join([]))) == []


@pytest.mark.parametrize(("density", "most"), [(0.01, 2.5), (0.001, 2.9)])
def test_bytes_of_a_changed_bfloat16(density: float, most: float) -> None:
    """Beside 2 bytes of value and 4 of index. Entropy allows 2.3 and 2.7: log2(e / density) bits of gap, 10.3 bits of value."""
    generator = np.random.default_rng(20)
    changes = [random_change(tensor, 1_000_000, density, generator) for tensor in range(40 if density < 0.01 else 8)]
    blob = encode(changes)
    assert len(blob) / sum(len(one.values) for one in changes) < most
    assert_same(decode(blob), changes)


def test_one_far_outlier_costs_little() -> None:
    """It needs four bytes a gap where the others need one or two: the upper planes are zeros."""
    generator = np.random.default_rng(21)
    near = random_change(0, 2_000_000, 0.01, generator)
    numel = 2**31 - 1
    without = change(0, numel, near.indices, near.values)
    outlier = change(0, numel, np.append(near.indices, numel - 1), np.append(near.values, 1))
    assert len(encode([outlier])) - len(encode([without])) < 100


def test_a_single_change_is_a_short_blob() -> None:
    """One plane for the gap and two for the value: gaps that were not narrowed would have up to eight."""
    assert len(encode([change(0, 2**31, [200], [0x3F80])])) < 130


def test_a_higher_level_compresses_more() -> None:
    """Values that repeat at a distance, which only a longer search finds."""
    values = np.tile(bfloat16_bits(np.random.default_rng(23), 300), 100)
    values[::7] += 1
    changes = [change(0, len(values), range(len(values)), values)]
    assert len(encode(changes, 19)) < len(encode(changes)) * 0.9
    assert_same(decode(encode(changes, 19)), changes)


def test_hundreds_of_small_tensors_share_their_frames() -> None:
    """A frame costs 13 bytes and more: one for each plane of each tensor would cost 40 beside 25 of content."""
    generator = np.random.default_rng(22)
    changes = [change(i, 4096, np.sort(generator.choice(4096, 10, replace=False)), bfloat16_bits(generator, 10)) for i in range(300)]
    assert len(encode(changes)) / 300 < 40
    assert len(encode([change(i, 4096, [], []) for i in range(300)])) < 500
