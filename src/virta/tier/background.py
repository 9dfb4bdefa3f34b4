"""Ship a log in a thread of a server, and say how far it is."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, NamedTuple

from virta.backoff import Backoff
from virta.errors import LogClosedError, TierError
from virta.tier.history import TierHistory
from virta.tier.shipper import RETRY_S, RETRY_S_MAX, Shipper
from virta.tier.store import CACHE, COPY, TierStore

if TYPE_CHECKING:
    from virta.log import Log

logger = logging.getLogger("virta.tier")


class ShippingStatus(NamedTuple):
    """The store, the offset after the last shipped record, the records after it, and why shipping fails now."""

    url: str
    next_offset: int
    lag: int
    problem: str | None


class BackgroundShipper:
    """A thread that ships a log until `stop`; a store that fails is tried again, a shipper elsewhere ends it."""

    def __init__(self, log: Log, url: str, *, interval_s: float) -> None:
        self._log = log
        self._interval_s = interval_s
        # Raises for a URL that cannot be used, before the server listens.
        self._shipper = Shipper(log, TierStore(url))
        if log.history is None:
            log.history = TierHistory(url, log.path / CACHE, copy=log.path / COPY)
        self._stop = threading.Event()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="virta-shipper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ship what is left and end the thread; blocks, but not longer than `timeout_s`: the next start ships the rest."""
        self._stop.set()
        self._thread.join(timeout_s)

    def status(self) -> ShippingStatus:
        shipped = self._shipper.shipped
        problem = self._problem or self._shipper.problem
        lag = max(self._log.next_offset - shipped, 0)
        return ShippingStatus(self._shipper.store.url, shipped, lag, problem)

    def _run(self) -> None:
        retry = Backoff(RETRY_S, RETRY_S_MAX, jitter=0.5)
        while not self._stop.is_set():
            try:
                with self._shipper:
                    self._problem = None
                    retry.reset()
                    self._shipper.run(self._stop, interval_s=self._interval_s)
            except TierError as exc:
                self._problem = exc.message
                logger.error("shipping_failed code=%s: %s", exc.code, exc.message)  # noqa: TRY400
                if exc.code in {"tier_fenced", "tier_other_log", "tier_ahead"}:
                    return  # another process, or a person, has to decide
                self._stop.wait(retry.next())
            except LogClosedError:
                return  # the server stopped while the store did not answer
