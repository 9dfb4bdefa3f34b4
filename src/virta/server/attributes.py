"""
Attributes in headers, decoded as the CloudEvents HTTP binding asks (§3.1.3.2).

Thorium takes them as they are, and so does the server unless it was told otherwise
(`--percent-decode-headers`): an attribute that holds a percent sign would change its meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.errors import EventError, RequestError
from virta.event.headers import header_pairs, unescape
from virta.server.intake import MODES

if TYPE_CHECKING:
    from virta.server.config import Config
    from virta.server.intake import Headers

PREFIX = b"ce-"


def wants_decoding(config: Config, mode: bytes) -> bool:
    """Tell whether a publication of this mode has attributes that are to be decoded."""
    return mode not in MODES and bool(config.percent_decode_headers)


def decoded(headers: Headers) -> Headers:
    """Decode the attributes; other headers are left out, since nobody asks for them any more."""
    attributes = [pair for pair in headers if pair[0].startswith(PREFIX)]
    try:
        return [
            (name.encode(), unescape(name.removeprefix("ce-"), value).encode())
            for name, value in header_pairs(attributes)
        ]
    except EventError as error:
        raise RequestError(400, "invalid-header", error.message) from error
