"""``--help`` tells every setting."""

from __future__ import annotations

import pytest

from rlpost.config.fields import SchemaField, schema_fields, type_name
from rlpost.config.help import format_help
from rlpost.config.load import available_configs

FIELDS = list(schema_fields())
SETTINGS = [field for field in FIELDS if not field.section]


@pytest.fixture(scope="module")
def text() -> str:
    return format_help()


@pytest.fixture(scope="module")
def words(text: str) -> str:
    """The help without its line breaks, so that wrapped sentences are found."""
    return " ".join(text.split())


def test_the_schema_is_walked_to_its_leaves() -> None:
    keys = {field.key for field in SETTINGS}
    assert {"name", "model.path", "training.optimizer.lr", "rewards.N.weight", "environment.options"} <= keys
    assert len(SETTINGS) > 100


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.key)
def test_every_field_is_documented_in_one_sentence(field: SchemaField) -> None:
    assert field.doc.endswith("."), f"{field.key}: the documentation is not a sentence: {field.doc!r}"


@pytest.mark.parametrize("field", SETTINGS, ids=lambda field: field.key)
def test_every_setting_is_printed_with_type_default_choices_and_documentation(field: SchemaField, text: str, words: str) -> None:
    line = next((line for line in text.splitlines() if line.startswith(f"  {field.key}  (")), None)
    assert line is not None, f"{field.key} is not in the help"
    assert type_name(field.annotation) in line
    assert ("; required)" in line) == field.required
    assert " ".join(field.doc.split()) in words
    if field.choices:
        assert f"one of: {', '.join(field.choices)}" in words


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("data.evaluation", "(text or null; default null)"),
        ("data.shuffle", "(true or false; default true)"),
        ("observe.trackers", "(a list of text; default [console, jsonl])"),
        ("engine.extra", "(a mapping (key: value); default {})"),
        ("training.optimizer.lr", "(a number; default 1e-06)"),
        ("sampling.stop_token_ids", "(a list of whole numbers; default [])"),
    ],
)
def test_defaults_are_printed_as_they_are_written(text: str, key: str, shown: str) -> None:
    assert f"  {key}  {shown}" in text


def test_the_help_begins_with_the_usage_and_lists_the_configs(text: str, words: str) -> None:
    assert text.startswith("usage: python -m rlpost.train config=NAME_OR_PATH [key.sub=value ...] [--dry-run] [--help]")
    for name, (_, comment) in available_configs().items():
        assert f"  {name} " in text
        assert comment in words


def test_no_line_is_wider_than_a_terminal_of_120(text: str) -> None:
    assert max(len(line) for line in text.splitlines()) <= 120
