"""`virta log import | export`: Puro's files and record objects (NDJSON), to and from a log."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import virta
from virta.cli.report import EXIT_PROBLEMS, InputError, json_option, print_report, progress
from virta.cli.units import PLACE, SIZE, show_count, show_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from virta.log import Log
    from virta.log.log import Durability

    Command = Callable[..., Any]

FORMATS: Final = ("puro", "ndjson")
SEGMENT_BYTES: Final = 1024 * 1024 * 1024


def _format_option(text: str) -> Callable[[Command], Command]:
    """Return the option that chooses one of FORMATS."""
    choice = click.Choice(FORMATS)
    return click.option(
        "--format", "form", type=choice, default="puro", show_default=True, help=text
    )


@click.command("import")
@click.argument("path", metavar="LOG")
@click.argument("source", metavar="SOURCE")
@_format_option("What SOURCE is.")
@click.option(
    "--crc",
    type=click.Choice(["auto", "plain", "puro"]),
    default="auto",
    show_default=True,
    help="Puro: the checksum.",
)
@click.option(
    "--generation", type=click.Choice(["auto", "flat", "block6", "block10"]), default="auto",
    show_default=True, help="Puro: the format.",
)  # fmt: skip
@click.option(
    "--skip-damaged", is_flag=True, help="Puro: pass over damage and list it; exit code 1."
)
@click.option(
    "--spurious", is_flag=True, help="Puro: also read segments after one without tombstone."
)
@click.option("--topic", help="NDJSON: topic of records that do not name one.")
@click.option(
    "--batch",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    help="Records per append.",
)
@click.option(
    "--durability",
    type=click.Choice(["none", "interval", "group", "fsync"]),
    help="What an append waits for.",
)
@json_option
@click.pass_context
def import_(
    ctx: click.Context, /, path: str, source: str, *, form: str, as_json: bool, **how: Any
) -> None:
    """Append SOURCE to LOG: a Puro file or directory, or record objects ("-": stdin)."""
    if form == "puro" and source == "-":
        raise click.UsageError(
            "a Puro import reads files: name one, or a directory of stream<N>.puro"
        )
    if source != "-" and not Path(source).exists():
        raise InputError(f"there is no {source}")
    with virta.open(path) as target, progress("import", quiet=as_json) as bar:
        members = (_import_puro if form == "puro" else _import_ndjson)(target, source, bar, **how)
    lines = [
        f"{r['path']}: bytes {r['byte_from']} to {r['byte_to']} {kind} ({r['reason']})"
        for kind, ranges in (
            ("damaged", members["damaged"]),
            ("incomplete, not read", members["incomplete"]),
        )
        for r in ranges
    ]
    lines += [
        f"{name}: not read, the segment before it has no tombstone" for name in members["spurious"]
    ]
    where = (
        "" if members["first_offset"] is None else f" at offset {members['first_offset']} and up"
    )
    lines.append(f"imported {show_count(members['records'], 'record')}{where}")
    print_report(members, lines, as_json=as_json)
    if members["damaged"] or members["spurious"]:
        ctx.exit(EXIT_PROBLEMS)


def _import_puro(
    target: Log, source: str, bar: Any, *, crc: str, generation: str, skip_damaged: bool, spurious: bool,
    batch: int, durability: Durability | None, topic: str | None,
) -> dict[str, Any]:  # fmt: skip
    from virta.interop.transfer import import_puro

    if topic is not None:
        raise click.UsageError("--topic is for --format ndjson: Puro's records have their topics")
    report = import_puro(
        target, source,
        crc=None if crc == "auto" else crc,  # type: ignore[arg-type]
        generation=None if generation == "auto" else generation,  # type: ignore[arg-type]
        on_corruption="skip" if skip_damaged else "raise",
        spurious=spurious, batch=batch, durability=durability, progress=bar,
    )  # fmt: skip
    return {
        "records": report.records,
        "bytes": report.bytes,
        "segments": report.segments,
        "generation": report.generation,
        "crc": report.crc,
        "first_offset": report.first_offset,
        "next_offset": report.next_offset,
        "damaged": [r._asdict() for r in report.damaged],
        "incomplete": [r._asdict() for r in report.incomplete],
        "spurious": report.spurious,
    }


def _import_ndjson(
    target: Log, source: str, bar: Any, *, batch: int, durability: Durability | None, topic: str | None, **_puro: Any
) -> dict[str, Any]:  # fmt: skip
    from virta.cli.log.lines import AppendProgress, append_lines, line_parser

    parse = line_parser("ndjson-records", topic=topic, key=None, separator=None, lenient=False)
    done, size = AppendProgress(), 0
    with sys.stdin.buffer if source == "-" else open(source, "rb") as stream:
        total = os.fstat(stream.fileno()).st_size
        for size in append_lines(
            target, stream, parse, done, batch=batch, durability=durability
        ):  # fmt: skip
            if total:
                bar(min(size, total), total)
    return {
        "records": done.records, "bytes": size, "first_offset": done.first_offset,
        "next_offset": done.next_offset, "damaged": [], "incomplete": [], "spurious": [],
    }  # fmt: skip


@click.command()
@click.argument("path", metavar="LOG")
@click.argument("target", metavar="TARGET")
@_format_option("What to write.")
@click.option(
    "--crc",
    type=click.Choice(["plain", "puro"]),
    default="plain",
    show_default=True,
    help="Puro: the checksum.",
)
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated.")
@click.option(
    "--from",
    "start",
    type=PLACE,
    default="earliest",
    show_default=True,
    help="Where to start, as in tail.",
)
@click.option("--to", "end", type=PLACE, help="Stop before this place.")
@click.option(
    "--segment-bytes",
    type=SIZE,
    default=SEGMENT_BYTES,
    show_default="1GiB",
    help="Puro, into a directory: size of a segment.",
)
@click.option("--force", is_flag=True, help="Replace TARGET when it exists.")
@json_option
def export(path: str, target: str, *, form: str, as_json: bool, **how: Any) -> None:
    """Write LOG to TARGET: a file, "-" for stdout, or (Puro) an existing directory."""
    if target == "-" and as_json:
        raise click.UsageError("stdout carries the records: write to a file to get a --json report")
    with (
        virta.open(path, create=False, read_only=True) as source,
        progress("export", quiet=as_json) as bar,
    ):
        members = (_export_puro if form == "puro" else _export_ndjson)(source, target, bar, **how)
    if target != "-":
        text = f"exported {show_count(members['records'], 'record')}, {show_size(members['bytes'])}, to {', '.join(members['files'])}"
        print_report(members, [text], as_json=as_json)


def _export_puro(
    source: Log, target: str, bar: Any, *, crc: Any, topics: tuple[str, ...], start: Any, end: Any,
    segment_bytes: int, force: bool,
) -> dict[str, Any]:  # fmt: skip
    from virta.interop.transfer import export_puro, write_flat

    if target == "-":
        with source.read(topics or None, start=start, end=end) as reader:
            return {"records": write_flat(sys.stdout.buffer, reader, crc)}
    report = export_puro(
        source, target, crc=crc, topics=topics or None, start=start, end=end, overwrite=force,
        segment_bytes=segment_bytes, progress=bar,
    )  # fmt: skip
    return {"records": report.records, "bytes": report.bytes, "files": report.files}


def _export_ndjson(
    source: Log, target: str, bar: Any, *, topics: tuple[str, ...], start: Any, end: Any, force: bool, **_puro: Any
) -> dict[str, Any]:  # fmt: skip
    from virta.cli.log.lines import WRITERS
    from virta.interop.transfer import export_lines

    with source.read(topics or None, start=start, end=end) as reader:
        lines = map(WRITERS["json"], reader)
        if target == "-":
            count = 0
            for count, line in enumerate(lines, 1):  # noqa: B007
                sys.stdout.buffer.write(line)
            return {"records": count}
        report = export_lines(lines, target, overwrite=force)
    bar(1, 1)
    return {"records": report.records, "bytes": report.bytes, "files": report.files}


COMMANDS = (import_, export)
