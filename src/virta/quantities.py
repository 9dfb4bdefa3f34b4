"""
Sizes and durations as people write them: `10GiB`, `1h30m`.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

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


def is_duration(text: str) -> bool:
    """Return whether a text is a number and a unit, or several."""
    return _DURATION.fullmatch(text) is not None


def parse_duration(text: str) -> timedelta:
    """`7d`, `1h30m`, `500ms`; a bare number is seconds."""
    text = text.strip()
    try:
        if is_duration(text):
            parts = _DURATION_PART.findall(text)
            return timedelta(seconds=sum(float(n) * _SECONDS[unit] for n, unit in parts))
        if re.fullmatch(r"\d+(?:\.\d+)?", text, re.ASCII):
            return timedelta(seconds=float(text))
    except OverflowError as error:
        raise ValueError(f"{text!r} is longer than a calendar") from error
    raise ValueError(f"{text!r} is not a duration such as 30s, 15m, 1h30m or 7d")
