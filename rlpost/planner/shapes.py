"""A model's sizes, from a Hugging Face config.json or from one of rlpost.models.shapes.

Families whose every tensor is known here are read: Llama, Mistral, Qwen2, Qwen3, and the mixtures Mixtral and Qwen3-MoE. Whatever else
is found (latent attention, Mamba or linear-attention layers, sliding windows, images) is refused by name, never approximated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlpost.models.embedded import EMBEDDED_PREFIX, FETCHED, RECIPES, model_path
from rlpost.models.shapes import SHAPES, find_shape, model_config
from rlpost.planner.known_models import find_known, known_names
from rlpost.planner.quantities import require_divides
from rlpost.plugins import nearest
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A weight matrix ``[outputs, inputs]`` that ``count`` layers have."""

    name: str
    inputs: int
    outputs: int
    count: int

    @property
    def elements(self) -> int:
        """Elements in all layers."""
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; parameters are counted in elements.

    ``feed_forward`` is a dense layer's, ``expert_feed_forward`` an expert's width.
    """

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding."""
    head_norms: bool = False
    """Queries and keys are normalised in each head (Qwen3)."""
    query_bias: bool = False
    """The query, key and value projections have biases."""
    output_bias: bool = False
    feed_forward_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    sparse_layers: int = 0
    """Layers with experts in place of the dense feed-forward part."""

    @property
    def query_width(self) -> int:
        """Elements of all heads' queries of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all heads' keys of one token."""
        return self.kv_heads * self.head_dim

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The matrices that are layers of their own, so that LoRA can reach them: experts and output layer are not among them."""
        hidden, wide, narrow, dense = self.hidden, self.query_width, self.kv_width, self.layers - self.sparse_layers
        sizes = [
            ("q_proj", hidden, wide, self.layers), ("k_proj", hidden, narrow, self.layers), ("v_proj", hidden, narrow, self.layers),
            ("o_proj", wide, hidden, self.layers), ("gate_proj", hidden, self.feed_forward, dense),
            ("up_proj", hidden, self.feed_forward, dense), ("down_proj", self.feed_forward, hidden, dense),
        ]  # fmt: skip
        return tuple(Linear(name=name, inputs=i, outputs=o, count=count) for name, i, o, count in sizes if count)

    @cached_property
    def parts(self) -> dict[str, int]:
        """Parameters by part; their sum is ``parameters``."""
        linear = {one.name: one.elements for one in self.linears}
        attention = sum(linear[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
        attention += self.layers * (self.query_bias * (self.query_width + 2 * self.kv_width) + self.output_bias * self.hidden)
        dense = sum(linear.get(name, 0) for name in ("gate_proj", "up_proj", "down_proj"))
        dense += (self.layers - self.sparse_layers) * self.feed_forward_bias * (2 * self.feed_forward + self.hidden)
        return {
            "embedding": self.vocabulary * self.hidden,
            "attention": attention,
            "feed-forward": dense,
            "experts": self.sparse_layers * self.experts * 3 * self.hidden * self.expert_feed_forward,
            "router": self.sparse_layers * self.experts * self.hidden,
            "norms": self.layers * (2 * self.hidden + 2 * self.head_norms * self.head_dim) + self.hidden,
            "output layer": 0 if self.tied else self.vocabulary * self.hidden,
        }

    @property
    def parameters(self) -> int:
        """All parameters; a tied output layer counts once."""
        return sum(self.parts.values())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts that it is not sent to."""
        idle = self.sparse_layers * (self.experts - self.experts_per_token) * 3 * self.hidden * self.expert_feed_forward
        return self.parameters - idle

    @property
    def multiplied_parameters(self) -> int:
        """Parameters in the matrix products of one token: active ones without embedding look-up, with the output layer if tied or not."""
        looked_up = 0 if self.tied else self.parts["embedding"]
        return self.active_parameters - looked_up - self.parts["norms"]

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, output layer, last norm. FSDP gathers them as one unit."""
        return self.parts["embedding"] + self.parts["output layer"] + self.hidden

    @property
    def largest_layer_parameters(self) -> int:
        """Parameters of the largest layer: one with experts where there is one."""
        parts = self.parts
        norms = (parts["norms"] - self.hidden) // self.layers
        dense = parts["feed-forward"] // (self.layers - self.sparse_layers) if self.layers > self.sparse_layers else 0
        sparse = (parts["experts"] + parts["router"]) // self.sparse_layers if self.sparse_layers else 0
        return parts["attention"] // self.layers + norms + max(dense, sparse)

    @property
    def matrix_parameters(self) -> int:
        """Elements of the layers' two-dimensional weights, which Muon works on (experts are three-dimensional and not among them)."""
        return sum(one.elements for one in self.linears) + self.parts["router"]


def load_shape(model: str) -> ModelShape:
    """The shape of ``model``, whose name it keeps. Nothing is built or downloaded; the first of these that there is:

    a name of rlpost.models.shapes; ``embedded:NAME``; a directory with a config.json, or such a file; a model of the local Hugging Face
    cache; a name of rlpost.planner.known_models. Raises ConfigError when there is none, and for models that the planner does not know.
    """
    config, source = _find_config(model)
    return replace(shape_from_config(config, source), name=model)


def _find_config(model: str) -> tuple[Mapping[str, Any], str]:
    """The content of the model's config.json, and where it is from."""
    if model in SHAPES:
        return model_config(find_shape(model)), model
    if model.startswith(EMBEDDED_PREFIX):
        return _embedded_config(model.removeprefix(EMBEDDED_PREFIX)), model
    path = Path(model).expanduser()
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            return _read_config(file)
    else:
        cached = _cached_config(model)
        if cached is not None:
            return _read_config(cached)
        known = find_known(model)
        if known is not None:
            return known, model
    near = nearest(model, [*SHAPES, *known_names()])
    hint = f"; nearest known: {', '.join(near)}" if near else ""
    raise ConfigError(
        f"no model shape, no cached or known model and no config.json at {model!r}{hint}; expected a directory with a config.json, such a "
        f"file, a model of the Hugging Face cache ({_hub_cache()}) or a known one (OWNER/NAME), {EMBEDDED_PREFIX}NAME, or one of "
        f"{', '.join(SHAPES)}: download the model's config.json (a few kB) and give its path"
    )


def _read_config(file: Path) -> tuple[Mapping[str, Any], str]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}; expected the model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds {type(config).__name__}; expected the object of a model's config.json")
    return config, str(file)


EMBEDDED_VOCABULARY = 128
"""Of the embedded models' tokenizer: 4 special tokens, 95 printable characters and newline, padded to a multiple of 32."""


def _embedded_config(name: str) -> Mapping[str, Any]:
    """That of the built model, or what a build would give."""
    file = model_path(name) / "config.json"
    if file.is_file():
        return _read_config(file)[0]
    if name == FETCHED:
        return find_known(name) or {}
    return {"model_type": "qwen3", "vocab_size": EMBEDDED_VOCABULARY, "tie_word_embeddings": True, **RECIPES[name].architecture}


def _hub_cache() -> Path:
    """Where huggingface_hub keeps downloads (its constants.py), which is not imported because it takes longer than a plan."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _cached_config(name: str) -> Path | None:
    """The config.json of a downloaded model: of the branch ``main`` where that was downloaded, else the latest."""
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        file = folder / "snapshots" / main.read_text().strip() / "config.json"
        if file.is_file():
            return file
    files = (file for file in folder.glob("snapshots/*/config.json") if file.is_file())
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
"""``model_type`` of the families whose every tensor is known here (transformers' modeling_*.py)."""

NOT_COVERED = {
    "kv_lora_rank": "multi-head latent attention (MLA), whose cache and projections have other sizes",
    "q_lora_rank": "multi-head latent attention (MLA), whose cache and projections have other sizes",
    "text_config": "a model with images or sound",
    "layers_block_type": "a hybrid of attention and Mamba layers",
    "hybrid_override_pattern": "a hybrid of attention and Mamba layers",
    "mamba_d_state": "Mamba layers, which have a state in place of a KV cache",
    "ssm_state_size": "Mamba layers, which have a state in place of a KV cache",
    "state_size": "Mamba layers, which have a state in place of a KV cache",
    "linear_num_key_heads": "linear-attention layers, which have a state in place of a KV cache",
    "linear_attn_config": "linear-attention layers, which have a state in place of a KV cache",
    "attn_type_list": "layers of linear attention, which have a state in place of a KV cache",
    "sliding_window_pattern": "layers with a sliding window, which limits their KV cache",
    "attention_chunk_size": "layers with attention within chunks, which limits their KV cache",
}
"""Fields of a config.json that tell of parts that no formula here covers."""


def _refuse_what_is_not_covered(config: Mapping[str, Any], source: str) -> None:
    for field, meaning in NOT_COVERED.items():
        if config.get(field) is not None:
            raise ConfigError(f"{source}: {field}={config[field]!r:.80} tells of {meaning}; the planner covers {', '.join(FAMILIES)} only")
    other = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if other:
        raise ConfigError(f"{source}: layer_types has {', '.join(other)}; the planner covers full_attention in every layer only")
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{source}: model_type={family!r} is not known to the planner; expected one of {', '.join(FAMILIES)}: "
            "if its layers are those of one of these, plan with a copy of the file that says so"
        )
    # Mistral's class has a window of 4096 when the file says nothing; Qwen has one only when use_sliding_window says so.
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if window is not None and (config.get("use_sliding_window") or (family in ("mistral", "mixtral"))):
        raise ConfigError(
            f"{source}: sliding_window={window} limits the KV cache, which the planner does not cover; for an upper bound "
            "plan with a copy of the file whose sliding_window is null"
        )


def _size(config: Mapping[str, Any], field: str, source: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"{source} has no {field}; expected a whole number above 0: take the model's complete config.json")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{source}: {field} is {value!r}; expected a whole number above 0: correct the file")
    return value


def shape_from_config(config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape of a config.json's content; ``source`` names it in messages.

    Raises ConfigError for families and parts that are not covered, and for missing, wrong or contradictory sizes.
    """
    _refuse_what_is_not_covered(config, source)
    family = str(config["model_type"])
    hidden, heads = _size(config, "hidden_size", source), _size(config, "num_attention_heads", source)
    kv_heads = _size(config, "num_key_value_heads", source, heads)
    # Qwen3's head size is not hidden / heads, so a file without it says nothing; of the others that is the rule.
    head_dim = _size(config, "head_dim", source, None if family.startswith("qwen3") else hidden // heads)
    if config.get("head_dim") is None:
        require_divides("num_attention_heads", heads, hidden_size=hidden)
    require_divides("num_key_value_heads", kv_heads, num_attention_heads=heads)
    bias = bool(config.get("attention_bias")) and family in ("llama", "qwen3", "qwen3_moe")
    return ModelShape(
        name=source,
        family=family,
        hidden=hidden,
        layers=_size(config, "num_hidden_layers", source),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=_size(config, "intermediate_size", source),
        vocabulary=_size(config, "vocab_size", source),
        tied=bool(config.get("tie_word_embeddings", False)),
        head_norms=family.startswith("qwen3"),
        query_bias=bias or family == "qwen2",
        output_bias=bias,
        feed_forward_bias=family == "llama" and bool(config.get("mlp_bias")),
        **_experts(config, family, source),
    )


def _experts(config: Mapping[str, Any], family: str, source: str) -> dict[str, int]:
    """The fields of ModelShape that describe experts; none for dense families."""
    if family not in ("mixtral", "qwen3_moe"):
        return {}
    layers = _size(config, "num_hidden_layers", source)
    if family == "mixtral":
        experts, width, sparse = _size(config, "num_local_experts", source), _size(config, "intermediate_size", source), layers
    else:
        # transformers 5 writes this field under Mixtral's name.
        field = "num_experts" if "num_experts" in config else "num_local_experts"
        experts, width = _size(config, field, source), _size(config, "moe_intermediate_size", source)
        every, dense = _size(config, "decoder_sparse_step", source, 1), set(config.get("mlp_only_layers") or ())
        sparse = sum((layer + 1) % every == 0 and layer not in dense for layer in range(layers))
    chosen = _size(config, "num_experts_per_tok", source)
    if chosen > experts:
        raise ConfigError(f"{source}: num_experts_per_tok={chosen} of {experts} experts; expected at most {experts}: correct the file")
    return {"experts": experts, "experts_per_token": chosen, "expert_feed_forward": width, "sparse_layers": sparse}


VOCABULARY_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it (vocab_parallel_embedding.py)."""


def check_tensor_parallel(shape: ModelShape, degree: int) -> None:
    """Raise ConfigError unless vLLM can cut the model ``degree`` ways: heads, feed-forward width and padded vocabulary.

    Key-value heads may be fewer than the degree, which then must be a multiple of them: each is held by several GPUs.
    """
    padded = -(-shape.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING
    feed_forward = shape.expert_feed_forward if shape.sparse_layers else shape.feed_forward
    require_divides("tensor_parallel", degree, attention_heads=shape.heads, feed_forward=feed_forward, padded_vocabulary=padded)
    if shape.kv_heads % degree and degree % shape.kv_heads:
        raise ConfigError(
            f"tensor_parallel={degree} neither divides the {shape.kv_heads} key-value heads nor is a multiple of them; "
            f"expected a divisor or a multiple of {shape.kv_heads}: change tensor_parallel"
        )
