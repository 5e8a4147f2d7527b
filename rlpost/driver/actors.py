"""What each actor is told: its settings, and what it asks Ray for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpost.cluster import actor_process
from rlpost.cluster.placement import Gang
from rlpost.cluster.session import KEEP_FREED_MEMORY
from rlpost.config.derive import Derived
from rlpost.config.schema import LoraConfig, RunConfig
from rlpost.rollout.engine import EngineSettings
from rlpost.training.protocol import Head, WorkerSettings
from rlpost.weights.policy import SyncSettings

TRAINER_REFERENCES = ("initial", "adapters_off", "moving_average")
"""Values of algorithm.reference that the trainer's own ranks answer for."""


def worker_settings(
    config: RunConfig, derived: Derived, model_path: str, *, head: Head = "logprob", reference_path: str | None = None
) -> WorkerSettings:
    """Settings of a trainer rank. Steps in which only the critic learns are none of its optimizer steps."""
    algorithm = config.algorithm
    alone = algorithm.critic.warmup_steps * algorithm.minibatches * algorithm.epochs if derived.critic_ranks else 0
    return WorkerSettings(
        model_path=model_path,
        training=config.training,
        head=head,
        dtype=derived.dtype,
        device=derived.device,
        attention=derived.attention,
        total_updates=derived.optimizer_steps - alone,
        seed=config.seed,
        timeout_s=config.schedule.phase_timeout_s,
        trust_remote_code=config.model.trust_remote_code,
        reference_mode=derived.reference if derived.reference in TRAINER_REFERENCES else "none",  # type: ignore[arg-type]
        reference_path=reference_path,
        reference_decay=config.algorithm.reference_decay,
    )


def critic_settings(config: RunConfig, derived: Derived, critic_path: str) -> WorkerSettings:
    """Settings of a critic's rank: those of the trainer, with a value head, no adapters and a learning rate of its own."""
    critic = config.algorithm.critic
    training = replace(config.training, ranks=critic.ranks, lora=LoraConfig(), trainable="all")
    if critic.lr is not None:
        training = replace(training, optimizer=replace(training.optimizer, lr=critic.lr))
    settings = worker_settings(config, derived, critic_path, head="value")
    return replace(settings, training=training, total_updates=derived.optimizer_steps, reference_mode="none")


def forward_settings(config: RunConfig, derived: Derived, model_path: str, *, head: Head = "logprob") -> WorkerSettings:
    """Settings of a model that is only asked: a reference, a reward model."""
    settings = worker_settings(config, derived, model_path, head=head)
    training = replace(config.training, ranks=1, lora=LoraConfig(), trainable="all")
    return replace(settings, training=training, total_updates=None, reference_mode="none")


def engine_settings(config: RunConfig, derived: Derived, model_path: str, index: int) -> EngineSettings:
    """Settings of engine ``index``."""
    engine = config.engine
    return EngineSettings(
        name=f"engine-{index}",
        model_path=model_path,
        dtype=derived.dtype,
        device=derived.device,
        in_actor=derived.engine_process == "in_actor",
        max_model_len=derived.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        block_size=engine.block_size,
        prefix_caching=engine.prefix_caching,
        tensor_parallel=engine.tensor_parallel,
        kv_cache_mib=engine.kv_cache_mib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        sleep_mode=config.placement.mode == "colocated",
        threads=engine.threads,
        seed=config.seed,
        trust_remote_code=config.model.trust_remote_code,
        lora_rank=config.training.lora.rank if config.training.lora.sync == "adapter" else 0,
        pause=config.weights.pause,
        extra=dict(engine.extra),
    )


def _environment(run_dir: Path, name: str, variables: dict[str, str]) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": {**variables, **actor_process.variables(run_dir / "logs" / f"{name}.log")}}}


def bundle_of(derived: Derived, role: str, index: int) -> int:
    """Where a part's bundle stands; colocated trainer ranks and engines share theirs."""
    places = [place for place, bundle in enumerate(derived.bundles) if (bundle.role, bundle.index) == (role, index)]
    return places[0]


def trainer_options(config: RunConfig, derived: Derived, gang: Gang, rank: int, run_dir: Path, role: str = "trainer") -> dict[str, Any]:
    """Ray options of a trainer rank, or of a rank of another model (``role`` reference, critic, reward)."""
    shared = role == "trainer" and derived.device == "gpu" and config.placement.mode == "colocated" and not derived.offline
    bundle = bundle_of(derived, "colocated", rank // config.engine.tensor_parallel) if shared else bundle_of(derived, role, rank)
    gpus = {} if derived.device == "cpu" else {"num_gpus": 0.5 if shared else 1}
    variables = {"OMP_NUM_THREADS": str(config.training.threads), "TOKENIZERS_PARALLELISM": "false"}
    if derived.device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", **KEEP_FREED_MEMORY}
    return {
        **gang.options(bundle, num_cpus=config.placement.trainer_cpus, **gpus),
        **_environment(run_dir, f"{role}-{rank}", variables),
    }


def engine_options(config: RunConfig, derived: Derived, model_path: str, gang: Gang, index: int, run_dir: Path) -> dict[str, Any]:
    """Ray options of an engine."""
    shared = derived.device == "gpu" and config.placement.mode == "colocated"
    bundle = bundle_of(derived, "colocated" if shared else "engine", index)
    gpus = {} if derived.device == "cpu" else {"num_gpus": 0.5 if shared else config.engine.tensor_parallel}
    variables = engine_settings(config, derived, model_path, index).environment()
    return {**gang.options(bundle, num_cpus=config.placement.engine_cpus, **gpus), **_environment(run_dir, f"engine-{index}", variables)}


def sync_settings(config: RunConfig, derived: Derived, model_path: str, run_dir: Path) -> SyncSettings:
    """How weights reach the engines."""
    weights = config.weights
    return SyncSettings(
        carrier=derived.weight_carrier,
        deltas=derived.weight_deltas,
        adapters=config.training.lora.rank > 0 and config.training.lora.sync == "adapter",
        engine_dtype=derived.dtype,
        bucket_bytes=weights.bucket_mib << 20,
        timeout_s=weights.timeout_s,
        drain_s=config.engine.request_timeout_s if weights.pause == "drain" else 0.0,
        backend=derived.weight_backend,
        directory=weights.directory or str((run_dir / "weights").absolute()),
        model_path=model_path,
        verify=weights.verify,
        verify_every=weights.verify_every,
        keyframe_every=weights.keyframe_every,
        max_changed=weights.max_changed,
        max_consecutive_fallbacks=weights.max_consecutive_fallbacks,
        shared_gpu=derived.device == "gpu" and config.placement.mode == "colocated",
    )
