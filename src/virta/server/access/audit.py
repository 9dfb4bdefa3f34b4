"""
Audit lines: who was refused, which credentials were given, and who changed something.

They are lines of the server's log with `audit=true`. Refusals can be caused by anyone, so their number is limited;
the next line says how many were left out. No line contains a secret.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Lines of refusals in one second.
REFUSALS_PER_S = 10


class Audit:
    """Writes audit lines."""

    def __init__(self, logger: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._second = 0
        self._written = 0
        self._left_out = 0

    def refused(self, code: str, **fields: object) -> None:
        """Record a refusal."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._written = second, 0
        if self._written >= REFUSALS_PER_S:
            self._left_out += 1
            return
        self._written += 1
        if self._left_out:
            fields["left_out"], self._left_out = self._left_out, 0
        self._logger.warning("access_refused", audit=True, code=code, **fields)

    def acted(self, action: str, principal: str, **fields: object) -> None:
        """Record a credential that was given, or a change that needs a right of its own."""
        self._logger.info("access_used", audit=True, action=action, principal=principal, **fields)
