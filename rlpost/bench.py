"""``python -m rlpost.bench sync``: what a weight sync costs on this machine, for every transport that can run here."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpost.types import ConfigError, RlpostError

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

DESCRIPTION = """Brings weights from real trainer ranks to real vLLM engines, as a run does, with each transport in turn, and says what
it costs: seconds by stage, pause, bytes, memory. Between two syncs a share of the elements changes, or (from-run) the consecutive
checkpoints of a run are loaded. The last line printed is one JSON object."""

USAGE = """python -m rlpost.bench sync --model PATH_OR_SHAPE [options]
       python -m rlpost.bench sync [options] from-run RUN_DIRECTORY"""

EXAMPLES = """examples:
  python -m rlpost.bench sync --model 25m                                        every transport, 1 % changed
  python -m rlpost.bench sync --model 150m --transport collective,delta --changed 0.001 --engines 2
  python -m rlpost.bench sync --model /models/qwen3-0.6b --ranks 2 --json sync.json      for the planner
  python -m rlpost.bench sync --transport delta --carrier disk --directory /shared/weights --model 100m
  python -m rlpost.bench sync from-run runs/mine                                 the checkpoints of a run, one after the other

The parts: --ranks trainer processes (float32 weights, sharded) and --engines engine processes, one thread each."""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m rlpost.bench", description="Measure parts of a run by themselves.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sync = commands.add_parser(
        "sync", help="weight sync, by transport", description=DESCRIPTION, epilog=EXAMPLES,
        usage=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    sync.add_argument(
        "--model",
        metavar="PATH_OR_SHAPE",
        help="a Hugging Face directory, embedded:NAME, or a shape with random weights: 10m, 100m, 1b ...",
    )
    sync.add_argument("--transport", default="all", help="all, or some of collective,ipc,disk,delta (default: %(default)s)")
    sync.add_argument("--carrier", default="auto", help="what carries deltas: collective, ipc or disk (default: auto, collective)")
    sync.add_argument("--engines", type=int, default=1, metavar="N", help="engines (default: %(default)s)")
    sync.add_argument("--ranks", type=int, default=1, metavar="N", help="trainer ranks (default: %(default)s)")
    sync.add_argument(
        "--changed", type=float, default=0.01, metavar="SHARE", help="elements that change between syncs (default: %(default)s)"
    )
    sync.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="what engines hold (default: %(default)s)")
    sync.add_argument("--repeats", type=int, default=3, metavar="N", help="measured syncs of each transport (default: %(default)s)")
    sync.add_argument("--bucket-mib", type=int, default=8, metavar="N", help="weights.bucket_mib (default: %(default)s)")
    sync.add_argument("--trainable", metavar="REGEX", help="training.trainable: names of the parameters that change (default: all)")
    sync.add_argument("--directory", metavar="DIR", help="weights.directory of the disk carrier (default: a temporary one)")
    sync.add_argument(
        "--device", default="auto", choices=("auto", "cpu", "gpu"), help="placement.device (gpu: not run yet; default: %(default)s)"
    )
    sync.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON object there")
    sync.add_argument("--from-run", type=Path, metavar="RUN_DIRECTORY", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code (2 for what the user can correct)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser().parse_args(["--from-run" if word == "from-run" else word for word in words])
    scratch = Path(tempfile.mkdtemp(prefix="rlpost-bench-"))
    try:
        found = bench_sync(options, scratch)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _remove(scratch, EXIT_USER_ERROR)
    except RlpostError as error:
        print(f"error: {type(error).__name__}: {error}\nthe logs of all parts are in {scratch}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return _remove(scratch, EXIT_INTERRUPTED)
    _remove(scratch)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)
    return EXIT_OK


def bench_sync(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Check, build the model if need be, measure, print the table. Returns the JSON object."""
    from rlpost.config.derive import resolve_device
    from rlpost.config.schema import PlacementConfig, RunConfig
    from rlpost.models import shapes
    from rlpost.weights import bench_plan as plan

    transports, explicit = plan.parse_transports(options.transport)
    if options.carrier not in plan.CARRIERS:
        raise ConfigError(f"--carrier {options.carrier!r}: expected one of {', '.join(plan.CARRIERS)}")
    for name in ("engines", "ranks", "repeats", "bucket_mib"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 1 or more")
    plan.check_changed(options.changed)
    plan.check_json(options.json)
    checkpoints: tuple[str, ...] = ()
    name, trainable = options.model, options.trainable
    if options.from_run is not None:
        checkpoints = tuple(str(directory.absolute()) for directory in plan.find_checkpoints(options.from_run))
        of_run, trained = plan.run_model(options.from_run)
        name, trainable = name or of_run, trainable or trained
    if not name:
        raise ConfigError("--model is missing: give a shape (25m, 100m ...), a model directory, or from-run RUN_DIRECTORY")
    plan.check_trainable(trainable or "all")
    model = plan.find_model(name)
    device = resolve_device(RunConfig(placement=PlacementConfig(device=options.device)))
    if device == "cpu":
        needs = plan.memory_estimate_gib(
            model, dtype=options.dtype, ranks=options.ranks, engines=options.engines, deltas="delta" in transports
        )
        plan.check_memory(needs, plan.free_memory_gib(), model.label)
        say(f"{model.label}: {model.parameters:,} parameters; all parts need about {sum(needs.values()):.1f} GiB")
    directory = options.directory or str(scratch / "weights")
    if "disk" in transports or ("delta" in transports and options.carrier == "disk"):
        plan.check_directory(directory, model.parameters * plan.DTYPE_BYTES[options.dtype])
    if model.shape and not model.path:
        say(f"building a model of shape {model.shape}, once")
        model = replace(model, path=str(shapes.build(model.shape)))
    settings = plan.BenchSettings(
        model=model.label,
        model_path=model.path,
        transports=transports,
        explicit=explicit,
        carrier=options.carrier,
        engines=options.engines,
        ranks=options.ranks,
        dtype=options.dtype,
        device=device,
        bucket_mib=options.bucket_mib,
        repeats=options.repeats,
        changed=None if checkpoints else options.changed,
        checkpoints=checkpoints,
        trainable=trainable or "all",
        directory=directory if "://" in directory else str(Path(directory).absolute()),
        logs=str(scratch / "logs"),
    )
    from rlpost.weights.bench_report import format_result, result
    from rlpost.weights.bench_sync import measure

    found = result(measure(settings, say), model.parameters)
    print(format_result(found), flush=True)
    return found


def say(line: str) -> None:
    """Progress, on the side: what is printed on standard output is the result."""
    print(line, file=sys.stderr, flush=True)


def _remove(scratch: Path, code: int = EXIT_OK) -> int:
    shutil.rmtree(scratch, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
