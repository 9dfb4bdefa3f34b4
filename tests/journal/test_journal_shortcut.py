"""The short way of ordinary commands against the long one: same replies, same images, same leases."""

from __future__ import annotations

import copy
import gc
import random
import sys

import msgspec
import pytest
from journal_sides import Side, random_request

from virta.journal.engine import Engine
from virta.journal.jobs import shortcut
from virta.journal.jobs.domain import Domain, Job, Settings
from virta.journal.jobs.heap import Heap, PlainHeap
from virta.journal.protocol import kernel
from virta.journal.protocol.messages import (
    DATA,
    PERSIST,
    QUERY_RANGE,
    Function,
    Request,
    Value,
)
from virta.journal.sessions import Session
from virta.journal.storage import records as images
from virta.journal.storage.leases import Leases
from virta.journal.storage.snapshot import load_snapshot, write_snapshot

native_only = pytest.mark.skipif(not kernel.NATIVE, reason="the native half was not built")


@native_only
@pytest.mark.parametrize("seed", range(60))
def test_both_ways_are_the_same(seed, tmp_path):
    """Whatever is asked for, replies, images for the log, jobs, ids and leases do not differ."""
    rng = random.Random(seed)
    watched = seed % 5 == 0  # a range over jobs makes somebody watch, and the long way the only one
    sides = [Side(tmp_path / "quick", shortcut.SHORTCUTS), Side(tmp_path / "long", {})]
    keys = [b"none"]
    for _ in range(400):
        request = random_request(rng, sides[0].now, keys)
        if request.query == QUERY_RANGE and request.function == Function.GET and not watched:
            continue
        replies = [side.engine.handle(copy.copy(request), side.session) for side in sides]
        assert replies[0] == replies[1], request
        keys += [pair.key for pair in replies[0].pairs or () if pair.key]
        if rng.random() < 0.05:
            settings = Settings(
                paused=rng.random() < 0.3,
                deadline=rng.choice([0, 0.5]),
                max_attempts=rng.choice([0, 2]),
            )
            name = rng.choice([b"a.example", b"other"])
            for side in sides:
                side.engine.jobs.configure(name, settings)
        if rng.random() < 0.3:
            pause = rng.choice([0, 1, 10, 50, 100_000_000_000])
            for side in sides:
                side.now += pause
                side.engine.tick()
        if rng.random() < 0.3:
            assert sides[0].commit() == sides[1].commit()
        assert sides[0].state() == sides[1].state()
    for side in sides:
        side.leases.close()


@native_only
def test_images_are_the_same_to_the_byte(tmp_path):
    """Whatever numbers, texts and sizes a job has, the native half writes it as msgspec would."""
    side = Side(tmp_path / "leases", shortcut.SHORTCUTS)
    jobs = side.engine.jobs
    rng = random.Random(3)
    numbers = [0, 1, 31, 127, 128, 255, 256, 65_535, 65_536, 1 << 32, (1 << 32) - 1, (1 << 64) - 1]
    sizes = [0, 1, 31, 32, 255, 256, 65_535, 65_536]
    entries = []
    for i in range(300):
        job = Job(
            rng.randbytes(rng.choice(sizes[1:])) + b"%d" % i, Domain(b"d" * rng.choice(sizes)), i
        )
        job.priority, job.attempts, job.lease = (rng.choice(numbers) for _ in range(3))
        job.start, job.timestamp, job.worked_until = (
            rng.choice([*numbers, *(-n >> 1 for n in numbers)]) for _ in range(3)
        )
        job.payload = rng.choice([None, Value(rng.randrange(6), bytes(rng.choice(sizes)))])
        job.reason = rng.choice(["", "é" * 20, "x" * 40, "long " * 100, "x" * 70_000])
        job.persist, job.state = rng.random() < 0.8, rng.randrange(6)
        entries.append(job)
    for count in (0, 1, 15, 16, 300):
        chunk = msgspec.msgpack.encode(
            ["jobs", [(job.uri, images.job_image(job)) for job in entries[:count]]]
        )
        assert shortcut.jobs_chunk(entries[:count]) == chunk
    for job in entries:
        jobs._waiting[job.uri] = job
        jobs._changed(job.uri)
        jobs.finished.commands[job.uri] = rng.choice(numbers)
    quick = images.drain(side.engine, side.now)
    for job in entries:
        jobs._changed(job.uri)
    side.engine.shortcuts = {}
    assert quick == images.drain(side.engine, side.now)
    entries[7].replaced = {1: 2}
    assert shortcut.jobs_chunk(entries) is None
    side.leases.close()


@native_only
def test_both_ways_load_the_same_snapshot(tmp_path):
    """Jobs that wait, are held, worked on or dead, with every kind of payload."""
    first = Side(tmp_path / "first", shortcut.SHORTCUTS)
    rng = random.Random(11)
    keys = [b"none"]
    for _ in range(2_000):
        request = random_request(rng, first.now, keys)
        if request.function != Function.GET:
            reply = first.engine.handle(request, first.session)
            keys += [pair.key for pair in reply.pairs or () if pair.key]
        if rng.random() < 0.01:
            first.engine.jobs.configure(b"a.example", Settings(max_attempts=1))
            first.now += 40
            first.engine.tick()
    path = tmp_path / "snap"
    for _ in write_snapshot(first.engine, path):
        pass
    sides = [Side(tmp_path / "quick", shortcut.SHORTCUTS), Side(tmp_path / "long", {})]
    for side in sides:
        load_snapshot(side.engine, path, first.now)
        side.engine.jobs.restored()

    assert sides[0].state() == sides[1].state()
    assert len({job.state for job in sides[0].engine.jobs.all()}) >= 4
    for side in [first, *sides]:
        side.leases.close()


@native_only
def test_leases_grow_on_the_short_way(tmp_path):
    """More jobs worked on than there are slots: the table grows and knows all of them."""
    side = Side(tmp_path / "leases", shortcut.SHORTCUTS)
    for i in range(3_000):
        request = Request(12, 0, PERSIST, 0, None, None, 0, b"u%d" % i, b"d", None, QUERY_RANGE)
        side.engine.handle(request, side.session)
    handed = 0
    while pairs := side.engine.handle(Request(11, count=700), side.session).pairs:
        handed += len(pairs)

    assert handed == 3_000
    assert len({job.slot for job in side.engine.jobs.all()}) == 3_000
    assert len(list(Leases(tmp_path / "leases").load())) == 3_000
    side.leases.close()


@native_only
def test_nothing_is_leaked():
    """Jobs that came and went leave nothing behind but the memory of their last command."""
    side_now = [1_000_000]
    engine = Engine(lambda: side_now[0])
    session = Session()
    payload = Value(1, b"payload of its own")
    handle = engine.handle

    def round_of(number):
        for i in range(200):
            uri = b"http://leak.example/%d" % i
            handle(
                Request(12, 0, PERSIST, 0, None, None, i, uri, b"", payload, QUERY_RANGE), session
            )
        pairs = handle(Request(11, 0, DATA, count=200), session).pairs
        for pair in pairs:
            if pair.key:
                handle(Request(4, key=pair.key), session)
        engine.jobs.drained()
        side_now[0] += 1_000 * number

    round_of(1)
    before = sys.getrefcount(payload)
    for number in range(2, 6):
        round_of(number)

    assert sys.getrefcount(payload) <= before
    assert len(engine.jobs) == 0
    assert not engine.jobs.schedule.domains


@pytest.mark.parametrize("kind", [Heap, PlainHeap])
def test_a_heap_is_in_order(kind):
    """Ranks, times of any sign and size, and numbers; what is taken out is taken out in order."""
    rng = random.Random(5)
    times = [-(1 << 63), -7, -1, 0, 1, 7, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    items = [(rng.randrange(256), rng.choice(times), n, f"thing {n}") for n in range(500)]
    heap = kind()
    for item in items:
        heap.push(*item)
    heap.keep(lambda item: item[2] % 3 != 0)
    kept = sorted(item for item in items if item[2] % 3)

    assert len(heap) == len(kept)
    assert heap.time() == kept[0][1]
    assert heap.first() == kept[0]
    assert [heap.pop() for _ in kept] == kept
    assert heap.first() is None
    assert heap.time() is None
    with pytest.raises(IndexError):
        heap.pop()


@native_only
def test_a_native_heap_refuses_and_lets_go():
    """Bad numbers are errors, a failing check keeps all, and cycles through a heap are collected."""
    heap = Heap()
    for bad in [(0, 1 << 64, 0), (0, -(1 << 63) - 1, 0), (0, "0", 0), ("a", 0, 0), (0, 0, None)]:
        with pytest.raises((OverflowError, TypeError)):
            heap.push(*bad, None)
    with pytest.raises(TypeError):
        heap.push(1, 2)
    heap.push(1, 2, 3, heap)
    with pytest.raises(ZeroDivisionError):
        heap.keep(lambda item: 1 / 0)
    assert len(heap) == 1
    place = Domain(b"d")
    place._ready.push(0, 0, 0, place)
    gc.collect()
    del heap, place
    assert gc.collect() >= 2
