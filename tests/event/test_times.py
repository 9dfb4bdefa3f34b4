"""`virta.event.times`: RFC 3339 strictly, and the wider forms that people type."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.errors import EventError
from virta.event.times import format_time, parse_moment, parse_time, show

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LAST = datetime.max.replace(tzinfo=UTC)
FIRST = datetime.min.replace(tzinfo=UTC)


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))])))
def test_times_survive_a_round_trip(moment):
    """What is written is read as the same time, in both readers."""
    text = format_time(moment)

    assert parse_time(text) == moment
    if datetime.min.replace(tzinfo=UTC) + timedelta(days=1) < moment:
        assert parse_moment(text) == moment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", NOON),
        ("2026-01-31t12:00:00z", NOON),
        ("2026-01-31T14:00:00+02:00", NOON),
        ("2026-01-31T12:00:00.123456789Z", NOON.replace(microsecond=123456)),
        ("2016-12-31T23:59:60Z", datetime(2016, 12, 31, 23, 59, 59, 999999, UTC)),
    ],
)
def test_rfc_3339(text, expected):
    """Letters may be small; a leap second is the last microsecond before it."""
    assert parse_time(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "now",
            "2026-01-31",
            "2026-01-31T12:00:00",
            "2026-01-31 12:00:00Z",
            "20260131T120000Z",
        ),
        *("2026-02-30T12:00:00Z", "2026-01-31T25:00:00Z", "2026-01-31T12:00:00+24:00"),
        "٢026-01-31T12:00:00Z",
    ],
)
def test_what_is_not_rfc_3339(text):
    """Strict reading refuses other forms, and days and hours that do not exist."""
    with pytest.raises(EventError) as refused:
        parse_time(text)

    assert (refused.value.code, refused.value.attribute) == ("invalid-time", "time")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-31T12:00:00Z", NOON),
        ("2026-01-31t14:00:00+02:00", NOON),
        ("2026-01-31T14:00:00 02:00", NOON),
        ("2026-01-31T12:00:00", NOON),
        ("2026-01-31 12:00", NOON),
        ("20260131T120000Z", NOON),
        ("2026-01-31", NOON.replace(hour=0)),
        ("2016-12-31T23:59:60Z", datetime(2017, 1, 1, tzinfo=UTC)),
        ("2016-12-31T23:59:60.5Z", datetime(2017, 1, 1, tzinfo=UTC)),
        ("9999-12-31T23:59:59-01:00", LAST),
        ("0001-01-01T00:00:00+01:00", FIRST),
    ],
)
def test_moments(text, expected):
    """Dates, blanks for a plus sign, times without a zone and times past the calendar are read."""
    assert parse_moment(text) == expected


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "12:00"])
def test_what_is_no_moment(text):
    """Anything else is a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        parse_moment(text)


def test_local_time(monkeypatch):
    """Without a zone the text may mean local time."""
    monkeypatch.setenv("TZ", "Etc/GMT-3")
    time.tzset()
    try:
        assert parse_moment("2026-01-31T15:00:00", zone=None) == NOON
        assert parse_moment("2026-01-31T12:00:00Z", zone=None) == NOON
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_naive_datetime_is_refused():
    """A time without a zone cannot be written; the error names the attribute."""
    with pytest.raises(EventError, match="no time zone") as refused:
        format_time(datetime(2026, 1, 31), "expires")  # noqa: DTZ001

    assert refused.value.attribute == "expires"


@pytest.mark.parametrize("value", ["short", "x" * 500, {"a": "y" * 500}, None])
def test_quoted_values_are_short(value):
    """Error messages quote at most 80 characters."""
    assert len(show(value)) <= 80
    assert show("short") == "'short'"
