"""From the columns of an offline row to its prompt and answers: as text, or as a conversation with the turns that are trained.

An answer may be text, one message, several (with tool turns, say), or the whole conversation. If the prompt or any answer of a row is
messages, all of the row is: a text prompt is then the user's message, a text answer the assistant's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpost.config.schema import DataConfig
from rlpost.data.load import Row, brief, column, missing, read_messages, read_question
from rlpost.types import ConfigError

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class TextAnswer:
    """A text and how it goes on."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """A whole conversation. ``turns`` are the indices of the trained messages, all the assistant's, ascending; the last message is one."""

    messages: Messages
    turns: tuple[int, ...]


Answer = TextAnswer | ChatAnswer


def conversation(row: Row, config: DataConfig) -> Answer:
    """``data.prompt_field`` and ``data.completion_field``, or a row without the latter's ``data.messages_field``. Raises ConfigError."""
    if row.columns.get(config.completion_field) is not None:
        answer = completion(row, config)
        if isinstance(answer, TextAnswer):
            return answer
        messages, place = answer.messages, _place(row, config.completion_field)
    elif row.columns.get(config.messages_field) is not None:
        place = _place(row, config.messages_field)
        messages = read_messages(row.columns[config.messages_field], place)
    else:
        raise ConfigError(
            f"{row.place}: found the columns {sorted(row.columns)}, expected {config.completion_field!r} (data.completion_field) beside "
            f"the prompt, or {config.messages_field!r} (data.messages_field) with a whole conversation; set these options, or mend the row"
        )
    _check_last(messages, place)
    turns = _assistant_turns(messages)
    if config.train_on != "assistant":
        turns = turns[-1:]
    if turns[0] == 0:
        raise ConfigError(
            f"{place}: message 0 is the assistant's, and a model cannot learn to continue nothing; remove it, or where "
            "other answers follow set data.train_on=completion"
        )
    return _checked(messages, turns, place)


def completion(row: Row, config: DataConfig) -> Answer:
    """``data.prompt_field`` and its one answer in ``data.completion_field``. Raises ConfigError."""
    prompt = _prompt(row, config)
    if prompt is None:
        raise missing(row, "data.prompt_field", config.prompt_field)
    answer = _value(row, "data.completion_field", config.completion_field)
    return _continue(prompt, answer, _place(row, config.completion_field))


def pair(row: Row, config: DataConfig) -> dict[str, Answer]:
    """The answers ``chosen`` and ``rejected``, whose prompts are equal.

    Without a prompt column the answers are whole conversations, and what they have in common at their start is the prompt. The same
    where the prompt is one text and the answers begin with another message than the assistant's. Raises ConfigError.
    """
    prompt = _prompt(row, config)
    chosen = _value(row, "data.chosen_field", config.chosen_field)
    rejected = _value(row, "data.rejected_field", config.rejected_field)
    if chosen == rejected:
        raise ConfigError(
            f"{row.place}: columns {config.chosen_field!r} and {config.rejected_field!r} are equal, so there is nothing to prefer; remove "
            "the row"
        )
    if not isinstance(prompt, tuple) and not isinstance(chosen, str) and not isinstance(rejected, str):
        prompt = _common_prompt(row, prompt, chosen, rejected)
    if prompt is None:
        raise missing(row, "data.prompt_field", config.prompt_field)
    if isinstance(prompt, str) and isinstance(chosen, str) != isinstance(rejected, str):
        prompt = _as_messages(prompt, "user")
    return {
        "chosen": _continue(prompt, chosen, _place(row, config.chosen_field)),
        "rejected": _continue(prompt, rejected, _place(row, config.rejected_field)),
    }


def label(row: Row, config: DataConfig) -> bool:
    """``data.label_field``: whether the answer is wanted. Raises ConfigError for anything but a bool, 0 or 1."""
    value = column(row, "data.label_field", config.label_field)
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ConfigError(
            f"{_place(row, config.label_field)}: found {brief(value)}, expected true or 1 for a wanted answer, false or 0 for an "
            "unwanted one; mend the row, or set data.label_field to the right column"
        )
    return bool(value)


def margin(row: Row, config: DataConfig) -> float | None:
    """``data.margin_field``; None for a row without it. Raises ConfigError for anything but a finite number."""
    value = row.columns.get(config.margin_field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(
            f"{_place(row, config.margin_field)}: found {brief(value)}, expected the margin of the pair, a finite number; mend the row, "
            "or set data.margin_field to another column"
        )
    return float(value)


def _place(row: Row, column: str) -> str:
    return f"{row.place}, column {column!r}"


def _value(row: Row, option: str, name: str) -> str | Messages:
    """An answer's column."""
    value = column(row, option, name)
    return value if isinstance(value, str) else read_messages(value, _place(row, name))


def _prompt(row: Row, config: DataConfig) -> str | Messages | None:
    """None without the column. The last message is not the assistant's."""
    value = row.columns.get(config.prompt_field)
    return value if value is None or isinstance(value, str) else read_question(value, _place(row, config.prompt_field))


def _as_messages(value: str | Messages, role: str) -> Messages:
    return ({"role": role, "content": value},) if isinstance(value, str) else value


def _common_prompt(row: Row, prompt: str | None, chosen: Messages, rejected: Messages) -> str | Messages:
    """What two whole conversations have in common at their start; ``prompt`` as it is where they are no whole conversations."""
    if prompt is not None and "assistant" in (chosen[0]["role"], rejected[0]["role"]):
        return prompt
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    if not common:
        raise ConfigError(
            f"{row.place}: the chosen and the rejected conversation begin with different messages, expected the same prompt at their "
            "start; mend the row, or give the prompt a column of its own (data.prompt_field)"
        )
    if prompt is not None and prompt.strip() not in [str(message.get("content")).strip() for message in chosen[:common]]:
        raise ConfigError(
            f"{row.place}: the prompt {brief(prompt)} is no message of the start that the chosen and the rejected conversation have in "
            "common; mend the row, or set data.prompt_field to a column that is not there"
        )
    return chosen[:common]


def _continue(prompt: str | Messages, answer: str | Messages, place: str) -> Answer:
    """The prompt and its answer, which may repeat the prompt's messages at its start."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if not answer.strip():
            raise ConfigError(f"{place}: found {brief(answer)}, expected an answer; an empty one teaches nothing, remove the row")
        return TextAnswer(prompt=prompt, completion=answer)
    start, rest = _as_messages(prompt, "user"), _as_messages(answer, "assistant")
    if rest[: len(start)] == start:
        rest = rest[len(start) :]
    if not rest or rest[0]["role"] != "assistant":
        found = f"a message of role {brief(rest[0]['role'])}" if rest else "nothing"
        raise ConfigError(
            f"{place}: found {found} after the prompt's {len(start)} message(s), expected one of role 'assistant' there; an answer begins "
            "with the assistant's message, or repeats the whole prompt before it"
        )
    _check_last(rest, place)
    whole = (*start, *rest)
    return _checked(whole, [turn for turn in _assistant_turns(whole) if turn >= len(start)], place)


def _assistant_turns(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _check_last(messages: Messages, place: str) -> None:
    role = messages[-1]["role"]
    if role != "assistant":
        raise ConfigError(
            f"{place}: the last message has role {brief(role)}, expected 'assistant', whose answer is to be learnt; remove what follows "
            "the last answer, or rename the role"
        )


def _checked(messages: Messages, turns: Sequence[int], place: str) -> ChatAnswer:
    for turn in turns:
        if not str(messages[turn].get("content") or "").strip() and not messages[turn].get("tool_calls"):
            raise ConfigError(f"{place}: message {turn} (assistant) is empty, expected an answer; mend or remove the row")
    return ChatAnswer(messages=messages, turns=tuple(turns))
