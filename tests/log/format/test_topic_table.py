"""Topic tables: the native and the plain one list the same topics, counts and batches for any bytes."""

from __future__ import annotations

import random

import pytest

from virta.log.engine import kernel
from virta.log.format import codec
from virta.log.format.codec import FLAG_REPAIR, Status
from virta.log.format.topic_table import PLACE, REPAIRS, TopicTable

TABLES = [TopicTable] if kernel.TopicTable is TopicTable else [TopicTable, kernel.TopicTable]
SALT = 99


def batches(rng, count):
    """Return the bytes of a chain of random batches from offset 5 on, and their headers."""
    data, prev, offset, headers = bytearray(), 7, 5, []
    for number in range(count):
        records = [
            (b"t%d" % rng.randrange(6), b"k", rng.randbytes(rng.randrange(9)))
            for _ in range(rng.randrange(1, 5))
        ]
        buf = codec.encode(records)
        span, flags = len(records), 0
        if rng.random() < 0.2:
            buf += codec.gap_record(3)
            span += 3
        elif rng.random() < 0.1:
            flags = FLAG_REPAIR
        prev_of = prev
        crc = codec.fill_header(
            buf, salt=SALT, base=offset, time=1000 + number, count=span, prev=prev_of, flags=flags
        )
        headers.append((len(data), len(buf), offset, records if not flags else None, span))
        prev = crc
        data += buf
        offset += span
    return bytes(data), headers


@pytest.mark.parametrize("make", TABLES)
@pytest.mark.parametrize("seed", range(5))
def test_a_table_lists_every_batch_of_every_topic(make, seed):
    """Places, counts, offsets and times are those of the records, whatever the chunks were."""
    rng = random.Random(seed)
    data, headers = batches(rng, 40)
    table, pos, prev, following = make(5), 0, 7, 5
    while pos < len(data):
        size = rng.randrange(200, 900)
        used, prev, following, status, _ = table.add(
            data[pos : pos + size], min(size, len(data) - pos), 64 + pos, SALT, prev, following
        )
        pos += used
        assert status in {Status.END, Status.SHORT}
    expected: dict[bytes, list[tuple[int, int, int]]] = {}
    for at, size, base, records, _ in headers:
        for topic in {REPAIRS} if records is None else {r[0] for r in records}:
            expected.setdefault(topic, []).append((64 + at, size, base - 5))

    rows = {row[0]: row for row in table.rows()}
    assert {t: list(PLACE.iter_unpack(row[-1])) for t, row in rows.items()} == expected
    assert len(table) == len(expected)
    assert table.places == sum(map(len, expected.values()))
    for topic, places in expected.items():
        assert list(PLACE.iter_unpack(table.find(topic))) == places
    assert table.find(b"absent") == b""


@pytest.mark.parametrize("seed", range(20))
def test_both_tables_agree_on_damaged_bytes(seed):
    """A flipped bit or a cut: the same status, the same position, the same rows."""
    rng = random.Random(seed)
    data = bytearray(batches(rng, 12)[0])
    if rng.random() < 0.7:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    cut = rng.randrange(len(data) + 1)
    results = []
    for make in TABLES:
        table = make(5)
        results.append((table.add(data, cut, 0, SALT, 7, 5), [tuple(r) for r in table.rows()]))

    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("make", TABLES)
def test_a_batch_with_a_bad_record_adds_nothing(make):
    """All or none: the topics of a batch whose offsets do not add up are not listed."""
    buf = codec.encode([(b"a", b"", b""), (b"b", b"", b"")])
    codec.fill_header(buf, salt=SALT, base=5, time=1, count=3, prev=7)
    table = make(5)

    assert table.add(bytes(buf), len(buf), 0, SALT, 7, 5) == (0, 7, 5, Status.BAD_RECORD, 0)
    assert len(table) == table.places == 0


@pytest.mark.parametrize("make", TABLES)
def test_positions_are_limited(make):
    """A batch beyond four gibibytes cannot be listed: OverflowError, and the segment gets no index."""
    buf = codec.encode([(b"a", b"", b"")])
    codec.fill_header(buf, salt=SALT, base=5, time=1, count=1, prev=7)

    with pytest.raises(OverflowError):
        make(5).add(bytes(buf), len(buf), 1 << 32, SALT, 7, 5)
