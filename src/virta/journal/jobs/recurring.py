"""
When a recurring job is due: five-field cron expressions in UTC, `@daily` and its like, or `@every 90s`.

Fields are minute, hour, day of month, month, day of week (0 or 7 is Sunday); each is `*`, a number, a
range `a-b`, a step `*/n` or `a-b/n`, or a list of those; months and days of the week may be named by their
first three letters. As in every cron, if both days are restricted, either one is enough.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct

from virta.journal.protocol.messages import RefusedError

_RANGES = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_NAMES = ("minute", "hour", "day of month", "month", "day of week")
_MONTHS = dict(
    zip(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"],
        range(1, 13),
        strict=True,
    )
)
_WEEKDAYS = dict(zip(["sun", "mon", "tue", "wed", "thu", "fri", "sat"], range(7), strict=True))
_WORDS: tuple[dict[str, int], ...] = ({}, {}, {}, _MONTHS, _WEEKDAYS)
_SHORT = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
EVERY_SECONDS_MIN = 1
# 29 February may be eight years away; beyond that an expression never comes true.
SEARCH_DAYS_MAX = 366 * 9
_EPOCH_DAY = datetime.fromtimestamp(0, UTC).toordinal()


class Cron(Struct, frozen=True, forbid_unknown_fields=True):
    """A recurring job, kept as JSON under `virta:cron:<name>`."""

    schedule: str
    uri: str
    domain: str = ""
    priority: int = 0
    payload: str | None = None
    # Times that passed while no daemon ran: ignored, or made up for by one push.
    catch_up: Literal["none", "once"] = "none"


class CronSchedule:
    """
    `after(time)` is the first time later than `time`, `latest(time)` the last one not later; in µs.

    In UTC, so that no hour is missing or there twice when clocks are put forward or back.
    """

    def __init__(self, text: str) -> None:
        self._every = 0
        if text.startswith("@every"):
            self._every = _parse_every(text)
            return
        fields = _SHORT.get(text.strip().lower(), text).split()
        if len(fields) != 5:
            raise _schedule_error(
                text, "five fields: minute hour day month weekday, or @daily, or @every 30s"
            )
        sets = [
            _parse_cron_field(part, bounds, name, words)
            for part, bounds, name, words in zip(fields, _RANGES, _NAMES, _WORDS, strict=True)
        ]
        self._minutes, self._hours, self._days, self._months, weekdays = sets
        self._weekdays = {day % 7 for day in weekdays}
        self._any_day = fields[2].startswith("*")
        self._any_weekday = fields[4].startswith("*")
        self.after(0)  # an expression that never comes true is refused here

    def after(self, time: int) -> int:
        if self._every:
            return (time // self._every + 1) * self._every
        minute = datetime.fromtimestamp(time // 60_000_000 * 60, UTC) + timedelta(minutes=1)
        found = self._search(minute, 1, SEARCH_DAYS_MAX)
        if found is None:
            raise RefusedError("bad-settings", "this schedule never comes true")
        return found

    def latest(self, time: int) -> int:
        if self._every:
            return time // self._every * self._every
        minute = datetime.fromtimestamp(time // 60_000_000 * 60, UTC)
        days = min(SEARCH_DAYS_MAX, minute.toordinal() - _EPOCH_DAY + 1)
        return self._search(minute, -1, days) or 0

    def _search(self, start: datetime, step: int, days: int) -> int | None:
        """Return the first time from `start` on, forwards (1) or backwards (-1), within so many days."""
        day = start.replace(hour=0, minute=0)
        for number in range(days):
            if self._on(day):
                for hour in sorted(self._hours)[::step]:
                    if number == 0 and hour * step < start.hour * step:
                        continue  # before the start
                    for minute in sorted(self._minutes)[::step]:
                        found = day.replace(hour=hour, minute=minute)
                        if found == start or (found > start) == (step > 0):
                            return int(found.timestamp()) * 1_000_000
            day += timedelta(days=step)
        return None

    def _on(self, day: datetime) -> bool:
        if day.month not in self._months:
            return False
        of_month = day.day in self._days
        of_week = day.isoweekday() % 7 in self._weekdays
        if self._any_day or self._any_weekday:
            return of_month and of_week
        return of_month or of_week


def _parse_every(text: str) -> int:
    match = re.fullmatch(r"@every\s+(\d{1,6})([smhd])", text)
    if match is None or int(match[1]) * _UNITS[match[2]] < EVERY_SECONDS_MIN:
        raise _schedule_error(text, "@every with a number and s, m, h or d, such as @every 90s")
    return int(match[1]) * _UNITS[match[2]] * 1_000_000


def _parse_cron_field(
    text: str, bounds: tuple[int, int], name: str, words: dict[str, int]
) -> set[int]:
    low, high = bounds
    numbers: set[int] = set()
    for part in text.split(","):
        plain = re.sub(r"[a-z]+", lambda word: str(words.get(word[0], word[0])), part.lower())
        match = re.fullmatch(r"(?:\*|(\d{1,2})(?:-(\d{1,2}))?)(?:/(\d{1,2}))?", plain)
        if match is None:
            raise _schedule_error(part, f"a {name}: *, n, a-b, */n or a list of those")
        first = low if match[1] is None else int(match[1])
        last = int(match[2]) if match[2] else high if match[1] is None or match[3] else first
        step = int(match[3]) if match[3] else 1
        if not (low <= first <= high and low <= last <= high):
            raise _schedule_error(part, f"a {name} from {low} to {high}")
        if last < first:
            raise _schedule_error(part, f"a {name}: its end is before its start")
        if step < 1:
            raise _schedule_error(part, f"a {name}: its step is from 1")
        numbers.update(range(first, last + 1, step))
    return numbers


def _schedule_error(text: str, right: str) -> RefusedError:
    return RefusedError("bad-settings", f"schedule {text[:80]!r} is not {right}")
