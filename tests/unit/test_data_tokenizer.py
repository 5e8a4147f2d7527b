"""Text and tokens: what is added, what is not, and the tokens between two turns. All with a real tokenizer, made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from rlpost.data.tokenizer import PromptTokenizer, check_chat_template
from rlpost.types import ConfigError, Prompt

SPECIAL = ["<bos>", "<eos>", "<|start|>", "<|end|>"]
BOS, EOS, START, END = range(4)
CHAT = (
    "{{ '<bos>' }}{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER = ({"role": "user", "content": "hi"},)

MakeModel = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Writes a model directory: a byte-level tokenizer in which "ab" and "\\n\\n" merge."""

    def make(template: str | None = CHAT, adds: str = "<bos> $A", generation_eos: Any = END, eos_token: str | None = "<eos>") -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet, "ab", "ĊĊ"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ċ", "Ċ")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
        tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<bos>", BOS), ("<eos>", EOS)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": eos_token,
            "chat_template": template,
        }
        config["clean_up_tokenization_spaces"] = True
        kept = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
        if generation_eos is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
        return tmp_path

    return make


def text_prompt(text: str) -> Prompt:
    return Prompt(prompt_id="p", text=text)


@pytest.mark.parametrize("adds", ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"])
def test_text_prompt_keeps_the_start_token_and_never_gets_an_end_token(make_model: MakeModel, adds: str) -> None:
    tokenizer = PromptTokenizer(make_model(adds=adds))
    tokens = tokenizer.encode_prompt(text_prompt("ab c"))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [BOS] * ("<bos>" in adds) + tokenizer.encode_text("ab c")


def test_an_end_token_written_in_the_prompt_stays(make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model(adds="<bos> $A <eos>"))
    assert tokenizer.encode_prompt(text_prompt("a<eos>")).tolist() == [BOS, *tokenizer.encode_text("a"), EOS]


def test_all_end_tokens_are_known(make_model: MakeModel) -> None:
    assert PromptTokenizer(make_model(generation_eos=[END, EOS])).eos_token_ids == (EOS, END)
    assert PromptTokenizer(make_model(generation_eos=END)).eos_token_ids == (EOS, END)
    assert PromptTokenizer(make_model(generation_eos=END, eos_token=None)).eos_token_ids == (END,)


def test_a_model_without_any_end_token_is_refused(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="end token"):
        PromptTokenizer(make_model(generation_eos=None, eos_token=None))


def test_messages_end_with_the_assistant_header_and_start_with_one_bos(make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model())
    tokens = tokenizer.encode_prompt(Prompt(prompt_id="p", messages=USER))
    assert tokens.tolist() == tokenizer.encode_text("<bos><|start|>user\nhi<|end|>\n<|start|>assistant\n")
    assert tokens.tolist().count(BOS) == 1


def test_messages_without_template_say_what_to_set(make_model: MakeModel, tmp_path: Path) -> None:
    directory = make_model(template=None)
    tokenizer = PromptTokenizer(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match=r"prompt 'q7' .*no chat template.*set model\.chat_template"):
        tokenizer.encode_prompt(Prompt(prompt_id="q7", messages=USER))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    own = PromptTokenizer(directory, chat_template=str(tmp_path / "own.jinja"))
    assert own.decode(own.encode_prompt(Prompt(prompt_id="q7", messages=USER))) == "[hi]"


def test_template_file_that_is_missing(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template 'none\.jinja'"):
        PromptTokenizer(make_model(), chat_template="none.jinja")


def test_what_the_template_refuses_is_told(make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model(template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ConfigError, match=r"roles \['user'\].*roles must alternate"):
        tokenizer.encode_prompt(Prompt(prompt_id="p", messages=USER))


@pytest.mark.parametrize("observation", ["148", "\n148 ab<|end|>", ""])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_turn_tokens_continue_the_conversation_exactly(make_model: MakeModel, role: str, observation: str) -> None:
    """prompt + sampled answer with its end token + encode_turn = the template's rendering of the whole."""
    tokenizer = PromptTokenizer(make_model(generation_eos=END))
    messages = [{"role": role, "content": observation}]
    history = tokenizer.encode_prompt(Prompt(prompt_id="p", messages=USER)).tolist() + tokenizer.encode_text("calc 2*74")
    whole = tokenizer.encode_prompt(Prompt(prompt_id="p", messages=(*USER, {"role": "assistant", "content": "calc 2*74"}, *messages)))
    assert [*history, END, *tokenizer.encode_turn(messages)] == whole.tolist()
    assert history + tokenizer.encode_turn(messages, closed=False) == whole.tolist()


def test_turn_end_that_is_only_a_stop_token_of_the_config_is_not_written_twice(make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model(generation_eos=EOS))
    assert END not in tokenizer.eos_token_ids
    tokens = tokenizer.encode_turn([{"role": "user", "content": "x"}])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "\n<|start|>user\nx<|end|>\n<|start|>assistant\n"


def test_turn_of_a_template_that_ends_turns_with_plain_text(make_model: MakeModel) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    tokenizer = PromptTokenizer(make_model(template=template))
    assert tokenizer.decode(tokenizer.encode_turn([{"role": "user", "content": "x"}])) == "\nuser: x\nassistant:"


def test_template_that_opens_reasoning_in_the_assistant_header_works(make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model(template=CHAT.replace("assistant\n{% endif", "assistant\n<think>{% endif"), generation_eos=END))
    assert tokenizer.decode(tokenizer.encode_turn([{"role": "user", "content": "x"}])) == "\nuser\nx\nassistant\n<think>"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_template_that_marks_only_the_last_answer_works(make_model: MakeModel, role: str) -> None:
    """Qwen3's writes an empty reasoning block into an answer that nothing follows; sampled tokens are never rendered, so it is harmless."""
    template = CHAT.replace("{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}")
    tokenizer = PromptTokenizer(make_model(template=template, generation_eos=END))
    assert tokenizer.decode(tokenizer.encode_turn([{"role": role, "content": "x"}])) == f"\n{role}\nx\nassistant\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}" + CHAT,
        CHAT.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'assistant' else '(cut)' }}"),
    ],
)
def test_template_that_rewrites_history_is_refused(make_model: MakeModel, template: str) -> None:
    tokenizer = PromptTokenizer(make_model(template=template, generation_eos=END))
    with pytest.raises(ConfigError, match="not prefix-stable"):
        tokenizer.encode_turn([{"role": "user", "content": "x"}])


def test_decode_keeps_spaces_as_they_are(make_model: MakeModel) -> None:
    tokenizer = PromptTokenizer(make_model())
    text = " a , b . do n't  é\n"
    assert tokenizer.decode(np.asarray([*tokenizer.encode_text(text), END])) == text
    assert tokenizer.decode([*tokenizer.encode_text(text), END], skip_special_tokens=False) == text + "<|end|>"


def test_missing_and_damaged_model_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist \(model\.path\)"):
        PromptTokenizer(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        PromptTokenizer(tmp_path)


def test_check_chat_template_reads_every_place_it_can_stand_in(tmp_path: Path, make_model: MakeModel) -> None:
    assert check_chat_template(make_model())
    directory = make_model(template=None)
    assert not check_chat_template(directory)
    assert not check_chat_template(str(directory))
    (directory / "chat_template.jinja").write_text(CHAT)
    assert check_chat_template(directory)
    (directory / "chat_template.jinja").unlink()
    assert check_chat_template(directory, chat_template=str(directory / "tokenizer_config.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": CHAT}]}))
    assert check_chat_template(directory)


def test_check_chat_template_gives_a_hub_name_the_benefit_of_the_doubt() -> None:
    assert check_chat_template("some-owner/some-model")


def test_the_driver_gets_tokens_without_torch(make_model: MakeModel) -> None:
    """Torch costs the driver seconds and memory; the dry run must not wait for it."""
    script = (
        "import sys; from rlpost.data.tokenizer import PromptTokenizer; from rlpost.types import Prompt\n"
        "import rlpost.data.load, rlpost.data.prepare, rlpost.data.cursor\n"
        "assert 'transformers' not in sys.modules\n"
        f"tokenizer = PromptTokenizer({str(make_model())!r})\n"
        "tokenizer.encode_prompt(Prompt(prompt_id='p', messages=({'role': 'user', 'content': 'hi'},)))\n"
        "tokenizer.decode(tokenizer.encode_turn([{'role': 'user', 'content': 'x'}]))\n"
        "print([name for name in ('torch', 'ray', 'vllm') if name in sys.modules])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
