"""Offline rows: what a user's file may look like, the message when it does not, and which tokens are trained. With real tokenizers."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import test_data_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_tokenizer import BOS, CHAT, END, EOS, MakeModel
from tokenizers import Tokenizer, models, pre_tokenizers

from rlpost.algorithms.protocol import OfflineRow, TokenSequence
from rlpost.config.schema import DataConfig
from rlpost.data.offline import load_rows, tokenize_rows
from rlpost.data.tokenizer import PromptTokenizer
from rlpost.models.embedded import embedded_rows
from rlpost.types import ConfigError, DataKind, Prompt

make_model = test_data_tokenizer.make_model

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
"""A template whose turns end with plain text."""


def chat(*turns: str) -> list[dict[str, Any]]:
    """Messages from ``u:text``, ``a:text`` ..."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def data(**values: Any) -> DataConfig:
    return DataConfig(train="unused", **values)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def tokenized(tmp_path: Path, tokenizer: PromptTokenizer, kind: DataKind, row: dict[str, Any], **values: Any) -> OfflineRow:
    config = data(**values)
    [found], dropped = tokenize_rows(load_rows(write(tmp_path / "a.jsonl", [row]), kind, config), tokenizer, kind, config)
    assert dropped == 0
    return found


def spans(tokenizer: PromptTokenizer, sequence: TokenSequence) -> list[tuple[bool, str]]:
    """Neighbouring tokens of the same mask as text."""
    marked = zip(sequence.trainable.tolist(), sequence.tokens.tolist(), strict=True)
    return [
        (trained, tokenizer.decode([token for _, token in part], skip_special_tokens=False))
        for trained, part in groupby(marked, key=lambda item: item[0])
    ]


def trained(tokenizer: PromptTokenizer, sequence: TokenSequence) -> list[str]:
    return [text for mask, text in spans(tokenizer, sequence) if mask]


# ---- reading rows --------------------------------------------------------------------------------------------------

PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}
LABELLED = {"prompt": "p", "completion": "c", "label": True}


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("pair", {"prompt": "p", "chosen": "c"}, r"column 'rejected' \(data\.rejected_field\) is not among its columns"),
        ("pair", {**PAIR, "chosen": None}, r"column 'chosen' \(data\.chosen_field\) is null there"),
        ("pair", {"chosen": "c", "rejected": "r"}, r"column 'prompt' \(data\.prompt_field\) is not among its columns"),
        ("pair", {"chosen": chat("u:x", "a:c"), "rejected": "r"}, r"column 'prompt' \(data\.prompt_field\) is not among"),
        ("pair", {**PAIR, "rejected": "c"}, r"columns 'chosen' and 'rejected' are equal.*remove the row"),
        ("pair", {**PAIR, "rejected": " \n"}, r"column 'rejected': found ' \\n', expected an answer"),
        ("pair", {**PAIR, "rejected": chat("a: ")}, r"column 'rejected': message 1 \(assistant\) is empty"),
        ("pair", {**PAIR, "prompt": chat("u:p"), "chosen": ""}, r"column 'chosen': message 1 \(assistant\) is empty"),
        ("pair", {**PAIR, "chosen": 7}, r"column 'chosen': found 7, expected text or a non-empty list"),
        ("pair", {**PAIR, "chosen": []}, r"column 'chosen': found \[\], expected text or a non-empty list"),
        ("pair", {**PAIR, "chosen": [{"from": "gpt", "value": "c"}]}, r"column 'chosen': message 0 has role None"),
        ("pair", {**PAIR, "prompt": chat("u:p", "a:c")}, r"column 'prompt': the last message is the assistant's"),
        ("pair", {**PAIR, "chosen": chat("a:c", "u:x")}, r"column 'chosen': the last message has role 'user', expected 'assistant'"),
        ("pair", {**PAIR, "prompt": chat("u:p"), "chosen": chat("u:q", "a:c")}, r"column 'chosen': found a message of role 'user' after"),
        ("pair", {**PAIR, "prompt": chat("u:p"), "chosen": chat("u:p")}, r"column 'chosen': found nothing after the prompt's 1 message"),
        ("pair", {"chosen": chat("u:x", "a:c"), "rejected": chat("u:y", "a:r")}, r".*begin with different messages"),
        ("pair", {"chosen": chat("u:x", "a:c"), "rejected": chat("u:x", "a:c", "u:y", "a:r")}, r"column 'chosen': found nothing after"),
        ("pair", {**PAIR, "chosen": chat("u:x", "a:c"), "rejected": chat("u:x", "a:r")}, r"the prompt 'p' is no message of the start"),
        ("pair", {**PAIR, "margin": "big"}, r"column 'margin': found 'big', expected the margin of the pair, a finite number"),
        ("pair", {**PAIR, "margin": float("nan")}, r"column 'margin': found nan"),
        ("labelled", {"prompt": "p", "completion": "c"}, r"column 'label' \(data\.label_field\) is not among"),
        ("labelled", {**LABELLED, "label": "good"}, r"column 'label': found 'good', expected true or 1"),
        ("labelled", {**LABELLED, "label": 2}, r"column 'label': found 2, expected true or 1"),
        ("labelled", {**LABELLED, "label": -1}, r"column 'label': found -1, expected true or 1"),
        ("labelled", {**LABELLED, "completion": ""}, r"column 'completion': found '', expected an answer"),
        ("labelled", {"completion": "c", "label": 1}, r"column 'prompt' \(data\.prompt_field\) is not among"),
        ("labelled", {**LABELLED, "completion": chat("u:p", "a:c", "u:x", "a:y"), "prompt": "q"}, r".*role 'user' after"),
        ("conversation", {"text": "x"}, r"found the columns \['text'\], expected 'completion' .* or 'messages'"),
        ("conversation", {"messages": "x"}, r"column 'messages': found 'x', expected .*a non-empty list of messages"),
        ("conversation", {"messages": chat("u:x")}, r"column 'messages': the last message has role 'user', expected 'assistant'"),
        ("conversation", {"messages": chat("u:x", "a:y", "u:z")}, r"column 'messages': the last message has role 'user'"),
        ("conversation", {"messages": chat("a:x", "u:y", "a:z")}, r"column 'messages': message 0 is the assistant's.*train_on=completion"),
        ("conversation", {"messages": chat("u:x", "a:", "u:y", "a:z")}, r"column 'messages': message 1 \(assistant\) is empty"),
        ("conversation", {"messages": [{"role": "user"}]}, r"column 'messages': message 0 \(user\) has content None"),
        ("conversation", {"completion": "c"}, r"column 'prompt' \(data\.prompt_field\) is not among"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, kind: DataKind, row: dict[str, Any], expected: str) -> None:
    fine = {"prompt": "p", "chosen": "c", "rejected": "r", "completion": "c", "label": 0}
    source = write(tmp_path / "a.jsonl", [fine, row])
    assert len(load_rows(source, kind, data(), limit=1)) == 1
    with pytest.raises(ConfigError, match=r"a\.jsonl:2(: |, )" + expected):
        load_rows(source, kind, data())


def test_a_column_that_happens_to_be_named_margin_is_no_reason_to_refuse_pairs_that_need_none(tmp_path: Path) -> None:
    """Only a reward model reads it, and the name is a default that nobody chose."""
    source = write(tmp_path / "a.jsonl", [{**PAIR, "margin": "slightly better"}, {**PAIR, "margin": 2.0}])
    assert [row.margin for row in load_rows(source, "pair", data(), margins=False)] == [None, None]
    with pytest.raises(ConfigError, match=r"column 'margin': found 'slightly better'"):
        load_rows(source, "pair", data())


def test_parquet_rows_are_named_and_read_like_json(tmp_path: Path) -> None:
    """Parquet gives all messages the same keys, null where they had none."""
    rows = [
        {"chosen": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "c", "name": "n"}], "rejected": chat("u:u", "a:r")}
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    [row] = load_rows(str(tmp_path / "a.parquet"), "pair", data())
    assert row.answers == load_rows(write(tmp_path / "a.jsonl", rows), "pair", data())[0].answers
    pq.write_table(pa.table({"prompt": ["p", "p"], "chosen": ["c", "c"], "rejected": ["r", None]}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet, row 2: column 'rejected'"):
        load_rows(str(tmp_path / "b.parquet"), "pair", data())


def test_ids_labels_margins_and_own_columns(tmp_path: Path) -> None:
    source = write(
        tmp_path / "a.jsonl", [{"q": "p", "good": "c", "bad": "r", "key": "k", "gap": 2}, {"q": "p", "good": "c", "bad": "r", "key": 7}]
    )
    config = data(prompt_field="q", chosen_field="good", rejected_field="bad", id_field="key", margin_field="gap")
    rows = load_rows(source, "pair", config)
    assert [(row.row_id, row.margin) for row in rows] == [("k", 2.0), ("7", None)]
    labels = [True, 1, 1.0, False, 0]
    source = write(tmp_path / "b.jsonl", [{"prompt": "p", "completion": "c", "label": value} for value in labels])
    found = load_rows(source, "labelled", data())
    assert [row.wanted for row in found] == [True, True, True, False, False]
    assert [row.row_id for row in found] == ["0", "1", "2", "3", "4"]


def test_ids_are_unique_and_there(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{**PAIR, "id": 1}, {**PAIR, "id": 1}])
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: id '1' was already used at .*a\.jsonl:1"):
        load_rows(source, "pair", data(id_field="id"))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: column 'key' \(data\.id_field\) is not among"):
        load_rows(source, "pair", data(id_field="key"))


def test_empty_sets_and_bad_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        load_rows(write(tmp_path / "a.jsonl", []), "pair", data())
    with pytest.raises(ConfigError, match=r"data\.limit is 0"):
        load_rows(str(tmp_path / "a.jsonl"), "pair", data(), limit=0)


# ---- masks ---------------------------------------------------------------------------------------------------------

TALK = chat("s:be ab", "u:hi", "a:one", "u:more", "a:two")


def test_every_assistant_turn_is_trained_with_its_end_token_once_and_nothing_else_is(tmp_path: Path, make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model())
    row = tokenized(tmp_path, tokenizer, "conversation", {"messages": TALK})
    sequence = row.sequences["answer"]
    assert spans(tokenizer, sequence) == [
        (False, "<bos><|start|>system\nbe ab<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\n"),
        (True, "one<|end|>"),
        (False, "\n<|start|>user\nmore<|end|>\n<|start|>assistant\n"),
        (True, "two<|end|>"),
    ]
    assert sequence.prompt_length == int(np.argmax(sequence.trainable))
    assert (sequence.tokens.dtype, sequence.trainable.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("template", [CHAT, PLAIN])
def test_the_tokens_are_those_of_an_episode_with_the_same_turns(tmp_path: Path, make_model: MakeModel, template: str) -> None:
    tokenizer = PromptTokenizer(make_model(template=template, generation_eos=END))
    end = tokenizer.turn_end.tokens
    episode = [
        *tokenizer.encode_prompt(Prompt(prompt_id="p", messages=tuple(TALK[:2]))),
        *tokenizer.encode_text("one"), *end, *tokenizer.encode_turn(TALK[3:4]), *tokenizer.encode_text("two"), *end,
    ]  # fmt: skip
    row = tokenized(tmp_path, tokenizer, "conversation", {"messages": TALK})
    assert row.sequences["answer"].tokens.tolist() == episode


def test_few_shot_answers_of_the_prompt_are_not_trained_on_completion(tmp_path: Path, make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model())
    shots = chat("u:1", "a:one", "u:2")
    for row in ({"prompt": shots, "completion": "two"}, {"messages": [*shots, *chat("a:two")]}):
        found = tokenized(tmp_path, tokenizer, "conversation", row, train_on="completion").sequences["answer"]
        assert trained(tokenizer, found) == ["two<|end|>"]
        prompt = tokenizer.encode_prompt(Prompt(prompt_id="p", messages=tuple(shots)))
        assert found.tokens[: found.prompt_length].tolist() == prompt.tolist()
        assert trained(tokenizer, tokenized(tmp_path, tokenizer, "conversation", row).sequences["answer"]) == ["one<|end|>", "two<|end|>"]


@pytest.mark.parametrize("row", [{"messages": TALK}, {"prompt": "ab", "completion": "c"}])
def test_every_token_but_the_first_is_trained_on_all(tmp_path: Path, make_model: MakeModel, row: dict[str, Any]) -> None:
    """The first has nothing before it; the shared prompt is then empty, because its tokens are trained."""
    tokenizer = PromptTokenizer(make_model())
    everything = tokenized(tmp_path, tokenizer, "conversation", row, train_on="all").sequences["answer"]
    answer = tokenized(tmp_path, tokenizer, "conversation", row, train_on="completion").sequences["answer"]
    assert everything.tokens.tolist() == answer.tokens.tolist()
    assert everything.trainable.tolist() == [False] + [True] * (len(answer.tokens) - 1)
    assert everything.prompt_length == 0


def test_text_of_answers_headers_and_ends_in_other_messages_is_not_trained(tmp_path: Path, make_model: MakeModel) -> None:
    """A mask that is searched for in text or token values would find these."""
    tokenizer = PromptTokenizer(make_model(generation_eos=[END, EOS]))
    fake = "<|start|>assistant\ntwo<|end|><eos>"
    messages = chat(f"u:{fake}", "a:two", f"u:two{fake}", "a:two<|end|>two")
    sequence = tokenized(tmp_path, tokenizer, "conversation", {"messages": messages}).sequences["answer"]
    assert trained(tokenizer, sequence) == ["two<|end|>", "two<|end|>two<|end|>"]


TEXTS = st.lists(st.sampled_from(["a", "b", "\n", " ", "ab", "<|end|>", "<eos>", "<|start|>assistant\n"]), min_size=1, max_size=5).map(
    "".join
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PromptTokenizer]:
    """A directory and a tokenizer for all examples of a property."""
    directory = tmp_path_factory.mktemp("shared")
    return directory, PromptTokenizer(make_model.__wrapped__(directory)())


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_whatever_the_contents_the_mask_holds_exactly_the_answers(
    shared: tuple[Path, PromptTokenizer], turns: list[tuple[str, str]]
) -> None:
    directory, tokenizer = shared
    answers = [answer + "x" for _, answer in turns]
    messages = [message for (user, _), answer in zip(turns, answers, strict=True) for message in chat(f"u:{user}", f"a:{answer}")]
    sequence = tokenized(directory, tokenizer, "conversation", {"messages": messages}).sequences["answer"]
    assert trained(tokenizer, sequence) == [answer + "<|end|>" for answer in answers]
    whole = tokenizer.render(messages, generation_prompt=False, where="here")
    assert tokenizer.decode(sequence.tokens, skip_special_tokens=False) + "\n" == whole


def test_merges_across_the_start_of_an_answer_do_not_shift_the_mask(tmp_path: Path, make_model: MakeModel) -> None:
    """The header ends with a line end, which merges with the answer's; "a" merges with "b"."""
    tokenizer = PromptTokenizer(make_model())
    sequence = tokenized(tmp_path, tokenizer, "conversation", {"messages": chat("u:x", "a:\ny", "u:x", "a:\nz")}).sequences["answer"]
    assert trained(tokenizer, sequence) == ["\ny<|end|>", "\nz<|end|>"]
    line_end = tokenizer.encode_text("\n")
    assert sequence.tokens[sequence.prompt_length - 1 : sequence.prompt_length + 1].tolist() == line_end * 2
    text = tokenized(tmp_path, tokenizer, "conversation", {"prompt": "xa", "completion": "bc"}).sequences["answer"]
    assert len(tokenizer.encode_text("ab")) == 1
    assert text.tokens.tolist() == [BOS, *tokenizer.encode_text("xa"), *tokenizer.encode_text("bc"), EOS]
    assert text.trainable.tolist() == [False] * 3 + [True] * 3


def test_an_answer_gets_no_space_that_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    """SentencePiece puts one before every text, so the tokens of the answer alone are not those in its place."""
    vocabulary = {token: index for index, token in enumerate(["<eos>", "▁a", "▁b", "▁", "a", "b", "1"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}))
    found = tokenized(tmp_path, PromptTokenizer(tmp_path), "conversation", {"prompt": "a", "completion": "1 b"}).sequences["answer"]
    assert found.tokens.tolist() == [vocabulary[token] for token in ("▁a", "1", "▁b", "<eos>")]


@pytest.mark.parametrize("pad", [None, "<eos>"])
def test_end_tokens_inside_prompt_and_answer_do_not_move_the_mask(tmp_path: Path, make_model: MakeModel, pad: str | None) -> None:
    directory = make_model(generation_eos=[END, EOS])
    settings_file = directory / "tokenizer_config.json"
    settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), **({"pad_token": pad} if pad else {})}))
    tokenizer = PromptTokenizer(directory)
    row = tokenized(tmp_path, tokenizer, "labelled", {"prompt": "x<eos>y<|end|>", "completion": "z<eos>x", "label": 1})
    assert spans(tokenizer, row.sequences["answer"]) == [(False, "<bos>x<eos>y<|end|>"), (True, "z<eos>x<eos>")]


@pytest.mark.parametrize("written", ["<eos>", "<|end|>"])
def test_an_answer_that_ends_with_an_end_token_gets_no_second(tmp_path: Path, make_model: MakeModel, written: str) -> None:
    tokenizer = PromptTokenizer(make_model(generation_eos=END))
    row = tokenized(tmp_path, tokenizer, "conversation", {"prompt": "x", "completion": f"y{written}"})
    assert trained(tokenizer, row.sequences["answer"]) == [f"y{written}"]


def test_turns_that_a_template_ends_with_plain_text_get_the_end_token(tmp_path: Path, make_model: MakeModel) -> None:
    """Otherwise the model never learns to stop; the template's own text follows it, as in an episode."""
    tokenizer = PromptTokenizer(make_model(template=PLAIN))
    sequence = tokenized(tmp_path, tokenizer, "conversation", {"messages": TALK}).sequences["answer"]
    assert spans(tokenizer, sequence) == [
        (False, "system: be ab\nuser: hi\nassistant: "),
        (True, "one<eos>"),
        (False, "\nuser: more\nassistant: "),
        (True, "two<eos>"),
    ]


REWRITES = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '(cut)' }}")
MARKS_LAST = CHAT.replace("{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}")


@pytest.mark.parametrize("template", [REWRITES, MARKS_LAST])
def test_a_template_that_rewrites_history_is_refused_for_the_row_unless_only_the_last_turn_is_trained(
    tmp_path: Path, make_model: MakeModel, template: str
) -> None:
    tokenizer = PromptTokenizer(make_model(template=template))
    with pytest.raises(
        ConfigError, match=r"a\.jsonl:1: the chat template .* before message 4 .*not prefix-stable.*data\.train_on=completion"
    ):
        tokenized(tmp_path, tokenizer, "conversation", {"messages": TALK})
    found = tokenized(tmp_path, tokenizer, "conversation", {"messages": TALK}, train_on="completion").sequences["answer"]
    assert trained(tokenizer, found) == ["<think></think>two<|end|>" if template == MARKS_LAST else "two<|end|>"]


THINKS = CHAT.replace("assistant\n{% endif", "assistant\n<think>{% endif")
ENDS_OTHERWISE = CHAT.replace("<|end|>", "{{ '!' if 'z' in m.content else '<|end|>' }}")


@pytest.mark.parametrize(("template", "answer"), [(THINKS, "y"), (THINKS, "y" * 40), (ENDS_OTHERWISE, "z" * 40)])
def test_a_template_that_writes_an_answer_otherwise_than_a_model_would_is_refused(
    tmp_path: Path, make_model: MakeModel, template: str, answer: str
) -> None:
    """Where header, answer and end are not in the text one after another, no position says what is the answer."""
    tokenizer = PromptTokenizer(make_model(template=template))
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the chat template .* does not write message 1 as the header"):
        tokenized(tmp_path, tokenizer, "conversation", {"messages": chat("u:x", f"a:{answer}")})


def test_all_that_a_template_writes_up_to_the_end_token_is_trained(tmp_path: Path, make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model(template=CHAT.replace("<|end|>", "<|start|><|end|>"), generation_eos=END))
    sequence = tokenized(tmp_path, tokenizer, "conversation", {"messages": TALK}).sequences["answer"]
    assert trained(tokenizer, sequence) == ["one<|start|><|end|>", "two<|start|><|end|>"]


def test_messages_without_template_name_the_row(tmp_path: Path, make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl:1 .*no chat template.*model\.chat_template"):
        tokenized(tmp_path, PromptTokenizer(make_model(template=None)), "conversation", {"messages": TALK})


def test_a_prompt_without_tokens_is_refused_for_its_row(tmp_path: Path, make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model(adds="$A"))
    row = {"prompt": "", "completion": "ab"}
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the prompt has no tokens"):
        tokenized(tmp_path, tokenizer, "conversation", row)
    assert tokenized(tmp_path, tokenizer, "conversation", row, train_on="all").sequences["answer"].trainable.tolist() == [False, True]


# ---- pairs ---------------------------------------------------------------------------------------------------------

ASKED = chat("s:s", "u:p")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": "c", "rejected": "r r"},
        {"prompt": ASKED, "chosen": chat("a:c"), "rejected": "r r"},
        {"prompt": ASKED, "chosen": chat("a:c"), "rejected": chat("a:r r")},
        {"prompt": ASKED, "chosen": [*ASKED, *chat("a:c")], "rejected": [*ASKED, *chat("a:r r")]},
        {"chosen": [*ASKED, *chat("a:c")], "rejected": [*ASKED, *chat("a:r r")]},
        {"prompt": "p", "chosen": [*ASKED, *chat("a:c")], "rejected": [*ASKED, *chat("a:r r")]},
    ],
)
def test_all_forms_of_a_pair_give_the_same_tokens(tmp_path: Path, make_model: MakeModel, row: dict[str, Any]) -> None:
    tokenizer = PromptTokenizer(make_model())
    found = tokenized(tmp_path, tokenizer, "pair", row).sequences
    prompt = tokenizer.encode_prompt(Prompt(prompt_id="p", messages=tuple(ASKED))).tolist()
    for name, answer in (("chosen", "c<|end|>"), ("rejected", "r r<|end|>")):
        assert found[name].prompt_length == len(prompt)
        assert found[name].tokens[: len(prompt)].tolist() == prompt
        assert trained(tokenizer, found[name]) == [answer]
        assert found[name].trainable[len(prompt) :].all() and not found[name].trainable[: len(prompt)].any()


@pytest.mark.parametrize("row", [{**PAIR, "chosen": chat("a:c")}, {**PAIR, "chosen": chat("a:c"), "rejected": chat("a:r")}])
def test_a_text_prompt_beside_messages_is_the_users_message(tmp_path: Path, make_model: MakeModel, row: dict[str, Any]) -> None:
    tokenizer = PromptTokenizer(make_model())
    found = tokenized(tmp_path, tokenizer, "pair", row).sequences
    header = "<bos><|start|>user\np<|end|>\n<|start|>assistant\n"
    assert spans(tokenizer, found["chosen"]) == [(False, header), (True, "c<|end|>")]
    assert spans(tokenizer, found["rejected"]) == [(False, header), (True, "r<|end|>")]


def test_text_pairs_keep_the_prompt_equal_where_one_answer_would_merge_with_it(tmp_path: Path, make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model())
    found = tokenized(tmp_path, tokenizer, "pair", {"prompt": "xa", "chosen": "b", "rejected": "c"}).sequences
    assert found["chosen"].tokens[:3].tolist() == found["rejected"].tokens[:3].tolist() == [BOS, *tokenizer.encode_text("xa")]
    assert found["chosen"].prompt_length == found["rejected"].prompt_length == 3


def test_what_the_answers_of_a_pair_begin_with_alike_is_trained_in_both(tmp_path: Path, make_model: MakeModel) -> None:
    """The prompt is what is said to be the prompt, not what happens to be equal."""
    tokenizer = PromptTokenizer(make_model())
    found = tokenized(tmp_path, tokenizer, "pair", {"prompt": "p", "chosen": "same c", "rejected": "same r"}).sequences
    assert trained(tokenizer, found["chosen"]) == ["same c<eos>"] and trained(tokenizer, found["rejected"]) == ["same r<eos>"]


def test_answers_of_several_turns_train_the_assistants_only(tmp_path: Path, make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model())
    chosen = chat("u:p", "a:first", "u:more", "a:call", "t:148", "a:done")
    rejected = chat("u:p", "a:first", "u:more", "a:guess")
    found = tokenized(tmp_path, tokenizer, "pair", {"chosen": chosen, "rejected": rejected}).sequences
    assert trained(tokenizer, found["chosen"]) == ["call<|end|>", "done<|end|>"]
    assert trained(tokenizer, found["rejected"]) == ["guess<|end|>"]
    prompt = tokenizer.encode_prompt(Prompt(prompt_id="p", messages=tuple(chosen[:3])))
    assert found["chosen"].prompt_length == found["rejected"].prompt_length == len(prompt)


# ---- lengths, and the sets that come along -------------------------------------------------------------------------


def test_rows_above_the_limit_are_dropped_whole_and_counted_or_refused(tmp_path: Path, make_model: MakeModel) -> None:
    """The longer answer of a pair counts, with its prompt and end token; nothing is cut."""
    tokenizer = PromptTokenizer(make_model())
    rows = [{"prompt": "pp", "chosen": "c" * c, "rejected": "r" * r} for c, r in ((4, 1), (5, 1), (1, 5), (1, 9), (1, 4))]
    source = write(tmp_path / "a.jsonl", rows)
    config = data(max_tokens=8)
    kept, dropped = tokenize_rows(load_rows(source, "pair", config), tokenizer, "pair", config)
    assert [row.row_id for row in kept] == ["0", "4"] and dropped == 3
    assert len(kept[0].sequences["chosen"].tokens) == 8
    config = data(max_tokens=8, overlong_prompts="refuse")
    with pytest.raises(ConfigError, match=r"3 of 5 rows .*data\.max_tokens=8.*refuse.*a\.jsonl:4 \(13 tokens\).*a\.jsonl:2 \(9 tokens\)"):
        tokenize_rows(load_rows(source, "pair", config), tokenizer, "pair", config)
    config = data(max_tokens=4)
    with pytest.raises(ConfigError, match=r"5 of 5 rows .*none is left"):
        tokenize_rows(load_rows(source, "pair", config), tokenizer, "pair", config)


def test_embedded_sets_hold_right_and_wrong_answers_and_share_no_prompt_with_what_is_held_out() -> None:
    held_out = {row["prompt"] for row in embedded_rows("sort5-heldout")}
    for kind in ("sft", "pairs", "labelled"):
        rows, held = embedded_rows(f"sort5-{kind}"), embedded_rows(f"sort5-{kind}-heldout")
        assert (len(rows), len(held)) == (len(embedded_rows("sort5")), len(held_out))
        assert {row["prompt"] for row in held} == held_out and not {row["prompt"] for row in rows} & held_out
        assert rows == embedded_rows(f"sort5-{kind}")

    def right(row: dict[str, Any], name: str) -> bool:
        return row[name] == "".join(sorted(row["prompt"].removeprefix("sort ").removesuffix("=")))

    assert all(right(row, "completion") for row in embedded_rows("sort5-sft"))
    assert all(right(row, "chosen") and not right(row, "rejected") for row in embedded_rows("sort5-pairs"))
    labelled = embedded_rows("sort5-labelled")
    assert all(right(row, "completion") == row["label"] for row in labelled)
    assert 0.45 < sum(row["label"] for row in labelled) / len(labelled) < 0.55
    with pytest.raises(ConfigError, match=r"no embedded data 'calc-pairs'; there are: .*sort5-pairs, sort5-pairs-heldout"):
        embedded_rows("calc-pairs")


@pytest.mark.parametrize(("name", "kind"), [("sort5-sft", "conversation"), ("sort5-pairs", "pair"), ("sort5-labelled", "labelled")])
def test_embedded_sets_are_read_like_files(name: str, kind: DataKind) -> None:
    rows = load_rows(f"embedded:{name}", kind, data(), limit=3)
    assert [row.place for row in rows] == [f"embedded:{name}, row {number}" for number in (1, 2, 3)]
