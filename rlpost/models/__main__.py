"""``python -m rlpost.models``: list, build, fetch and find the models that need no hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlpost.models import embedded, smollm2
from rlpost.types import ConfigError, RlpostError

EXIT_USER_ERROR = 2

HELP = f"""Models that rlpost makes or fetches by itself. They are kept in $RLPOST_CACHE/models (~/.cache/rlpost/models);
a model that is there already is not made again. The last line printed is the model's directory.

  list                 names, and whether each is there
  build NAME           build and warm-start an embedded model
  fetch {smollm2.NAME}   download and convert a pre-trained model
  path NAME            print the directory: embedded models are built if need be, fetched ones must be there
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code (0, or 2 with a message for a user error)."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.models", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="names, and whether each is there")
    for command, words in (
        ("build", "build and warm-start an embedded model"),
        ("fetch", "download and convert a pre-trained model"),
        ("path", "print a model's directory"),
    ):
        subparser = commands.add_parser(command, help=words)
        subparser.add_argument("name", metavar="NAME")
        if command == "fetch":
            subparser.add_argument("--to", metavar="DIRECTORY", type=Path, default=None, help="make it there instead of in the cache")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            _list()
        elif options.command == "build":
            print(_build(options.name))
        elif options.command == "fetch":
            print(_fetch(options.name, options.to))
        else:
            print(_path(options.name))
    except RlpostError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _list() -> None:
    for name, description in embedded.EMBEDDED_MODELS.items():
        _list_one(name, "build", description, embedded.model_path(name))
    _list_one(smollm2.NAME, "fetch", smollm2.DESCRIPTION, smollm2.directory())


def _list_one(name: str, command: str, description: str, directory: Path) -> None:
    there = f"at {directory}" if smollm2.is_complete(directory) else "not here yet"
    print(f"{name:<14} {command}  {description} ({there})")


def _build(name: str) -> Path:
    if name == smollm2.NAME:
        raise ConfigError(f"{name} is fetched, not built: python -m rlpost.models fetch {name}")
    if name not in embedded.EMBEDDED_MODELS:
        raise ConfigError(f"no model {name!r}; known are {', '.join([*embedded.EMBEDDED_MODELS, smollm2.NAME])}")
    return embedded.build(name)


def _fetch(name: str, target: Path | None) -> Path:
    if name != smollm2.NAME:
        raise ConfigError(f"{name!r} cannot be fetched, only {smollm2.NAME}; embedded models are built: python -m rlpost.models build NAME")
    return smollm2.fetch(target, say=print)


def _path(name: str) -> Path:
    if name != smollm2.NAME:
        return _build(name)
    directory = smollm2.directory()
    if not smollm2.is_complete(directory):
        raise ConfigError(f"{name} is not in the cache ({directory}): python -m rlpost.models fetch {name}")
    return directory


if __name__ == "__main__":
    sys.exit(main())
