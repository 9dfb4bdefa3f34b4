"""
Row tables in the process: bytes a row and a membership, start from the table file, passes, live steps.

All times are processor times of this one thread: other work on the machine counts less.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import virta
from views_workload import BATCH, CHANNEL, fill, query, random_event, resident
from virta.event.row_changes import KeyRule
from virta.filters import parse
from virta.views.changes import read_changes
from virta.views.limits import ViewLimits
from virta.views.tables.passes import MembershipPass, ResumePass, reader_of
from virta.views.tables.table_file import open_table, save_table
from virta.views.view import View, ViewFilter, deliver_all

if TYPE_CHECKING:
    from pathlib import Path

STEP_EVENTS = 40_000


def measure_table(directory: Path, rows: int, views: int) -> None:
    with virta.open(directory / "table") as log:
        fill(log, rows, views)
        table = measure_start(log, directory, rows)
        made = measure_pass(log, table, views)
        measure_steps(table, rows, views)
        measure_resume(log, table, made)


def measure_start(log, directory: Path, rows: int):
    limits = ViewLimits(view_cache_bytes_max=0)
    gc.collect()
    before = resident()
    began = time.process_time()
    table = open_table(log, CHANNEL, KeyRule(), limits=limits)
    rebuilt = time.process_time() - began
    used = (resident() - before) / rows
    print(f"{rows:,} rows: {used:.0f} bytes a row, of them 28 its touch in the ring; no values")
    save_table(log, table, directory / "views")
    size = sum(path.stat().st_size for path in (directory / "views").iterdir())
    began = time.process_time()
    open_table(log, CHANNEL, KeyRule(), directory=directory / "views", limits=limits)
    loaded = time.process_time() - began
    print(
        f"start: rebuild {rebuilt:.2f} s CPU, table file of {size / 1e6:.0f} MB {loaded:.2f} s CPU: "
        f"{rebuilt / loaded:.1f} times as fast"
    )
    return table


def measure_pass(log, table, views: int) -> list[View]:
    gc.collect()
    before, began = resident(), time.process_time()
    made = [View(table, ViewFilter(parse(query(n)))) for n in range(views)]
    for view in made:
        table.index.add(view)
    seconds, used = time.process_time() - began, resident() - before
    print(f"{views:,} views: {used / views:.0f} bytes and {1e6 * seconds / views:.0f} µs each")
    before, began = resident(), time.process_time()
    longest = 0.0
    work = MembershipPass(table, made)
    work.prepare()
    for piece in work.pieces():
        piece.match(reader_of(log, CHANNEL))
        at = time.process_time()
        for _ in work.steps(piece):
            longest = max(longest, time.process_time() - at)
            at = time.process_time()
    work.end()
    seconds = time.process_time() - began
    members = sum(view.count for view in made)
    used = max(0, resident() - before)
    print(
        f"pass over all rows for all views: {seconds:.2f} s CPU, longest step in the event loop {1000 * longest:.1f} ms; "
        f"{members:,} memberships, {used / max(1, members):.0f} bytes each"
    )
    return made


def measure_steps(table, rows: int, views: int) -> None:
    values = [random_event(n, views, rows) for n in range(STEP_EVENTS)]
    position = table.position
    began = time.process_time()
    for start in range(0, len(values), BATCH):
        changes = read_changes(values[start : start + BATCH], position, table.rule)
        position += BATCH
        deliver_all(table.apply(changes, position), 0.0)
    seconds = time.process_time() - began
    print(f"live step alone, nobody subscribed: {len(values) / seconds:,.0f} events/s")


def measure_resume(log, table, made: list[View]) -> None:
    """Resume of a consumer for every view, from before the last steps."""
    position = table.position - STEP_EVENTS
    began = time.process_time()
    resume = ResumePass(table, [(view, position) for view in made])
    resume.run(reader_of(log, CHANNEL))
    keys = sum(len(resume.touched(view, position) or {}) for view in made)
    seconds = time.process_time() - began
    print(
        f"resume of {len(made):,} consumers, {STEP_EVENTS:,} touches since: {seconds:.2f} s CPU, {keys:,} keys"
    )
