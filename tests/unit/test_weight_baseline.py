"""What a delta holds: exactly the elements whose bits changed, until every engine acknowledged them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpost.types import SyncPlan
from rlpost.weights import delta
from rlpost.weights.fingerprint import MODULUS, TensorHashes
from rlpost.weights.sender import WeightSender
from rlpost.weights.shards import ShardedWeights

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class Model(torch.nn.Module):
    """A matrix, a transposed one, a vector, a scalar, two names of one tensor, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(37, 19))
        self.transposed = torch.nn.Parameter(torch.randn(16, 24).t())
        self.vector = torch.nn.Parameter(torch.randn(11))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.embedding = torch.nn.Parameter(torch.randn(8, 4))
        self.output = self.embedding
        self.frozen = torch.nn.Parameter(torch.randn(5, 5), requires_grad=False)


class Held:
    """What an engine would hold: the bits of every tensor, patched by deltas."""

    def __init__(self, sender: WeightSender, model: Model, dtype: torch.dtype) -> None:
        self.names = sender.manifest.names
        parameters = dict(model.named_parameters())
        self.tensors = [parameters[name].detach().to(dtype).contiguous().clone() for name in self.names]

    def apply(self, message: torch.Tensor, dtype: torch.dtype) -> int:
        count = 0
        for part in delta.split(message.numpy().data):
            for change in delta.decode(part):
                flat = self.tensors[change.tensor].view(-1).view(BITS[dtype])
                flat[torch.from_numpy(change.indices.astype(np.int64))] = torch.from_numpy(change.values.view(f"i{dtype.itemsize}"))
                count += len(change.indices)
        return count


def sender_of(model: Model, dtype: torch.dtype) -> WeightSender:
    weights = ShardedWeights(model, str(dtype).removeprefix("torch."), 1 << 12)
    sender = WeightSender(weights, torch.device("cpu"), host="localhost", keep_baseline=True)
    sender.advance(0)
    return sender


def message_of(sender: WeightSender) -> torch.Tensor:
    assert sender._message is not None
    return sender._message


def same_bits(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(one.contiguous().view(-1).view(BITS[dtype]), other.detach().to(dtype).contiguous().view(-1).view(BITS[dtype]))


def holds(held: Held, model: Model, dtype: torch.dtype) -> bool:
    parameters = dict(model.named_parameters())
    return all(same_bits(tensor, parameters[name], dtype) for name, tensor in zip(held.names, held.tensors, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deltas_bring_every_bit_and_nothing_that_did_not_change(dtype: torch.dtype) -> None:
    model = Model()
    sender, generator = sender_of(model, dtype), torch.Generator().manual_seed(1)
    held = Held(sender, model, dtype)
    for version in range(1, 6):
        expected = 0
        for parameter in {id(p): p for p in model.parameters() if p.requires_grad}.values():
            chosen = torch.rand(parameter.shape, generator=generator) < 0.1
            before = parameter.detach().to(dtype).clone()
            with torch.no_grad():
                parameter[chosen] *= -1.5
            expected += int((before != parameter.detach().to(dtype)).sum())
        report = sender.encode_delta(verify=True)
        assert report.changed == expected
        assert held.apply(message_of(sender), dtype) == expected
        assert holds(held, model, dtype)
        sender.advance(version)


@pytest.mark.parametrize(("dtype", "changed"), [(torch.float32, 6), (torch.bfloat16, 5)])
def test_values_that_compare_equal_or_to_nothing_are_told_by_their_bits(dtype: torch.dtype, changed: int) -> None:
    """-0.0 equals 0.0, NaN equals nothing, sign flips and x4 changes leave the low byte: only bits tell.

    The cast to bfloat16 gives every NaN the same bits, so there another payload is no change.
    """
    model = Model()
    with torch.no_grad():
        model.vector.copy_(torch.tensor([0.0, 1.0, 0.5, 2.0, float("nan"), -0.0, 4.0, 1.0, 1.0, 1.0, 1.0]))
    sender = sender_of(model, dtype)
    held = Held(sender, model, dtype)
    assert sender.encode_delta(verify=True).changed == 0, "a NaN that stays is no change"
    with torch.no_grad():
        model.vector[:7] = torch.tensor([-0.0, -1.0, 2.0, 0.5, float("nan"), 0.0, 4.0])
        model.vector[4:5].view(torch.int32).fill_(0x7FC10000)  # a NaN with another payload
    assert sender.encode_delta(verify=True).changed == changed
    assert held.apply(message_of(sender), dtype) == changed
    assert holds(held, model, dtype)


def test_a_tied_tensor_is_there_once_and_a_frozen_one_never() -> None:
    model = Model()
    sender = sender_of(model, torch.float32)
    assert "output" not in sender.manifest.names and "embedding" in sender.manifest.names
    with torch.no_grad():
        model.embedding.add_(1.0)
        model.frozen.add_(1.0)
    assert sender.encode_delta(verify=False).changed == model.embedding.numel()


def test_what_was_not_acknowledged_is_in_the_next_delta_too() -> None:
    model = Model()
    sender = sender_of(model, torch.float32)
    held = Held(sender, model, torch.float32)
    with torch.no_grad():
        model.vector[0] += 1.0
    sender.encode_delta(verify=False)  # refused, say: no advance
    with torch.no_grad():
        model.vector[1] += 1.0
    assert sender.encode_delta(verify=False).changed == 2
    held.apply(message_of(sender), torch.float32)
    held.apply(message_of(sender), torch.float32)  # twice is harmless: values are absolute
    assert holds(held, model, torch.float32)
    sender.advance(1)
    assert sender.encode_delta(verify=False).changed == 0


def test_after_a_full_sync_instead_of_a_delta_the_next_delta_begins_there() -> None:
    model = Model()
    sender = sender_of(model, torch.float32)
    with torch.no_grad():
        model.matrix.add_(1.0)
    sender.encode_delta(verify=False)
    sender.forget_delta()
    sender.advance(1)
    assert sender.encode_delta(verify=False).changed == 0


def test_a_deltas_proof_is_that_of_a_full_sync_and_of_what_the_engine_then_holds() -> None:
    model = Model()
    sender = sender_of(model, torch.bfloat16)
    held = Held(sender, model, torch.bfloat16)
    with torch.no_grad():
        model.matrix[3] *= -2.0
    [total] = sender.encode_delta(verify=True).sums
    held.apply(message_of(sender), torch.bfloat16)
    hashes = TensorHashes(sender.manifest)
    for tensor, value in enumerate(held.tensors):
        hashes.add_held(tensor, 0, value)
    assert sum(hashes.sums.values()) % MODULUS == total


def test_a_message_is_sent_only_as_large_as_the_plan_says() -> None:
    model = Model()
    sender = sender_of(model, torch.bfloat16)
    sender.encode_delta(verify=False)
    plan = SyncPlan(version=1, mode="delta", base_version=0, link="none", verify=False, message_bytes=1)
    with pytest.raises(AssertionError):
        sender.send_message(plan)
