"""
Index the segments that a writer has sealed.

The sparse index is needed at once (producers) and costs milliseconds: the append that rolled over writes it. A topic
index reads the whole segment: small ones are written at once, large ones by a thread, one at a time. All of them are
hints. What cannot be written now, because another process has the maintenance lock, is written after the next
rollover or when the log is opened again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from virta.log.format.directory import maintenance_lock
from virta.log.format.index import index_missing
from virta.log.format.topic_index import index_topics, topics_unindexed
from virta.log.limits import TOPIC_INDEX_INLINE_BYTES

if TYPE_CHECKING:
    from pathlib import Path


class Indexer:
    """Writes the missing indexes of one log; `run` is called by one thread at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sealed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note_sealed(self) -> None:
        """Remember that a segment was sealed; `run` indexes it, without the write lock."""
        self._sealed = True

    def run(self) -> None:
        """Write what is missing after a rollover; return quickly."""
        if not self._sealed:
            return
        self._sealed = False
        try:
            with maintenance_lock(self._directory, wait=False) as alone:
                if not alone:
                    self._sealed = True  # with the next rollover
                    return
                index_missing(self._directory)
                complete = index_topics(self._directory, TOPIC_INDEX_INLINE_BYTES)
        except OSError:
            self._sealed = True  # no descriptors, no space: with the next rollover
            return
        if not complete:
            self._start()

    def run_after_opening(self) -> None:
        """Write the topic indexes that a log of an older version or a killed process lacks."""
        try:
            missing = topics_unindexed(self._directory)
        except OSError:
            return
        if missing:
            self._sealed = True
            self.run()

    def close(self) -> None:
        """Stop the thread; it finishes the segment it reads."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        if self._stop.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(
            target=self._index_large, name="virta-log-index", daemon=True
        )
        self._thread.start()

    def _index_large(self) -> None:
        try:
            with maintenance_lock(self._directory, wait=False) as alone:
                before: list[int] = []
                # Segments that are sealed meanwhile wait for this lock: index them, too.
                while alone and (missing := topics_unindexed(self._directory)) != before:
                    before = missing
                    index_missing(self._directory)
                    if not index_topics(self._directory, stopped=self._stop.is_set):
                        break
        except OSError:
            pass  # with the next rollover
