"""Every setting of a run: documented dataclasses, no logic. ``--help`` prints this file's words.

Each field is made by :func:`option`, so none can be without its one-sentence documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REQUIRED = "???"
"""OmegaConf's mark for a value that the user must give."""


def option(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its documentation and, for strings, the values it may take."""
    metadata = {"doc": doc, "choices": choices}
    if isinstance(default, (list, dict)) or callable(default):
        factory = default if callable(default) else (lambda: default.copy())
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelConfig:
    """The policy model."""

    path: str = option(
        REQUIRED, "Hugging Face directory or hub name of the model; `embedded:NAME` is built locally (see `python -m rlpost.models list`)."
    )
    dtype: str = option(
        "auto",
        "Dtype of the trainer's forward and of the engine: auto is float32 on CPU and bfloat16 on GPU.",
        ("auto", "float32", "bfloat16"),
    )
    chat_template: str | None = option(None, "File with a chat template that replaces the tokenizer's own.")
    trust_remote_code: bool = option(False, "Allow the model directory to bring Python code.")


@dataclass
class DataConfig:
    """Where prompts come from and how they are read."""

    train: str = option(
        REQUIRED, "Training prompts: a .jsonl or .parquet file, `hf:NAME[:SUBSET][:SPLIT]` for a Hugging Face data set, or `embedded:NAME`."
    )
    evaluation: str | None = option(None, "Held-out prompts in the same forms; needed when evaluation.every > 0.")
    prompt_field: str = option("prompt", "Column with the prompt: text, or a list of chat messages.")
    id_field: str | None = option(None, "Column with a unique id; null numbers the rows.")
    max_prompt_tokens: int = option(512, "Longest prompt in tokens.")
    overlong_prompts: str = option(
        "drop", "What happens to longer prompts: dropped and counted, or the run is refused.", ("drop", "refuse")
    )
    shuffle: bool = option(True, "Shuffle each epoch by the run's seed.")
    limit: int | None = option(None, "Use only the first N rows.")


@dataclass
class EnvironmentConfig:
    """What stands between the model's turns."""

    name: str = option("single_turn", "Catalogue name, `package.module:Class` or `file.py:Class`.")
    max_turns: int = option(8, "Turns after which an episode is truncated.")
    options: dict[str, Any] = option({}, "Keyword arguments of the environment's constructor.")
    timeout_s: float = option(60.0, "Deadline of one reset or step of the environment.")


@dataclass
class RewardConfig:
    """One reward function."""

    function: str = option(REQUIRED, "Built-in name, installed entry point, `package.module:function` or `file.py:function`.")
    name: str | None = option(None, "Name in the metrics (reward/NAME/mean); null takes the function's name.")
    weight: float = option(1.0, "Factor in the sum of all rewards.")
    options: dict[str, Any] = option({}, "Keyword arguments given to the function besides the row's fields.")


@dataclass
class RewardRunnerConfig:
    """How reward functions are run: in processes of their own, with deadlines."""

    workers: int = option(1, "Processes that run reward functions.")
    timeout_s: float = option(30.0, "Deadline of one call of one reward function.")
    max_failed_fraction: float = option(0.1, "The run stops when more than this share of the last 20 steps' trajectories failed.")


@dataclass
class AlgorithmConfig:
    """The learning algorithm."""

    name: str = option("grpo", "Catalogue name or `package.module:Class`.")
    group_size: int = option(8, "Samples per prompt.")
    advantage: str = option(
        "group_std",
        "Advantage of a sample: reward minus group mean, divided by the group's standard deviation (group_std) or not (group_mean).",
        ("group_std", "group_mean"),
    )
    clip_low: float = option(0.2, "Importance ratio is clipped below 1 - clip_low.")
    clip_high: float = option(0.2, "Importance ratio is clipped above 1 + clip_high.")
    loss_aggregation: str = option(
        "token_mean",
        "What the loss is a mean of: all tokens, the means of sequences, or token sums over max_new_tokens (constant).",
        ("token_mean", "sequence_mean", "constant"),
    )
    old_logprobs: str = option(
        "auto",
        "Denominator of the importance ratio: the current policy (ratio 1), the engine's logprobs, or a forward before the update; auto is current when on-policy with one minibatch, else recompute at staleness 0 and engine otherwise.",
        ("auto", "current", "engine", "recompute"),
    )
    minibatches: int = option(1, "Optimizer steps per batch.")
    kl_coefficient: float = option(0.0, "Weight of the KL to the reference model in the loss; 0 needs no reference model.")
    kl_estimator: str = option(
        "k3",
        "Estimator of that KL per token (Schulman 2020); k1 is not offered, for as a loss its gradient ignores the reference.",
        ("k2", "k3"),
    )
    reference: str = option(
        "initial",
        "Who computes reference logprobs: the trainer's own copy of the initial weights, or a model actor of its own.",
        ("initial", "actor"),
    )
    reference_path: str | None = option(None, "Model directory of the reference; null is model.path.")
    entropy_coefficient: float = option(0.0, "Weight of the entropy bonus.")
    skip_zero_variance: bool = option(False, "Leave groups whose rewards are all equal out of the denominators.")


@dataclass
class SamplingConfig:
    """How the engines sample for training."""

    temperature: float = option(1.0, "Softmax temperature; the trainer's logprobs use it too.")
    max_new_tokens: int = option(64, "Longest continuation of one turn in tokens.")
    seeded: bool = option(True, "Give each sample its own seed, so that a resumed run samples the same.")
    stop_token_ids: list[int] = option([], "Token ids that end a turn besides the model's own end tokens.")


@dataclass
class ScheduleConfig:
    """The loop."""

    steps: int = option(REQUIRED, "Training steps; one batch of prompts_per_step groups each.")
    prompts_per_step: int = option(32, "Groups per step.")
    max_staleness: int = option(0, "How many policy versions rollouts may run ahead; 0 is synchronous on-policy training.")
    rollout_timeout_s: float = option(1800.0, "Deadline for the next batch of rollouts.")
    phase_timeout_s: float = option(1800.0, "Deadline of an update, a sync or a checkpoint.")
    start_timeout_s: float = option(900.0, "Deadline for engines and trainers to come up.")


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = option(1.0e-6, "Peak learning rate.")
    beta1: float = option(0.9, "First moment's decay.")
    beta2: float = option(0.95, "Second moment's decay.")
    eps: float = option(1.0e-8, "Added to the root of the second moment.")
    weight_decay: float = option(0.0, "Decoupled weight decay, on matrices only.")
    clip_norm: float = option(1.0, "Largest global gradient norm; 0 does not clip.")
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up.")
    decay: str = option("constant", "Shape of the schedule after warm-up.", ("constant", "linear", "cosine"))
    final_ratio: float = option(0.1, "Learning rate at the last step as a share of the peak.")


@dataclass
class LoraConfig:
    """Low-rank adapters: only they are trained, the model stays as it is."""

    rank: int = option(0, "Rank of the adapters; 0 trains the model itself.")
    alpha: float = option(32.0, "The adapters' output is multiplied by alpha / rank.")
    targets: str = option(
        r"\.(q|k|v|o|gate|up|down)_proj$", "Regular expression of the linear layers that get one, by their names in the model."
    )
    sync: str = option(
        "adapter",
        "What engines get: the adapters alone, applied beside the model (adapter), or whole weights with the adapters merged in (merged).",
        ("adapter", "merged"),
    )


@dataclass
class TrainingConfig:
    """The trainer ranks."""

    backend: str = option("fsdp2", "How the model is sharded over ranks.", ("fsdp2",))
    ranks: int = option(1, "Trainer ranks (one GPU each on a GPU machine).")
    micro_batch_tokens: int = option(8192, "Most tokens in one forward; rows are packed up to it.")
    attention: str = option(
        "auto",
        "Attention over packed rows: padded (any device) or flash (variable-length kernels, GPU); auto is flash on a GPU in bfloat16 where flash_attn is installed.",
        ("auto", "padded", "flash"),
    )
    trainable: str = option("all", "`all`, or a regular expression of parameter names that are trained; others are frozen.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass.")
    reshard_after_forward: bool = option(True, "Free gathered parameters between forward and backward (ZeRO-3); false keeps them (ZeRO-2).")
    logprob_chunk_tokens: int = option(2048, "Tokens whose vocabulary logits are held at once.")
    threads: int = option(1, "CPU threads of a rank.")
    lora: LoraConfig = option(LoraConfig, "Low-rank adapters.")
    optimizer: OptimizerConfig = option(OptimizerConfig, "AdamW and its schedule.")


@dataclass
class EngineConfig:
    """The vLLM rollout engines."""

    count: int = option(1, "Engines; prompts are spread over them, a group stays on one.")
    tensor_parallel: int = option(1, "GPUs of one engine.")
    max_model_len: int | None = option(None, "Longest sequence; null derives it from the prompt and the turns.")
    max_num_seqs: int = option(256, "Sequences decoded together.")
    gpu_memory_utilization: float = option(0.85, "Share of a GPU's memory for weights and KV cache (GPU only).")
    kv_cache_mib: int = option(256, "KV cache of one engine in MiB (CPU only).")
    block_size: int = option(32, "Tokens of one KV block; the CPU build needs multiples of 32.")
    prefix_caching: bool = option(True, "Reuse the KV of equal prefixes.")
    process: str = option(
        "auto",
        "Where vLLM's core runs: in the actor (in_actor), or in processes of its own (separate); auto is in_actor on CPU.",
        ("auto", "in_actor", "separate"),
    )
    threads: int = option(1, "CPU threads of an engine.")
    request_timeout_s: float = option(900.0, "Deadline of one generation request.")
    max_restarts: int = option(2, "How often a dead engine is started again before the run stops.")
    extra: dict[str, Any] = option({}, "Further vLLM engine arguments, passed as they are.")


@dataclass
class WeightsConfig:
    """How new weights reach the engines."""

    transport: str = option(
        "auto",
        "How weights travel: broadcast (collective), memory shared on one machine or GPU (ipc), a shared directory (disk), or only what changed (delta); auto is ipc where engines and trainers share GPUs, else collective.",
        ("auto", "collective", "ipc", "disk", "delta"),
    )
    carrier: str = option(
        "auto", "With transport=delta: what carries deltas and full syncs; auto is collective.", ("auto", "collective", "ipc", "disk")
    )
    backend: str = option("auto", "Collective library: gloo on CPU, nccl on GPU (nccl: not run on a GPU yet).", ("auto", "gloo", "nccl"))
    bucket_mib: int = option(8, "Size of one buffer in MiB; two are held at each end.")
    directory: str | None = option(
        None, "With disk: a directory or fsspec URL that trainer and engines see; null is the run directory's weights/."
    )
    pause: str = option(
        "keep",
        "Running requests at a sync: frozen and continued with the new weights (keep), finished first (drain), or ended and continued from their tokens so far (abort).",
        ("keep", "drain", "abort"),
    )
    verify: str = option(
        "auto",
        "Which syncs are proven by a fingerprint over all parameters; auto is every delta, and of others the first and every verify_every-th.",
        ("auto", "every_sync", "every_n", "first"),
    )
    verify_every: int = option(20, "N of verify=every_n and auto.")
    keyframe_every: int = option(50, "With delta: deltas in a row before everything is sent again.")
    max_changed: float = option(0.5, "With delta: above this share of changed elements everything is sent instead.")
    max_consecutive_fallbacks: int = option(
        3,
        "How often in a row one engine may need a full sync of its own (it refused, was late or held something else) before the run stops.",
    )
    timeout_s: float = option(300.0, "Deadline of a sync, and of each step in it.")


@dataclass
class PlacementConfig:
    """Which resources the parts ask Ray for."""

    mode: str = option(
        "split",
        "split: engines and trainers have their own GPUs; colocated: they share them, phases never overlap.",
        ("split", "colocated"),
    )
    device: str = option("auto", "auto takes GPUs when this machine has them; set gpu when only the cluster does.", ("auto", "cpu", "gpu"))
    trainer_cpus: float = option(0.5, "CPUs that Ray reserves for a trainer rank.")
    engine_cpus: float = option(0.5, "CPUs that Ray reserves for an engine.")
    ray_address: str | None = option(None, "Ray cluster to join; null uses RAY_ADDRESS, else starts Ray here.")
    timeout_s: float = option(120.0, "Deadline for the cluster to grant the placement.")


@dataclass
class EvaluationConfig:
    """Periodic evaluation on held-out prompts, with its own sampling."""

    every: int = option(0, "Evaluate every N steps and at both ends; 0 never does.")
    prompts: int = option(64, "Prompts of one evaluation (the first N of data.evaluation).")
    samples: int = option(1, "Samples per prompt.")
    temperature: float = option(0.0, "Temperature; 0 is greedy.")
    top_p: float = option(1.0, "Nucleus sampling.")
    top_k: int = option(-1, "Top-k sampling; -1 is off.")
    max_new_tokens: int | None = option(None, "Longest continuation; null takes sampling.max_new_tokens.")


@dataclass
class CheckpointConfig:
    """What a resume needs, written atomically."""

    every: int = option(0, "Save every N steps; 0 saves only at the end.")
    keep: int = option(2, "Newest checkpoints that are kept.")
    at_end: bool = option(True, "Save after the last step.")
    max_restarts: int = option(
        1, "How often a run is started again by itself from its newest checkpoint after a trainer rank or node died."
    )


@dataclass
class ObserveConfig:
    """Metrics, trackers, rollouts on disk."""

    trackers: list[str] = option(["console", "jsonl"], "Any of console, jsonl, tensorboard, wandb.")
    wandb_project: str = option("rlpost", "Project name in wandb (offline: WANDB_MODE=offline).")
    rollouts: str = option("jsonl", "Format in which every trajectory is written.", ("jsonl", "parquet", "none"))
    rollouts_every: int = option(1, "Write the rollouts of every Nth step.")
    print_sample: bool = option(False, "Show one sample a step on the console.")


@dataclass
class RunConfig:
    """A whole run."""

    name: str = option("run", "Name of the run; part of its directory.")
    seed: int = option(0, "Seed of data order and sampling.")
    output_dir: str = option("runs", "Where run directories are made.")
    run_dir: str | None = option(None, "The run directory itself; null makes output_dir/NAME-DATE-TIME.")
    resume: str = option("never", "never, auto (the newest run of this name that has a complete checkpoint), or a run directory.")
    model: ModelConfig = option(ModelConfig, "The policy model.")
    data: DataConfig = option(DataConfig, "Prompts.")
    environment: EnvironmentConfig = option(EnvironmentConfig, "What stands between turns.")
    rewards: list[RewardConfig] = option([], "Reward functions; empty when the environment gives the reward.")
    reward_runner: RewardRunnerConfig = option(RewardRunnerConfig, "How reward functions are run.")
    algorithm: AlgorithmConfig = option(AlgorithmConfig, "The learning algorithm.")
    sampling: SamplingConfig = option(SamplingConfig, "How the engines sample for training.")
    schedule: ScheduleConfig = option(ScheduleConfig, "The loop.")
    training: TrainingConfig = option(TrainingConfig, "The trainer ranks.")
    engine: EngineConfig = option(EngineConfig, "The rollout engines.")
    weights: WeightsConfig = option(WeightsConfig, "How new weights reach the engines.")
    placement: PlacementConfig = option(PlacementConfig, "Which resources the parts ask for.")
    evaluation: EvaluationConfig = option(EvaluationConfig, "Evaluation on held-out prompts.")
    checkpoint: CheckpointConfig = option(CheckpointConfig, "Checkpoints.")
    observe: ObserveConfig = option(ObserveConfig, "Metrics, trackers, rollouts.")
