"""Grants: verbs, patterns and row filters."""

from __future__ import annotations

import pytest

from virta.access import ALL_RIGHTS, VERBS, Rights, read_grants
from virta.access.grants import make_grant
from virta.errors import AccessError

EVENT = {"id": "1", "source": "s", "type": "t", "data": {"tenant": 42}}


def test_rights_are_by_verb_and_name():
    """A grant gives nothing but its verbs on its names."""
    rights = Rights((make_grant(["read"], "orders.*"), make_grant(["publish"], "orders.eu")))

    assert rights.permission("read", "orders.us").row_filter is None
    assert rights.permission("publish", "orders.us") is None
    assert rights.permission("read", "users") is None
    assert rights.has("read")
    assert not rights.has("admin")


def test_row_filters_of_several_grants_are_joined_by_or():
    """Each grant adds to what is allowed; one without a filter allows everything."""
    one = make_grant(["read"], "a", "tenant=1")
    two = make_grant(["read"], "*", "tenant=2")
    both = Rights((one, two)).permission("read", "a").row_filter
    free = Rights((one, make_grant(["read"], "**"))).permission("read", "a")

    assert [both.matches({"data": {"tenant": n}}) for n in (1, 2, 3)] == [True, True, False]
    assert Rights((one, two)).permission("read", "b").row_filter == two.filter
    assert free.row_filter is None


@pytest.mark.parametrize(
    ("filter_", "dialect"),
    [
        ("tenant=42", "query-string"),
        ("type = 't'", "cesql"),
        ([{"exact": {"type": "t"}}], "cloudevents"),
    ],
)
def test_row_filters_in_any_dialect(filter_, dialect):
    """They are read back from their JSON."""
    grant = make_grant(["read"], "**", filter_, dialect)
    (again,) = read_grants([grant.describe()])

    assert again.filter == grant.filter
    assert again.filter.matches(EVENT)


def test_row_filters_of_events_and_documents_do_not_mix():
    """They apply to different objects, so they cannot be joined."""
    grants = (
        make_grant(["read"], "a", "tenant=1"),
        make_grant(["read"], "b", {"equals": {"tenant": 1}}, "koncorde"),
    )
    with pytest.raises(AccessError, match="Koncorde"):
        Rights(grants)


@pytest.mark.parametrize(
    "value",
    [
        {},
        ["read"],
        [{}],
        [{"verbs": "read", "pattern": "a"}],
        [{"verbs": ["fly"], "pattern": "a"}],
        [{"verbs": [], "pattern": "a"}],
        [{"verbs": ["read"], "pattern": ""}],
        [{"verbs": ["read"], "pattern": 1}],
        [{"verbs": ["read"], "pattern": "a", "filter": "a>5"}],
        [{"verbs": ["read"], "pattern": "a", "filter": "a=5", "dialect": "sql"}],
        [{"verbs": ["read"], "pattern": "a", "more": 1}],
        [{"verbs": ["read"], "pattern": "a"}] * 101,
    ],
)
def test_invalid_grants_are_refused(value):
    """Nothing is guessed: a wrong grant is an error, not a smaller right."""
    with pytest.raises(AccessError) as refused:
        read_grants(value)

    assert refused.value.code in {"invalid-grant", "invalid-pattern"}


def test_all_rights():
    """They are what an open server and old token files give."""
    assert all(ALL_RIGHTS.has_all(verb) for verb in VERBS)
    assert ALL_RIGHTS.covers("read", "a:b")


def test_a_row_filter_is_no_whole_right():
    """Where no row filter can be applied, a grant with one does not count."""
    rights = Rights((make_grant(["read"], "**", "tenant=1"),))

    assert not rights.has_all("read")
    assert not rights.covers("read", "a")


def test_answers_that_are_kept_are_bounded():
    """Names come from requests: however many there are, memory is bounded."""
    rights = Rights((make_grant(["read"], "a*"),))
    for n in range(5000):
        rights.permission("read", f"a{n}")

    assert len(rights._kept) <= 1024
    assert rights.permission("read", "a1") is not None
