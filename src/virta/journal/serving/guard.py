"""
What a connection may do on a journal that asks for tokens.

The first request of a connection is `NOP` with the key `auth:<token>`. Rights to all names allow everything. Rights to
some domains allow pushing to them and reserving jobs of them, finishing those jobs, and their statistics; keys, locks,
listening and the administration need rights to all names.

Who may do what is decided by the caller of this package: a `JournalRights` of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from virta.errors import VirtaError
from virta.journal.jobs.job import domain_of, host_of
from virta.journal.protocol.messages import (
    COMMAND_KEY,
    LISTEN,
    QUERY_KEY,
    Function,
    RefusedError,
    Request,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.journal.engine import JournalEngine

AUTH_PREFIX = b"auth:"
# Administrative requests about one domain.
_OF_DOMAIN = frozenset({"stats", "list"})
_UNLIMITED = frozenset({Function.NOP, Function.QUIT})


class JournalRights(Protocol):
    """The rights of one token."""

    @property
    def is_unlimited(self) -> bool:
        """Whether everything is allowed."""

    def is_active(self) -> bool:
        """Return whether the token is still valid."""

    def allows(self, domain: str) -> bool:
        """Return whether jobs of a domain may be used."""


class RequestGuard:
    """Decides about the requests of one connection, or of one HTTP request whose rights are known."""

    def __init__(
        self,
        engine: JournalEngine,
        authenticate: Callable[[str], JournalRights] | None = None,
        rights: JournalRights | None = None,
    ) -> None:
        self._engine = engine
        self._authenticate = authenticate
        self._rights = rights
        self.failed = False  # the connection has to end

    def check(self, request: Request) -> RefusedError | None:
        """Return why a request is refused, or None."""
        if request.function == Function.NOP and request.key.startswith(AUTH_PREFIX):
            return self._log_in(request)
        if self._rights is not None and not self._rights.is_active():
            self.failed = True
            return RefusedError("unauthorized", "the token was revoked or has expired")
        if self._rights is None:
            self.failed = True
            return RefusedError(
                "unauthorized", "the first request of a connection is NOP with the key auth:<token>"
            )
        if self._rights.is_unlimited or self._is_allowed(request, self._rights):
            return None
        return RefusedError("forbidden", "the token has no right to this")

    def _log_in(self, request: Request) -> RefusedError | None:
        text = request.key[len(AUTH_PREFIX) :].decode("utf-8", "replace")
        request.key = b""  # neither stored nor logged
        if self._authenticate is None:
            return None
        try:
            self._rights = self._authenticate(text)
        except VirtaError as error:
            self.failed = True
            return RefusedError("unauthorized", error.message)
        return None

    def _is_allowed(self, request: Request, rights: JournalRights) -> bool:
        function, key = request.function, request.key
        if function in _UNLIMITED:
            return not key  # a key would make it a link between daemons
        if function == Function.PUSH:
            domain = request.key2 or _host(key)
        elif function == Function.NEXT:
            domain = key
        elif function in {Function.DELETE, Function.GET}:
            single = request.query == QUERY_KEY and not request.flags & LISTEN
            domain = self._domain_of_job(key) if single else b""
        elif function == Function.SET and key == COMMAND_KEY and request.value is not None:
            domain = self._domain_of_command(request.value.data)
        else:
            return False
        return bool(domain) and rights.allows(domain.decode("utf-8", "replace"))

    def _domain_of_job(self, key: bytes) -> bytes:
        job = self._engine.jobs.find(key)
        return b"" if job is None else domain_of(job.key())

    def _domain_of_command(self, data: bytes) -> bytes:
        try:
            command: Any = msgspec.json.decode(data)
            do, key = command.get("do"), command.get("key")
            if do == "fail" and isinstance(key, str):
                job = self._engine.jobs.find_text(key)
                return b"" if job is None else domain_of(job.key())
            domain = command.get("domain")
            return domain.encode() if do in _OF_DOMAIN and isinstance(domain, str) else b""
        except (msgspec.DecodeError, AttributeError, ValueError):
            return b""


def _host(uri: bytes) -> bytes:
    try:
        return host_of(uri)
    except RefusedError:
        return b""
