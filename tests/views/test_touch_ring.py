"""The touch ring keeps the newest touches in order, and says what it forgets."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.views.tables.ring import Touch, TouchRing

NOBODY = frozenset()


def filled(size, offsets):
    ring = TouchRing(size)
    for offset in offsets:
        ring.append(offset, offset % 7, offset - 10, frozenset({offset}))
    return ring


def test_it_forgets_the_oldest_and_says_which():
    """The table needs the offset for `exact_from`, and the row to release its number."""
    ring = TouchRing(2)
    assert ring.append(5, 1, -1, NOBODY) is None
    assert ring.append(8, 2, -1, NOBODY) is None
    assert ring.append(9, 1, 5, NOBODY) == (5, 1)
    assert ring.append(11, 3, -1, NOBODY) == (8, 2)

    assert [touch.offset for touch in ring.since(0)] == [9, 11]
    assert len(ring) == 2


@pytest.mark.parametrize(
    ("position", "offsets"),
    [(0, [4, 6, 9]), (4, [4, 6, 9]), (5, [6, 9]), (9, [9]), (10, [])],
)
def test_touches_since_a_position(position, offsets):
    """A position between two offsets begins with the later one."""
    ring = filled(3, [1, 2, 4, 6, 9])

    assert [touch.offset for touch in ring.since(position)] == offsets
    assert list(ring.copy(position).offsets) == offsets


def test_a_copy_does_not_follow_the_ring():
    """Another thread reads it while the ring goes on."""
    ring = filled(4, range(6))
    copy = ring.copy(0)
    before = list(copy)
    for offset in range(6, 12):
        ring.append(offset, 0, -1, NOBODY)

    assert list(copy) == before
    assert len(copy) == 4


def test_a_cleared_ring_starts_again():
    """After a truncation old touches must not come back, wherever the ring had its start."""
    ring = filled(3, range(5))
    ring.clear()
    assert list(ring.since(0)) == []
    ring.append(9, 4, 2, frozenset({1}))

    assert list(ring.since(0)) == [Touch(9, 4, 2, frozenset({1}))]


def test_sets_in_use_are_interned():
    """Interning drops sets that nothing refers to; the ring refers to what was."""
    ring = filled(2, [1, 2, 3])
    known = {}
    ring.intern(known)

    assert known.keys() == {frozenset({2}), frozenset({3})}


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(-1, 50)), max_size=40),
    st.integers(0, 60),
)
def test_it_is_a_bounded_queue(size, steps, position):
    """Whatever is appended: the same touches as a queue, by `since` and by `copy`, before and after it is full."""
    ring, model, offset = TouchRing(size), deque(maxlen=size), 0
    for gap, number, previous in steps:
        offset += gap
        oldest = (model[0].offset, model[0].number) if len(model) == size else None
        touch = Touch(offset, number, previous, frozenset({number}))
        assert ring.append(*touch) == oldest
        model.append(touch)

    wanted = [touch for touch in model if touch.offset >= position]
    assert list(ring.since(position)) == wanted
    assert list(ring.copy(position)) == wanted


@given(st.integers(1, 6), st.lists(st.integers(0, 9), max_size=8))
def test_touches_may_be_added_together(size, runs):
    """Adding runs of touches is adding each of them, also runs that are longer than the ring."""
    ring, other, dropped, offset = TouchRing(size), TouchRing(size), [], 0
    for length in runs:
        touches = [
            Touch(at, at % 5, at - 3, frozenset({at})) for at in range(offset, offset + length)
        ]
        offset += length
        columns = [list(column) for column in zip(*touches, strict=True)] or [[]] * 4
        lost = list(zip(*ring.extend(*columns), strict=True))
        one_by_one = [other.append(*touch) for touch in touches]
        assert lost == [found for found in one_by_one if found is not None]
        dropped += lost

    assert list(ring.since(0)) == list(other.since(0)) == list(ring.copy(0))
    assert [found for found, _ in dropped] == list(range(max(0, offset - size)))
