"""
Signatures of deliveries, as Standard Webhooks defines them (symmetric, `v1`).

    webhook-id         the same for every attempt to deliver an event
    webhook-timestamp  seconds since 1970, of this attempt
    webhook-signature  `v1,` and base64 of HMAC-SHA256 over `id.timestamp.body`, one for each secret

A subscription has up to three secrets, each `whsec_` and base64. A sink accepts a delivery if one signature fits, so
secrets are rotated by adding the new one, and removing the old one when the sink knows the new.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets as random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PREFIX = "whsec_"
SECRETS_MAX = 3
SECRET_BYTES_MIN, SECRET_BYTES_MAX = 24, 64  # of the specification
_NEW_BYTES = 32


def new_secret() -> str:
    return PREFIX + base64.b64encode(random.token_bytes(_NEW_BYTES)).decode()


def read_secret(text: object) -> bytes | None:
    """Return the bytes of a secret, or None if it is invalid."""
    if not isinstance(text, str) or not text.startswith(PREFIX):
        return None
    try:
        found = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
    return found if SECRET_BYTES_MIN <= len(found) <= SECRET_BYTES_MAX else None


def signature_headers(
    keys: Sequence[bytes], id_: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Return the headers that sign a delivery; none without keys."""
    if not keys:
        return {}
    content = b"%b.%d.%b" % (id_.encode(), timestamp, body)
    signatures = [
        "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
        for key in keys
    ]
    return {
        "webhook-id": id_,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(signatures),
    }
