"""From ``config=NAME key=value ...`` to a checked :class:`~rlpost.config.schema.RunConfig`.

The order of precedence, later wins: the schema's defaults, the ``base:`` configs (the farthest first), the named config, the
overrides in the order given. Mappings are merged key by key, lists are replaced as a whole. Every problem of
every source is reported in one :class:`~rlpost.types.ConfigError`.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpost.config.fields import INTERPOLATION_MARK, Place, clean, clean_run, find_field, joined, optional_inner, unknown_key
from rlpost.config.schema import RunConfig
from rlpost.config.yaml_source import YamlDocument, first_comment, parse_scalar, read_yaml
from rlpost.types import ConfigError

COMMAND_LINE = "command line"
BASE_KEY = "base"
CONFIG_KEY = "config"


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A config with everything merged: the typed object, the file it was named by, and all values as YAML.

    ``yaml`` has no interpolations left and loads again to an equal ``config``.
    """

    config: RunConfig
    source: Path
    yaml: str


def config_directories() -> list[Path]:
    """Where names are looked up, in order: ``configs/`` of the working directory, then the configs that ship with rlpost.

    An installed wheel carries them as ``rlpost/configs``; in a checkout they are ``configs/`` beside the package.
    """
    package = Path(__file__).resolve().parents[1]
    shipped = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    return list(dict.fromkeys([Path("configs").resolve(), shipped]))


def available_configs() -> dict[str, tuple[Path, str]]:
    """Every config that a bare name finds: name -> (file, its first comment line)."""
    found: dict[str, tuple[Path, str]] = {}
    for directory in config_directories():
        for path in sorted(directory.glob("*.yaml")):
            found.setdefault(path.stem, (path, first_comment(path)))
    return dict(sorted(found.items()))


def find_config(name: str, beside: Path | None = None) -> Path:
    """The file that ``name`` means: with a ``/`` or an existing ``.yaml`` file a path, else a name in :func:`config_directories`.

    ``beside`` is the directory of the config that names it as its base; it is searched first.
    Raises :class:`ConfigError` when there is no such file, with the nearest name.
    """
    if beside is not None:
        for candidate in (beside / name, beside / f"{name}.yaml"):
            if candidate.is_file():
                return candidate.resolve()
    path = Path(name).expanduser()
    if path.is_file() and ("/" in name or path.suffix in (".yaml", ".yml")):
        return path.resolve()
    if "/" not in name:
        for directory in config_directories():
            for candidate in (directory / name, directory / f"{name}.yaml"):
                if candidate.is_file():
                    return candidate
    known = list(available_configs())
    near = difflib.get_close_matches(Path(name).name.removesuffix(".yaml"), known, n=1)
    looked = str(path.absolute()) if "/" in name else ", ".join(str(d) for d in config_directories())
    raise ConfigError(f"no config {name!r} (looked in {looked})" + (f"; did you mean {near[0]}?" if near else "") + _available_text())


def _available_text() -> str:
    lines = [f"\n  {name:<24} {comment}".rstrip() for name, (_, comment) in available_configs().items()]
    return "\navailable:" + "".join(lines) if lines else ""


def load_config(args: Sequence[str]) -> LoadedConfig:
    """Load the config that ``args`` name and apply their overrides.

    ``args`` are one ``config=NAME_OR_PATH`` and any number of ``key.sub=value``. Flags are the caller's.
    Raises :class:`ConfigError` with every unknown key, wrong type and missing value that was found.
    """
    name, overrides = split_arguments(args)
    source = find_config(name)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for path, document in _chain(source):
        content = {key: value for key, value in document.values.items() if key != BASE_KEY}
        values = merge(values, clean_run(content, Place(source=_shown(path), lines=document.lines), problems))
    for key, text in overrides:
        _apply_override(values, key, text, problems)
    if problems:
        raise ConfigError(joined(problems, lambda count: f"{count} problems in the configuration:"))
    return _build(values, source)


def split_arguments(args: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """What ``config=`` names, and the other words as keys and texts. Raises :class:`ConfigError` when there is not one ``config=``."""
    names: list[str] = []
    overrides: list[tuple[str, str]] = []
    for argument in args:
        key, equals, value = argument.partition("=")
        if not equals or not key.strip():
            known = argument.removesuffix(".yaml") in available_configs() or argument.endswith((".yaml", ".yml"))
            hint = f"; did you mean config={argument}?" if known else ""
            raise ConfigError(f"argument {argument!r} is not of the form key=value{hint}")
        if key.strip() == CONFIG_KEY:
            names.append(value.strip())
        else:
            overrides.append((key.strip(), value.strip()))
    if len(names) > 1:
        raise ConfigError(f"config= is given {len(names)} times ({', '.join(names)}); give one, and let it name the other as its base:")
    if not names or not names[0]:
        raise ConfigError("no config is given; expected config=NAME or config=PATH" + _available_text())
    return names[0], overrides


def _chain(source: Path) -> list[tuple[Path, YamlDocument]]:
    """``source`` and its bases, the farthest base first. Raises :class:`ConfigError` for a cycle."""
    chain = [(source, read_yaml(source))]
    while True:
        path, document = chain[-1]
        base = document.values.get(BASE_KEY)
        if base is None:
            return chain[::-1]
        place = Place(source=_shown(path), lines=document.lines).of(BASE_KEY)
        if not isinstance(base, str):
            raise ConfigError(f"{place}: base is {base!r}, expected the name or path of one config")
        try:
            base_path = find_config(base, beside=path.parent)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        seen = [earlier for earlier, _ in chain]
        if base_path in seen:
            raise ConfigError(f"{place}: base: {base} closes a cycle: " + " -> ".join(_shown(p) for p in [*seen, base_path]))
        chain.append((base_path, read_yaml(base_path)))


def _shown(path: Path) -> str:
    """``path`` relative to the working directory where it lies below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``under``: mappings key by key, everything else (lists too) replaced. Neither is changed."""
    result = dict(under)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _apply_override(values: dict[str, Any], key: str, text: str, problems: list[str]) -> None:
    """Set one ``key=text`` of the command line in ``values``; a fault adds a line to ``problems``."""
    if key == BASE_KEY:
        problems.append(f"{COMMAND_LINE}: base is a key of config files; give config= the config that you want")
        return
    field = find_field(key)
    if field is None:
        problems.append(unknown_key(key, COMMAND_LINE))
        return
    try:
        value = clean(override_value(text, field.annotation), field, Place(source=COMMAND_LINE), problems)
        parts = key.split(".")
        target: Any = values
        for depth, part in enumerate(parts[:-1]):
            target = _step_into(target, part, ".".join(parts[: depth + 1]))
        _assign(target, parts[-1], value, ".".join(parts[:-1]))
    except ConfigError as error:
        problems.append(f"{COMMAND_LINE}: {key}: {error}")


def _step_into(target: Any, part: str, key: str) -> Any:
    """The value of ``key``, whose last part is ``part``, inside ``target``; a section that no file mentions begins here."""
    if isinstance(target, dict):
        field = find_field(key)
        is_list = field is not None and typing.get_origin(field.annotation) is list
        return target.setdefault(part, [] if is_list else {})
    return _entries(target, part, key.rpartition(".")[0])[int(part)]


def _assign(target: Any, part: str, value: Any, owner: str) -> None:
    """Put ``value`` under ``part``; a mapping is merged into the one that stands there."""
    if isinstance(target, dict):
        target.update(merge(target, {part: value}))
    else:
        entries, index = _entries(target, part, owner), int(part)
        entries[index] = merge({"": entries[index]}, {"": value})[""]


def _entries(target: Any, part: str, owner: str) -> list[Any]:
    """``target`` as a list that has an entry number ``part``. Raises :class:`ConfigError` when it is none."""
    if not isinstance(target, list):
        raise ConfigError(f"{owner} is {target!r}, which has no keys below it")
    if not part.isdigit() or int(part) >= len(target):
        raise ConfigError(f"{owner} has {len(target)} entries (counted from 0), none is {part}; give the whole list: {owner}=[...]")
    return target


def override_value(text: str, annotation: Any) -> Any:
    """``text`` as the type that its key has: 5 stays the text "5" where text is expected, 1e-3 is a number where one is."""
    inner, optional = optional_inner(annotation)
    if inner is str:
        if optional and text in ("null", "~", ""):
            return None
        quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
        return parse_scalar(text) if quoted else text
    return text if text.startswith(INTERPOLATION_MARK) else parse_scalar(text)


def _build(values: Mapping[str, Any], source: Path) -> LoadedConfig:
    """Put ``values`` on the schema, resolve interpolations, and refuse what is missing or has a wrong type after that."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), dict(values))
        missing = sorted(key.replace("[", ".").replace("]", "") for key in OmegaConf.missing_keys(merged))
        if missing:
            raise ConfigError(_missing_message(missing, source))
        plain = OmegaConf.to_container(merged, resolve=True)
        problems: list[str] = []
        clean_run(plain, Place(source=f"{_shown(source)}, after resolving ${{...}}"), problems)  # type: ignore[arg-type]
        if problems:
            raise ConfigError(joined(problems, lambda count: f"{count} problems in the configuration:"))
        config = OmegaConf.to_object(merged)
        text = OmegaConf.to_yaml(merged, resolve=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{_shown(source)}: {key}{str(error).splitlines()[0]}") from error
    if not isinstance(config, RunConfig):
        raise AssertionError(f"OmegaConf made a {type(config).__name__} of the schema, expected RunConfig")
    return LoadedConfig(config=config, source=source, yaml=text)


def _missing_message(missing: Sequence[str], source: Path) -> str:
    lines = [f"\n  {key}: {field.doc}" for key in missing if (field := find_field(key)) is not None]
    return f"{_shown(source)}: {len(missing)} required values are missing; set them in the file or as key=value:" + "".join(lines)
