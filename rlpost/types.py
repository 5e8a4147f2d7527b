"""The records that cross a boundary between two packages.

Every record is frozen and keyword-only. Token arrays are one-dimensional numpy arrays of equal length
``[tokens]`` unless the docstring says otherwise. Worked example, a tool-use trajectory of 9 tokens:

    tokens     [ p   p   p   a   a   o   o   b   b ]     p = prompt, a, b = sampled, o = observation
    trainable  [ 0   0   0   1   1   0   0   1   1 ]     true exactly for sampled tokens
    logprobs   [nan nan nan -.1 -.7 nan nan -.2 -.3]     of the distribution really sampled from
    versions   [-1  -1  -1   4   4  -1  -1   4   5 ]     policy version that sampled each token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

NOT_SAMPLED_VERSION = -1
"""``Trajectory.versions`` of a token that no engine sampled."""

FinishReason = Literal["stop", "length", "abort"]


class RlpostError(Exception):
    """An error whose message alone tells the user what was found, expected, and what to change."""


class ConfigError(RlpostError):
    """The configuration or an input that it names cannot work. Raised before Ray starts; exit code 2."""


class InfrastructureError(RlpostError):
    """A part of the cluster (engine, rank, node) failed or did not answer within its deadline."""


class DataFailureError(RlpostError):
    """An episode or reward failed because of its data: the trajectory is marked, the run goes on."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One task item. Exactly one of ``text`` and ``messages`` is set.

    ``fields`` are the row's other columns (answer, test cases ...); rewards and environments read them.
    ``tokens`` is filled once by the data package; nothing tokenises the prompt again.
    """

    prompt_id: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How an engine samples. ``temperature`` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One continuation to sample. ``session`` is what the router keeps on one engine (the group)."""

    request_id: str
    tokens: Sequence[int]
    sampling: SamplingSettings
    seed: int | None = None
    session: str = ""


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """What an engine sampled: ``tokens``, ``logprobs``, ``versions`` are ``[new tokens]``.

    ``cached_tokens`` of the ``prompt_tokens`` were served by the engine's prefix cache.
    """

    request_id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """What a reward sees of one finished trajectory. ``completion`` is all text after the prompt, ``tokens`` the number of sampled tokens.

    ``trajectory_tokens`` ``[tokens]`` are the trajectory's exact tokens, for reward models; functions do not get them.
    """

    trajectory_id: str
    prompt_id: str
    prompt: str
    completion: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    truncated: bool = False
    trajectory_tokens: np.ndarray | None = field(default=None, compare=False, repr=False)


FailureKind = Literal["raised", "timeout", "not_a_number", "wrong_type", "worker_died", "not_scorable", "environment"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A data failure: where it happened (a function's name), what it was, and a traceback if there is one.

    ``not_scorable`` is no fault: the reward function answered None.
    """

    kind: FailureKind
    where: str
    message: str
    traceback: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether something went wrong: it counts against the failure budget."""
        return self.kind != "not_scorable"


@dataclass(frozen=True, kw_only=True)
class RewardOutcome:
    """The weighted sum of all rewards, or None when any of them failed or answered None (never 0 for a failure)."""

    trajectory_id: str
    value: float | None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode of one prompt. Arrays ``[tokens]``; see the module's worked example.

    ``trainable[t]`` is true exactly where an engine sampled token t, and there ``logprobs[t]`` and
    ``versions[t]`` are that engine's. ``reward`` is None when it could not be scored; such a trajectory
    has no gradient and is not in its group's baseline.
    """

    trajectory_id: str
    group_id: str
    prompt_id: str
    tokens: np.ndarray
    trainable: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    prompt_length: int
    turns: int = 1
    truncated: bool = False
    completion: str = ""
    prompt_tokens_requested: int = 0
    prompt_tokens_cached: int = 0
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("trainable", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise AssertionError(f"{self.trajectory_id}: {name} has {len(getattr(self, name))} entries for {length} tokens")
        if bool(np.any((self.versions >= 0) != self.trainable)):
            raise AssertionError(f"{self.trajectory_id}: trainable must hold exactly where a policy version is known")

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that an engine sampled (tool and prompt tokens do not count)."""
        return int(self.trainable.sum())

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among the sampled tokens; -1 when nothing was sampled."""
        return int(self.versions[self.trainable].min()) if self.sampled_tokens else NOT_SAMPLED_VERSION


@dataclass(frozen=True, kw_only=True)
class Group:
    """All trajectories of one prompt in one step, tied by ``group_id``. ``index`` counts dispatched groups."""

    group_id: str
    index: int
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """A greedy episode of the prompt, for algorithms that compare with it; never trained on."""


MAIN_WEIGHT = "weight"
"""The weight of components that name no other: LossTerms.weight."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """One sequence as the trainer sees it: what each token is worth, blind to the algorithm. Arrays ``[tokens]``.

    ``weight`` is the token's share in the loss (0 where nothing is trained), ``advantage`` its advantage,
    ``old_logprobs`` the denominator of the importance ratio (None: the current policy itself, ratio 1).
    ``parity_logprobs`` are the engine's, of tokens that the present version sampled (NaN elsewhere): before the
    update the trainer's must equal them.
    """

    trajectory_id: str
    group_id: str
    prompt_length: int
    """Tokens that all trajectories of the group have in common at their start: the trainer computes them once."""
    tokens: np.ndarray
    trainable: np.ndarray
    weight: np.ndarray
    advantage: np.ndarray | None = None
    parity_logprobs: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Whatever else a loss term reads of each token, by name (returns, old values, further weights ...)."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """Whatever a loss term reads of the whole sequence, by name (its pair, its side, its margin ...)."""
    scored: bool = False
    """A model with a value head is asked for the value of the trained tokens themselves (a reward model's score at the last token),
    not of the state before them (a critic's value)."""


DataKind = Literal["conversation", "pair", "labelled"]
"""What rows of an offline data set hold: whole conversations, two answers of which one is preferred, or an answer and whether it is
wanted."""


@dataclass(frozen=True, kw_only=True)
class OffPolicyCorrection:
    """How far the policy that is trained is from the one that sampled: the weight w = pi / pi_engine and what is made of it.

    ``level``: one w a token (``token``), one a sequence, the product (``sequence``) or the geometric mean (``geometric``) of its tokens'.
    ``action``: w cut at ``high`` (``truncate``), w where it lies between ``low`` and ``high`` and else 0 (``mask``), or w cut at both
    (``clip``). No gradient flows through it.
    """

    level: Literal["token", "sequence", "geometric"]
    action: Literal["truncate", "mask", "clip"]
    low: float = 0.0
    high: float = 2.0


@dataclass(frozen=True, kw_only=True)
class LossComponent:
    """One summand of the loss: ``coefficient * sum(weight * term) / denominator``. ``term`` names one of algorithms.losses.LOSS_TERMS.

    ``weight`` names the weights and their denominator: LossTerms.weight, or one of its columns or scalars.
    """

    term: str
    coefficient: float = 1.0
    parameters: Mapping[str, float | str] = field(default_factory=dict)
    weight: str = MAIN_WEIGHT
    correction: OffPolicyCorrection | None = None


@dataclass(frozen=True, kw_only=True)
class WeightsManifest:
    """All tensors that engines get from the trainer, in a fixed order; agreed on when a sync's two ends meet.

    ``cuts[i]`` are the rows (first dimension) of tensor i at which the trainer's shards begin, and the end: rank r owns rows
    ``cuts[i][r]`` to ``cuts[i][r + 1]``. Two ranks, 5 rows: (0, 3, 5). A scalar counts as one row.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    """Dtypes in which the engines hold them."""
    cuts: tuple[tuple[int, ...], ...]
    trained: tuple[bool, ...]
    """Tensors that training changes; the others have the same bits for ever."""
    bucket_bytes: int


Box = tuple[tuple[int, int], ...]
"""A part of a tensor: first and last index (exclusive) in each dimension."""

Layout = tuple[Box | None, ...]
"""Which part of each tensor of the manifest one engine worker holds; None is the whole tensor."""

SyncMode = Literal["full", "trained", "delta", "adapter"]


@dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """One weight sync as both ends see it.

    ``full`` moves all tensors, ``trained`` those that training changes, ``delta`` the elements that changed since
    ``base_version``, ``adapter`` only a LoRA adapter. All but ``full`` need an engine that holds ``base_version``.
    """

    version: int
    mode: SyncMode
    base_version: int
    link: str
    """Name of the connection that carries it."""
    verify: bool
    senders: tuple[int, ...] = (0,)
    """Trainer ranks that have an end of the link: rank 0, or (memory shared on one GPU) every rank for the engine beside it."""
    message_bytes: int = 0
    """Size of the encoded delta or adapter."""


@dataclass(frozen=True, kw_only=True)
class SyncAcknowledgement:
    """An engine's proof of what it holds: one fingerprint for each of its workers (tensor-parallel ranks), in order."""

    engine: str
    version: int
    fingerprints: tuple[str, ...]
    """Empty when the plan asked for no proof."""
    tensors: int
    apply_s: float
    peak_memory_gib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one committed weight sync cost. Seconds of a stage are those of the slowest part."""

    version: int
    mode: SyncMode
    bytes: int
    seconds: float
    paused_s: float
    """Longest time in which an engine could not generate."""
    stage_s: float = 0.0
    gather_s: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    apply_s: float = 0.0
    changed_fraction: float = float("nan")
    verified: bool = False
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    """Full syncs that single engines needed besides, by reason."""
    engine_peak_memory_gib: float = 0.0
    """Largest peak among the engines."""


class SyncRefusedError(InfrastructureError):
    """An engine did not take part in a sync; ``reason`` (wrong_base, corrupt, broken ...) names the kind, for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])
