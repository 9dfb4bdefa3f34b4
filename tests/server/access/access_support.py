"""Servers with credentials, for tests of access."""

from __future__ import annotations

from virta.access import TokenStore
from virta.access.grants import make_grant

ALL = ["read", "publish", "jobs", "filters", "webhooks", "pipelines", "admin"]


def token(data_dir, *rights, expires=None, **named):
    """Create a token; rights are (verbs, pattern) or (verbs, pattern, filter[, dialect])."""
    grants = tuple(make_grant(list(verbs), *rest) for verbs, *rest in rights)
    return TokenStore(data_dir).create(grants, expires=expires, **named)[0]


def bearer(text):
    return {"Authorization": f"Bearer {text}"}
