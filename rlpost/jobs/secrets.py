"""Names that read like secrets. A job's script or manifest may hold such a name, but no value beside it: others can read the job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_EVERYWHERE = "api_?key|access_?key|private_key|password|passwd|secret|credentials?"
_VARIABLE = re.compile(rf"(?i)(^|_)(token|{_EVERYWHERE})$")
_KEY = re.compile(rf"(?i)(^|_)((hf|auth|access|api|bearer)_token|{_EVERYWHERE})$")
"""In a configuration a plain ``token`` is text (eos_token), in an environment it is a secret."""
_ASSIGNMENT = re.compile(r"\b(\w+)=(?=[^\s$])")
"""``HF_TOKEN=abc``; what is read at run time (``HF_TOKEN=$(cat FILE)``) is none."""


def is_secret_variable(name: str) -> bool:
    """Whether a variable of an environment reads like a secret."""
    return _VARIABLE.search(name) is not None


def assigned_secret(line: str) -> str | None:
    """The variable that reads like a secret and gets its value in a line of shell."""
    return next((match[1] for match in _ASSIGNMENT.finditer(line) if is_secret_variable(match[1])), None)


def secret_keys(value: Any, key: str = "") -> Iterator[str]:
    """Dotted keys below a dataclass, mapping or list that read like secrets and hold text which is not empty."""
    if isinstance(value, str):
        if value and _KEY.search(key.rpartition(".")[2]):
            yield key
        return
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    elif hasattr(value, "__dataclass_fields__"):
        entries = vars(value).items()
    for name, inner in entries:
        yield from secret_keys(inner, f"{key}.{name}" if key else str(name))
