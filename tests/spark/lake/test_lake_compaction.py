"""Compaction without a JVM: every sealed record once in tables of each format, also after kills and beside gaps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq
from click.testing import CliRunner
from spark_logs import fill, read_log

import virta
from virta.cli import main
from virta.cli.report import EXIT_FAILED
from virta.errors import LogGapError, VirtaError
from virta.spark.lake import compaction
from virta.spark.lake.compaction import compact
from virta.spark.lake.directory import EVENTS, Lake, LakeError, only_writer, ranges, table_name
from virta.spark.lake.formats import checked_end, format_of, local_path

FORMATS = ("parquet", "delta", "iceberg")
NEEDS = {"delta": "deltalake", "iceberg": "pyiceberg"}
TYPES = {"orders": "n long, price decimal(6,2), tags array<string>", "a/b=c d": "user string"}


@pytest.fixture(params=FORMATS)
def form(request):
    if request.param in NEEDS:
        pytest.importorskip(NEEDS[request.param])
    return request.param


@pytest.fixture
def log(tmp_path):
    path = str(tmp_path / "log")
    fill(path, 600, topics=("orders", "users", "a/b=c d", "1"))
    with virta.open(path) as opened:
        opened.append("", "", b"no topic, no event")
    return path


def stored(lake):
    """Return the rows of a lake's tables up to its end, read by pyarrow alone: (offset, topic, key, value)."""
    found = Lake.load(lake)
    columns = ["offset", "topic", "key", "value"]
    rows = []
    for table in found.table_names():
        for file in format_of(found).files(table):
            rows += [
                tuple(row[c] for c in columns)
                for row in pq.ParquetFile(file).read(columns).to_pylist()
            ]
    rows = [row for row in rows if row[0] < found.next]
    return sorted(rows)


def sealed(log, lake):
    end = Lake.load(lake).next
    return [
        (r.offset, str(r.topic), bytes(r.key), r.value) for r in read_log(log) if r.offset < end
    ]


def test_every_sealed_record_is_in_one_table(log, tmp_path, form):
    """Compaction in steps: each record once, typed topics in tables of their own, nothing to do is no change."""
    lake = str(tmp_path / "lake")

    first = compact(log, lake, format=form, types=TYPES)
    assert first.first == 0
    assert 0 < first.records == first.next < 601
    assert stored(lake) == sealed(log, lake)

    again = compact(log, lake)
    assert (again.first, again.next, again.records, again.files) == (first.next, first.next, 0, 0)

    fill(log, 400, seed=5, first=600, topics=("orders", "users", "new"))
    second = compact(log, lake, types=TYPES)
    assert second.first == first.next
    assert stored(lake) == sealed(log, lake)
    assert Lake.load(lake).next == second.next
    assert not list(Path(lake).glob("_draft-*"))


def test_typed_columns_and_their_rest(log, tmp_path, form):
    """A typed table has the data as columns, exactly; what does not fit is in `rescued`, the event in `value`."""
    with virta.open(log, segment_bytes=65536) as opened:
        opened.append(
            "orders", "", b'{"id": "x", "source": "/s", "data": {"n": "many", "price": 5}}'
        )
    fill(log, 300, seed=2)
    lake = str(tmp_path / "lake")
    compact(log, lake, format=form, types=TYPES)
    found = Lake.load(lake)

    rows = []
    for file in format_of(found).files(table_name("orders")):
        rows += pq.ParquetFile(file).read().to_pylist()
    others = [pq.read_schema(file) for file in format_of(found).files(EVENTS)]

    assert {row["topic"] for row in rows} == {"orders"}
    for row in rows:
        event = json.loads(row["value"])
        if event["id"] == "x":
            assert row["data"]["n"] is None
            assert json.loads(row["rescued"]) == event["data"]
        else:
            assert row["data"]["n"] == event["data"]["n"]
            assert float(row["data"]["price"]) == event["data"]["price"]
            assert row["data"]["tags"] == event["data"]["tags"]
            assert row["rescued"] is None
            assert row["type"] == event["type"]
    assert all(
        str(schema.field("data").type).startswith("struct" if form == "parquet" else "string")
        for schema in others
    )
    assert all("rescued" not in schema.names for schema in others)


def test_files_are_bounded(log, tmp_path, form):
    """A file ends when it has its size: many files a day instead of one."""
    few, many = str(tmp_path / "few"), str(tmp_path / "many")
    one = compact(log, few, format=form)

    split = compact_in_small_groups(log, many, form)

    assert split.files > one.files == 1
    assert stored(many) == stored(few)


def compact_in_small_groups(log, lake, form):
    from virta.spark.lake import parquet

    before = parquet.ROW_GROUP_BYTES
    parquet.ROW_GROUP_BYTES = 20_000
    try:
        return compact(log, lake, format=form, file_bytes_max=5_000)
    finally:
        parquet.ROW_GROUP_BYTES = before


def test_days_are_directories(tmp_path, form, monkeypatch):
    """Records of several days are in files of their own, also when they alternate."""
    log, lake = str(tmp_path / "log"), str(tmp_path / "lake")
    fill(log, 300)
    original = compaction.records

    def spread(*args):
        for batch in original(*args):
            times = batch.column("timestamp").cast("int64").to_pylist()
            moved = [t + (i // 50 % 2) * 86_400_000_000 for i, t in enumerate(times)]
            index = batch.schema.get_field_index("timestamp")
            import pyarrow as pa

            column = pa.array(moved, pa.int64()).cast(batch.column(index).type)
            yield batch.set_column(index, batch.schema.field(index), column)

    monkeypatch.setattr(compaction, "records", spread)
    compact(log, lake, format=form)
    files = format_of(Lake.load(lake)).files(EVENTS)

    assert len({Path(file).parent.name for file in files}) == 2
    assert stored(lake) == sealed(log, lake)


KILLED = """
import os, sys
from virta.spark.lake import compaction, formats, directory
log, lake, form, limit = *sys.argv[1:4], int(sys.argv[4])
steps = 0
def counted(function):
    def step(*args, **kwargs):
        global steps
        steps += 1
        if steps == limit:
            os.kill(os.getpid(), 9)
        return function(*args, **kwargs)
    return step
for name in ("write_whole", "make_directory", "sync_file", "sync_directory"):
    setattr(compaction.virta.files, name, counted(getattr(compaction.virta.files, name)))
formats.move_files = counted(formats.move_files)
formats.sync_newest = counted(formats.sync_newest)
compaction.compact(log, lake, format=form, types={"orders": "n long", "users": "user string"})
"""


@pytest.mark.slow
def test_a_killed_compaction_is_finished_by_the_next(tmp_path, form):
    """Killed with SIGKILL between any two steps, and more sealed meanwhile: every record once."""
    log = str(tmp_path / "log")
    fill(log, 300, topics=("orders", "users", "rest"))
    lake = str(tmp_path / "lake")
    steps = range(6, 60, 9 if form == "parquet" else 12)
    killed = 0
    for number, limit in enumerate(steps):
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", KILLED, log, lake, form, str(limit)], check=False,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        killed += result.returncode == -9
        fill(log, 150, seed=number, first=1000 * number, topics=("orders", "users", "rest"))
    compact(log, lake, format=form)

    assert killed >= 2
    assert stored(lake) == sealed(log, lake)
    assert not list(Path(lake).glob("_draft-*"))


def test_retention_keeps_what_is_not_in_the_lake(log, tmp_path, form):
    """`virta log retain --in-lake` drops sealed segments only up to the lake's end."""
    lake = str(tmp_path / "lake")
    run = CliRunner().invoke
    everything = [(r.offset, str(r.topic), bytes(r.key), r.value) for r in read_log(log)]

    missing = run(main, ["log", "retain", log, "--max-bytes", "1", "--in-lake", lake])
    assert missing.exit_code == EXIT_FAILED
    assert "there is no lake" in missing.output

    end = compact(log, lake, format=form, types=TYPES).next
    fill(log, 600, seed=3, first=601)
    everything = [(r.offset, str(r.topic), bytes(r.key), r.value) for r in read_log(log)]
    done = run(main, ["log", "retain", log, "--max-bytes", "1", "--in-lake", lake, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["first_offset"] == end
    left = [(r.offset, str(r.topic), bytes(r.key), r.value) for r in read_log(log)]
    assert stored(lake) + left == everything
    assert checked_end(lake, Lake.load(lake).log, end) == end

    with pytest.raises(LakeError, match="is the lake of log"):
        checked_end(lake, "another", 0)


def test_a_lake_that_lost_a_table_keeps_the_log(log, tmp_path, form):
    """Retention trusts tables, not lake.json: a table that is gone is an error."""
    lake = tmp_path / "lake"
    compact(log, str(lake), format=form)
    log_id = Lake.load(lake).log
    if form == "parquet":
        shutil.rmtree(ranges(lake)[0][2])
        assert checked_end(lake, log_id, 0) == 0
        return
    if form == "delta":
        shutil.rmtree(lake / EVENTS)
    else:
        (lake / "catalog.db").unlink()

    with pytest.raises(LakeError, match=r"the table events .* is missing: restore it"):
        checked_end(lake, log_id, 0)


def test_a_lake_that_begins_late_keeps_the_log(log, tmp_path):
    """Records before the lake's beginning are not dropped."""
    lake = tmp_path / "lake"
    (lake / f"range={100:020d}-{200:020d}").mkdir(parents=True)

    with pytest.raises(LakeError, match="begins at offset 100: it lacks those from 0 on"):
        checked_end(lake, "any", 0)


def test_what_does_not_fit_a_lake_is_refused(log, tmp_path):
    """Another log, another format, another type, an unknown format: each with its reason."""
    lake, other = str(tmp_path / "lake"), str(tmp_path / "other")
    fill(other, 300)
    compact(log, lake, types={"orders": "n long"})
    for path, options, reason in (
        (other, {}, "is the lake of log"),
        (log, {"format": "delta"}, "has format parquet"),
        (log, {"format": "csv"}, "expected parquet, delta, iceberg"),
        (log, {"types": {"orders": "n string"}}, "has another type"),
        (log, {"types": {"x": "n nothing"}}, "is none of"),
        (log, {"types": {f"t{i}": "n long" for i in range(1001)}}, "at most 1000"),
    ):
        with pytest.raises(LakeError, match=reason):
            compact(path, lake, **options)
    assert compact(log, lake, types={"orders": "n long"}).records == 0


def test_one_compaction_at_a_time(log, tmp_path):
    """A second compaction of the same lake is refused, not let loose on the first one's draft."""
    lake = tmp_path / "lake"

    with only_writer(lake), pytest.raises(LakeError, match="another compaction is writing"):
        compact(log, str(lake))


def test_gaps_are_named(tmp_path):
    """A lake that ends before the log begins, or has a hole, is an error that says where."""
    log, lake = str(tmp_path / "log"), tmp_path / "lake"
    fill(log, 600)
    with virta.open(log) as opened:
        opened.retain(max_bytes=1)
        first = opened.first_offset
    (lake / f"range={0:020d}-{10:020d}").mkdir(parents=True)

    with pytest.raises(LogGapError, match=f"offsets 10 to {first - 1}"):
        compact(log, str(lake))
    assert compact(log, str(lake), on_gap="skip").first == 10
    fill(log, 600)
    (lake / f"range={2000:020d}-{3000:020d}").mkdir()
    with pytest.raises(LakeError, match="are missing or doubled"):
        Lake.load(lake)


def test_unreadable_descriptions_are_named(tmp_path):
    """A damaged lake.json, or one of a newer version, is an error with the file's name."""
    for text, reason in (
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"version": 2, "format": "parquet", "more": 1}', "cannot be read"),
        ('{"version": 9, "format": "parquet"}', "has version 9"),
        ('{"version": 2, "format": "csv"}', "format 'csv'"),
    ):
        (tmp_path / "lake.json").write_text(text)
        with pytest.raises(LakeError, match=reason):
            Lake.load(tmp_path)


def test_a_missing_library_is_named(log, tmp_path, monkeypatch):
    """Without deltalake or pyiceberg the error says what to install."""
    for form, module in NEEDS.items():
        for name in [name for name in sys.modules if name.split(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(VirtaError, match=f"virta\\[{form}\\]"):
            compact(log, str(tmp_path / form), format=form)


def test_local_paths():
    """Table libraries give URIs or paths; Spark gets paths."""
    assert local_path("file:///a%20b/c.parquet") == "/a b/c.parquet"
    assert local_path("/a b/c.parquet") == "/a b/c.parquet"


def test_the_command(log, tmp_path):
    """`virta lake compact`: declared and inferred types, a report, errors with exit code 1 and 2."""
    lake = str(tmp_path / "lake")
    run = CliRunner().invoke
    made = run(
        main,
        [
            "lake",
            "compact",
            log,
            lake,
            "--schema",
            "users=user STRING",
            "--infer",
            "orders",
            "--json",
        ],
    )
    assert made.exit_code == 0, made.output
    report = json.loads(made.output)
    assert report["records"] == report["next"] > 0
    assert report["files"] == 3
    assert set(Lake.load(lake).types) == {"users", "orders"}

    again = run(main, ["lake", "compact", log, lake, "--infer", "orders"])
    assert "nothing to do" in again.output
    fill(log, 300, seed=8)
    more = run(main, ["lake", "compact", log, lake, "--infer", "orders"])
    assert "records" in more.output
    assert "files" in more.output
    wrong = run(main, ["lake", "compact", log, lake, "--schema", "users"])
    assert wrong.exit_code == 2
    assert "expected TOPIC=TYPE" in wrong.output
    refused = run(main, ["lake", "compact", log, lake, "--format", "delta"])
    assert refused.exit_code == 1
    assert "has format parquet" in refused.output
