"""
The consent of a webhook: nothing is delivered to a sink that has not agreed.

    requested ──► granted     the sink answered OPTIONS with its consent
              ──► pending ──► granted    the callback address was called
                          ──► expired    it was not called in time
              ──► refused     the sink consents to other origins only, or there is no callback

The callback address contains a secret that only the sink knows; the server stores its hash. Consent is
part of the subscription's record, so that it survives a restart, also while it is pending.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

import msgspec

from virta.server.webhooks.owner import MEMBER as OWNER_MEMBER
from virta.server.webhooks.owner import Owner

KEY_BYTES = 24
RATE_DIGITS_MAX = 9
MEMBER = "consent"  # of a subscription's record; the API accepts no member of this name


class Consent(msgspec.Struct, frozen=True):
    """What a sink has agreed to; the default is that of records of older versions, which had none."""

    rate: int | None = None  # requests a minute; None is no limit
    key_hash: str = ""  # SHA-256 of the callback's key; empty when none was offered
    expires: float | None = None  # while pending: when it lapses, in seconds since 1970

    @property
    def pending(self) -> bool:
        return self.expires is not None

    def opens(self, key: str) -> bool:
        """Return whether the key of a callback is the one that was sent."""
        digest = hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
        return bool(self.key_hash) and hmac.compare_digest(digest, self.key_hash)

    def granted(self, rate: int | None) -> Consent:
        return Consent(rate, self.key_hash, None)


def new_callback_key() -> tuple[str, str]:
    """Return a key for a callback address, and its hash."""
    key = secrets.token_urlsafe(KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()


def read_rate(text: str | None) -> int | None:
    """Return `WebHook-Allowed-Rate`, requests a minute; None for no limit (`*`, or no number)."""
    number = (text or "").strip()
    if not (number.isascii() and number.isdigit() and len(number) <= RATE_DIGITS_MAX):
        return None
    return int(number) or None


def to_record(description: dict[str, Any], consent: Consent, owner: Owner) -> dict[str, Any]:
    """Return what is stored of a subscription."""
    return description | {
        MEMBER: msgspec.to_builtins(consent),
        OWNER_MEMBER: msgspec.to_builtins(owner),
    }


def from_record(record: dict[str, Any]) -> tuple[dict[str, Any], Consent, Owner]:
    description = {n: v for n, v in record.items() if n not in {MEMBER, OWNER_MEMBER}}
    consent = msgspec.convert(record.get(MEMBER, {}), Consent)
    return description, consent, msgspec.convert(record.get(OWNER_MEMBER, {}), Owner)
