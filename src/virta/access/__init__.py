"""Who may do what: tokens, JWT, rights with row filters, tickets and rate limits. Knows no transport."""

from __future__ import annotations

from virta.access.grants import ALL_RIGHTS, VERBS, Grant, Rights, read_grants
from virta.access.principal import Principal
from virta.access.tokens import TokenStore

__all__ = ["ALL_RIGHTS", "VERBS", "Grant", "Principal", "Rights", "TokenStore", "read_grants"]
