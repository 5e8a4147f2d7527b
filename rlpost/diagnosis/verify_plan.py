"""What ``doctor verify`` works with: the scaled configuration, its models, its data and its algorithm, all loaded and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.algorithms.catalogue import make_offline_algorithm
from rlpost.config.algorithms import is_offline
from rlpost.config.checks import check
from rlpost.config.derive import Derived, derive
from rlpost.config.inputs import HUGGING_FACE, other_models
from rlpost.config.load import load_config
from rlpost.config.schema import RunConfig
from rlpost.data.load import identified_rows, load_prompts
from rlpost.diagnosis.verify_config import Change, Machine, Models, NotChecked, fit_lengths, not_checked, scale, this_machine
from rlpost.diagnosis.verify_guard import Say
from rlpost.diagnosis.verify_model import is_small, local_directory, write_scaled
from rlpost.driver.inputs import Inputs, OfflineInputs, load_inputs, load_offline_inputs
from rlpost.rewards import load_rewards
from rlpost.types import ConfigError

EMBEDDED_ROWS: Mapping[str, str] = {"conversation": "sort5-sft", "pair": "sort5-pairs", "labelled": "sort5-labelled"}
"""Embedded rows in place of a hub's, by what an offline algorithm reads."""
OFFLINE_FIELDS = ("prompt", "chosen", "rejected", "completion", "messages", "label", "margin")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One configuration, scaled, ready for its checks."""

    config: RunConfig
    words: Sequence[str]
    """What ``rlpost.train`` is given for the scaled run."""
    derived: Derived
    inputs: Inputs | OfflineInputs
    machine: Machine
    directory: Path
    changes: Sequence[Change]
    not_checked: Sequence[NotChecked]


def prepare(words: Sequence[str], directory: Path, say: Say) -> Plan:
    """Scale the configuration that ``words`` name, and load what it reads. Raises ConfigError for what a user gets wrong."""
    user = load_config(words).config
    check(user)
    machine = this_machine(user)
    models = scaled_models(user, directory / "models", say)
    changes = scale(user, machine, models, directory, data=other_data(user))
    loaded, inputs = _load([*words, *(change.word for change in changes)])
    lengths = fit_lengths(loaded, _lengths(inputs))
    changes = _merged(changes, lengths)
    scaled_words = [*words, *(change.word for change in changes)]
    scaled, inputs = _load(scaled_words)
    derived = derive(scaled, device=machine.device, row_count=inputs.count)
    return Plan(
        config=scaled,
        words=scaled_words,
        derived=derived,
        inputs=inputs,
        machine=machine,
        directory=directory,
        changes=changes,
        not_checked=not_checked(user, scaled, machine),
    )


def _load(words: Sequence[str]) -> tuple[RunConfig, Inputs | OfflineInputs]:
    config = load_config(words).config
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"scaled down, the configuration cannot work, which is no fault of yours: {error}") from error
    return config, load_offline_inputs(config) if is_offline(config.algorithm) else load_inputs(config)


def _lengths(inputs: Inputs | OfflineInputs) -> list[int]:
    """Tokens of each prompt, or of the longest sequence of each row."""
    if isinstance(inputs, OfflineInputs):
        return [max(len(one.tokens) for one in row.sequences.values()) for row in inputs.rows]
    return [len(prompt.tokens) for prompt in inputs.prompts if prompt.tokens is not None]


def _merged(changes: Sequence[Change], later: Sequence[Change]) -> list[Change]:
    """A setting that changes twice changes once, from what the user said."""
    first = {change.key: change for change in changes}
    for change in later:
        found = first[change.key].found if change.key in first else change.found
        first[change.key] = Change(key=change.key, found=found, value=change.value, why=change.why)
    return list(first.values())


def scaled_models(config: RunConfig, directory: Path, say: Say) -> Models:
    """Small models in place of those that the configuration names; small ones are used as they are."""
    paths: dict[str, str] = {}
    parameters: tuple[str, ...] = ()
    named = {"model.path": config.model.path, **other_models(config)}
    named.pop("algorithm.critic.path", None)  # a critic starts from the scaled policy
    for number, (key, path) in enumerate(named.items()):
        source = local_directory(path, key)
        if is_small(source):
            continue
        target = directory / key
        names = write_scaled(
            source, target, seed=number, value_head=key.startswith("rewards."), trust_remote_code=config.model.trust_remote_code
        )
        paths[key] = str(target)
        if key == "model.path":
            parameters = names
        sizes = json.loads((target / "config.json").read_text())
        say(
            f"{key}={path}: {sizes.get('model_type')} with {sizes['num_hidden_layers']} layers of {sizes['hidden_size']}, "
            f"{sizes['num_attention_heads']} heads and {sizes.get('num_key_value_heads', sizes['num_attention_heads'])} key-value heads"
        )
    return Models(paths=paths, random=bool(parameters), parameters=parameters)


def other_data(config: RunConfig) -> dict[str, Any]:
    """Settings that put an embedded data set in the place of one on a hub that is not cached here; empty when it is not needed.

    Raises ConfigError when the configuration's rewards read columns that the embedded rows do not have.
    """
    source = config.data.train
    if not source.startswith(HUGGING_FACE) or _is_here(source):
        return {}
    if is_offline(config.algorithm):
        name = EMBEDDED_ROWS[make_offline_algorithm(config.algorithm).data_kind]
        return {"data.train": f"embedded:{name}", "data.id_field": None, **{f"data.{field}_field": field for field in OFFLINE_FIELDS}}
    name = "calc" if config.environment.name == "calc" else "sort5"
    fields = set(load_prompts(f"embedded:{name}", limit=1)[0].fields)
    try:
        load_rewards(config.rewards, fields)
    except ConfigError as error:
        raise ConfigError(
            f"data.train={source} is not on this machine, verify reads no network, and the embedded rows do not have what the rewards "
            f"read ({error}); fetch the data set (python -c \"import datasets; datasets.load_dataset('NAME')\"), or give a file with some "
            "of its rows: data.train=rows.jsonl"
        ) from error
    return {"data.train": f"embedded:{name}", "data.id_field": None, "data.prompt_field": "prompt"}


def _is_here(source: str) -> bool:
    """Whether the first row can be read (the command has switched the hub's libraries to their caches)."""
    try:
        return bool(list(identified_rows(source, None, 1)))
    except ConfigError:
        return False
