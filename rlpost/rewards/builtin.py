"""Built-in reward functions: exact, numeric and regex match, format, length penalty.

They are ordinary reward functions, so they are also examples. A wrong completion is worth 0. A row without an answer (null) is not
scorable; one with an unusable answer (no number in it, say) raises, because that is a fault of the data and not of the model.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Literal

_NUMBER = re.compile(
    r"""
    (?:(?<![\w.)\]])-)?                           # a minus sign, unless it follows an operand: 5-3 ends in 3
    (?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)? # 1,000 or 1000 or 1000.25
      |\.\d+)                                     # .25
    (?:[eE][+-]?\d{1,3}(?!\w))?                   # e-3; longer exponents would need gigabytes as exact fractions
    (?:\s?/\s?[1-9]\d*(?!\.?\d))?                 # /4
    """,
    re.VERBOSE | re.ASCII,
)
_LONGEST_NUMBER = 400
"""Characters; longer runs of digits are no answer to anything, and Python refuses to convert them at 4,300."""


def _with_option_check(check: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Attach ``check(**options)`` to a reward: it raises ValueError before the run when an option cannot work."""

    def attach(function: Callable[..., Any]) -> Callable[..., Any]:
        function.check_options = check  # type: ignore[attr-defined]
        return function

    return attach


def exact_match(prompt: str, completion: str, answer: Any) -> float | None:
    """1 when the completion equals the field `answer`, white space at both ends aside, else 0."""
    if answer is None:
        return None
    return float(completion.strip() == str(answer).strip())


def _check_tolerance(tolerance: float = 0.0) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance!r}, expected a number >= 0")


@_with_option_check(_check_tolerance)
def numeric_match(prompt: str, completion: str, answer: Any, tolerance: float = 1e-6) -> float | None:
    """1 when the completion's last number equals the (last) number in the field `answer` to `tolerance`, else 0.

    Reads 1,000 and -3.5 and 2e-3 and 3/4, exactly (as fractions). ``tolerance`` is absolute.
    Raises ValueError when the answer has no number.
    """
    if answer is None:
        return None
    expected = last_number(str(answer))
    if expected is None:
        raise ValueError(f"answer {answer!r} has no number to compare with")
    found = last_number(completion)
    return float(found is not None and abs(found - expected) <= Fraction(tolerance))


def last_number(text: str) -> Fraction | None:
    """The last number in ``text``, exactly; None when there is none (or it is absurdly long)."""
    matches = deque(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")), maxlen=1)
    if not matches or len(matches[0].group()) > _LONGEST_NUMBER:
        return None
    numerator, _, denominator = matches[0].group().replace(",", "").replace(" ", "").partition("/")
    return Fraction(numerator) / (int(denominator) if denominator else 1)


def _check_regex(pattern: Any = None, mode: Any = "full") -> None:
    if not isinstance(pattern, str):
        raise ValueError(f"pattern is {pattern!r}, expected a regular expression")
    if mode not in ("full", "search"):
        raise ValueError(f"mode is {mode!r}, expected full or search")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error


@_with_option_check(_check_regex)
def regex_match(prompt: str, completion: str, pattern: str, mode: Literal["full", "search"] = "full") -> float:
    """1 when the option `pattern` matches the whole completion (`mode` full) or is found in it (`mode` search), else 0.

    The dot matches newlines; white space at both ends of the completion is ignored.
    """
    text = completion.strip()
    match = re.fullmatch(pattern, text, re.DOTALL) if mode == "full" else re.search(pattern, text, re.DOTALL)
    return float(match is not None)


def _check_tags(tags: Any = ("think", "answer")) -> None:
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"tags is {tags!r}, expected a list of names such as [think, answer]")


@_with_option_check(_check_tags)
def tag_format(prompt: str, completion: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """1 when the completion is exactly <think>...</think><answer>...</answer> (option `tags`: the names in order), else 0.

    Each tag opens and closes once; only white space may stand outside.
    """
    pattern = r"\s*".join(f"<{re.escape(tag)}>.*?</{re.escape(tag)}>" for tag in tags)
    counted = all(completion.count(f"<{tag}>") == 1 and completion.count(f"</{tag}>") == 1 for tag in tags)
    return float(counted and re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def _check_length(limit: Any = None, span: Any = 0) -> None:
    for name, value, least in (("limit", limit, 1), ("span", span, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number of tokens >= {least}")
    if span > limit:
        raise ValueError(f"span {span} is larger than limit {limit}; the penalty starts at limit - span tokens")


@_with_option_check(_check_length)
def length_penalty(prompt: str, completion: str, completion_tokens: int, truncated: bool, limit: int, span: int = 0) -> float:
    """0 up to `limit` - `span` sampled tokens, then falling in a line to -1 at `limit`; -1 when cut off.

    The soft over-long punishment of DAPO (Yu et al. 2025, equation 13): L_max is ``limit``, L_cache is ``span``.
    Only sampled tokens count, not those of tools.
    """
    if truncated or completion_tokens > limit:
        return -1.0
    excess = completion_tokens - (limit - span)
    return -excess / span if excess > 0 else 0.0
