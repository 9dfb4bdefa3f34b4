"""The rights of tokens to the journal, for its port behind a server and for the daemon alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.access.credentials import Credentials, read_token_file
from virta.access.tokens import TokenStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.access.grants import Rights


class JobRights:
    """The rights of a principal to jobs; a grant with a row filter gives none, since jobs are no events."""

    def __init__(self, rights: Rights, is_active: Callable[[], bool] = lambda: True) -> None:
        self._rights = rights
        self.is_active = is_active
        self.is_unlimited = rights.has_all("jobs")

    def allows(self, domain: str) -> bool:
        return self._rights.allows_whole("jobs", domain)


class JournalCredentials:
    """
    The tokens of a data directory, and those of a file.

    Raises:
        AccessError, ConfigError: the store or the file cannot be used.
    """

    def __init__(self, data_dir: Path, token_file: str | None = None) -> None:
        store = TokenStore(str(data_dir))
        store.refresh()
        digests = read_token_file(token_file) if token_file else None
        self._credentials = Credentials(store, digests=digests)

    def rights_of(self, token: str) -> JobRights:
        """Return the rights of a token; raise AccessError if it is not accepted."""
        credentials = self._credentials
        principal = credentials.find(token)
        return JobRights(principal.rights, lambda: credentials.is_active(principal))

    def refresh(self) -> bool:
        """Return whether tokens were created or revoked since the last call."""
        return self._credentials.refresh()
