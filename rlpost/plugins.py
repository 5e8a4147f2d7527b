"""From a name in the configuration to a Python object: how rewards, environments and algorithms are found.

A name takes one of four forms, the same everywhere in rlpost:

    exact_match                 a built-in of the catalogue
    my_plugin                   an entry point of an installed package (group rlpost.rewards, rlpost.environments, ...)
    my_pkg.my_module:name       an attribute of an importable module
    path/to/file.py:name        an attribute of a file, relative to the current working directory

Guaranteed: whatever cannot be found is a :class:`ConfigError` that says what was looked up and what to write instead; an
exception inside the user's own module is shown with its traceback. Nothing here imports ray, torch or vllm.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpost.types import ConfigError


def resolve(spec: str, *, kind: str, group: str, catalogue: Mapping[str, str]) -> Any:
    """Return the object that ``spec`` names; see the module's docstring for the forms.

    ``kind`` is the word for error messages ("reward"), ``group`` the entry-point group, ``catalogue`` maps the
    built-in names to ``module:attribute``, so that nothing is imported before it is asked for. A built-in name wins over
    an entry point of the same name.

    Raises ConfigError when there is no such file, module, attribute or name, and when the module fails to import.
    """
    target, colon, attribute = spec.rpartition(":")
    if not colon:
        return _resolve_name(spec, kind, group, catalogue)
    if not target or not attribute:
        side = "after" if target else "before"
        raise ConfigError(f"{kind} {spec!r} is not complete: there is nothing {side} the colon. {_forms(kind, group)}")
    module = load_file(target, kind) if target.endswith(".py") else _import_module(target, kind, spec)
    return _attribute(module, attribute, kind, spec)


def load_file(path: str | Path, kind: str = "plugin") -> ModuleType:
    """Import a Python file under a module name of its own, once for each content of the file.

    The file's directory is appended to ``sys.path`` (last, so that it shadows nothing): files beside it can be imported.
    Raises ConfigError when the file does not exist or raises while it is imported (with the traceback).
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{kind} file {str(path)!r} does not exist: looked for {file} (paths are relative to {Path.cwd()}).")
    source = file.read_bytes()
    digest = hashlib.sha256(bytes(file) + b"\0" + source).hexdigest()[:12]
    name = f"rlpost_user_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"{kind} file {file} cannot be loaded as Python: expected a readable .py file.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before execution: dataclasses and pickle look their module up here
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"{kind} file {file} raised {type(error).__name__} while it was imported:\n{_user_traceback(error)}") from error
    return module


def entry_points(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """The installed entry points of ``group`` by name; none of them is imported."""
    return {point.name: point for point in importlib.metadata.entry_points(group=group)}


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Up to three of ``known`` that are spelt most like ``word``, best first."""
    return difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)


def _resolve_name(spec: str, kind: str, group: str, catalogue: Mapping[str, str]) -> Any:
    """A name without a colon: the catalogue, then the entry points."""
    if spec in catalogue:
        module, _, attribute = catalogue[spec].rpartition(":")
        return _attribute(_import_module(module, kind, spec), attribute, kind, spec)
    points = entry_points(group)
    if spec in points:
        point = points[spec]
        try:
            return point.load()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{kind} {spec!r} is the entry point {point.value!r}, which raised {type(error).__name__} while it was loaded:\n"
                f"{_user_traceback(error)}"
            ) from error
    raise ConfigError(f"no {kind} is named {spec!r}.{_name_hint(spec, [*catalogue, *points])} {_forms(kind, group)}")


def _name_hint(spec: str, known: list[str]) -> str:
    """What the user most likely meant by an unknown name."""
    if spec.endswith(".py"):
        return f" A file needs the name of the function or class in it: {spec}:NAME."
    if "." in spec:
        module, _, attribute = spec.rpartition(".")
        return f" Did you mean {module}:{attribute} (a colon before the attribute)?"
    close = nearest(spec, known)
    return f" Nearest known: {', '.join(close)}." if close else f" Known: {', '.join(sorted(known)) or 'none'}."


def _forms(kind: str, group: str) -> str:
    return (
        f"Give a built-in name, an installed entry point (group {group}), `package.module:{kind}` "
        f"or `path/file.py:{kind}` (relative to the current directory)."
    )


def _import_module(name: str, kind: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself (or a package on the way to it) is missing; any other name is a missing import inside it.
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            is_path = "/" in name or Path(name + ".py").is_file()
            hint = f" For a file, write its path: {name}.py:{spec.rpartition(':')[2]}." if is_path else ""
            raise ConfigError(
                f"{kind} {spec!r}: there is no module {error.name!r} to import.{hint} It must be installed, or lie below the current "
                f"directory {Path.cwd()} or a directory of PYTHONPATH."
            ) from error
        raise _import_failed(name, kind, spec, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, kind, spec, error) from error


def _import_failed(name: str, kind: str, spec: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{kind} {spec!r}: module {name} raised {type(error).__name__} while it was imported:\n{_user_traceback(error)}")


def _attribute(module: ModuleType, path: str, kind: str, spec: str) -> Any:
    """The (possibly dotted) attribute of a module."""
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            close = nearest(part, public)
            own = [name for name in public if getattr(getattr(found, name), "__module__", None) == module.__name__]
            hint = f"Nearest: {', '.join(close)}." if close else f"It defines: {', '.join(own) or 'nothing public'}."
            where = getattr(module, "__file__", None) or module.__name__
            raise ConfigError(f"{kind} {spec!r}: {where} has no attribute {path!r}. {hint}")
        found = getattr(found, part)
    return found


def _user_traceback(error: BaseException) -> str:
    """The traceback without the frames of the import machinery."""
    summary = traceback.TracebackException.from_exception(error)
    frames = [frame for frame in summary.stack if frame.filename != __file__ and "importlib" not in frame.filename]
    summary.stack = traceback.StackSummary.from_list(frames)
    return "".join(summary.format(chain=False)).rstrip()
