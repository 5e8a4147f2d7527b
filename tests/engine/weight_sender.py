"""The sending end of a weight sync without a trainer group, and the Hugging Face models that an engine must equal."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_process import EngineProcess

from rlpost.models.embedded import build
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, SyncAcknowledgement, SyncMode, SyncPlan
from rlpost.weights.links import LinkSettings, carrier
from rlpost.weights.sender import SendReport, WeightSender
from rlpost.weights.shards import ShardedWeights

CPU = torch.device("cpu")
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
BUCKET_BYTES = 100_000
"""Several buckets for the tiny model's 428 kB, the largest tensors cut."""

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.15}
"""Largest |logprob of the engine - logprob of a plain forward|."""
TOLERANCE = TOLERANCES["float32"]


class PlainModel:
    """A Hugging Face model with float32 weights, computed in ``dtype`` as an engine of that dtype does."""

    def __init__(self, model: Any, dtype: str = "float32") -> None:
        self.model, self.dtype = model, dtype

    @cached_property
    def computing(self) -> Any:
        """The model as an engine of ``dtype`` computes it; its weights are taken over at the first use."""
        return self.model if self.dtype == "float32" else copy.deepcopy(self.model).to(getattr(torch, self.dtype))

    @classmethod
    def load(cls, name: str, dtype: str = "float32") -> PlainModel:
        """An embedded model."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(build(name), dtype=torch.float32, attn_implementation="eager").eval(), dtype)

    @torch.no_grad()
    def variant(self, seed: int) -> PlainModel:
        """Every parameter moved by a twentieth of its spread."""
        other = self.copy()
        generator = torch.Generator().manual_seed(seed)
        for parameter in other.model.parameters():
            parameter += 0.05 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)
        return other

    @torch.no_grad()
    def sparse_variant(self, seed: int, start: PlainModel, share: float = 0.02) -> PlainModel:
        """A ``share`` of all elements becomes that of ``start`` moved by some of its tensor's spread, so that many in a row stay sane."""
        other = self.copy()
        generator = torch.Generator().manual_seed(seed)
        for parameter, first in zip(other.model.parameters(), start.model.parameters(), strict=True):
            moved = first + 0.7 * first.abs().mean() * torch.randn(first.shape, generator=generator)
            chosen = torch.rand(first.shape, generator=generator) < share
            parameter[chosen] = moved[chosen]
        return other

    def copy(self) -> PlainModel:
        """Another model with the same weights, which a test may write to before it computes."""
        return PlainModel(copy.deepcopy(self.model), self.dtype)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters by name; a tied output layer appears once, as in a trainer's stream."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def distribution(self, request: GenerateRequest, result: GenerateResult, temperature: float) -> torch.Tensor:
        """Log-softmax before each sampled token ``[new tokens, vocabulary]``."""
        tokens = torch.tensor([*request.tokens, *result.tokens.tolist()])[None]
        logits = self.computing(input_ids=tokens, use_cache=False).logits[0, len(request.tokens) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1)

    def logprobs(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        """Logprobs of the sampled tokens at the request's temperature (greedy: 1) ``[new tokens]``."""
        distribution = self.distribution(request, result, request.sampling.temperature or 1.0)
        return distribution.gather(-1, torch.tensor(result.tokens.astype(np.int64))[:, None])[:, 0].numpy()


class Trained(torch.nn.Module):
    """A model that is only its parameters, under any names, so that a test can leave some out or add some."""

    def __init__(self, weights: Mapping[str, torch.Tensor], frozen: Collection[str]) -> None:
        super().__init__()
        self.flat = {name: torch.nn.Parameter(tensor.detach().clone(), name not in frozen) for name, tensor in weights.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """By the names that were given."""
        yield from self.flat.items()


class Sender:
    """A trainer of one rank and a driver for one engine, step by step, so that a test can break any of them.

    ``parameters`` are the trainer's own float32 copies, which :meth:`load` changes in place as an optimizer does. ``version`` is what
    the sender takes the engine to hold. One link at a time: :meth:`join` another one to change the carrier.
    """

    def __init__(
        self,
        engine: EngineProcess,
        weights: Mapping[str, torch.Tensor],
        *,
        version: int = 0,
        frozen: Collection[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
        directory: Path | None = None,
    ) -> None:
        self.engine, self.version, self.directory = engine, version, directory
        model = Trained(weights, frozen)
        self.parameters = model.flat
        self.sender = WeightSender(ShardedWeights(model, engine.settings.dtype, bucket_bytes), CPU, host=HOST, keep_baseline=True)
        self.workers: list[dict[str, Any]] = []
        self.carrier = ""
        self.report = SendReport()

    def describe(self) -> list[dict[str, Any]]:
        """Agree on the tensors with the engine; what its workers answered."""
        self.workers = self.engine.call("describe_weights", self.sender.manifest)
        self.sender.set_layouts([worker["layout"] for worker in self.workers])
        return self.workers

    def settings(self, name: str, timeout_s: float) -> LinkSettings:
        """A link of the carrier ``name``."""
        world = 1 + self.engine.settings.tensor_parallel
        return LinkSettings(
            name="link", carrier=name, world=world, timeout_s=timeout_s, directory=str(self.directory), model_path=str(build("tiny-sort5"))
        )

    def serve(self, name: str, timeout_s: float = TIMEOUT_S) -> LinkSettings:
        """Open a new link's door; what the engine needs to enter by it."""
        self.close()
        self.carrier = name
        host, port = self.sender.serve([self.settings(name, timeout_s)])
        return replace(self.settings(name, timeout_s), host=host, port=port)

    def join(self, name: str, timeout_s: float = TIMEOUT_S) -> None:
        """Make a new link, described before if it was not."""
        if not self.workers:
            self.describe()
        entering = self.engine.begin("enter_link", self.serve(name, timeout_s), 1)
        self.sender.join("link")
        entering.result(timeout_s + TIMEOUT_S)

    def close(self) -> None:
        """Give the link up."""
        self.carrier = ""
        self.sender.close("link")

    @torch.no_grad()
    def load(self, model: PlainModel) -> None:
        """Take a model's weights over, bit for bit."""
        for name, tensor in model.weights.items():
            self.parameters[name].copy_(tensor)

    # ---- steps of a sync -------------------------------------------------------------------------------------------

    def plan(self, version: int, mode: SyncMode, *, verify: bool = True) -> SyncPlan:
        """From the version that the engine is taken to hold."""
        return SyncPlan(version=version, mode=mode, base_version=self.version, link="link", verify=verify)

    def encode(self, version: int) -> SyncPlan:
        """Encode what changed since the last commit; the plan of the delta."""
        self.report = self.sender.encode_delta(True)
        return replace(self.plan(version, "delta"), message_bytes=self.report.bytes)

    def stage(self, plan: SyncPlan) -> None:
        """Bring an encoded delta to the engine; raises what the engine raised."""
        staging = self.engine.begin("stage_weights", plan) if carrier(self.carrier).live else None
        self.sender.send_message(plan)
        staging = staging or self.engine.begin("stage_weights", plan)
        staging.result(TIMEOUT_S)

    def apply(self, plan: SyncPlan) -> SyncAcknowledgement:
        """Send all (or all trained) weights, or apply a staged delta; raises what the engine raised. The engine stays paused."""
        if plan.mode == "delta":
            acknowledgement: SyncAcknowledgement = self.engine.call("apply_weights", plan)
            return acknowledgement
        live = carrier(self.carrier).live
        applying = self.engine.begin("apply_weights", plan) if live else None
        failure = None
        try:
            self.report = self.sender.send_weights(plan)
        except InfrastructureError as error:
            failure = error
        applying = applying or self.engine.begin("apply_weights", plan)
        acknowledgement = applying.result(2 * TIMEOUT_S)  # where both ends failed, the engine knows more
        if failure is not None:
            raise failure
        return acknowledgement

    def check(self, acknowledgement: SyncAcknowledgement, version: int) -> None:
        """The engine holds what the sender holds."""
        assert acknowledgement.fingerprints == self.fingerprints
        assert (acknowledgement.version, acknowledgement.tensors) == (version, len(self.parameters))

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """What each worker must answer to the last report."""
        return tuple(f"{total:032x}" for total in self.report.sums)

    def commit(self, version: int) -> float:
        """Make it the version on both sides. Returns the seconds of the pause."""
        paused_s: float = self.engine.call("commit_weights", version)
        self.advance(version)
        return paused_s

    def advance(self, version: int) -> None:
        """Take the engine to hold ``version``, whether it does or not."""
        self.sender.advance(version)
        self.version = version

    def sync(self, model: PlainModel, version: int, mode: SyncMode = "full") -> None:
        """A whole sync that succeeds, over the present link (a collective one when there is none)."""
        if not self.carrier:
            self.join("collective")
        self.load(model)
        if mode == "delta":
            plan = self.encode(version)
            self.stage(plan)
        else:
            plan = self.plan(version, mode)
        self.check(self.apply(plan), version)
        self.commit(version)


def live_bits(weights: Mapping[str, torch.Tensor], dtype: str) -> dict[str, np.ndarray]:
    """What an engine of one worker must hold, by vLLM's names: query, key and value in one tensor, gate and up in one; flat bits."""
    fused: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        for part, whole in (("q_proj", "qkv_proj"), ("k_proj", "qkv_proj"), ("v_proj", "qkv_proj"), ("gate_proj", "gate_up_proj"),
                            ("up_proj", "gate_up_proj")):  # fmt: skip
            name = name.replace(f".{part}.", f".{whole}.")
        fused.setdefault(name, []).append(tensor)
    return {name: _flat_bits(parts, getattr(torch, dtype)) for name, parts in fused.items()}


def _flat_bits(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> np.ndarray:
    tensor = torch.cat([part.detach().to(dtype).reshape(-1) for part in parts])
    return tensor.view(torch.uint8).numpy().view(f"u{dtype.itemsize}")
