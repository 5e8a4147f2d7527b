"""What a plan is told besides the run's configuration: the machine, lengths, prices. ``--help`` prints this file's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rlpost.config.options import split_options
from rlpost.config.schema import option
from rlpost.planner.quantities import require_at_least, require_positive, require_share


@dataclass
class PlanOptions:
    """All optional; what is not given is assumed, and the plan says so."""

    hardware: str | None = option(None, "A machine by name: h100-8, a100-80gb-16 (GPUs in nodes of 8), cpu. Else nodes, gpus and gpu.")
    nodes: int | None = option(None, "Nodes.")
    gpus: int | None = option(None, "GPUs of a node.")
    gpu: str | None = option(None, "Kind of GPU: H100-80GB, A100-40GB, L40S ...")
    gpu_memory: float | None = option(None, "Memory of a GPU in GiB, where it differs from the kind's.")
    nvlink: float | None = option(None, "Bus bandwidth of collectives inside a node in GB/s, as nccl-tests prints it.")
    net: float | None = option(None, "Network of a node in GB/s, all cards together (400 Gbit/s are 50 GB/s).")
    disk: float | None = option(None, "Writing speed of the shared disk in GB/s; reading is taken to be as fast.")
    shape: str | None = option(None, "config.json, directory or name of the model, in place of model.path.")
    prompt_tokens: int | None = option(None, "Mean tokens of a prompt; else data.max_prompt_tokens.")
    answer_median: int | None = option(None, "Median of sampled tokens (of one turn); else a quarter of sampling.max_new_tokens.")
    answer_p99: int | None = option(None, "99th percentile of the same; else sampling.max_new_tokens.")
    lengths: str | None = option(
        None, "File with sequence lengths: one number a line, or rollouts/*.jsonl of a run. Used for packing, and for answers in a run's."
    )
    turns: int | None = option(None, "Turns of an episode; else environment.max_turns.")
    observation: int = option(64, "Tokens that the environment adds between two turns.")
    changed: float = option(0.02, "Share of weights that a step changes (in the engines' dtype), for deltas.")
    reuse: str = option(
        "auto",
        "Prefix reuse of engines that the time is planned with; auto goes by engine.prefix_caching.",
        ("auto", "none", "turn", "turn+group"),
    )
    expert_ranks: int = option(8, "Ranks over which a mixture's experts are taken to be spread, for the table of imbalance.")
    price: float | None = option(None, "Price of a GPU-hour.")
    calibration: str | None = option(None, "File of rlpost.plan calibrate; else ./calibration.yaml where there is one; none: neither.")


AT_LEAST_ONE = ("nodes", "gpus", "prompt_tokens", "answer_median", "answer_p99", "turns", "expert_ranks")
POSITIVE = ("gpu_memory", "nvlink", "net", "disk")
NOT_NEGATIVE = ("observation", "price")


def split_words(words: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Options of the plan among ``key=value`` words, and the words that are the run's configuration.

    Raises ConfigError for values of a wrong type or range, and for keys that neither has.
    """
    options, others = split_options(words, PlanOptions, "a plan")
    check_options(options)
    return options, others


def check_options(options: PlanOptions) -> None:
    """Raise ConfigError for impossible numbers."""
    for names, check in ((AT_LEAST_ONE, lambda **v: require_at_least(1, **v)), (POSITIVE, require_positive)):
        check(**{name: value for name in names if (value := getattr(options, name)) is not None})
    require_at_least(0, **{name: value for name in NOT_NEGATIVE if (value := getattr(options, name)) is not None})
    require_share(changed=options.changed)


def given_options(options: PlanOptions) -> frozenset[str]:
    """Names of the options that are not the default."""
    default = PlanOptions()
    return frozenset(one.name for one in fields(options) if getattr(options, one.name) != getattr(default, one.name))
