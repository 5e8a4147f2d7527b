"""RMS normalisation with one pass over its input in each direction.

Models in transformers write it as five elementwise operations, each a trip through memory, and keep their results for the backward
pass: on CPU a tenth of a training step. With n = 1 / sqrt(mean(x^2) + eps) and y = w x n:

    dx = n (g w - x n mean(g w x n))            dw = sum over rows of g x n
"""

from __future__ import annotations

import types
from typing import Any

import torch

PROBE_TOLERANCE = 1e-5
"""How close a module's own forward must be to ours before it is replaced (float32, values of order one)."""


class RmsNorm(torch.autograd.Function):
    """``(x [..., d], weight [d], eps) -> [..., d]`` in x's dtype, computed in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight) if weight.dtype == x.dtype else weight * (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normal = x.float() * scale
        wide = grad.float()
        grad_weight = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        inner = wide * weight.float()
        mean = torch.einsum("...d,...d->...", inner, normal).div_(x.size(-1)).unsqueeze(-1)
        return inner.addcmul_(normal, mean, value=-1).mul_(scale).to(x.dtype), grad_weight, None


def replace_norms(model: torch.nn.Module) -> int:
    """Give every module that computes exactly this our forward; returns how many. Others stay as they are.

    What a module computes is found by asking it, not by its name: variants (1 + weight, a bias, grouped norms) differ on the probe.
    """
    replaced, verdicts = 0, dict[type, bool]()
    for module in model.modules():
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm"):
            continue
        if kind not in verdicts:
            verdicts[kind] = _computes_the_same(module)
        if verdicts[kind]:
            module.forward = types.MethodType(_forward, module)
            replaced += 1
    return replaced


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = RmsNorm.apply(hidden_states, self.weight, self.variance_epsilon)
    return result


def _computes_the_same(module: torch.nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float) or len(list(module.parameters())) != 1:
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, weight.numel(), generator=generator)
    probe_weight = torch.randn(weight.numel(), generator=generator)
    with torch.no_grad():
        try:
            theirs = torch.func.functional_call(module, {"weight": probe_weight}, (x,))
        except (RuntimeError, TypeError):
            return False
        return bool(torch.allclose(theirs, RmsNorm.apply(x, probe_weight, eps), atol=PROBE_TOLERANCE, rtol=PROBE_TOLERANCE))
