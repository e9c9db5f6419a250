"""Logging: ``TORCH_LOGS=fa_inductor`` shows one line per softmax, ``TORCH_LOGS=+fa_inductor`` every stage.

The loggers are plain ``logging`` loggers below "fa_inductor". TORCH_LOGS accepts module names, so nothing has to be registered
with PyTorch (an alias could only be registered after the variable has been read).
"""

from __future__ import annotations

import logging
import threading

_said: set[str] = set()
_lock = threading.Lock()


def get(name: str = "") -> logging.Logger:
    """The logger "fa_inductor" or one below it."""
    return logging.getLogger(f"fa_inductor.{name}" if name else "fa_inductor")


def warn_once(message: str) -> bool:
    """Warn with a message that the process has not yet seen; true if it was new.

    A backend runs once per graph and again on each recompile: the same mistake is worth saying once.
    """
    with _lock:
        if message in _said:
            return False
        _said.add(message)
    get().warning("%s", message)
    return True


def forget_warnings() -> None:
    """Let every message be said again (used by tests and by ``counters.reset``)."""
    with _lock:
        _said.clear()
