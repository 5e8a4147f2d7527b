"""Reading YAML the way a config means it: YAML 1.2 scalars, no duplicate keys, and the line of every key.

PyYAML follows YAML 1.1, where ``1e-3`` is text, ``012`` is ten, ``1:30`` is ninety and ``no`` is false. None of
these is what somebody who writes a config means.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlpost.types import ConfigError

_TAG = "tag:yaml.org,2002:"


class _ConfigLoader(yaml.SafeLoader):
    """``yaml.SafeLoader`` with the scalars of YAML 1.2's core schema; a key that stands twice is an error."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and key.tag != f"{_TAG}merge":
                raise yaml.constructor.ConstructorError(None, None, f"key {name} stands twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


_ConfigLoader.add_implicit_resolver(f"{_TAG}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_ConfigLoader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_ConfigLoader.add_implicit_resolver(f"{_TAG}int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_ConfigLoader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+.0123456789"),
)
_ConfigLoader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"^<<$"), ["<"])
_ConfigLoader.add_constructor(f"{_TAG}int", lambda loader, node: int(node.value))
_ConfigLoader.add_constructor(f"{_TAG}float", lambda loader, node: float(re.sub(r"\.(?=[inIN])", "", node.value)))


@dataclass(frozen=True, kw_only=True)
class YamlDocument:
    """A config file as read: plain values, and the 1-based line of every dotted key."""

    values: dict[str, Any]
    lines: dict[str, int]


def read_yaml(path: Path) -> YamlDocument:
    """Read a config file. Raises :class:`ConfigError` with file and line when it is not one YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=_ConfigLoader)
        values = yaml.load(text, Loader=_ConfigLoader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if values is None:
        return YamlDocument(values={}, lines={})
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds a {type(values).__name__}, expected a mapping (key: value)")
    lines: dict[str, int] = {}
    _collect_lines(node, "", lines)
    return YamlDocument(values=values, lines=lines)


def _collect_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    pairs: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(str(index), value, value) for index, value in enumerate(node.value)]
    for name, marked, value in pairs:
        lines[prefix + name] = marked.start_mark.line + 1
        _collect_lines(value, f"{prefix}{name}.", lines)


def parse_scalar(text: str) -> Any:
    """One value of the command line (a number, list, mapping ...). Raises :class:`ConfigError` when it is not YAML."""
    try:
        return yaml.load(text, Loader=_ConfigLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"cannot read {text!r} as a value: {error.problem}; quote the whole argument in the shell") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read {text!r} as a value: {error}") from error


def first_comment(path: Path) -> str:
    """The first comment line of a config without its mark; empty when the file does not begin with one."""
    with path.open(encoding="utf-8") as file:
        line = file.readline().strip()
    return line.lstrip("# ").strip() if line.startswith("#") else ""
