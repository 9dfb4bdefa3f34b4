"""Every refusal is a specific error that says what was wrong, the value, and what would be right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid

import pytest

import virta
from virta import errors


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log") as handle:
        yield handle


@pytest.mark.parametrize(
    ("record", "error", "code", "words"),
    [
        (("t" * 1025, "", b""), errors.LogLimitError, "log_topic_too_large", "1025 bytes.*1024"),
        (("t", "k" * 1025, b""), errors.LogLimitError, "log_key_too_large", "1025 bytes.*1024"),
        (
            ("t", "", bytes(10485761)),
            errors.LogLimitError,
            "log_value_too_large",
            "10485761.*10485760",
        ),
        (("t", "", "text"), errors.LogTypeError, "log_type", "value must be bytes, got str 'text'"),
        ((7, "", b""), errors.LogTypeError, "log_type", "topic must be str or bytes, got int 7"),
        (
            ("t", None, b""),
            errors.LogTypeError,
            "log_type",
            "key must be str or bytes, got NoneType",
        ),
        (
            ("t", "", 7),
            errors.LogTypeError,
            "log_type",
            "bytes, or a dict or list for JSON, got int 7",
        ),
        (("t", "", {"a": {1}}), errors.LogTypeError, "log_type", "JSON: .*set is not"),
        (("t", "", [float("nan")]), errors.LogTypeError, "log_type", "cannot be written as JSON"),
        (("t", "", ["\ud800"]), errors.LogTypeError, "log_type", "cannot be written as JSON"),
        ((7, "", {}), errors.LogTypeError, "log_type", "topic must be str or bytes, got int 7"),
        (
            ("t", "", ["x" * 10485761]),
            errors.LogLimitError,
            "log_value_too_large",
            "10485765.*10485760",
        ),
        (("\x03", "", b""), errors.LogTypeError, "log_type", "the log's own"),
        (("\ud800", "", b""), errors.LogTypeError, "log_type", "UTF-8"),
    ],
)
def test_bad_records(log, record, error, code, words):
    """Nothing is written, and the message names field, value and limit."""
    with pytest.raises(error, match=words) as caught:
        log.append(*record)
    assert caught.value.code == code
    assert log.next_offset == 0


def test_dicts_and_lists_are_written_as_json(log):
    """Alone and among bytes in a batch; what is written is the same for every reader."""
    log.append("orders", "42", {"total": 7, "name": "J\u00f6rg"})
    log.append_many([("orders", "a", b"raw"), ("orders", "b", [1, {"x": None}]), ("o", "c", {})])

    assert [bytes(record.value) for record in log.read()] == [
        '{"total":7,"name":"J\u00f6rg"}'.encode(),
        b"raw",
        b'[1,{"x":null}]',
        b"{}",
    ]


def test_a_value_that_is_no_json_spoils_the_batch(log):
    """All or none, also for values that are converted; the message has the record's index."""
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(errors.LogTypeError, match=r"record 1 of 2: value .* JSON"):
        log.append_many([("t", "", {"fine": 1}), ("t", "", deep)])
    assert log.next_offset == 0


def test_a_bad_record_in_a_batch_spoils_the_batch(log):
    """All or none; the message has the record's index."""
    with pytest.raises(errors.LogTypeError, match="record 1 of 3"):
        log.append_many([("t", "", b"1"), ("t", "", None), ("t", "", b"3")])
    with pytest.raises(errors.LogTypeError, match=r"a record is \(topic, key, value\)"):
        log.append_many(["nonsense"])
    with pytest.raises(errors.LogLimitError, match="at least one"):
        log.append_many([])
    with pytest.raises(errors.LogLimitError, match="several batches"):
        log.append_many([("t", "", bytes(10 << 20))] * 7)
    assert log.next_offset == 0
    assert list(log.read()) == []


def test_bad_options(log, tmp_path):
    """Options outside their range are refused with the range."""
    with pytest.raises(errors.LogTypeError, match="none, interval, group, fsync"):
        log.append("t", "", b"", durability="always")
    with pytest.raises(errors.LogTypeError, match="durability"):
        virta.open(tmp_path / "x", durability="maybe")
    with pytest.raises(errors.LogLimitError, match="segment_bytes is 1;"):
        virta.open(tmp_path / "x", segment_bytes=1)
    with pytest.raises(errors.LogTypeError, match="on_gap"):
        log.read(on_gap="ignore")
    for start in (-1, 1.5, None, True):
        with pytest.raises(errors.LogTypeError, match="a start must be"):
            log.read(start=start)
    with pytest.raises(errors.ConsumerError, match="no consumer named 'unknown'"):
        log.read(start="unknown")
    with pytest.raises(errors.LogTypeError, match="producer must be"):
        log.append_many([("t", "", b"")], producer=(1, 0))
    with pytest.raises(errors.LogTypeError, match="must not be negative"):
        log.retain(max_bytes=-1)
    with pytest.raises(errors.LogTypeError, match="a topic must be"):
        log.read(topics=[7])
    for name in ("", ".hidden", "a/b", "x" * 129, 7):
        with pytest.raises(errors.ConsumerError, match="letters, digits"):
            log.consumer(name)
    with pytest.raises(errors.ConsumerError, match="partitions must be"):
        log.consumer("c", partitions=0)


def test_a_closed_log(log):
    """Every call on a closed log says that it is closed."""
    reader = log.read(follow=True)
    log.close()
    for call in (
        lambda: log.append("t", "", b""),
        log.read,
        lambda: log.next_offset,
        log.segments,
        lambda: log.consumer("c"),
        lambda: log.retain(max_bytes=0),
        lambda: next(reader),
        log.flush,
    ):
        with pytest.raises(errors.LogClosedError, match="closed"):
            call()


def test_no_log_here(tmp_path):
    """Opening for reading creates nothing."""
    with pytest.raises(errors.LogNotFoundError, match="no META file"):
        virta.open(tmp_path / "none", read_only=True)
    with pytest.raises(errors.LogNotFoundError):
        virta.open(tmp_path / "none", create=False)
    assert not (tmp_path / "none").exists()


def test_a_foreign_directory_is_left_alone(tmp_path):
    """A directory with other things in it does not become a log by mistake."""
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(errors.LogFormatError, match=r"not a log and not empty.*thesis\.txt"):
        virta.open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(errors.LogFormatError, match="is a file"):
        virta.open(tmp_path / "thesis.txt")


def test_a_newer_format_is_refused(log):
    """A log of a later Virta is neither read nor written."""
    log.close()
    meta = log.path / "META"
    content = json.loads(meta.read_text())
    for change in ({"format": 2}, {"features": ["compressed"]}):
        meta.write_text(json.dumps(content | change))
        with pytest.raises(errors.LogFormatError, match="Virta") as caught:
            virta.open(log.path)
        assert caught.value.code == "log_format_newer"
    meta.write_text("{}")
    with pytest.raises(errors.LogFormatError, match="META"):
        virta.open(log.path)


@pytest.mark.parametrize(
    "change",
    [
        *(
            f'"segment_bytes": {n}'
            for n in ("1e999", "-1e999", "NaN", "-5", "0", "true", "1.5", '"4096"')
        ),
        *(
            f'"segment_bytes": {n}'
            for n in ("1" + "0" * 30, "9" * 5000, "null", "[]", "[" * 60_000)
        ),
        *(f'"format": {n}' for n in ("1e999", "NaN", "true", "1.0", "[]", "{}")),
        *(f'"stream": {n}' for n in ("5", "null", "[[]]", "1e999")),
        *(f'"features": {n}' for n in ("5", "1e999", "true")),
    ],
    ids=lambda change: change[:30],
)
def test_absurd_numbers_in_meta_are_refused_in_words(log, change):
    """Numbers out of range and deep nesting raise LogFormatError, not OverflowError or RecursionError."""
    log.close()
    meta = log.path / "META"
    content = json.dumps({"format": 1, "stream": str(uuid.uuid4()), "segment_bytes": 4096})
    meta.write_text(f"{content[:-1]}, {change}}}")  # the last of two wins
    with pytest.raises(errors.LogFormatError, match="META"):
        virta.open(log.path)


@pytest.mark.parametrize("text", [b'{"offset": 1e999}', b'{"offset": -1}', b"[" * 4096, b"5", b"x"])
def test_a_pin_that_says_nothing_keeps_everything(text):
    """A damaged file of a living process must neither stop retention with a traceback nor lose records."""
    from virta.log.upkeep.retention import _pinned_offset

    assert _pinned_offset(text) == 0


def test_a_segment_of_a_newer_version_is_refused(log):
    """The version is in every segment too."""
    from virta.log.engine import kernel

    log.append("t", "", b"")
    log.close()
    (segment,) = log.path.glob("*.puro")
    data = bytearray(segment.read_bytes())
    data[5] = 3
    data[60:64] = kernel.crc32c(bytes(data[1:60])).to_bytes(4, "little")
    data[0] = kernel.crc8(bytes(data[1:64]))
    segment.write_bytes(data)
    with pytest.raises(errors.LogFormatError, match="segment version 3"):
        virta.open(log.path)


def test_a_deleted_segment_is_an_explicit_gap(tmp_path):
    """A reader whose next segment was deleted raises LogGapError with the missing offsets."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        for i in range(300):
            log.append("t", "", b"%d" % i + bytes(40))
        segments = log.segments()
        reader = log.read()
        next(reader)
        os.unlink(segments[1].path)
        with pytest.raises(errors.LogGapError, match="not there any more") as caught:
            list(reader)
        assert (caught.value.first, caught.value.next) == (segments[1].base, segments[1].next)
        skipped = [r.offset for r in log.read(on_gap="skip")]
        assert skipped == [*range(segments[0].next), *range(segments[2].base, 300)]
        assert [p.reason for p in log.verify().problems] == ["missing"]


READ_ONLY = """
import os, sys, virta, virta.errors, virta.log
os.setgid(65534); os.setuid(65534)
with virta.open(sys.argv[1], read_only=True) as log:
    assert [r.value for r in log.read()] == [b"v"], "cannot read"
    assert [r.value for r in log.read(follow=True, timeout=0.01)] == [b"v"], "cannot follow"
try:
    virta.open(sys.argv[1])
except virta.errors.LogReadOnlyError as exc:
    print(exc.code, exc)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become nobody")
def test_a_read_only_directory():
    """Who may not write gets a sentence that says how to read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = f"{folder}/log"
        with virta.open(path, mode=0o755) as log:
            log.append("t", "", b"v")
        out = subprocess.run(
            [sys.executable, "-c", READ_ONLY, path], capture_output=True, text=True, check=False
        )
    assert out.stdout.startswith("log_read_only"), out.stderr
    assert "read_only=True" in out.stdout
