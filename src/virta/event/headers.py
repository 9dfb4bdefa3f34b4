"""Attributes in HTTP headers (HTTP binding §3.1): names, quoting, percent-coding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote, unquote_to_bytes

from virta.errors import EventError
from virta.event.rules import DATA_MEMBERS, canonical_text, name_error
from virta.event.times import show

Headers: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]] | Iterable[tuple[bytes, bytes]]

_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
# HTTP binding §3.1.3.2: everything printable but space, double quote and percent stays.
_SAFE = "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) not in '"%')


def read_headers(
    headers: Headers, *, lenient: bool, percent: bool
) -> tuple[dict[str, Any], str | None]:
    members: dict[str, Any] = {}
    content_type: str | None = None
    for name, value in header_pairs(headers):
        if name == "content-type":
            content_type = value
        if not name.startswith("ce-"):
            continue
        attribute = name[3:]
        text = unescape(attribute, value) if percent else value
        if not lenient:
            if attribute in DATA_MEMBERS:
                raise name_error(attribute, "is reserved")
            if members.get(attribute, text) != text:
                raise EventError(
                    f"header {name} appears twice with different values: send it once",
                    code="duplicate-attribute",
                    attribute=attribute,
                )
        if attribute not in DATA_MEMBERS:
            members[attribute] = text
    return members, content_type


def header_pairs(headers: Headers) -> Iterable[tuple[str, str]]:
    items: Iterable[tuple[Any, Any]] = headers.items() if isinstance(headers, Mapping) else headers
    for name, value in items:
        try:
            if isinstance(name, bytes):
                yield name.decode("ascii").lower(), value.decode().strip(" \t")
            else:
                value.encode()  # raises for surrogates, which UTF-8 cannot encode
                yield name.lower(), value.strip(" \t")
        except UnicodeError as error:
            raise EventError(
                f"header {name!r} is not UTF-8: percent-encode it", code="invalid-header"
            ) from error


def unescape(attribute: str, value: str) -> str:
    """Decode a header value (§3.1.3.2): first double-quoted strings, then one round of percent-decoding."""
    if '"' in value:
        value = _QUOTED.sub(lambda match: re.sub(r"\\(.)", r"\1", match[1]), value)
    if "%" not in value:
        return value
    try:
        return unquote_to_bytes(value).decode()
    except UnicodeDecodeError as error:
        raise EventError(
            f"header ce-{attribute} {show(value)} percent-encodes bytes that are not UTF-8",
            code="invalid-header",
            attribute=attribute,
        ) from error


def header_value(value: Any) -> str:
    """Return an attribute's canonical text, percent-encoded (§3.1.3.2)."""
    return quote(canonical_text(value), safe=_SAFE)
