"""Compressed logs: the same records, offsets and guarantees as plain ones, in fewer bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

import virta
from virta import errors
from virta.log.engine import kernel
from virta.log.format import codec, compression
from virta.log.format.directory import META, segment_bases
from virta.log.format.segment import FLAG_ZSTD, Segment

VALUE = b'{"customer": "somebody with a long name", "items": [1, 2, 3], "total": 12.5}'


def fill(log, batches, seed=0):
    rng = random.Random(seed)
    for n in range(batches):
        records = [
            (f"t{rng.randrange(5)}", f"k{rng.randrange(8)}", VALUE + b"%d" % n)
            for _ in range(rng.choice((1, 3, 20)))
        ]
        log.append_many(records, durability="none")


def contents(log, **options):
    return [(bytes(r.topic), bytes(r.key), r.value, r.offset) for r in log.read(**options)]


def without_times(path, **options):
    with virta.open(path, read_only=True) as log:
        return contents(log, **options)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log"


def test_a_compressed_log_has_the_same_records_in_fewer_bytes(path, tmp_path, either_kernel):
    """Written and read by either engine, over many segments, by offset and by topic."""
    with virta.open(path, compression="zstd", segment_bytes=8192) as log:
        fill(log, 150)
        small = log.bytes
        found = contents(log)
        for topic in ("t0", "t3"):
            assert contents(log, topics=topic) == [r for r in found if r[0] == topic.encode()]
        assert contents(log, start=100, end=200) == [r for r in found if 100 <= r[3] < 200]
        assert log.verify() == log.verify()._replace(problems=[], records=len(found))
    with virta.open(tmp_path / "plain", segment_bytes=8192) as log:
        fill(log, 150)
        assert contents(log) == found
        assert small < log.bytes / 3


def test_engines_read_what_the_other_one_wrote(path):
    """A process with VIRTA_PLAIN=1 reads a log that this one wrote."""
    with virta.open(path, compression="zstd") as log:
        fill(log, 10)
        expected = contents(log)
    code = (
        "import sys, virta\n"
        "log = virta.open(sys.argv[1], read_only=True)\n"
        "print([(bytes(r.topic), bytes(r.key), r.value, r.offset) for r in log.read()])"
    )
    for plain in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={"VIRTA_PLAIN": plain},
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.strip() == repr(expected)


def test_small_batches_and_noise_stay_plain(path):
    """A batch that compression does not make smaller is written as it is."""
    with virta.open(path, compression="zstd") as log:
        log.append("t", "", b"short")
        log.append("t", "", random.Random(1).randbytes(2000))
        log.append("t", "", bytes(2000))
        with Segment(path, 0) as segment:
            data = segment.path.read_bytes()
            rows, *_ = kernel.walk(data, 64, log.bytes, segment.header.salt, 0, 0, True)

        assert [row[7] & codec.FLAG_COMPRESSED for row in rows] == [0, 0, codec.FLAG_COMPRESSED]
        assert [len(r.value) for r in log.read()] == [5, 2000, 2000]


def test_compression_is_switched_on_and_off(path):
    """An existing log goes on in a new segment of the other kind; every writer follows, every record is read."""
    with virta.open(path) as other:
        fill(other, 5)
        with virta.open(path, compression="zstd") as log:
            assert log.compression == "zstd"
            fill(log, 5, seed=1)
            fill(other, 5, seed=2)  # was opened before
        with virta.open(path, compression="none") as log:
            fill(log, 5, seed=3)
            kinds = []
            for base in segment_bases(path):
                with Segment(path, base) as segment:
                    kinds.append(segment.header.flags & FLAG_ZSTD)
        assert kinds == [0, FLAG_ZSTD, 0]
        assert [r[3] for r in contents(other)] == list(range(other.next_offset))
        assert other.verify().problems == []
    with virta.open(path) as log:
        assert log.compression == "none"


def test_meta_refuses_versions_that_cannot_read_it(path):
    """META lists the feature, and segments with compressed batches have version 2, also after switching off."""
    virta.open(path, compression="zstd").close()
    assert json.loads((path / META).read_text())["features"] == ["zstd"]
    assert (path / "00000000000000000000.puro").read_bytes()[5] == 2
    virta.open(path, compression="none").close()

    meta = json.loads((path / META).read_text())
    assert (meta["features"], meta["compression"]) == (["zstd"], "none")
    (path / META).write_text(json.dumps(meta | {"features": ["zstd", "lz4"]}))
    with pytest.raises(errors.LogFormatError, match="does not know: lz4"):
        virta.open(path)


def test_a_plain_log_needs_no_feature(path):
    """Without compression META and segments are those of version 1, which older versions read."""
    virta.open(path).close()

    assert json.loads((path / META).read_text())["features"] == []
    assert (path / "00000000000000000000.puro").read_bytes()[5] == 1


def test_a_missing_library_is_named(path, monkeypatch):
    """Opening a compressed log without zstd says what to install."""
    virta.open(path, compression="zstd").close()
    monkeypatch.setattr(compression, "_library", None)
    monkeypatch.setattr(compression, "_MODULE", "no_such_module")

    with pytest.raises(errors.LogFormatError, match=r"pip install 'virta\[zstd\]'") as caught:
        virta.open(path, read_only=True)
    assert caught.value.code == "log_compression_missing"


def test_bad_options(path):
    """Only the two names are accepted."""
    with pytest.raises(
        errors.LogTypeError, match="compression must be one of none, zstd; got 'gzip'"
    ):
        virta.open(path, compression="gzip")


def test_upkeep_of_a_compressed_log(path, either_kernel):
    """Compaction, retention, repair and recovery work on compressed batches, and keep them compressed."""
    with virta.open(path, compression="zstd", segment_bytes=4096) as log:
        fill(log, 200)
        newest = {(r[0], r[1]): r[2] for r in contents(log)}
        before = log.bytes
        log.compact()
        assert {(r[0], r[1]): r[2] for r in contents(log)} == newest
        assert log.bytes < before
        damaged = segment_bases(path)[1]
        with open(path / f"{damaged:020d}.puro", "r+b") as file:
            file.seek(150)
            file.write(b"!!!!")
        problems = log.verify().problems
        assert problems
        log.repair()
        assert log.verify().problems == []
        for topic in ("t0", "t4"):
            rows = contents(log, on_gap="skip")
            expected = [r for r in rows if r[0] == topic.encode()]
            assert contents(log, topics=topic, on_gap="skip") == expected
        log.retain(max_bytes=log.bytes // 2)
        assert contents(log, on_gap="skip")
    (path / "control").unlink()
    with open(max(path.glob("*.puro")), "ab") as file:
        file.write(b"\x36torn")
    with virta.open(path) as log:
        log.append("t", "", VALUE * 10)
        assert log.verify().problems == []


def test_a_damaged_segment_header_is_rebuilt(path):
    """Version and flag of a compressed segment are found again."""
    with virta.open(path, compression="zstd", segment_bytes=4096) as log:
        fill(log, 100)
        expected = contents(log)
        with open(path / "00000000000000000000.puro", "r+b") as file:
            file.seek(5)
            file.write(bytes(10))
        log.repair()

        assert contents(log) == expected
        with Segment(path, 0) as segment:
            assert segment.header.flags & FLAG_ZSTD


def test_every_flipped_bit_of_a_compressed_batch_is_found():
    """Both decoders refuse it with the same reason; a frame of another size is refused too."""
    batch = codec.compress_batch(codec.encode([("topic", "key", VALUE * 4)]))
    assert batch is not None
    codec.fill_header(
        batch, salt=1, base=0, time=5, count=1, prev=0, producer=1, flags=codec.FLAG_COMPRESSED
    )

    def read(engine, data):
        return engine.read(bytes(data), 0, len(data), 1, 0, 0, 0, 99, None, True, False, 99)

    good = read(codec, batch)
    assert [r.value for r in good[0]] == [VALUE * 4]
    assert read(kernel, batch) == good
    for at in range(len(batch)):
        bad = bytearray(batch)
        bad[at] ^= 1 << (at % 8)
        assert read(codec, bad)[0] == []
        assert read(kernel, bad)[1:] == read(codec, bad)[1:]


@pytest.mark.parametrize("size", [0, 100, 1000, 5001])
def test_a_frame_of_another_size_is_refused(size):
    """No more than the promised size is ever decompressed: a small frame cannot fill the memory."""
    frame = compression.compress(bytes(5000))

    assert compression.decompress(frame, 5000) == bytes(5000)
    with pytest.raises(compression.CompressionError):
        compression.decompress(frame, size)
    with pytest.raises(compression.CompressionError):
        compression.decompress(frame + b"more", 5000)
    with pytest.raises(compression.CompressionError):
        compression.decompress(frame[:-3], 5000)


def test_a_wrong_frame_behind_good_checksums_is_damage():
    """Valid checksums around bytes that are no frame, or records that do not add up: bad record, in both engines."""
    for value in (
        codec.encode_varlong(500) + b"no frame",
        codec.encode_varlong(1 << 27) + compression.compress(bytes(500)),
        codec.encode_varlong(500) + compression.compress(bytes(500)),
    ):
        batch = bytearray(56) + codec.encode_record(codec.TOPIC_COMPRESSED, b"", value)
        codec.fill_header(
            batch, salt=1, base=0, time=5, count=1, prev=0, producer=1, flags=codec.FLAG_COMPRESSED
        )
        for engine in (codec, kernel):
            result = engine.read(
                bytes(batch), 0, len(batch), 1, 0, 0, 0, 99, None, False, False, 99
            )
            assert (result[0], result[4]) == ([], codec.Status.BAD_RECORD)
