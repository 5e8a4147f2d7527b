"""Do the model, data and files that a config names exist? Looked up on this machine's file system, never on a network."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlpost.config.algorithms import is_offline
from rlpost.config.derive import longest_sequence
from rlpost.config.schema import RunConfig

EMBEDDED = "embedded:"
HUGGING_FACE = "hf:"
OUTPUTS = ("output_dir", "run_dir")
DATA_SUFFIXES = (".jsonl", ".parquet")

PLUGIN_FILE = re.compile(r"(.+\.py):[A-Za-z_][\w.]*")
"""A class or function of the user's own in a file."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_local(path: str) -> bool:
    """Whether a model path means a directory here, and not a hub name such as ``org/name``.

    ``a/b`` has the shape of a hub name; it is taken as local when a directory ``a`` stands here.
    """
    if path.startswith((".", "/", "~")):
        return True
    if "/" not in path:
        return False
    return _HUB_NAME.fullmatch(path) is None or Path(path.split("/")[0]).is_dir()


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a configuration, or of a part of it as mappings and lists, with its dotted key."""
    if isinstance(value, str):
        yield key, value
        return
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in inner:
        yield from texts(one, f"{key}.{name}" if key else str(name))


def out_of_reach(config: RunConfig, elsewhere: Sequence[str]) -> dict[str, str]:
    """Configuration key -> path, of what the config reads below the directories ``elsewhere``, which others see, and is not here."""
    found = {}
    for key, text in texts(dataclasses.asdict(config)) if elsewhere else ():
        plugin = PLUGIN_FILE.fullmatch(text)
        path = Path(plugin[1] if plugin else text)
        below = path.is_absolute() and any(path.is_relative_to(directory) for directory in elsewhere)
        if below and key not in OUTPUTS and not path.exists():
            found[key] = str(path)
    return found


def check_inputs(config: RunConfig, unseen: Collection[str] = ()) -> Iterator[str]:
    """Problems with the model, data, template and resume directory that the config names, but for the keys ``unseen``."""
    for key, path in {"model.path": config.model.path, **other_models(config)}.items():
        if key not in unseen:
            yield from _model(config, key, path)
    for key, source in {"data.train": config.data.train, "data.evaluation": config.data.evaluation}.items():
        if source is not None and key not in unseen:
            yield from _data(key, source)
    template = config.model.chat_template
    if template is not None and "model.chat_template" not in unseen and not Path(template).expanduser().is_file():
        yield f"model.chat_template: no file {_absolute(template)}; give the path of a template file, or null for the tokenizer's own"
    resume = config.resume
    if resume not in ("never", "auto") and "resume" not in unseen and not Path(resume).expanduser().is_dir():
        yield f"resume={resume}: no run directory {_absolute(resume)}; expected never, auto or the path of a run"


def other_models(config: RunConfig) -> dict[str, str]:
    """The models besides the policy that a run reads, by configuration key. All get the policy's tokens."""
    paths = {"algorithm.reference_path": config.algorithm.reference_path, "algorithm.critic.path": config.algorithm.critic.path}
    if not is_offline(config.algorithm):
        paths |= {f"rewards.{number}.model": reward.model for number, reward in enumerate(config.rewards)}
    return {key: path for key, path in paths.items() if path is not None}


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _model(config: RunConfig, key: str, path: str) -> Iterator[str]:
    if path.startswith(EMBEDDED):
        return
    directory = Path(path).expanduser()
    if directory.is_file():
        yield f"{key}={path} is a file, expected a Hugging Face model directory (with config.json in it)"
    elif not directory.exists():
        if looks_local(path):
            yield (
                f"{key}={path}: no directory {_absolute(path)}; give an existing model directory, a hub name (org/name), "
                "or embedded:NAME (python -m rlpost.models list)"
            )
    elif not (directory / "config.json").is_file():
        yield f"{key}={path}: {_absolute(path)} has no config.json, so it is not a Hugging Face model directory"
    elif key == "model.path":
        yield from _architecture(config, directory / "config.json")


def _architecture(config: RunConfig, file: Path) -> Iterator[str]:
    """What the model's own config rules out: sequences beyond its positions, heads that tensor parallelism cannot split."""
    try:
        model = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        yield f"model.path: {file} is not valid JSON: {error}"
        return
    positions, heads = model.get("max_position_embeddings"), model.get("num_attention_heads")
    length = longest_sequence(config)[0]
    if isinstance(positions, int) and not model.get("rope_scaling") and length > positions:
        yield (
            f"sequences may have {length} tokens, but the model of model.path has {positions} positions; "
            f"lower data.max_prompt_tokens, sampling.max_new_tokens or environment.max_turns, or set engine.max_model_len={positions}"
        )
    parallel = config.engine.tensor_parallel
    if isinstance(heads, int) and parallel >= 1 and heads % parallel:
        yield f"engine.tensor_parallel={parallel} does not divide the model's {heads} attention heads; set a divisor of {heads}"


def _data(key: str, source: str) -> Iterator[str]:
    if source.startswith((EMBEDDED, HUGGING_FACE)):
        if not source.partition(":")[2].strip(":"):
            yield f"{key}={source} names nothing; expected embedded:NAME or hf:NAME[:SPLIT]"
        return
    path = Path(source).expanduser()
    if path.is_dir():
        yield f"{key}={source} is a directory, expected one .jsonl or .parquet file"
    elif not path.exists():
        yield f"{key}: no file {_absolute(source)}; give a .jsonl or .parquet file, hf:NAME[:SPLIT] or embedded:NAME"
    elif path.suffix not in DATA_SUFFIXES:
        yield f"{key}={source} ends in {path.suffix or 'nothing'}, expected {' or '.join(DATA_SUFFIXES)}"


def warn_inputs(config: RunConfig) -> Iterator[str]:
    """What this machine cannot tell, or lacks: it may be there where the run takes place."""
    path = config.model.path
    if "/" not in path and not path.startswith(EMBEDDED) and not Path(path).exists():
        yield f"model.path={path}: no directory of that name here, so it is taken as a name on the hub"
    sources = [s for s in (config.data.train, config.data.evaluation) if s is not None and s.startswith(HUGGING_FACE)]
    if sources and importlib.util.find_spec("datasets") is None:
        yield f"{sources[0]} needs the package datasets, which is not installed here: pip install 'rlpost[datasets]'"
