"""The timer wheel: no object expires early, none is forgotten, and an idle wheel sleeps."""

from __future__ import annotations

from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.server.http.deadlines import NEVER, SLOT_S, TimerWheel


class Timer:
    def __init__(self, at, callback):
        self.at = at
        self.callback = callback

    def cancel(self):
        self.at = NEVER


class Loop:
    """A loop whose clock is moved by hand."""

    def __init__(self):
        self.now = 1000.0
        self.timers = []

    def time(self):
        return self.now

    def call_at(self, at, callback):
        assert at > self.now - SLOT_S
        self.timers = [timer for timer in self.timers if timer.at != NEVER]
        self.timers.append(Timer(at, callback))
        return self.timers[-1]

    def run_to(self, moment):
        """Call what is due up to a time, in order."""
        while True:
            due = min(self.timers, key=lambda timer: timer.at, default=None)
            if due is None or due.at > moment:
                break
            self.timers.remove(due)
            self.now = max(self.now, due.at)
            due.callback()
        self.now = max(self.now, moment)


def make_wheel(loop):
    wheel = TimerWheel(loop)
    wheel.start()
    return wheel


class Thing:
    def __init__(self):
        self.deadline = NEVER
        self.slot = -1
        self.fired = []

    def expired(self, now):
        self.fired.append(now)


def test_fires_after_the_deadline_and_once():
    """An object expires within two slots after its deadline, once."""
    loop = Loop()
    wheel, thing = make_wheel(loop), Thing()
    wheel.set(thing, 1001.0)

    loop.run_to(1003.0)

    assert len(thing.fired) == 1
    assert 1001.0 <= thing.fired[0] <= 1001.0 + 3 * SLOT_S


def test_moving_later_by_assignment():
    """A deadline moved by assignment is checked when the old slot is due."""
    loop = Loop()
    wheel, thing = make_wheel(loop), Thing()
    wheel.set(thing, 1001.0)
    thing.deadline = 1002.0

    loop.run_to(1001.5)
    assert thing.fired == []
    loop.run_to(1003.0)
    assert len(thing.fired) == 1


def test_an_error_in_one_does_not_affect_others(caplog):
    """The error is logged; other objects of this slot and of later ones still expire."""
    loop = Loop()
    wheel, things = make_wheel(loop), [Thing() for _ in range(4)]
    things[1].expired = lambda now: 1 / 0
    for thing, deadline in zip(things, (1001.0, 1001.0, 1001.0, 1002.0), strict=True):
        wheel.set(thing, deadline)

    loop.run_to(1003.0)

    assert [len(thing.fired) for thing in things] == [1, 0, 1, 1]
    (record,) = caplog.records
    assert record.getMessage() == "deadline_failed"


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=30))
def test_any_sequence_of_moves(moves):
    """However a deadline is moved, the object expires soon after it, and not before."""
    loop = Loop()
    wheel, thing = make_wheel(loop), Thing()
    for wait, ahead in moves:
        loop.run_to(loop.now + wait * SLOT_S)
        if thing.fired:
            assert thing.fired[0] >= thing.deadline
            thing.fired.clear()
        wheel.set(thing, loop.now + ahead * SLOT_S)
    last = thing.deadline

    loop.run_to(last + 3 * SLOT_S)

    assert len(thing.fired) == 1
    assert thing.fired[0] >= last


def test_a_removed_object_does_not_expire():
    """A removed object is not called, not kept, and not added again by a later deadline."""
    loop = Loop()
    wheel, thing = make_wheel(loop), Thing()
    wheel.set(thing, 1001.0)
    wheel.set(thing, 1000.5)
    wheel.remove(thing)
    wheel.set(thing, 1001.0)
    forgotten = ref(thing)
    fired = thing.fired
    del thing

    assert forgotten() is None
    loop.run_to(1003.0)
    assert fired == []


def test_removed_by_another_of_its_slot():
    """An object that expires may remove others of the same slot."""
    loop = Loop()
    wheel, first, second = make_wheel(loop), Thing(), Thing()
    first.expired = lambda now: (first.fired.append(now), wheel.remove(second))
    second.expired = lambda now: (second.fired.append(now), wheel.remove(first))
    wheel.set(first, 1001.0)
    wheel.set(second, 1001.0)

    loop.run_to(1003.0)

    assert len(first.fired) + len(second.fired) == 1


def test_no_deadline_no_timer():
    """A wheel without deadlines sleeps, and one with a late deadline wakes up once."""
    loop = Loop()
    wheel, thing, other = make_wheel(loop), Thing(), Thing()

    assert loop.timers == []
    wheel.set(thing, 4600.0)
    wheel.set(other, 4600.0)
    assert [timer.at for timer in loop.timers] == [pytest.approx(4600.0, abs=2 * SLOT_S)]
    wheel.set(other, 1001.0)
    wheel.remove(other)
    loop.run_to(4700.0)
    assert len(thing.fired) == 1
    assert [timer for timer in loop.timers if timer.at != NEVER] == []


def test_a_deadline_that_has_passed_expires_at_once():
    """Also after a long sleep: the wheel counts from the clock, not from its last turn."""
    loop = Loop()
    wheel, thing = make_wheel(loop), Thing()
    loop.run_to(5000.0)

    wheel.set(thing, 5000.0)
    loop.run_to(5000.0 + 2 * SLOT_S)

    assert len(thing.fired) == 1
    assert wheel.now == loop.now
