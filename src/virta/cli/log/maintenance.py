"""`virta log inspect | verify | repair | compact | retain`: describe, check and shrink a log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

import virta
from virta.cli.log.tier import inspect_store, verify_store
from virta.cli.report import (
    EXIT_PROBLEMS,
    json_option,
    one_line,
    print_report,
    progress,
    table,
    text_member,
)
from virta.cli.units import DURATION, SIZE, show_count, show_size, show_time
from virta.log.limits import CLOCK_AHEAD_S, TOPICS_MAX
from virta.tier.store import is_store_url

if TYPE_CHECKING:
    from datetime import timedelta

    from virta.log import Log
    from virta.log.format.damage import Problem

# Topics that `inspect` shows to people; programs get up to TOPICS_MAX.
TOPIC_ROWS_MAX: Final = 100


@click.command()
@click.argument("path", metavar="LOG")
@click.option(
    "--no-topics",
    is_flag=True,
    help="Do not count the records of each topic: that reads all of the log.",
)
@json_option
def inspect(path: str, *, no_topics: bool, as_json: bool) -> None:
    """Show segments, offsets, sizes, topics, consumers and how far behind they are; of a URL, what was shipped."""
    if is_store_url(path):
        inspect_store(path, as_json=as_json)
        return
    with virta.open(path, create=False, read_only=True) as source:
        members = _describe(source) | ({} if no_topics else _topics(source))
    segments, consumers = members["segments"], members["consumers"]
    lines = [
        f"log        {members['path']}",
        f"id         {members['id']} (epoch {members['epoch']})",
        f"offsets    {members['first_offset']} to {members['next_offset']}",
        f"durable    to {members['durable_offset']}",
        f"size       {show_size(members['bytes'])} in {show_count(len(segments), 'segment')}",
        *_clock_notice(members["clock_ahead_s"]),
        "",
        *table(
            ("segment", "state", "created", "last record", "first", "next", "size"),
            [
                (s["name"], s["state"], s["created"] or "-", s["last_time"] or "-",
                 s["first_offset"], s["next_offset"], show_size(s["bytes"]))
                for s in segments
            ],
            numbers=3,
        ),
    ]  # fmt: skip
    lines += _topic_lines(members)
    if consumers:
        rows = [
            (
                c["name"],
                f"{c['members']} + {c['hung']} hung" if c["hung"] else c["members"],
                c["position"],
                c["lag"] if c["lag_exact"] else f"<= {c['lag']}",
            )
            for c in consumers
        ]
        lines += ["", *table(("consumer", "members", "position", "lag"), rows, numbers=3)]
    print_report(members, lines, as_json=as_json)


def _describe(source: Log) -> dict[str, Any]:
    return {
        "path": str(source.path),
        "id": source.id,
        "epoch": source.epoch,
        "first_offset": source.first_offset,
        "next_offset": source.next_offset,
        "durable_offset": source.durable_offset,
        "bytes": source.bytes,
        "clock_ahead_s": round(source.clock_ahead, 3),
        "segments": [
            {
                "name": str(s.path).rpartition("/")[2],
                "state": ("sealed" if s.sealed else "active") + " compacted" * s.compacted,
                "first_offset": s.base,
                "next_offset": s.next,
                "bytes": s.bytes,
                "created": show_time(s.created),
                "last_time": show_time(s.last_time),
            }
            for s in source.segments()
        ],
        "consumers": [c._asdict() | {"updated": show_time(c.updated)} for c in source.consumers()],
    }


def _clock_notice(ahead: float) -> list[str]:
    """Return a line if the newest record is so far in the future that a clock was wrong."""
    if ahead < CLOCK_AHEAD_S:
        return []
    said = (
        f"the newest record is {ahead:.0f} s ahead of this machine's clock, so a clock was wrong:"
    )
    return [f"clock      {said} all records get its time until then (docs/log.md, Wrong clocks)"]


def _topics(source: Log) -> dict[str, Any]:
    found = source.topics()
    rows = [
        text_member("topic", info.topic)
        | {
            "records": info.records,
            "bytes": info.bytes,
            "first_offset": info.first_offset,
            "last_offset": info.last_offset,
            "first_time": show_time(info.first_timestamp),
            "last_time": show_time(info.last_timestamp),
        }
        for info in found
    ]
    return {"topics": rows, "topics_more": len(found) == TOPICS_MAX}


def _topic_lines(members: dict[str, Any]) -> list[str]:
    topics = members.get("topics", [])
    if not topics:
        return []
    rows = [
        (
            one_line(t["topic"] if "topic" in t else f"base64:{t['topic_base64']}"), t["first_time"], t["last_time"],
            t["records"], t["first_offset"], t["last_offset"], show_size(t["bytes"]),
        )
        for t in topics[:TOPIC_ROWS_MAX]
    ]  # fmt: skip
    head = ("topic", "first record", "last record", "records", "first", "last", "size")
    lines = ["", *table(head, rows, numbers=4)]
    if len(topics) > TOPIC_ROWS_MAX:
        lines.append(f"… the first {TOPIC_ROWS_MAX} topics of {len(topics)}: --json shows more")
    return lines


def _problem_lines(problems: list[Problem]) -> list[str]:
    return [
        f"{p.segment}: bytes {p.byte_from} to {p.byte_to}, offsets {p.offset_from} to"
        f" {'the end' if p.offset_to is None else p.offset_to}: {p.reason}"
        for p in problems
    ]


@click.command()
@click.argument("path", metavar="LOG")
@json_option
@click.pass_context
def verify(ctx: click.Context, path: str, *, as_json: bool) -> None:
    """Check every checksum of the log, or of a shipped log's objects. Exit code 1 when something is damaged."""
    if is_store_url(path):
        verify_store(ctx, path, as_json=as_json)
        return
    with (
        virta.open(path, create=False, read_only=True) as source,
        progress("verify", quiet=as_json) as bar,
    ):
        report = source.verify(progress=bar)
        ahead = round(source.clock_ahead, 3)
    problems = report.problems
    members = report._asdict() | {
        "clock_ahead_s": ahead,
        "problems": [problem._asdict() for problem in problems],
    }
    lines = [*_problem_lines(problems), *_clock_notice(ahead)]
    verdict = show_count(len(problems), "damaged place") if problems else "no damage"
    lines.append(
        f"{verdict} in {show_count(report.segments, 'segment')}:"
        f" {show_count(report.records, 'record')}, {show_size(report.bytes)}"
    )
    print_report(members, lines, as_json=as_json)
    if problems:
        ctx.exit(EXIT_PROBLEMS)


@click.command()
@click.argument("path", metavar="LOG")
@json_option
@click.pass_context
def repair(ctx: click.Context, path: str, *, as_json: bool) -> None:
    """Move damaged bytes to quarantine/ so that readers pass. Exit code 1 when records were lost."""
    with virta.open(path, create=False) as source, progress("repair", quiet=as_json) as bar:
        report = source.repair(progress=bar)
    problems = report.problems
    members = report._asdict() | {"problems": [problem._asdict() for problem in problems]}
    lines = [*_problem_lines(problems), *(f"saved in {name}" for name in report.quarantined)]
    lines.append(
        f"repaired {show_count(len(problems), 'place')}, lost {show_count(report.offsets_lost, 'offset')}"
        if problems
        else "nothing to repair"
    )
    print_report(members, lines, as_json=as_json)
    if report.offsets_lost:
        ctx.exit(EXIT_PROBLEMS)


@click.command()
@click.argument("path", metavar="LOG")
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@json_option
def compact(path: str, *, topics: tuple[str, ...], as_json: bool) -> None:
    """Keep only the newest record of each key in sealed segments; an empty value deletes its key."""
    with virta.open(path, create=False) as source, progress("compact", quiet=as_json) as bar:
        report = source.compact(topics=topics or None, progress=bar)
    text = (
        f"compacted {show_count(report.segments, 'segment')}:"
        f" {report.records_before} to {report.records_after} records,"
        f" {show_size(report.bytes_before)} to {show_size(report.bytes_after)}"
    )
    print_report(report._asdict(), [text], as_json=as_json)


@click.command()
@click.argument("path", metavar="LOG")
@click.option(
    "--max-age", type=DURATION, help="Drop segments whose last record is older, such as 7d."
)
@click.option(
    "--max-bytes", type=SIZE, help="Drop the oldest segments over this size, such as 10GiB."
)
@click.option("--consumed", is_flag=True, help="Drop what every named consumer has read.")
@click.option("--keep-unread", is_flag=True, help="Never drop what a named consumer has not read.")
@click.option("--unshipped", is_flag=True, help="Also drop what is not in object storage yet.")
@click.option("--in-lake", metavar="DIR", help="Never drop what is not in this lake.")
@click.option("--dry-run", is_flag=True, help="Only report what would be dropped.")
@json_option
def retain(
    path: str, *, max_age: timedelta | None, max_bytes: int | None, consumed: bool, keep_unread: bool,
    unshipped: bool, in_lake: str | None, dry_run: bool, as_json: bool
) -> None:  # fmt: skip
    """Drop old sealed segments by age, size or consumption."""
    if max_age is None and max_bytes is None and not consumed:
        raise click.UsageError("say what to drop: --max-age, --max-bytes or --consumed")
    with virta.open(path, create=False) as source:
        report = source.retain(
            max_age=max_age,
            max_bytes=max_bytes,
            consumed=consumed,
            keep_unread=keep_unread,
            unshipped=unshipped,
            keep_from=None if in_lake is None else lake_end(source, in_lake),
            dry_run=dry_run,
        )
    verb = "would drop" if dry_run else "dropped"
    text = (
        f"{verb} {show_count(report.segments, 'segment')}, {show_count(report.records, 'record')},"
        f" {show_size(report.bytes)};"
        f" the first offset is {report.first_offset}"
    )
    print_report(report._asdict() | {"dry_run": dry_run}, [text], as_json=as_json)


def lake_end(log: Log, lake: str) -> int:
    """Return the offset up to which a lake has the records of the log."""
    from virta.spark.lake.formats import checked_end

    return checked_end(lake, log.id, log.first_offset)


COMMANDS = (inspect, verify, repair, compact, retain)
