"""The fingerprint sees every bit of every tensor, however it is cut; the buckets carry every row once."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.types import Box, WeightsManifest
from rlpost.weights.buckets import ALIGNMENT, DTYPE_BYTES, piece_bytes, plan_buckets, row_elements, rows_of, total_bytes
from rlpost.weights.fingerprint import MODULUS, TensorHashes, combine, hexdigest, within

Tensors = Mapping[str, torch.Tensor]
Cuts = Sequence[tuple[int, ...]]

BASE = torch.tensor([[1.0, 0.5], [0.0, -3.0]])


# ---- the fingerprint ---------------------------------------------------------------------------------------------------


def manifest_of(tensors: Tensors, cuts: Cuts | None = None) -> WeightsManifest:
    """Of these tensors as an engine would hold them; ``cuts`` None: one rank owns all."""
    return WeightsManifest(
        names=tuple(tensors),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors.values()),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        cuts=tuple(cuts) if cuts is not None else tuple((0, rows_of(tensor.shape)) for tensor in tensors.values()),
        trained=(True,) * len(tensors),
        bucket_bytes=1 << 20,
    )


def owned(
    manifest: WeightsManifest, tensors: Tensors, owner: int, *, block: int = 1 << 20, boxes: tuple[Box | None, ...] | None = None
) -> TensorHashes:
    """What trainer rank ``owner`` hashes: its rows, ``block`` at a time."""
    hashes = TensorHashes(manifest, boxes)
    for index, tensor in enumerate(tensors.values()):
        rows = tensor.view(1) if tensor.ndim == 0 else tensor
        first, last = manifest.cuts[index][owner : owner + 2]
        for start in range(first, last, block):
            hashes.add(index, owner, start, rows[start : min(start + block, last)])
    return hashes


def fingerprint(tensors: Tensors, cuts: Cuts | None = None, block: int = 1 << 20) -> int:
    """Over all ranks."""
    manifest = manifest_of(tensors, cuts)
    ranks = len(manifest.cuts[0]) - 1 if tensors else 1
    return sum(owned(manifest, tensors, owner, block=block).total() for owner in range(ranks)) % MODULUS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("position", "value"),
    [((0, 0), -1.0), ((0, 1), 2.0), ((1, 0), -0.0), ((1, 1), -3.015625)],
    ids=["sign", "times 4", "minus zero", "one step of bfloat16"],
)
def test_changes_that_a_low_byte_misses_are_seen(dtype: torch.dtype, position: tuple[int, int], value: float) -> None:
    """1.0 to -1.0 and 0.5 to 2.0 differ in the top byte only; -0.0 equals 0.0 but has another bit."""
    changed = BASE.clone().to(dtype)
    changed[position] = value
    assert fingerprint({"w": changed}) != fingerprint({"w": BASE.to(dtype)})


@pytest.mark.parametrize("cuts", [(0, 2), (0, 1, 2)])
def test_every_bit_counts(cuts: tuple[int, ...]) -> None:
    seen = {fingerprint({"w": BASE}, [cuts])}
    for byte in range(16):
        for bit in range(8):
            flipped = BASE.clone()
            flipped.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            seen.add(fingerprint({"w": flipped}, [cuts]))
    assert len(seen) == 1 + 16 * 8


@pytest.mark.parametrize(("one", "other"), [(0x7FC00000, 0x7FC00001), (0x7FC00000, 0xFFC00000), (0x7F800001, 0x7FC00001)])
def test_nan_payloads_are_compared_as_bits(one: int, other: int) -> None:
    first, second = (torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32) for bits in (one, other))
    assert fingerprint({"w": first}) == fingerprint({"w": first.clone()})
    assert fingerprint({"w": first}) != fingerprint({"w": second})


def test_order_does_not_matter_but_name_shape_and_dtype_do() -> None:
    other = torch.arange(3.0)
    assert fingerprint({"a": BASE, "b": other}) == fingerprint({"b": other, "a": BASE})
    assert fingerprint({"a": BASE, "b": BASE + 1}) != fingerprint({"b": BASE, "a": BASE + 1}), "two tensors that were swapped"
    assert fingerprint({"a": BASE}) != fingerprint({"a": BASE.view(4)})
    assert fingerprint({"a": BASE}) != fingerprint({"a": BASE.view(torch.int32)})
    assert fingerprint({"a": BASE}) != fingerprint({"b": BASE})
    assert fingerprint({"a": BASE[:0]}) == fingerprint({}) == 0, "a tensor without rows has no bits"


def test_two_segments_that_were_swapped_are_seen() -> None:
    """The hashes of the segments are added up: which rows a segment is must be in each."""
    assert fingerprint({"w": BASE}, [(0, 1, 2)]) != fingerprint({"w": BASE.flip(0)}, [(0, 1, 2)])


def test_a_missing_or_doubled_tensor_is_seen() -> None:
    """A sum that cancelled, as XOR does, would not see the same tensor twice."""
    manifest = manifest_of({"a": BASE})
    hashes = owned(manifest, {"a": BASE}, 0)
    once = hashes.total()
    hashes.add(0, 0, 0, BASE)
    assert hashes.total() not in (0, once)
    assert hexdigest(0) == "0" * 32 and hexdigest(MODULUS - 1) == "f" * 32


def test_rows_that_are_missing_or_come_out_of_order_are_refused() -> None:
    hashes = TensorHashes(manifest_of({"a": BASE, "the one": BASE}))
    hashes.add(0, 0, 0, BASE)
    hashes.add(1, 0, 0, BASE[:1])
    with pytest.raises(AssertionError, match="the one"):
        hashes.total()
    with pytest.raises(AssertionError, match="the one: rows from 0 came when 1 was due"):
        hashes.add(1, 0, 0, BASE[:1])


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(2.0), torch.arange(12.0).view(3, 4).t(), torch.ones(2, 3)[:, 1:], torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)],
)
def test_scalars_and_strided_tensors_are_like_their_contiguous_copies(tensor: torch.Tensor) -> None:
    expected = fingerprint({"w": tensor.clone(memory_format=torch.contiguous_format)})
    assert fingerprint({"w": tensor}) == fingerprint({"w": tensor}, block=1) == expected != 0


@st.composite
def cut_shapes(draw: st.DrawFn, smallest: int = 0) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of a few small tensors, and where one to four ranks cut them (some own nothing)."""
    shapes = [tuple(shape) for shape in draw(st.lists(st.lists(st.integers(smallest, 7), max_size=3), min_size=1, max_size=8))]
    ranks = draw(st.integers(1, 4))
    cuts = []
    for shape in shapes:
        inner = draw(st.lists(st.integers(0, rows_of(shape)), min_size=ranks - 1, max_size=ranks - 1))
        cuts.append((0, *sorted(inner), rows_of(shape)))
    return shapes, cuts


def random_tensors(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bits, NaN payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = [torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=generator).to(torch.int32) for shape in shapes]
    return {f"tensor {index}": tensor.view(torch.float32) for index, tensor in enumerate(bits)}


@settings(max_examples=60, deadline=None)
@given(drawn=cut_shapes(), block=st.integers(1, 4))
def test_the_ranks_sums_add_up_to_the_number_of_one_process(drawn: tuple[list[tuple[int, ...]], list[tuple[int, ...]]], block: int) -> None:
    """One process that has all rows meets them bucket by bucket: the segments of all ranks interleave."""
    shapes, cuts = drawn
    tensors = random_tensors(shapes)
    manifest = manifest_of(tensors, cuts)
    ranks = [owned(manifest, tensors, owner, block=block) for owner in range(len(cuts[0]) - 1)]
    one = TensorHashes(manifest)
    for offset in range(8):
        for owner in reversed(range(len(ranks))):
            for index, tensor in enumerate(tensors.values()):
                first, last = cuts[index][owner : owner + 2]
                if first + offset < last:
                    one.add(index, owner, first + offset, (tensor.view(1) if tensor.ndim == 0 else tensor)[first + offset][None])
    assert one.total() == sum(rank.total() for rank in ranks) % MODULUS
    assert combine([rank.sums for rank in ranks]) == one.sums


@st.composite
def boxed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    """A shape, where ranks cut it, and the part of it that an engine worker holds."""
    [shape], [cuts] = draw(cut_shapes(smallest=1).filter(lambda drawn: len(drawn[0]) == 1))
    box = []
    for size in shape or (1,):
        low = draw(st.integers(0, size - 1))
        box.append((low, draw(st.integers(low + 1, size))))
    return shape, cuts, tuple(box)


@settings(max_examples=100, deadline=None)
@given(drawn=boxed(), block=st.integers(1, 4))
def test_a_part_is_hashed_alike_out_of_the_whole_and_where_only_the_part_is(
    drawn: tuple[tuple[int, ...], tuple[int, ...], Box], block: int
) -> None:
    """The trainer cuts the box out of the rows that it sends; a tensor-parallel engine has nothing else."""
    shape, cuts, box = drawn
    tensors = random_tensors([shape])
    manifest = manifest_of(tensors, [cuts])
    trainer = sum(owned(manifest, tensors, owner, block=block, boxes=(box,)).total() for owner in range(len(cuts) - 1)) % MODULUS

    part = tensors["tensor 0"].view(shape or (1,))[tuple(slice(low, high) for low, high in box)].clone()
    assert held(manifest, part, box) == trainer
    part.view(-1).view(torch.uint8)[-1] ^= 1
    assert held(manifest, part, box) != trainer


def held(manifest: WeightsManifest, part: torch.Tensor, box: Box) -> int:
    """What an engine worker that has nothing but ``part`` of the only tensor hashes."""
    hashes = TensorHashes(manifest, (box,))
    low, high = box[0]
    for owner, (first, last) in enumerate(pairwise(manifest.cuts[0])):
        if first < last:
            begin, end = max(first, low), min(last, high)
            hashes.add_held(0, owner, part[begin - low : end - low] if begin < end else None)
    return hashes.total()


def test_two_workers_that_hold_each_others_shard_are_seen() -> None:
    """Equal bits under another box are another number."""
    tensors = {"w": torch.zeros(4, 2)}
    manifest = manifest_of(tensors)
    left, right = (owned(manifest, tensors, 0, boxes=(((0, 4), columns),)).total() for columns in ((0, 1), (1, 2)))
    assert len({left, right, owned(manifest, tensors, 0).total()}) == 3


def test_what_lies_outside_of_a_box_does_not_count() -> None:
    box = ((0, 1), (1, 2))
    changed = BASE.clone()
    changed[1], changed[0, 0] = 9, 9
    manifest = manifest_of({"w": BASE})
    same, other = (owned(manifest, {"w": tensor}, 0, boxes=(box,)).total() for tensor in (BASE, changed))
    assert same == other
    assert within(BASE[1:], 1, box) is None
    assert torch.equal(within(BASE, 0, box), torch.tensor([[0.5]]))  # type: ignore[arg-type]


# ---- buckets -----------------------------------------------------------------------------------------------------------


@st.composite
def manifests(draw: st.DrawFn) -> WeightsManifest:
    shapes, cuts = draw(cut_shapes())
    count = len(shapes)
    return WeightsManifest(
        names=tuple(f"tensor {index}" for index in range(count)),
        shapes=tuple(shapes),
        dtypes=tuple(draw(st.lists(st.sampled_from(sorted(DTYPE_BYTES)), min_size=count, max_size=count))),
        cuts=tuple(cuts),
        trained=tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        bucket_bytes=draw(st.integers(1, 40)) * ALIGNMENT,
    )


def row_bytes(manifest: WeightsManifest, tensor: int) -> int:
    return math.prod(manifest.shapes[tensor][1:]) * DTYPE_BYTES[manifest.dtypes[tensor]]


@settings(max_examples=200, deadline=None)
@given(manifest=manifests(), trained_only=st.booleans())
def test_every_row_travels_once_and_no_piece_crosses_a_cut(manifest: WeightsManifest, trained_only: bool) -> None:
    seen: dict[tuple[int, int], list[int]] = {}
    for bucket in plan_buckets(manifest, trained_only=trained_only):
        assert bucket.pieces
        for piece in bucket.pieces:
            first, last = manifest.cuts[piece.tensor][piece.owner : piece.owner + 2]
            assert first <= piece.start < piece.stop <= last
            seen.setdefault((piece.tensor, piece.owner), []).extend(range(piece.start, piece.stop))
    expected = {}
    for tensor, cuts in enumerate(manifest.cuts):
        for owner, (first, last) in enumerate(pairwise(cuts)):
            if first < last and (manifest.trained[tensor] or not trained_only):
                expected[tensor, owner] = list(range(first, last))
    assert seen == expected, "in order too: the rows of a segment are hashed as they come"


@settings(max_examples=200, deadline=None)
@given(manifest=manifests())
def test_no_bucket_is_above_the_limit_unless_one_row_is(manifest: WeightsManifest) -> None:
    for bucket in plan_buckets(manifest):
        single_row = len(bucket.pieces) == 1 and bucket.pieces[0].stop - bucket.pieces[0].start == 1
        assert bucket.size <= manifest.bucket_bytes or single_row


@settings(max_examples=200, deadline=None)
@given(manifest=manifests())
def test_pieces_lie_apart_and_each_owner_has_one_span(manifest: WeightsManifest) -> None:
    """A rank fills, and another receives, one contiguous range: it must hold all of the rank's pieces and none of another's."""
    for bucket in plan_buckets(manifest):
        ranges = [(piece.offset, piece.offset + piece_bytes(manifest, piece)) for piece in bucket.pieces]
        for (_, end), (start, _) in pairwise(ranges):
            assert end <= start
        assert all(start % ALIGNMENT == 0 for start, _ in ranges)
        assert ranges[0][0] == 0 and ranges[-1][1] <= bucket.size < ranges[-1][1] + ALIGNMENT
        end_before = 0
        for owner in range(len(manifest.cuts[0]) - 1):
            first, last = bucket.span(manifest, owner)
            mine = [span for span, piece in zip(ranges, bucket.pieces, strict=True) if piece.owner == owner]
            others = [span for span, piece in zip(ranges, bucket.pieces, strict=True) if piece.owner != owner]
            assert (first, last) == ((mine[0][0], mine[-1][1]) if mine else (0, 0))
            assert all(end <= first or start >= last for start, end in others if last > first)
            if mine:
                assert first >= end_before
                end_before = last


@settings(max_examples=100, deadline=None)
@given(manifest=manifests())
def test_both_ends_derive_the_same_buckets(manifest: WeightsManifest) -> None:
    assert plan_buckets(pickle.loads(pickle.dumps(manifest))) == plan_buckets(manifest)


@settings(max_examples=100, deadline=None)
@given(manifest=manifests())
def test_total_bytes_are_those_of_the_pieces(manifest: WeightsManifest) -> None:
    for trained_only in (False, True):
        pieces = [piece for bucket in plan_buckets(manifest, trained_only=trained_only) for piece in bucket.pieces]
        assert total_bytes(manifest, trained_only=trained_only) == sum(piece_bytes(manifest, piece) for piece in pieces)


def test_buckets_are_filled_so_that_few_are_sent() -> None:
    """Ten rows of 64 bytes in buckets of 4: three buckets, not ten; rows of two tensors and two owners share one."""
    manifest = manifest_of({"a": torch.zeros(6, 16), "b": torch.zeros(4, 16)}, [(0, 3, 6), (0, 2, 4)])
    buckets = plan_buckets(replace(manifest, bucket_bytes=4 * 64))
    assert [[(p.tensor, p.start, p.stop, p.owner) for p in bucket.pieces] for bucket in buckets] == [
        [(0, 0, 3, 0), (0, 3, 4, 1)],
        [(1, 0, 2, 0), (0, 4, 6, 1)],
        [(1, 2, 4, 1)],
    ]


def test_rows_larger_than_a_bucket_travel_one_by_one() -> None:
    manifest = manifest_of({"small": torch.zeros(4), "large": torch.zeros(2, 1000)})
    sizes = [bucket.size for bucket in plan_buckets(replace(manifest, bucket_bytes=64))]
    assert sizes == [16, 4000, 4000]


def test_sizes_are_torchs_and_a_scalar_is_a_row() -> None:
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES
    assert (rows_of(()), row_elements(())) == (1, 1)
    assert (rows_of((3,)), row_elements((3,))) == (3, 1)
    assert (rows_of((3, 4, 5)), row_elements((3, 4, 5))) == (3, 20)
