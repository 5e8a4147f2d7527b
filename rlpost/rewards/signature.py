"""Does a function fit ``reward(prompt, completion, **fields)``, and which arguments does it get?

A function names the arguments that it wants; it gets by keyword

- ``prompt`` and ``completion`` (text), always;
- ``completion_tokens`` (number of sampled tokens) and ``truncated`` (cut off by a length limit), when it names them;
- the row's fields that it names, or all of them when it takes ``**fields``;
- the options of the configuration, each of which it must accept.

A row's column that is called like one of the first four is not passed on: the name means the model's completion.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlpost.plugins import nearest
from rlpost.types import ConfigError, RewardItem

EXPECTED = "reward(prompt, completion, **fields) -> float | None | RewardResult"
ALWAYS_GIVEN = ("prompt", "completion")
GIVEN_WHEN_NAMED = ("completion_tokens", "truncated")
RESERVED = frozenset(ALWAYS_GIVEN + GIVEN_WHEN_NAMED)

RewardFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class BoundReward:
    """A checked function with its options, ready to be called on items."""

    name: str
    function: RewardFunction
    is_async: bool
    where: str
    """``function (file:line)``, for messages."""
    named: frozenset[str]
    takes_all_fields: bool
    required: frozenset[str]
    """Parameters without default, which some row may not provide."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, item: RewardItem) -> dict[str, Any]:
        """The keyword arguments of one call. Raises ConfigError when this row lacks a field or has one with an option's name."""
        arguments: dict[str, Any] = {"prompt": item.prompt, "completion": item.completion}
        if "completion_tokens" in self.named:
            arguments["completion_tokens"] = item.tokens
        if "truncated" in self.named:
            arguments["truncated"] = item.truncated
        for key, value in item.fields.items():
            if key in RESERVED or not (self.takes_all_fields or key in self.named):
                continue
            if key in self.options:
                raise ConfigError(f"{self.where}: {key!r} is an option and also a field of this row; rename one of them.")
            arguments[key] = value
        arguments.update(self.options)
        missing = sorted(self.required - set(arguments))
        if missing:
            raise ConfigError(f"{self.where} requires {', '.join(missing)}, but this row has only {', '.join(item.fields) or 'no fields'}.")
        return arguments


def check_signature(
    function: RewardFunction, field_names: Collection[str] | None = None, options: Mapping[str, Any] | None = None, name: str = ""
) -> BoundReward:
    """Check that ``function`` can be called as a reward, and bind its options.

    ``field_names`` are the columns of the data besides the prompt; None skips what cannot be known without them.
    Raises ConfigError that names the function, its file and line, what was found and what is expected.
    """
    options = dict(options or {})
    where = describe(function)
    if inspect.isclass(function) or not callable(function):
        what = "a class" if inspect.isclass(function) else f"a {type(function).__name__}"
        raise ConfigError(f"{where} is {what}, not a function. Expected {EXPECTED}, or an object with such a __call__.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} has no signature that Python can read ({error}). Wrap it: def {EXPECTED}.") from error
    found = f"{where} has the signature {signature}"
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional_only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    if positional_only:
        names = ", ".join(positional_only)
        raise ConfigError(f"{found}: {names} can be given by position only, but arguments are given by name. Expected {EXPECTED}.")
    missing = [argument for argument in ALWAYS_GIVEN if argument not in by_keyword and not takes_all]
    if missing:
        raise ConfigError(f"{found}: it accepts no argument named {' or '.join(missing)}. Expected {EXPECTED}.")
    _check_options(found, options, by_keyword, takes_all, field_names)
    _check_required(found, options, by_keyword, field_names)
    _check_option_values(function, where, options)
    return BoundReward(
        name=name or getattr(_plain(function), "__name__", type(function).__name__),
        function=function,
        is_async=_is_async(function),
        where=where,
        named=frozenset(by_keyword),
        takes_all_fields=takes_all,
        required=frozenset(p.name for p in by_keyword.values() if p.default is p.empty),
        options=options,
    )


def describe(function: Any) -> str:
    """``name (file:line)`` of a function, for messages; just the name where there is no source."""
    plain = _plain(function)
    name = getattr(plain, "__qualname__", None) or f"{type(function).__qualname__} object"
    code = getattr(plain, "__code__", None)
    if code is not None:
        return f"{name} ({code.co_filename}:{code.co_firstlineno})"
    try:
        return f"{name} ({inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]})"
    except (TypeError, OSError):
        return str(name)


def _plain(function: Any) -> Any:
    """The function behind partials, decorators that keep ``__wrapped__``, and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isclass(function) and not inspect.isroutine(function) and callable(function):
        function = type(function).__call__
    return inspect.unwrap(function) if callable(function) else function


def _is_async(function: Any) -> bool:
    # The wrapper counts, not what it wraps: a sync decorator around an async function returns a value.
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _check_options(
    found: str,
    options: Mapping[str, Any],
    by_keyword: Mapping[str, inspect.Parameter],
    takes_all: bool,
    field_names: Collection[str] | None,
) -> None:
    """Every option is accepted, is no reserved name, and is no field of the data."""
    for option in options:
        if option in RESERVED:
            raise ConfigError(f"{found}: option {option!r} is a name that rlpost fills itself; rename the option.")
        if option not in by_keyword and not takes_all:
            accepted = [key for key in by_keyword if key not in RESERVED]
            close = nearest(option, accepted)
            hint = f"Nearest: {', '.join(close)}." if close else f"It accepts: {', '.join(accepted) or 'none'}."
            raise ConfigError(f"{found}: it accepts no option {option!r}. {hint}")
        if field_names is not None and option in field_names and (takes_all or option in by_keyword):
            raise ConfigError(f"{found}: {option!r} is both an option and a field of the data; rename one of them.")


def _check_required(
    found: str, options: Mapping[str, Any], by_keyword: Mapping[str, inspect.Parameter], field_names: Collection[str] | None
) -> None:
    """Every parameter without default is provided by the framework, an option, or (when they are known) a field."""
    if field_names is None:
        return
    fields = sorted(set(field_names) - RESERVED)
    for parameter in by_keyword.values():
        provided = parameter.name in RESERVED or parameter.name in options or parameter.name in fields
        if provided or parameter.default is not parameter.empty:
            continue
        close = nearest(parameter.name, fields)
        hint = f" (nearest: {', '.join(close)})" if close else ""
        raise ConfigError(
            f"{found}: nothing provides {parameter.name!r}. The data has the fields {', '.join(fields) or 'none'}{hint}; "
            f"name one of these, give the option {parameter.name}, or give the parameter a default. Expected {EXPECTED}."
        )


def _check_option_values(function: Any, where: str, options: Mapping[str, Any]) -> None:
    """Let a function that brings ``check_options(**options)`` refuse bad values before the run."""
    check = getattr(function, "check_options", None)
    if check is None:
        return
    try:
        check(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: options {dict(options)} do not work: {error}") from error
