"""The built-in ``math_verify``: are two mathematical expressions equivalent? Needs the package math-verify (extra ``rewards``)."""

from __future__ import annotations

import importlib.util
from typing import Any

from rlpost.types import ConfigError


def _check_installed(timeout_s: Any = 5) -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("the reward math_verify needs the package math-verify, which is not installed: pip install 'rlpost[rewards]'.")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int) or timeout_s < 1:
        raise ValueError(f"timeout_s is {timeout_s!r}, expected whole seconds >= 1")


def math_verify(prompt: str, completion: str, answer: Any, timeout_s: int = 5) -> float | None:
    r"""1 when the completion's final expression equals the field `answer` as mathematics (1/2, 0.5, \frac{1}{2}), else 0.

    ``answer`` is LaTeX or a number, with or without ``$``. ``timeout_s`` (whole seconds) bounds each parsing and each comparison; the
    library's time-outs use signals, hence this must run in a main thread, as reward workers do.
    Raises ValueError when the answer cannot be parsed (the row is at fault) and TimeoutError (never 0) when time ran out.
    """
    if answer is None:
        return None
    # Imported here: sympy takes a second, and only runs with this reward need it.
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    text = str(answer)
    marked = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    try:
        expected = parse(text if marked else f"${text}$", parsing_timeout=timeout_s, raise_on_error=True)
        if not expected:
            raise ValueError(f"answer {answer!r} is no expression that math-verify can parse")
        try:
            found = parse(completion, parsing_timeout=timeout_s, raise_on_error=True)
            return float(verify(expected, found, timeout_seconds=timeout_s, raise_on_error=True))
        except Exception:  # noqa: BLE001 - what the model wrote cannot be read or compared: it is not the answer
            return 0.0
    except TimeoutException as error:  # a BaseException, so it passes the handler above
        raise TimeoutError(f"math-verify took more than {timeout_s} s over answer {answer!r}") from error


math_verify.check_options = _check_installed  # type: ignore[attr-defined]
