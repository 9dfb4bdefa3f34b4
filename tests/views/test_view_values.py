"""Values of rows: what the cache keeps, and reads of many offsets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import virta
from virta.views.tables import values
from virta.views.tables.values import ENTRY_BYTES, ValueCache, read_values

VALUE = b"x" * 52  # with its entry 100 bytes


def test_a_value_is_replaced_in_place():
    cache = ValueCache(1000)
    cache.put(3, VALUE)
    cache.put(3, b"new")

    assert cache.get(3) == b"new"
    assert (len(cache), cache.bytes) == (1, 3 + ENTRY_BYTES)


def test_a_full_cache_drops_others_for_a_new_value():
    cache = ValueCache(300)
    for number in range(5):
        cache.put(number, VALUE)

    assert cache.get(4) == VALUE
    assert (len(cache), cache.bytes) == (3, 300)


def test_an_offer_drops_nothing():
    cache = ValueCache(300)
    cache.offer_all(range(5), [VALUE] * 5)

    assert [cache.get(number) is not None for number in range(6)] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("bytes_max", [0, 10, 99])
def test_a_cache_without_room_keeps_nothing(bytes_max):
    cache = ValueCache(bytes_max)
    for number in range(3):
        cache.put(number, VALUE)
        cache.offer_all([number], [VALUE])

    assert (len(cache), cache.bytes) == (0, 0)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 90)), max_size=6), max_size=6),
    st.integers(0, 600),
)
def test_values_may_be_put_together(runs, bytes_max):
    """Putting many values is putting each of them."""
    together, one_by_one = ValueCache(bytes_max), ValueCache(bytes_max)
    for run in runs:
        together.put_all([number for number, _ in run], [b"x" * size for _, size in run])
        for number, size in run:
            one_by_one.put(number, b"x" * size)

    assert together.bytes == one_by_one.bytes
    assert [together.get(n) for n in range(10)] == [one_by_one.get(n) for n in range(10)]


def test_a_new_value_costs_a_bounded_sweep(monkeypatch):
    """A cache of one value over many rows must not pass all of them for every new value."""
    drops = []
    cache = ValueCache(150)
    cache.put(10_000, VALUE)
    real = ValueCache.drop
    monkeypatch.setattr(ValueCache, "drop", lambda self, n: drops.append(n) or real(self, n))
    for number in range(100):
        cache.put(number, VALUE)

    assert cache.bytes <= 150
    assert len(drops) <= 100 * (values.SWEEP_ROWS + 1)


def test_a_value_larger_than_the_cache_drops_no_other():
    """It cannot stay in any case; the row's old value is gone."""
    cache = ValueCache(300)
    cache.put_all([0, 1], [VALUE, VALUE])
    cache.put(0, b"x" * 300)

    assert (cache.get(0), cache.get(1), cache.bytes) == (None, VALUE, 100)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "offer", "drop", "clear"]),
            st.integers(0, 60),
            st.integers(0, 120),
        )
    ),
    st.integers(0, 800),
)
def test_the_cache_stays_within_its_bytes(steps, bytes_max):
    """Whatever happens, a value that is kept is the last one put, and the bytes are those of the values."""
    cache, last = ValueCache(bytes_max), {}
    for kind, number, size in steps:
        value = bytes(size)
        if kind == "put":
            cache.put(number, value)
            last[number] = value
        elif kind == "offer":
            cache.offer_all([number], [last.get(number, b"")])
            last.setdefault(number, b"")
        elif kind == "drop":
            cache.drop(number)
        else:
            cache.clear()
        kept = {n: found for n in range(61) if (found := cache.get(n)) is not None}
        assert all(last[n] == found for n, found in kept.items())
        assert cache.bytes == sum(len(found) + ENTRY_BYTES for found in kept.values()) <= bytes_max


def event(number: int) -> bytes:
    return b'{"id":"%d","source":"/s","type":"t"}' % number


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log") as opened:
        yield opened


def test_values_are_read_by_offset(log):
    """Only what was asked for, only of the topic, wrapped if it is no event."""
    log.append_many([("orders" if n % 2 else "other", b"", event(n)) for n in range(20)])
    log.append("orders", b"k", b"plain")

    found = read_values(log, "orders", [1, 3, 4, 19, 20, 99])

    assert {o: found[o] for o in (1, 3, 19)} == {o: event(o) for o in (1, 3, 19)}
    assert b"virta.record" in found[20]
    assert found.keys() == {1, 3, 19, 20}  # 4 is of another topic, 99 does not exist


def test_far_offsets_are_separate_reads(log, monkeypatch):
    """A reader skips a few records, and seeks over many."""
    log.append_many([("orders", b"", event(n)) for n in range(300)])
    monkeypatch.setattr(values, "SKIP_RECORDS_MAX", 10)
    runs = []
    real = values._read_run
    monkeypatch.setattr(values, "_read_run", lambda *given: runs.append(given[2:4]) or real(*given))

    found = read_values(log, "orders", [5, 9, 100, 299, 105])

    assert runs == [(5, 10), (100, 106), (299, 300)]
    assert found == {o: event(o) for o in (5, 9, 100, 105, 299)}


def test_values_below_the_first_offset_are_left_out(tmp_path):
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        for number in range(300):
            log.append("orders", b"", event(number))
        log.retain(max_bytes=4096)
        first = log.first_offset
        assert first > 0

        assert read_values(log, "orders", [0, first - 1, first]) == {first: event(first)}
