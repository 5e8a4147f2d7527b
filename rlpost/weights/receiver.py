"""The engine's end of a weight sync, inside a vLLM worker: links in, live parameters out, and the proof of what they hold.

    enter       join a link
    stage       receive a delta's message in the background and check it, while generation goes on
    apply       (engine paused) write all that came; hash the live parameters
Two targets: LiveTarget writes in place (layout.py learns where) and proves the live bits; ReloadTarget goes through vLLM's layerwise
reload, for engines that keep their weights in another form, and can only prove what it received.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load

from rlpost.types import Layout, SyncPlan, SyncRefusedError, WeightsManifest
from rlpost.weights import delta
from rlpost.weights.buckets import Bucket, Piece, piece_bytes, plan_buckets, row_elements, rows_of
from rlpost.weights.engine_adapters import install_adapter, without_adapters
from rlpost.weights.fingerprint import TensorHashes
from rlpost.weights.layout import LiveWeights, NotInPlaceError, find_places
from rlpost.weights.links import Inlet, LinkSettings, carrier

LIVE_WEIGHTS = "RLPOST_LIVE_WEIGHTS"
"""Environment variable: 0 lets vLLM pack its weights on a CPU (4 % faster at 25 M parameters), which then cannot be read or patched."""


class LiveTarget:
    """Writes into the live parameters and reads them back."""

    proof = "live"

    def __init__(self, live: LiveWeights) -> None:
        self._live = live
        self.layout: Layout = live.layout

    def begin(self) -> None:
        """Nothing to prepare."""

    def memory(self, piece: Piece) -> torch.Tensor | None:
        """Where a piece belongs, as bytes, if it can be received right there."""
        return self._live.memory(piece.tensor, piece.start, piece.stop)

    def write(self, piece: Piece, rows: torch.Tensor) -> None:
        """Put rows in place, unless they were received there."""
        memory = self.memory(piece)
        if memory is None or memory.data_ptr() != rows.data_ptr():
            self._live.write(piece.tensor, piece.start, rows)

    def patch(self, changes: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Overwrite single elements: tensor, flat indices, bits."""
        for tensor, indices, values in changes:
            self._live.patch(tensor, indices, values)

    def finish(self) -> None:
        """Nothing is left behind."""

    def abandon(self) -> None:
        """Half new weights can be overwritten as they are."""

    def sums(self) -> dict[str, int]:
        """Hashes of the live parameters."""
        return self._live.sums()


class ReloadTarget:
    """Collects whole tensors and gives them to vLLM's layerwise reload, which rebuilds each layer's own form of them."""

    proof = "received"

    def __init__(self, manifest: WeightsManifest, model: Any, model_config: Any, why: str) -> None:
        self._manifest, self._model, self._model_config, self.why = manifest, model, model_config, why
        self.layout: Layout = (None,) * len(manifest.names)
        # Listed before a reload begins: tied parameters are one tensor here, and two placeholders during it.
        self._expected = [name for name, _ in model.named_parameters()]
        self._loaded: set[str] = set()
        self._parts: dict[int, tuple[torch.Tensor, int]] = {}
        self._hashes = TensorHashes(manifest)

    def memory(self, piece: Piece) -> torch.Tensor | None:
        """Nowhere: the layers take whole tensors."""
        return None

    def begin(self) -> None:
        """Begin the reload: layers collect their new weights and are rebuilt in place."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._loaded, self._parts, self._hashes = set(), {}, TensorHashes(self._manifest)
        initialize_layerwise_reload(self._model)

    def write(self, piece: Piece, rows: torch.Tensor) -> None:
        """Keep rows until their tensor is whole, then load it."""
        shape = self._manifest.shapes[piece.tensor]
        self._hashes.add(piece.tensor, piece.owner, piece.start, rows)
        tensor, count = self._parts.pop(piece.tensor, (None, 0))
        if tensor is None:
            tensor = torch.empty(shape or (1,), dtype=rows.dtype, device=rows.device)
        tensor[piece.start : piece.stop] = rows
        count += piece.stop - piece.start
        if count < rows_of(shape):
            self._parts[piece.tensor] = (tensor, count)
        else:
            name = self._manifest.names[piece.tensor]
            try:
                self._loaded |= self._model.load_weights([(name, tensor.view(shape))]) or set()
            except Exception as error:
                raise SyncRefusedError("broken", f"{name} {shape} cannot be loaded: {type(error).__name__}: {error}") from error

    def patch(self, changes: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        """Not possible here."""
        raise SyncRefusedError("not_in_place", f"single elements cannot be patched: {self.why}")

    def finish(self) -> None:
        """End the reload. Raises SyncRefusedError naming parameters that never came."""
        missing = [name for name in self._expected if name not in self._loaded] + self._missing_parts(set(self._manifest.names))
        if missing:
            self.abandon()
            raise SyncRefusedError("missing", f"{len(missing)} parameters never came: {missing[:5]}")
        self._finalize()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)
        self._renew_tied_output_layer()

    def _missing_parts(self, names: set[str]) -> list[str]:
        """Parts of fused parameters (query of query-key-value, say) that did not come although another part of the same did."""
        fused: dict[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        missing: list[str] = []
        for name in self._expected:
            for fused_name, parts in fused.items():
                pieces = [name.replace(f".{fused_name}.", f".{part}.") for part in parts] if f".{fused_name}." in name else []
                absent = [piece for piece in pieces if piece not in names]
                missing += absent if len(absent) < len(pieces) else []
        return missing

    def abandon(self) -> None:
        """After half an update: a model that can run and be updated again (its weights are of no version).

        Without it layers would stay without storage, and what they have collected would be taken for a part of the next update.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        self._finalize()

    def _renew_tied_output_layer(self) -> None:
        # On CPU an output layer tied to the embedding keeps a packed copy of the old weights after a reload.
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        for module in self._model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def sums(self) -> dict[str, int]:
        """Hashes of what the last update received."""
        self._hashes.total()
        return self._hashes.sums


@dataclass
class _Stage:
    """A message on its way or here. One that was given up may still be written to by its thread; nobody reads it then."""

    version: int
    changes: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None
    adapter: dict[str, torch.Tensor] | None = None
    failure: Exception | None = None
    thread: threading.Thread | None = None


class WeightReceiver:
    """One worker's end: its links, what is staged, and the target."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._model, self._model_config = worker.model_runner.model, worker.model_runner.model_config
        self._device, self._rank = worker.device, worker.parallel_config.rank
        self._links: dict[str, Inlet] = {}
        self._manifest: WeightsManifest | None = None
        self._target: LiveTarget | ReloadTarget | None = None
        self._stage: _Stage | None = None
        self._sums: dict[str, int] = {}

    def describe(self, manifest: WeightsManifest) -> dict[str, Any]:
        """Learn where the manifest's tensors live; returns this worker's layout and what it can prove."""
        self._manifest = manifest
        try:
            with without_adapters(self._model):
                check_live(self._model, self._device)
                parameters = dict(self._model.named_parameters())
                places = find_places(manifest, parameters, self._model.load_weights)
            self._target = LiveTarget(LiveWeights(manifest, dict(parameters), places))
        except NotInPlaceError as error:
            self._target = ReloadTarget(manifest, self._model, self._model_config, str(error))
        return {"layout": self._target.layout, "proof": self._target.proof, "why": getattr(self._target, "why", "")}

    def enter(self, settings: LinkSettings, first_rank: int) -> None:
        """Join a link as member ``first_rank`` plus this worker's own rank; a former one of its name is given up."""
        self.leave(settings.name)
        self._links[settings.name] = carrier(settings.carrier).enter(replace(settings, rank=first_rank + self._rank), self._device)

    def leave(self, name: str) -> None:
        """Give up a link."""
        link = self._links.pop(name, None)
        if link is not None:
            link.close()

    def _link(self, plan: SyncPlan) -> Inlet:
        if plan.link not in self._links:
            raise SyncRefusedError("broken", f"the link {plan.link!r} was not joined before this sync")
        return self._links[plan.link]

    # ---- stage -----------------------------------------------------------------------------------------------------

    def begin_stage(self, plan: SyncPlan) -> None:
        """Receive and decode the plan's message on a thread, beside generation."""
        stage = self._stage = _Stage(plan.version)

        def run() -> None:
            try:
                [message] = [m.clone() for m in self._link(plan).stream(plan, self._known(), (), (plan.message_bytes,))]
                if plan.mode == "adapter":
                    stage.adapter = load(message.cpu().numpy().tobytes())
                else:
                    stage.changes = self._decode(message)
            except Exception as error:  # noqa: BLE001 - raised where the stage is waited for
                stage.failure = error

        stage.thread = threading.Thread(target=run, name="weights-stage", daemon=True)
        stage.thread.start()

    def stage_done(self) -> bool:
        """True when the stage ended well; raises what ended it otherwise."""
        assert self._stage is not None and self._stage.thread is not None, "begin_stage() comes first"
        if self._stage.thread.is_alive():
            return False
        if self._stage.failure is not None:
            raise self._stage.failure
        return True

    def _known(self) -> WeightsManifest:
        assert self._manifest is not None, "describe() comes first"
        return self._manifest

    def _decode(self, message: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        manifest = self._known()
        try:
            changes = [c for part in delta.split(message.cpu().numpy().data) for c in delta.decode(part)]
        except delta.CorruptDeltaError as error:
            raise SyncRefusedError("corrupt", f"the delta that came is damaged: {error}") from error
        staged = []
        for change in changes:
            known = change.tensor < len(manifest.names) and row_elements((1, *manifest.shapes[change.tensor])) == change.numel
            if not known:
                raise SyncRefusedError("corrupt", f"the delta's tensor {change.tensor} of {change.numel} elements is not in the manifest")
            values = torch.from_numpy(change.values.view(f"i{change.values.itemsize}" if change.values.itemsize > 1 else "u1"))
            # As 64-bit integers, which is what an index must be: converted here, while generation goes on.
            staged.append((change.tensor, torch.from_numpy(change.indices).long().to(self._device), values.to(self._device)))
        return staged

    # ---- apply -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, plan: SyncPlan) -> dict[str, Any]:
        """Bring the plan's weights in; the engine is paused. Returns the proof.

        Raises SyncRefusedError; then the weights are of no version until the next full sync.
        """
        started = time.perf_counter()
        adapter_sums: dict[str, int] = {}
        target = self._target
        assert target is not None, "describe() comes first"
        if plan.mode in ("delta", "adapter"):
            stage, self._stage = self._stage, None
            if stage is None or stage.version != plan.version or (stage.changes is None and stage.adapter is None):
                raise SyncRefusedError("broken", f"nothing is staged for version {plan.version}")
            if stage.changes is not None:
                target.patch(stage.changes)
            if stage.adapter is not None:
                adapter_sums = install_adapter(self._worker, stage.adapter)
        else:
            self._load(target, plan)
        self._sums = {**target.sums(), **adapter_sums} if plan.verify else {}
        total = sum(self._sums.values()) % (1 << 128)
        return {
            "fingerprint": f"{total:032x}" if plan.verify else "",
            "tensors": len(self._known().names),
            "apply_s": time.perf_counter() - started,
        }

    def _load(self, target: LiveTarget | ReloadTarget, plan: SyncPlan) -> None:
        """Write all pieces. One that cannot be written does not end the stream: other engines may be on the same link."""
        target.begin()
        failure: Exception | None = None
        try:
            for piece, rows in self._pieces(plan, target):
                if failure is None:
                    try:
                        target.write(piece, rows)
                    except Exception as error:  # noqa: BLE001 - raised when the stream has ended
                        failure = error
            if failure is not None:
                raise failure
        except BaseException:
            target.abandon()
            raise
        target.finish()

    def skip(self, plan: SyncPlan) -> None:
        """Receive the plan's weights and throw them away: this engine refuses them, others on the link want them."""
        for _ in self._pieces(plan):
            pass

    def _pieces(self, plan: SyncPlan, target: LiveTarget | ReloadTarget | None = None) -> Iterator[tuple[Piece, torch.Tensor]]:
        manifest = self._known()
        buckets: tuple[Bucket, ...] = plan_buckets(manifest, trained_only=plan.mode == "trained")
        try:

            def place(number: int) -> torch.Tensor | None:
                pieces = buckets[number].pieces
                memory = target.memory(pieces[0]) if target is not None and len(pieces) == 1 else None
                return memory if memory is not None and memory.numel() == buckets[number].size else None

            stream = self._link(plan).stream(plan, manifest, buckets, [bucket.size for bucket in buckets], place)
            for bucket, buffer in zip(buckets, stream, strict=True):
                for piece in bucket.pieces:
                    flat = buffer[piece.offset : piece.offset + piece_bytes(manifest, piece)]
                    dtype = getattr(torch, manifest.dtypes[piece.tensor])
                    yield piece, flat.view(dtype).view(piece.stop - piece.start, *manifest.shapes[piece.tensor][1:])
        except BaseException:
            self.leave(plan.link)
            raise

    def tensor_sums(self) -> dict[str, int]:
        """Each tensor's part in the last fingerprint."""
        return self._sums


def check_live(model: Any, device: torch.device) -> None:
    """Raises NotInPlaceError when a layer computes with another form of its weights than its parameters: a write would not reach it."""
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        plain = type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) or type(method).__name__.endswith("KVCacheMethod")
        if isinstance(method, QuantizeMethodBase) and not plain:
            raise NotInPlaceError(f"{name} is computed by {type(method).__name__}, which may keep another form of its weights")
        if is_deferred_attention_layer(module) and not isinstance(module, Attention):
            raise NotInPlaceError(f"{name} ({type(module).__name__}) derives weights of its own")
        # vLLM's CPU layers call a function that either gets the live weight or holds a packed copy of it.
        if device.type == "cpu" and getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            raise NotInPlaceError(f"{name} holds its weights packed")


class WorkerExtension:
    """Methods that every vLLM worker gets beside its own (engine argument ``worker_extension_cls``)."""

    def weights(self, method: str, arguments: bytes) -> bytes:
        """Call a method of this worker's WeightReceiver; arguments and result are pickled, errors come back as values."""
        try:
            receiver = getattr(self, "_rlpost_receiver", None)
            if receiver is None:
                receiver = self._rlpost_receiver = WeightReceiver(self)
            return pickle.dumps(getattr(receiver, method)(*pickle.loads(arguments)))
        except SyncRefusedError as error:
            return pickle.dumps(error)
        except Exception as error:  # noqa: BLE001 - a broken link, a loader that refuses: the engine's weights are to be renewed
            return pickle.dumps(SyncRefusedError("broken", f"{type(error).__name__}: {error}"))


def keep_weights_live() -> None:
    """Let vLLM compute with its parameters as they are, also on a CPU: what is written there takes effect, what is read is what counts."""
    if os.environ.get(LIVE_WEIGHTS, "1") == "0":
        return
    import vllm._custom_ops as operations
    from vllm.model_executor.layers import utils

    operations._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False  # the other kernel that packs: bfloat16 on processors with AMX


# A worker process of its own meets rlpost only by importing this module for WorkerExtension.
keep_weights_live()
