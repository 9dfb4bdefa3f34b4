"""A principal: what a credential stands for."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from virta.access.grants import ALL_RIGHTS, Rights

OPEN, TOKEN, JWT, TOKEN_FILE = "open", "token", "jwt", "token-file"


@dataclass(frozen=True, eq=False)
class Principal:
    """Who sends a request; `id` is shown in lists and log lines, and is no secret."""

    id: str
    kind: str
    rights: Rights
    expires: float = inf  # seconds since 1970


# Everyone, on a server that asks for no credential.
ANYONE: Final = Principal("anyone", OPEN, ALL_RIGHTS)
