"""
A webhook's consent: nothing is delivered to somebody who has not said yes.

    asked ──► granted     the sink answered OPTIONS with its consent
          ──► pending ──► granted    somebody called the callback that was sent along
                      ──► expired    nobody did, in time
          ──► refused     the sink consents to others only, or there is no callback to wait for

A callback holds a secret that only the sink was told; its hash is kept. Consent is part of the
subscription's record, so that it, its rate and what is pending outlive the process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import msgspec

KEY_BYTES = 24
RATE_DIGITS_MAX = 9
MEMBER = "consent"  # of a subscription's record; no member that its owner could give


class Consent(msgspec.Struct, frozen=True):
    """What a sink has agreed to; the default is that of records made before there was any."""

    rate: int | None = None  # requests a minute; None is as many as there are
    key_hash: str = ""  # SHA-256 of the callback's key; empty when none was offered
    expires: float | None = None  # while pending: when it lapses, in seconds since 1970

    @property
    def pending(self) -> bool:
        return self.expires is not None

    def opens(self, key: str) -> bool:
        """Tell whether a callback's key is the one that was sent."""
        digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
        return bool(self.key_hash) and hmac.compare_digest(digest, self.key_hash)

    def granted(self, rate: int | None) -> Consent:
        return Consent(rate, self.key_hash, None)


def new_callback_key() -> tuple[str, str]:
    """A key for a callback's address, and its hash."""
    key = secrets.token_urlsafe(KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()


def read_rate(text: str | None) -> int | None:
    """`WebHook-Allowed-Rate`: requests a minute, or None for no limit (`*`, or nothing sensible)."""
    number = (text or "").strip()
    if not (number.isascii() and number.isdigit() and len(number) <= RATE_DIGITS_MAX):
        return None
    return int(number) or None


def to_record(description: dict[str, Any], consent: Consent) -> dict[str, Any]:
    """What is kept of a subscription."""
    return description | {MEMBER: msgspec.to_builtins(consent)}


def from_record(record: dict[str, Any]) -> tuple[dict[str, Any], Consent]:
    description = {name: value for name, value in record.items() if name != MEMBER}
    return description, msgspec.convert(record.get(MEMBER, {}), Consent)
