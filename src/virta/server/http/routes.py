"""
Paths of the hot routes: `/channels/NAME` and `/channels/NAME/from/START`.

A name is the part between the slashes, form-decoded (`+` is a space, `%2F` a slash); one slash at the end
is dropped, any other literal slash is refused.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from virta.errors import RequestError
from virta.event.times import parse_moment
from virta.hub.delivery import META, is_reserved
from virta.hub.resume.positions import EventId, Place, parse_offset, parse_position

CHANNELS = b"/channels/"
FROM = b"/from/"
# The log's limit on topics.
CHANNEL_BYTES_MAX = 1024

_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt]")


class ChannelPath(NamedTuple):
    """A channel and, for `/from/…`, where to start."""

    channel: str
    start: Place | None
    reserved: bool  # only the server writes to it


def parse_channel_path(path: bytes) -> ChannelPath:
    """
    Read a path that starts with `/channels/`.

    Raises:
        RequestError: 400 `invalid-channel` or `invalid-start`.
    """
    raw = path[len(CHANNELS) :]
    start: Place | None = None
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
    """Return why a text is not the name of a channel; empty if it is one."""
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
    """Decode `+` and `%XX`; refuse a bad escape and bytes that are not UTF-8."""
    check_escapes(raw, code=code, **members)
    return check_text(raw.replace(b"+", b" "), code=code, **members)


def check_text(raw: bytes, *, code: str, **members: object) -> str:
    """Decode `%XX`; refuse bytes that are not UTF-8: replacing them could make two names equal."""
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "backslashreplace")
        raise RequestError(400, code, f"{text!r} is not UTF-8", **members) from None


def check_escapes(raw: bytes, *, code: str, **members: object) -> None:
    """Refuse a percent sign that escapes nothing."""
    if _BAD_ESCAPE.search(raw):
        text = raw.decode("utf-8", "replace")
        raise RequestError(400, code, f"{text!r} has a % without two hex digits", **members)


def parse_start(text: str) -> Place:
    """
    Read `earliest`, `latest`, an offset, an RFC 3339 time, a position, or an event's source and id.

    The last two continue after what was received, the others begin with the record they name.
    """
    if text in {"earliest", "latest"}:
        return text
    offset = parse_offset(text)
    if offset is not None:
        return offset
    position = parse_position(text)
    if position is not None:
        return position
    try:
        return parse_moment(text)
    except ValueError:
        if ("+" in text or " " in text) and not _DATE.match(text):
            return EventId(text)
        raise RequestError(
            400,
            "invalid-start",
            f"{text!r} is not a start: write earliest, latest, an offset, an RFC 3339 time, a position "
            "or the id of a frame",
        ) from None


def _invalid(channel: str, why: str) -> RequestError:
    return RequestError(400, "invalid-channel", f"not a channel name: {why}", channel=channel)
