"""
The failed attempts of a job, as the one text that is stored with it.

    reason [RS traceback] (GS ended ":" attempt ":" reason)*

The first reason and the traceback are those of the last failure. After them stand the last attempts, oldest first, each
with the beginning of its reason. RS and GS are the separators U+001E and U+001D. Daemons from before the list show
it as the end of the traceback and keep it.
"""

from __future__ import annotations

from typing import NamedTuple

TRACEBACK_MARK = "\x1e"
ATTEMPT_MARK = "\x1d"
REASON_CHARS_MAX = 1_000
TRACEBACK_CHARS_MAX = 4_000  # the end of it, which shows where the error was raised
# What is kept of the attempts before the last one: in memory too, for every job that failed.
FAILURES_MAX = 10
FAILURE_CHARS_MAX = 200


class Failure(NamedTuple):
    """One failed attempt; `attempt` counts from 1 and starts again when a dead job is requeued."""

    attempt: int
    ended: int  # microseconds since 1970
    reason: str


def reason_text(reason: str, traceback: str) -> str:
    """Return reason and traceback as one text, each within its limit."""
    text = _unmarked(reason)[:REASON_CHARS_MAX]
    if not traceback:
        return text
    return f"{text}{TRACEBACK_MARK}{traceback.replace(ATTEMPT_MARK, ' ')[-TRACEBACK_CHARS_MAX:]}"


def add_failure(before: str, reason: str, attempt: int, ended: int) -> str:
    """Return the text of a job that failed again: the new reason, and the attempts so far with this one."""
    entries = before.split(ATTEMPT_MARK)[1:][1 - FAILURES_MAX :]
    start = reason.partition(TRACEBACK_MARK)[0][:FAILURE_CHARS_MAX]
    return ATTEMPT_MARK.join([reason, *entries, f"{ended}:{attempt}:{start}"])


def last_failure(text: str) -> tuple[str, str]:
    """Return the reason and the traceback of the last failure; each may be empty."""
    reason, _, traceback = text.partition(ATTEMPT_MARK)[0].partition(TRACEBACK_MARK)
    return reason, traceback


def read_failures(text: str) -> list[Failure]:
    """Return the attempts that are kept, oldest first."""
    found = []
    for entry in text.split(ATTEMPT_MARK)[1:]:
        ended, _, rest = entry.partition(":")
        attempt, _, reason = rest.partition(":")
        if ended.isdecimal() and attempt.isdecimal():  # a text of another origin may have the mark
            found.append(Failure(int(attempt), int(ended), reason))
    return found


def _unmarked(text: str) -> str:
    return text.replace(TRACEBACK_MARK, " ").replace(ATTEMPT_MARK, " ")
