"""Reading prompts: what a newcomer's file may look like, and the message when it does not."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpost.data.load import load_prompts
from rlpost.data.prepare import tokenize_prompts
from rlpost.types import ConfigError, Prompt


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def test_jsonl_text_rows(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "zwei + zwei = ä", "answer": 4, "cases": [1]}, "", {"prompt": "b", "answer": 5}])
    first, second = load_prompts(source)
    assert (first.prompt_id, first.text, first.messages, dict(first.fields)) == ("0", "zwei + zwei = ä", None, {"answer": 4, "cases": [1]})
    assert (second.prompt_id, second.text) == ("1", "b")


def test_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\n')
    assert load_prompts(str(tmp_path / "a.jsonl"))[0].text == "x"


def test_messages_own_fields_and_limit(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = write_jsonl(tmp_path / "a.jsonl", [{"chat": messages, "key": f"k{i}", "answer": i} for i in range(5)])
    prompts = load_prompts(source, prompt_field="chat", id_field="key", limit=3)
    assert [prompt.prompt_id for prompt in prompts] == ["k0", "k1", "k2"]
    assert prompts[1].messages == tuple(messages) and prompts[1].text is None
    assert dict(prompts[1].fields) == {"answer": 1}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"question": "x", "answer": 1},
            r"a\.jsonl:3: column 'prompt' \(data.prompt_field\) is not among its columns \['answer', 'question'\]",
        ),
        ({"prompt": None}, r"a\.jsonl:3: column 'prompt' .* is null"),
        ("{broken", r"a\.jsonl:3: not JSON"),
        ("[1, 2]", r"a\.jsonl:3: found a JSON list"),
        ({"prompt": 7}, r"a\.jsonl:3, column 'prompt': found 7, expected text or"),
        ({"prompt": []}, r"a\.jsonl:3, column 'prompt': found \[\]"),
        ({"prompt": ["x"]}, r"a\.jsonl:3, column 'prompt': message 0 is 'x'"),
        ({"prompt": [{"from": "human", "value": "x"}]}, r"a\.jsonl:3.*message 0 has role None.*\['from', 'value'\]"),
        ({"prompt": [{"role": "user"}]}, r"a\.jsonl:3.*message 0 \(user\) has content None"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"a\.jsonl:3.*only text models"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
            r"a\.jsonl:3.*last message is the assistant's",
        ),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, expected: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "fine"}, "", row])
    with pytest.raises(ConfigError, match=expected):
        load_prompts(source)


def test_bad_row_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    assert len(load_prompts(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "fine"}, "{broken"]), limit=1)) == 1


def test_not_utf8_is_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: not UTF-8"):
        load_prompts(str(tmp_path / "a.jsonl"))


def test_duplicate_ids_name_both_rows(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}, {"prompt": "c", "id": 1}])
    with pytest.raises(ConfigError, match=r"a\.jsonl:3: id '1' was already used at .*a\.jsonl:1"):
        load_prompts(source, id_field="id")


def test_missing_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: column 'id' \(data.id_field\)"):
        load_prompts(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}]), id_field="id")


@pytest.mark.parametrize("source", ["data.csv", "some_name", "hf:", "hf:a:b:c:d"])
def test_unknown_source_lists_the_forms(source: str) -> None:
    with pytest.raises(ConfigError, match=r"expected .*hf:NAME"):
        load_prompts(source)


def test_missing_and_empty_files_and_bad_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_prompts(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="no rows"):
        load_prompts(write_jsonl(tmp_path / "empty.jsonl", ["", ""]))
    with pytest.raises(ConfigError, match=r"data\.limit is 0"):
        load_prompts(str(tmp_path / "empty.jsonl"), limit=0)


def test_parquet_text_and_messages(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "u"}], "answer": 1},
        {"prompt": [{"role": "user", "content": "v"}, {"role": "tool", "content": "w", "name": "calc"}], "answer": 2},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = load_prompts(str(tmp_path / "a.parquet"))
    # Parquet gives the first message a key "name" too, null; a template that tests for the key would be misled.
    assert first.messages == ({"role": "user", "content": "u"},)
    assert second.messages == tuple(rows[1]["prompt"])  # type: ignore[arg-type]
    assert dict(second.fields) == {"answer": 2}


def test_parquet_errors_name_file_and_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", None], "answer": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet, row 2: column 'prompt'"):
        load_prompts(str(tmp_path / "a.parquet"))
    with pytest.raises(ConfigError, match=r"a\.parquet, row 1: column 'question' .*\['answer', 'prompt'\]"):
        load_prompts(str(tmp_path / "a.parquet"), prompt_field="question")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"b\.parquet: not a readable Parquet file"):
        load_prompts(str(tmp_path / "b.parquet"))


def test_hugging_face_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlpost\[datasets\]'"):
        load_prompts("hf:openai/gsm8k:main:train")


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:some/name", ("some/name", None, "train")),
        ("hf:some/name:test", ("some/name", None, "test")),
        ("hf:some/name:main:test", ("some/name", "main", "test")),
    ],
)
def test_hugging_face_name_subset_split(monkeypatch: pytest.MonkeyPatch, source: str, asked: tuple[str, str | None, str]) -> None:
    calls = []

    def load_dataset(name: str, subset: str | None, split: str) -> list[dict[str, str]]:
        calls.append((name, subset, split))
        return [{"prompt": "a"}, {"other": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_prompts(source, limit=1)[0].text == "a"
    assert calls == [asked]
    with pytest.raises(ConfigError, match=f"{source}, row 2: column 'prompt'"):
        load_prompts(source)


def test_hugging_face_local_forms_for_real(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    assert [prompt.text for prompt in load_prompts(f"hf:{source}")] == ["a", "b"]
    datasets.DatasetDict({"test": datasets.Dataset.from_list([{"prompt": "c"}])}).save_to_disk(str(tmp_path / "saved"))
    assert load_prompts(f"hf:{tmp_path / 'saved'}:test")[0].text == "c"


class CountsCharacters:
    """A tokenizer of one token a character."""

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        return np.arange(len(prompt.text or ""), dtype=np.int32)


PROMPTS = [Prompt(prompt_id=str(length), text="x" * length) for length in (3, 5, 9, 4)]


def test_overlong_prompts_are_dropped_and_counted() -> None:
    kept, dropped = tokenize_prompts(PROMPTS, CountsCharacters(), max_prompt_tokens=5, overlong="drop")
    assert [prompt.prompt_id for prompt in kept] == ["3", "5", "4"] and dropped == 1
    assert [len(prompt.tokens) for prompt in kept if prompt.tokens is not None] == [3, 5, 4]


def test_overlong_prompts_are_refused_with_examples() -> None:
    with pytest.raises(ConfigError, match=r"1 of 4 prompts .*max_prompt_tokens=5.*refuse.*'9' \(9 tokens\)"):
        tokenize_prompts(PROMPTS, CountsCharacters(), max_prompt_tokens=5, overlong="refuse")


def test_none_left_is_refused_even_when_dropping() -> None:
    with pytest.raises(ConfigError, match=r"4 of 4 prompts .*none is left"):
        tokenize_prompts(PROMPTS, CountsCharacters(), max_prompt_tokens=2, overlong="drop")


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompt 'e' is empty"):
        tokenize_prompts([Prompt(prompt_id="e", text="")], CountsCharacters(), max_prompt_tokens=5)
