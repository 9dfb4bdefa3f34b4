"""The filter dialects of the CloudEvents Subscriptions API."""

from __future__ import annotations

import contextlib
import json
import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virta.errors import FilterError
from virta.filters import parse
from virta.filters.cesql.values import attribute, text_of
from virta.filters.limits import CONDITIONS_MAX, DEPTH_MAX
from virta.filters.tree import conditions

EVENT = {
    "specversion": "1.0",
    "id": "A234-1234-1234",
    "source": "https://github.com/cloudevents/spec",
    "type": "com.github.push",
    "subject": "https://github.com/cloudevents/spec/pull",
    "sequence": 5,
    "urgent": True,
    "unset": None,
    "data": {"type": "x"},
}


def holds(source, event=EVENT):
    return parse(source, "cloudevents").matches(event)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # The specification's own examples.
        ({"exact": {"type": "com.github.push", "subject": EVENT["subject"]}}, True),
        ({"exact": {"type": "com.github.push", "subject": "x"}}, False),
        ({"prefix": {"type": "com.github.", "subject": "https://github.com/cloudevents"}}, True),
        ({"suffix": {"type": ".created", "subject": "/cloudevents/spec"}}, False),
        ({"suffix": {"type": ".push", "source": "/cloudevents/spec"}}, True),
        ({"all": [{"exact": {"type": "com.github.push"}}, {"exact": {"id": "x"}}]}, False),
        ({"any": [{"exact": {"type": "com.github.push"}}, {"exact": {"id": "x"}}]}, True),
        ({"not": {"exact": {"type": "com.github.push"}}}, False),
        ({"sql": "source LIKE '%cloudevents%'"}, True),
        # Case matters, attributes are compared as text, a missing one fails.
        ({"exact": {"type": "com.github.Push"}}, False),
        ({"exact": {"sequence": "5"}}, True),
        ({"exact": {"sequence": "05"}}, False),
        ({"prefix": {"sequence": "5"}}, True),
        ({"suffix": {"sequence": "5"}}, True),
        ({"exact": {"urgent": "true"}}, True),
        ({"exact": {"urgent": "TRUE"}}, False),
        ({"prefix": {"urgent": "tr"}}, True),
        ({"suffix": {"urgent": "ue"}}, True),
        ({"exact": {"missing": "x"}}, False),
        ({"not": {"exact": {"missing": "x"}}}, True),
        ({"prefix": {"unset": "n"}}, False),
        ({"not": {"suffix": {"unset": "x"}}}, True),
        # Nesting.
        ({"not": {"any": [{"exact": {"id": "x"}}, {"prefix": {"id": "B"}}]}}, True),
        ({"all": [{"not": {"not": {"prefix": {"id": "A"}}}}]}, True),
        # sql: coerced to Boolean, false on a problem, so `not` holds then.
        ({"sql": "urgent"}, True),
        ({"sql": "'TRUE'"}, True),
        ({"sql": "sequence"}, True),
        ({"sql": "sequence - 5"}, False),
        ({"sql": "'yes'"}, False),
        ({"sql": "missing = 'x' OR TRUE"}, False),
        ({"not": {"sql": "missing = 'x' OR TRUE"}}, True),
        # A subscription's list of filters.
        ([], True),
        ([{"prefix": {"type": "com."}}, {"suffix": {"type": ".push"}}], True),
        ([{"prefix": {"type": "com."}}, {"suffix": {"type": ".pull"}}], False),
    ],
)
def test_dialects(source, expected):
    """Each dialect follows the specification, from an object or its JSON text."""
    assert holds(source) is expected
    assert holds(json.dumps(source)) is expected


@pytest.mark.parametrize(
    ("source", "path", "keyword"),
    [
        ({}, "", None),
        ({"exact": {"id": "1"}, "prefix": {"id": "1"}}, "", None),
        (5, "", None),
        ("5", "", None),
        ("null", "", None),
        ({"exact": {}}, "exact", "exact"),
        ({"exact": "x"}, "exact", "exact"),
        ({"exact": {"": "x"}}, "exact.", "exact"),
        ({"exact": {"type": ""}}, "exact.type", "exact"),
        ({"suffix": {"type": 5}}, "suffix.type", "suffix"),
        ({"prefix": {"dataContentType": "x"}}, "prefix.dataContentType", "prefix"),
        ({"prefix": {"data": "x"}}, "prefix.data", "prefix"),
        ({"all": []}, "all", "all"),
        ({"any": {"exact": {"id": "1"}}}, "any", "any"),
        ({"all": [{"exact": {"id": "1"}}, {"any": [5]}]}, "all[1].any[0]", None),
        ({"not": []}, "not", None),
        ({"sql": 5}, "sql", "sql"),
        ([{"not": {"sql": "id ="}}], "[0].not.sql", "sql"),
    ],
)
def test_refusals(source, path, keyword):
    """What is no filter is refused with the place and the dialect."""
    with pytest.raises(FilterError) as caught:
        parse(source, "cloudevents")

    assert (caught.value.path, caught.value.keyword) == (path, keyword)


def test_unknown_dialects_are_refused():
    """A subscription with a dialect we do not speak must be refused, by name."""
    with pytest.raises(FilterError, match="unknown filter dialect 'regex'") as caught:
        parse({"all": [{"regex": {"type": "x"}}]}, "cloudevents")

    assert caught.value.code == "dialect_unsupported"
    assert caught.value.path == "all[0]"


def test_text_that_is_no_json_is_refused():
    """JSON errors say where they are."""
    with pytest.raises(FilterError, match="line 1 column") as caught:
        parse("{", "cloudevents")

    assert caught.value.code == "invalid_json"


def test_comparisons_become_conditions():
    """Comparisons become conditions; those on texts that numbers could have are on the computed text."""
    source = {"all": [{"exact": {"type": "a"}}, {"prefix": {"id": "b"}}, {"suffix": {"id": "c"}}]}

    assert [c.op for c in conditions(parse(source, "cloudevents").tree)] == [
        "eq",
        "prefix",
        "suffix",
    ]
    (prefix,) = conditions(parse({"prefix": {"id": "5"}}, "cloudevents").tree)
    assert (prefix.op, str(prefix.path[0])) == ("prefix", "STRING(id)")


def test_ids_tell_texts_apart():
    """Texts that no CESQL literal can express still have ids of their own."""
    ids = {parse({"prefix": {"id": "5" + "\\" * n}}, "cloudevents").id for n in range(5)}

    assert len(ids) == 5


NAMES = st.sampled_from(["a", "b", "id"])
TEXTS = st.sampled_from(
    ["a", "ab", "t", "true", "e", "5", "-5", "1.5", "}", "[", "y", "Na", "\\", "'"]
)
VALUES = (
    TEXTS
    | st.booleans()
    | st.sampled_from(
        [None, 5, -5, 5.0, 1.5, 10**12, float("inf"), {"a": 1}, [1], "", "5\\", "it's"]
    )
)
LEAVES = st.builds(
    lambda dialect, attributes: {dialect: attributes},
    st.sampled_from(["exact", "prefix", "suffix"]),
    st.dictionaries(NAMES, TEXTS, min_size=1),
)
FILTERS = st.recursive(
    LEAVES,
    lambda x: (
        st.lists(x, min_size=1, max_size=3).map(lambda xs: {"all": xs})
        | st.lists(x, min_size=1, max_size=3).map(lambda xs: {"any": xs})
        | x.map(lambda y: {"not": y})
    ),
    max_leaves=6,
)


def model(source, event):
    """The specification, word for word."""
    ((dialect, argument),) = source.items()
    if dialect == "not":
        return not model(argument, event)
    if dialect in {"all", "any"}:
        return {"all": all, "any": any}[dialect](model(x, event) for x in argument)
    compare = {"exact": str.__eq__, "prefix": str.startswith, "suffix": str.endswith}[dialect]
    found = {name: attribute(event, name) for name in argument}
    return all(
        found[name] is not None and compare(text_of(found[name]), text)
        for name, text in argument.items()
    )


@settings(max_examples=800, deadline=None)
@given(FILTERS, st.lists(st.dictionaries(NAMES, VALUES), min_size=1, max_size=4))
def test_filters_agree_with_the_model(source, events):
    """Filters hold exactly when the specification's words do, and survive pickling."""
    filter_ = parse(source, "cloudevents")

    assert pickle.loads(pickle.dumps(filter_.tree)) == filter_.tree
    for event in events:
        assert filter_.matches(event) is model(source, event)


def nested(depth):
    source = {"exact": {"id": "1"}}
    for _ in range(depth):
        source = {"not": source}
    return source


HOSTILE = {
    "deep text": '{"not":' * 10_000 + "5" + "}" * 10_000,
    "deep": nested(10_000),
    "deep lists": "[" * 100_000,
    "wide": {"any": [{"exact": {"id": str(i)}} for i in range(100_000)]},
    "many attributes": {"exact": {f"a{i}": "x" for i in range(100_000)}},
    "full": {"any": [{"exact": {"id": str(i)}} for i in range(CONDITIONS_MAX // 2)]},
    "long text": {"prefix": {"id": "5" * (1 << 20)}},
    "long name": {"exact": {"a" * (1 << 20): "x"}},
    "long dialect": {"x" * (1 << 20): {}},
    "five megabytes": " " * (5 << 20),
    "surrogates": {"prefix": {"id": "\ud800" * 1000}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_filters_are_quick(name):
    """A filter of any size and shape is answered or refused within 100 ms."""

    def seconds():
        start = time.process_time()
        with contextlib.suppress(FilterError):
            parse(HOSTILE[name], "cloudevents").matches({"id": "5" * 100_000})
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 0.1


def test_the_deepest_filter_works():
    """Nesting up to the limit is no trouble, one more is a clear error."""
    depth = DEPTH_MAX - 1

    assert holds(nested(depth)) is bool(depth % 2)
    with pytest.raises(FilterError) as caught:
        parse(nested(DEPTH_MAX), "cloudevents")

    assert caught.value.code == "too_complex"
