"""Tokens that are computed: prefixes of agents with and without reuse, packing, and the imbalance of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlpost.planner.quantities import require_at_least, require_choice, require_divides, require_share
from rlpost.planner.timing import check_lengths
from rlpost.types import ConfigError

# ---- agents ----------------------------------------------------------------------------------------------------------

Reuse = Literal["none", "turn", "turn+group"]
REUSES: tuple[Reuse, ...] = ("none", "turn", "turn+group")


def prefill_tokens(*, prompt: int, action: int, observation: int, turns: int, group: int, reuse: Reuse) -> int:
    """Tokens that engines prefill for a group of episodes: ``turns`` actions, an observation after each but the last.

    Without reuse each turn computes the whole history again; with reuse of turns only what is new; with that of the group the prompt
    once. Turn k + 1's prompt holds the exact tokens of turn k, so an action's own KV is there already.
    """
    require_at_least(1, prompt=prompt, turns=turns, group=group)
    require_at_least(0, action=action, observation=observation)
    require_choice("reuse", reuse, REUSES)
    if reuse == "none":
        return group * (turns * prompt + (action + observation) * (turns * (turns - 1) // 2))
    later = group * (turns - 1) * observation
    return (group * prompt if reuse == "turn" else prompt) + later


def prefix_hit_tokens(tokens: int, block: int) -> int:
    """Tokens of a known prefix that an engine finds in its cache: whole blocks only, and never the last token, which it must compute."""
    require_at_least(1, tokens=tokens, block=block)
    return (tokens - 1) // block * block


def shared_prompt_ratio(*, prompt: int, answer: int, group: int) -> float:
    """Tokens of a group with its prompt in every sample over those with it once: what the trainer's shared prompts save
    (DualKV, arXiv 2605.15422): N (P + R) / (P + N R).
    """
    require_at_least(0, prompt=prompt, answer=answer)
    require_at_least(1, group=group, prompt_and_answer=prompt + answer)
    return group * (prompt + answer) / (prompt + group * answer)


# ---- packing ---------------------------------------------------------------------------------------------------------


def padded_occupancy(lengths: Sequence[int], rows: int, *, by_length: bool = False) -> float:
    """Real tokens over computed ones, 0 to 1, in batches of ``rows`` sequences padded to their longest; ``by_length`` sorts them first."""
    check_lengths(lengths)
    require_at_least(1, rows=rows)
    ordered = sorted(lengths) if by_length else list(lengths)
    batches = [ordered[start : start + rows] for start in range(0, len(ordered), rows)]
    return sum(lengths) / sum(len(batch) * max(batch) for batch in batches)


def pack_lengths(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Lengths in rows of at most ``row_tokens``: longest first, each into the first row with room (first-fit decreasing).

    Raises ConfigError when one is longer than a row.
    """
    check_lengths(lengths)
    if max(lengths) > row_tokens:
        raise ConfigError(
            f"row_tokens={row_tokens} is less than the longest of the lengths, {max(lengths)}: raise row_tokens to at least that"
        )
    rows: list[list[int]] = []
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((index for index, left in enumerate(room) if left >= length), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[place].append(length)
        room[place] -= length
    return rows


def packed_occupancy(lengths: Sequence[int], row_tokens: int) -> float:
    """Real tokens over those of full rows, 0 to 1."""
    return sum(lengths) / (len(pack_lengths(lengths, row_tokens)) * row_tokens)


def packing_efficiency(lengths: Sequence[int], row_tokens: int) -> float:
    """Fewest rows that the tokens could fill over the rows that were needed (NeMo RL's measure)."""
    return math.ceil(sum(lengths) / row_tokens) / len(pack_lengths(lengths, row_tokens))


# ---- experts ---------------------------------------------------------------------------------------------------------


def max_violation(tokens_per_expert: Sequence[float]) -> float:
    """MaxVio: the fullest expert's tokens over the mean, less 1 (Wang et al. 2024, arXiv 2408.15664)."""
    if not len(tokens_per_expert):
        raise ConfigError("tokens_per_expert is empty; expected the tokens of each expert")
    for index, count in enumerate(tokens_per_expert):
        require_at_least(0, **{f"tokens_per_expert[{index}]": count})
    mean = float(np.mean(tokens_per_expert))
    if not mean:
        raise ConfigError("tokens_per_expert is all 0; expected at least one token")
    return max(tokens_per_expert) / mean - 1


def moe_step_inflation(tokens_per_expert: Sequence[float], ranks: int, experts_share: float) -> float:
    """Factor by which uneven routing lengthens a step: its part with experts waits for the fullest rank.

    Experts lie on ``ranks`` in order, as many on each; ``experts_share`` of a balanced step's time is spent in them.
    """
    require_divides("ranks", ranks, experts=len(tokens_per_expert))
    require_share(experts_share=experts_share)
    each = len(tokens_per_expert) // ranks
    loads = [float(sum(tokens_per_expert[start : start + each])) for start in range(0, len(tokens_per_expert), each)]
    return 1 + experts_share * max_violation(loads)
