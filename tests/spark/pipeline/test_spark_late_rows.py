"""Late rows, repeats and rows without a time: in the dead letters with the reason, each once, the rest counted."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("pyspark")

from spark_logs import read_log

import virta
from virta.log.limits import SEGMENT_BYTES_MIN
from virta.spark.pipeline.builder import read_range
from virta.spark.pipeline.file import loads
from virta.spark.pipeline.late_rows import ACCOUNT, DroppedRows
from virta.spark.pipeline.runner import find_unsearched, run
from virta.spark.pipeline.status import read_status, run_status, write_status
from virta.spark.versions import HAS_READ_LIMITS

pytestmark = pytest.mark.slow

START = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = 25
LATE = timedelta(minutes=5)
TEXT = """
[pipeline]
name = "dropped"

[source]
log = "log"
max_records_per_trigger = 25

{steps}

[[sink]]
kind = "channel"
log = "out"
topic = "out"

[dead_letter]
kind = "{dead}"
{place}
"""
WINDOWS = """
[aggregate]
window = "2 minutes"
{slide}
time = "time"
late = "5 minutes"
aggregates = { rows = "count(*)" }
"""
DEDUPE = """
[dedupe]
within = "5 minutes"
time = "time"
repeats = "dead-letter"
"""


def make_events(count, seed, first=0):
    """Events whose times run ahead, but some come far behind, some again, and some have no time."""
    rng = random.Random(seed)
    events = []
    for i in range(first, first + count):
        at = START + timedelta(seconds=20 * i)
        if rng.random() < 0.2:
            at -= timedelta(minutes=rng.uniform(0, 40))
        made = {"specversion": "1.0", "id": str(i), "source": "/s", "type": "t", "data": {"n": i}}
        if rng.random() > 0.05:
            made["time"] = at.isoformat()
        if events and rng.random() < 0.15:
            made = rng.choice(events[-30:])
        events.append(made)
    return events


def append(path, events):
    with virta.open(path, segment_bytes=SEGMENT_BYTES_MIN) as log:
        for made in events:
            log.append("t", "", json.dumps(made).encode())


def fill(path, count, seed, first=0):
    events = make_events(count, seed, first)
    append(path, events)
    return events


def run_in_batches(spark, pipeline, path, events):
    """
    Run a pipeline over events in micro-batches of BATCH; return the number of events and the status of each run.

    Spark 4.1 reads all there is in one micro-batch, so there each of them is a run.
    """
    size = len(events) if HAS_READ_LIMITS else BATCH
    runs = []
    for first in range(0, len(events), size):
        append(path, events[first : first + size])
        runs.append((size, run(spark, pipeline)))
    return runs


def micro_batches(runs):
    """Ranges of offsets; a run ends with an empty micro-batch, which only moves the watermark."""
    first = 0
    for count in runs:
        size = BATCH if HAS_READ_LIMITS else count
        for begin in range(first, first + count, size):
            yield range(begin, min(begin + size, first + count))
        first += count
        yield range(0)


def expected(events, over, runs, *, dedupe=False):
    """What Spark promises, in plain Python: offsets that are late, repeats or without a time."""
    late, repeats, untimed, state = set(), set(), set(), {}
    watermarks, newest = [], None
    for offsets in micro_batches(runs):
        watermarks.append(START - timedelta(days=9000) if newest is None else newest - LATE)
        judge = watermarks[-2] if len(watermarks) > 1 else watermarks[0]
        for offset in offsets:
            made = events[offset]
            if "time" not in made:
                untimed.add(offset)
                continue
            at = datetime.fromisoformat(made["time"])
            newest = at if newest is None else max(newest, at)
            if over(at) <= judge:
                late.add(offset)
            elif dedupe and made["id"] in state:
                repeats.add(offset)
            elif dedupe:
                state[made["id"]] = at + LATE
        state = {k: end for k, end in state.items() if end > watermarks[-1]}
    return late, repeats, untimed


def window_end(at, slide=timedelta(minutes=2)):
    since = at - datetime(1970, 1, 1, tzinfo=UTC)
    return at - since % slide + timedelta(minutes=2)


def retain(path, *, dry_run=False):
    """Drop what every consumer has read; return their positions and the log's first offset."""
    with virta.open(path) as log:
        positions = {consumer.name: consumer.position for consumer in log.consumers()}
        log.retain(consumed=True, dry_run=dry_run)
        return positions, log.first_offset


def kinds(letters):
    found = {}
    for letter in letters:
        kind = letter["reason"].partition(":")[0].partition(" of ")[0]
        found.setdefault(kind, []).append(letter["offset"])
    return found


def test_late_rows_of_windows(spark, tmp_path, monkeypatch):
    """
    Late rows and rows without a time are dead letters, once, also after crashes; windows have all the others.
    Until then retention keeps them, though the query has read them.
    """
    text = TEXT.format(
        steps=WINDOWS.replace("{slide}", ""), dead="channel", place='log = "dead"\ntopic = "dead"'
    )
    pipeline = loads(text, directory=str(tmp_path))
    events = make_events(100, seed=3)
    with monkeypatch.context() as patch:  # killed before it has processed what it dropped
        patch.setattr(DroppedRows, "catch_up", lambda *_: 0)
        runs = run_in_batches(spark, pipeline, tmp_path / "log", events)
    assert retain(tmp_path / "log") == (
        {"pipeline.dropped": 100, "dead-letters.dropped": 0},
        0,
    )
    # And before the report of the last micro-batch: where the next one begins is not in the account.
    account = tmp_path / ".virta" / "pipelines" / "dropped" / ACCOUNT
    kept = json.loads(account.read_text())
    del kept["starts"][max(kept["starts"], key=int)]
    account.write_text(json.dumps(kept))
    events += fill(tmp_path / "log", 50, seed=4, first=100)
    status = run(spark, pipeline)
    positions, _ = retain(tmp_path / "log", dry_run=True)
    assert positions == {"pipeline.dropped": 150, "dead-letters.dropped": 150}
    account.write_text(json.dumps(kept))  # killed before the account was stored: all is found again
    run(spark, pipeline)

    late, _, untimed = expected(events, window_end, [*(count for count, _ in runs), 50])
    found = kinds(json.loads(r.value)["data"] for r in read_log(tmp_path / "dead"))

    assert sorted(found["too late"]) == sorted(late)
    assert sorted(found["no time"]) == sorted(untimed)
    assert len(late) > 8
    totals = status["queries"]["query"]
    assert (totals["late"], totals["dead"]) == (len(late), len(late) + len(untimed))
    assert kept["batch"] == -1
    find_unsearched(pipeline, "pipeline.dropped", None)  # a run without dead letters
    positions, first = retain(tmp_path / "log")
    assert positions == {"pipeline.dropped": 150}
    assert first > 100


def is_idle_before(spark, number):
    """Whether the query has reported that there was nothing to do, with this micro-batch to come."""
    (query,) = (query for query in spark.streams.active if query.name == "dropped.query")
    return any(
        report["batchId"] == number and "addBatch" not in report["durationMs"]
        for report in query.recentProgress
    )


def test_rows_after_an_idle_time(spark, tmp_path):
    """
    An idle query reports under the number of the micro-batch to come: that one is counted all the same, its late
    rows are dead letters; and so are those that a killed run has left, though nothing more comes.
    """
    text = TEXT.format(
        steps=WINDOWS.replace("{slide}", ""), dead="channel", place='log = "dead"\ntopic = "dead"'
    )
    text = text.replace('name = "dropped"', 'name = "dropped"\ntrigger = "50 milliseconds"')
    pipeline = loads(text, directory=str(tmp_path))
    fill(tmp_path / "log", BATCH, seed=3, first=100)
    reports, filled = [], []

    def stopping():
        if not filled:
            # After the rows, and after the empty micro-batch that moves the watermark.
            if is_idle_before(spark, 2):
                filled.extend(fill(tmp_path / "log", BATCH, seed=4))  # long ago
            return False
        return reports[-1]["queries"]["query"]["offset"] == 2 * BATCH

    spark.conf.set("spark.sql.streaming.noDataProgressEventInterval", "300")
    try:
        status = run(spark, pipeline, on_progress=reports.append, stopping=stopping)
    finally:
        spark.conf.unset("spark.sql.streaming.noDataProgressEventInterval")
    fill(tmp_path / "log", BATCH, seed=5)
    with pytest.MonkeyPatch.context() as patch:  # killed before it has processed what it dropped
        patch.setattr(DroppedRows, "catch_up", lambda *_: 0)
        now = replace(pipeline, trigger="available-now")
        run(spark, now)
    found = late_offsets(tmp_path)
    run(spark, now)

    assert status["queries"]["query"]["rows"] == 2 * BATCH
    timed = [number for number, made in enumerate(filled) if "time" in made]
    assert found == [BATCH + number for number in timed]
    assert len(late_offsets(tmp_path)) > len(found)


def test_reports_do_not_wait_for_dropped_rows(spark, tmp_path, monkeypatch):
    """After a crash the status is that of the new run at once, while it still finds what the last one dropped."""
    place = 'log = "dead"\ntopic = "dead"'
    steps = WINDOWS.replace("{slide}", "")
    text = TEXT.format(steps=steps, dead="channel", place=place)
    pipeline = loads(text, directory=str(tmp_path))
    fill(tmp_path / "log", BATCH, seed=3)
    lost = {**run_status(pipeline, "running", None, {}), "pid": 1, "began": 1}
    write_status(pipeline, lost)
    states, has_rows = [], threading.Event()

    def report(status):
        states.append(read_status(pipeline)["state"])
        if status["queries"]["query"]["rows"] == BATCH:
            has_rows.set()

    def catch_up(self, stopping):
        assert has_rows.wait(60), "the reports wait for the dropped rows"
        return original(self, stopping)

    original = DroppedRows.catch_up
    monkeypatch.setattr(DroppedRows, "catch_up", catch_up)
    assert read_status(pipeline)["state"] == "lost"

    status = run(spark, pipeline, on_progress=report)

    assert (states[0], status["state"]) == ("running", "finished")


def late_offsets(path):
    letters = (json.loads(record.value)["data"] for record in read_log(path / "dead"))
    return sorted(kinds(letters).get("too late", []))


def test_repeats_and_late_rows_of_a_deduplication(spark, tmp_path):
    """A pipeline that asks for it has repeats among its dead letters, in Parquet; what goes on is the rest."""
    text = TEXT.format(steps=DEDUPE, dead="parquet", place='path = "dead"')
    pipeline = loads(text, directory=str(tmp_path))
    events = make_events(100, seed=6)

    runs = run_in_batches(spark, pipeline, tmp_path / "log", events)

    sizes = [count for count, _ in runs]
    late, repeats, untimed = expected(events, lambda at: at, sizes, dedupe=True)
    rows = spark.read.parquet(str(tmp_path / "dead")).collect()
    found = kinds({"reason": r.reason, "offset": r.offset} for r in rows)
    # Of copies within one micro-batch Spark may keep another than the first: they are equal.
    assert sorted(found["too late"]) == sorted(late)
    assert sorted(found["no time"]) == sorted(untimed)
    assert sorted(found["a repeat"]) == sorted(repeats)
    assert {r.kind for r in rows} == {"invalid", "late", "repeat"}
    passed = [json.loads(r.value)["id"] for r in read_log(tmp_path / "out")]
    kept = [events[i]["id"] for i in range(len(events)) if i not in late | repeats | untimed]
    assert sorted(passed) == sorted(kept)
    assert sum(status["queries"]["query"]["repeats"] for _, status in runs) == len(repeats) > 5


@pytest.mark.parametrize("text", ['slide = "1 minute"', 'session = "3 minutes"'])
def test_the_moment_a_row_is_over(spark, tmp_path, text):
    """For sliding windows the end of the newest one, for sessions the gap after the row."""
    from virta.spark.pipeline.late_rows import deadline

    steps = WINDOWS.replace("{slide}", text)
    if "session" in text:
        steps = steps.replace('window = "2 minutes"', 'by = ["type"]')
    place = 'log = "dead"\ntopic = "dead"'
    pipeline = loads(TEXT.format(steps=steps, dead="channel", place=place), directory=str(tmp_path))
    (made,) = fill(tmp_path / "log", 1, seed=1)
    at = datetime.fromisoformat(made["time"])

    row = read_range(spark, pipeline, 0, 1).select(deadline(pipeline).alias("over")).first()

    over = datetime.fromtimestamp(row.over / 1e6, UTC)
    slid = window_end(at, timedelta(minutes=1))
    assert over == (at + timedelta(minutes=3) if "session" in text else slid)
