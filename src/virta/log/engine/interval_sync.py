"""
The thread behind durability `interval`: it syncs what appends wrote, SYNC_INTERVAL_S later.

A stop at any time is noticed, and everything appended before it is synced before the thread ends.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from virta.errors import LogClosedError, LogError, LogSyncError
from virta.log.limits import SYNC_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("virta.log")


class IntervalSync:
    """Calls `flush` after appends with durability `interval`, at most every SYNC_INTERVAL_S."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="virta-log-sync", daemon=True)
        self.thread.start()

    def need(self) -> None:
        self._wanted.set()

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()
        if self.thread is not threading.current_thread():  # the collector may run in it
            self.thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._stopped.wait(SYNC_INTERVAL_S)
            self._wanted.clear()
            # Read after clearing: stop() sets both events once.
            stopping = self._stopped.is_set()
            try:
                self._flush()
            except (LogSyncError, LogClosedError):
                return  # the next append raises it
            except LogError as exc:  # a full disk or a busy lock may pass
                logger.warning("log_interval_sync_failed %s", exc)
                if not stopping:
                    self._wanted.set()
            if stopping:
                return
