"""Sizes, durations and places in a log as text: types of click options, and output."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import click

from virta.clock import time_text

_SIZES: Final = {
    "": 1, "b": 1, "k": 1024, "kb": 1000, "kib": 1024, "m": 1024**2, "mb": 1000**2, "mib": 1024**2,
    "g": 1024**3, "gb": 1000**3, "gib": 1024**3, "t": 1024**4, "tb": 1000**4, "tib": 1024**4,
}  # fmt: skip
_SECONDS: Final = {
    "us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800,
}  # fmt: skip
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?\s*(?:us|ms|min|s|m|h|d|w)\s*)+", re.ASCII)
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|min|s|m|h|d|w)", re.ASCII)


def parse_size(text: str) -> int:
    """`10GiB`, `1.5MB`, `4096`. One letter (`10G`) is binary, as in dd and ls."""
    match = _SIZE.fullmatch(text.strip())
    if not match or match[2].lower() not in _SIZES:
        raise ValueError(f"{text!r} is not a size such as 4096, 64KiB, 1.5MB or 10G")
    return int(float(match[1]) * _SIZES[match[2].lower()])


def parse_duration(text: str) -> timedelta:
    """`7d`, `1h30m`, `500ms`; a bare number is seconds."""
    text = text.strip()
    try:
        if _DURATION.fullmatch(text):
            parts = _DURATION_PART.findall(text)
            return timedelta(seconds=sum(float(n) * _SECONDS[unit] for n, unit in parts))
        if re.fullmatch(r"\d+(?:\.\d+)?", text, re.ASCII):
            return timedelta(seconds=float(text))
    except OverflowError as error:
        raise ValueError(f"{text!r} is longer than a calendar") from error
    raise ValueError(f"{text!r} is not a duration such as 30s, 15m, 1h30m or 7d")


def parse_place(text: str, now: datetime | None = None) -> str | int | datetime:
    """Where to start or end: what `Log.read` takes, a duration meaning so long ago."""
    text = text.strip()
    if text in {"earliest", "latest"} or text.startswith("consumer:"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    if _DURATION.fullmatch(text):
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
