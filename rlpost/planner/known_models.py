"""Sizes of public models as their config.json gives them, so that a plan of these needs neither a network nor a download.

Read from the models' config.json files; the tests hold the parameters that they must come to. A model that is fine-tuned from one of
these and has another name is planned from its own config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

Config = dict[str, Any]
"""The fields of a config.json that rlpost.planner.shapes reads."""


def find_known(name: str) -> Config | None:
    """The sizes of a public model called as on the Hugging Face hub, with or without its owner, in any case; None when it is not here."""
    config = _KNOWN.get(name.lower())
    return dict(config) if config is not None else None


def known_names() -> tuple[str, ...]:
    """All names with their owners, as the hub spells them."""
    return tuple(name for pattern in MODELS for name in _spelt_out(pattern))


def _spelt_out(pattern: str) -> Iterator[str]:
    """The names of a pattern: ``A{,-Base}`` is ``A`` and ``A-Base``."""
    choice = re.search(r"\{(.*?)\}", pattern)
    if choice is None:
        yield pattern
        return
    for part in choice[1].split(","):
        yield from _spelt_out(pattern[: choice.start()] + part + pattern[choice.end() :])


def _dense(
    family: str, hidden: int, layers: int, heads: int, kv_heads: int, feed_forward: int, vocabulary: int, *, tied: bool = False, **more: Any
) -> Config:
    return {
        "model_type": family, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": feed_forward, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "sliding_window": None, **more,
    }  # fmt: skip


def _qwen3(hidden: int, layers: int, heads: int, feed_forward: int, tied: bool) -> Config:
    return _dense("qwen3", hidden, layers, heads, 8, feed_forward, 151936, tied=tied, head_dim=128)


def _qwen3_experts(hidden: int, layers: int, heads: int, feed_forward: int, expert: int) -> Config:
    """128 experts in every layer, of which a token goes to 8."""
    experts: Config = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "decoder_sparse_step": 1}
    return _dense("qwen3_moe", hidden, layers, heads, 4, feed_forward, 151936, head_dim=128, mlp_only_layers=[], **experts)


MODELS: dict[str, Config] = {
    "Qwen/Qwen2.5{,-Coder}-0.5B{,-Instruct}": _dense("qwen2", 896, 24, 14, 2, 4864, 151936, tied=True),
    "Qwen/Qwen2.5{,-Coder,-Math}-1.5B{,-Instruct}": _dense("qwen2", 1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen/Qwen2.5{,-Coder}-3B{,-Instruct}": _dense("qwen2", 2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen/Qwen2.5{,-Coder,-Math}-7B{,-Instruct}": _dense("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Qwen/Qwen2.5{,-Coder}-14B{,-Instruct}": _dense("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5{,-Coder}-32B{,-Instruct}": _dense("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "Qwen/Qwen2.5{,-Math}-72B{,-Instruct}": _dense("qwen2", 8192, 80, 64, 8, 29568, 152064),
    "Qwen/Qwen3-0.6B{,-Base}": _qwen3(1024, 28, 16, 3072, True),
    "Qwen/Qwen3-1.7B{,-Base}": _qwen3(2048, 28, 16, 6144, True),
    "Qwen/Qwen3-4B{,-Base,-Instruct-2507,-Thinking-2507}": _qwen3(2560, 36, 32, 9728, True),
    "Qwen/Qwen3-8B{,-Base}": _qwen3(4096, 36, 32, 12288, False),
    "Qwen/Qwen3-14B{,-Base}": _qwen3(5120, 40, 40, 17408, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25600, False),
    "Qwen/Qwen3-30B-A3B{,-Base,-Instruct-2507,-Thinking-2507}": _qwen3_experts(2048, 48, 32, 6144, 768),
    "Qwen/Qwen3-235B-A22B{,-Instruct-2507,-Thinking-2507}": _qwen3_experts(4096, 94, 64, 12288, 1536),
    "meta-llama/{,Meta-}Llama-3.1-8B{,-Instruct}": _dense("llama", 4096, 32, 32, 8, 14336, 128256),
    "meta-llama/{,Meta-}Llama-3.1-70B{,-Instruct}": _dense("llama", 8192, 80, 64, 8, 28672, 128256),
    "meta-llama/Llama-3.2-1B{,-Instruct}": _dense("llama", 2048, 16, 32, 8, 8192, 128256, tied=True),
    "meta-llama/Llama-3.2-3B{,-Instruct}": _dense("llama", 3072, 28, 24, 8, 8192, 128256, tied=True),
    "meta-llama/Llama-3.3-70B{-Instruct,}": _dense("llama", 8192, 80, 64, 8, 28672, 128256),
    "mistralai/Mistral-7B{,-Instruct}-v0.3": _dense("mistral", 4096, 32, 32, 8, 14336, 32768),
    "mistralai/Mixtral-8x7B{,-Instruct}{-v0.1,}": _dense(
        "mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "HuggingFaceTB/SmolLM2-135M{,-Instruct}": _dense("llama", 576, 30, 9, 3, 1536, 49152, tied=True),
    "HuggingFaceTB/SmolLM2-360M{,-Instruct}": _dense("llama", 960, 32, 15, 5, 2560, 49152, tied=True),
    "HuggingFaceTB/SmolLM2-1.7B{,-Instruct}": _dense("llama", 2048, 24, 32, 32, 8192, 49152, tied=True),
}
"""By pattern of names; the sizes are hidden, layers, heads, key-value heads, feed-forward, vocabulary.

Mistral-7B before v0.3 is missing on purpose: its sliding window is not covered.
"""

_KNOWN = {
    key: config
    for pattern, config in MODELS.items()
    for name in _spelt_out(pattern)
    for key in (name.lower(), name.partition("/")[2].lower())
}
