"""
The open logs of this process: reopened after a fork, closed at exit.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol


class Handle(Protocol):
    """An open log."""

    def after_fork(self) -> None: ...
    def close(self) -> None: ...


open_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def _after_fork() -> None:
    for log in list(open_handles):
        log.after_fork()


def _close_all() -> None:
    """Sync logs with durability `interval` at exit, while threads still run."""
    for log in list(open_handles):
        log.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_all)
