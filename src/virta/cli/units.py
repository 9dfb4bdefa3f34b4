"""Sizes, durations and places in a log as text: types of click options, and output."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import click

from virta.clock import time_text
from virta.quantities import is_duration, parse_duration, parse_size


def parse_place(text: str, now: datetime | None = None) -> str | int | datetime:
    """Where to start or end: what `Log.read` takes, a duration meaning so long ago."""
    text = text.strip()
    if text in {"earliest", "latest"} or text.startswith("consumer:"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if is_duration(text):
        try:
            return (now or datetime.now(UTC)) - parse_duration(text)
        except OverflowError:
            return "earliest"
    from virta.event.times import parse_moment

    try:
        return parse_moment(text, zone=None)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a place in a log: earliest, latest, an offset, a time such as"
            " 2026-01-31T12:00:00Z, a duration such as 15m (so long ago) or consumer:NAME"
        ) from None


def show_size(count: int) -> str:
    """`1.5 GiB`: three digits at most, exact below a kibibyte."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_count(count: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show_time(micros: int | None) -> str | None:
    """Return microseconds since the epoch as RFC 3339 in UTC, or as a number beyond the year 9999."""
    return None if micros is None else time_text(micros)


class _Parsed(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """A click type from one of the parsers above."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE: Final = _Parsed("size", parse_size)
DURATION: Final = _Parsed("duration", parse_duration)
PLACE: Final = _Parsed("place", parse_place)
