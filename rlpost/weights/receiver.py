"""The receiving end inside a vLLM worker: a backend of vLLM's own weight-transfer interface.

vLLM drives it: ``init_transfer_engine`` (join the group), ``start_weight_update`` (begin a layerwise reload),
``receive_weights`` (all buckets), ``finish_weight_update`` (let layers re-pack their kernels' layouts). Registered by
name through ``register``; vLLM is imported only when a worker loads this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rlpost.types import WeightsManifest
from rlpost.weights import collective
from rlpost.weights.fingerprint import Fingerprint

BACKEND = "rlpost_collective"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """How to join the sender's group. ``first_rank`` is this engine's first worker; each further worker adds its own rank."""

    host: str
    port: int
    first_rank: int
    world: int
    backend: str
    timeout_s: float


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    """The manifest of one sync, as plain lists (it travels through vLLM's RPC)."""

    version: int
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    buckets: list[list[int]] = field(default_factory=list)


class CollectiveReceiver(WeightTransferEngine[JoinInfo, ReceiveInfo]):
    """Receives buckets from trainer rank 0 and loads them; ``last_receipt`` proves what came."""

    init_info_cls = JoinInfo
    update_info_cls = ReceiveInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: Any | None = None
        self.store: Any | None = None
        self.expected: list[str] = []
        self.last_receipt: dict[str, Any] = {}

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the sender's group; a former group is given up first."""
        self.shutdown()
        rank = init_info.first_rank + self.parallel_config.rank
        self.store = collective.join_store(init_info.host, init_info.port, init_info.world, init_info.timeout_s)
        self.group = collective.make_group(
            self.store, backend=init_info.backend, rank=rank, world=init_info.world, timeout_s=init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Begin vLLM's layerwise reload: layers collect their new weights and are rebuilt in place."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # Listed before the reload begins: tied parameters are one tensor here, and two placeholders during it.
        self.expected = [name for name, _ in self.model.named_parameters()]
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        """Receive all buckets and load them. Raises when no group was joined, the connection breaks, or parameters are missing."""
        manifest = WeightsManifest(
            version=update_info.version,
            names=tuple(update_info.names),
            shapes=tuple(tuple(shape) for shape in update_info.shapes),
            dtypes=tuple(update_info.dtypes),
            buckets=tuple((bucket[0], bucket[1]) for bucket in update_info.buckets),
        )
        try:
            if self.group is None:
                raise RuntimeError("no weight-transfer group was joined before this update")
            self.last_receipt = self._receive(self.group, manifest)
        except BaseException:
            self._abandon()
            raise

    def _receive(self, group: Any, manifest: WeightsManifest) -> dict[str, Any]:
        fingerprint, loaded = Fingerprint(), set[str]()
        for bucket in manifest.buckets:
            buffer = torch.zeros(collective.bucket_bytes(manifest, bucket), dtype=torch.uint8, device=self.device)
            collective.broadcast(group, buffer)
            tensors = list(collective.views(buffer, manifest, bucket))
            for name, tensor in tensors:
                fingerprint.add(name, tensor)
            loaded |= self._load(tensors)
        missing = [name for name in self.expected if name not in loaded] + self._missing_parts(set(manifest.names))
        if missing:
            raise RuntimeError(f"{len(missing)} parameters never came: {missing[:5]}")
        return {"fingerprint": fingerprint.hexdigest(), "tensors": fingerprint.tensors}

    def _missing_parts(self, names: set[str]) -> list[str]:
        """Parts of fused parameters (query of query-key-value, say) that did not come although another part of the same did."""
        fused: dict[str, list[str]] = getattr(self.model, "packed_modules_mapping", {})
        missing: list[str] = []
        for name in self.expected:
            for whole, parts in fused.items():
                pieces = [name.replace(f".{whole}.", f".{part}.") for part in parts] if f".{whole}." in name else []
                absent = [piece for piece in pieces if piece not in names]
                missing += absent if len(absent) < len(pieces) else []
        return missing

    def _abandon(self) -> None:
        """After half an update: a model that can run and be updated again (its weights are of no version).

        Without it layers would stay without storage, and what they have collected would be taken for a part of the next update.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self.finish_weight_update()

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        load: Any = self.model.load_weights
        return load(tensors) or set()

    def finish_weight_update(self) -> None:
        """End the layerwise reload, then renew what it leaves behind."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_tied_output_layer()

    def _renew_tied_output_layer(self) -> None:
        # On CPU an output layer tied to the embedding keeps a packed copy of the old weights after a reload.
        if self.device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None
        self.store = None


def register() -> None:
    """Tell vLLM's factory of this backend; safe to call in every process, again and again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rlpost.weights.receiver", "CollectiveReceiver")


class WorkerExtension:
    """Methods that every vLLM worker gets beside its own (engine argument ``worker_extension_cls``)."""

    def weight_receipt(self) -> dict[str, Any]:
        """Fingerprint and tensor count of the last update on this worker."""
        return self.weight_transfer_engine.last_receipt  # type: ignore[attr-defined]


# A worker process of its own meets rlpost only by importing this module for WorkerExtension, so it registers here.
register()
