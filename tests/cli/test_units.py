"""Sizes, durations and places on the command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from virta.cli import units

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64KiB", 65_536),
        ("64 kib", 65_536),
        ("1.5MB", 1_500_000),
        ("10G", 10 * 1024**3),
        ("2t", 2 * 1024**4),
        ("7b", 7),
        ("1k", 1024),
        ("2 tib", 2**41),
    ],
)
def test_sizes(text, expected):
    """One letter is binary, two are decimal, `iB` is binary."""
    assert units.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1e3", "1 G B", "٣", "1.5.2"])
def test_bad_sizes(text):
    """The sentence quotes the value and says what would be right."""
    with pytest.raises(ValueError, match="is not a size such as 4096") as refused:
        units.parse_size(text)

    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30),
        ("1.5", 1.5),
        ("500ms", 0.5),
        ("15m", 900),
        ("15min", 900),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("250us", 0.00025),
        ("1.5 h", 5400),
    ],
)
def test_durations(text, seconds):
    """A bare number is seconds; units may follow each other."""
    assert units.parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "d", "7 days", "-1s", "1..5", "1h30", "٣s"])
def test_bad_durations(text):
    """The sentence quotes the value and says what would be right."""
    with pytest.raises(ValueError, match="is not a duration such as 30s"):
        units.parse_duration(text)


def test_a_duration_beyond_the_calendar():
    """It is refused as a duration, and as a place it is the beginning of the log."""
    with pytest.raises(ValueError, match="longer than a calendar"):
        units.parse_duration("999999999999d")
    assert units.parse_place("999999d", NOW) == "earliest"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", "earliest"),
        (" latest ", "latest"),
        ("consumer:billing", "consumer:billing"),
        ("4711", 4711),
        ("15m", NOW - timedelta(minutes=15)),
        ("2026-01-31T12:00:00Z", NOW),
        ("2026-01-31T13:00:00+01:00", NOW),
    ],
)
def test_places(text, expected):
    """A place is a word, an offset, a time, a duration ago or a consumer."""
    assert units.parse_place(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "soon", "-1", "2026-13-01T00:00:00Z", "1_000"])
def test_bad_places(text):
    """The sentence lists every form."""
    with pytest.raises(ValueError, match="is not a place in a log: earliest, latest, an offset"):
        units.parse_place(text, NOW)


@given(st.integers(0, 2**50))
def test_shown_sizes_are_read_back(count):
    """What is printed is a size that the command line reads, within its rounding."""
    shown = units.show_size(count)
    read = units.parse_size(shown)

    assert abs(read - count) <= max(1, 0.06 * count)
    assert len(shown) <= 12


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_shown_sizes(count, expected):
    """Exact below a kibibyte, one digit above."""
    assert units.show_size(count) == expected


def test_a_date_is_a_place():
    """A date without a time has the local zone."""
    assert units.parse_place("2026-01-01").tzinfo is not None


def test_counts_and_times():
    """One record, two records; a time beyond the calendar is a number."""
    assert [units.show_count(n, "record") for n in (0, 1, 2)] == [
        "0 records",
        "1 record",
        "2 records",
    ]
    assert units.show_time(None) is None
    assert units.show_time(0) == "1970-01-01T00:00:00.000000Z"
    assert units.show_time(10**18).startswith(str(10**18))


def test_options_fail_with_the_sentence():
    """As a type of click the same sentence is a usage error, exit code 2."""

    @click.command()
    @click.option("--size", type=units.SIZE, default="1K")
    @click.option("--age", type=units.DURATION)
    def command(size, age):
        click.echo(f"{size} {age}")

    runner = CliRunner()
    assert runner.invoke(command, ["--age", "1m"]).output == "1024 0:01:00\n"
    bad = runner.invoke(command, ["--size", "big"])
    assert bad.exit_code == 2
    assert "'big' is not a size such as" in bad.output
