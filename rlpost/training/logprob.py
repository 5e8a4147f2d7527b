"""Logprob and entropy of target tokens without ever holding ``[tokens, vocabulary]``.

Forward keeps the log-sum-exp of each row; backward computes the logits of a chunk again. With z = h W^T / T,
L = logsumexp(z), p = softmax(z), H = L - sum p z:

    d logp / dz = onehot - p            d H / dz = -p * (log p + H)

so memory is one chunk of logits instead of all of them, for one more matrix product in the backward pass.
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
            scaled = (hidden[part] @ weight.t()).float().div_(temperature)
            log_sum[part] = torch.logsumexp(scaled, -1)
            logprob[part] = scaled.gather(-1, target[part, None])[:, 0] - log_sum[part]
            probability = (scaled - log_sum[part, None]).exp_()
            entropy[part] = log_sum[part] - probability.mul_(scaled).sum(-1)
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
            log_p = (hidden[part] @ weight.t()).float().div_(ctx.temperature).sub_(log_sum[part, None])
            grad = log_p.exp()
            scale = log_p.add_(entropy[part, None]).mul_(-grad_entropy[part, None]).sub_(grad_logprob[part, None])
            grad.mul_(scale)
            grad.scatter_add_(1, target[part, None], grad_logprob[part, None])
            grad.div_(ctx.temperature)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                if hidden.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[part])
                else:
                    grad_weight.add_((grad.t() @ hidden[part]).float())
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def target_logprob(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, temperature: float, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of ``target`` and entropy of the whole distribution at ``temperature``; see :class:`TargetLogprob`."""
    return TargetLogprob.apply(hidden, weight, target, temperature, chunk)
