"""What one step has to do, as numbers of sequences and tokens: from a config and assumed lengths, or from what a run recorded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpost.config.algorithms import PAIRED
from rlpost.config.derive import SINGLE_TURN, Derived
from rlpost.config.schema import RunConfig
from rlpost.observe.formats import is_number
from rlpost.planner.options import PlanOptions
from rlpost.planner.quantities import require_at_least, require_positive
from rlpost.planner.timing import long_tailed_lengths
from rlpost.planner.tokens import Reuse, prefill_tokens
from rlpost.types import ConfigError


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step. Lengths are tokens."""

    groups: int
    group_size: int
    prompt: int
    """Mean of the first turn's prompt."""
    answers: tuple[int, ...]
    """Sampled tokens of each sample, all its turns together; offline: tokens of each sequence after its prompt."""
    turns: int = 1
    observations: int = 0
    """Tokens that the environment adds to a sample."""
    prefill: int = 0
    """Prompt tokens that engines compute, cached ones not among them."""
    recorded_row_tokens: float | None = None
    """Tokens outside attention of one pass over the batch, all ranks; None: worked out."""
    recorded_micro_batches: float | None = None
    """Of one rank in one pass over the batch; None: worked out."""
    basis: str = "assumed"

    @property
    def samples(self) -> int:
        """Sequences of a step."""
        return len(self.answers)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that engines sample, or offline the answers' tokens."""
        return sum(self.answers)

    @property
    def lengths(self) -> list[int]:
        """Whole sequences."""
        return [self.prompt + self.observations + answer for answer in self.answers]

    def row_tokens(self, share: bool) -> int:
        """Tokens that the trainer computes outside attention; ``share``: a group's prompt once."""
        if self.recorded_row_tokens is not None:
            return round(self.recorded_row_tokens)
        tokens = sum(self.lengths)
        return tokens - self.prompt * (self.samples - self.groups) if share else tokens

    def micro_batches(self, share: bool, *, ranks: int, minibatches: int, micro_batch_tokens: int) -> float:
        """Of one rank in one pass over the batch, as many in each minibatch as its tokens need when they are spread evenly."""
        if self.recorded_micro_batches is not None:
            return self.recorded_micro_batches
        return minibatches * max(1, math.ceil(self.row_tokens(share) / (minibatches * ranks * micro_batch_tokens)))


def planned_workload(config: RunConfig, derived: Derived, options: PlanOptions) -> Workload:
    """The step that the options describe. Raises ConfigError for impossible lengths."""
    if derived.offline:
        return _offline_workload(config, derived, options)
    single = config.environment.name == SINGLE_TURN
    turns = 1 if single else options.turns or config.environment.max_turns
    require_at_least(1, turns=turns)
    prompt = given_or(options.prompt_tokens, config.data.max_prompt_tokens)
    require_at_least(1, prompt_tokens=prompt)
    samples = derived.samples_per_step
    answers = tuple(turns * length for length in answer_lengths(samples, config.sampling.max_new_tokens, options))
    observations = 0 if single else (turns - 1) * options.observation
    each = round(fmean(answers) / turns)
    found = Workload(
        groups=config.schedule.prompts_per_step,
        group_size=config.algorithm.group_size,
        prompt=prompt,
        answers=answers,
        turns=turns,
        observations=observations,
        basis="given" if options.answer_median is not None or options.lengths is not None else "assumed",
    )
    reuse = planned_reuse(config, options)
    return replace(found, prefill=found.groups * prefill_of(found, each, options.observation, reuse))


def _offline_workload(config: RunConfig, derived: Derived, options: PlanOptions) -> Workload:
    """Rows of a data set: an answer each, or two."""
    sequences = 2 if config.algorithm.name in PAIRED else 1
    samples = derived.samples_per_step * sequences
    prompt = given_or(options.prompt_tokens, max(1, config.data.max_tokens // 4))
    most = max(1, config.data.max_tokens - prompt)
    return Workload(
        groups=derived.samples_per_step,
        group_size=sequences,
        prompt=prompt,
        answers=tuple(answer_lengths(samples, most, options)),
        basis="given" if options.answer_median is not None or options.lengths is not None else "assumed",
    )


def given_or(value: int | None, otherwise: int) -> int:
    """The value, or what is taken without one."""
    return otherwise if value is None else value


def planned_reuse(config: RunConfig, options: PlanOptions) -> Reuse:
    """Which prefixes engines find in their caches."""
    if options.reuse != "auto":
        return options.reuse  # type: ignore[return-value]
    return "turn+group" if config.engine.prefix_caching else "none"


def prefill_of(workload: Workload, action: int, observation: int, reuse: Reuse) -> int:
    """Tokens that are prefilled for one group."""
    return prefill_tokens(
        prompt=workload.prompt, action=action, observation=observation if workload.turns > 1 else 0, turns=workload.turns,
        group=workload.group_size, reuse=reuse,
    )  # fmt: skip


# ---- lengths ---------------------------------------------------------------------------------------------------------

ASSUMED_MEDIAN_SHARE = 0.25
"""Of max_new_tokens, where nobody says how long answers are."""


def answer_lengths(count: int, most: int, options: PlanOptions) -> list[int]:
    """Sampled tokens of ``count`` turns: those of the length file, or long-tailed by median and 99th percentile, cut at ``most``."""
    if options.lengths is not None:
        known = [min(most, answer) for _, answer in read_lengths(Path(options.lengths))]
        return [known[index % len(known)] for index in range(count)]
    for name, value in (("answer_median", options.answer_median), ("answer_p99", options.answer_p99)):
        if value is not None and not 1 <= value <= most:
            raise ConfigError(f"{name}={value}; expected 1 to {most}, the longest answer (sampling.max_new_tokens): change {name} or that")
    median = given_or(options.answer_median, max(1, round(most * ASSUMED_MEDIAN_SHARE)))
    return long_tailed_lengths(count, median=median, percentile_99=max(median, given_or(options.answer_p99, most)), most=most)


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """``(prompt, answer)`` tokens of each sequence of a file: numbers, one a line (prompt 0), or a run's rollouts in JSON lines.

    Raises ConfigError with the line that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"lengths={path} cannot be read: {error}; expected one number a line, or rollouts/*.jsonl of a run") from error
    found = [_sequence(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError(f"lengths={path} is empty; expected one number a line, or rollouts/*.jsonl of a run")
    return found


def _sequence(line: str, path: Path, number: int) -> tuple[int, int]:
    try:
        value = json.loads(line)
        prompt, answer = (0, value) if not isinstance(value, dict) else (value["prompt_length"], sum(value["trainable"]))
        good = isinstance(answer, int) and not isinstance(answer, bool) and answer >= 1 and prompt >= 0
    except (ValueError, KeyError, TypeError):
        good = False
    if good:
        return int(prompt), int(answer)
    raise ConfigError(f"{path}:{number}: {line[:60]!r}; expected a whole number of tokens above 0, or a row of a run's rollouts")


# ---- what a run recorded ---------------------------------------------------------------------------------------------


def recorded_workload(config: RunConfig, derived: Derived, records: Sequence[Mapping[str, Any]]) -> Workload:
    """The mean step of these records (of metrics.jsonl). Raises ConfigError when they hold no tokens."""
    passes = config.algorithm.epochs
    rows, micros = _mean(records, "train/row_tokens") / passes, _mean(records, "train/micro_batches") / passes
    if derived.offline:
        return _recorded_offline(config, derived, records, rows, micros)
    groups, size = config.schedule.prompts_per_step, config.algorithm.group_size
    samples = groups * size
    tokens, turns = _mean(records, "rollout/tokens"), max(1.0, _mean(records, "rollout/turns_mean"))
    requested, cached = _mean(records, "rollout/prompt_tokens"), _mean(records, "rollout/cached_prompt_tokens")
    mean = tokens / samples
    # A later turn's prompt holds all before it; the first one's is what is left when turns are of one length.
    prompt = max(1.0, requested / samples / turns - (turns - 1) / 2 * (mean / turns))
    longest = max(_mean(records, "rollout/tokens_max", math.ceil(mean)), mean)
    return Workload(
        groups=groups,
        group_size=size,
        prompt=round(prompt),
        answers=tuple(lengths_with_mean(samples, mean, math.ceil(longest))),
        turns=round(turns),
        prefill=max(0, round(requested - cached)),
        recorded_row_tokens=rows,
        recorded_micro_batches=micros,
        basis="measured",
    )


def _recorded_offline(
    config: RunConfig, derived: Derived, records: Sequence[Mapping[str, Any]], rows: float, micro_batches: float
) -> Workload:
    sequences = 2 if config.algorithm.name in PAIRED else 1
    samples = derived.samples_per_step * sequences
    trained = _mean(records, "train/tokens") / config.algorithm.epochs / samples
    return Workload(
        groups=derived.samples_per_step,
        group_size=sequences,
        prompt=max(1, round(rows / derived.samples_per_step - sequences * trained)),
        answers=tuple(lengths_with_mean(samples, trained, math.ceil(trained))),
        recorded_row_tokens=rows,
        recorded_micro_batches=micro_batches,
        basis="measured",
    )


def _mean(records: Sequence[Mapping[str, Any]], name: str, otherwise: float | None = None) -> float:
    values = [record[name] for record in records if is_number(record.get(name))]
    if values:
        return fmean(values)
    if otherwise is None:
        raise ConfigError(f"the run's records have no {name}; expected finished steps of a run: wait for the first one")
    return otherwise


def lengths_with_mean(count: int, mean: float, longest: int) -> list[int]:
    """``count`` long-tailed lengths of this mean whose longest is ``longest``: only these two are recorded of a step."""
    require_positive(mean=mean, longest=longest)
    if longest <= mean + 1 or count == 1:
        return [max(1, round(mean))] * count
    low, high = 0.5, float(longest)
    for _ in range(40):
        middle = (low + high) / 2
        found = long_tailed_lengths(count, median=max(1, middle), percentile_99=longest, most=longest)
        low, high = (middle, high) if fmean(found) < mean else (low, middle)
    found = long_tailed_lengths(count, median=max(1, high), percentile_99=longest, most=longest)
    found[found.index(max(found))] = longest
    return found
