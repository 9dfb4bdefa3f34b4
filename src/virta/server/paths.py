"""
Paths of the hot routes: `/channels/NAME` and `/channels/NAME/from/START`.

The path is read raw. A name is what stands between the slashes, form-decoded (`+` is a blank, `%2F` a
slash); one slash at the end is dropped, any other literal slash is refused.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from virta.errors import RequestError
from virta.hub.topics import META, is_reserved

CHANNELS = b"/channels/"
FROM = b"/from/"
# The log's limit on topics.
CHANNEL_BYTES_MAX = 1024
OFFSET_DIGITS_MAX = 19

_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")

Moment = str | int | datetime


class ChannelPath(NamedTuple):
    """A channel and, for `/from/…`, where to start."""

    channel: str
    start: Moment | None
    reserved: bool  # only the server writes to it


def parse_channel_path(path: bytes) -> ChannelPath:
    """
    Read a path that starts with `/channels/`.

    Raises:
        RequestError: 400 `invalid-channel` or `invalid-start`.
    """
    raw = path[len(CHANNELS) :]
    start: Moment | None = None
    name, separator, moment = raw.partition(FROM)
    if separator and moment and b"/" not in name:
        raw = name
        start = parse_start(form_decode(moment.removesuffix(b"/"), code="invalid-start"))
    raw = raw.removesuffix(b"/")
    shown = raw.decode("utf-8", "replace")
    if b"/" in raw:
        raise _invalid(shown, "it holds a slash: write %2F for a slash in a name")
    channel = form_decode(raw, code="invalid-channel", channel=shown)
    why = name_fault(channel)
    if why:
        raise _invalid(shown, why)
    return ChannelPath(channel, start, channel == META or is_reserved(channel))


def name_fault(channel: str) -> str:
    """Why a text is no name of a channel; empty when it is one."""
    if not channel:
        return "it is empty: a name has at least one character"
    if len(channel.encode("utf-8", "replace")) > CHANNEL_BYTES_MAX:
        return f"it is longer than {CHANNEL_BYTES_MAX} bytes"
    if "\0" in channel:
        return "it holds a NUL"
    if len(channel) == 1 and channel < " ":
        return "it is one control character, which is the log's own"
    return ""


def form_decode(raw: bytes, *, code: str, **members: object) -> str:
    """Decode `+` and `%XX`; bad UTF-8 becomes U+FFFD, a bad escape is refused."""
    if _BAD_ESCAPE.search(raw):
        text = raw.decode("utf-8", "replace")
        raise RequestError(400, code, f"{text!r} has a % without two hex digits", **members)
    return unquote_to_bytes(raw.replace(b"+", b" ")).decode("utf-8", "replace")


def parse_start(text: str) -> Moment:
    """Read `earliest`, `latest`, an offset or an RFC 3339 time."""
    if text in {"earliest", "latest"}:
        return text
    if text.isascii() and text.isdigit() and len(text) <= OFFSET_DIGITS_MAX:
        return int(text)
    # A plus sign of a time zone arrives as a blank when the client did not escape it.
    candidate = text.replace(" ", "+") if "T" in text else text
    try:
        moment = datetime.fromisoformat(candidate)
    except ValueError:
        raise RequestError(
            400,
            "invalid-start",
            f"{text!r} is no start: write earliest, latest, an offset or an RFC 3339 time",
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _invalid(channel: str, why: str) -> RequestError:
    return RequestError(400, "invalid-channel", f"not a channel name: {why}", channel=channel)
