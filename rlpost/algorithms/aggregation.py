"""What the loss is a mean of. Weights and denominator are counted over a whole optimizer step, before the first backward.

loss = sum over tokens of weight_t * term_t / denominator, so any split into ranks and micro-batches gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_weights(
    trainable: Sequence[np.ndarray], aggregation: str, constant: int, groups: Sequence[str] | None = None
) -> tuple[list[np.ndarray], float]:
    """Weight of each token ``[tokens]`` and the denominator of one optimizer step.

    ``token_mean``: all trained tokens weigh the same (DAPO, Yu et al. 2025, eq. 8). ``sequence_mean``: each sequence weighs
    the same (GRPO, Shao et al. 2024, eq. 3). ``constant``: token sums over a constant length (Dr.GRPO, Liu et al. 2025).
    ``prompt_mean``: the tokens of each prompt weigh the same in total; ``groups`` names the prompt of each sequence.
    """
    counts = [int(mask.sum()) for mask in trainable]
    sequences = float(sum(count > 0 for count in counts))
    if aggregation == "token_mean":
        return [mask.astype(np.float32) for mask in trainable], float(sum(counts))
    if aggregation == "sequence_mean":
        return _each_over(trainable, counts), sequences
    if aggregation == "constant":
        return [mask.astype(np.float32) for mask in trainable], sequences * constant
    if aggregation == "prompt_mean":
        if groups is None:
            raise AssertionError("prompt_mean needs the group of each sequence")
        totals: dict[str, int] = {}
        for group, count in zip(groups, counts, strict=True):
            totals[group] = totals.get(group, 0) + count
        return _each_over(trainable, [totals[group] for group in groups]), float(sum(total > 0 for total in totals.values()))
    raise AssertionError(f"unknown aggregation {aggregation!r}")


def _each_over(trainable: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
    """1 / count for each trained token of a sequence."""
    return [(mask / max(count, 1)).astype(np.float32) for mask, count in zip(trainable, counts, strict=True)]
