"""`virta.clock`: integer times and their text."""

from __future__ import annotations

import time

import pytest

from virta import clock


def test_now_is_the_wall_clock():
    """Both units agree with `time.time`."""
    before = time.time()
    us, ms = clock.now_us(), clock.now_ms()
    after = time.time()

    assert before - 0.001 <= us / 1e6 <= after + 0.001
    assert before - 0.001 <= ms / 1e3 <= after + 0.001


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "1970-01-01T00:00:00.000000Z"),
        (1, "1970-01-01T00:00:00.000001Z"),
        (1_522_949_460_000_000, "2018-04-05T17:31:00.000000Z"),
        (-1, "1969-12-31T23:59:59.999999Z"),
        (253_402_300_799_999_999, "9999-12-31T23:59:59.999999Z"),
        (253_402_300_800_000_000, "253402300800000000 µs after 1970"),
        (2**63, f"{2**63} µs after 1970"),
    ],
)
def test_time_text(microseconds, text):
    """Times are RFC 3339 with six digits; past the calendar, a number."""
    assert clock.time_text(microseconds) == text
