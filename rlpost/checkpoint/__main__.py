"""``python -m rlpost.checkpoint export RUN_OR_CHECKPOINT --to DIRECTORY``: a checkpoint as a Hugging Face directory."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpost.checkpoint.directory import MARK, find_newest, step_of
from rlpost.types import ConfigError


def find_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a complete checkpoint, else the newest one of the run at ``path``."""
    if step_of(path) >= 0:
        if not (path / MARK).exists():
            raise ConfigError(f"{path} has no completion mark: the run was stopped while writing it; choose another checkpoint")
        return path
    newest, warnings = find_newest(path)
    if newest is None:
        raise ConfigError(f"{path} is no checkpoint and no run directory with a complete one " + "; ".join(warnings))
    return newest


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.checkpoint", description="Work with checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write the trained model as a Hugging Face directory that transformers and vLLM load")
    export.add_argument("source", type=Path, help="a run directory (its newest complete checkpoint) or one checkpoint")
    export.add_argument("--to", type=Path, required=True, help="the directory to write; it must not exist")
    export.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="dtype of the weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        checkpoint = find_checkpoint(options.source)
        if options.to.exists():
            raise ConfigError(f"{options.to} exists already; nothing was overwritten, choose another directory")
        # What transformers brings along warns of kernels that are not needed here.
        for library in ("torchao", "torch.utils._pytree"):
            logging.getLogger(library).setLevel(logging.ERROR)
        from rlpost.checkpoint.export import export_checkpoint

        export_checkpoint(checkpoint, options.to, options.dtype)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"exported {checkpoint} to {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
