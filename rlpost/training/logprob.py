"""Logprob and entropy of target tokens without ever holding ``[tokens, vocabulary]``.

Forward keeps the log-sum-exp of each row; backward computes the logits of a chunk again. With z = h W^T / T,
L = logsumexp(z), p = softmax(z), H = L - sum p z:

    d logp / dz = onehot - p            d H / dz = -p * (log p + H)

so memory is two float32 buffers of a chunk's logits instead of several of all logits, for one more matrix product in the backward pass.
A chunk's work is a function of its own, so that its buffers are gone before those of the next are made.
"""

from __future__ import annotations

from typing import Any

import torch


class TargetLogprob(torch.autograd.Function):
    """``(hidden [n, h], weight [v, h], target [n], temperature, chunk) -> (logprob [n], entropy [n])``, both float32."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.size(0)
        logprob, entropy, log_sum = (torch.empty(rows, dtype=torch.float32, device=hidden.device) for _ in range(3))
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            logprob[part], entropy[part], log_sum[part] = _chunk_outputs(hidden[part], weight, target[part], temperature)
        ctx.save_for_backward(hidden, weight, target, log_sum, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target, log_sum, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.size(0), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad = _chunk_gradient(
                _scaled_logits(hidden[part], weight, ctx.temperature).sub_(log_sum[part, None]),
                target[part, None], entropy[part, None], grad_logprob[part, None], grad_entropy[part, None],
            ).div_(ctx.temperature).to(hidden.dtype)  # fmt: skip
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                if hidden.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[part])
                else:
                    grad_weight.add_(grad.t() @ hidden[part])
            del grad
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _scaled_logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden @ weight.t()).float().div_(temperature)


def _chunk_outputs(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprob, entropy and log-sum-exp of each row, all ``[rows]``."""
    scaled = _scaled_logits(hidden, weight, temperature)
    log_sum = torch.logsumexp(scaled, -1)
    logprob = scaled.gather(-1, target[:, None])[:, 0] - log_sum
    probability = (scaled - log_sum[:, None]).exp_()
    return logprob, log_sum - probability.mul_(scaled).sum(-1), log_sum


def _chunk_gradient(
    log_p: torch.Tensor, target: torch.Tensor, entropy: torch.Tensor, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor
) -> torch.Tensor:
    """Gradient to the scaled logits ``[rows, vocabulary]``; ``log_p`` is used up, all others are ``[rows, 1]``."""
    grad = log_p.exp()
    grad.mul_(log_p.add_(entropy).mul_(-grad_entropy).sub_(grad_logprob))
    return grad.scatter_add_(1, target, grad_logprob)


def target_logprob(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of ``target`` and entropy of the whole distribution at ``temperature``; see :class:`TargetLogprob`."""
    return TargetLogprob.apply(hidden, weight, target, temperature, chunk)
