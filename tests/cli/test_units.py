"""Sizes, durations and places as people write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from virta.cli.units import parse_duration, parse_place, parse_size, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("64KiB", 65536), ("1k", 1024), ("1.5MB", 1_500_000), ("10G", 10 * 2**30), ("2 tib", 2**41)],
)  # fmt: skip
def test_sizes(text, size):
    """Sizes as people write them."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("500ms", 0.5),
        ("1h30m", 5400),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1.5 h", 5400),
    ],
)
def test_durations(text, seconds):
    """Durations as people write them, parts added up."""
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "x", "-1", "1x", "1..5", "h", "9" * 30 + "w"])
def test_bad_units(text):
    """Anything else says what would be right."""
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text + "!")
    with pytest.raises(ValueError, match=r"is not a duration|longer than a calendar"):
        parse_duration(text)


def test_places():
    """Offsets, words, times and ages."""
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)

    assert parse_place("latest") == "latest"
    assert parse_place("42") == 42
    assert parse_place("15m", now) == now - timedelta(minutes=15)
    assert parse_place("2026-01-01T12:00:00Z") == now
    assert parse_place("2026-01-01").tzinfo is not None
    assert parse_place("999999w", now) == "earliest"
    assert [show_size(n) for n in (0, 1023, 1536, 3 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "1024.0 TiB",
    ]
