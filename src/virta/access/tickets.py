"""
Credentials that the server itself gives: tickets for one use, and sessions.

A browser's EventSource and WebSocket cannot set headers. A page asks for a ticket, which stands for its principal
once and for a short time, and puts it into the address. A session is the same for many requests, in a cookie.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from virta.errors import AccessError

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.access.principal import Principal

TICKET_PREFIX = "vt_"
TICKET_S = 30.0
TICKETS_MAX = 100_000
SESSION_S = 12 * 3600.0
SESSIONS_MAX = 10_000
SECRET_BYTES = 32


class IssuedSecrets:
    """Secrets with a principal and a time, of which the oldest is dropped when there are too many."""

    def __init__(
        self,
        seconds: float,
        count_max: int,
        *,
        prefix: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.seconds = seconds
        self._count_max = count_max
        self._prefix = prefix
        self._clock = clock
        self._issued: dict[str, tuple[float, Principal]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._issued)

    def issue(self, principal: Principal) -> tuple[str, float]:
        """Return a new secret for a principal, and when it expires (seconds since 1970)."""
        now = self._clock()
        for text, (expires, _) in list(self._issued.items()):
            if expires > now and len(self._issued) < self._count_max:
                break
            del self._issued[text]
        secret = self._prefix + secrets.token_urlsafe(SECRET_BYTES)
        expires = min(now + self.seconds, principal.expires)
        self._issued[secret] = (expires, principal)
        return secret, expires

    def find(self, secret: str, *, once: bool) -> Principal:
        """
        Return the principal of a secret; with `once` it cannot be used again.

        Raises:
            AccessError: it is not known, was used, or has expired.
        """
        found = self._issued.get(secret)
        if found is not None and once:
            del self._issued[secret]
        if found is None or found[0] <= self._clock():
            what = "ticket" if once else "session"
            raise AccessError(
                f"the {what} is not known, was used or has expired", code=f"{what}-unknown"
            )
        return found[1]

    def drop(self, secret: str) -> None:
        """Forget a secret."""
        self._issued.pop(secret, None)


def new_tickets(clock: Callable[[], float] = time.time) -> IssuedSecrets:
    return IssuedSecrets(TICKET_S, TICKETS_MAX, prefix=TICKET_PREFIX, clock=clock)


def new_sessions(clock: Callable[[], float] = time.time) -> IssuedSecrets:
    return IssuedSecrets(SESSION_S, SESSIONS_MAX, clock=clock)
