"""What a run reads, loaded and checked before Ray starts: data, tokenizer, algorithm, environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rlpost.algorithms.catalogue import make_algorithm, make_offline_algorithm
from rlpost.algorithms.protocol import Algorithm, OfflineAlgorithm, OfflineRow
from rlpost.config.schema import RunConfig
from rlpost.data.offline import load_rows, tokenize_rows
from rlpost.data.prepare import tokenize_prompts
from rlpost.data.tokenizer import PromptTokenizer
from rlpost.driver.preflight import check_forwards, check_rewards, check_tokenizers, read_prompts, run_facts
from rlpost.environments.catalogue import environment_factory
from rlpost.environments.protocol import Environment
from rlpost.models.embedded import local_model
from rlpost.types import Prompt


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Of a run with engines."""

    model_path: str
    reference_path: str
    critic_path: str
    tokenizer: PromptTokenizer
    prompts: list[Prompt]
    dropped: int
    held_out: list[Prompt]
    algorithm: Algorithm
    make_environment: Callable[[], Environment]
    reward_models: tuple[str, ...] = ()
    """Local directories of the reward models, in the order of ``rewards``."""

    @property
    def count(self) -> int:
        """Rows that are trained on."""
        return len(self.prompts)

    def dropped_line(self, config: RunConfig) -> str:
        """What was left out, in words; empty when nothing was."""
        limit = config.data.max_prompt_tokens
        return f"{self.dropped} prompts longer than data.max_prompt_tokens={limit} were dropped" if self.dropped else ""


@dataclass(frozen=True, kw_only=True)
class OfflineInputs:
    """Of a run without engines."""

    model_path: str
    reference_path: str
    rows: list[OfflineRow]
    dropped: int
    held_out: list[OfflineRow]
    algorithm: OfflineAlgorithm

    @property
    def count(self) -> int:
        """Rows that are trained on."""
        return len(self.rows)

    def dropped_line(self, config: RunConfig) -> str:
        """What was left out, in words; empty when nothing was."""
        return f"{self.dropped} rows longer than data.max_tokens={config.data.max_tokens} were dropped" if self.dropped else ""


def load_inputs(config: RunConfig) -> Inputs:
    """Load data, tokenizer, algorithm and environment. Raises ConfigError for what a newcomer gets wrong."""
    algorithm = make_algorithm(config.algorithm, run_facts(config))
    check_forwards(algorithm, config)
    make_environment = environment_factory(config.environment)
    data = config.data
    raw = read_prompts(config, hub=True)
    check_rewards(config, raw)
    model_path = local_model(config.model.path)
    tokenizer = PromptTokenizer(model_path, config.model.chat_template, config.model.trust_remote_code)
    within_limit = partial(
        tokenize_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong_prompts,  # type: ignore[arg-type]
    )
    prompts, dropped = within_limit(raw["data.train"])
    held_out, dropped_held_out = within_limit(raw["data.evaluation"]) if "data.evaluation" in raw else ([], 0)
    reward_models = tuple(local_model(reward.model) for reward in config.rewards if reward.model is not None)
    check_tokenizers(config, hub=True)
    critic = config.algorithm.critic.path
    return Inputs(
        model_path=model_path,
        reference_path=_reference_path(config, model_path),
        critic_path=local_model(critic) if critic else model_path,
        tokenizer=tokenizer,
        prompts=prompts,
        dropped=dropped + dropped_held_out,
        held_out=held_out,
        algorithm=algorithm,
        make_environment=make_environment,
        reward_models=reward_models,
    )


def load_offline_inputs(config: RunConfig) -> OfflineInputs:
    """Load rows, tokenizer and algorithm. Raises ConfigError for what a newcomer gets wrong."""
    algorithm = make_offline_algorithm(config.algorithm)
    kind, data = algorithm.data_kind, config.data
    raw = load_rows(data.train, kind, data, data.limit, margins=algorithm.score_head)
    raw_held_out = []
    if data.evaluation and config.evaluation.every:
        raw_held_out = load_rows(data.evaluation, kind, data, config.evaluation.prompts, margins=algorithm.score_head)
    model_path = local_model(config.model.path)
    tokenizer = PromptTokenizer(model_path, config.model.chat_template, config.model.trust_remote_code)
    check_tokenizers(config, hub=True)
    rows, dropped = tokenize_rows(raw, tokenizer, kind, data)
    held_out, dropped_held_out = tokenize_rows(raw_held_out, tokenizer, kind, data) if raw_held_out else ([], 0)
    return OfflineInputs(
        model_path=model_path,
        reference_path=_reference_path(config, model_path),
        rows=rows,
        dropped=dropped + dropped_held_out,
        held_out=held_out,
        algorithm=algorithm,
    )


def _reference_path(config: RunConfig, model_path: str) -> str:
    return local_model(config.algorithm.reference_path) if config.algorithm.reference_path else model_path
