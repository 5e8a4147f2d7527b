"""Load a Hugging Face causal model, shard it with FSDP2, and make its forward return logprobs, or values.

Only rank 0 reads the files; the others start on the meta device and receive their shards, so a node holds one full copy
for a moment and no more.
"""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlpost.config.schema import TrainingConfig
from rlpost.models.embedded import check_here
from rlpost.training import attention
from rlpost.training.head import load_with_head, one_label, train_head, values_of
from rlpost.training.logprob import target_logprob
from rlpost.training.lora import add_adapters
from rlpost.training.norm import replace_norms
from rlpost.training.packing import MicroBatch
from rlpost.training.protocol import Head
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """What the model says of the targets of one micro-batch, all ``[targets]`` in float32 (an empty one: of the dummy row's target).

    A model with a value head gives ``values``; its logprobs and entropy are 0, without gradients.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor | None = None


def load_policy(
    path: str,
    *,
    config: TrainingConfig,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    device: torch.device,
    attention_name: str,
    trust_remote_code: bool,
    adapters: bool = False,
    head: Head = "logprob",
) -> Any:
    """The model at ``path``, sharded over ``mesh`` with float32 master weights, forward in ``dtype``.

    With ``adapters`` it gets the LoRA adapters of ``config.lora``, and only they are trained (and a value head). Calling it with a
    MicroBatch and a temperature gives a TargetOutput. Raises ConfigError when ``path`` is no model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging as transformers_logging

    check_here(path)
    transformers_logging.disable_progress_bar()
    attention.register()
    implementation = attention.PADDED if attention_name == "padded" else "flash_attention_2"
    kind = AutoModelForCausalLM if head == "logprob" else AutoModelForSequenceClassification
    source = None
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if head == "value":
            one_label(model_config, path)
        if mesh.get_rank() == 0 and head == "value":
            source = load_with_head(path, trust_remote_code)
        elif mesh.get_rank() == 0:
            source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
            check_output_layer(source, path)
        model_config._attn_implementation = implementation
        no_dropout(model_config)
        with torch.device("meta"):
            model = kind.from_config(model_config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        kind_name = "causal language model" if head == "logprob" else "model with a value head"
        raise ConfigError(f"{path!r} cannot be loaded as a {kind_name}: {error}") from error
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    replace_norms(model)
    if adapters:
        for one in filter(None, (model, source)):
            add_adapters(one, config.lora)
    else:
        freeze(model, config.trainable)
    if head == "value":
        train_head(model)
    patch_forward(model, config.logprob_chunk_tokens, device, head)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype != torch.float32 else MixedPrecisionPolicy()
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    model.to_empty(device=device)
    scatter_weights(model, source, device)
    model.train()
    return model


def reshard(model: Any) -> None:
    """Give up every gathered parameter, of layers too: after a forward without backward they are plain whole tensors.

    FSDP's own ``reshard`` reaches only the module that it is called on, and then the layers stay whole when
    training.reshard_after_forward is off.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def no_dropout(config: Any) -> None:
    """Switch dropout off: with it the logprobs of one policy would differ from forward to forward, and ratios from 1."""
    for name, value in config.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, int | float):
            setattr(config, name, 0.0)


@torch.no_grad()
def check_output_layer(model: Any, path: str) -> None:
    """Raises ConfigError unless a logit is what the weight ``lm_head`` says of the last hidden state, which is all that we compute.

    Found by asking the model, not by its name: some scale or cut their logits, or have a bias.
    """
    model.eval()
    tokens = torch.arange(4)[None]
    same = hasattr(model, "model") and hasattr(model, "lm_head")
    if same:
        ours = model.model(input_ids=tokens, use_cache=False).last_hidden_state @ model.lm_head.weight.t()
        logits = model(input_ids=tokens, use_cache=False).logits
        same = bool((ours - logits).abs().max() <= 1e-4 * logits.abs().max())  # a logit near 0 has the rounding of a sum of large ones
    if not same:
        raise ConfigError(
            f"{path}: {type(model).__name__} makes its logits by more than one matrix product of body `model` and output layer `lm_head` "
            "(they are scaled or cut, or have a bias), so its logprobs would be wrong here; use another architecture"
        )


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The repeated blocks of the model: the elements of its longest module list."""
    lists: list[list[torch.nn.Module]] = [list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def freeze(model: Any, trainable: str) -> None:
    """Leave only parameters whose name matches ``trainable`` (a regular expression, or ``all``) with gradients."""
    if trainable == "all":
        return
    pattern = re.compile(trainable)
    names = [name for name, _ in model.named_parameters()]
    if not any(pattern.search(name) for name in names):
        raise ConfigError(f"training.trainable={trainable!r} matches no parameter; names look like {names[0]!r}, {names[-1]!r}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(pattern.search(name)))


def patch_forward(model: Any, chunk: int, device: torch.device, head: Head) -> None:
    """Replace the model's forward before sharding, so that the output layer (or value head) is used inside the sharded root."""

    def forward(self: Any, micro: MicroBatch, temperature: float) -> TargetOutput:
        row = micro if len(micro.lengths) else dummy_row()
        positions = to_tensor(row.positions, device)[None]
        if self.config._attn_implementation == attention.PADDED:
            packed: dict[str, Any] = {"packed_layout": attention.PackedLayout.of(row.lengths, row.index, device)}
        else:
            packed = attention.flash_arguments(row.lengths, device)
        hidden = self.model(
            input_ids=to_tensor(row.tokens, device)[None], position_ids=positions, use_cache=False, **packed
        ).last_hidden_state[0]
        hidden = hidden.index_select(0, to_tensor(row.predictor, device))
        if head == "value":
            values = values_of(self, hidden)
            nothing = torch.zeros_like(values, requires_grad=False)
            return TargetOutput(logprobs=nothing, entropy=nothing, values=values)
        target = to_tensor(row.target, device)
        logprobs, entropy = target_logprob(hidden, self.lm_head.weight, target, temperature, chunk)
        return TargetOutput(logprobs=logprobs, entropy=entropy)

    model.forward = types.MethodType(forward, model)


def to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on ``device``: arrays that came through Ray are read-only."""
    return torch.tensor(array, device=device)


def dummy_row() -> MicroBatch:
    """Two tokens that an empty micro-batch runs, so that collectives stay in step; the caller gives them no weight."""
    one = np.zeros(1, np.int64)
    return MicroBatch(
        tokens=np.zeros(2, np.int64),
        positions=np.arange(2),
        lengths=np.array([2]),
        index=np.arange(2),
        predictor=one,
        target=one,
        sequence=one,
        weight=np.zeros(1, np.float32),
        advantage=np.zeros(1, np.float32),
        parity_logprobs=np.zeros(1, np.float32),
        old_logprobs=None,
        reference_logprobs=None,
        members=(),
    )


@torch.no_grad()
def scatter_weights(model: Any, source: Any | None, device: torch.device) -> None:
    """Give every rank its shards of rank 0's ``source``, and rank 0's buffers (also those that no checkpoint holds)."""
    parameters = dict(source.named_parameters()) if source is not None else {}
    buffers = dict(source.named_buffers()) if source is not None else {}
    for name, parameter in model.named_parameters():
        shape, dtype = parameter.shape, parameter.dtype
        full = parameters[name].detach().to(device, dtype) if source is not None else torch.empty(shape, dtype=dtype, device=device)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=0))
        else:
            dist.broadcast(full, src=0)
            parameter.copy_(full)
    for name, buffer in model.named_buffers():
        if source is not None:
            buffer.copy_(buffers[name].to(device, buffer.dtype))
        dist.broadcast(buffer, src=0)
