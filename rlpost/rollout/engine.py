"""The vLLM engine. An async class; Ray makes it an actor, tests call it directly.

Requests go in by ``submit`` and come out by ``collect`` (a long poll that returns all that finished since the last one), so
that thousands of episodes cost a handful of calls. Each sampled token carries its logprob, of the distribution it was
drawn from, and the policy version that vLLM itself stamped on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlpost.cluster.actor_logs import redirect_output
from rlpost.cluster.session import KEEP_FREED_MEMORY
from rlpost.types import GenerateRequest, GenerateResult, InfrastructureError, SyncAcknowledgement, WeightsManifest

UNDEFINED_VERSION = -1
"""Stamped on tokens that are sampled between a sync that broke off and the next one that succeeds."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What one engine needs to know; derived from the configuration by the driver."""

    name: str
    model_path: str
    dtype: str
    device: str
    in_actor: bool
    max_model_len: int
    max_num_seqs: int
    block_size: int
    prefix_caching: bool
    tensor_parallel: int = 1
    kv_cache_mib: int = 256
    gpu_memory_utilization: float = 0.85
    sleep_mode: bool = False
    threads: int = 1
    seed: int = 0
    trust_remote_code: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Environment of the engine's process; it must be set before vLLM or torch is imported."""
        common = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.device == "gpu":
            return common
        # Measured on CPU: more than one unbound thread an engine, or the hidden compile of logprob gathering, costs a factor ten.
        return {
            **common,
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **KEEP_FREED_MEMORY,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.in_actor else "1",
        }

    def arguments(self) -> dict[str, Any]:
        """vLLM's engine arguments."""
        arguments: dict[str, Any] = {
            "model": self.model_path,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "block_size": self.block_size,
            "enable_prefix_caching": self.prefix_caching,
            "tensor_parallel_size": self.tensor_parallel,
            "seed": self.seed,
            "trust_remote_code": self.trust_remote_code,
            # Temperature-scaled logprobs: those of the distribution that was sampled from.
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "rlpost.weights.receiver.WorkerExtension",
            "skip_tokenizer_init": True,
        }
        if self.device == "gpu":
            # Inside a placement group vLLM would start its workers as Ray actors, in other parts' bundles.
            executor = "uni" if self.tensor_parallel == 1 else "mp"
            arguments |= {
                "gpu_memory_utilization": self.gpu_memory_utilization,
                "enable_sleep_mode": self.sleep_mode,
                "distributed_executor_backend": executor,
            }
        else:
            # On CPU a seeded request and a partly scheduled prefill together kill the engine, hence no chunked prefill.
            arguments |= {
                "kv_cache_memory_bytes": self.kv_cache_mib << 20,
                "enforce_eager": True,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(self.max_model_len, 8192),
                "distributed_executor_backend": "uni" if self.tensor_parallel == 1 else "mp",
            }
        return arguments | self.extra


class VllmEngine:
    """One engine. ``start`` first; errors cross the boundary as rlpost's own, never as vLLM's."""

    def __init__(self, settings: EngineSettings) -> None:
        redirect_output()
        os.environ.update(settings.environment())
        self.settings = settings
        self.version = UNDEFINED_VERSION
        self.llm: Any = None
        self._staged = False
        self._finished: asyncio.Queue[tuple[str, GenerateResult | InfrastructureError]] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> dict[str, Any]:
        """Load vLLM and the model; returns what vLLM says of its capacity."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from rlpost.rollout.in_actor import make_async_llm
        from rlpost.weights import receiver

        receiver.register()
        arguments = AsyncEngineArgs(
            **self.settings.arguments(), weight_transfer_config=WeightTransferConfig(backend=receiver.BACKEND), disable_log_stats=True
        )
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        self.llm = make_async_llm(config) if self.settings.in_actor else AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        await self.llm.update_weight_version("0")
        self.version = 0
        cache = config.cache_config
        return {"kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size, "pid": os.getpid()}

    # ---- generation ------------------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Begin to generate; results come by :meth:`collect`, each request exactly once (unless it is aborted)."""
        for request in requests:
            self._running[request.request_id] = asyncio.create_task(self._generate(request))

    async def _generate(self, request: GenerateRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        try:
            parameters = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_token_ids) or None,
                seed=request.seed,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            stream = self.llm.generate({"prompt_token_ids": list(request.tokens)}, parameters, request.request_id)
            [output] = [final async for final in stream]
            self._finished.put_nowait((request.request_id, to_result(request, output)))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - vLLM's errors must not make the driver import vLLM
            failed = InfrastructureError(f"{self.settings.name}: request {request.request_id} failed: {type(error).__name__}: {error}")
            self._finished.put_nowait((request.request_id, failed))
        finally:
            self._running.pop(request.request_id, None)

    async def collect(self, timeout_s: float, linger_s: float = 0.005) -> list[tuple[str, GenerateResult | InfrastructureError]]:
        """What ended since the last call, by request id: a result, or why this one request could not be served.

        Waits up to ``timeout_s`` for the first, then ``linger_s`` for company. Raises InfrastructureError when the engine cannot
        generate any more.
        """
        try:
            items = [await asyncio.wait_for(self._finished.get(), timeout_s)]
            await asyncio.sleep(linger_s)
        except TimeoutError:
            items = []
        while not self._finished.empty():
            items.append(self._finished.get_nowait())
        if self.llm.errored:
            raise InfrastructureError(f"{self.settings.name}: vLLM's core is dead; its log says why")
        return items

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests; they give no result."""
        for request_id in request_ids:
            task = self._running.get(request_id)
            if task is not None:
                task.cancel()

    # ---- weights ---------------------------------------------------------------------------------------------------

    async def join_weights(self, host: str, port: int, first_rank: int, world: int, backend: str, timeout_s: float) -> None:
        """Enter the group that weights come through; blocks until all members did."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        from rlpost.weights.receiver import JoinInfo

        info = JoinInfo(host=host, port=port, first_rank=first_rank, world=world, backend=backend, timeout_s=timeout_s)
        await self._guarded(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=asdict(info))), "join_weights")

    async def stage_weights(self, manifest: WeightsManifest) -> SyncAcknowledgement:
        """Freeze running requests, receive and load all weights. Generation stays paused until commit or :meth:`resume`.

        Raises InfrastructureError when they do not come whole; then the next sync, over a new group, heals the engine.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        from rlpost.weights.receiver import ReceiveInfo

        info = ReceiveInfo(
            version=manifest.version,
            names=list(manifest.names),
            shapes=[list(shape) for shape in manifest.shapes],
            dtypes=list(manifest.dtypes),
            buckets=[list(bucket) for bucket in manifest.buckets],
        )
        # keep: frozen requests go on with the new weights. The cache is cleared with them, or their old KV would be used.
        await self._guarded(self.llm.pause_generation(mode="keep", clear_cache=True), "pause")
        # Half new weights are of no version: what is sampled before the next commit, if anything, is refused (see to_result).
        await self._guarded(self.llm.update_weight_version(str(UNDEFINED_VERSION)), "update_weight_version")
        if self._staged:  # by a sync that was not committed: what it brought is replaced
            await self._guarded(self.llm.finish_weight_update(), "finish_weight_update")
            self._staged = False
        await self._guarded(self.llm.start_weight_update(), "start_weight_update")
        await self._guarded(self.llm.update_weights(WeightTransferUpdateRequest(update_info=asdict(info))), "update_weights")
        self._staged = True
        receipts = await self._guarded(self.llm.collective_rpc("weight_receipt"), "weight_receipt")
        fingerprints = {receipt["fingerprint"] for receipt in receipts}
        if len(fingerprints) != 1:
            raise InfrastructureError(f"{self.settings.name}: its workers received different weights: {sorted(fingerprints)}")
        return SyncAcknowledgement(
            engine=self.settings.name,
            version=manifest.version,
            fingerprint=receipts[0]["fingerprint"],
            tensors=receipts[0]["tensors"],
            peak_memory_gib=await self.peak_memory_gib(),
        )

    async def commit_weights(self, version: int) -> None:
        """Make the staged weights the policy ``version`` and go on generating."""
        try:
            await self._guarded(self.llm.finish_weight_update(weight_version=str(version)), "finish_weight_update")
            self._staged = False
            self.version = version
        finally:
            await self.resume()

    async def resume(self) -> None:
        """Go on generating; harmless when nothing is paused."""
        await self._guarded(self.llm.resume_generation(), "resume")

    async def _guarded(self, awaitable: Any, what: str) -> Any:
        try:
            return await awaitable
        except InfrastructureError:
            raise
        except Exception as error:  # noqa: BLE001 - see _generate
            raise InfrastructureError(f"{self.settings.name}: {what} failed: {type(error).__name__}: {error}") from None

    # ---- memory and health -----------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Colocated: give GPU memory to the trainer (weights and KV are dropped). On CPU it only pauses."""
        await self._guarded(self.llm.sleep(level=2 if self.settings.device == "gpu" else 0, mode="keep"), "sleep")

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Undo :meth:`sleep`; on a GPU ``weights`` first, ``kv_cache`` after the weights have come."""
        chosen = list(tags) if tags and self.settings.device == "gpu" else (["scheduling"] if self.settings.device == "cpu" else None)
        await self._guarded(self.llm.wake_up(chosen), "wake")

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (tests and benchmarks)."""
        await self._guarded(self.llm.reset_prefix_cache(), "reset_prefix_cache")

    async def peak_memory_gib(self) -> float:
        """Peak resident memory of this process (CPU), or GPU memory in use by it, in GiB."""
        if self.settings.device == "gpu":
            import torch

            return torch.cuda.max_memory_allocated() / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    async def stop(self) -> None:
        """End the engine; bounded in time."""
        for task in list(self._running.values()):
            task.cancel()
        if self.llm is not None:
            with contextlib.suppress(Exception):
                self.llm.shutdown(timeout=5.0)


def to_result(request: GenerateRequest, output: Any) -> GenerateResult:
    """vLLM's output as our record. A logprob that vLLM cannot give becomes NaN, which is neutral in the loss."""
    completion = output.outputs[0]
    tokens = np.asarray(completion.token_ids, dtype=np.int32)
    logprobs = np.full(len(tokens), np.nan, np.float32)
    for position, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs or (), strict=False)):
        value = entry[token].logprob if token in entry else None
        logprobs[position] = np.nan if value is None else value
    versions = np.full(len(tokens), -1, np.int32)
    for span in completion.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if len(tokens) and versions.min() < 0:
        raise InfrastructureError(
            f"request {request.request_id}: some of its tokens are of no policy version (a weight sync broke off): "
            f"{completion.weight_versions}"
        )
    reason = completion.finish_reason
    return GenerateResult(
        request_id=request.request_id,
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        finish_reason=reason if reason in ("stop", "length") else "abort",
        prompt_tokens=len(request.tokens),
        cached_tokens=int(output.num_cached_tokens or 0),
    )
