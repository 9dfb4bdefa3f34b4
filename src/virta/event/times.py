"""
Times as text: RFC 3339, and the wider forms that people type as a start or an end.

`virta.clock.time_text` writes the times of records, which are integers.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Final

from virta.errors import EventError

_RFC3339: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt](\d\d:\d\d):(\d\d)(?:\.(\d+))?([Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_LEAP_SECOND: Final = re.compile(r":59:60(?:\.\d+)?(?=Z|[+-]|$)", re.ASCII)
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


def parse_time(text: str) -> datetime:
    """
    Return the aware datetime of an RFC 3339 text; digits past the microsecond are cut.

    A leap second is read as the last microsecond before it.

    Raises:
        EventError: it is no such text, or there is no such day or hour.
    """
    match = _RFC3339.fullmatch(text)
    if match:
        date, minute, second, fraction, zone = match.groups()
        zone = "+00:00" if zone in "Zz" else zone
        micros = f"{fraction or '0':0<6.6}"
        if second == "60":
            second, micros = "59", "999999"
        try:
            return datetime.fromisoformat(f"{date}T{minute}:{second}.{micros}{zone}")
        except ValueError:
            pass  # right shape, no such day or hour
    raise EventError(
        f"time {show(text)} is not an RFC 3339 timestamp such as 2018-04-05T17:31:00Z",
        code="invalid-time",
        attribute="time",
    )


def parse_moment(text: str, zone: tzinfo | None = UTC) -> datetime:
    """
    Return the datetime of an ISO 8601 text, in UTC; a text without a zone is in `zone` (None: local time).

    A leap second is the start of the next second. A time that falls outside the years 1 to 9999 in UTC is
    moved to that end.

    Raises:
        ValueError: it is no such text.
    """
    # RFC 3339 §5.6: the letters may be small.
    candidate = text.upper()
    if "T" in candidate:
        # The plus sign of a zone arrives as a blank when a client did not escape it.
        candidate = candidate.replace(" ", "+")
    leap = _LEAP_SECOND.search(candidate)
    if leap:
        candidate = candidate[: leap.start() + 4] + "59" + candidate[leap.end() :]
    moment = datetime.fromisoformat(candidate)
    try:
        if moment.tzinfo is None:
            moment = moment.astimezone() if zone is None else moment.replace(tzinfo=zone)
        utc = moment.astimezone(UTC)
        return utc + timedelta(seconds=1) if leap else utc
    except OverflowError:
        return _FIRST if moment.year == 1 else _LAST


def format_time(moment: datetime, attribute: str = "time") -> str:
    """Return an aware datetime as RFC 3339, with `Z` for UTC."""
    if moment.tzinfo is None:
        raise EventError(
            f"{attribute} {moment.isoformat()} has no time zone: use an aware datetime",
            code="invalid-time",
            attribute=attribute,
        )
    return moment.isoformat().removesuffix("+00:00") + ("" if moment.utcoffset() else "Z")


def show(value: Any) -> str:
    """Return a value as error messages quote it: its repr, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
