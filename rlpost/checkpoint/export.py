"""Write the trained model (a policy, or a reward model) as a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlpost.training.head import SCORE
from rlpost.weights.shards import ADAPTER_NAMES

MODEL_PREFIX = "model."
"""Where the checkpoint keeps the model's tensors."""

SHARD_BYTES = 4 * 10**9
CARRIED_OVER = ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "generation_config", "config.json")


def export_checkpoint(checkpoint: Path, directory: Path, dtype: str) -> None:
    """Export one complete checkpoint of a run in one process, whatever number of ranks wrote it."""
    import torch.distributed.checkpoint as dcp
    from omegaconf import OmegaConf
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from rlpost.models.embedded import local_model

    config = OmegaConf.load(checkpoint.parent.parent / "config.yaml")
    source = local_model(str(config.model.path))
    reader = dcp.FileSystemReader(str(checkpoint / "tensors"))
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if name.startswith(MODEL_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no other ranks is what is meant
        dcp.load(state, storage_reader=reader, no_dist=True)
    tensors = [(name.removeprefix(MODEL_PREFIX), tensor) for name, tensor in state.items()]
    if rank := OmegaConf.select(config, "training.lora.rank", default=0):
        tensors = merge_adapters(dict(tensors), config.training.lora.alpha / rank)
    model_config = _model_config(source)
    if getattr(model_config, "tie_word_embeddings", False):
        tensors = [(name, tensor) for name, tensor in tensors if name != "lm_head.weight"]
    changes = classifier_config(model_config) if SCORE in dict(tensors) else {}
    export_model(directory, tensors, Path(source), getattr(torch, dtype), changes)


def merge_adapters(tensors: dict[str, torch.Tensor], scaling: float) -> list[tuple[str, torch.Tensor]]:
    """The layers' weights with their LoRA adapters added (W + scaling B A), without the adapters."""
    merged = []
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if name.endswith(ADAPTER_NAMES):
            continue
        if f"{layer}.lora_A" in tensors:
            tensor = tensor + scaling * (tensors[f"{layer}.lora_B"] @ tensors[f"{layer}.lora_A"])
        merged.append((name, tensor))
    return merged


def _model_config(source: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source)


def classifier_config(source: Any) -> dict[str, Any]:
    """What config.json says of a reward model that was made of a model with the configuration ``source``.

    transformers scores a row at its last token that is not the padding token. Where padding is also an end token, that would be the
    token before the end, and not where the model was trained: such a model gets no padding token, so that transformers scores
    rows one by one at their very end, and refuses a padded batch.
    """
    from transformers import AutoModelForSequenceClassification

    ends = source.eos_token_id if isinstance(source.eos_token_id, list) else [source.eos_token_id]
    return {
        "architectures": [AutoModelForSequenceClassification._model_mapping[type(source)].__name__],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": None if source.pad_token_id in ends else source.pad_token_id,
    }


def export_model(
    directory: Path,
    tensors: Sequence[tuple[str, torch.Tensor]],
    source: Path,
    dtype: torch.dtype,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write ``tensors`` in ``dtype`` as safetensors, with the configuration (with ``changes``) and tokenizer files of ``source``.

    ``directory`` appears at once or not at all. Raises FileExistsError when it is already there.
    """
    from safetensors.torch import save_file

    if directory.exists():
        raise FileExistsError(f"{directory} exists already; nothing was overwritten")
    partial = directory.with_name(directory.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        value = tensor.detach().to("cpu", dtype).contiguous()
        if size and size + value.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    names = (
        ["model.safetensors"] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, partial / name, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard}}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    copy_model_files(source, partial, str(dtype).removeprefix("torch."), changes)
    os.rename(partial, directory)


def copy_model_files(source: Path, target: Path, dtype: str, changes: Mapping[str, Any] | None = None) -> None:
    """Copy configuration (with ``changes``) and tokenizer files; ``source`` may be a hub name, then transformers writes them."""
    if source.is_dir():
        for file in source.iterdir():
            if file.is_file() and file.name.startswith(CARRIED_OVER):
                shutil.copy2(file, target / file.name)
    else:
        from transformers import AutoConfig, AutoTokenizer

        AutoConfig.from_pretrained(str(source)).save_pretrained(target)
        AutoTokenizer.from_pretrained(str(source)).save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config |= {"dtype": dtype, **(changes or {})}
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config, indent=2))
