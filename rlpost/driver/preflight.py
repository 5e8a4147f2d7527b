"""What ``--dry-run`` and every start check of the user's own things: data rows, chat template, rewards, environment, algorithm.

Nothing here needs a cluster; no ray, torch or vllm is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlpost.algorithms.catalogue import make_algorithm, make_offline_algorithm
from rlpost.algorithms.protocol import Algorithm, RunFacts
from rlpost.config.algorithms import is_offline
from rlpost.config.derive import SINGLE_TURN, needs_critic, resolve_reference, reward_name
from rlpost.config.inputs import other_models, out_of_reach
from rlpost.config.schema import RunConfig
from rlpost.data.load import load_prompts
from rlpost.data.offline import load_rows, tokenize_rows
from rlpost.data.prepare import tokenize_prompts
from rlpost.data.tokenizer import PromptTokenizer, check_chat_template, tokenizer_directory
from rlpost.environments.catalogue import environment_factory
from rlpost.models.embedded import EMBEDDED_PREFIX, model_path
from rlpost.rewards import load_rewards
from rlpost.rewards.model_reward import check_same_tokenizer
from rlpost.types import ConfigError, Prompt

HUB = "hf:"


def run_facts(config: RunConfig) -> RunFacts:
    """What an online algorithm may know of the run."""
    turns = 1 if config.environment.name == SINGLE_TURN else config.environment.max_turns
    return RunFacts(
        max_new_tokens=turns * config.sampling.max_new_tokens,
        reward_weights={reward_name(reward): reward.weight for reward in config.rewards},
    )


def check_forwards(algorithm: Algorithm, config: RunConfig) -> None:
    """Somebody answers each forward that the algorithm asks for. Raises ConfigError."""
    if "reference" in algorithm.forwards and resolve_reference(config) == "none":
        raise ConfigError(
            f"{config.algorithm.name} reads reference logprobs, and there is no reference: set algorithm.kl_coefficient above 0"
        )
    if "values" in algorithm.forwards and not needs_critic(config):
        raise ConfigError(f"{config.algorithm.name} reads values, and there is no critic: set algorithm.advantage=gae")


def field_names(prompts: list[Prompt]) -> set[str]:
    """Columns that reward functions may name: all that any row has."""
    return {name for prompt in prompts for name in prompt.fields}


def read_prompts(config: RunConfig, *, hub: bool, unseen: Collection[str] = ()) -> dict[str, list[Prompt]]:
    """The prompts that a run reads, by configuration key, without tokens; ``hub`` false leaves out what is on a hub, and ``unseen`` are
    keys to leave out. Raises ConfigError for a row that cannot be used.
    """
    sources: dict[str, tuple[str, int | None]] = {"data.train": (config.data.train, config.data.limit)}
    if config.data.evaluation is not None and config.evaluation.every:
        sources["data.evaluation"] = (config.data.evaluation, config.evaluation.prompts)
    return {
        key: load_prompts(source, prompt_field=config.data.prompt_field, id_field=config.data.id_field, limit=limit)
        for key, (source, limit) in sources.items()
        if key not in unseen and (hub or not source.startswith(HUB))
    }


def check_tokenizers(config: RunConfig, *, hub: bool) -> None:
    """Every other model that gets the policy's tokens has its tokenizer; ``hub`` false leaves out what is not on this machine.

    Raises ConfigError.
    """
    policy = _local_path(config.model.path)
    for key, name in other_models(config).items():
        path = _local_path(name)
        if hub or (Path(policy).is_dir() and Path(path).is_dir()):
            check_same_tokenizer(tokenizer_directory(policy), tokenizer_directory(path), key)


def check_rewards(config: RunConfig, prompts: Mapping[str, list[Prompt]]) -> None:
    """Every reward function fits the rows of every data set that it will score. Raises ConfigError."""
    if not config.rewards:
        return
    for key, rows in prompts.items():
        try:
            load_rewards(config.rewards, field_names(rows))
        except ConfigError as error:
            raise ConfigError(f"{error} (with the rows of {key})") from error
    if not prompts:
        load_rewards(config.rewards)


def preflight(config: RunConfig, elsewhere: Sequence[str] = ()) -> tuple[int | None, list[str]]:
    """Number of training rows within the limits (None: a data set that is not read here), and warnings. Raises ConfigError.

    ``elsewhere`` as in :func:`rlpost.config.checks.check`, which warns of what is left out here.
    """
    unseen = out_of_reach(config, elsewhere)
    if is_offline(config.algorithm):
        return _offline_preflight(config, unseen)
    if "algorithm.name" not in unseen:
        check_forwards(make_algorithm(config.algorithm, run_facts(config)), config)
    if not any(key.startswith("environment.") for key in unseen):
        environment_factory(config.environment)
    loaded = read_prompts(config, hub=False, unseen=unseen)
    check_rewards(_with_seen_rewards(config, unseen), loaded)
    check_tokenizers(config, hub=False)
    on_hub = "data.train" not in loaded and "data.train" not in unseen
    warnings = [f"data.train={config.data.train} is on a hub and not read in a dry run"] if on_hub else []
    path = _local_path(config.model.path)
    if {"model.path", "model.chat_template"} & unseen.keys():
        return len(loaded["data.train"]) if "data.train" in loaded else None, [*warnings, "prompt lengths were not counted"]
    has_template = check_chat_template(path, config.model.chat_template)
    for key, prompts in loaded.items():
        if not has_template and any(prompt.messages is not None for prompt in prompts):
            raise ConfigError(
                f"{key} holds chat messages, but the tokenizer of {config.model.path} has no chat template; "
                "set model.chat_template to a file"
            )
    rows = {key: len(prompts) for key, prompts in loaded.items()}
    if loaded and not (Path(path) / "tokenizer.json").exists():
        warnings.append(f"prompt lengths were not counted: the tokenizer of {config.model.path} is not on this machine yet")
    elif loaded:
        rows, over = _within_limit(config, loaded, path)
        warnings += over
    return rows.get("data.train"), warnings


def _with_seen_rewards(config: RunConfig, unseen: Collection[str]) -> RunConfig:
    """Without the rewards that name something which is not here."""
    rewards = [one for number, one in enumerate(config.rewards) if not any(key.startswith(f"rewards.{number}.") for key in unseen)]
    return replace(config, rewards=rewards)


def _offline_preflight(config: RunConfig, unseen: Collection[str]) -> tuple[int | None, list[str]]:
    if "algorithm.name" in unseen:  # which says what rows look like
        return None, ["data rows were not read"]
    algorithm, data = make_offline_algorithm(config.algorithm), config.data
    kind = algorithm.data_kind
    sources = {"data.train": (data.train, data.limit)}
    if data.evaluation is not None and config.evaluation.every:
        sources["data.evaluation"] = (data.evaluation, config.evaluation.prompts)
    path = _local_path(config.model.path)
    check_tokenizers(config, hub=False)
    counted = (Path(path) / "tokenizer.json").exists() and "model.chat_template" not in unseen
    warnings = [] if counted else [f"lengths were not counted: the tokenizer of {config.model.path} is not on this machine yet"]
    rows: dict[str, int] = {}
    for key, (source, limit) in sources.items():
        if key in unseen:
            continue
        if source.startswith(HUB):
            warnings.append(f"{key}={source} is on a hub and not read in a dry run")
            continue
        raw = load_rows(source, kind, data, limit, margins=algorithm.score_head)
        rows[key] = len(raw)
        if counted:
            tokenizer = PromptTokenizer(path, config.model.chat_template, config.model.trust_remote_code)
            kept, dropped = tokenize_rows(raw, tokenizer, kind, data)
            rows[key] = len(kept)
            if dropped:
                warnings.append(f"{dropped} rows of {key} longer than data.max_tokens={data.max_tokens} will be dropped")
    return rows.get("data.train"), warnings


def _local_path(path: str) -> str:
    """A model's directory, where it is here already."""
    return str(model_path(path.removeprefix(EMBEDDED_PREFIX))) if path.startswith(EMBEDDED_PREFIX) else path


def _within_limit(config: RunConfig, loaded: Mapping[str, list[Prompt]], path: str) -> tuple[dict[str, int], list[str]]:
    tokenizer = PromptTokenizer(path, config.model.chat_template, config.model.trust_remote_code)
    rows: dict[str, int] = {}
    warnings = []
    limit = config.data.max_prompt_tokens
    for key, prompts in loaded.items():
        kept, dropped = tokenize_prompts(prompts, tokenizer, limit, config.data.overlong_prompts)  # type: ignore[arg-type]
        rows[key] = len(kept)
        if dropped:
            warnings.append(f"{dropped} prompts of {key} longer than data.max_prompt_tokens={limit} will be dropped")
    return rows, warnings
