"""Tickets, sessions and rate limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.access import ALL_RIGHTS, Principal, rates, tickets
from virta.access.rates import RateLimiter
from virta.access.tickets import IssuedSecrets, new_sessions, new_tickets
from virta.errors import AccessError

SHOP = Principal("shop", "token", ALL_RIGHTS)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_ticket_is_for_one_use():
    """The second use is refused with the same words as an unknown one."""
    issued = new_tickets()
    ticket, _ = issued.issue(SHOP)

    assert issued.find(ticket, once=True) is SHOP
    with pytest.raises(AccessError) as again:
        issued.find(ticket, once=True)
    with pytest.raises(AccessError) as unknown:
        issued.find("vt_x", once=True)
    assert again.value.message == unknown.value.message
    assert again.value.code == "ticket-unknown"


def test_a_ticket_is_for_a_short_time():
    """After 30 seconds it is refused, and it is gone."""
    clock = Clock()
    issued = new_tickets(clock)
    ticket, expires = issued.issue(SHOP)
    clock.now = expires
    with pytest.raises(AccessError):
        issued.find(ticket, once=True)

    assert expires == tickets.TICKET_S
    assert len(issued) == 0


def test_a_session_is_for_many_uses():
    """Until it is dropped."""
    issued = new_sessions()
    session, _ = issued.issue(SHOP)
    assert [issued.find(session, once=False) for _ in range(3)] == [SHOP] * 3
    issued.drop(session)
    with pytest.raises(AccessError) as refused:
        issued.find(session, once=False)

    assert refused.value.code == "session-unknown"


def test_nothing_lasts_longer_than_its_principal():
    """A session of a token that expires in a minute expires in a minute."""
    _, expires = new_sessions(Clock()).issue(Principal("p", "token", ALL_RIGHTS, 60.0))

    assert expires == 60.0


def test_the_oldest_are_dropped():
    """However many are asked for, memory is bounded."""
    issued = IssuedSecrets(30.0, 3, clock=Clock())
    given_ = [issued.issue(SHOP)[0] for _ in range(5)]

    assert len(issued) == 3
    assert issued.find(given_[-1], once=True) is SHOP
    with pytest.raises(AccessError):
        issued.find(given_[0], once=True)


def test_bursts_pass_and_the_rate_holds():
    """Two seconds' worth at once, then as many as the rate allows."""
    clock = Clock()
    limiter = RateLimiter(10, clock)
    assert sum(limiter.wait_s("a") == 0 for _ in range(50)) == 20
    assert limiter.wait_s("a") == pytest.approx(0.1)
    clock.now += 1.0
    assert sum(limiter.wait_s("a") == 0 for _ in range(50)) == 10
    assert limiter.wait_s("b") == 0.0


@given(st.floats(0.1, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_never_more_than_the_rate(rate, pauses):
    """Whatever the pauses, what is allowed is at most the burst and the rate over the time."""
    clock = Clock()
    limiter = RateLimiter(rate, clock)
    allowed = 0
    for pause in pauses:
        clock.now += pause
        allowed += limiter.wait_s("a") == 0.0

    assert allowed <= max(1.0, rate * rates.BURST_S) + rate * clock.now + 1e-6


def test_keys_are_bounded(monkeypatch):
    """Addresses come from clients."""
    monkeypatch.setattr(rates, "KEYS_MAX", 10)
    limiter = RateLimiter(1, Clock())
    for n in range(100):
        limiter.wait_s(str(n))

    assert len(limiter) == 10
