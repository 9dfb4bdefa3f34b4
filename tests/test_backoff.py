"""`virta.backoff`: doubling waits with a maximum and jitter."""

from __future__ import annotations

import pytest

from virta.backoff import Backoff, backoff


def test_waits_double_up_to_the_longest():
    """Each wait is twice the one before, and no more than the maximum."""
    assert [backoff(n, 0.1, 1.0) for n in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1, 1])


def test_a_long_first_wait_is_its_own_maximum():
    """A maximum below the first wait does not shorten it."""
    assert backoff(3, 10.0, 5.0) == 10.0


def test_thousands_of_attempts_do_not_overflow():
    """The number of attempts is not limited."""
    assert backoff(100_000, 0.001, 60.0) == 60.0


@pytest.mark.parametrize(("fraction", "wait"), [(0.0, 8.0), (0.5, 7.0), (1.0, 6.0)])
def test_jitter_shortens_by_a_given_fraction(fraction, wait):
    """A quarter of jitter cuts off up to a quarter."""
    assert backoff(2, 2.0, 100.0, jitter=0.25, fraction=fraction) == pytest.approx(wait)


def test_random_jitter_stays_in_its_bounds():
    """Without a fraction the cut is random, and never lengthens the wait."""
    waits = {backoff(0, 1.0, 5.0, jitter=0.5) for _ in range(100)}

    assert len(waits) > 50
    assert all(0.5 <= wait <= 1.0 for wait in waits)


def test_a_sequence_counts_and_resets():
    """`next` counts attempts; `reset` starts again."""
    waits = Backoff(1.0, 3.0)

    assert [waits.next(), waits.next(), waits.next()] == [1.0, 2.0, 3.0]

    waits.reset()

    assert waits.next() == 1.0
