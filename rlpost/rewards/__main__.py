"""Try rewards without training: ``python -m rlpost.rewards check SPEC --data file.jsonl`` and ``python -m rlpost.rewards list``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.config.schema import RewardConfig, RewardRunnerConfig
from rlpost.plugins import entry_points, nearest
from rlpost.rewards.resolve import CATALOGUE, ENTRY_POINT_GROUP, resolve_reward
from rlpost.rewards.runner import RewardRunner
from rlpost.rewards.signature import RESERVED
from rlpost.types import ConfigError, RewardItem, RewardOutcome, RlpostError

EXIT_FAILURES, EXIT_USER_ERROR = 1, 2
PROMPT_WIDTH = 40
SHOWN_FAILURES = 3
"""Failures printed in full, with traceback; more hide the first, which mostly explains the others."""

DESCRIPTION = "Try reward functions on data, without any training."

CHECK_DESCRIPTION = """\
Runs one reward function on the rows of a JSONL file, in worker processes and with deadlines as in training.

SPEC is a built-in name (see `list`), an installed entry point, package.module:function or path/file.py:function.
Each row is a JSON object with a prompt and a completion; its other columns are the function's fields. The columns
completion_tokens and truncated, if any, stand for what a run would know; without them white-space separated words are counted.
"""

CHECK_EXAMPLES = """\
examples:
  python -m rlpost.rewards check examples/rewards/my_reward.py:my_reward --data examples/rewards/data.jsonl
  python -m rlpost.rewards check numeric_match --data examples/rewards/data.jsonl --option tolerance=0.01
  python -m rlpost.rewards check exact_match --data prompts.jsonl --completion "42"

exit code: 0 every call gave a number or None; 1 a call failed; 2 the function, an option or the data cannot be used
"""


@dataclass(frozen=True)
class CheckRow:
    """One row of the data: its line in the file, and what the reward gets."""

    line: int
    item: RewardItem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return _list() if options.command == "list" else _check(options)
    except RlpostError as error:
        print(f"error: {str(error).removeprefix('rewards[0]: ')}", file=sys.stderr)  # there is no list of rewards here
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    defaults = RewardRunnerConfig()
    parser = argparse.ArgumentParser(prog="python -m rlpost.rewards", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the built-in rewards and the installed entry points")
    check = commands.add_parser(
        "check",
        help="run one reward on a file",
        description=CHECK_DESCRIPTION,
        epilog=CHECK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("spec", metavar="SPEC", help="the reward function")
    check.add_argument("--data", required=True, metavar="FILE.jsonl", help="rows to score, one JSON object a line")
    check.add_argument("--prompt-field", default="prompt", metavar="NAME", help="column with the prompt: text or messages (%(default)s)")
    check.add_argument("--completion-field", default="completion", metavar="NAME", help="column with the completion (%(default)s)")
    check.add_argument("--completion", metavar="TEXT", help="score this completion for every row instead of a column")
    option_help = "option of the function, as in rewards[].options; VALUE is JSON or text"
    check.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help=option_help)
    check.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    check.add_argument("--workers", type=int, default=defaults.workers, metavar="N", help="worker processes (%(default)s)")
    check.add_argument("--timeout", type=float, default=defaults.timeout_s, metavar="S", help="deadline of a call in seconds (%(default)s)")
    return parser


def _list() -> int:
    print("built-in:")
    for name in CATALOGUE:
        print(f"  {name:<16}{_first_line(name)}")
    points = entry_points(ENTRY_POINT_GROUP)
    print(f"entry points ({ENTRY_POINT_GROUP}):" if points else f"entry points ({ENTRY_POINT_GROUP}): none installed")
    for name, point in sorted(points.items()):
        print(f"  {name:<16}{_first_line(name)} [{point.value}]")
    return 0


def _first_line(name: str) -> str:
    try:
        documentation = resolve_reward(name).__doc__ or "(no docstring)"
    except ConfigError as error:  # one broken plug-in must not hide the others
        return f"(cannot be loaded: {str(error).splitlines()[-1]})"
    return str(documentation).strip().splitlines()[0]


def _check(options: argparse.Namespace) -> int:
    config = RewardConfig(function=options.spec, options=dict(_option(text) for text in options.option))
    rows = read_rows(Path(options.data), options.prompt_field, options.completion_field, options.completion, options.limit)
    field_names = set().union(*(row.item.fields for row in rows))  # a row that lacks one of them fails by itself
    runner = RewardRunner([config], workers=options.workers, timeout_s=options.timeout, field_names=field_names)
    began = time.monotonic()
    outcomes = asyncio.run(_score(runner, [row.item for row in rows]))
    _print_table(rows, outcomes)
    return _print_summary(outcomes, rows, time.monotonic() - began)


async def _score(runner: RewardRunner, items: Sequence[RewardItem]) -> list[RewardOutcome]:
    async with runner:
        return await runner.score(items)


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--option {text!r}: expected KEY=VALUE, for example tolerance=0.01.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def read_rows(path: Path, prompt_field: str, completion_field: str, completion: str | None, limit: int | None) -> list[CheckRow]:
    """The rows of a JSONL file; blank lines are skipped. Raises ConfigError with file and line for a row that cannot be used."""
    if not path.is_file():
        raise ConfigError(f"data file {str(path)!r} does not exist (paths are relative to {Path.cwd()}).")
    rows: list[CheckRow] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(rows) >= limit:
                break
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where}: not JSON ({error}); expected one JSON object a line.") from error
            if not isinstance(row, dict):
                raise ConfigError(f"{where}: found a JSON {type(row).__name__}, expected an object with a prompt and a completion.")
            rows.append(CheckRow(number, _item(row, where, number, prompt_field, completion_field, completion)))
    if not rows:
        raise ConfigError(f"{path} has no rows to score.")
    return rows


def _item(row: dict[str, Any], where: str, number: int, prompt_field: str, completion_field: str, completion: str | None) -> RewardItem:
    prompt = _column(row, where, prompt_field, "--prompt-field NAME")
    text = completion if completion is not None else _column(row, where, completion_field, "--completion-field NAME or --completion TEXT")
    if not isinstance(text, str):
        raise ConfigError(f"{where}: {completion_field!r} is {type(text).__name__}, expected text.")
    try:
        tokens, truncated = int(row.get("completion_tokens", len(text.split()))), bool(row.get("truncated", False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: 'completion_tokens' is {row['completion_tokens']!r}, expected a whole number.") from error
    return RewardItem(
        trajectory_id=f"line{number}",
        prompt_id=f"line {number} of {where.rpartition(':')[0]}",
        prompt=_prompt_text(prompt, where, prompt_field),
        completion=text,
        fields={key: value for key, value in row.items() if key not in RESERVED | {prompt_field, completion_field}},
        tokens=tokens,
        truncated=truncated,
    )


def _column(row: dict[str, Any], where: str, name: str, remedy: str) -> Any:
    if name in row:
        return row[name]
    close = nearest(name, row)
    hint = f" (nearest: {', '.join(close)})" if close else ""
    raise ConfigError(f"{where}: no column {name!r}{hint}; found {', '.join(row) or 'none'}. Give {remedy}.")


def _prompt_text(prompt: Any, where: str, field: str) -> str:
    """The prompt as text. Chat messages become ``role: content`` lines: no tokenizer and hence no chat template is at hand here."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) and "role" in message for message in prompt):
        return "\n".join(f"{message['role']}: {message.get('content', '')}" for message in prompt)
    raise ConfigError(f"{where}: {field!r} is {type(prompt).__name__}, expected text or a list of messages with role and content.")


def _print_table(rows: Sequence[CheckRow], outcomes: Sequence[RewardOutcome]) -> None:
    print(f"{'line':>6}  {'prompt':<{PROMPT_WIDTH}}  reward")
    for row, outcome in zip(rows, outcomes, strict=True):
        start = " ".join(row.item.prompt.split())
        start = start if len(start) <= PROMPT_WIDTH else start[: PROMPT_WIDTH - 3] + "..."
        value = outcome.failure.kind if outcome.failure else f"{outcome.value:g}"
        metrics = "".join(f"  {name.partition('/')[2]}={figure:g}" for name, figure in outcome.metrics.items())
        print(f"{row.line:>6}  {start:<{PROMPT_WIDTH}}  {value}{metrics}")


def _print_summary(outcomes: Sequence[RewardOutcome], rows: Sequence[CheckRow], seconds: float) -> int:
    """Counts, and the first failures in full; returns the exit code."""
    values = [outcome.value for outcome in outcomes if outcome.value is not None]
    kinds = Counter(outcome.failure.kind for outcome in outcomes if outcome.failure)
    none = kinds.pop("not_scorable", 0)
    shown = 0
    for row, outcome in zip(rows, outcomes, strict=True):
        if outcome.failure and outcome.failure.is_fault and shown < SHOWN_FAILURES:
            shown += 1
            print(f"\nline {row.line}: {outcome.failure.kind}: {outcome.failure.message}\n{outcome.failure.traceback}".rstrip())
    failed = sum(kinds.values())
    if failed > shown:
        print(f"\n... and {failed - shown} more failures")
    mean = f"{sum(values) / len(values):g} over {len(values)} scored" if values else "none (no row was scored)"
    listed = f" ({', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))})" if kinds else ""
    print(f"\n{len(outcomes)} rows in {seconds:.1f} s: mean {mean}; {none} not scorable (None); {failed} failed{listed}")
    return EXIT_FAILURES if failed else 0


if __name__ == "__main__":
    sys.exit(main())
