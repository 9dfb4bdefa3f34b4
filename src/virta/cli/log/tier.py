"""`virta log ship | restore`: a log in object storage."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import click

import virta
from virta.cli.report import EXIT_PROBLEMS, json_option, print_report, progress
from virta.cli.units import show_count, show_size, show_time

# The store's credentials are never arguments: those are seen by every user of the machine.
CREDENTIALS = (
    "Credentials come from the store's own environment variables, such as AWS_ACCESS_KEY_ID."
)


@click.command(epilog=CREDENTIALS)
@click.argument("path", metavar="LOG")
@click.argument("url", metavar="URL")
@click.option("--follow", is_flag=True, help="Go on shipping what is appended, until interrupted.")
@click.option(
    "--interval-ms",
    type=click.IntRange(10, 3_600_000),
    default=1000,
    show_default=True,
    help="With --follow: upload new records this often.",
)
@json_option
def ship(path: str, url: str, *, follow: bool, interval_ms: int, as_json: bool) -> None:
    """Upload a log to object storage: s3://BUCKET/PREFIX, gs://…, az://… or file:///DIR."""
    from virta.tier import Shipper, TierStore

    stop = threading.Event()
    with virta.open(path, create=False) as source, Shipper(source, TierStore(url)) as shipper:
        done = shipper.ship()
        if follow:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
            click.echo(f"shipping {path} to {url}; interrupt to stop", err=True)
            shipper.run(stop, interval_s=interval_ms / 1000)
        else:
            shipper.collect_garbage()
        members: dict[str, Any] = {
            "url": url,
            "segments": done.segments,
            "bytes": done.bytes,
            "next_offset": shipper.shipped,
        }
    text = (
        f"{url} has the log up to offset {members['next_offset']};"
        f" uploaded {show_count(done.segments, 'sealed segment')}, {show_size(done.bytes)}"
    )
    print_report(members, [text], as_json=as_json)


@click.command(epilog=CREDENTIALS)
@click.argument("url", metavar="URL")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@json_option
def restore(url: str, directory: Path, *, as_json: bool) -> None:
    """Write a shipped log to a new directory. An interrupted restore is continued by the same command."""
    from virta.tier import restore_log

    with progress("restore", quiet=as_json) as bar:
        done = restore_log(url, directory, progress=bar)
    text = (
        f"{directory} has the log up to offset {done.next}:"
        f" {show_count(done.segments, 'segment')}, {show_size(done.bytes)}"
    )
    print_report({"path": str(directory), **done._asdict()}, [text], as_json=as_json)


def inspect_store(url: str, *, as_json: bool) -> None:
    """Show what a store has of a log."""
    from virta.tier import TierStore
    from virta.tier.manifest import find_manifest

    manifest = find_manifest(TierStore(url))
    tail = manifest.tail
    members: dict[str, Any] = {
        "url": url,
        "id": manifest.stream,
        "epoch": manifest.epoch,
        "manifest": manifest.number,
        "written": show_time(manifest.written),
        "first_offset": manifest.segments[0].base
        if manifest.segments
        else tail.base
        if tail
        else 0,
        "next_offset": manifest.next,
        "segments": len(manifest.segments),
        "bytes": sum(s.bytes for s in manifest.segments) + (tail.bytes if tail else 0),
        "tail_chunks": len(tail.chunks) if tail else 0,
    }
    lines = [
        f"store      {url}",
        f"id         {members['id']} (shipper's epoch {members['epoch']})",
        f"offsets    {members['first_offset']} to {members['next_offset']}",
        f"shipped    {members['written']} (manifest {members['manifest']})",
        (
            f"size       {show_size(members['bytes'])} in {show_count(len(manifest.segments), 'sealed segment')}"
            f" and {show_count(members['tail_chunks'], 'chunk')} of the active one"
        ),
    ]
    print_report(members, lines, as_json=as_json)


def verify_store(ctx: click.Context, url: str, *, as_json: bool) -> None:
    """Check the objects of a store. Exit code 1 when something is missing or damaged."""
    from virta.tier import verify_store as verify

    with progress("verify", quiet=as_json) as bar:
        report = verify(url, progress=bar)
    verdict = show_count(len(report.problems), "problem") if report.problems else "no damage"
    lines = [
        *report.problems,
        (
            f"{verdict} in {show_count(report.objects, 'object')}, {show_size(report.bytes)}:"
            f" the log up to offset {report.manifest.next}"
        ),
    ]
    members: dict[str, Any] = {
        "url": url,
        "objects": report.objects,
        "bytes": report.bytes,
        "next_offset": report.manifest.next,
        "problems": report.problems,
    }
    print_report(members, lines, as_json=as_json)
    if report.problems:
        ctx.exit(EXIT_PROBLEMS)


COMMANDS = (ship, restore)
