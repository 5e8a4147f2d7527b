"""A function that does not fit is refused before the run, with what was found and what to change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from rlpost.rewards import check_signature
from rlpost.types import ConfigError, RewardItem


def names_one_field(prompt: str, completion: str, answer: str) -> float:
    return 1.0


def takes_all_fields(prompt: str, completion: str, **fields: Any) -> float:
    return float(len(fields))


def has_option(prompt: str, completion: str, limit: int, answer: str = "") -> float:
    return 1.0


async def asynchronous(prompt: str, completion: str) -> float:
    return 1.0


class CallableObject:
    async def __call__(self, prompt: str, completion: str) -> float:
        return 1.0


def no_completion(prompt: str, answer: str) -> float:
    return 1.0


def plural_names(prompts: list[str], completions: list[str], **fields: Any) -> list[float]:
    return []


def positional_only(prompt: str, completion: str, /) -> float:
    return 1.0


ITEM = RewardItem(
    trajectory_id="t", prompt_id="p", prompt="question", completion="text", fields={"answer": "4", "level": 2, "completion": "a column"}
)


def test_a_function_gets_exactly_what_it_names() -> None:
    assert check_signature(names_one_field).arguments(ITEM) == {"prompt": "question", "completion": "text", "answer": "4"}
    assert check_signature(takes_all_fields).arguments(ITEM) == {"prompt": "question", "completion": "text", "answer": "4", "level": 2}
    assert check_signature(has_option, options={"limit": 3}).arguments(ITEM)["limit"] == 3


def test_async_functions_are_recognised_through_objects_and_partials() -> None:
    assert check_signature(asynchronous).is_async
    assert check_signature(CallableObject()).is_async
    assert check_signature(functools.partial(asynchronous)).is_async
    assert not check_signature(names_one_field).is_async


@pytest.mark.parametrize(
    ("function", "field_names", "options", "message"),
    [
        (no_completion, None, {}, r"no_completion .*no argument named completion"),
        (positional_only, None, {}, r"prompt, completion can be given by position only"),
        (plural_names, {"answer"}, {}, r"nothing provides 'prompts'.*fields answer"),
        (names_one_field, {"anwser", "level"}, {}, r"nothing provides 'answer'.*nearest: anwser"),
        (has_option, {"answer"}, {}, r"nothing provides 'limit'.*give the option limit"),
        (has_option, None, {"limt": 3}, r"accepts no option 'limt'.*Nearest: limit"),
        (has_option, {"limit"}, {"limit": 3}, r"'limit' is both an option and a field"),
        (takes_all_fields, {"answer"}, {"answer": 3}, r"'answer' is both an option and a field"),
        (takes_all_fields, None, {"completion": "x"}, r"'completion' is a name that rlpost fills"),
    ],
)
def test_misfit_is_refused_with_place_and_reason(
    function: Callable[..., Any], field_names: set[str] | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_signature(function, field_names, options)
    line = function.__code__.co_firstlineno
    assert f"{__file__}:{line}" in str(caught.value)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a class, not a function"):
        check_signature(CallableObject)
    with pytest.raises(ConfigError, match="is a float, not a function"):
        check_signature(1.0)  # type: ignore[arg-type]


def test_a_row_that_clashes_with_an_option_or_lacks_a_field_is_refused_when_fields_were_unknown() -> None:
    with pytest.raises(ConfigError, match="'level' is an option and also a field of this row"):
        check_signature(takes_all_fields, options={"level": 1}).arguments(ITEM)
    bare = RewardItem(trajectory_id="t", prompt_id="p", prompt="q", completion="c", fields={"solution": 1})
    with pytest.raises(ConfigError, match="requires answer, but this row has only solution"):
        check_signature(names_one_field).arguments(bare)
