"""What the trainer must equal: a plain Hugging Face model in one process, sequence by sequence, the loss written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpost.types import Group, Trajectory


def plain_model(path: Path) -> Any:
    """The model in float32 with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def log_distribution(model: Any, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    """Log-softmax before each token but the first ``[tokens - 1, vocabulary]``."""
    tokens = torch.tensor(np.asarray(trajectory.tokens, np.int64))[None]
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0, :-1]
    return (logits.float() / temperature).log_softmax(-1)


def token_logprobs(model: Any, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    """Logprob of each token but the first ``[tokens - 1]``."""
    tokens = torch.tensor(np.asarray(trajectory.tokens, np.int64))
    return log_distribution(model, trajectory, temperature).gather(-1, tokens[1:, None])[:, 0]


@torch.no_grad()
def logprobs_of(model: Any, groups: Sequence[Group], temperature: float) -> dict[str, np.ndarray]:
    """Logprobs ``[tokens]`` by trajectory; the first token has none (NaN)."""
    return {
        t.trajectory_id: np.concatenate([[np.nan], token_logprobs(model, t, temperature).numpy()]).astype(np.float32)
        for group in groups
        for t in group.trajectories
    }


def written_out_loss(
    model: Any,
    groups: Sequence[Group],
    *,
    aggregation: str,
    constant: int,
    temperature: float,
    clip: float,
    reference: Mapping[str, np.ndarray],
    kl_coefficient: float,
    entropy_coefficient: float,
    old: Mapping[str, np.ndarray] | None = None,
) -> torch.Tensor:
    """GRPO's clipped loss with k3 KL and entropy bonus; advantage is reward minus group mean.

    The ratio's denominator is ``old`` by trajectory, or the trajectories' own (the engine's) logprobs.
    """
    sequences = []
    for group in groups:
        scored = [t for t in group.trajectories if t.reward is not None]
        baseline = sum(t.reward or 0.0 for t in scored) / max(1, len(scored))
        for t in scored:
            advantage = (t.reward or 0.0) - baseline
            mask = torch.tensor(t.trainable[1:])
            log_p = log_distribution(model, t, temperature)
            logprob = token_logprobs(model, t, temperature)[mask]
            entropy = -(log_p.exp() * log_p).sum(-1)[mask]
            before = torch.tensor((t.logprobs if old is None else old[t.trajectory_id])[1:])[mask]
            ratio = (logprob - before).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            delta = torch.tensor(reference[t.trajectory_id][1:])[mask] - logprob
            kl = delta.exp() - 1 - delta
            sequences.append(-gain + kl_coefficient * kl - entropy_coefficient * entropy)
    if aggregation == "token_mean":
        return torch.cat(sequences).mean()
    if aggregation == "sequence_mean":
        return torch.stack([sequence.mean() for sequence in sequences]).mean()
    return torch.cat(sequences).sum() / (len(sequences) * constant)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Gradients by parameter name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def untied_model(directory: Path) -> Path:
    """Write a model with an output layer of its own, attention biases and sizes that two ranks cannot halve."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=101, hidden_size=12, intermediate_size=27, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
        tie_word_embeddings=False, initializer_range=0.3, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    model.save_pretrained(directory)
    return directory
