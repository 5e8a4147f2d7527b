"""``--help``: every setting with its type, default, choices and documentation, in the schema's own words."""

from __future__ import annotations

import textwrap
from typing import Any

from rlpost.config.fields import SchemaField, schema_fields, type_name
from rlpost.config.load import available_configs

_WIDTH = 110

_USAGE = """\
usage: python -m rlpost.train config=NAME_OR_PATH [key.sub=value ...] [--dry-run] [--help]

  config=NAME       a config of ./configs or one that ships with rlpost (below), with or without .yaml
  config=PATH       a YAML file; its `base:` key may name another config to start from
  key.sub=value     sets one value, after the file: training.optimizer.lr=1e-5  rewards.0.weight=2
                    lists and mappings are YAML: 'rewards=[{function: exact_match}]'
  --dry-run         checks everything, prints the resolved config, what follows from it and the placement
                    that it would ask for, and ends without starting Ray, torch or vLLM
  --help            prints this text
"""


def format_help() -> str:
    """The usage, the configs that a name finds, and every field of the schema grouped by section."""
    blocks = [_USAGE, "configs:"]
    for name, (_, comment) in available_configs().items():
        blocks += textwrap.wrap(comment or "-", _WIDTH, initial_indent=f"  {name:<24} ", subsequent_indent=" " * 27)
    blocks += ["", "settings: (N in a key counts the entries of a list, from 0)"]
    fields = list(schema_fields())
    blocks += ["", *(line for field in fields if not field.section and "." not in field.key for line in _setting(field))]
    for section in (field for field in fields if field.section):
        members = [f for f in fields if not f.section and f.key.rpartition(".")[0].removesuffix(".N") == section.key]
        blocks += ["", f"[{section.key}] {section.doc}", *(line for field in members for line in _setting(field))]
    return "\n".join(blocks) + "\n"


def _setting(field: SchemaField) -> list[str]:
    """The lines of one setting: key, type and default, then its choices and its documentation."""
    default = "required" if field.required else f"default {_value_text(field.default)}"
    lines = [f"  {field.key}  ({type_name(field.annotation)}; {default})"]
    if field.choices:
        lines.append(f"      one of: {', '.join(field.choices)}")
    return lines + textwrap.wrap(field.doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _value_text(value: Any) -> str:
    """A default as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_value_text(v) for v in value) + "]"
    return "{}" if value == {} else str(value)
