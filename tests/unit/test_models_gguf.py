"""The GGUF reader, on files whose bytes and values are worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models_gguf_writer import Stored, f32, q4_1, q8_0, write_gguf

from rlpost.models.gguf import GGUFFile
from rlpost.types import ConfigError


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    metadata = {"a.flag": True, "a.count": 7, "a.ratio": 0.5, "a.name": "Ġthe é", "a.words": ["x", "", "日本"], "a.numbers": [3, 1, 2]}
    assert GGUFFile(write_gguf(tmp_path / "a.gguf", metadata, {})).metadata == metadata


def test_f32_comes_in_numpy_order(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {"a": 1}, {"first": f32(np.ones(5)), "second": f32(array)}))
    assert file.tensor("first").tolist() == [1.0] * 5
    assert file.tensor("second").tolist() == [[0, 1, 2], [3, 4, 5]]  # the second tensor starts after padding


def test_q8_0_values_by_hand(tmp_path: Path) -> None:
    values = np.zeros((2, 32), dtype=np.int64)
    values[0, :3], values[1, 31] = (1, -128, 127), -5
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {"a": 1}, {"w": q8_0(np.array([0.5, 2.0]), values, (2, 32))}))
    weight = file.tensor("w")
    assert weight.dtype == np.float32 and weight.shape == (2, 32)
    assert weight[0, :4].tolist() == [0.5, -64.0, 63.5, 0.0]
    assert weight[1, 30:].tolist() == [0.0, -10.0]


def test_q4_1_values_by_hand(tmp_path: Path) -> None:
    """One block: scale 0.25, minimum -1; byte 0 is 0x2F, so value 0 is 15 and value 16 is 2; byte 15 is 0x80."""
    raw = np.array([0.25, -1.0], dtype="<f2").tobytes() + bytes([0x2F, *[0] * 14, 0x80])
    weight = GGUFFile(write_gguf(tmp_path / "a.gguf", {"a": 1}, {"w": Stored(3, (32,), raw)})).tensor("w")
    expected = np.full(32, -1.0)
    expected[0], expected[16], expected[31] = 15 * 0.25 - 1, 2 * 0.25 - 1, 8 * 0.25 - 1
    assert weight.tolist() == expected.tolist()


def test_q4_1_blocks_of_a_matrix(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    nibbles = random.integers(0, 16, (6, 32))
    scales, minima = random.uniform(0.1, 1, 6).astype(np.float16), random.uniform(-1, 0, 6).astype(np.float16)
    weight = GGUFFile(write_gguf(tmp_path / "a.gguf", {"a": 1}, {"w": q4_1(scales, minima, nibbles, (3, 64))})).tensor("w")
    for row in range(3):
        for column in range(64):
            block, place = row * 2 + column // 32, column % 32
            expected = np.float32(nibbles[block, place]) * np.float32(scales[block]) + np.float32(minima[block])
            assert weight[row, column] == expected


def test_declared_alignment_is_used(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"general.alignment": 64}, {"x": f32(np.ones(3)), "y": f32(np.full(2, 7.0))}, alignment=64)
    assert GGUFFile(path).tensor("y").tolist() == [7.0, 7.0]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {"a": "b"}, {"w": f32(np.ones(100))})
    whole = path.read_bytes()
    with pytest.raises(ConfigError, match=r"none\.gguf: cannot be read"):
        GGUFFile(tmp_path / "none.gguf")
    for content, expected in ((b"", "cannot be read"), (b"PK\3\4" + whole[4:], "starts with"), (whole[:30], "ends early")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=f"a.gguf: .*{expected}"):
            GGUFFile(path)
    path.write_bytes(whole[:-64])
    with pytest.raises(ConfigError, match=r"'w' ends at byte .*it was cut"):
        GGUFFile(path).tensor("w")


def test_unknown_version_type_and_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GGUF version 1"):
        GGUFFile(write_gguf(tmp_path / "a.gguf", {"a": 1}, {}, version=1))
    file = GGUFFile(write_gguf(tmp_path / "b.gguf", {"a": 1}, {"w": Stored(12, (256,), b"\0" * 144)}))
    with pytest.raises(ConfigError, match=r"'w' has ggml type 12; this reader knows 0 \(F32\)"):
        file.tensor("w")
    with pytest.raises(ConfigError, match="no tensor 'v'"):
        file.tensor("v")
