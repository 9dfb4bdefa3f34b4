"""
Connections as the engine sees them, and their registrations for notifications.

Invariant: a session is in the listener table of exactly the keys and domains it lists itself, so
that closing it leaves nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.protocol.messages import (
    DELETED,
    NOTIFICATION,
    Pair,
    RefusedError,
    Reply,
    Type,
    Value,
)
from virta.journal.protocol.rules import CLOCK_SKEW_US_MAX, STAMP_US_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from virta.journal.jobs.lifecycle import Jobs
    from virta.journal.protocol.messages import Request

LISTEN_KEYS_MAX = 10_000
# Roles of a connection: each has its own functions in the engine.
CLIENT, PEER = "client", "peer"


class Session:
    """One connection: `notify` sends it a message of the daemon's own."""

    def __init__(self, notify: Callable[[Reply], None] | None = None) -> None:
        self.notify = notify
        self.peer: str | None = None  # the other daemon's id, on a link between daemons
        self.role = CLIENT
        self.skew_us_max = CLOCK_SKEW_US_MAX  # how far ahead its timestamps may be
        # Returns why a request is refused, or None; without it everything is allowed.
        self.check: Callable[[Request], RefusedError | None] | None = None
        self.locked: set[bytes] = set()
        self.keys: set[bytes] = set()
        self.domains: set[bytes] = set()

    def link_to(self, peer: str) -> None:
        """Make this the link to another daemon, which checked the clocks of its clients itself."""
        self.peer, self.role, self.skew_us_max = peer, PEER, STAMP_US_MAX


class Listeners:
    def __init__(self) -> None:
        self._keys: dict[bytes, set[Session]] = {}
        # Per domain the sessions that wait for work, and the time announced to each (None: none).
        self.awaited: dict[bytes, dict[Session, int | None]] = {}

    def __len__(self) -> int:
        """Return how many keys are listened to."""
        return len(self._keys)

    def listen(self, session: Session, keys: Iterable[bytes]) -> None:
        """Register keys that `check` has accepted."""
        if session.notify is None:
            return
        for key in keys:
            session.keys.add(key)
            self._keys.setdefault(key, set()).add(session)

    def check(self, session: Session, keys: Iterable[bytes]) -> None:
        """Refuse keys beyond the limit of a connection."""
        more = sum(key not in session.keys for key in keys)
        if len(session.keys) + more > LISTEN_KEYS_MAX:
            raise RefusedError("too-large", f"a connection listens to {LISTEN_KEYS_MAX} keys")

    def has(self, key: bytes) -> bool:
        """Whether a key has listeners."""
        return key in self._keys

    def await_work(self, session: Session, domain: bytes, announced: int | None) -> None:
        """Notify once when something becomes due earlier than announced."""
        if session.notify is None:
            return
        if domain not in session.domains and len(session.domains) >= LISTEN_KEYS_MAX:
            raise RefusedError("too-large", f"listening to {LISTEN_KEYS_MAX} domains already")
        session.domains.add(domain)
        self.awaited.setdefault(domain, {})[session] = announced

    def forget_announcements(self) -> None:
        """Forget announced times after the clock was set, so that waiting clients are notified anyway."""
        for waiting in self.awaited.values():
            waiting.update(dict.fromkeys(waiting))

    def changed(
        self, keys: Iterable[bytes], origin: Session | None, timestamp: int, kind: int | None
    ) -> None:
        """Notify all listeners but the originator; `kind` is the new type, None: the key was removed."""
        if not self._keys:
            return
        for key in keys:
            for session in self._keys.get(key, ()):
                if session is not origin and session.notify is not None:
                    session.notify(_notification(key, timestamp, kind))

    def work_due(self, jobs: Jobs, now: int) -> None:
        """Notify those whose domain has a due job."""
        for domain in list(self.awaited):
            if not jobs.has_due(domain, now):
                continue
            for session, announced in self.awaited.pop(domain).items():
                session.domains.discard(domain)
                early = announced is None or now < announced
                if early and session.notify is not None:
                    session.notify(_notification(domain, now, Type.VOID))

    def forget(self, session: Session) -> None:
        for key in session.keys:
            waiting = self._keys.get(key)
            if waiting is not None:
                waiting.discard(session)
                if not waiting:
                    del self._keys[key]
        for domain in session.domains:
            self.awaited.get(domain, {}).pop(session, None)
            if not self.awaited.get(domain, True):
                del self.awaited[domain]
        session.keys.clear()
        session.domains.clear()


def _notification(key: bytes, timestamp: int, kind: int | None) -> Reply:
    return Reply(
        0,
        NOTIFICATION | (DELETED if kind is None else 0),
        timestamp,
        pair=Pair(key, Value(Type.VOID if kind is None else kind, b"")),
    )
