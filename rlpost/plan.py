"""``python -m rlpost.plan``: memory, time, weight sync, placement and cost of a run before it starts; comparisons; calibration.

Neither torch nor a GPU is needed. Exit codes: 0, 1 (the plan does not fit), 2 (the command or the configuration is wrong).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpost.types import ConfigError

if TYPE_CHECKING:
    from rlpost.config.schema import RunConfig
    from rlpost.planner.options import PlanOptions
    from rlpost.planner.plan import Plan

EXIT_OK, EXIT_DOES_NOT_FIT, EXIT_USER_ERROR = 0, 1, 2

USAGE = """python -m rlpost.plan config=NAME [option=value ...] [key.sub=value ...] [--explain] [--json | --html]
       python -m rlpost.plan compare config=A config=B ... [option=value ...] [--json]
       python -m rlpost.plan compare config=A [--algorithms sft,dpo,grpo,ppo] [--methods full,lora,qlora] [--precisions bf16,fp8]
       python -m rlpost.plan calibrate RUN_OR_BENCH_JSON ... [out=FILE] [option=value ...]"""

DESCRIPTION = """What a run will need: memory of every process by phase, seconds of a step, of a weight sync, over splits of the GPUs,
prefill tokens of agents, money. No GPU, no torch, one or two seconds. Without a calibration speeds are assumed, and every line says so."""

ANY_SETTING = "any setting of the run's configuration (python -m rlpost.train --help)"

EXAMPLES = """examples:
  python -m rlpost.plan config=grpo_qwen hardware=h100-8                          the shipped config on one node
  python -m rlpost.plan config=grpo_qwen nodes=4 gpus=8 gpu=H100-80GB nvlink=450 net=50 price=2.5 training.ranks=16
  python -m rlpost.plan config=grpo_qwen hardware=h100-8 shape=/models/mine/config.json answer_median=800 --explain
  python -m rlpost.plan config=grpo_qwen hardware=h100-8 --html > plan.html       bars and curves
  python -m rlpost.plan compare config=grpo_qwen hardware=h100-8 --algorithms sft,dpo,grpo,ppo --methods full,lora
  python -m rlpost.plan calibrate runs/mine sync.json                             writes calibration.yaml, which later plans read
"""


def make_parser() -> argparse.ArgumentParser:
    """The command line; options and settings are plain ``key=value`` words."""
    from rlpost.config.options import option_help
    from rlpost.planner.options import PlanOptions

    options = f"options:\n{option_help(PlanOptions)}\n  KEY.SUB                 {ANY_SETTING}"
    parser = argparse.ArgumentParser(
        prog="python -m rlpost.plan", usage=USAGE, description=DESCRIPTION, epilog=f"{EXAMPLES}\n{options}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="compare or calibrate first, then option=value and key=value, in any order"
    )
    parser.add_argument("--explain", action="store_true", help="print the formula of every line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", action="store_true", help="print a page with plots that needs no network")
    parser.add_argument("--algorithms", metavar="LIST", help="compare: algorithms, with commas between")
    parser.add_argument("--methods", metavar="LIST", help="compare: full, lora, qlora")
    parser.add_argument("--precisions", metavar="LIST", help="compare: bf16, fp8")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parsed = make_parser().parse_intermixed_args(arguments)
    command = parsed.words[0] if parsed.words and parsed.words[0] in ("compare", "calibrate") else "plan"
    words = parsed.words[1:] if command != "plan" else parsed.words
    try:
        if command == "compare":
            return compare_command(words, parsed)
        if command == "calibrate":
            return calibrate_command(words, as_json=parsed.json)
        return plan_command(words, parsed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def load(words: Sequence[str]) -> tuple[RunConfig, PlanOptions]:
    """A checked configuration and the plan's options. Raises ConfigError."""
    from rlpost.config.checks import check
    from rlpost.config.load import load_config
    from rlpost.planner.options import split_words

    options, others = split_words(words)
    config = load_config(others).config
    check(config)
    return config, options


def plan_command(words: Sequence[str], parsed: argparse.Namespace) -> int:
    """Print one plan."""
    from rlpost.planner.advice import propose
    from rlpost.planner.plan import make_plan

    config, options = load(words)
    plan = make_plan(config, options)
    advice = propose(config, options, plan)
    if parsed.json:
        from rlpost.planner.as_json import plan_to_json

        print(json.dumps(plan_to_json(plan, advice=advice)))
    elif parsed.html:
        from rlpost.planner.html import plan_to_html

        print(plan_to_html(plan, advice=advice))
    else:
        from rlpost.planner.render import format_plan

        print(format_plan(plan, explain=parsed.explain, advice=advice))
    return EXIT_OK if plan.fits else EXIT_DOES_NOT_FIT


def compare_command(words: Sequence[str], parsed: argparse.Namespace) -> int:
    """Print one table over several configurations, or over variants of one."""
    from rlpost.planner.compare import compare, format_comparison, variants
    from rlpost.planner.plan import make_plan

    names = [word for word in words if word.startswith("config=")]
    others = [word for word in words if not word.startswith("config=")]
    lists = {name: given.split(",") for name in ("algorithms", "methods", "precisions") if (given := getattr(parsed, name))}
    if not names:
        raise ConfigError("compare needs config=A config=B ..., or one config= and --algorithms, --methods or --precisions")
    plans: list[tuple[str, RunConfig, Plan]] = []
    for name in names:
        config, options = load([name, *others])
        plans.append((name.partition("=")[2], config, make_plan(config, options)))
    if lists:
        if len(names) > 1:
            raise ConfigError(f"--{next(iter(lists))} varies one configuration, and {len(names)} are given: give one config=")
        rows = variants(config, options, **lists)
    else:
        rows = compare(plans)
    print(json.dumps({"rows": [row.to_json() for row in rows]}) if parsed.json else format_comparison(rows))
    return EXIT_OK


def calibrate_command(words: Sequence[str], *, as_json: bool) -> int:
    """Fit coefficients to runs and benchmarks, print the errors before and after, write the file."""
    from rlpost.planner.calibrate import fit, read_sources
    from rlpost.planner.coefficients import Calibration, write_calibration
    from rlpost.planner.measured import compare_run, format_comparisons
    from rlpost.planner.options import split_words

    out = next((word.partition("=")[2] for word in words if word.startswith("out=")), "calibration.yaml")
    options, sources = split_words([word for word in words if not word.startswith("out=")])
    settings = [source for source in sources if "=" in source and not Path(source).exists()]
    if settings or not sources:
        raise ConfigError(
            f"calibrate takes run directories and files of rlpost.bench --json, found {' '.join(settings) or 'none'}; a run's settings are "
            "those of its own config.yaml"
        )
    if Path(out).exists():
        raise ConfigError(f"{out} exists already; move it away, or name another file with out=FILE")
    runs = read_sources([Path(source) for source in sources], options)
    device = runs[0].device
    before = Calibration(device=device)
    after = fit(runs, before)
    report: list[dict[str, Any]] = []
    for run in runs:
        rows = compare_run(run, after)
        old = {row.name: row.error for row in compare_run(run, before)}
        report += [{"source": run.source, **asdict(row), "error": row.error, "error_assumed": old[row.name]} for row in rows]
        if not as_json:
            print(f"{run.source}\n{format_comparisons(rows, 'calibrated')}\n")
    write_calibration(after, Path(out))
    print(json.dumps({"calibration": out, "comparisons": report}) if as_json else f"calibration: {out}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
