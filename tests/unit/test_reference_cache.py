"""Reference logprobs that are computed once: what is read is what was written, and nothing else is ever taken for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpost.driver.reference_cache import FILE, ReferenceCache
from rlpost.types import ConfigError, LossTerms


def term(name: str, tokens: Sequence[int], trained: Sequence[int]) -> LossTerms:
    """``trained`` are places."""
    trainable = np.isin(np.arange(len(tokens)), trained)
    return LossTerms(
        trajectory_id=name,
        group_id=name,
        prompt_length=1,
        tokens=np.array(tokens, np.int32),
        trainable=trainable,
        weight=trainable.astype(np.float32),
    )


TERMS = [term("a/chosen", [5, 6, 7, 8], [1, 3]), term("a/rejected", [5, 9], [1]), term("b/chosen", [4, 3, 2], [])]


def logprobs(terms: Sequence[LossTerms]) -> list[np.ndarray]:
    """Of every token; those that are not trained must not come back."""
    return [np.arange(len(one.tokens), dtype=np.float32) - 10.0 * (number + 1) for number, one in enumerate(terms)]


def filled(run_dir: Path) -> ReferenceCache:
    cache = ReferenceCache(run_dir)
    cache.add(TERMS[:1], logprobs(TERMS)[:1])
    cache.add(TERMS[1:], logprobs(TERMS)[1:])
    return cache


EXPECTED = [[np.nan, -9.0, np.nan, -7.0], [np.nan, -19.0], [np.nan] * 3]


@pytest.mark.parametrize("required", [False, True])
def test_a_run_that_goes_on_reads_exactly_what_was_computed(tmp_path: Path, required: bool) -> None:
    filled(tmp_path).save()
    resumed = ReferenceCache(tmp_path)
    assert resumed.load(required=required)
    for cache in (filled(tmp_path), resumed):
        for got, expected in zip(cache.read(TERMS), EXPECTED, strict=True):
            assert got.dtype == np.float32
            np.testing.assert_array_equal(got, np.array(expected, np.float32))


def test_sequences_are_found_in_any_order_and_by_their_tokens(tmp_path: Path) -> None:
    """A training row and a held-out one may have the same id."""
    cache = filled(tmp_path)
    same_id = replace(term("a/chosen", [5, 1, 1], [1]), trajectory_id="a/chosen")
    cache.add([same_id], [np.array([0.0, -3.0, 0.0], np.float32)])
    found = cache.read([TERMS[1], same_id, TERMS[0]])
    assert [float(np.nansum(one)) for one in found] == [-19.0, -3.0, -16.0]


def test_a_run_without_steps_computes_what_is_not_there_and_a_trained_one_cannot(tmp_path: Path) -> None:
    """Computed after the first step it would be the trained model's."""
    assert not ReferenceCache(tmp_path).load(required=False)
    with pytest.raises(ConfigError, match=rf"{FILE} is missing.*reference=precomputed"):
        ReferenceCache(tmp_path).load(required=True)


@pytest.mark.parametrize(
    "changed",
    [
        term("a/chosen", [5, 6, 7, 9], [1, 3]),
        term("a/chosen", [5, 6, 7, 8], [2, 3]),
        term("a/chosen", [5, 6, 7], [1]),
        term("c/chosen", [1, 1], [1]),
    ],
    ids=["another token", "another mask", "another length", "another row"],
)
def test_a_data_set_that_changed_is_refused_and_not_matched_by_row_number(tmp_path: Path, changed: LossTerms) -> None:
    filled(tmp_path).save()
    resumed = ReferenceCache(tmp_path)
    resumed.load(required=True)
    with pytest.raises(ConfigError, match=rf"no reference logprobs of {changed.trajectory_id}; the data set changed.*start a new one"):
        resumed.read([TERMS[1], changed])


@pytest.mark.parametrize("kept", [0, 10, 0.5, -1])
@pytest.mark.parametrize("required", [False, True])
def test_a_torn_file_is_named_and_never_half_read(tmp_path: Path, kept: float, required: bool) -> None:
    """Cut after so many bytes, that share, or before the last one."""
    filled(tmp_path).save()
    path = tmp_path / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else int(kept)])
    cache = ReferenceCache(tmp_path)
    with pytest.raises(ConfigError, match=rf"{FILE} is damaged.*start a new run"):
        cache.load(required=required)
    with pytest.raises(ConfigError, match="no reference logprobs"):
        cache.read(TERMS[:1])


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / FILE, other=np.zeros(3))
    with pytest.raises(ConfigError, match="is damaged"):
        ReferenceCache(tmp_path).load(required=True)


def test_a_crash_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path).save()
    before = (tmp_path / FILE).read_bytes()

    def torn(path: Path, **arrays: np.ndarray) -> None:
        Path(path).write_bytes(b"PK half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez", torn)
    with pytest.raises(OSError, match="no space"):
        filled(tmp_path).save()
    assert (tmp_path / FILE).read_bytes() == before
