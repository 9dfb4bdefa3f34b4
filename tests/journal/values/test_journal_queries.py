"""Reading many keys: cursors stay short, and ranges with too many jobs in them are refused, not cut."""

from __future__ import annotations

import random

import pytest
from journal_support import Clock

from virta.journal.engine import JournalEngine
from virta.journal.jobs import key_index as jobkeys
from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.sessions import Session
from virta.journal.values.queries import CURSOR_BYTES, literal_prefix, separator
from virta.journal.values.sorted_keys import SortedKeys


def filled(keys):
    engine = JournalEngine(Clock(10))
    for key in keys:
        engine.store.set(key, Value(Type.STRING, b"v"), 1, 10)
    return engine


def get(key=b"", **fields):
    return Request(Function.GET, 1, key=key, **fields)


def walk(engine, request):
    """All keys, page by page, and the longest cursor."""
    got, longest = [], 0
    while True:
        reply = engine.handle(request, Session())
        assert reply.error == ""
        got += [pair.key for pair in reply.all_pairs()]
        if reply.cursor is None:
            return got, longest
        longest = max(longest, len(reply.cursor))
        request = get(reply.cursor, query=m.QUERY_CURSOR)


@pytest.mark.parametrize("size", [300, 5_000, 60_000])
def test_cursors_of_long_keys_are_short(size):
    """Keys of any length are paged through whole, and no cursor is longer than 255 bytes."""
    rng = random.Random(size)
    keys = sorted(b"%d:" % rng.randrange(50) + rng.randbytes(size) for _ in range(60))
    engine = filled(keys)
    bounds = {"key": keys[5], "key2": keys[50], "query": m.QUERY_RANGE}

    assert walk(engine, get(count=7, **bounds))[0] == keys[5:50]
    assert walk(engine, get(count=1, **bounds))[1] <= CURSOR_BYTES
    everything, longest = walk(engine, get(query=m.QUERY_REGEX, key=b"^[0-9]+:", count=9))
    assert everything == keys
    assert longest <= CURSOR_BYTES


def test_keys_that_differ_late_have_longer_cursors():
    """Where keys are the same for hundreds of bytes the cursor says as much, and the walk is whole."""
    keys = [b"x" * 400 + b"%03d" % i for i in range(20)]
    got, longest = walk(filled(keys), get(query=m.QUERY_RANGE, count=3))

    assert got == keys
    assert CURSOR_BYTES < longest < 500


def test_a_cursor_continues_after_removed_keys():
    """The last key, the next key and the end of the range may be deleted between two pages."""
    keys = [b"%02d" % i + b"-" * 300 for i in range(30)]
    engine = filled(keys)
    page = engine.handle(get(keys[0], key2=keys[20], count=5, query=m.QUERY_RANGE), Session())
    for removed in (4, 5, 20):
        engine.store.delete(keys[removed], 5, 10)
    engine.store.set(b"05" + b"." * 9, Value(Type.STRING, b"new"), 5, 10)
    rest, _ = walk(engine, get(page.cursor, query=m.QUERY_CURSOR, count=100))

    assert rest == [b"05" + b"." * 9, *keys[6:20]]


def test_separators():
    """A separator is larger than the one key, not larger than the other, and no shorter one is."""
    rng = random.Random(1)
    for _ in range(2_000):
        low, high = sorted({bytes(rng.choices(b"ab\0\xff", k=rng.randrange(6))) for _ in range(9)})[
            :2
        ]
        found = separator(low, high)
        assert low < found <= high
        assert not any(low < high[:size] for size in range(len(found)))


def test_the_key_before():
    """The last smaller key is found wherever it is."""
    keys = sorted(
        {random.Random(2).randbytes(2) for _ in range(1)} | {b"%04d" % i for i in range(3000)}
    )
    ordered = SortedKeys(keys)
    for probe in (b"", b"0000", b"0001", b"1234", b"12345", b"\xff\xff\xff"):
        assert ordered.before(probe) == max((k for k in keys if k < probe), default=b"")
    assert SortedKeys().before(b"a") == b""


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [
        (b"^user:", b"user:"),
        (b"^user:?", b"user"),
        (b"^user:+", b"user:"),
        (b"^us{2}", b"u"),
        (b"^a|b", b""),
        (b"user", b""),
        (b"^", b""),
        (b"^(?i)user", b""),
        (b"^a.c", b"a"),
        (b"^a\\d", b"a"),
    ],
)
def test_prefixes_of_patterns(pattern, prefix):
    """The prefix of an anchored pattern bounds the keys that are read."""
    assert literal_prefix(pattern) == prefix


def test_too_many_jobs_for_a_range(monkeypatch):
    """Beyond the limit a range or pattern with jobs in it is refused with a reason; others go on."""
    monkeypatch.setattr(jobkeys, "JOBS_ORDERED_MAX", 10)
    engine = filled([b"a:1", b"http", b"user:1", b"user:2"])
    for i in range(10):
        engine.jobs.push(b"http://x/%d" % i, b"", 1, 10)
    within, _ = walk(engine, get(query=m.QUERY_RANGE, count=3))
    engine.jobs.push(b"http://x/10", b"", 1, 10)

    assert len(within) == 24
    for refused in (
        get(query=m.QUERY_RANGE, count=3),
        get(b"http://x/3", key2=b"http://x/4", query=m.QUERY_RANGE, count=3),
        get(b"x:", key2=b"x;", query=m.QUERY_RANGE, count=3),
        get(b"er", query=m.QUERY_REGEX),
        get(b"^http", query=m.QUERY_REGEX),
    ):
        reply = engine.handle(refused, Session())
        assert reply.error == (
            "too-large: keys of jobs are in order up to 10 of them, there are 11: "
            "ask for a range without any, or for a list of jobs"
        )
    assert walk(engine, get(b"user:", key2=b"user;", query=m.QUERY_RANGE, count=1))[0] == [
        b"user:1",
        b"user:2",
    ]
    assert walk(engine, get(b"^user:", query=m.QUERY_REGEX))[0] == [b"user:1", b"user:2"]
