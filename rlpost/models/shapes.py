"""Named model shapes with random weights, for measurements that need a size and no ability: ``python -m rlpost.models.shapes NAME``.

All are Qwen3 architectures; ``600m`` and ``8b`` are exactly those of Qwen3-0.6B and Qwen3-8B. The weights are normal noise in
bfloat16, made tensor by tensor, so that building needs little memory. No tokenizer comes with them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlpost.models.embedded import cache_root
from rlpost.types import ConfigError

RECIPE = "1"
"""Part of the cache directory's name: raise it when anything changes what a build gives."""

FILE_BYTES = 2 * 10**9
BYTES_EACH = 2
POSITIONS = 4096
INITIAL_DEVIATION = 0.02
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen3 model; ``tied``: the output layer is the embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool = True

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every parameter, as Hugging Face names them."""
        hidden, wide, narrow = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocabulary, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.self_attn.q_proj.weight", (wide, hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (narrow, hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (narrow, hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (hidden, wide)
            yield f"{prefix}.self_attn.q_norm.weight", (self.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (self.head_dim,)
            yield f"{prefix}.mlp.gate_proj.weight", (self.feed_forward, hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.feed_forward, hidden)
            yield f"{prefix}.mlp.down_proj.weight", (hidden, self.feed_forward)
            yield f"{prefix}.input_layernorm.weight", (hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, hidden)

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for _, shape in self.tensors())


def _shape(sizes: tuple[int, int, int, int, int, int, int], tied: bool = True) -> Shape:
    hidden, layers, heads, kv_heads, head_dim, feed_forward, vocabulary = sizes
    return Shape(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, feed_forward=feed_forward, vocabulary=vocabulary,
        tied=tied,
    )  # fmt: skip


SHAPES = {
    "1m": _shape((128, 4, 4, 2, 32, 384, 1024)),
    "10m": _shape((256, 9, 4, 2, 64, 896, 8192)),
    "25m": _shape((384, 12, 6, 2, 64, 1280, 8192)),
    "100m": _shape((768, 12, 12, 4, 64, 2048, 32768)),
    "150m": _shape((768, 20, 12, 4, 64, 2048, 32768)),
    "300m": _shape((1024, 20, 16, 4, 64, 3072, 50304)),
    "600m": _shape((1024, 28, 16, 8, 128, 3072, 151936)),
    "1b": _shape((1536, 25, 16, 8, 128, 4608, 151936)),
    "3b": _shape((2048, 38, 32, 8, 128, 8192, 151936)),
    "8b": _shape((4096, 36, 32, 8, 128, 12288, 151936), tied=False),
}
"""Hidden size, layers, heads, key-value heads, size of a head, feed-forward size, vocabulary."""


def find_shape(name: str) -> Shape:
    """The shape called ``name``. Raises ConfigError that lists all."""
    if name not in SHAPES:
        listed = ", ".join(f"{known} ({shape.parameters:,} parameters)" for known, shape in SHAPES.items())
        raise ConfigError(f"no model shape {name!r}; there are: {listed}")
    return SHAPES[name]


def shape_path(name: str) -> Path:
    """Where a model of this shape is or will be."""
    find_shape(name)
    return cache_root() / f"shape-{name}-r{RECIPE}"


def build(name: str) -> Path:
    """The directory of a model of the shape, made on first use in a process of its own (the caller needs no torch).

    Raises ConfigError for an unknown name and when there is no room for it.
    """
    path, shape = shape_path(name), find_shape(name)
    if (path / "config.json").exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    needed, free = shape.parameters * BYTES_EACH, shutil.disk_usage(path.parent).free
    if needed > free:
        raise ConfigError(
            f"a model of shape {name} takes {needed / 2**30:.1f} GiB in {path.parent}, which has {free / 2**30:.1f} GiB left; "
            "make room there, or set RLPOST_CACHE to another place"
        )
    command = [sys.executable, "-m", "rlpost.models.shapes", name]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise ConfigError(f"building a model of shape {name!r} failed with exit code {done.returncode}; its output is above")
    return path


def model_config(shape: Shape) -> dict[str, object]:
    """The config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": INITIAL_DEVIATION,
        "intermediate_size": shape.feed_forward,
        "max_position_embeddings": POSITIONS,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def write_model(shape: Shape, directory: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write random weights and config.json into ``directory``, one file open at a time; matrices are noise, norms ones."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, size in shape.tensors():
        bytes_of_it = math.prod(size) * BYTES_EACH
        if groups[-1] and filled + bytes_of_it > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, size))
        filled += bytes_of_it
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for name, size in group:
            tensor = torch.empty(size, dtype=torch.bfloat16)
            tensors[name] = tensor.fill_(1.0) if len(size) == 1 else tensor.normal_(0.0, INITIAL_DEVIATION, generator=generator)
            weight_map[name] = file
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if len(groups) > 1:
        index = {"metadata": {"total_size": shape.parameters * BYTES_EACH}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(model_config(shape), indent=2))


def build_here(name: str) -> Path:
    """Build the model into the cache; the directory appears at once or not at all."""
    final, started = shape_path(name), time.perf_counter()
    partial = final.with_name(f"{final.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_model(SHAPES[name], partial)
        if not final.exists():  # else another process was faster
            partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"built {name} ({SHAPES[name].parameters:,} parameters) in {time.perf_counter() - started:.0f} s: {final}", flush=True)
    return final


if __name__ == "__main__":
    build_here(sys.argv[1])
