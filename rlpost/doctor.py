"""``python -m rlpost.doctor``: is this machine, this cluster, this configuration fit for a run? Exit code 1 when something is not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rlpost.config.schema import RunConfig
from rlpost.diagnosis.needs import needs_of
from rlpost.diagnosis.report import Finding, exit_code, format_findings, to_json
from rlpost.types import ConfigError, RlpostError

EXIT_FAILED, EXIT_USER_ERROR = 1, 2

MACHINE = """Looks at this machine: versions of Python and packages, NVIDIA GPUs (driver, memory in use, errors, NVLink), InfiniBand and
network cards, memory and the limits of its control group, /dev/shm, ulimits, CPUs, room and speed of the disks, what old sessions of Ray
left, host name and ports, the clock, and variables that break runs. With a configuration also what the run asks of the machine."""

CLUSTER = """Looks at every node of a Ray cluster, from an actor on each: all that is checked of one machine, and the same versions
on every node, the skew of the clocks, one shared output_dir, Ray's resources against what the configuration asks for (the bundle that
finds no place is named), and the bandwidth of all-reduce and broadcast between each node and the next. Without a cluster Ray is
started here."""

VERIFY = """Does training compute the right thing with this configuration, here? The configuration and its model's architecture, scaled
down, go through the checks of equivalence: accumulation, packing, resume, weight sync, logprob parity."""

EPILOG = """other commands (each has --help):
  python -m rlpost.doctor cluster [config=NAME key=value ...] [--address ADDRESS]   every node of a Ray cluster
  python -m rlpost.doctor verify config=NAME key=value ...                          does training compute what it should?

exit codes: 0 nothing failed (there may be warnings), 1 something failed, 2 the command or the configuration is wrong"""


def make_parser(command: str) -> argparse.ArgumentParser:
    """The command line of ``machine`` (which has no word of its own), ``cluster`` or ``verify``."""
    program = "python -m rlpost.doctor" + ("" if command == "machine" else f" {command}")
    parser = argparse.ArgumentParser(
        prog=program,
        description={"machine": MACHINE, "cluster": CLUSTER, "verify": VERIFY}[command],
        epilog=EPILOG if command == "machine" else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="a configuration as for rlpost.train: config=NAME key=value ...")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    if command == "cluster":
        parser.add_argument("--address", help="of the cluster (default: placement.ray_address, RAY_ADDRESS, else Ray is started here)")
        parser.add_argument(
            "--expect-gb-s", type=float, metavar="X", help="bus bandwidth in GB/s that the plan counts with; less than 80 %% of it fails"
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = given.pop(0) if given and given[0] in ("cluster", "verify") else "machine"
    options = make_parser(command).parse_intermixed_args(given)
    try:
        if command == "verify":
            from rlpost.diagnosis.verify import verify_command

            return verify_command(options.words, options.json)
        return diagnose(command, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except RlpostError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED


def diagnose(command: str, options: argparse.Namespace) -> int:
    """Check this machine or the cluster, print the findings; the exit code."""
    config, findings = load(options.words)
    needs = needs_of(config)
    if command == "cluster":
        from rlpost.diagnosis.cluster import cluster_findings

        if options.expect_gb_s is not None and not options.expect_gb_s > 0:
            raise ConfigError(f"--expect-gb-s {options.expect_gb_s}: expected a bandwidth in GB/s above 0")
        findings += cluster_findings(needs, options.address, options.expect_gb_s, say)
    else:
        from rlpost.diagnosis.machine import machine_findings

        findings += machine_findings(needs, say)
    print(json.dumps(to_json(findings)) if options.json else format_findings(findings), flush=True)
    return exit_code(findings)


def load(words: Sequence[str]) -> tuple[RunConfig | None, list[Finding]]:
    """The checked configuration, if one is named, and its warnings. Raises ConfigError."""
    if not words:
        return None, []
    from rlpost.config.checks import check
    from rlpost.config.load import load_config

    config = load_config(words).config
    found = check(config)
    return config, [Finding(area="config", name="settings", status="warning", found=one, expected="no warning") for one in found]


def say(line: str) -> None:
    """Progress, on the side: what is printed on standard output is the result."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
