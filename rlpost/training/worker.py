"""A trainer rank. A plain class: Ray makes it an actor (group.py), tests call it directly.

All ranks get every call in the same order; the methods are collectives over the ranks.
"""

from __future__ import annotations

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

from rlpost.algorithms.losses import LOSS_TERMS, Targets
from rlpost.training import model as models
from rlpost.training.optimizer import make_optimizer
from rlpost.training.packing import MicroBatch
from rlpost.training.protocol import UpdateRequest, WorkerSettings
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

    def address(self) -> tuple[str, int]:
        """A host and free port on this rank's node for the ranks' own rendezvous."""
        import socket

        host = _node_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def setup(self, host: str, port: int) -> dict[str, Any]:
        """Join the other ranks, load the model, make the optimizer. Returns what there is to report."""
        settings = self.settings
        if settings.device == "gpu":
            self.device = torch.device("cuda", 0)  # Ray shows each actor only its own GPU
            torch.cuda.set_device(self.device)
        backend = "gloo" if settings.device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, init_method=f"tcp://{host}:{port}", rank=self.rank, world_size=self.world,
            timeout=datetime.timedelta(seconds=settings.timeout_s),
        )  # fmt: skip
        self.mesh = init_device_mesh(self.device.type, (self.world,))
        random.seed(settings.seed + self.rank)
        np.random.seed(settings.seed + self.rank)
        torch.manual_seed(settings.seed + self.rank)
        self.model = self._load(settings.model_path, adapters=settings.training.lora.rank > 0 and settings.total_updates is not None)
        self.reference = None
        if settings.keep_reference:
            self.reference = self._load(settings.reference_path or settings.model_path).requires_grad_(False)
        self.optimizer, self.schedule = None, None
        if settings.total_updates is not None:
            self.optimizer, self.schedule = make_optimizer(
                self.model.parameters(), settings.training.optimizer, total=settings.total_updates
            )
        else:
            self.model.requires_grad_(False)
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
        )

    # ---- computing -------------------------------------------------------------------------------------------------

    def update(self, request: UpdateRequest) -> dict[str, float]:
        """Forward and backward over all micro-batches, clip, one optimizer step. The same metrics on every rank."""
        assert self.optimizer is not None and self.schedule is not None, "a forward-only rank cannot update"
        tally = _Tally()
        last = len(request.micro_batches) - 1
        for index, micro in enumerate(request.micro_batches):
            self.model.set_requires_gradient_sync(index == last)
            output = self.model(micro, request.temperature)
            loss = self._loss(micro, output, request, tally)
            # FSDP averages gradients over ranks; the sum over ranks is wanted.
            (loss * (self.world / request.denominator)).backward()
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
        tally.maxima["memory"] = self.peak_memory_gib()
        return {**tally.reduce(request.denominator), "train/grad_norm": norm, "train/lr": lr}

    def _loss(self, micro: MicroBatch, output: models.TargetOutput, request: UpdateRequest, tally: _Tally) -> torch.Tensor:
        """Weighted sum of all components over the micro-batch; zero, but connected, when it is empty."""
        if not len(micro.target):
            # Nothing to train here, yet every rank must run the same collectives in backward.
            return sum_anchor(output)
        weight = self._tensor(micro.weight)
        targets = Targets(
            logprobs=output.logprobs,
            entropy=output.entropy,
            advantage=self._tensor(micro.advantage),
            old_logprobs=self._optional(micro.old_logprobs),
            reference_logprobs=self._optional(micro.reference_logprobs),
        )
        total = torch.zeros((), device=self.device)
        for component in request.components:
            term = LOSS_TERMS[component.term](targets, **component.parameters)
            total = total + component.coefficient * (weight * term.loss).sum()
            tally.add_term(weight, term)
        tally.add_targets(weight, output, total, self._tensor(micro.parity_logprobs) if request.measure_parity else None)
        return total

    def _clip(self) -> float:
        limit = self.settings.training.optimizer.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self.model.parameters() if p.grad is not None], limit or float("inf"), foreach=True
        )
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[np.ndarray]:
        """Logprobs of the targets of each micro-batch under the present weights ``[targets]`` each."""
        return self._forward(self.model, micro_batches, temperature)

    def reference_logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[np.ndarray]:
        """The same under the frozen copy of the initial weights."""
        assert self.reference is not None, "settings.keep_reference is off"
        return self._forward(self.reference, micro_batches, temperature)

    @torch.no_grad()
    def _forward(self, model: Any, micro_batches: Sequence[MicroBatch], temperature: float) -> list[np.ndarray]:
        result = [model(micro, temperature).logprobs[: len(micro.target)].cpu().numpy() for micro in micro_batches]
        model.reshard()
        return result

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return models.to_tensor(array, self.device)

    def _optional(self, array: np.ndarray | None) -> torch.Tensor | None:
        return None if array is None else self._tensor(array)

    # ---- weights out -----------------------------------------------------------------------------------------------

    def open_weights(self, engine_dtype: str, bucket_bytes: int, keep_baseline: bool) -> WeightsManifest:
        """Prepare to send weights in ``engine_dtype``; returns what there is. LoRA adapters go alone or merged, as configured."""
        # After a forward without backward the root stays gathered: its parameters would be plain tensors on every rank.
        self.model.reshard()
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
        torch.cuda.empty_cache()

    def peak_memory_gib(self) -> float:
        """Peak of this rank: GPU memory on a GPU, resident memory on a CPU, in GiB."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        """Write model, optimizer, schedule and this rank's RNG under ``directory`` (which exists on every node)."""
        from rlpost.checkpoint.state import save_rank

        save_rank(Path(directory), self.rank, self.model, self.optimizer, self.schedule)

    def load(self, directory: str) -> None:
        """Restore what :meth:`save` wrote, also on another number of ranks."""
        from rlpost.checkpoint.state import load_rank

        load_rank(Path(directory), self.rank, self.model, self.optimizer, self.schedule)


class _Tally:
    """Sums and maxima over the micro-batches of a step, reduced once over all ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}

    def _sum(self, name: str, value: torch.Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def _max(self, name: str, value: torch.Tensor) -> None:
        self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(value))

    def add_term(self, weight: torch.Tensor, term: Any) -> None:
        for name, values in term.means.items():
            self._sum(f"mean/{name}", (weight * values.detach()).sum())
        for name, values in term.maxima.items():
            self._max(name, values.max())

    def add_targets(self, weight: torch.Tensor, output: models.TargetOutput, loss: torch.Tensor, engine: torch.Tensor | None) -> None:
        self._sum("mean/loss", loss.detach())
        self._sum("mean/entropy", (weight * output.entropy.detach()).sum())
        self._sum("tokens", float(weight.numel()))
        if engine is not None:
            known = torch.isfinite(engine)
            gap = (output.logprobs.detach() - engine)[known].abs()
            self._sum("parity", gap.sum())
            self._sum("parity_tokens", float(known.sum()))
            if len(gap):
                self._max("parity", gap.max())

    def reduce(self, denominator: float) -> dict[str, float]:
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
        metrics = {f"train/{name.removeprefix('mean/')}": value / denominator for name, value in sums.items() if name.startswith("mean/")}
        metrics["train/tokens"] = sums.get("tokens", 0.0)
        metrics["memory/trainer_peak_gib"] = maxima.pop("memory")
        if sums.get("parity_tokens"):
            metrics["parity/logprob_abs_mean"] = sums["parity"] / sums["parity_tokens"]
            metrics["parity/logprob_abs_max"] = maxima.pop("parity")
        metrics.update({f"train/{name}": value for name, value in maxima.items()})
        return metrics


def sum_anchor(output: models.TargetOutput) -> torch.Tensor:
    """A zero that depends on the whole forward."""
    return output.logprobs.sum() * 0.0


def _node_address() -> str:
    """This node's address as its peers see it; the local one where no Ray runs (tests)."""
    ray = sys.modules.get("ray")
    return str(ray.util.get_node_ip_address()) if ray is not None and ray.is_initialized() else "127.0.0.1"
