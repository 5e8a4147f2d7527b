"""Attention over packed rows, registered with transformers under our own names.

Every other layer of the model runs on the packed row ``[1, row_len, hidden]``; only the attention itself needs to know
where sequences start. ``padded`` lays the sequences out as ``[sequences, longest]`` inside the call (right padding with
a causal kernel needs no mask) and works on every device. ``flash`` hands the boundaries to variable-length kernels
(GPU; not run on a GPU yet). Sequences of very different length are laid out in a few buckets, so that padding
stays below half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlpost.types import ConfigError

PADDED = "rlpost_padded"
BUCKET_RATIO = 2.0
"""Sequences share a bucket while the longest is at most this much longer than the shortest."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Sequences of similar length: ``gather`` ``[sequences * longest]`` reads the row (padding reads index 0)."""

    sequences: int
    longest: int
    gather: torch.Tensor
    real: torch.Tensor
    """Positions of real tokens in the padded layout ``[real tokens of the bucket]``."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Where the sequences of a packed row lie; ``scatter`` ``[row_len]`` brings the concatenated buckets back in order."""

    buckets: tuple[Bucket, ...]
    scatter: torch.Tensor

    @staticmethod
    def of(lengths: np.ndarray, index: np.ndarray, device: torch.device) -> PackedLayout:
        """Plan the layout of sequences with these lengths, whose tokens lie in the row at ``index`` (rows may be shared)."""
        ends = np.cumsum(lengths)
        sequences = np.split(index, ends[:-1])
        groups: list[list[int]] = []
        for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            if groups and lengths[groups[-1][0]] <= BUCKET_RATIO * lengths[item]:
                groups[-1].append(item)
            else:
                groups.append([item])
        buckets, order = [], []
        for members in groups:
            longest = int(lengths[members[0]])
            gather = np.zeros((len(members), longest), np.int64)
            for row, member in enumerate(members):
                gather[row, : lengths[member]] = sequences[member]
            real = np.arange(longest)[None, :] < lengths[members][:, None]
            order.append(gather[real])
            buckets.append(
                Bucket(
                    sequences=len(members),
                    longest=longest,
                    gather=torch.from_numpy(gather.reshape(-1)).to(device),
                    real=torch.from_numpy(np.flatnonzero(real.reshape(-1))).to(device),
                )
            )
        # A shared row comes out once for each sequence that has it, equal every time: the first is taken.
        _, first = np.unique(np.concatenate(order), return_index=True)
        return PackedLayout(buckets=tuple(buckets), scatter=torch.from_numpy(first).to(device))


def padded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_layout: PackedLayout | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence. ``query`` ``[1, heads, row_len, head_dim]`` -> ``[1, row_len, heads, head_dim]``."""
    if packed_layout is None:
        raise AssertionError("packed attention was called without packed_layout")
    if softcap is not None or s_aux is not None:
        kind = "soft-capped scores" if softcap is not None else "attention sinks"
        raise ConfigError(f"{type(module).__name__} has {kind}, which training.attention=padded cannot compute; use another model")

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0].transpose(0, 1).flatten(1)

    flat = [rows(tensor) for tensor in (query, key, value)]
    heads = (query.size(1), key.size(1), value.size(1))
    outputs = []
    for bucket in packed_layout.buckets:
        # index_select both ways: the backward of plain indexing is an order of magnitude slower on CPU.
        q, k, v = (
            tensor.index_select(0, bucket.gather).view(bucket.sequences, bucket.longest, count, -1).transpose(1, 2)
            for tensor, count in zip(flat, heads, strict=True)
        )
        mask = None
        if sliding_window is not None and sliding_window < bucket.longest:
            distance = torch.arange(bucket.longest, device=q.device)[:, None] - torch.arange(bucket.longest, device=q.device)[None, :]
            mask = (distance >= 0) & (distance < sliding_window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, dropout_p=dropout, enable_gqa=heads[0] != heads[1]
        )
        outputs.append(out.transpose(1, 2).reshape(bucket.sequences * bucket.longest, -1).index_select(0, bucket.real))
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    packed = packed.index_select(0, packed_layout.scatter)
    return packed.view(1, packed.size(0), heads[0], -1), None


def register() -> None:
    """Make the packed attention known to transformers; safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(PADDED, padded_attention)


def flash_arguments(lengths: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Keyword arguments with which transformers' flash attention treats a row as packed (not run on a GPU yet)."""
    boundaries = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": longest, "max_length_k": longest}
