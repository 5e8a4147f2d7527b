"""The only place where text becomes tokens and tokens become text.

Loading it does not import torch where the model has a ``tokenizer.json`` (nearly all have): the driver process never needs
torch, and ``transformers.AutoTokenizer`` would bring it (measured: 5.3 s instead of 1.9 s).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlpost.types import ConfigError, Prompt

TOKENIZER_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
"""What is downloaded of a hub model to read its tokenizer and its generation_config.json; no weights."""

FIRST_ANSWER = "First dummy answer."
SECOND_ANSWER = "Second dummy answer."
"""Assistant turns of the dummy conversation of :meth:`PromptTokenizer.encode_turn`; no template writes these by itself."""
FIRST_TURNS: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": "Dummy."}, {"role": "assistant", "content": FIRST_ANSWER})


@dataclass(frozen=True, kw_only=True)
class TurnEnd:
    """How an assistant's turn ends: ``text`` is what the chat template writes after the content.

    ``tokens`` are those that an answer ends with when it is sampled: of the text all through its end token, and ``written`` is their
    number; of a text without one (``written`` 0) the tokenizer's own end token.
    """

    text: str
    tokens: tuple[int, ...]
    written: int


class PromptTokenizer:
    """Text to tokens and back for one model.

    ``model_path`` is a Hugging Face directory or hub name, ``chat_template`` a file that replaces the tokenizer's own template.
    ``eos_token_ids`` are all tokens that end a turn: the tokenizer's own first, then those of generation_config.json.

    Raises:
        ConfigError: the directory or its tokenizer cannot be read, or the template file does not exist.
    """

    def __init__(self, model_path: str | Path, chat_template: str | None = None, trust_remote_code: bool = False) -> None:
        self.model_path = str(model_path)
        directory = tokenizer_directory(self.model_path)
        self._tokenizer = _load(directory, trust_remote_code)
        if chat_template is not None:
            self._tokenizer.chat_template = _read_template(chat_template)
        self.eos_token_ids = _eos_token_ids(directory, self._tokenizer.eos_token_id)

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return bool(self._tokenizer.chat_template)

    def encode_prompt(self, prompt: Prompt) -> np.ndarray:
        """The prompt's tokens, int32 ``[tokens]``, ready to be continued.

        Text gets the special tokens that the tokenizer puts before a text (a BOS, say) but never an end token after it;
        messages go through the chat template, up to and with the header of the assistant's turn.

        Raises:
            ConfigError: messages without a chat template, or messages that the template refuses.
        """
        if prompt.messages is not None:
            where = f"prompt {prompt.prompt_id!r}"
            return np.asarray(self.encode_text(self.render(prompt.messages, generation_prompt=True, where=where)), dtype=np.int32)
        if prompt.text is None:
            raise ConfigError(f"prompt {prompt.prompt_id!r} has neither text nor messages")
        return np.asarray(self._encode_with_start(prompt.text), dtype=np.int32)

    def encode_text(self, text: str) -> list[int]:
        """The tokens of ``text`` alone: nothing is added. Special tokens written in the text become their own ids."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode_after(self, before: str, text: str) -> list[int]:
        """The tokens of ``text`` that follow those of ``before``, which stay as they are.

        They are what the tokenizer makes of ``text`` in its place; where it would merge across the boundary they are those of ``text``
        alone, so that no token holds parts of both.
        """
        start, both = self.encode_text(before), self.encode_text(before + text)
        return both[len(start) :] if both[: len(start)] == start else self.encode_text(text)

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of ``tokens``, with spaces exactly as the tokens have them."""
        ids = [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def encode_turn(self, messages: Sequence[Mapping[str, Any]], closed: bool = True) -> list[int]:
        """The tokens to append after an assistant's turn: ``messages`` (what the environment says) and the next assistant header.

        The history is never rendered or tokenised again; the text is what the chat template writes between two turns of
        a dummy conversation. ``closed``: the turn ended with a sampled end token, so that the template's end token (the first of
        :attr:`eos_token_ids` in what it writes after an answer, else the first special token) is not written again; false (the
        turn was cut by its length) writes it too.
        Reasoning that a template would cut from earlier turns stays, because the sampled tokens stay.

        Raises:
            ConfigError: no chat template, messages that the template refuses, or a template that changes what it wrote
                for earlier messages when later ones follow (not prefix-stable): no suffix exists then.
        """
        where = "the messages after an assistant's turn"
        longer = [*FIRST_TURNS, *messages]
        longest = [*longer, {"role": "assistant", "content": SECOND_ANSWER}, *messages]
        text_longer = self.render(longer, generation_prompt=False, where=where)
        rest = self._after_first_answer(self.render(longer, generation_prompt=True, where=where))
        stable = rest.startswith(self.turn_end.text) and self.render(longest, generation_prompt=False, where=where).startswith(text_longer)
        if not stable:
            raise ConfigError(
                f"the chat template of {self.model_path} is not prefix-stable: it writes earlier messages differently once later ones "
                "follow, so a turn cannot be appended to the tokens already sampled. Set model.chat_template to a template that "
                "leaves history as it is"
            )
        # Where a template ends turns by plain text, all of it follows the sampled end token.
        return self.encode_text(rest)[self.turn_end.written if closed else 0 :]

    @cached_property
    def turn_end(self) -> TurnEnd:
        """How the chat template ends an assistant's turn. Raises ConfigError without a template, or when it writes no answers."""
        text = self._after_first_answer(self.render(FIRST_TURNS, generation_prompt=False, where="an assistant's turn"))
        tokens = self.encode_text(text)
        special = {token for token, added in self._tokenizer.added_tokens_decoder.items() if added.special}
        for ending in (set(self.eos_token_ids), special):
            for place, token in enumerate(tokens):
                if token in ending:
                    return TurnEnd(text=text, tokens=tuple(tokens[: place + 1]), written=place + 1)
        return TurnEnd(text=text, tokens=self.eos_token_ids[:1], written=0)

    def _after_first_answer(self, text: str) -> str:
        _, found, rest = text.partition(FIRST_ANSWER)
        if not found:
            raise ConfigError(
                f"the chat template of {self.model_path} does not write the content of assistant messages; set model.chat_template"
            )
        return rest

    def render(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, where: str) -> str:
        """The text that the chat template makes of messages; with ``generation_prompt`` up to and with the header of the answer.

        Raises ConfigError, which begins with ``where``: no chat template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise ConfigError(
                f"{where} is a list of chat messages, but the tokenizer of {self.model_path} has no chat template: "
                "set model.chat_template to a template file, or give prompts as text"
            )
        import jinja2

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=generation_prompt, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = [message.get("role") for message in messages]
            raise ConfigError(
                f"{where}: the chat template of {self.model_path} refuses messages with roles {roles}: {error}. "
                "Change the messages, or set model.chat_template"
            ) from error
        return str(text)

    def _encode_with_start(self, text: str) -> list[int]:
        """``text`` with the special tokens that the tokenizer puts before it, without an end token put after it."""
        plain = self.encode_text(text)
        full = list(self._tokenizer(text)["input_ids"])
        for start in range(len(full) - len(plain), -1, -1):
            if full[start : start + len(plain)] == plain:
                added_after = full[start + len(plain) :]
                while added_after and added_after[-1] in self.eos_token_ids:
                    added_after.pop()
                return full[:start] + plain + added_after
        raise ConfigError(
            f"the tokenizer of {self.model_path} changes a text's own tokens when it adds special ones; such a tokenizer "
            "cannot give prompts as text, use chat messages"
        )


def check_chat_template(model_path: str | Path, chat_template: str | None = None) -> bool:
    """False when the model's files are here and have no chat template; reads files only, imports nothing.

    True for a hub model that is not downloaded yet: it is checked when the tokenizer is loaded.
    """
    if chat_template is not None:
        return bool(_read_template(chat_template))
    directory = Path(model_path).expanduser()
    if not directory.is_dir():
        return True
    if any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    if any((directory / "additional_chat_templates").glob("*.jinja")):
        return True
    return bool(_read_json(directory / "tokenizer_config.json").get("chat_template"))


def tokenizer_directory(model_path: str) -> Path:
    """The directory with the tokenizer's files; of a hub name they are downloaded (or taken from the hub's cache)."""
    directory = Path(model_path).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_absolute() or model_path.startswith((".", "~")) or model_path.count("/") > 1:
        raise ConfigError(f"model directory {model_path} does not exist (model.path)")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model_path, allow_patterns=TOKENIZER_FILES))
    except Exception as error:  # network, name, gate or cache: whatever it was, the tokenizer is not there
        raise ConfigError(
            f"model.path {model_path!r} is no directory here, and as a hub name it cannot be read: {type(error).__name__}: {error}"
        ) from error


def _load(directory: Path, trust_remote_code: bool) -> Any:
    try:
        if (directory / "tokenizer.json").is_file() and not trust_remote_code:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(directory)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises a bare Exception for a damaged tokenizer.json
        raise ConfigError(
            f"the tokenizer in {directory} cannot be loaded: {type(error).__name__}: {error}. A model directory needs "
            "tokenizer.json and tokenizer_config.json"
        ) from error


def _eos_token_ids(directory: Path, own: int | None) -> tuple[int, ...]:
    listed = _read_json(directory / "generation_config.json").get("eos_token_id")
    more = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    found = tuple(dict.fromkeys(int(token) for token in ([] if own is None else [own]) + more))
    if not found:
        raise ConfigError(
            f"{directory}: neither tokenizer_config.json (eos_token) nor generation_config.json (eos_token_id) "
            "names an end token; without one no answer ever ends"
        )
    return found


def _read_template(chat_template: str) -> str:
    path = Path(chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template {chat_template!r} cannot be read as a file with a chat template: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: found a JSON {type(content).__name__}, expected an object")
    return content
