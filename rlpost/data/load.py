"""Reads prompts from where the configuration says they are: a file, a Hugging Face data set, or an embedded task.

Every source becomes rows with a place (``file.jsonl:7``) that error messages name. A row's prompt column is text or a list of
chat messages; its other columns become ``Prompt.fields``, which rewards and environments read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rlpost.types import ConfigError, Prompt

HUGGING_FACE = "hf:"
EMBEDDED = "embedded:"
FORMS = "a .jsonl or .parquet file, hf:NAME[:SPLIT] or hf:NAME:SUBSET:SPLIT, or embedded:NAME"
PARQUET_BATCH_ROWS = 1024
"""Rows converted at once; with ``limit`` no more than one batch is read in vain."""


class Row(NamedTuple):
    """One row and where it came from, in words for an error message."""

    place: str
    columns: Mapping[str, Any]


def load_prompts(source: str, *, prompt_field: str = "prompt", id_field: str | None = None, limit: int | None = None) -> list[Prompt]:
    """All prompts of ``source`` (see :data:`FORMS`), in its order, without tokens.

    ``prompt_field`` is the column of the prompt, ``id_field`` the column of its id (None: ``"0"``, ``"1"`` ... by row);
    the other columns are the prompt's ``fields``. ``limit`` keeps the first N rows.

    Raises:
        ConfigError: the source is missing or of an unknown kind, is empty, or a row cannot be used; names the row.
    """
    return [_to_prompt(row, row_id, prompt_field, id_field) for row_id, row in identified_rows(source, id_field, limit)]


def identified_rows(source: str, id_field: str | None, limit: int | None) -> Iterator[tuple[str, Row]]:
    """``(id, row)`` of the first ``limit`` rows (None: of all), at least one, no id twice. Raises ConfigError like :func:`load_prompts`."""
    if limit is not None and limit < 1:
        raise ConfigError(f"data.limit is {limit}; it must be 1 or more, or null for all rows")
    seen: dict[str, str] = {}
    for index, row in enumerate(islice(_rows(source), limit)):
        row_id = str(index) if id_field is None else str(column(row, "data.id_field", id_field))
        if row_id in seen:
            raise ConfigError(
                f"{row.place}: id {row_id!r} was already used at {seen[row_id]}; "
                f"ids must be unique (data.id_field={id_field}; null numbers the rows)"
            )
        seen[row_id] = row.place
        yield row_id, row
    if not seen:
        raise ConfigError(f"{source}: no rows; a data set needs at least one")


def column(row: Row, option: str, name: str) -> Any:
    """A column that must be there; ``option`` names it in the configuration. Raises ConfigError when it is not, or null."""
    if row.columns.get(name) is None:
        raise missing(row, option, name)
    return row.columns[name]


def missing(row: Row, option: str, name: str) -> ConfigError:
    """The error of a row whose column ``name`` is not there, or null."""
    found = "null there" if name in row.columns else f"not among its columns {sorted(row.columns)}"
    return ConfigError(f"{row.place}: column {name!r} ({option}) is {found}; set {option} to the right column or mend the row")


def _rows(source: str) -> Iterator[Row]:
    if source.startswith(EMBEDDED):
        return _embedded(source)
    if source.startswith(HUGGING_FACE):
        return _hugging_face(source)
    path = Path(source).expanduser()
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise ConfigError(f"data source {source!r}: expected {FORMS}")
    if not path.is_file():
        raise ConfigError(f"data file {source!r} does not exist (looked for {path.absolute()})")
    return readers[path.suffix](path)


def _jsonl(path: Path) -> Iterator[Row]:
    """One JSON object a line; blank lines are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{place}: not UTF-8 text: {error}") from error
            if not text:
                continue
            try:
                columns = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{place}: not JSON: {error.msg} at column {error.colno}; a .jsonl file has one JSON object a line"
                ) from error
            if not isinstance(columns, dict):
                raise ConfigError(f"{place}: found a JSON {type(columns).__name__}, expected an object with one key a column")
            yield Row(place, columns)


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a readable Parquet file: {error}") from error
    with file:
        number = 0
        for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
            for columns in batch.to_pylist():
                number += 1
                yield Row(f"{path}, row {number}", columns)


def _hugging_face(source: str) -> Iterator[Row]:
    """A data set of the hub, a directory written by ``save_to_disk``, or any local file or directory that ``datasets`` loads."""
    name, subset, split = _hugging_face_parts(source)
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{source}: reading a Hugging Face data set needs the package datasets: pip install 'rlpost[datasets]' ({error})"
        ) from error
    path = Path(name).expanduser()
    try:
        # A file, or a directory with one data set, has no splits of its own: it is the split that was asked for.
        if path.is_file():
            builder = {".jsonl": "json"}.get(path.suffix, path.suffix.lstrip("."))
            data = datasets.load_dataset(builder, data_files={split: str(path)}, split=split)
        elif (path / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(str(path))
            if split not in splits:
                raise ValueError(f"no such split; it has {sorted(splits)}")
            data = splits[split]
        elif (path / "state.json").is_file():
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path) if path.is_dir() else name, subset, split=split)
    except Exception as error:  # datasets raises what its builders raise; all of it means "cannot be read"
        raise ConfigError(
            f"{source}: datasets could not load {name!r}, subset {subset!r}, split {split!r}: {type(error).__name__}: {error}"
        ) from error
    for number, columns in enumerate(data, start=1):
        yield Row(f"{source}, row {number}", columns)


def _hugging_face_parts(source: str) -> tuple[str, str | None, str]:
    """``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:SUBSET:SPLIT`` as (name, subset, split); the default split is train."""
    parts = source.removeprefix(HUGGING_FACE).split(":")
    if len(parts) > 3 or not all(parts):
        raise ConfigError(f"data source {source!r}: expected hf:NAME, hf:NAME:SPLIT or hf:NAME:SUBSET:SPLIT")
    name = parts[0]
    subset = parts[1] if len(parts) == 3 else None
    return name, subset, parts[-1] if len(parts) > 1 else "train"


def _embedded(source: str) -> Iterator[Row]:
    from rlpost.models.embedded import embedded_rows

    for number, columns in enumerate(embedded_rows(source.removeprefix(EMBEDDED)), start=1):
        yield Row(f"{source}, row {number}", columns)


def _to_prompt(row: Row, row_id: str, prompt_field: str, id_field: str | None) -> Prompt:
    value = column(row, "data.prompt_field", prompt_field)
    fields = {name: content for name, content in row.columns.items() if name not in (prompt_field, id_field)}
    if isinstance(value, str):
        return Prompt(prompt_id=row_id, text=value, fields=fields)
    return Prompt(prompt_id=row_id, messages=read_question(value, f"{row.place}, column {prompt_field!r}"), fields=fields)


def read_question(value: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    """Chat messages for a model to answer: the last is not the assistant's. Raises ConfigError, which begins with ``place``."""
    found = read_messages(value, place)
    if found[-1]["role"] == "assistant":
        raise ConfigError(
            f"{place}: the last message is the assistant's, so there is nothing to answer; remove it "
            "(put a reference answer into a column of its own)"
        )
    return found


def read_messages(value: Any, place: str) -> tuple[Mapping[str, Any], ...]:
    """Chat messages as they go to the template. Keys with None are left out: Parquet gives every message the keys of all."""
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f'{place}: found {brief(value)}, expected text or a non-empty list of messages such as [{{"role": "user", "content": "..."}}]'
        )
    found = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise ConfigError(f"{place}: message {number} is {brief(message)}, expected an object with role and content")
        kept = {key: content for key, content in message.items() if content is not None}
        role, content = kept.get("role"), kept.get("content")
        if not isinstance(role, str) or not role:
            raise ConfigError(
                f"{place}: message {number} has role {brief(role)}, expected text such as 'user'; its keys are {sorted(message)}"
            )
        if not isinstance(content, str) and not (content is None and "tool_calls" in kept):
            raise ConfigError(
                f"{place}: message {number} ({role}) has content {brief(content)}, expected text; only text models are supported"
            )
        found.append(kept)
    return tuple(found)


def brief(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}... ({type(value).__name__})"
