"""Rules of retention by channel: `PATTERN=DURATION`, the first that matches counts."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple

from virta.quantities import parse_duration

RETENTION_RULES_MAX = 100


class RetentionRule(NamedTuple):
    """How long events of matching channels are kept."""

    pattern: str
    text: str
    age_us: int

    def matches(self, channel: str) -> bool:
        return fnmatchcase(channel, self.pattern)


def parse_retention_rule(text: str) -> RetentionRule:
    """
    Parse `clicks*=7d`.

    Raises:
        ValueError: it has no pattern, or no duration.
    """
    pattern, equals, duration = text.strip().rpartition("=")
    if not equals or not pattern:
        raise ValueError(f"{text!r} is not PATTERN=DURATION")
    age = parse_duration(duration)
    return RetentionRule(pattern, duration.strip(), int(age.total_seconds() * 1e6))


def read_retention_rule(text: str) -> str | None:
    """Return a rule as it is stored in the settings; None if it is invalid."""
    try:
        parse_retention_rule(text)
    except ValueError:
        return None
    return text.strip()
