"""What the schema allows: its fields in order, the type of a key, and the check of plain values against both.

Keys are dotted (``training.optimizer.lr``); an entry of a list is its index (``rewards.0.weight``), and ``N``
stands for any index where a whole list is meant (``rewards.N.weight``). Pure: no file is read here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.config.schema import REQUIRED, RunConfig

ANY_INDEX = "N"
"""Stands in a key for the index of a list's entry."""

INTERPOLATION_MARK = "${"
"""Text with this mark is resolved by OmegaConf later, so its type is checked after that."""

_PLAIN_TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Any: "anything"}


@dataclass(frozen=True, kw_only=True)
class SchemaField:
    """One setting or, where ``section`` is true, a group of settings. ``default`` of a required one is ``???``."""

    key: str
    annotation: Any
    default: Any
    doc: str
    choices: tuple[str, ...]
    section: bool

    @property
    def required(self) -> bool:
        """Whether the user must give a value."""
        return isinstance(self.default, str) and self.default == REQUIRED


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a value came from, for messages: ``configs/a.yaml:12`` or ``command line``."""

    source: str
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def of(self, key: str) -> str:
        """The source, with the line of ``key`` where the source is a file."""
        return f"{self.source}:{self.lines[key]}" if key in self.lines else self.source


def optional_inner(annotation: Any) -> tuple[Any, bool]:
    """``(X, True)`` for ``X | None``, else ``(annotation, False)``."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(inner) != 1:
            raise TypeError(f"the schema supports X | None and no other union, found {annotation}")
        return inner[0], True
    return annotation, False


def type_name(annotation: Any) -> str:
    """The type in the words of messages and ``--help``: ``text or null``, ``a list of whole numbers`` ..."""
    inner, optional = optional_inner(annotation)
    if optional:
        return f"{type_name(inner)} or null"
    origin, arguments = typing.get_origin(inner), typing.get_args(inner)
    if origin is list:
        if dataclasses.is_dataclass(arguments[0]):
            return "a list of mappings"
        return f"a list of {_PLAIN_TYPE_NAMES[arguments[0]].removeprefix('a ')}" + ("s" if arguments[0] is not str else "")
    if origin is dict or dataclasses.is_dataclass(inner):
        return "a mapping (key: value)"
    return _PLAIN_TYPE_NAMES[inner]


def children(section: type) -> Iterator[SchemaField]:
    """The fields of one dataclass, in the order of the file; ``key`` is the bare name."""
    annotations = typing.get_type_hints(section)
    for item in dataclasses.fields(section):
        annotation = annotations[item.name]
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        yield SchemaField(
            key=item.name,
            annotation=annotation,
            default=default,
            doc=item.metadata.get("doc", ""),
            choices=tuple(item.metadata.get("choices", ())),
            section=_section_type(annotation) is not None,
        )


def _section_type(annotation: Any) -> type | None:
    """The dataclass behind a section or a list of sections; None for a plain setting."""
    inner, _ = optional_inner(annotation)
    if typing.get_origin(inner) is list:
        inner = typing.get_args(inner)[0]
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def schema_fields(section: type = RunConfig, prefix: str = "") -> Iterator[SchemaField]:
    """Every field below ``section``, sections before their members, keys fully dotted."""
    for child in children(section):
        key = prefix + child.key
        yield dataclasses.replace(child, key=key)
        inner = _section_type(child.annotation)
        if inner is not None:
            is_list = typing.get_origin(optional_inner(child.annotation)[0]) is list
            yield from schema_fields(inner, f"{key}.{ANY_INDEX}." if is_list else f"{key}.")


def find_field(key: str) -> SchemaField | None:
    """The field of ``key``. For a key inside a free mapping (``environment.options.x``) or of a list's entry: one with its type.

    None when the schema has no such key.
    """
    found = SchemaField(key="", annotation=RunConfig, default=None, doc="", choices=(), section=True)
    for part in key.split("."):
        inner, _ = optional_inner(found.annotation)
        origin, arguments = typing.get_origin(inner), typing.get_args(inner)
        if dataclasses.is_dataclass(inner):
            match = next((child for child in children(typing.cast(type, inner)) if child.key == part), None)
            if match is None:
                return None
            found = match
        elif origin is dict or inner is Any:
            found = SchemaField(key=part, annotation=Any, default=None, doc="", choices=(), section=False)
        elif origin is list and (part.isdigit() or part == ANY_INDEX):
            entry = arguments[0]
            found = SchemaField(key=part, annotation=entry, default=None, doc="", choices=(), section=dataclasses.is_dataclass(entry))
        else:
            return None
    return dataclasses.replace(found, key=key)


def nearest_keys(key: str) -> list[str]:
    """Up to three known keys that ``key`` may have meant, best first; empty when nothing is near.

    First the same last name in another section (``training.lr`` means ``training.optimizer.lr``), then the
    names of the same section, then the spelling of all.
    """
    parts = key.split(".")
    indices = [part for part in parts if part.isdigit()]
    wanted = ".".join(ANY_INDEX if part.isdigit() else part for part in parts).replace("-", "_").lower()
    parent, _, name = wanted.rpartition(".")
    known = [field.key for field in schema_fields()]
    same_name = [k for k in known if k.rpartition(".")[2] == name]
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    near_siblings = [siblings[n] for n in difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)]
    same_name.sort(key=lambda k: -difflib.SequenceMatcher(None, k, wanted).ratio())
    near = same_name + near_siblings
    if not near and parent in ("", *known):  # the section is right: a name far away must look very much alike
        near = [k for k in known if k.rpartition(".")[2] in difflib.get_close_matches(name, _last_names(known), n=2, cutoff=0.75)]
    elif not near:
        near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.6)
    best = list(dict.fromkeys(near))[:3]
    return [k.replace(f".{ANY_INDEX}.", f".{indices[0]}.") if len(indices) == 1 else k for k in best]


def _last_names(keys: Sequence[str]) -> list[str]:
    return sorted({key.rpartition(".")[2] for key in keys})


def unknown_key(key: str, place: str) -> str:
    """The message for a key that the schema does not have."""
    near = nearest_keys(key)
    if near:
        return f"{place}: unknown key {key}; did you mean {' or '.join(near)}?"
    parent = key.rpartition(".")[0]
    field = find_field(parent) if parent else None
    section = RunConfig if not parent else _section_type(field.annotation) if field else None
    names = ", ".join(child.key for child in children(section)) if section else ""
    return f"{place}: unknown key {key}" + (f"; {parent or 'the top level'} has {names}" if names else "; see --help for all keys")


def wrong_value(field: SchemaField, value: Any, place: str) -> str | None:
    """Why ``value`` cannot stand in a plain (non-section) field, or None when it can."""
    inner, optional = optional_inner(field.annotation)
    if value is None:
        return None if optional or inner is Any else f"{place}: {field.key} is null, expected {type_name(field.annotation)}"
    if isinstance(value, str) and (INTERPOLATION_MARK in value or value == REQUIRED):
        return None
    if field.choices and isinstance(value, str):
        if value in field.choices:
            return None
        near = difflib.get_close_matches(value, field.choices, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{place}: {field.key} is {value!r}, expected one of {', '.join(field.choices)}{hint}"
    allowed: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), bool: (bool,)}
    fits = inner is Any or (isinstance(value, allowed[inner]) and (inner is bool or not isinstance(value, bool)))
    if not fits:
        hint = f'; write it in quotes: "{value}"' if inner is str and isinstance(value, (int, float)) else ""
        return f"{place}: {field.key} is {value!r} ({_found(value)}), expected {type_name(field.annotation)}{hint}"
    if inner is float and not math.isfinite(value):
        return f"{place}: {field.key} is {value}, expected a finite number"
    return None


def _found(value: Any) -> str:
    """A value's type in the words of messages."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return _PLAIN_TYPE_NAMES.get(type(value), type(value).__name__)


def clean(values: Any, field: SchemaField, place: Place, problems: list[str]) -> Any:
    """Check ``values`` of ``field`` all the way down and return what may be merged; each fault adds a line to ``problems``.

    An empty section (``training:`` with nothing below) is an empty mapping, not null.
    """
    inner, optional = optional_inner(field.annotation)
    where = place.of(field.key)
    if dataclasses.is_dataclass(inner):
        return _clean_section(values, field, typing.cast(type, inner), place, problems)
    if typing.get_origin(inner) is dict:
        if values is None:
            return {}
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            problems.append(f"{where}: {field.key} is {values!r}, expected a mapping with text keys: {field.key}={{name: value}}")
            return {}
        return dict(values)
    if typing.get_origin(inner) is list:
        if values is None and optional:
            return None
        if not isinstance(values, list):
            problems.append(f"{where}: {field.key} is {values!r} ({_found(values)}), expected {type_name(inner)}: {field.key}=[...]")
            return []
        entry_type = typing.get_args(inner)[0]
        return [clean(v, _entry(field, i, entry_type), place, problems) for i, v in enumerate(values)]
    problem = wrong_value(field, values, where)
    if problem:
        problems.append(problem)
    return values


def _entry(field: SchemaField, index: int, annotation: Any) -> SchemaField:
    section = dataclasses.is_dataclass(annotation)
    return SchemaField(key=f"{field.key}.{index}", annotation=annotation, default=None, doc="", choices=(), section=section)


def _clean_section(values: Any, field: SchemaField, section: type, place: Place, problems: list[str]) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        problems.append(f"{place.of(field.key)}: {field.key} is {values!r}, expected a mapping (key: value)")
        return {}
    known = {child.key: child for child in children(section)}
    prefix = f"{field.key}." if field.key else ""
    cleaned = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name in known:
            cleaned[name] = clean(value, dataclasses.replace(known[name], key=key), place, problems)
        else:
            problems.append(unknown_key(key, place.of(key)))
    return cleaned


def clean_run(values: Mapping[str, Any], place: Place, problems: list[str]) -> dict[str, Any]:
    """:func:`clean` for a whole config."""
    root = SchemaField(key="", annotation=RunConfig, default=None, doc="", choices=(), section=True)
    return _clean_section(values, root, RunConfig, place, problems)


def joined(problems: Sequence[str], heading: Callable[[int], str]) -> str:
    """One message from several problems: the problem itself when it is alone, else a headed list."""
    if len(problems) == 1:
        return problems[0]
    return heading(len(problems)) + "".join(f"\n  - {problem}" for problem in problems)
