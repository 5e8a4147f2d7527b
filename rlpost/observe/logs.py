"""The logger ``rlpost`` of the driver: everything into the run directory, warnings to the user."""

from __future__ import annotations

import logging
from pathlib import Path

from rlpost.observe.console import Console

LOGGER = "rlpost"
LOG_FILE = Path("logs") / "driver.log"

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def setup_logging(run_dir: Path, level: str = "INFO", console: Console | None = None) -> logging.Logger:
    """Send the logger ``rlpost`` to ``run_dir/logs/driver.log`` (appended) from ``level`` on, and warnings to the user.

    Warnings appear on ``console`` (above its panel), without one on standard error. Handlers of an earlier call are replaced, so a
    second run in the same process writes to its own directory only. The root logger and other libraries' loggers are left alone.
    Raises ValueError for an unknown level.
    """
    logger = logging.getLogger(LOGGER)
    logger.setLevel(level)
    for handler in [handler for handler in logger.handlers if getattr(handler, "made_by_rlpost", False)]:
        logger.removeHandler(handler)
        handler.close()
    path = run_dir / LOG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    to_file.setFormatter(logging.Formatter(_FORMAT))
    to_user: logging.Handler = logging.StreamHandler() if console is None else _ConsoleHandler(console)
    to_user.setLevel(logging.WARNING)
    for handler in (to_file, to_user):
        handler.made_by_rlpost = True  # type: ignore[attr-defined]
        logger.addHandler(handler)
    return logger


class _ConsoleHandler(logging.Handler):
    """Shows warnings on the console, except the console's own, which it has already shown."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "rlpost.console":
            # tracebacks stay in the file
            self._console.print_warning(record.getMessage())
