"""Targets of a micro-batch, and gradients, for tests of loss terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from rlpost.algorithms.losses import Targets, Term


def targets(
    logprobs: Sequence[float] | np.ndarray,
    *,
    lengths: Sequence[int] | None = None,
    values: Sequence[float] | np.ndarray | None = None,
    entropy: Sequence[float] | None = None,
    advantage: Sequence[float] | np.ndarray | None = None,
    old: Sequence[float] | np.ndarray | None = None,
    reference: Sequence[float] | np.ndarray | None = None,
    columns: Mapping[str, Sequence[float] | np.ndarray] | None = None,
    scalars: Mapping[str, Sequence[float] | np.ndarray] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Targets:
    """``lengths`` are the targets of each sequence; by default all are one sequence's. Logprobs, entropy and values want gradients."""
    lengths = [len(logprobs)] if lengths is None else lengths

    def tensor(array: Sequence[float] | np.ndarray, wants: bool = False) -> torch.Tensor:
        return torch.tensor(np.asarray(array, np.float64), dtype=dtype, requires_grad=wants)

    def optional(array: Sequence[float] | np.ndarray | None, wants: bool = False) -> torch.Tensor | None:
        return None if array is None else tensor(array, wants)

    return Targets(
        logprobs=tensor(logprobs, True),
        entropy=tensor(np.ones(len(logprobs)) if entropy is None else entropy, True),
        sequence=torch.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)),
        sequences=len(lengths),
        values=optional(values, True),
        advantage=optional(advantage),
        old_logprobs=optional(old),
        reference_logprobs=optional(reference),
        columns={name: tensor(array) for name, array in (columns or {}).items()},
        scalars={name: tensor(array) for name, array in (scalars or {}).items()},
    )


def gradient(loss: torch.Tensor, wrt: torch.Tensor) -> np.ndarray:
    """Gradient of the sum of ``loss``."""
    return torch.autograd.grad(loss.sum(), wrt)[0].numpy()


def value(term: Term) -> np.ndarray:
    """The term's values."""
    return term.loss.detach().numpy()


def slopes(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a numpy function: a gradient that no automatic differentiation had a part in."""
    found = np.zeros(len(at))
    for i in range(len(at)):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        found[i] = (function(up) - function(down)) / (2 * step)
    return found


def close(got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-6) -> None:
    """Equal to ``tolerance`` of the largest element."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(float(np.abs(expected).max(initial=0.0)), 1e-12))
