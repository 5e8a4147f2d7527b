"""What reads like a secret. A job's script or manifest may hold a secret's name, but no value: others can read the job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rlpost.config.inputs import texts

_EVERYWHERE = "api_?key|access_?key|private_key|pass(word|wd|phrase)|secret|credentials?"
_VARIABLE = re.compile(rf"(?i)(^|_)(token|{_EVERYWHERE})$|_(key|pat|auth|pass)$|^pgpass(word)?$")
_VENDORS = "account|anthropic|auth|aws|azure|client|cohere|deepseek|encryption|gemini|github|gitlab|google|groq|hf|judge|openai|"
_VENDORS += "openrouter|secret|service|signing|together|wandb"
_KEY = re.compile(rf"(?i)(^|_)((hf|auth|access|api|bearer)_tokens?|({_VENDORS})_keys?|({_EVERYWHERE})s?)$")
"""In a configuration a plain ``token`` is text (eos_token) and many a key a column (sort_key, answer_key), in an environment a secret."""
_PERHAPS_KEY = re.compile(r"(?i)(^|_)(token|key|pat|auth|pass)$")
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])[A-Za-z0-9][\w+/=.-]{19,}")
"""The value of a _PERHAPS_KEY that is no column's name."""

_ASSIGNMENT = re.compile(r"([\w-]*\w)=(?='([^']+)'|\"?([^\s$\"'`]\S*))")
"""``HF_TOKEN=abc``, ``--api-key="abc"``; what is read at run time (``HF_TOKEN="$(cat FILE)"``) is none."""
_KNOWN_FORM = re.compile(
    r"\b((sk-|hf_|gh[opsu]_|github_pat_|glpat-|xox[abps]-)(?=[\w-]*\d)[\w-]{12,}|(AKIA|ASIA)[A-Z0-9]{16}\b)|-BEGIN [A-Z ]*PRIVATE KEY-"
)
"""Keys that begin as those of their makers do; a digit tells them from words (``hf_transformers_cache``)."""
_URL_WITH_PASSWORD = re.compile(r"(https?://([^/?#@\s:]*:)?|\w://[^/?#@\s:]*:)[^/?#@\s:$][^/?#@\s:]*@")
"""With http a name alone is a token (``https://TOKEN@host``), elsewhere a user (``ssh://git@host``); ``$NAME`` is no value."""


def is_secret_variable(name: str) -> bool:
    """Whether a variable of an environment, or an option of a command, reads like a secret."""
    return _VARIABLE.search(name.lstrip("-").replace("-", "_")) is not None


def shows_secret(text: str) -> bool:
    """Whether a text holds a key by its form, or a URL with a password."""
    return _KNOWN_FORM.search(text) is not None or _URL_WITH_PASSWORD.search(text) is not None


def assigned_secret(line: str) -> str | None:
    """The variable that reads like a secret, by its name or its value, and gets this value in a line of shell."""
    for match in _ASSIGNMENT.finditer(line):
        if is_secret_variable(match[1]) or shows_secret(match[2] or match[3]):
            return match[1].lstrip("-")
    return None


def secret_keys(values: Any) -> Iterator[str]:
    """Dotted keys of mappings and lists whose text reads like a secret, by its key or by its form."""
    for key, text in texts(values):
        if text and _is_secret(re.sub(r"(\.\d+)+$", "", key).rpartition(".")[2], text):
            yield key


def _is_secret(name: str, text: str) -> bool:
    return bool(_KEY.search(name) or (_PERHAPS_KEY.search(name) and _RANDOM.fullmatch(text))) or shows_secret(text)
