"""
How the content type of a binary message decides what its body is (HTTP binding §3.1.1 and §3.1.2).

| content type | the event's data |
|---|---|
| JSON (`*/json`, `*/*+json`) | the JSON value |
| text (`text/*`, `*/xml`, `*/*+xml`) | a string; bytes (`data_base64`) when it is not UTF-8 |
| any other | bytes |
| none | the JSON value when the body is one, else a string when it is UTF-8, else bytes |

The binding does not define a body without a content type. Publishers that leave it out, as the official
SDKs do by default, send JSON, and their own readers decide as the last row does. An empty body is no data.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache
from typing import Final

from virta.event.rules import is_json_type

_CHARSET: Final = re.compile(r";\s*charset\s*=\s*\"?([^\s\";]+)", re.IGNORECASE)
# Publishers choose content types, so the cache is bounded.
_TYPES_MAX: Final = 256


class BodyKind(Enum):
    """What a content type declares about a body."""

    JSON = "json"
    TEXT = "text"
    BYTES = "bytes"
    UNKNOWN = "unknown"  # there is no content type


@lru_cache(maxsize=_TYPES_MAX)
def body_kind(content_type: str | None) -> BodyKind:
    """Return what a content type declares about a body; None and "" are no content type."""
    if not content_type:
        return BodyKind.UNKNOWN
    if is_json_type(content_type):
        return BodyKind.JSON
    essence = content_type.partition(";")[0].strip().lower()
    if essence.startswith("text/") or essence.endswith(("/xml", "+xml")):
        return BodyKind.TEXT
    return BodyKind.BYTES


def body_text(body: bytes, content_type: str | None) -> str | None:
    """
    Return a body of kind TEXT or UNKNOWN as a string, or None if it has to stay bytes.

    Bytes beyond ASCII are text only as UTF-8, and only when the content type names no other charset.
    """
    if not body.isascii():
        charset = _CHARSET.search(content_type or "")
        if charset is not None and charset[1].lower() not in {"utf-8", "utf8"}:
            return None
    try:
        return body.decode()
    except UnicodeDecodeError:
        return None
