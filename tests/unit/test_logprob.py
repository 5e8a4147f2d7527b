"""TargetLogprob against torch's log_softmax: logprob, entropy, and both gradients, however it is cut into chunks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlpost.training.logprob import target_logprob

ROWS, WIDTH, VOCABULARY = 13, 16, 37


def inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = (torch.randn(ROWS, WIDTH, generator=generator) * scale).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    target[:3] = torch.tensor([0, VOCABULARY - 1, 0])
    return hidden, weight, target


def by_torch(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, -1)
    return logprobs.gather(1, target[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprob_entropy_and_gradients_equal_log_softmax(dtype: torch.dtype, chunk: int, temperature: float) -> None:
    hidden, weight, target = inputs(dtype)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(ROWS, generator=generator) for _ in range(2)]

    got = target_logprob(hidden, weight, target, temperature, chunk)
    got_gradients = torch.autograd.grad(got, (hidden, weight), upstream)
    expected = by_torch(hidden, weight, target, temperature)
    expected_gradients = torch.autograd.grad(expected, (hidden, weight), [u.double() for u in upstream])

    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, atol=2e-5, rtol=1e-5)
    for mine, theirs in zip(got_gradients, expected_gradients, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), theirs.double(), atol=2e-5, rtol=1e-4)


def test_bfloat16_inputs_give_float32_results_near_the_exact_ones() -> None:
    hidden, weight, target = inputs(torch.bfloat16)
    got = target_logprob(hidden, weight, target, 1.0, 5)
    torch.autograd.grad(got[0].sum(), (hidden, weight))
    torch.testing.assert_close(got[0].double(), by_torch(hidden, weight, target, 1.0)[0], atol=0.05, rtol=0.02)


def test_very_large_logits_neither_overflow_nor_become_nan() -> None:
    hidden, weight, target = inputs(torch.float32, scale=500.0)
    got = target_logprob(hidden, weight, target, 1.0, 4)
    gradients = torch.autograd.grad(got[0].sum() + got[1].sum(), (hidden, weight))
    assert all(torch.isfinite(t).all() for t in (*got, *gradients))
    assert (got[1] >= -1e-3).all()


@pytest.mark.parametrize("which", [0, 1])
def test_using_only_one_of_the_two_outputs_gives_its_gradient_alone(which: int) -> None:
    hidden, weight, target = inputs(torch.float32)
    got = torch.autograd.grad(target_logprob(hidden, weight, target, 0.8, 3)[which].sum(), hidden)[0]
    expected = torch.autograd.grad(by_torch(hidden, weight, target, 0.8)[which].sum(), hidden)[0]
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_keeps_its_own(frozen: str) -> None:
    hidden, weight, target = inputs(torch.float32)
    whole = torch.autograd.grad(target_logprob(hidden, weight, target, 1.0, 4)[0].sum(), (hidden, weight))
    named = {"hidden": hidden, "weight": weight}
    named[frozen] = named[frozen].detach()
    target_logprob(named["hidden"], named["weight"], target, 1.0, 4)[0].sum().backward()
    free = "weight" if frozen == "hidden" else "hidden"
    assert named[frozen].grad is None
    torch.testing.assert_close(named[free].grad, whole[0] if free == "hidden" else whole[1])


class LargeBuffers(TorchDispatchMode):
    """Counts the buffers of at least ``elements`` that are alive at once while it is on."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.most = elements, 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= self.elements:
            storage = result.untyped_storage()
            if storage.data_ptr() not in self.alive:
                self.alive.add(storage.data_ptr())
                weakref.finalize(storage, self.alive.discard, storage.data_ptr())
            self.most = max(self.most, len(self.alive))
        return result


def test_never_more_than_two_chunks_of_logits_are_held() -> None:
    """A loop that keeps a chunk's buffers while it makes the next doubles the memory, and nothing else shows it."""
    generator = torch.Generator().manual_seed(7)
    rows, width, chunk = 60, 4, 20
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, width, generator=generator).requires_grad_()
    with LargeBuffers(chunk * VOCABULARY) as buffers:  # neither the inputs nor their gradients are as large
        logprob, entropy = target_logprob(hidden, weight, torch.arange(rows) % VOCABULARY, 1.0, chunk)
        assert buffers.most == 2
        buffers.most = 0
        (logprob.sum() + entropy.sum()).backward()
        assert buffers.most == 2
