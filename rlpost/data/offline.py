"""Offline data sets: rows with answers (``answers.py``), as tokens with the mask of what is trained.

A mask is made of positions alone. The prompt's tokens are those that an engine would get, the answer's follow them, its end token
included; text is never searched for, and no token value says what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlpost.algorithms.protocol import OfflineRow, TokenSequence
from rlpost.config.schema import DataConfig
from rlpost.data.answers import Answer, ChatAnswer, TextAnswer, completion, conversation, label, margin, pair
from rlpost.data.load import Row, identified_rows
from rlpost.data.prepare import NAMED_IN_ERROR
from rlpost.data.tokenizer import PromptTokenizer
from rlpost.types import ConfigError, DataKind, Prompt


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """One row as text. ``place`` is where it was read, for errors; ``answers`` are named like ``OfflineRow.sequences``."""

    row_id: str
    place: str
    answers: Mapping[str, Answer]
    wanted: bool | None = None
    margin: float | None = None


def load_rows(source: str, kind: DataKind, config: DataConfig, limit: int | None = None, *, margins: bool = True) -> list[RawRow]:
    """All rows of ``source`` (a .jsonl or .parquet file, ``hf:`` or ``embedded:``) in its order; ``limit`` keeps the first N.

    Without ``margins`` the column of that name is not read: it may be anything, for who compares pairs without one.

    Raises:
        ConfigError: the source cannot be read or is empty, or a row cannot be used; names the row.
    """
    return [_read(row, row_id, kind, config, margins) for row_id, row in identified_rows(source, config.id_field, limit)]


def _read(row: Row, row_id: str, kind: DataKind, config: DataConfig, margins: bool) -> RawRow:
    if kind == "pair":
        return RawRow(row_id=row_id, place=row.place, answers=pair(row, config), margin=margin(row, config) if margins else None)
    if kind == "labelled":
        return RawRow(row_id=row_id, place=row.place, answers={"answer": completion(row, config)}, wanted=label(row, config))
    return RawRow(row_id=row_id, place=row.place, answers={"answer": conversation(row, config)})


def tokenize_rows(rows: Sequence[RawRow], tokenizer: PromptTokenizer, kind: DataKind, config: DataConfig) -> tuple[list[OfflineRow], int]:
    """``(rows in tokens, number dropped)``. The order is kept; a row of exactly ``data.max_tokens`` (its longest sequence) stays.

    Nothing is cut: an answer without its end teaches the model not to stop.

    Raises:
        ConfigError: a prompt has no tokens; the chat template writes messages differently once others follow; with
            ``data.overlong_prompts=refuse`` a row is too long; or none is left.
    """
    everything = kind == "conversation" and config.train_on == "all"
    kept: list[OfflineRow] = []
    overlong: list[tuple[int, str]] = []
    for row in rows:
        sequences = {name: _encode(answer, tokenizer, row.place, everything) for name, answer in row.answers.items()}
        length = max(len(sequence.tokens) for sequence in sequences.values())
        if length > config.max_tokens:
            overlong.append((length, row.place))
        else:
            if kind == "pair":
                _assert_same_prompt(sequences["chosen"], sequences["rejected"], row.place)
            kept.append(OfflineRow(row_id=row.row_id, sequences=sequences, wanted=row.wanted, margin=row.margin))
    if overlong and (config.overlong_prompts == "refuse" or not kept):
        longest = sorted(overlong, key=lambda item: -item[0])[:NAMED_IN_ERROR]
        cause = "data.overlong_prompts is refuse" if kept else "none is left"
        raise ConfigError(
            f"{len(overlong)} of {len(rows)} rows are longer than data.max_tokens={config.max_tokens}, and {cause}; the longest: "
            + ", ".join(f"{place} ({length} tokens)" for length, place in longest)
            + ". Raise data.max_tokens"
            + (", or set data.overlong_prompts=drop" if kept else "")
        )
    return kept, len(overlong)


def _assert_same_prompt(chosen: TokenSequence, rejected: TokenSequence, place: str) -> None:
    length = chosen.prompt_length
    if rejected.prompt_length != length or not np.array_equal(chosen.tokens[:length], rejected.tokens[:length]):
        raise AssertionError(f"{place}: the prompts of the chosen and the rejected answer have different tokens")


def _encode(answer: Answer, tokenizer: PromptTokenizer, place: str, everything: bool) -> TokenSequence:
    """The tokens of a prompt and its answer. ``everything`` trains all of them but the first, which nothing predicts."""
    spans = _text_spans(answer, tokenizer) if isinstance(answer, TextAnswer) else _chat_spans(answer, tokenizer, place)
    tokens = np.array([token for span, _ in spans for token in span], np.int32)
    trainable = np.repeat([trained for _, trained in spans], [len(span) for span, _ in spans])
    prompt_length = len(spans[0][0])
    if everything:
        return TokenSequence(tokens=tokens, trainable=np.arange(len(tokens)) > 0, prompt_length=0)
    if not prompt_length:
        raise ConfigError(f"{place}: the prompt has no tokens, and a model cannot continue nothing; mend or remove the row")
    return TokenSequence(tokens=tokens, trainable=trainable, prompt_length=prompt_length)


Spans = list[tuple[list[int], bool]]
"""Tokens and whether they are trained, alternating; the first are the prompt's."""


def _text_spans(answer: TextAnswer, tokenizer: PromptTokenizer) -> Spans:
    """The prompt as an engine gets it, then the answer and the model's end token, unless the answer ends with one."""
    start = tokenizer.encode_prompt(Prompt(prompt_id="", text=answer.prompt)).tolist()
    tokens = tokenizer.encode_after(answer.prompt, answer.completion)
    if not tokens or tokens[-1] not in tokenizer.eos_token_ids:
        tokens.append(tokenizer.eos_token_ids[0])
    return [(start, False), (tokens, True)]


def _chat_spans(answer: ChatAnswer, tokenizer: PromptTokenizer, place: str) -> Spans:
    """For each trained turn what stands before it, with the header of the answer, and the turn with its end token.

    These are the tokens of an episode with the same turns (``PromptTokenizer.encode_turn``). Each is the difference of the template's
    text for two beginnings of the conversation, so the template must leave what it wrote as it is.
    """
    spans: Spans = []
    written, closing, ended = "", "", 0
    for turn in answer.turns:
        header = tokenizer.render(answer.messages[:turn], generation_prompt=True, where=place)
        whole = tokenizer.render(answer.messages[: turn + 1], generation_prompt=False, where=place)
        end = tokenizer.turn_end
        if not header.startswith(written):
            raise ConfigError(
                f"{place}: the chat template of {tokenizer.model_path} writes what stands before message {turn} differently once that "
                "follows (not prefix-stable), so earlier turns cannot be trained in one sequence with it. Set data.train_on=completion, "
                "or model.chat_template to a template that leaves history as it is"
            )
        if not (whole.startswith(header) and whole.endswith(end.text) and len(whole) >= len(header) + len(end.text)):
            raise ConfigError(
                f"{place}: the chat template of {tokenizer.model_path} does not write message {turn} as the header before a model's answer "
                f"({header[-40:]!r}), the answer, and the end of a turn ({end.text!r}), so it is unknown what a model would answer. "
                "Set model.chat_template to a template that does"
            )
        between = closing + header[len(written) :]
        spans.append((tokenizer.encode_text(between)[ended:], False))
        content = whole[len(header) : len(whole) - len(end.text)]
        spans.append(([*tokenizer.encode_after(between, content), *end.tokens], True))
        written, closing, ended = whole, end.text, end.written
    return spans
