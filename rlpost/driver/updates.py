"""What trainer ranks are asked to compute, packed for them and unpacked again; the online and the offline loop share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlpost.training.packing import MicroBatch, occupancy, pack, unpack
from rlpost.training.protocol import UpdateRequest
from rlpost.types import LossComponent, LossTerms

if TYPE_CHECKING:
    from rlpost.training.group import TrainerGroup


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How sequences become micro-batches. ``share``: a group's prompt is computed once; ``together``: a group is never split."""

    micro_batch_tokens: int
    share: bool
    together: bool = False
    temperature: float = 1.0

    def pack(self, group: TrainerGroup, terms: Sequence[LossTerms]) -> list[list[MicroBatch]]:
        """For each rank of ``group``."""
        return pack(terms, ranks=group.world, micro_batch_tokens=self.micro_batch_tokens, share=self.share, together=self.together)


async def forward(group: TrainerGroup, method: str, terms: Sequence[LossTerms], packing: Packing) -> list[np.ndarray]:
    """``method`` (logprobs, reference_logprobs, values, entropies) of each trained token of ``terms``: ``[tokens]`` each, NaN elsewhere."""
    packed = packing.pack(group, terms)
    arguments = [(micros,) if method == "values" else (micros, packing.temperature) for micros in packed]
    return unpack(packed, await group.call_each(method, arguments), terms)


async def update(
    group: TrainerGroup,
    terms: Sequence[LossTerms],
    denominators: Mapping[str, float],
    components: Sequence[LossComponent],
    packing: Packing,
    *,
    method: str = "update",
    measure_parity: bool = False,
) -> dict[str, float]:
    """One optimizer step (or, with ``method="measure"``, only its metrics)."""
    packed = packing.pack(group, terms)
    requests = [
        (
            UpdateRequest(
                micro_batches=micros,
                denominators=denominators,
                components=components,
                temperature=packing.temperature,
                measure_parity=measure_parity,
            ),
        )
        for micros in packed
    ]
    metrics: dict[str, float] = (await group.call_each(method, requests))[0]
    work = {"train/row_tokens": sum(len(micro.tokens) for micros in packed for micro in micros), "train/micro_batches": len(packed[0])}
    return {**metrics, **work, "train/occupancy": occupancy(packed)}


AMOUNTS = ("train/tokens", "train/row_tokens", "train/micro_batches")


def merge(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: maxima of maxima, sums of amounts, the last learning rate, means of the rest."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for one in metrics for name in one):
        values = [one[name] for one in metrics if name in one]
        if name.endswith("_max"):
            result[name] = max(values)
        elif name in AMOUNTS:
            result[name] = sum(values)
        elif name == "train/lr":
            result[name] = values[-1]
        else:
            result[name] = sum(values) / len(values)
    return result
