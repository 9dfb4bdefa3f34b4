"""Run a capture until it is stopped; try again when the database is not reachable for a while."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from virta.backoff import Backoff
from virta.errors import CaptureError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

RETRY_S_FIRST: Final = 0.2
RETRY_S_MAX: Final = 10.0

logger = logging.getLogger("virta.cdc")


class Capture(Protocol):
    """What captures of all databases have in common."""

    @property
    def changes(self) -> int: ...
    def run(self, stopping: threading.Event, *, until_caught_up: bool = False) -> None: ...
    def close(self) -> None: ...


def run_capture(
    make: Callable[[], Capture], stopping: threading.Event, *, until_caught_up: bool = False
) -> int:
    """
    Capture until `stopping` is set and return the number of records appended.

    Raises:
        CaptureError: it cannot go on, and waiting would not help.
    """
    waits = Backoff(RETRY_S_FIRST, RETRY_S_MAX, jitter=0.5)
    total = 0
    while not stopping.is_set():
        capture: Capture | None = None
        try:
            capture = make()
            capture.run(stopping, until_caught_up=until_caught_up)
            break
        except CaptureError as error:
            if not error.retry:
                raise
            if capture is not None and capture.changes:
                waits.reset()
            wait = waits.next()
            logger.warning("cdc_failed retry_s=%.1f: %s", wait, error.message)
            stopping.wait(wait)
        finally:
            if capture is not None:
                total += capture.changes
                capture.close()
    return total
