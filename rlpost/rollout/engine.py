"""The vLLM engine. An async class; Ray makes it an actor, tests call it directly.

Requests go in by ``submit`` and come out by ``collect`` (a long poll that returns all that finished since the last one), so
that thousands of episodes cost a handful of calls. Each sampled token carries its logprob, of the distribution it was
drawn from, and the policy version that vLLM itself stamped on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlpost.cluster.actor_process import settle
from rlpost.cluster.node_network import use_node_network
from rlpost.cluster.session import KEEP_FREED_MEMORY
from rlpost.types import (
    GenerateRequest,
    GenerateResult,
    InfrastructureError,
    SyncAcknowledgement,
    SyncPlan,
    SyncRefusedError,
    WeightsManifest,
)
from rlpost.weights.links import LinkSettings

UNDEFINED_VERSION = -1
"""Stamped on tokens that are sampled between a sync that broke off and the next one that succeeds."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's adapter buffers."""

ABORT_POLL_S = 0.002
"""How often requests that a pause is to end are looked for."""

STAGE_POLL_S = 0.005
"""How often the actor asks its workers whether a staged message has come."""


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
    lora_rank: int = 0
    """Rank of the LoRA adapter that comes from the trainer; 0 has none."""
    pause: str = "keep"
    """What a weight sync does to running requests: ``keep``, ``drain`` or ``abort``."""
    live_weights: bool = True
    """On a CPU: compute with the parameters as they are; false lets vLLM pack them (see weights/receiver.py)."""
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
            "RLPOST_LIVE_WEIGHTS": "1" if self.live_weights else "0",
            "VLLM_ZENTORCH_WEIGHT_PREPACK": "0" if self.live_weights else "1",
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
        if self.lora_rank:
            most = next((rank for rank in LORA_RANKS if rank >= self.lora_rank), self.lora_rank)
            arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": most}
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
        settle()
        os.environ.update(settings.environment())
        use_node_network()
        self.settings = settings
        self.version = UNDEFINED_VERSION
        self.llm: Any = None
        self._open = asyncio.Event()
        """Cleared while a drain lets no new request in."""
        self._open.set()
        self._inside: set[str] = set()
        """Requests that vLLM works on."""
        self._emptied = asyncio.Event()
        self._paused_at: float | None = None
        self._syncing = asyncio.Lock()
        """One step of a weight sync at a time: one that the driver gave up may still be at work."""
        self._adapter: Any = None
        """vLLM's request for the adapter, once it came."""
        self._finished: asyncio.Queue[tuple[str, GenerateResult | InfrastructureError]] = asyncio.Queue()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> dict[str, Any]:
        """Load vLLM and the model; returns what vLLM says of its capacity."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        from rlpost.models.embedded import check_here
        from rlpost.rollout.in_actor import make_async_llm

        check_here(self.settings.model_path)
        arguments = AsyncEngineArgs(**self.settings.arguments(), disable_log_stats=True)
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
        try:
            result = await self._sample(request, attempt=0)
            while result.finish_reason == "abort":  # a sync ended it: what is sampled so far is the prefix of the rest
                result = await self._continue(request, result)
            self._finished.put_nowait((request.request_id, result))
        except asyncio.CancelledError:
            raise
        except InfrastructureError as error:
            self._finished.put_nowait((request.request_id, error))
        except Exception as error:  # noqa: BLE001 - vLLM's errors must not make the driver import vLLM
            failed = InfrastructureError(f"{self.settings.name}: request {request.request_id} failed: {type(error).__name__}: {error}")
            self._finished.put_nowait((request.request_id, failed))
        finally:
            self._running.pop(request.request_id, None)

    async def _continue(self, request: GenerateRequest, so_far: GenerateResult) -> GenerateResult:
        """Sample the rest of an aborted request, and join it to what there is."""
        sampled = len(so_far.tokens)
        rest = replace(
            request,
            tokens=[*request.tokens, *so_far.tokens.tolist()],
            sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - sampled),
            # The same seed would draw the same random numbers again, for other tokens.
            seed=None if request.seed is None else (request.seed + 104729 * sampled) % (1 << 31),
        )
        more = await self._sample(rest, attempt=sampled)
        return replace(
            so_far,
            tokens=np.concatenate([so_far.tokens, more.tokens]),
            logprobs=np.concatenate([so_far.logprobs, more.logprobs]),
            versions=np.concatenate([so_far.versions, more.versions]),
            finish_reason=more.finish_reason,
        )

    async def _sample(self, request: GenerateRequest, attempt: int) -> GenerateResult:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
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
        await self._open.wait()
        name = f"{request.request_id}~{attempt}"
        self._inside.add(name)
        try:
            if self.settings.lora_rank and self._adapter is None:
                raise InfrastructureError(f"{self.settings.name} has no adapter yet: the bare model must not sample")
            stream = self.llm.generate({"prompt_token_ids": list(request.tokens)}, parameters, name, lora_request=self._adapter)
            [output] = [final async for final in stream]
        finally:
            self._inside.discard(name)
            if not self._inside:
                self._emptied.set()
        return to_result(request, output)

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

    async def describe_weights(self, manifest: WeightsManifest) -> list[dict[str, Any]]:
        """For each worker: which parts of the tensors it holds (``layout``), and what it can prove (``live`` or ``received``)."""
        return await self._workers("describe", manifest)

    async def enter_link(self, settings: LinkSettings, first_rank: int) -> None:
        """Join a link that weights come through; blocks until all its members did."""
        await self._workers("enter", settings, first_rank)

    async def leave_link(self, name: str) -> None:
        """Give a link up."""
        await self._workers("leave", name)

    async def stage_weights(self, plan: SyncPlan) -> None:
        """Receive and check a delta while generation goes on. Raises SyncRefusedError; the present weights then stay as they are."""
        async with self._syncing:
            # Also a message that is refused is received: others on the link wait until everybody has it.
            await self._workers("begin_stage", plan)
            while not all(await self._workers("stage_done")):  # noqa: ASYNC110 - workers can only be asked
                await asyncio.sleep(STAGE_POLL_S)
            self._check_base(plan)

    async def apply_weights(self, plan: SyncPlan) -> SyncAcknowledgement:
        """Pause generation and bring the plan's weights in. It stays paused until :meth:`commit_weights` or :meth:`resume`.

        Raises SyncRefusedError when they do not come whole; then the weights are of no version until a full sync heals the engine.
        """
        async with self._syncing:
            try:
                self._check_base(plan)
            except SyncRefusedError:
                if plan.mode == "trained":
                    await self._workers("skip", plan)
                raise
            await self._guarded(self._pause(), "pause")
            # Half new weights are of no version: what is sampled before the next commit, if anything, is refused (see to_result).
            self.version = UNDEFINED_VERSION
            await self._guarded(self.llm.update_weight_version(str(UNDEFINED_VERSION)), "update_weight_version")
            receipts = await self._workers("apply", plan)
            if plan.mode == "adapter" and self._adapter is None:
                from vllm.lora.request import LoRARequest

                from rlpost.weights.engine_adapters import ADAPTER_ID, ADAPTER_NAME

                self._adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, "it is loaded already")
        return SyncAcknowledgement(
            engine=self.settings.name,
            version=plan.version,
            fingerprints=tuple(receipt["fingerprint"] for receipt in receipts) if plan.verify else (),
            tensors=min(receipt["tensors"] for receipt in receipts),
            apply_s=max(receipt["apply_s"] for receipt in receipts),
            peak_memory_gib=await self.peak_memory_gib(),
        )

    async def commit_weights(self, version: int) -> float:
        """Make what was applied the policy ``version`` and go on generating. Returns the seconds of the pause."""
        async with self._syncing:
            try:
                await self._guarded(self.llm.update_weight_version(str(version)), "update_weight_version")
                self.version = version
            finally:
                paused_s = await self.resume()
            return paused_s

    async def tensor_sums(self) -> list[dict[str, int]]:
        """For each worker: every tensor's part in its last fingerprint."""
        return await self._workers("tensor_sums")

    def _check_base(self, plan: SyncPlan) -> None:
        # A plan that was applied already may come again: its values are absolute.
        if plan.mode != "full" and self.version not in (plan.base_version, plan.version):
            has = "weights of no version" if self.version == UNDEFINED_VERSION else f"version {self.version}"
            raise SyncRefusedError(
                "wrong_base",
                f"{self.settings.name} has {has}; the {plan.mode} to version {plan.version} is for version {plan.base_version}",
            )

    async def drain(self) -> None:
        """Let running requests finish and no new one in, until the sync is committed or :meth:`resume`."""
        self._open.clear()
        await self._until_empty()

    async def _pause(self) -> None:
        """Stop sampling as ``settings.pause`` says, and forget all KV of the old weights."""
        mode = self.settings.pause
        if mode == "drain":
            await self.drain()
        elif mode == "abort":
            self._open.clear()
        self._paused_at = self._paused_at or time.perf_counter()
        # Not AsyncLLM.pause_generation, which then waits 20 ms for the look of it. Frozen requests go on with the new weights;
        # without clearing the cache they would go on with old KV.
        await self.llm.engine_core.pause_scheduler_async("keep", True)
        while mode == "abort" and self._inside:
            # Again and again: one that is just being handed over is not known to vLLM yet.
            await self.llm.abort(list(self._inside))
            await asyncio.sleep(ABORT_POLL_S)

    async def _until_empty(self) -> None:
        while self._inside:
            self._emptied.clear()
            await self._emptied.wait()

    async def resume(self) -> float:
        """Go on generating; harmless when nothing is paused. Returns the seconds of the pause."""
        self._open.set()
        await self._guarded(self.llm.resume_generation(), "resume")
        paused_s = time.perf_counter() - self._paused_at if self._paused_at is not None else 0.0
        self._paused_at = None
        return paused_s

    async def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every worker's WeightReceiver; raises the first error with this engine's name."""
        call = self.llm.collective_rpc("weights", args=(method, pickle.dumps(arguments)))
        answers = [pickle.loads(answer) for answer in await self._guarded(call, method)]
        for answer in answers:
            if isinstance(answer, SyncRefusedError):
                raise SyncRefusedError(answer.reason, f"{self.settings.name}: {method} failed: {answer}")
        return answers

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
