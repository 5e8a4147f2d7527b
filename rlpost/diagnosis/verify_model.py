"""A small model of the user's own architecture: fewer and narrower layers, the same kinds of them, the same vocabulary and tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpost.data.tokenizer import TOKENIZER_FILES
from rlpost.models.embedded import EMBEDDED_PREFIX, local_model
from rlpost.types import ConfigError

SMALL_BYTES = 64 << 20
"""Weights of a model that is used as it is."""

LAYERS, MOST_LAYERS = 2, 8
"""Layers, and the most that are kept so that each kind of ``layer_types`` occurs."""
HEAD_DIM = 32
"""The smallest that vLLM's attention takes on a CPU and on a GPU."""
HIDDEN = 64
"""Where the architecture lets the size of a head be chosen apart from it."""
WIDEST = 256
"""Heads together: above it one key-value head is kept instead of two."""
EXPERTS, EXPERTS_A_TOKEN = 4, 2
MULTIPLE = 32
"""Widths are multiples of it, which all kernels take."""

NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
EXPERT_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
ONE_AT_MOST = ("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace")
LEFT_OUT = ("quantization_config", "num_nextn_predict_layers", "transformers_version")
"""Of weights that are not written: their quantization, and layers that only predict further tokens."""


def scaled_architecture(config: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A config.json with the same kinds of layers and the same proportion of heads to key-value heads, but small.

    ``place`` names it in errors. Raises ConfigError for one that names its sizes otherwise.
    """
    missing = [name for name in NEEDED if not isinstance(config.get(name), int)]
    if missing:
        raise ConfigError(
            f"{place} cannot be scaled down: it has no {', '.join(missing)}; verify takes text models whose config.json names sizes as "
            "Llama and Qwen do"
        )
    found = {name: value for name, value in config.items() if name not in LEFT_OUT}
    heads, kv_heads = scaled_heads(config)
    # Without a head_dim of their own, some architectures take hidden_size over heads, whatever else stands there.
    hidden = HIDDEN if config.get("head_dim") else heads * HEAD_DIM
    layers = _layers(config)
    found |= {"num_attention_heads": heads, "num_hidden_layers": layers, "hidden_size": hidden}
    if "num_key_value_heads" in config:
        found["num_key_value_heads"] = kv_heads
    if config.get("head_dim"):
        found["head_dim"] = HEAD_DIM
    found |= {name: _rounded(config[name] * hidden / config["hidden_size"]) for name in WIDTHS if config.get(name)}
    found |= {name: min(config[name], EXPERTS) for name in EXPERT_COUNTS if config.get(name)}
    found |= {name: min(config[name], EXPERTS_A_TOKEN) for name in EXPERT_CHOICES if config.get(name)}
    found |= {name: min(config[name], 1) for name in ONE_AT_MOST if config.get(name)}
    found |= _by_layer(config, layers)
    # Hidden states and logits of about 1: with the deviation of a wide model a narrow one would say nearly the same of every token.
    found["initializer_range"] = hidden**-0.5
    return found


def scaled_heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Heads and key-value heads in the proportion of ``config``: two key-value heads, or one where that would be wide."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    share = heads // math.gcd(heads, kv_heads)
    least = kv_heads // math.gcd(heads, kv_heads)
    times = 2 if least == 1 and kv_heads > 1 and 2 * share * HEAD_DIM <= WIDEST else 1
    return share * times, least * times


def _layers(config: Mapping[str, Any]) -> int:
    """Two, or as many as show every kind of layer."""
    kinds = list(config.get("layer_types") or ())
    first = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    return min(config["num_hidden_layers"], max(LAYERS, min(first, MOST_LAYERS)))


def _by_layer(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What is said of each layer, cut to those that are left."""
    found: dict[str, Any] = {
        name: value[:layers] for name, value in config.items() if isinstance(value, list) and len(value) == config["num_hidden_layers"]
    }
    if isinstance(config.get("max_window_layers"), int):
        found["max_window_layers"] = min(config["max_window_layers"], layers)
    if isinstance(config.get("mlp_only_layers"), list):
        found["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < layers]
    return found


def _rounded(width: float) -> int:
    return max(MULTIPLE, round(width / MULTIPLE) * MULTIPLE)


def local_directory(path: str, key: str) -> Path:
    """The directory of a model with config.json and tokenizer; of a hub name what its cache has. Raises ConfigError: what to fetch."""
    if path.startswith(EMBEDDED_PREFIX):
        return Path(local_model(path))
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    import huggingface_hub

    try:
        found = Path(huggingface_hub.snapshot_download(path, allow_patterns=TOKENIZER_FILES, local_files_only=True))
    except (OSError, ValueError) as error:  # not there, or no name of the hub
        found, cause = Path(), f" ({type(error).__name__})"
    else:
        cause = ""
    if not (found / "config.json").is_file() or found == Path():
        patterns = " ".join(f"--include '{pattern}'" for pattern in TOKENIZER_FILES)
        raise ConfigError(
            f"{key}={path}: its config.json and tokenizer are not on this machine{cause}, and verify reads no network. Fetch them without "
            f"the weights: hf download {path} {patterns}"
        )
    return found


def is_small(directory: Path) -> bool:
    """Whether the directory has weights, and so few that they can be used as they are."""
    sizes = [file.stat().st_size for file in directory.glob("*.safetensors")]
    return 0 < sum(sizes) <= SMALL_BYTES


def write_scaled(source: Path, target: Path, *, seed: int, value_head: bool = False, trust_remote_code: bool = False) -> tuple[str, ...]:
    """Write a small model of the architecture of ``source``, with random weights and its tokenizer; returns its parameters' names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    target.mkdir(parents=True)
    scaled = scaled_architecture(json.loads((source / "config.json").read_text()), f"{source}/config.json")
    (target / "config.json").write_text(json.dumps(scaled))
    kept = [file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if not file.name.endswith(("config.json", "index.json"))]
    kept += [file for file in (source / "tokenizer_config.json", source / "generation_config.json") if file.is_file()]
    for file in kept:
        shutil.copy(file, target / file.name)
    config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
    if value_head:
        config.num_labels = 1
    kind = AutoModelForSequenceClassification if value_head else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model.save_pretrained(target)
    for file in kept:  # what was saved with the model is made of defaults
        shutil.copy(file, target / file.name)
    return tuple(name for name, _ in model.named_parameters())
