"""What of a directory goes along with a job that runs elsewhere: the code and the small files that the run's configuration names.

Left out are caches, environments, runs, model weights, data that the configuration does not name, and in a git checkout all that git
ignores. Guaranteed: whoever packs the directory with :attr:`Package.excludes` (gitignore's patterns) gets :attr:`Package.files`, no
more and no less; and what the configuration names by a relative path is among them, or :func:`make_package` says why not.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from rlpost.config.fields import joined
from rlpost.config.inputs import EMBEDDED, HUGGING_FACE, OUTPUTS, PLUGIN_FILE, other_models, texts
from rlpost.config.load import BASE_KEY, config_directories, find_config
from rlpost.config.schema import RunConfig
from rlpost.config.yaml_source import read_yaml
from rlpost.types import ConfigError

NEVER = (".git/", ".hg/", ".svn/", ".venv*/", "venv/", "node_modules/", "__pycache__/", "*.pyc", ".*_cache/", ".cache/", ".hypothesis/",
         "*.egg-info/", ".tox/", ".nox/", ".ipynb_checkpoints/", ".DS_Store")  # fmt: skip
"""Of no use on a cluster."""

UNLESS_NAMED = ("/runs/", "/checkpoints/", "/wandb/", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.h5",
                "*.jsonl", "*.parquet", "*.arrow", "*.npy", "*.npz", "*.tar", "*.gz", "*.tgz", "*.zip", "*.zst", "*.whl")  # fmt: skip
"""Runs, weights, data and archives: kept only where the configuration names them."""

ENVIRONMENT_FILE = "pyvenv.cfg"
"""Lies in every virtual environment, whatever its name."""

PLUGIN_KEYS = re.compile(r"environment\.name|rewards\.\d+\.function|algorithm\.name|algorithm\.policy_loss")
_MODULE = re.compile(r"([A-Za-z_]\w*)(?:\.\w+)*:[A-Za-z_][\w.]*")

GIT_TIMEOUT_S = 60
LARGEST = 5
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Package:
    """``files``: path relative to ``directory`` -> bytes."""

    directory: Path
    files: Mapping[str, int]
    excludes: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files, before they are compressed."""
        return sum(self.files.values())

    def contents(self) -> dict[str, str]:
        """Entries of the directory, the largest first, with what is packaged of them: ``{"rlpost/": "140 file(s), 1.1 MiB"}``."""
        entries: dict[str, list[int]] = {}
        for path, size in self.files.items():
            first, slash, _ = path.partition("/")
            entries.setdefault(first + slash, []).append(size)
        order = sorted(entries, key=lambda entry: -sum(entries[entry]))
        return {entry: f"{len(entries[entry])} file(s), {_size(sum(entries[entry]))}" for entry in order}

    def check_size(self, limit_mib: float) -> None:
        """Raise ConfigError with the largest files and directories when it is larger than ``limit_mib``."""
        if self.size <= limit_mib * MIB:
            return
        sizes = dict(self.files)
        for path, size in self.files.items():
            if "/" in path:
                top = path.partition("/")[0] + "/"
                sizes[top] = sizes.get(top, 0) + size
        largest = sorted(sizes, key=lambda path: -sizes[path])[:LARGEST]
        raise ConfigError(
            f"the package of {self.directory} has {len(self.files)} files, {_size(self.size)}, more than max_mib={limit_mib:g}; "
            f"the largest: {', '.join(f'{path} {_size(sizes[path])}' for path in largest)}; leave out what the run does not read "
            '(exclude=["large_directory/", "*.csv"]), or put it on a disk that all nodes see and name it by its absolute path'
        )


def make_package(directory: Path, named: Mapping[str, str], exclude: Sequence[str], outputs: Sequence[str]) -> Package:
    """What of ``directory`` is sent. ``named``: configuration key -> relative path that must be there; ``exclude``: the user's patterns;
    ``outputs``: absolute directories that a run writes to.

    Raises ConfigError for a directory that is none, a pattern of another form, and a named path that would be missing.
    """
    if not directory.is_dir():
        raise ConfigError(f"working_directory: no directory {directory}; set working_directory to the directory with your configuration")
    for pattern in exclude:
        if "**" in pattern or pattern.startswith(("!", "#")) or not pattern.strip("/"):
            raise ConfigError(f"exclude has {pattern!r}, expected *.suffix, name/ (directories), or /path/from/the/top; change it")
    inside = [os.path.relpath(path, directory) for path in outputs]
    soft = [*UNLESS_NAMED, *(f"/{_literal(path)}/" for path in inside if path != "." and not path.startswith(".."))]
    never = [*NEVER, *exclude]
    _check_named(directory, named, never)
    wanted = {os.path.normpath(path) for path in named.values()}
    files = {}
    for path in sorted({*_candidates(directory, [*never, *soft]), *_below(directory, wanted)}):
        forced = any(path == name or path.startswith(f"{name}/") for name in wanted)
        if not matches(path, never) and (forced or not matches(path, soft)):
            files[path] = (directory / path).stat().st_size
    return Package(directory=directory, files=files, excludes=tuple(_excludes(directory, files, never, soft)))


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether one of ``patterns`` leaves out the file ``path`` (relative), by itself or by a directory above it.

    The part of gitignore's language that has no ``**`` and no ``!``: a pattern with a slash before its end is counted from the top,
    another one holds at every depth; one with a slash at its end is for directories only.
    """
    return any(_matches(path.split("/"), pattern) for pattern in patterns)


def _matches(parts: Sequence[str], pattern: str) -> bool:
    name = pattern.rstrip("/")
    last = len(parts) - (1 if pattern.endswith("/") else 0)
    if "/" not in name:
        return any(fnmatchcase(part, _unescaped(name)) for part in parts[:last])
    wanted = name.lstrip("/").split("/")
    return len(wanted) <= last and all(fnmatchcase(part, _unescaped(word)) for part, word in zip(parts, wanted, strict=False))


def _literal(path: str) -> str:
    """``path`` as a pattern that means only it."""
    return re.sub(r"([*?\[\]\\ ])", r"\\\1", path)


def _unescaped(pattern: str) -> str:
    """gitignore's escapes as fnmatch has them."""
    return re.sub(r"\\(.)", lambda match: f"[{match[1]}]" if match[1] in "*?[" else match[1], pattern)


def _check_named(directory: Path, named: Mapping[str, str], never: Sequence[str]) -> None:
    problems = []
    for key, path in named.items():
        plain = os.path.normpath(path)
        inner = f"{plain}/x" if (directory / plain).is_dir() else plain
        if plain.startswith(".."):
            problems.append(f"{key}: {path} lies outside the working directory {directory}")
        elif not (directory / plain).exists():
            problems.append(f"{key}: there is no {path} in the working directory {directory}")
        elif hits := [pattern for pattern in never if matches(inner, [pattern])]:
            problems.append(f"{key}: {path} is left out of the package by {', '.join(hits)}")
    if problems:
        raise ConfigError(
            joined(problems, lambda count: f"{count} files that the run reads would not be on the cluster:")
            + "; move what the run reads into the working directory, or to a disk that all nodes see, named by its absolute path"
        )


def _candidates(directory: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Relative paths of files: those that git tracks or would add, all where there is no git checkout; no virtual environments."""
    files = list(_known_to_git(directory)) or list(_walked(directory, patterns))
    environments = {path.rpartition("/")[0] + "/" for path in files if PurePosixPath(path).name == ENVIRONMENT_FILE}
    return (path for path in files if not any(path.startswith(one) for one in environments))


def _known_to_git(directory: Path) -> Iterator[str]:
    """Nothing where git is missing, or knows nothing of the directory."""
    command = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    for path in os.fsdecode(done.stdout).split("\0") if done.returncode == 0 else ():
        place = directory / path
        if path and place.is_file():
            yield path
        elif path and place.is_dir() and not place.is_symlink():  # another checkout inside this one
            yield from (f"{path.rstrip('/')}/{inner}" for inner in _known_to_git(place))


def _walked(directory: Path, patterns: Sequence[str]) -> Iterator[str]:
    for place, directories, files in os.walk(directory):
        relative = os.path.relpath(place, directory)
        prefix = "" if relative == "." else f"{relative}/"
        directories[:] = [name for name in directories if not matches(f"{prefix}{name}/x", patterns)]
        yield from (prefix + name for name in files if os.path.isfile(os.path.join(place, name)))


def _below(directory: Path, named: Iterable[str]) -> Iterator[str]:
    """The files among ``named``, and all below its directories."""
    for name in named:
        if (directory / name).is_file():
            yield name
        else:
            yield from (f"{name}/{path}" for path in _walked(directory / name, ()))


def _excludes(directory: Path, files: Mapping[str, int], never: Sequence[str], soft: Sequence[str]) -> Iterator[str]:
    """Patterns that leave out all but ``files``: general ones where they hit none of them, and single paths for the rest."""
    general = [*never, *(pattern for pattern in soft if not any(matches(path, [pattern]) for path in files))]
    yield from general
    parents = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    todo = [""]
    while todo:
        prefix = todo.pop()
        for entry in sorted(os.scandir(directory / prefix), key=lambda one: one.name):
            path = prefix + entry.name
            if path in parents:
                todo.append(f"{path}/")
            elif path not in files and not matches(f"{path}/x" if entry.is_dir() else path, general):
                yield f"/{_literal(path)}"


def _size(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size >= MIB else f"{size / 1024:.1f} KiB"


# ---- what the configuration names --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Named:
    """What a configuration names in the file system: key -> path."""

    inside: Mapping[str, str]
    """Relative paths, which a package of the working directory must hold."""
    absolute: Mapping[str, str]
    """The same path must be there on the cluster."""
    installed: Mapping[str, str]
    """Modules that do not lie in the working directory."""


def named_by(config: RunConfig, source: Path, directory: Path) -> Named:
    """``source`` is the file of the configuration; relative paths begin in ``directory``, and here where the run was checked.

    Raises ConfigError for a model's directory by a relative path (weights are not packaged), and for a configuration file that neither
    lies in the directory nor comes with rlpost.
    """
    named = paths_of(config, directory)
    files = dict(_config_files(source, directory))
    models = {"model.path": config.model.path, **other_models(config)}
    if local := [f"{key}={models[key]}" for key in models if key in named.inside]:
        raise ConfigError(
            f"{', '.join(local)} is a directory of this machine, and models are not packaged: copy it to a disk that all nodes see and "
            "give its absolute path there, or give a hub name"
        )
    return dataclasses.replace(named, inside={**files, **named.inside})


def paths_of(config: RunConfig, directory: Path) -> Named:
    """What the values of the configuration name; relative paths begin as in :func:`named_by`."""
    inside: dict[str, str] = {}
    absolute: dict[str, str] = {}
    installed: dict[str, str] = {}
    models = {"model.path": config.model.path, **other_models(config)}
    for key, text in texts(dataclasses.asdict(config)):
        plugin = PLUGIN_FILE.fullmatch(text)
        path = plugin[1] if plugin else text
        if text.startswith((EMBEDDED, HUGGING_FACE)) or "://" in text or key in OUTPUTS:
            continue
        if path.startswith(("/", "~")):
            absolute[key] = path
        elif PLUGIN_KEYS.fullmatch(key) and not plugin and (module := _MODULE.fullmatch(text)):
            places = [place for place in (module[1], f"{module[1]}.py") if (directory / place).exists()]
            (inside if places else installed)[key] = places[0] if places else text.partition(":")[0]
        elif plugin or ((key in models or _looks_like_path(path)) and any((place / path).exists() for place in (directory, Path()))):
            inside[key] = path
    return Named(inside=inside, absolute=absolute, installed=installed)


def config_word(source: Path, directory: Path) -> str:
    """``config=...`` as it finds the configuration from inside ``directory``, or among those that come with rlpost."""
    if source.is_relative_to(directory.resolve()):
        return f"config=./{source.relative_to(directory.resolve())}"
    return f"config={source.stem}"


def _config_files(source: Path, directory: Path) -> Iterator[tuple[str, str]]:
    """The configuration's file and its bases, those that come with rlpost apart. Raises ConfigError for one that lies elsewhere."""
    shipped = config_directories()[-1]
    file: Path | None = source
    while file is not None:
        key = "config" if file == source else BASE_KEY
        if file.is_relative_to(directory.resolve()):
            yield f"{key} ({file.name})", str(file.relative_to(directory.resolve()))
        elif file.parent != shipped:
            raise ConfigError(f"{key}: {file} lies outside the working directory {directory}; copy it there, or set working_directory")
        base = read_yaml(file).values.get(BASE_KEY)
        file = None if base is None else find_config(base, beside=file.parent)


def _looks_like_path(text: str) -> bool:
    """No single word: a run, a project or a column may be called as a directory is."""
    return "\n" not in text and ("/" in text or bool(PurePosixPath(text).suffix))
