"""`virta log append | tail`: append lines as records, and print records."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

import click

import virta
from virta.cli.log import maintenance, tier, transfer
from virta.cli.report import InputError, ReportingGroup, json_option, print_report
from virta.cli.units import DURATION, PLACE, show_count
from virta.errors import ConsumerError, LogGapError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime, timedelta

    from virta.log import Consumer, Log, Record

DURABILITIES: Final = ("none", "interval", "group", "fsync")
TAIL_RECORDS: Final = 10
# Output is written, and a consumer's position committed, after this many records or this long a pause.
FLUSH_RECORDS: Final = 1000
COMMIT_IDLE_S: Final = 0.2
# How much further back to search for the last records of a topic.
SEARCH_BACK_FACTOR: Final = 8


@click.group(cls=ReportingGroup)
def log() -> None:
    """Append to, read, inspect and maintain an event log (a directory)."""


for _command in (*maintenance.COMMANDS, *transfer.COMMANDS, *tier.COMMANDS):
    log.add_command(_command)


@log.command()
@click.argument("path", metavar="LOG")
@click.option("--topic", help="Topic of the records; record objects may name their own.")
@click.option("--key", help="Key of records that do not bring one.")
@click.option("--key-separator", help="In lines: the text between a key and its value.")
@click.option(
    "--format", "form", type=click.Choice(["lines", "cloudevents", "ndjson-records"]), default="lines",
    show_default=True, help="What a line of input is.",
)  # fmt: skip
@click.option("--lenient", is_flag=True, help="Take CloudEvents that have only an id and a source.")
@click.option(
    "--batch", type=click.IntRange(1, 100_000), default=FLUSH_RECORDS, show_default=True,
    help="Most records in one atomic append.",
)  # fmt: skip
@click.option("--durability", type=click.Choice(DURABILITIES), help="What an append waits for.")
@click.option(
    "--input", "source", type=click.File("rb"), default="-", help="Read a file instead of stdin."
)
@click.option("--no-create", is_flag=True, help="Fail when there is no log yet.")
@click.option("--quiet", "-q", is_flag=True, help="Print no report.")
@json_option
def append(
    path: str, source: BinaryIO, *, no_create: bool, quiet: bool, as_json: bool, **how: Any
) -> None:
    """Append the lines of stdin (or --input) as records."""
    if how["topic"] is None and how["form"] != "ndjson-records":
        raise click.UsageError("--topic is needed: which topic do the records belong to?")
    from virta.cli.log.lines import AppendProgress, append_lines, line_parser

    separator = how["key_separator"]
    parse = line_parser(
        how["form"], topic=how["topic"], key=how["key"], separator=separator, lenient=how["lenient"]
    )
    done = AppendProgress()
    with virta.open(path, create=not no_create) as target:
        appending = append_lines(
            target, source, parse, done, batch=how["batch"], durability=how["durability"]
        )
        try:
            for _ in appending:
                pass
        except InputError as error:
            if not done.records:
                raise
            before = f"appended before it: {show_count(done.records, 'record')}"
            raise InputError(f"{error.message} ({before})") from error
    if not quiet:
        text = f"appended {show_count(done.records, 'record')}"
        if done.records:
            text += f" at offset {done.first_offset} and up, durability {done.durability}"
        print_report(done, [text], as_json=as_json)


@log.command()
@click.argument("path", metavar="LOG")
@click.option("--follow", "-f", is_flag=True, help="Continue as records are appended.")
@click.option(
    "-n", "count", type=click.IntRange(0), help="How many: the last ones, or the first from --from."
)
@click.option(
    "--from",
    "start",
    type=PLACE,
    help="earliest, latest, an offset, a time, 15m (ago), consumer:NAME.",
)
@click.option("--to", "end", type=PLACE, help="Stop before this place (not with --follow).")
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option(
    "--format", "form", type=click.Choice(["value", "raw", "event", "json", "full"]), default="value",
    show_default=True, help="How a record is printed.",
)  # fmt: skip
@click.option("--consumer", "name", help="Read as this named consumer and commit what was printed.")
@click.option("--timeout", type=DURATION, help="With --follow: end after so long without a record.")
@click.option("--wait", type=DURATION, help="Wait so long for the log to be created.")
@click.option(
    "--on-gap", type=click.Choice(["error", "skip"]), default="error", show_default=True,
    help="Where records were removed from the log: end with an error, or report it and continue.",
)  # fmt: skip
def tail(
    path: str, *, follow: bool, count: int | None, start: str | int | datetime | None, end: Any,
    topics: tuple[str, ...], form: str, name: str | None, timeout: timedelta | None, wait: timedelta | None,
    on_gap: str,
) -> None:  # fmt: skip
    """
    Print records: the last ten, or those that the options choose.

    With --from and no -n it prints everything from there; with --consumer everything since its last commit.
    """
    from virta.cli.log.lines import WRITERS

    if follow and end is not None:
        raise click.UsageError("--to ends the reading and --follow does not: use one of them")
    if name and end is not None:
        raise click.UsageError("--to cannot be used with --consumer: use -n")
    idle = timeout.total_seconds() if timeout else None
    out = _Output(WRITERS[form])
    waiting = wait.total_seconds() if wait else None
    # A consumer's position is part of the log's directory, so it needs more than reading.
    with (
        _gap_advice(),
        virta.open(path, create=False, read_only=not name, wait=waiting) as source,
    ):
        chosen = topics or None
        if name:
            first = "earliest" if start is None else start
            gaps: Literal["raise", "skip"] = "skip" if on_gap == "skip" else "raise"
            with (
                _gaps_reported(),
                source.consumer(name, topics=chosen, start=first, on_gap=gaps) as consumer,
            ):
                _tail_consumer(consumer, out, follow=follow, count=count, idle=idle)
            return
        read = _TopicReader(source, chosen, skip_gaps=on_gap == "skip")
        if start is None:
            count = TAIL_RECORDS if count is None else count
            records, start = _last(source, read, count, end)
            out.write_all(records)
            if not follow:
                return
            count = None
        _tail_batches(read.batches(start, end, follow=follow, timeout=idle), out, count=count)


class _TopicReader:
    """Reads of one log and the same topics; gaps end them, or are reported and skipped."""

    def __init__(self, source: Log, topics: Any, *, skip_gaps: bool) -> None:
        self._source = source
        self._topics = topics
        self._skip_gaps = skip_gaps
        self._reported = -1

    def batches(
        self, start: Any, end: Any, *, follow: bool = False, timeout: float | None = None
    ) -> Iterator[list[Record]]:
        while True:  # each gap moves the start forward
            try:
                with self._source.read(
                    self._topics, start=start, end=end, follow=follow, timeout=timeout
                ) as reader:
                    yield from reader.batches()
            except LogGapError as gap:
                if not self._skip_gaps:
                    raise
                if gap.next > self._reported:  # a later read may meet the same gap again
                    self._reported = gap.next
                    _report_gap(gap.first, gap.next)
                start = gap.next
            else:
                return


@contextmanager
def _gap_advice() -> Iterator[None]:
    """Name the flag in the error about a gap, where the log names the argument in Python."""
    try:
        yield
    except LogGapError as gap:
        text = gap.message.replace("on_gap='skip'", "--on-gap skip")
        raise LogGapError(text, first=gap.first, next=gap.next) from None


def _report_gap(first: int, following: int) -> None:
    click.echo(f"gap: offsets {first} to {following - 1} are no longer in the log", err=True)


class _GapReports(logging.Handler):
    """Reports on stderr which offsets a consumer skips; the log only warns of them."""

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("log_gap_skipped") and isinstance(record.args, tuple):
            first, following = record.args
            assert isinstance(first, int)
            assert isinstance(following, int)
            _report_gap(first, following)
        elif logging.lastResort is not None:
            logging.lastResort.handle(record)


@contextmanager
def _gaps_reported() -> Iterator[None]:
    handler, logger = _GapReports(), logging.getLogger("virta.log")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Output:
    """Writes records to stdout, and flushes before the reader waits."""

    def __init__(self, write: Any) -> None:
        self._format = write
        self._stream = sys.stdout.buffer

    def write_all(self, records: Iterable[Record]) -> None:
        write, line = self._stream.write, self._format
        for record in records:
            write(line(record))
        self._stream.flush()


def _tail_batches(batches: Iterator[list[Record]], out: _Output, *, count: int | None) -> None:
    left = count
    if left == 0:
        return
    for batch in batches:
        out.write_all(batch if left is None else batch[:left])
        if left is not None:
            left -= len(batch)
            if left <= 0:
                return


def _tail_consumer(
    consumer: Consumer, out: _Output, *, follow: bool, count: int | None, idle: float | None
) -> None:
    """Print and commit; a record counts as consumed only after it is written to stdout."""
    left = count
    last = time.monotonic()
    while left != 0:
        size = FLUSH_RECORDS if left is None else min(left, FLUSH_RECORDS)
        reading = consumer.read(follow=follow, timeout=COMMIT_IDLE_S if follow else None)
        records = list(islice(reading, size))
        if records:
            out.write_all(records)
            _commit(consumer)
            last = time.monotonic()
            left = None if left is None else left - len(records)
        elif not follow or (idle is not None and time.monotonic() - last >= idle):
            return


def _commit(consumer: Consumer) -> None:
    """Commit; after a stop (Ctrl-Z) longer than the lease, report the lost partitions and continue."""
    try:
        consumer.commit()
    except ConsumerError as exc:
        if exc.code != "consumer_lost":
            raise
        click.echo(f"warning: {exc}", err=True)


def _last(source: Log, read: _TopicReader, count: int, end: Any) -> tuple[list[Record], int]:
    """Return the last `count` records before `end`, and the offset to follow from."""
    until = source.next_offset if end is None else end
    first, window = source.first_offset, count
    stop = until if isinstance(until, int) else source.next_offset
    found: deque[Record] = deque(maxlen=count)
    while count:
        start = max(first, stop - window)
        found.clear()
        for batch in read.batches(start, until):
            found.extend(batch)
        if len(found) >= count or start <= first:
            break
        window *= SEARCH_BACK_FACTOR
    return list(found), stop
