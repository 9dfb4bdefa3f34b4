"""
The thread behind durability `interval`: what appends left in memory is on disk a moment later.

Whoever stops it is heard whenever that is, and what is owed by then is synced before it ends.
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
    """Calls `flush` for what `interval` appends left behind, every SYNC_INTERVAL_S at most."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._wanted = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="virta-log-sync", daemon=True)
        self._thread.start()

    def need(self) -> None:
        self._wanted.set()

    def stop(self) -> None:
        self._stopped.set()
        self._wanted.set()
        if self._thread is not threading.current_thread():  # where the collector found its log
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._stopped.wait(SYNC_INTERVAL_S)
            self._wanted.clear()
            # Asked after that: whoever stops it may have said so meanwhile, and says it once.
            stopping = self._stopped.is_set()
            try:
                self._flush()
            except (LogSyncError, LogClosedError):
                return  # the writer is poisoned or gone: the next append says so
            except LogError as exc:  # the disk is full, the lock is held: it may pass
                logger.warning("log_interval_sync_failed %s", exc)
                if not stopping:
                    self._wanted.set()
            if stopping:
                return
