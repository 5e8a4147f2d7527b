"""``python -m rlpost.train config=NAME_OR_PATH key=value ...``: train, or check everything with ``--dry-run``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import closing

from rlpost.config.algorithms import is_offline
from rlpost.config.checks import check
from rlpost.config.derive import derive, format_derived, resolve_device
from rlpost.config.help import format_help
from rlpost.config.load import LoadedConfig, load_config
from rlpost.types import ConfigError, RlpostError

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR, EXIT_STOPPED = 0, 1, 2, 75
"""75 (EX_TEMPFAIL): stopped by a signal after saving; run the same command with resume=auto."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in words or "-h" in words:
        print(format_help())
        return EXIT_OK
    dry = "--dry-run" in words
    unknown = [word for word in words if word.startswith("-") and word != "--dry-run"]
    try:
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]}; there are --dry-run and --help, everything else is key=value")
        loaded = load_config([word for word in words if not word.startswith("-")])
        warnings = check(loaded.config)
        if dry:
            return dry_run(loaded, warnings)
        return train(loaded, warnings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RlpostError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED


def dry_run(loaded: LoadedConfig, warnings: Sequence[str]) -> int:
    """Every check that needs no cluster, then the resolved config, the derived values and the placement."""
    from rlpost.driver.preflight import preflight

    rows, more = preflight(loaded.config)
    derived = derive(loaded.config, device=resolve_device(loaded.config), row_count=rows)
    print(loaded.yaml)
    print(format_derived(derived))
    for warning in [*warnings, *more]:
        print(f"warning: {warning}")
    print("dry run: everything checked, nothing started")
    return EXIT_OK


def train(loaded: LoadedConfig, warnings: Sequence[str]) -> int:
    """Load inputs, start Ray and all parts, run the loop. The last line printed is ``run: DIRECTORY``."""
    from rlpost.driver.inputs import Inputs, OfflineInputs, load_inputs, load_offline_inputs
    from rlpost.driver.plan_check import PlanCheck
    from rlpost.driver.run import RunContext, run_with_restarts
    from rlpost.driver.run_directory import open_run, write_config
    from rlpost.observe import Console, make_trackers, setup_logging

    config = loaded.config
    inputs: Inputs | OfflineInputs = load_offline_inputs(config) if is_offline(config.algorithm) else load_inputs(config)
    derived = derive(config, device=resolve_device(config), row_count=inputs.count)
    run = open_run(config)
    write_config(run, loaded.yaml)
    console = Console(steps=config.schedule.steps, run_dir=run.path)
    setup_logging(run.path, "INFO", console)
    try:
        for line in format_derived(derived).splitlines():
            logging.getLogger("rlpost").info(line)
        for warning in [*warnings, *run.warnings]:
            console.warning(warning)
        if line := inputs.dropped_line(config):
            console.warning(line)
        if run.checkpoint is not None:
            console.message(f"resuming {run.path} from {run.checkpoint.name}")
        names = config.observe.trackers
        made = make_trackers(
            names, run.path, config={"yaml": loaded.yaml}, project=config.observe.wandb_project, run_name=config.name, console=console
        )
        with closing(made) as trackers:
            plan = PlanCheck.start(config, derived, run.path, console.message)
            context = RunContext(
                config=config,
                derived=derived,
                inputs=inputs,
                run_dir=run.path.absolute(),
                console=console,
                trackers=trackers,
                plan=plan,
            )
            stopped = run_with_restarts(context, run.checkpoint and run.checkpoint.absolute())
            if plan is not None:
                plan.report(console.message, console.warning)
    finally:
        console.close()
    print(f"run: {run.path}", flush=True)
    return EXIT_STOPPED if stopped else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
