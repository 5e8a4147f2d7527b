"""What ``--dry-run`` and every start check of the user's own things: data rows, chat template, rewards, environment, algorithm.

Nothing here needs a cluster; no ray, torch or vllm is imported.
"""

from __future__ import annotations

from pathlib import Path

from rlpost.algorithms.catalogue import make_algorithm
from rlpost.config.schema import RunConfig
from rlpost.data.load import load_prompts
from rlpost.data.tokenizer import PromptTokenizer, check_chat_template
from rlpost.environments.catalogue import environment_factory
from rlpost.models.embedded import EMBEDDED_PREFIX, model_path
from rlpost.rewards import load_rewards
from rlpost.types import ConfigError, Prompt

HUB = "hf:"


def field_names(prompts: list[Prompt]) -> set[str]:
    """Columns that reward functions may name: all that any row has."""
    return {name for prompt in prompts for name in prompt.fields}


def preflight(config: RunConfig) -> tuple[int | None, list[str]]:
    """Number of training rows within the limits (None: a hub data set, not read here), and warnings. Raises ConfigError."""
    make_algorithm(config.algorithm)
    environment_factory(config.environment)
    prompts: list[Prompt] | None = None
    warnings: list[str] = []
    for source in (config.data.train, config.data.evaluation):
        if source is None or source.startswith(HUB):
            continue
        loaded = load_prompts(source, prompt_field=config.data.prompt_field, id_field=config.data.id_field, limit=config.data.limit)
        prompts = loaded if prompts is None else prompts
    if config.rewards:
        load_rewards(config.rewards, None if prompts is None else field_names(prompts))
    path = config.model.path
    if path.startswith(EMBEDDED_PREFIX):
        path = str(model_path(path.removeprefix(EMBEDDED_PREFIX)))
    if prompts and any(prompt.messages is not None for prompt in prompts) and not check_chat_template(path, config.model.chat_template):
        raise ConfigError(
            f"data.train holds chat messages, but the tokenizer of {config.model.path} has no chat template; "
            "set model.chat_template to a file"
        )
    if prompts is None:
        return None, ["data from a hub is not read in a dry run"]
    if not (Path(path) / "tokenizer.json").exists():
        return len(prompts), [f"prompt lengths were not counted: the tokenizer of {config.model.path} is not on this machine yet"]
    return _within_limit(config, prompts, path, warnings)


def _within_limit(config: RunConfig, prompts: list[Prompt], path: str, warnings: list[str]) -> tuple[int, list[str]]:
    from rlpost.data.prepare import tokenize_prompts

    tokenizer = PromptTokenizer(path, config.model.chat_template, config.model.trust_remote_code)
    kept, dropped = tokenize_prompts(prompts, tokenizer, config.data.max_prompt_tokens, config.data.overlong_prompts)  # type: ignore[arg-type]
    if dropped:
        warnings.append(f"{dropped} prompts longer than data.max_prompt_tokens={config.data.max_prompt_tokens} will be dropped")
    return len(kept), warnings
