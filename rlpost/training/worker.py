"""A trainer rank. A plain class: Ray makes it an actor (group.py), tests call it directly.

All ranks get every call in the same order; the methods are collectives over the ranks.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import random
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlpost.algorithms.catalogue import find_terms
from rlpost.algorithms.losses import Part, Targets, total_loss
from rlpost.training import model as models
from rlpost.training.optimizer import make_optimizer
from rlpost.training.packing import MicroBatch
from rlpost.training.protocol import UpdateRequest, WorkerSettings
from rlpost.training.reference import make_reference
from rlpost.types import RlpostError, WeightsManifest
from rlpost.weights.sender import WeightSender
from rlpost.weights.shards import ShardedWeights


class TrainerRank:
    """One rank of the sharded trainer, or of a reference model when it has no optimizer."""

    def __init__(self, rank: int, world: int, settings: WorkerSettings) -> None:
        self.rank, self.world, self.settings = rank, world, settings
        torch.set_num_threads(settings.training.threads)
        self.device = torch.device("cpu")
        self.sender: WeightSender | None = None
        self._store: Any = None
        self._timeout = datetime.timedelta(seconds=settings.timeout_s)

    def address(self) -> tuple[str, int]:
        """Host and port at which this rank, the first, waits for its peers from now on.

        The port is held and not only found: what is free now may be taken a moment later.
        """
        host = _node_address()
        if self._store is None:
            self._store = dist.TCPStore(host, 0, self.world, is_master=True, wait_for_workers=False, timeout=self._timeout)
        return host, int(self._store.port)

    def setup(self, host: str, port: int) -> dict[str, Any]:
        """Join the other ranks, load the model, make the optimizer. Returns what there is to report."""
        settings = self.settings
        if settings.device == "gpu":
            self.device = torch.device("cuda", 0)  # Ray shows each actor only its own GPU
            torch.cuda.set_device(self.device)
        backend = "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl"
        if self.rank or self._store is None:
            self._store = dist.TCPStore(host, port, self.world, is_master=False, timeout=self._timeout)
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.world, timeout=self._timeout)
        self.mesh = init_device_mesh(self.device.type, (self.world,))
        random.seed(settings.seed + self.rank)
        np.random.seed(settings.seed + self.rank)
        torch.manual_seed(settings.seed + self.rank)
        self.model = self._load(settings.model_path, adapters=settings.training.lora.rank > 0 and settings.total_updates is not None)
        self.reference = make_reference(self.model, settings, self.device, self._load)
        self.optimizer, self.schedule = None, None
        if settings.total_updates is not None:
            self.optimizer, self.schedule = make_optimizer(self.model, settings.training.optimizer, total=settings.total_updates)
        else:
            self.model.requires_grad_(False)
        if self.device.type == "cpu":
            ctypes.CDLL(None).malloc_trim(0)  # the whole model that was read would stay resident
        sizes = [(p.numel(), p.requires_grad) for p in self.model.parameters()]
        return {"parameters": sum(n for n, _ in sizes), "trained": sum(n for n, trained in sizes if trained)}

    def _load(self, path: str, *, adapters: bool = False) -> Any:
        settings = self.settings
        return models.load_policy(
            path,
            config=settings.training,
            dtype=getattr(torch, settings.dtype),
            mesh=self.mesh,
            device=self.device,
            attention_name=settings.attention,
            trust_remote_code=settings.trust_remote_code,
            adapters=adapters,
            head=settings.head,
        )

    # ---- computing -------------------------------------------------------------------------------------------------

    def update(self, request: UpdateRequest) -> dict[str, float]:
        """Forward and backward over all micro-batches, clip, one optimizer step. The same metrics on every rank."""
        assert self.optimizer is not None and self.schedule is not None, "a forward-only rank cannot update"
        tally = _Tally()
        last = len(request.micro_batches) - 1
        # Gradients that are not reduced yet are whole ones: a second model in memory.
        always = self.settings.training.reshard_after_forward
        for index, micro in enumerate(request.micro_batches):
            self.model.set_requires_gradient_sync(always or index == last)
            output = self.model(micro, request.temperature)
            loss = self._loss(micro, output, request, tally)
            # FSDP averages gradients over ranks; the sum over ranks is wanted.
            (loss * self.world).backward()
        norm = self._clip()
        if not math.isfinite(norm):
            # Every rank has the same norm, so every rank stops here; the weights are still those of the last step.
            self.optimizer.zero_grad(set_to_none=True)
            raise RlpostError(
                f"the gradient norm is {norm}, so no step was taken: look at train/ratio_max and the rewards of the last steps; "
                "lower training.optimizer.lr and resume from the last checkpoint"
            )
        lr = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        if self.reference is not None:
            self.reference.after_step()
        tally.maxima["memory"] = self.peak_memory_gib()
        return {**tally.reduce(), "train/grad_norm": norm, "train/lr": lr}

    def _loss(self, micro: MicroBatch, output: models.TargetOutput, request: UpdateRequest, tally: _Tally) -> torch.Tensor:
        """The micro-batch's share of the loss; zero, but connected, when it is empty."""
        if not len(micro.target):
            # Nothing to train here, yet every rank must run the same collectives in backward.
            return sum_anchor(output)
        targets = Targets(
            logprobs=output.logprobs,
            entropy=output.entropy,
            sequence=self._tensor(micro.sequence),
            sequences=len(micro.lengths),
            values=output.values,
            advantage=self._optional(micro.advantage),
            old_logprobs=self._optional(micro.old_logprobs),
            reference_logprobs=self._optional(micro.reference_logprobs),
            columns={name: self._tensor(array) for name, array in micro.columns.items()},
            scalars={name: self._tensor(array) for name, array in micro.scalars.items()},
        )
        total, parts = total_loss(
            request.components, targets, self._tensor(micro.weight), request.denominators, find_terms(request.components)
        )
        for part in parts:
            tally.add_part(part)
        tally.add_targets(output, total, self._optional(micro.parity_logprobs) if request.measure_parity else None)
        return total

    def _clip(self) -> float:
        limit = self.settings.training.optimizer.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self.model.parameters() if p.grad is not None], limit or float("inf"), foreach=True
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def measure(self, request: UpdateRequest) -> dict[str, float]:
        """What :meth:`update` would report of the loss, without a step."""
        tally = _Tally()
        for micro in request.micro_batches:
            self._loss(micro, self.model(micro, request.temperature), request, tally)
        models.reshard(self.model)
        tally.maxima["memory"] = self.peak_memory_gib()
        return tally.reduce()

    def entropies(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[np.ndarray]:
        """Entropy of the policy at the targets of each micro-batch ``[targets]`` each."""
        return self._forward(self.model, micro_batches, temperature, "entropy")

    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[np.ndarray]:
        """Logprobs of the targets of each micro-batch under the present weights ``[targets]`` each."""
        return self._forward(self.model, micro_batches, temperature)

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """What the value head says of the targets of each micro-batch ``[targets]`` each: a critic's values, a reward model's scores."""
        assert self.settings.head == "value", "settings.head is not value"
        return self._forward(self.model, micro_batches, 1.0, "values")

    def reference_logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[np.ndarray]:
        """The same under the reference that ``settings.reference_mode`` names."""
        assert self.reference is not None, "settings.reference_mode is none"
        with self.reference.applied() as model:
            return self._forward(model, micro_batches, temperature)

    @torch.no_grad()
    def _forward(self, model: Any, micro_batches: Sequence[MicroBatch], temperature: float, what: str = "logprobs") -> list[np.ndarray]:
        result = [getattr(model(micro, temperature), what)[: len(micro.target)].cpu().numpy() for micro in micro_batches]
        models.reshard(model)
        return result

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return models.to_tensor(array, self.device)

    def _optional(self, array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else self._tensor(array)

    # ---- weights out -----------------------------------------------------------------------------------------------

    def open_weights(self, engine_dtype: str, bucket_bytes: int, keep_baseline: bool) -> WeightsManifest:
        """Prepare to send weights in ``engine_dtype``; returns what there is. LoRA adapters go alone or merged, as configured."""
        # After a forward without backward parameters stay gathered: plain tensors on every rank.
        models.reshard(self.model)
        weights = ShardedWeights(self.model, engine_dtype, bucket_bytes, merge_adapters=self.settings.training.lora.sync == "merged")
        self.sender = WeightSender(weights, self.device, host=_node_address(), keep_baseline=keep_baseline)
        return self.sender.manifest

    def weights(self, method: str, *arguments: Any) -> Any:
        """Call a method of this rank's WeightSender."""
        assert self.sender is not None, "open_weights() comes first"
        return getattr(self.sender, method)(*arguments)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Colocated on a GPU: move optimizer state and shards to host memory while engines generate (not run on a GPU yet)."""
        self._move("cpu")

    def onload(self) -> None:
        """Undo :meth:`offload`."""
        self._move("cuda")

    def _move(self, device: str) -> None:
        if self.device.type == "cpu":
            return
        self.model.to(device)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = value.to(device)
        averages = self._reference_state()
        for name, tensor in averages.items():
            averages[name] = tensor.to(device)
        torch.cuda.empty_cache()

    def peak_memory_gib(self) -> float:
        """Peak of this rank: GPU memory on a GPU, resident memory on a CPU, in GiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        """Write model, optimizer, schedule, reference and this rank's RNG under ``directory`` (which exists on every node)."""
        from rlpost.checkpoint.state import save_rank

        save_rank(Path(directory), self.rank, self.model, self.optimizer, self.schedule, self._reference_state())

    def load(self, directory: str) -> None:
        """Restore what :meth:`save` wrote, also on another number of ranks."""
        from rlpost.checkpoint.state import load_rank

        load_rank(Path(directory), self.rank, self.model, self.optimizer, self.schedule, self._reference_state())

    def _reference_state(self) -> dict[str, torch.Tensor]:
        return self.reference.state() if self.reference is not None else {}


class _Tally:
    """Sums and maxima over the micro-batches of a step, reduced once over all ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}

    def _sum(self, name: str, value: torch.Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def _max(self, name: str, value: torch.Tensor) -> None:
        self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def add_part(self, part: Part) -> None:
        """What a loss component reports: means by the weights of its loss (whose denominator may be another number: a constant, pairs)."""
        for name, values in {**part.term.means, **part.means}.items():
            self._sum(f"mean/{name}", (part.weight * values.detach()).sum())
            self._sum(f"weight/{name}", part.weight.sum())
        for name, values in part.term.maxima.items():
            if len(values):
                self._max(name, values.max())

    def add_targets(self, output: models.TargetOutput, loss: torch.Tensor, engine: torch.Tensor | None) -> None:
        """The loss, the mean entropy of the targets, and how far trainer and engine are apart."""
        self._sum("loss", loss.detach())
        if output.values is None:
            self._sum("entropy", output.entropy.detach().sum())
        self._sum("tokens", float(output.entropy.numel()))
        if engine is not None:
            known = torch.isfinite(engine)
            gap = (output.logprobs.detach() - engine)[known].abs()
            self._sum("parity", gap.sum())
            self._sum("parity_tokens", float(known.sum()))
            if len(gap):
                self._max("parity", gap.max())

    def reduce(self) -> dict[str, float]:
        """Collective: every rank reports the same keys, also a rank that had nothing to train."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.sums, self.maxima))
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        for part_sums, part_maxima in gathered:
            for name, value in part_sums.items():
                sums[name] = sums.get(name, 0.0) + value
            for name, value in part_maxima.items():
                maxima[name] = max(maxima.get(name, float("-inf")), value)
        metrics = {f"train/{name}": total / sums[f"weight/{name}"] for name, total in _with_prefix(sums, "mean/") if sums[f"weight/{name}"]}
        if "loss" in sums:
            metrics["train/loss"] = sums["loss"]
        metrics["train/tokens"] = tokens = sums.get("tokens", 0.0)
        if tokens and "entropy" in sums:
            metrics["train/entropy"] = sums["entropy"] / tokens
        metrics["memory/trainer_peak_gib"] = maxima.pop("memory")
        if sums.get("parity_tokens"):
            metrics["parity/logprob_abs_mean"] = sums["parity"] / sums["parity_tokens"]
            metrics["parity/logprob_abs_max"] = maxima.pop("parity")
        metrics.update({f"train/{name}": value for name, value in maxima.items()})
        return metrics


def _with_prefix(sums: dict[str, float], prefix: str) -> list[tuple[str, float]]:
    return [(name.removeprefix(prefix), value) for name, value in sums.items() if name.startswith(prefix)]


def sum_anchor(output: models.TargetOutput) -> torch.Tensor:
    """A zero that depends on the whole forward."""
    told = output.logprobs if output.values is None else output.values
    return told.sum() * 0.0


def _node_address() -> str:
    """This node's address as its peers see it; the local one where no Ray runs (tests)."""
    ray = sys.modules.get("ray")
    return str(ray.util.get_node_ip_address()) if ray is not None and ray.is_initialized() else "127.0.0.1"
