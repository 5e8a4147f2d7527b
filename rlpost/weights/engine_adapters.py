"""LoRA adapters inside a vLLM worker: put in place, read back from the buffers that its layers compute with, compared bit for bit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlpost.types import SyncRefusedError
from rlpost.weights.adapters import PREFIX, adapter_config, hash_adapter

ADAPTER_ID, ADAPTER_NAME = 1, "policy"
"""The one adapter of an engine; a new version replaces the old one under the same number, so that frozen requests go on with it."""


def install_adapter(worker: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Make ``tensors`` (PEFT's names) the engine's adapter. Returns their hashes, made from what the layers now hold.

    Raises SyncRefusedError naming what did not arrive in the layers: their rollouts would use the bare model.
    """
    from vllm.lora.request import LoRARequest

    with tempfile.TemporaryDirectory(prefix="rlpost-adapter-") as directory:
        path = Path(directory)
        (path / "adapter_config.json").write_text(json.dumps(adapter_config(tensors)))
        save_file(dict(tensors), path / "adapter_model.safetensors")
        worker.add_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(path), load_inplace=True))
    held = _held_tensors(worker, tensors)
    wrong = [name for name, tensor in tensors.items() if name not in held or not _same_bits(held[name], tensor)]
    if wrong:
        raise SyncRefusedError(
            "adapter", f"{len(wrong)} of {len(tensors)} tensors of the adapter are not in the engine's layers: {wrong[:5]}"
        )
    return hash_adapter(held)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.cpu().view(torch.uint8), other.cpu().contiguous().view(torch.uint8))


def _held_tensors(worker: Any, sent: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapter as the layers hold it, by the names under which it was sent. With tensor parallelism: as the worker keeps it whole."""
    manager = worker.model_runner.lora_manager._adapter_manager
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    held: dict[str, torch.Tensor] = {}
    for module_name, layer in manager.modules.items():
        for part, name in enumerate(manager.packed_modules.get(module_name, [module_name])):
            for letter, stacks in (("A", layer.lora_a_stacked), ("B", layer.lora_b_stacked)):
                key = f"{PREFIX}{name}.lora_{letter}.weight"
                if key in sent and worker.parallel_config.tensor_parallel_size == 1:
                    rows, columns = sent[key].shape
                    held[key] = stacks[part][slot, 0, :rows, :columns].contiguous()
    if worker.parallel_config.tensor_parallel_size > 1:
        registered = manager.get_adapter(ADAPTER_ID).loras
        for module_name, weights in registered.items():
            names = manager.packed_modules.get(module_name, [module_name])
            for letter, values in (("A", weights.lora_a), ("B", weights.lora_b)):
                for name, value in zip(names, values if isinstance(values, list) else [values], strict=True):
                    if value is not None:
                        held[f"{PREFIX}{name}.lora_{letter}.weight"] = value
    return held


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """While it lasts, layers that vLLM wrapped for adapters are the bare ones, under the names that its loader knows."""
    swapped = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            base = getattr(child, "base_layer", None)
            if isinstance(base, torch.nn.Module):
                swapped.append((parent, name, child))
                parent._modules[name] = base
    try:
        yield
    finally:
        for parent, name, child in swapped:
            parent._modules[name] = child
