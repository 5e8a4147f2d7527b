"""Options of a command that stand among the ``key=value`` words of a run: a plan's, a scheduler's. Each kind is one documented dataclass.

Their names differ from the top-level keys of a run's configuration, so that a word says by itself to whom it belongs.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlpost.config.fields import Place, SchemaField, children, clean, find_field, joined, type_name
from rlpost.config.load import COMMAND_LINE, CONFIG_KEY, override_value
from rlpost.config.yaml_source import read_yaml
from rlpost.types import ConfigError

Options = TypeVar("Options")

_HELP_WIDTH = 130


def split_options(words: Sequence[str], kind: type[Options], of: str, file: Path | None = None) -> tuple[Options, list[str]]:
    """Options among ``key=value`` words (over those of the YAML ``file``), and the words that are the run's configuration.

    ``of`` says whose options they are in messages: a plan, a Slurm job. Raises ConfigError for values of a wrong type, and for keys
    that neither has.
    """
    known = {child.key: child for child in children(kind)}
    problems: list[str] = []
    values = {} if file is None else _read(file, known, of, problems)
    others = []
    for word in words:
        key, equals, text = word.partition("=")
        if equals and key in known:
            place = Place(source=COMMAND_LINE)
            values[key] = clean(override_value(text, known[key].annotation), known[key], place, problems)
        elif equals and key != CONFIG_KEY and "." not in key and find_field(key) is None:
            problems.append(_unknown(key, known, of))
        else:
            others.append(word)
    if problems:
        raise ConfigError(joined(problems, lambda count: f"{count} problems in the options of {of}:"))
    return kind(**values), others


def _read(file: Path, known: dict[str, SchemaField], of: str, problems: list[str]) -> dict[str, Any]:
    document = read_yaml(file)
    place = Place(source=str(file), lines=document.lines)
    problems += [f"{place.of(key)}: {_unknown(key, known, of)}" for key in document.values if key not in known]
    return {key: clean(value, known[key], place, problems) for key, value in document.values.items() if key in known}


def _unknown(key: str, known: Iterable[str], of: str) -> str:
    near = difflib.get_close_matches(key, [*known, CONFIG_KEY], n=1)
    others = f"options of {of} are {', '.join(known)}; all else is the run's configuration"
    return f"unknown option {key}; " + (f"did you mean {near[0]}=?" if near else others)


def option_help(kind: type) -> str:
    """Every option of the dataclass ``kind`` with its type and its sentence, one below the other."""
    lines = []
    for child in children(kind):
        what = ", ".join(child.choices) or type_name(child.annotation).removesuffix(" or null")
        text = f"{child.doc} ({what}{'; required' if child.required else ''})"
        lines += textwrap.wrap(text, _HELP_WIDTH, initial_indent=f"  {child.key:<23} ", subsequent_indent=" " * 26)
    return "\n".join(lines)
