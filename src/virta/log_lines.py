"""
Write log lines of a daemon without ever waiting for who reads them.

The reader may have exited, stand still with a full pipe (`virta serve | less`), or write to a full disk. None of these
may stop the event loop: a line that cannot be written at once is dropped, and the next line says how many were.
"""

from __future__ import annotations

import io
import os
import select
import threading
from typing import TextIO, cast

# What a pipe takes without waiting once poll() calls it writable (POSIX's PIPE_BUF, on Linux a page).
PIECE_BYTES = min(select.PIPE_BUF, 4096)


def log_stream(file: TextIO) -> TextIO:
    """Return a stream for the log lines of a daemon: `file` itself if it has no descriptor, as in tests of commands."""
    try:
        return cast("TextIO", LogLines(file))
    except io.UnsupportedOperation:
        return file


class LogLines(io.TextIOBase):
    """A text stream over `file`, for `logging` and structlog; a line is written by `flush`."""

    def __init__(self, file: TextIO) -> None:
        # First of all: if `file` has no descriptor, the interpreter still flushes what there is of this object.
        self._unwritten = threading.local()  # the text of each thread since its last flush
        self.dropped = 0  # lines that were not written, and that no line has reported yet
        self._descriptor = file.fileno()
        self._ready = select.poll()
        self._ready.register(self._descriptor, select.POLLOUT)
        self._lock = threading.Lock()
        self._is_cut = False  # the last line was written in part

    def write(self, text: str) -> int:
        self._unwritten.text = getattr(self._unwritten, "text", "") + text
        return len(text)

    def flush(self) -> None:
        text, self._unwritten.text = getattr(self._unwritten, "text", ""), ""
        if not text:
            return
        with self._lock:
            if self.dropped and self._write(self._report()):
                self.dropped = 0
            if self.dropped or not self._write(text):
                self.dropped += 1

    def _report(self) -> str:
        return f'{{"level":"warning","message":"log_lines_dropped","lines":{self.dropped}}}\n'

    def _write(self, text: str) -> bool:
        """Write text if there is room for it now; return whether all of it was written."""
        data = memoryview((("\n" if self._is_cut else "") + text).encode(errors="replace"))
        begun = False
        try:
            while data and self._is_writable():
                data = data[os.write(self._descriptor, data[:PIECE_BYTES]) :]
                begun, self._is_cut = True, bool(data)
        except BrokenPipeError:
            # The reader has exited, and will not come back.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)
            return True
        except OSError:
            self._is_cut = self._is_cut or begun
            return False
        return not data

    def _is_writable(self) -> bool:
        return any(event & (select.POLLOUT | select.POLLERR) for _, event in self._ready.poll(0))
