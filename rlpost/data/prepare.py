"""Gives every prompt its tokens, once, and settles what happens to prompts over the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np

from rlpost.types import ConfigError, Prompt

NAMED_IN_ERROR = 3
"""How many over-long prompts an error names."""


class EncodesPrompts(Protocol):
    """What :func:`tokenize_prompts` needs of a tokenizer (:class:`rlpost.data.tokenizer.PromptTokenizer`)."""

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """The prompt's tokens, int32 ``[tokens]``."""


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: EncodesPrompts, max_prompt_tokens: int, overlong: Literal["drop", "refuse"] = "drop"
) -> tuple[list[Prompt], int]:
    """``(prompts with tokens, number dropped)``. The order is kept; a prompt of exactly ``max_prompt_tokens`` stays.

    Prompts are never cut: half a question has another answer.

    Raises:
        ConfigError: a prompt has no tokens; ``overlong`` is "refuse" and one is too long; or none is left.
    """
    kept: list[Prompt] = []
    overlong_prompts: list[tuple[str, int]] = []
    for prompt in prompts:
        tokens = tokenizer.encode_prompt(prompt)
        if len(tokens) == 0:
            raise ConfigError(f"prompt {prompt.prompt_id!r} is empty: it has no tokens, and a model cannot continue nothing")
        if len(tokens) > max_prompt_tokens:
            overlong_prompts.append((prompt.prompt_id, len(tokens)))
        else:
            kept.append(replace(prompt, tokens=tokens))
    if overlong_prompts and (overlong == "refuse" or not kept):
        longest = sorted(overlong_prompts, key=lambda item: -item[1])
        examples = ", ".join(f"{prompt_id!r} ({length} tokens)" for prompt_id, length in longest[:NAMED_IN_ERROR])
        cause = "none is left" if not kept else "data.overlong_prompts is refuse"
        raise ConfigError(
            f"{len(overlong_prompts)} of {len(prompts)} prompts are longer than data.max_prompt_tokens={max_prompt_tokens}, and {cause}; "
            f"the longest: {examples}. Raise data.max_prompt_tokens" + (", or set data.overlong_prompts=drop" if kept else "")
        )
    return kept, len(overlong_prompts)
