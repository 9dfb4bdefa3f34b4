"""The table of events already taken, against its rules and a model."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from virta import native
from virta.hub.idempotency import Idempotency, PlainKeyTable, key_of

_native = native.load("virta.hub._native")
TABLES = [PlainKeyTable] if _native is None else [PlainKeyTable, _native.KeyTable]


@pytest.fixture(params=TABLES, ids=lambda table: table.__module__)
def make(request):
    """Make a table, with each engine."""

    def build(keys_max=100, horizon_s=10.0):
        return Idempotency(keys_max=keys_max, horizon_s=horizon_s, table=request.param)

    return build


def commit(table, key, offset, now):
    assert table.claim(key)
    table.commit([(key, offset)], now)


def test_a_claimed_key_is_held_until_released(make):
    """Two requests with one event: the second knows of the first before it is written."""
    table = make()

    assert table.claim("a")
    assert not table.claim("a")
    assert table.offset("a") is None
    table.release(["a"])
    assert table.claim("a")


def test_claiming_many_is_all_or_nothing(make):
    """Keys are taken together when all are free and different, else none is."""
    table = make()

    assert table.claim_all(["a", "b"])
    assert not table.claim_all(["b", "c"])
    assert not table.claim_all(["d", "d"])
    assert table.claim_all(["c", "d"])


def test_release_never_takes_what_is_written(make):
    """A failed write of a repeat does not forget the first."""
    table = make()
    commit(table, "a", 5, 0.0)

    table.release(["a"])

    assert table.offset("a") == 5


def test_expiry_counts_from_the_first(make):
    """A key is forgotten a horizon after it was written; repeats do not renew it."""
    table = make(horizon_s=10.0)
    commit(table, "a", 0, 0.0)
    table.expire(9.9)
    assert not table.claim("a")

    table.expire(10.0)

    assert table.claim("a")
    assert len(table) == 1


def test_the_oldest_go_first(make):
    """Over the limit the oldest keys are forgotten, one by one, also within one write."""
    table = make(keys_max=3)
    for key in "abcde":
        table.claim(key)
    table.commit([(key, n) for n, key in enumerate("abcde")], 0.0)

    assert [key for key in "abcde" if table.offset(key) is not None] == ["c", "d", "e"]


def test_a_limit_of_none_still_remembers_the_last(make):
    """As Thorium does."""
    table = make(keys_max=0)
    commit(table, "a", 0, 0.0)
    commit(table, "b", 1, 0.0)

    assert (table.offset("a"), table.offset("b")) == (None, 1)


def test_keys_do_not_run_together():
    """Channel, source and id are three things, however they are cut."""
    assert len({key_of("a", "b", "c"), key_of("a", "b c", ""), key_of("ab", "", "c")}) == 3


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3)), max_size=60))
def test_agrees_with_a_model(make, steps):
    """Random claims over passing time: held exactly when written within the horizon and the limit."""
    table = make(keys_max=4, horizon_s=5.0)
    model = {}
    now = 0.0
    for offset, (key, passed) in enumerate(steps):
        now += passed
        table.expire(now)
        model = {k: t for k, t in model.items() if now - t < 5.0}
        assert table.claim(key) == (key not in model)
        if key not in model:
            table.commit([(key, offset)], now)
            model[key] = now
            while len(model) > 4:
                del model[next(iter(model))]
        assert len(table) == len(model)


def test_neighbours_expire_with_the_last_of_them(make):
    """Keys committed at nearly the same time share a group: none is forgotten early, and none is kept long."""
    table = make()
    for number in range(5):
        table.commit([(f"k{number}", number)], 1.0 + number * 0.004)

    table.expire(11.007)
    assert [table.offset(f"k{number}") for number in range(5)] == [0, 1, 2, 3, 4]
    table.expire(11.0085)
    assert [table.offset(f"k{number}") for number in range(5)] == [None, None, None, 3, 4]
    table.expire(11.016)
    assert len(table) == 0
