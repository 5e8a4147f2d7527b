"""The fingerprint sees every bit of every tensor; the buckets carry every tensor once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.weights.buckets import ALIGNMENT, DTYPE_BYTES, plan_buckets, tensor_bytes
from rlpost.weights.fingerprint import Fingerprint


def of(*tensors: tuple[str, torch.Tensor]) -> str:
    fingerprint = Fingerprint()
    for name, tensor in tensors:
        fingerprint.add(name, tensor)
    assert fingerprint.tensors == len(tensors)
    return fingerprint.hexdigest()


BASE = torch.tensor([[1.0, 0.5], [0.0, -3.0]])


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
    assert of(("w", changed)) != of(("w", BASE.to(dtype)))


@settings(max_examples=40, deadline=None)
@given(byte=st.integers(0, 15), bit=st.integers(0, 7))
def test_every_bit_counts(byte: int, bit: int) -> None:
    flipped = BASE.clone()
    flipped.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    assert of(("w", flipped)) != of(("w", BASE))


def test_nan_payloads_are_compared_as_bits() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert of(("w", quiet)) == of(("w", quiet.clone()))
    assert of(("w", quiet)) != of(("w", other))


def test_order_does_not_matter_but_name_shape_and_dtype_do() -> None:
    other = torch.arange(3.0)
    assert of(("a", BASE), ("b", other)) == of(("b", other), ("a", BASE))
    assert of(("a", BASE), ("b", BASE + 1)) != of(("b", BASE), ("a", BASE + 1)), "two tensors that were swapped"
    assert of(("a", BASE)) != of(("a", BASE.view(4)))
    assert of(("a", BASE)) != of(("a", BASE.view(torch.int32)))
    assert of(("a", BASE)) != of(("b", BASE))


def test_a_missing_or_doubled_tensor_is_seen() -> None:
    """A sum that cancelled, as XOR does, would not see the same tensor twice."""
    assert of(("a", BASE), ("a", BASE)) not in (of(), of(("a", BASE)))
    assert of() == "0" * 32


@pytest.mark.parametrize(
    "tensor", [torch.tensor(2.0), torch.zeros(0, 3), torch.arange(12.0).view(3, 4).t(), torch.tensor([True]), torch.ones(2, 3)[:, 1:]]
)
def test_scalars_empty_and_strided_tensors_are_like_their_contiguous_copies(tensor: torch.Tensor) -> None:
    assert of(("w", tensor)) == of(("w", tensor.clone(memory_format=torch.contiguous_format)))
    assert len(of(("w", tensor))) == 32


shapes = st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=20)


@settings(max_examples=80, deadline=None)
@given(shapes=shapes, limit=st.integers(1, 500), data=st.data())
def test_buckets_carry_every_tensor_once_in_order_within_the_limit(shapes: list[list[int]], limit: int, data: st.DataObject) -> None:
    dtypes = data.draw(st.lists(st.sampled_from(sorted(DTYPE_BYTES)), min_size=len(shapes), max_size=len(shapes)))
    buckets = plan_buckets(shapes, dtypes, limit)
    assert [index for start, end in buckets for index in range(start, end)] == list(range(len(shapes)))
    for start, end in buckets:
        assert end > start
        size = sum(tensor_bytes(shapes[i], dtypes[i]) for i in range(start, end))
        assert size <= limit or end - start == 1


def test_a_tensor_larger_than_a_bucket_travels_alone() -> None:
    assert plan_buckets([[4], [1000], [4], [4]], ["float32"] * 4, 64) == ((0, 1), (1, 2), (2, 4))


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [([], "float32", 16), ([3], "bfloat16", 16), ([9], "bfloat16", 32), ([4, 4], "float32", 64), ([0], "float32", 0)],
)
def test_every_tensor_begins_aligned(shape: list[int], dtype: str, size: int) -> None:
    assert tensor_bytes(shape, dtype) == size
    assert size % ALIGNMENT == 0


def test_sizes_are_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES
