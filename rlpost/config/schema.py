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
    chosen_field: str = option("chosen", "Offline: column with the preferred answer: text, messages, or the whole conversation.")
    rejected_field: str = option("rejected", "Offline: column with the refused answer, in the same forms.")
    completion_field: str = option("completion", "Offline: column with the answer (sft, kto).")
    messages_field: str = option("messages", "sft: column with whole conversations, for rows that have no prompt.")
    label_field: str = option("label", "kto: column that says whether the answer is wanted.")
    margin_field: str = option(
        "margin", "reward_model: column with the margin of a pair; rows without it have algorithm.preference.margin."
    )
    train_on: str = option(
        "assistant",
        "sft: tokens that are trained: all assistant turns (assistant), the last one (completion), or every token (all).",
        ("assistant", "completion", "all"),
    )
    max_tokens: int = option(1024, "Offline: longest prompt and answer together in tokens.")
    max_prompt_tokens: int = option(512, "Longest prompt in tokens.")
    overlong_prompts: str = option(
        "drop",
        "What happens to longer prompts (offline: to rows above max_tokens): dropped and counted, or the run is refused.",
        ("drop", "refuse"),
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
    """One reward: a function, or a reward model."""

    function: str | None = option(None, "Built-in name, installed entry point, `package.module:function` or `file.py:function`.")
    model: str | None = option(None, "Directory of a reward model instead of a function; an actor of its own serves it.")
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
class CorrectionConfig:
    """Off-policy correction: weights pi / pi_engine for what was sampled by another policy (or another numerics) than the trained one."""

    level: str = option(
        "none",
        "What gets a weight: each token, or the whole sequence by the product (sequence) or geometric mean (geometric) of its ratios.",
        ("none", "token", "sequence", "geometric"),
    )
    action: str = option(
        "truncate",
        "What is made of a weight: cut at high (truncate: TIS), kept between low and high and else 0 (mask: MIS, IcePop), or cut at both (clip).",
        ("truncate", "mask", "clip"),
    )
    low: float = option(0.0, "Lower bound of mask and clip.")
    high: float = option(2.0, "Upper bound.")


@dataclass
class ShapingConfig:
    """What is made of rewards before they become advantages."""

    clip_low: float | None = option(None, "Rewards below are raised to it; null does not.")
    clip_high: float | None = option(None, "Rewards above are lowered to it; null does not.")
    combine: str = option(
        "sum",
        "Several rewards: added up, then compared (sum), or each compared within the group, then added and normalised over the batch (each: GDPO).",
        ("sum", "each"),
    )
    whiten: bool = option(False, "Give the batch's advantages mean 0 and standard deviation 1.")
    overlong_buffer: int = option(
        0, "The last N of max_new_tokens cost a growing share of overlong_penalty (DAPO's soft punishment); 0 is off."
    )
    overlong_penalty: float = option(1.0, "Taken off the reward of a sample of max_new_tokens tokens.")
    length_penalty: float = option(0.0, "Taken off the reward of a sample of max_new_tokens tokens, in proportion of shorter ones.")


@dataclass
class FilterConfig:
    """Which samples are trained on."""

    zero_variance: str = option(
        "keep",
        "Groups whose rewards are all equal: in the denominators (keep), left out (drop), or replaced by groups of further prompts (resample: dynamic sampling).",
        ("keep", "drop", "resample"),
    )
    least_mean: float | None = option(None, "Groups with a lower mean reward are treated like those of no variance; null: no bound.")
    most_mean: float | None = option(None, "Groups with a higher mean reward are treated like those of no variance; null: no bound.")
    max_resampled: int = option(
        10, "With resample: the run stops when more than this many times prompts_per_step groups were refused for one step."
    )
    truncated: str = option(
        "keep", "Samples cut at max_new_tokens: trained on, or only in the baseline of their group (drop).", ("keep", "drop")
    )
    top_entropy: float = option(1.0, "Train only this share of all tokens, those where the policy's entropy is highest; 1 is all.")


@dataclass
class CriticConfig:
    """The value model of algorithms that need one (ppo): trainer ranks of its own."""

    path: str | None = option(None, "Model directory that it starts from (a reward model, say); null is model.path, with a new head.")
    ranks: int = option(1, "Ranks of the critic (one GPU each on a GPU machine).")
    lr: float | None = option(None, "Its peak learning rate; null is training.optimizer.lr. All else is that of training.")
    warmup_steps: int = option(0, "Steps in which only the critic is trained.")
    clip: float = option(0.2, "Values may move this far from the old ones in a step; 0 does not clip.")
    coefficient: float = option(0.5, "Factor of its loss.")


@dataclass
class PreferenceConfig:
    """Offline losses over preferred, refused or labelled answers."""

    loss: str = option(
        "sigmoid",
        "dpo's loss of a pair's margin: sigmoid (label_smoothing makes it cDPO), ipo, hinge, or robust (needs label_smoothing).",
        ("sigmoid", "ipo", "hinge", "robust"),
    )
    beta: float = option(
        0.1, "How hard the policy is held to the reference (dpo, kto), or the margin's factor (simpo), or the odds' weight (orpo)."
    )
    label_smoothing: float = option(0.0, "Share of pairs taken to be labelled the wrong way round.")
    margin: float = option(0.0, "simpo: what the margin has to exceed (gamma); reward_model: the margin of pairs that give none.")
    likelihood: float = option(0.0, "Weight of the plain log-likelihood of the chosen answer beside dpo's loss.")
    desirable: float = option(1.0, "kto: weight of wanted answers.")
    undesirable: float = option(1.0, "kto: weight of unwanted answers.")
    centering: float = option(0.0, "reward_model: weight of the squared sum of a pair's scores, which keeps scores around 0.")


@dataclass
class AlgorithmConfig:
    """The learning algorithm. What is `auto` or null goes by its name (docs/algorithms.md); `--dry-run` prints it."""

    name: str = option(
        "grpo",
        "Online: grpo, dr_grpo, dapo, gspo, gmpo, cispo, sapo, rloo, reinforce_pp, reinforce_pp_baseline, remax, maxrl, ppo, distillation. Offline: sft, dpo, simpo, orpo, kto, reward_model. Or `package.module:Class`.",
    )
    kind: str = option(
        "auto",
        "Whether it samples (online) or learns from a data set (offline); auto goes by the name, and takes a class of yours for online.",
        ("auto", "online", "offline"),
    )
    group_size: int = option(8, "Samples per prompt.")
    advantage: str = option(
        "auto",
        "Advantage of a sample, from its group's rewards: less their mean, over their standard deviation (group_std), or not (group_mean), or over their mean (maxrl); less the mean of the others (leave_one_out), or the greedy sample's (greedy); or from all tokens of the batch: returns (batch), less the group's mean (batch_baseline), a critic's (gae), a teacher's (teacher).",
        ("auto", "group_std", "group_mean", "maxrl", "leave_one_out", "greedy", "batch", "batch_baseline", "gae", "teacher"),
    )
    policy_loss: str = option(
        "auto",
        "Loss of a token or sequence: policy_clip (PPO's), reinforce, gspo, gmpo, cispo, sapo, or `package.module:function`.",
    )
    clip_low: float | None = option(None, "Importance ratio is clipped below 1 - clip_low; null is the algorithm's.")
    clip_high: float | None = option(None, "Importance ratio is clipped above 1 + clip_high; null is the algorithm's.")
    dual_clip: float = option(
        0.0, "With a negative advantage the loss is at most this times it (PPO's second bound, 3 is usual); 0 is off."
    )
    loss_aggregation: str = option(
        "auto",
        "What the loss is a mean of: all tokens, the means of sequences, token sums over max_new_tokens (constant), or the means of prompts' tokens (prompt_mean).",
        ("auto", "token_mean", "sequence_mean", "constant", "prompt_mean"),
    )
    old_logprobs: str = option(
        "auto",
        "Denominator of the importance ratio: the current policy (ratio 1), the engine's logprobs, or a forward before the update; auto is current when on-policy with one optimizer step, else recompute at staleness 0 or with a correction, and engine otherwise.",
        ("auto", "current", "engine", "recompute"),
    )
    minibatches: int = option(1, "Parts of a batch with an optimizer step each.")
    epochs: int = option(1, "How often a batch is trained on.")
    gamma: float = option(1.0, "Discount of a token's later rewards (ppo, reinforce_pp).")
    gae_lambda: float = option(1.0, "ppo: mix of one-step (0) and whole returns (1) in the advantages.")
    kl_coefficient: float = option(0.0, "Weight of the KL to the reference model; 0 needs no reference model.")
    kl_in: str = option("loss", "Where that KL stands: in the loss, or taken off the reward of each token.", ("loss", "reward"))
    kl_estimator: str = option(
        "k3",
        "Estimator of that KL per token (Schulman 2020); k3_unbiased is weighted by the importance ratio, so that its gradient is that of the KL; k1 is for kl_in=reward only: as a loss its gradient ignores the reference.",
        ("k1", "k2", "k3", "k3_unbiased"),
    )
    kl_target: float | None = option(None, "Steer kl_coefficient so that the KL per token comes to this; null keeps it.")
    kl_horizon: int = option(50, "With kl_target: steps in which the coefficient can change by a factor of e at most.")
    reference: str = option(
        "initial",
        "Who computes reference logprobs: the trainer's own copy of the initial weights (initial), a model actor of its own (actor), the model without its LoRA adapters (adapters_off), an average of past weights (moving_average); or, offline, the initial model once before the first step (precomputed).",
        ("initial", "actor", "adapters_off", "moving_average", "precomputed"),
    )
    reference_path: str | None = option(None, "Model directory of the reference (the teacher of distillation); null is model.path.")
    reference_decay: float = option(0.99, "moving_average: share of the old average that a step keeps.")
    entropy_coefficient: float = option(0.0, "Weight of the entropy bonus.")
    correction: CorrectionConfig = option(CorrectionConfig, "Off-policy correction.")
    shaping: ShapingConfig = option(ShapingConfig, "Rewards before they become advantages.")
    filter: FilterConfig = option(FilterConfig, "Which samples are trained on.")
    critic: CriticConfig = option(CriticConfig, "The value model.")
    preference: PreferenceConfig = option(PreferenceConfig, "Offline losses.")
    options: dict[str, Any] = option({}, "Keyword arguments of policy_loss, and what an algorithm of your own reads.")


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
    prompts_per_step: int = option(32, "Groups per step; offline: rows per step.")
    max_staleness: int = option(0, "How many policy versions rollouts may run ahead; 0 is synchronous on-policy training.")
    rollout_timeout_s: float = option(1800.0, "Deadline for the next batch of rollouts.")
    phase_timeout_s: float = option(1800.0, "Deadline of an update, a sync or a checkpoint.")
    start_timeout_s: float = option(900.0, "Deadline for engines and trainers to come up.")


@dataclass
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: str = option(
        "adamw",
        "adamw, adamw_8bit (moments in 8 bits, torchao), adamw_bf16 (moments in bfloat16), or muon (hidden matrices by torch's Muon, all else by AdamW).",
        ("adamw", "adamw_8bit", "adamw_bf16", "muon"),
    )
    lr: float = option(1.0e-6, "Peak learning rate.")
    beta1: float = option(0.9, "First moment's decay (muon: its momentum).")
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
    reshard_after_forward: bool = option(
        True,
        "Free gathered parameters between forward and backward, and reduce gradients after each micro-batch (ZeRO-3); false keeps both whole until the step, with less traffic.",
    )
    logprob_chunk_tokens: int = option(1024, "Tokens whose vocabulary logits are held at once.")
    threads: int = option(1, "CPU threads of a rank.")
    lora: LoraConfig = option(LoraConfig, "Low-rank adapters.")
    optimizer: OptimizerConfig = option(OptimizerConfig, "The optimizer and its schedule.")


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
    engine_strategy: str = option(
        "pack",
        "pack: engines on as few nodes as hold them; spread: evenly over all nodes with room. Trainer ranks are always packed.",
        ("pack", "spread"),
    )
    timeout_s: float = option(120.0, "Deadline for the cluster to grant the placement, all of it at once.")
    wait_for_nodes: bool = option(
        False,
        "Nodes may still come (an autoscaler, a job that starts): wait for them too, where a cluster that is too small is else refused.",
    )


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
