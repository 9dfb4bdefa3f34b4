"""Values against a dict: last writer wins, expiry, keys that share a value, memory that is bounded."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from virta.journal.protocol.messages import RefusedError, Type, Value
from virta.journal.values import numbers
from virta.journal.values.entries import ENTRY_OVERHEAD_BYTES
from virta.journal.values.sorted_keys import CHUNK_KEYS_MAX, SortedKeys
from virta.journal.values.store import TOMBSTONE_US, Store

KEYS = [b"a", b"b", b"c", b"d"]


def text(data):
    return Value(Type.STRING, data)


class DictSpill:
    """Data in a dict instead of a file."""

    def __init__(self):
        self.data = {}
        self.next = 0

    def put(self, data):
        self.next += 1
        self.data[self.next] = data
        return self.next

    def get(self, handle):
        return self.data[handle]

    def drop(self, handle):
        del self.data[handle]


class StoreMachine(RuleBasedStateMachine):
    """The model: key -> [live value or None, timestamp, expires]; links are left to their own test."""

    def __init__(self):
        super().__init__()
        # Small enough that values are spilled all the time.
        self.store = Store(DictSpill(), memory_bytes_max=8 * (ENTRY_OVERHEAD_BYTES + 1) + 8)
        self.model = {}
        self.now = 1_000

    def live(self, key):
        value, _, expires = self.model.get(key, (None, 0, 0))
        return None if value is None or (expires and expires <= self.now) else value

    @rule(
        key=st.sampled_from(KEYS),
        data=st.binary(max_size=3),
        ts=st.integers(1, 30),
        overwrite=st.booleans(),
        expires=st.sampled_from([0, 0, 5, 50]),
    )
    def set(self, key, data, ts, overwrite, expires):
        expires = expires and self.now + expires
        stored, before, ends = self.model.get(key, (None, -1, 0))
        current = self.live(key)
        try:
            self.store.set(
                key, text(data), ts, self.now, overwrite=overwrite, persist=True, expires=expires
            )
        except RefusedError:
            assert current is not None
            assert not overwrite
            assert (ts, data) != (before, current)
            return
        if current is not None and not overwrite:
            assert (before, current) == (ts, data)
            return
        newer = ts > before or (
            ts == before and (stored is None or (data, expires) > (stored, ends))
        )
        if newer:
            self.model[key] = (data, ts, expires)

    @rule(key=st.sampled_from(KEYS), ts=st.integers(1, 30), complete=st.booleans())
    def delete(self, key, ts, complete):
        stored, before, _ = self.model.get(key, (None, -1, 0))
        current = self.live(key)

        removed = self.store.delete(key, ts, self.now, complete=complete)

        wins = ts > before or (ts == before and stored is None)
        assert removed == (wins and current is not None)
        if wins and complete:
            self.model.pop(key, None)
        elif wins:
            self.model[key] = (None, ts, 0)

    @rule(key=st.sampled_from(KEYS), new=st.sampled_from(KEYS), ts=st.integers(1, 30))
    def rename(self, key, new, ts):
        value, before, expires = self.model.get(key, (None, -1, 0))
        current = self.live(key)
        if current is None:
            with pytest.raises(RefusedError, match="does-not-exist"):
                self.store.rename(key, new, ts, self.now, overwrite=True)
            return

        moved = self.store.rename(key, new, ts, self.now, overwrite=True)

        target = self.model.get(new, (None, -1, 0))[1]
        assert moved == (ts >= before and ts >= target)
        if moved:
            final = max(ts, before + 1, target + 1)
            self.model[key] = (None, final, 0)
            self.model[new] = (value, final, expires)

    @rule(steps=st.integers(1, 40))
    def time_passes(self, steps):
        self.now += steps
        self.store.tick(self.now)

    @invariant()
    def same_values(self):
        for key in KEYS:
            entry = self.store.live(key, self.now)
            got = None if entry is None else self.store.value(entry).data
            assert self.live(key) == got

    @invariant()
    def keys_are_in_order(self):
        expected = sorted(key for key in KEYS if self.live(key) is not None)
        got = [k for k in self.store.keys.scan(b"", None) if self.store.live(k, self.now)]
        assert expected == got

    @invariant()
    def memory_is_counted(self):
        entries = self.store.entries()
        expected = sum(
            ENTRY_OVERHEAD_BYTES + sum(map(len, e.keys)) + (0 if e.data is None else e.size)
            for e in entries
        )
        assert expected == self.store.memory_bytes
        assert self.store.spilled == sum(e.data is None for e in entries)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


changes = st.lists(
    st.tuples(
        st.sampled_from(KEYS), st.integers(1, 5), st.none() | st.binary(max_size=1), st.booleans()
    ),
    max_size=12,
)


@given(changes, st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter(history, rng):
    """The same changes in any order, some of them twice, end in the same values."""

    def state(changes):
        store = Store()
        for key, ts, data, persist in changes:
            if data is None:
                store.delete(key, ts, 100)
            else:
                store.set(key, text(data), ts, 100, persist=persist)
        entries = {k: store.stored(k) for k in KEYS}
        return {
            k: e and (e.tombstone, e.timestamp, e.data, e.tombstone or e.persist)
            for k, e in entries.items()
        }

    shuffled = history + [c for c in history if rng.random() < 0.5]
    rng.shuffle(shuffled)

    assert state(history) == state(shuffled)


def test_sorted_keys_against_a_list():
    """A hundred thousand random changes leave the keys of a sorted set, in order, from any bound."""
    rng = random.Random(7)
    model = set()
    keys = SortedKeys()
    for _ in range(6 * CHUNK_KEYS_MAX):
        key = b"%d" % rng.randrange(3 * CHUNK_KEYS_MAX)
        if rng.random() < 0.6:
            model.add(key)
            keys.add(key)
        else:
            model.discard(key)
            keys.remove(key)

    assert sorted(model) == list(keys.scan(b"", None))
    assert len(model) == len(keys)
    for lower, upper, after in [(b"2", b"3", False), (b"15", None, True), (b"9999", None, False)]:
        expected = [k for k in sorted(model) if k >= lower and (upper is None or k < upper)]
        expected = [k for k in expected if not (after and k == lower)]
        assert expected == list(keys.scan(lower, upper, after=after))


def test_one_value_under_several_keys():
    """A linked key reads, changes and deletes the same value; unlinking the last deletes it."""
    store = Store()
    store.set(b"a", text(b"1"), 1, 10)
    store.link(b"a", b"b", 5, 10)
    store.set(b"b", text(b"2"), 2, 10)
    entry = store.live(b"a", 10)

    assert store.link(b"a", b"b", 5, 10) is entry
    assert store.value(entry).data == b"2"
    assert store.unlink(b"a", 3, 10) is False
    assert store.live(b"a", 10) is None
    assert store.live(b"b", 10) is entry

    store.link(b"b", b"c", 5, 10)

    assert store.delete(b"c", 4, 10) is True
    assert store.live(b"b", 10) is None
    assert len(store) == 0


def test_locks_bind_others_only():
    """A locked value can be read by all and changed by its owner, until its time passes or the owner disconnects."""
    store = Store()
    owner, other = object(), object()
    store.set(b"k", text(b"1"), 1, 10)
    store.lock(b"k", owner, 50, 10)

    for change in (
        lambda: store.set(b"k", text(b"2"), 2, 20, owner=other),
        lambda: store.delete(b"k", 2, 20, owner=other),
        lambda: store.lock(b"k", other, 90, 20),
        lambda: store.rename(b"k", b"x", 2, 20, owner=other),
    ):
        with pytest.raises(RefusedError, match="locked") as refused:
            change()
        assert (refused.value.timestamp, refused.value.timeout) == (1, 50)
    with pytest.raises(RefusedError, match="not-owner"):
        store.unlock(b"k", other, 20)
    assert store.set(b"k", text(b"3"), 3, 20, owner=owner) is True
    assert store.set(b"k", text(b"4"), 4, 50, owner=other) is True

    store.lock(b"k", owner, 90, 60)
    store.release_locks(owner, [b"k"])

    assert store.set(b"k", text(b"5"), 5, 61, owner=other) is True


def test_memory_only_values_are_never_dropped():
    """When nothing can be spilled, SET fails instead of losing a value."""
    store = Store(DictSpill(), memory_bytes_max=10_000)
    store.set(b"a", text(bytes(8_000)), 1, 1)

    with pytest.raises(RefusedError, match="out-of-memory"):
        store.set(b"b", text(bytes(8_000)), 1, 1)
    assert store.live(b"a", 1) is not None
    assert store.live(b"b", 1) is None


def test_expiry_heap_does_not_grow_with_sets():
    """Setting one key with an expiry ten thousand times queues it once."""
    store = Store()
    for i in range(10_000):
        store.set(b"k", text(b""), i, i, expires=1_000_000 + i)

    assert len(store.expiries) == 1
    assert store.tick(1_000_000) == []
    assert store.tick(1_009_999) == [b"k"]


def test_touch_extends_and_never_shortens():
    """Touch moves the expiry to at least now + ttl, and leaves values without expiry alone."""
    store = Store()
    store.set(b"k", text(b""), 1, 0, expires=100)
    store.set(b"n", text(b""), 1, 0)
    entry = store.live(b"k", 0)
    store.touch(entry, 50, 10)
    assert entry.expires == 100
    store.touch(entry, 95, 10)
    assert entry.expires == 105
    store.touch(store.live(b"n", 0), 5, 0)

    assert store.live(b"n", 10**15) is not None
    assert store.live(b"k", 104) is entry
    assert store.live(b"k", 105) is None


def test_touch_does_not_leave_the_range_of_times():
    """A ttl without reason gives the largest time there is."""
    store = Store()
    store.set(b"k", text(b""), 1, 0, expires=100)
    entry = store.live(b"k", 0)
    store.touch(entry, 2**64 - 1, 10)

    assert entry.expires == 2**64 - 1


def test_tombstones_are_collected():
    """A tombstone wins against older changes for seven days and is forgotten after."""
    store = Store()
    store.delete(b"k", 5, 0)

    assert store.set(b"k", text(b""), 4, 1) is False
    store.tick(TOMBSTONE_US)
    assert store.stored(b"k") is None
    assert store.memory_bytes == 0
    assert store.set(b"k", text(b""), 4, TOMBSTONE_US) is True


def integer(number, width=8):
    return Value(Type.INTEGER, number.to_bytes(width, "big", signed=True))


def test_numbers():
    """ADD keeps type and width; what does not fit or does not belong is refused."""
    store = Store()
    counter = itertools.count(1)

    def add(value):
        return store.value(store.add(b"n", value, next(counter), 1))

    assert add(integer(40, 1)) == integer(40, 1)
    assert add(integer(2)) == integer(42, 1)
    with pytest.raises(RefusedError, match="overflow"):
        add(integer(100))
    with pytest.raises(RefusedError, match="type-mismatch"):
        add(Value(Type.FLOAT, struct.pack(">d", 1)))
    with pytest.raises(RefusedError, match="type-mismatch"):
        add(Value(Type.INTEGER, b"123"))
    assert store.value(store.live(b"n", 1)) == integer(42, 1)

    half = Value(Type.FLOAT, struct.pack(">f", 0.5))
    assert numbers.added(half, half) == Value(Type.FLOAT, struct.pack(">f", 1.0))
    with pytest.raises(RefusedError, match="overflow"):
        numbers.added(half, Value(Type.FLOAT, struct.pack(">d", 1e300)))
    huge = Value(Type.FLOAT, struct.pack(">d", 1.7e308))
    with pytest.raises(RefusedError, match="overflow"):
        numbers.added(huge, huge)
    assert numbers.inverted(Value(Type.BOOLEAN, b"\0")) == Value(Type.BOOLEAN, b"\1")
    with pytest.raises(RefusedError, match="type-mismatch"):
        numbers.inverted(Value(Type.BOOLEAN, b"\2"))
    assert numbers.truncated(text(b"abc"), 5) == text(b"abc\0\0")
    assert numbers.truncated(text(b"abc"), 1) == text(b"a")
    with pytest.raises(RefusedError, match="too-large"):
        numbers.truncated(text(b"abc"), 2**40)
