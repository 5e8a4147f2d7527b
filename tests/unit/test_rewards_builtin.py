"""The built-in rewards on right, wrong and unusable input."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.rewards import CATALOGUE, check_signature, resolve_reward
from rlpost.rewards.builtin import exact_match, last_number, length_penalty, numeric_match, regex_match, tag_format
from rlpost.rewards.mathematics import math_verify
from rlpost.types import ConfigError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 42.", 42), ("first 1, then 2", 2), ("1,000", 1000), ("$1,234,567.50 in all", Fraction("1234567.5")),
        ("-3", -3), ("x = -3.5", Fraction("-3.5")), ("10-3", 3), ("(4)-3", 3), ("\N{MINUS SIGN}7", -7), (".25", Fraction(1, 4)),
        ("3/4", Fraction(3, 4)), ("-1/2", Fraction(-1, 2)), ("1/0", 0), ("2e-3", Fraction(2, 1000)), ("50%", 50),
        ("9e999999999", 999999999), ("1,2,3", 3), ("none", None), ("", None), ("9" * 5000, None),
    ],
)  # fmt: skip
def test_last_number(text: str, number: Fraction | int | None) -> None:
    assert last_number(text) == number


@given(st.text(alphabet="0123456789.,/-eE %", max_size=60))
def test_last_number_reads_any_text_without_raising(text: str) -> None:
    last_number(text)


@given(st.integers(-(10**15), 10**15))
def test_last_number_reads_thousands_separators(number: int) -> None:
    assert last_number(f"The result: {number:,}.") == number


def test_numeric_match_compares_values_within_the_tolerance() -> None:
    assert numeric_match("", "so 0.5", "1/2") == 1.0
    assert numeric_match("", "1,000", 1000) == 1.0
    assert numeric_match("", "#### 72", "48 + 24 = 72 #### 72") == 1.0
    assert numeric_match("", "0.34", "1/3") == 0.0 and numeric_match("", "0.34", "1/3", tolerance=0.01) == 1.0
    assert numeric_match("", "no number", 3) == 0.0


def test_a_missing_answer_is_not_scorable_and_an_unusable_one_raises() -> None:
    for function in (exact_match, numeric_match, math_verify):
        assert function("", "None", None) is None
    with pytest.raises(ValueError, match="has no number"):
        numeric_match("", "3", "three")
    with pytest.raises(ValueError, match="math-verify can parse"):
        math_verify("", "3", "")


def test_exact_match_strips_both_sides() -> None:
    assert exact_match("", " 42\n", 42) == 1.0 and exact_match("", "042", 42) == 0.0


def test_regex_match_full_and_search() -> None:
    assert regex_match("", "a\nb\n", r"a.b") == 1.0 and regex_match("", "xa\nb", r"a.b") == 0.0
    assert regex_match("", "xa\nb", r"a.b", mode="search") == 1.0


def test_format_wants_each_tag_once_in_order_and_nothing_outside() -> None:
    assert tag_format("", "<think>a\nb</think>\n<answer>4</answer> ") == 1.0
    for wrong in ("<answer>4</answer><think></think>", "so <think></think><answer>4</answer>", "<think><answer>4</answer>",
                  "<think>a</think><answer>4</answer><answer>5</answer>"):  # fmt: skip
        assert tag_format("", wrong) == 0.0
    assert tag_format("", "<a>1</a>", tags=["a"]) == 1.0


@pytest.mark.parametrize(
    ("tokens", "truncated", "value"),
    [(0, False, 0), (60, False, 0), (61, False, -0.025), (80, False, -0.5), (100, False, -1), (101, False, -1), (3, True, -1)],
)
def test_length_penalty_follows_equation_13_of_dapo(tokens: int, truncated: bool, value: float) -> None:
    assert length_penalty("", "", tokens, truncated, limit=100, span=40) == pytest.approx(value)


def test_length_penalty_without_span_is_a_step() -> None:
    assert [length_penalty("", "", tokens, False, limit=4) for tokens in (4, 5)] == [0.0, -1.0]


def test_math_verify_knows_equivalence() -> None:
    assert math_verify("", "thus \\boxed{\\frac{2}{4}}", "0.5") == 1.0
    assert math_verify("", "$x+12$", "$12+x$") == 1.0
    assert math_verify("", "12", "x+12") == 0.0  # the answer is the whole expression, not its last number
    assert math_verify("", "no idea \\frac{", "3") == 0.0


def test_math_verify_running_out_of_time_is_a_timeout_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify as library
    from math_verify.errors import TimeoutException

    def slow(*_: Any, **__: Any) -> bool:
        raise TimeoutException("Operation timed out!")

    monkeypatch.setattr(library, "verify", slow)
    with pytest.raises(TimeoutError, match="more than 5 s"):
        math_verify("", "3", "3")


def test_math_verify_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rlpost\[rewards\]'"):
        check_signature(math_verify, {"answer"})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("regex_match", {"pattern": "("}, "no regular expression"),
        ("regex_match", {}, "pattern is None"),
        ("regex_match", {"pattern": "a", "mode": "fuzzy"}, "expected full or search"),
        ("numeric_match", {"tolerance": -1}, "expected a number >= 0"),
        ("format", {"tags": "think"}, "expected a list of names"),
        ("length_penalty", {"limit": 10, "span": 20}, "span 20 is larger than limit 10"),
        ("length_penalty", {"limit": 1.5}, "whole number"),
        ("math_verify", {"timeout_s": 0.5}, "whole seconds"),
    ],
)
def test_option_values_that_cannot_work_are_refused_before_the_run(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_signature(resolve_reward(name), None, options)


def test_every_catalogue_entry_exists_and_documents_itself_in_one_line() -> None:
    for name in CATALOGUE:
        function = resolve_reward(name)
        assert function.__doc__.strip().splitlines()[0].endswith(".")
