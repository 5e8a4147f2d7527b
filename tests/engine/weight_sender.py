"""The sending end of a weight sync without a trainer, and the Hugging Face models that an engine must equal."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from engine_process import EngineProcess

from rlpost.models.embedded import build
from rlpost.types import GenerateRequest, GenerateResult, SyncAcknowledgement, WeightsManifest
from rlpost.weights import collective
from rlpost.weights.buckets import plan_buckets

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
TOLERANCE = 1e-5
"""Largest |logprob of the engine - logprob of a plain forward| in float32."""


class PlainModel:
    """A Hugging Face model in float32; ``variant(n)`` is the same with other weights."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def load(cls, name: str) -> PlainModel:
        """An embedded model."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(build(name), dtype=torch.float32, attn_implementation="eager").eval())

    @torch.no_grad()
    def variant(self, seed: int) -> PlainModel:
        """Every parameter moved by a twentieth of its spread."""
        other = copy.deepcopy(self.model)
        generator = torch.Generator().manual_seed(seed)
        for parameter in other.parameters():
            parameter += 0.05 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)
        return PlainModel(other)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters by name; a tied output layer appears once, as in a trainer's stream."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def distribution(self, request: GenerateRequest, result: GenerateResult, temperature: float) -> torch.Tensor:
        """Log-softmax before each sampled token ``[new tokens, vocabulary]``."""
        tokens = torch.tensor([*request.tokens, *result.tokens.tolist()])[None]
        logits = self.model(input_ids=tokens, use_cache=False).logits[0, len(request.tokens) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    def logprobs(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        """Logprobs of the sampled tokens at the request's temperature (greedy: 1) ``[new tokens]``."""
        distribution = self.distribution(request, result, request.sampling.temperature or 1.0)
        return distribution.gather(-1, torch.tensor(result.tokens.astype(np.int64))[:, None])[:, 0].numpy()


class Sender:
    """Trainer rank 0's part of a sync to one engine, step by step, so that a test can break any of them."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.group: Any = None
        self.bucket_bytes = 64 << 20

    def join(self, timeout_s: float = TIMEOUT_S) -> None:
        """Form the group of sender and engine."""
        store = collective.serve_store("127.0.0.1", 2, timeout_s)
        joining = self.engine.begin("join_weights", "127.0.0.1", store.port, 1, 2, "gloo", timeout_s)
        self.group = collective.make_group(store, backend="gloo", rank=0, world=2, timeout_s=timeout_s)
        joining.result(timeout_s)

    def manifest(self, weights: Mapping[str, torch.Tensor], version: int) -> WeightsManifest:
        """What :meth:`stage` declares."""
        shapes = tuple(tuple(tensor.shape) for tensor in weights.values())
        dtypes = ("float32",) * len(weights)
        return WeightsManifest(
            version=version, names=tuple(weights), shapes=shapes, dtypes=dtypes, buckets=plan_buckets(shapes, dtypes, self.bucket_bytes)
        )

    def stage(self, weights: Mapping[str, torch.Tensor], version: int) -> SyncAcknowledgement:
        """Send all of it; raises what the engine raised. Fails when the engine holds something else."""
        manifest = self.manifest(weights, version)
        staging = self.engine.begin("stage_weights", manifest)
        fingerprint, _ = collective.send(self.group, manifest, weights.items(), CPU)
        acknowledgement: SyncAcknowledgement = staging.result(TIMEOUT_S)
        assert (acknowledgement.fingerprint, acknowledgement.tensors, acknowledgement.version) == (fingerprint, len(weights), version)
        return acknowledgement

    def sync(self, model: PlainModel, version: int) -> None:
        """A whole sync that succeeds."""
        if self.group is None:
            self.join()
        self.stage(model.weights, version)
        self.engine.call("commit_weights", version)
