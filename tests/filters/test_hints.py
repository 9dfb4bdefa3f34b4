"""Filters in the wrong language are refused with what was meant, or doubted where they are legal."""

from __future__ import annotations

import json
import subprocess
import sys
from time import process_time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.errors import FilterError
from virta.filters import DIALECTS, parse
from virta.filters.hints import doubt, likely_dialect, suggested_term
from virta.filters.query_string import KEY_CHARS_SHOWN, QUERY_CHARS_MAX
from virta.filters.query_string import parse as parse_query


def refused(source, dialect="query-string"):
    with pytest.raises(FilterError) as caught:
        parse(source, dialect)
    return caught.value


@pytest.mark.parametrize(
    ("query", "suggestion"),
    [
        ("a>5", "a=>5"),
        ("a>=5", "a=>=5"),
        ("a<5", "a=<5"),
        ("/a/b <= 5", "/a/b=<=5"),
        ("a!=5", "a=!5"),
        ("a <> 5", "a=!5"),
        ("status == 'paid'", "status=paid"),
        ('status = "paid"', "status=paid"),
        ("size == '5'", 'size="5"'),
        ("name == ''", 'name=""'),
        ("name == 'a b'", "name=a%20b"),
        ("x=1&a>5", "a=>5"),
        ("x=1;a>5", "a=>5"),
        ("../type == 'a'", "../type=a"),
        # The same as browsers and form encoders send it.
        ("a%3E5", "a=>5"),
        ("status%20==%20%27paid%27", "status=paid"),
        ("status+==+'paid'", "status=paid"),
        ("a%20%3E=%205", "a=>=5"),
        ("a%20!=%205", "a=!5"),
    ],
)
def test_comparisons_of_other_languages_are_refused(query, suggestion):
    """The error of a comparison suggests a term, and that term is valid."""
    error = refused(query)

    assert error.code == "invalid-key"
    assert error.members["suggestion"] == suggestion
    assert f"did you mean `{suggestion}`?" in error.message
    assert parse(suggestion).id


@pytest.mark.parametrize("character", ["<", ">", "{", "}", '"', "'", " ", "\t", "\n"])
def test_a_key_is_legal_when_it_is_escaped(character):
    """Percent-encoded and followed by `=`, any name can be a key. A term of the name alone is refused."""
    name = f"a{character}5"
    key = quote(name, safe="")

    assert parse(f"{key}=1").matches({"data": {name: 1}})
    assert parse(f"/{key}=1").matches({"data": {name: 1}})
    assert refused(f"{name}=1").members["key"] == name
    assert refused(name).code == refused(key).code == "invalid-key"


@pytest.mark.parametrize(
    ("query", "name", "value"),
    [
        ("x", "x", ""),
        ("a.b-c", "a.b-c", ""),
        ("a+b=1", "a b", 1),
        ("a%20=1", "a ", 1),
        ("a%3E=5", "a>", 5),
        ("a%21=5", "a!", 5),
        ("a=>5", "a", 6),
        ("a={}", "a", "{}"),
        ("a='x'", "a", "'x'"),
        ("a==5", "a", "=5"),
        ("a= 5", "a", 5),
    ],
)
def test_what_stays_legal(query, name, value):
    """Terms without a `=`, escaped keys, and any value."""
    assert parse(query).matches({"data": {name: value}})


@given(st.text(min_size=1, max_size=8), st.integers() | st.text(max_size=5))
def test_every_name_can_be_a_key(name, value):
    """A key and a JSON value that are percent-encoded as a whole find the member of that name."""
    if any("\ud800" <= c <= "\udfff" for c in name + str(value)) or name.startswith(("/", "../")):
        return
    term = f"{quote(name, safe='')}={quote(json.dumps(value), safe='')}"

    assert parse(term).matches({"data": {name: value}})


@pytest.mark.parametrize(
    ("source", "dialect", "likely"),
    [
        ('{"equals": {"a": 1}}', "query-string", "koncorde"),
        ({"equals": {"a": 1}}, "query-string", "koncorde"),
        ('{"exact": {"type": "a"}}', "query-string", "cloudevents"),
        ('[{"exact": {"type": "a"}}]', "query-string", "cloudevents"),
        ("type LIKE 'com.%'", "query-string", "cesql"),
        ("EXISTS subject AND type = 'a'", "query-string", "cesql"),
        ("a=1&b=>2", "koncorde", "query-string"),
        ("type = 'a'", "koncorde", "cesql"),
        ({"exact": {"type": "a"}}, "koncorde", "cloudevents"),
        ({"not": {"prefix": {"type": "a"}}}, "koncorde", "cloudevents"),
        (b"a=1", "koncorde", "query-string"),
        ("a=1&b=2", "cesql", "query-string"),
        ("/a=>5", "cesql", "query-string"),
        ('{"equals": {"a": 1}}', "cesql", "koncorde"),
        ({"any": []}, "cesql", "cloudevents"),
        ({"equals": {"a": 1}}, "cloudevents", "koncorde"),
        ("type = 'a'", "cloudevents", "cesql"),
    ],
)
def test_errors_name_the_likely_dialect(source, dialect, likely):
    """A filter of another dialect is refused with that dialect's name."""
    error = refused(source, dialect)

    assert error.members["likelyDialect"] == likely
    assert f'did you mean dialect "{likely}"?' in error.message


@pytest.mark.parametrize(
    ("source", "dialect"),
    [
        ("{", "koncorde"),
        ({"equals": {"a": {}}}, "koncorde"),
        ("type =", "cesql"),
        ("x=1&x=2", "query-string"),
        ({"exact": {}}, "cloudevents"),
        (5, "koncorde"),
    ],
)
def test_errors_of_the_right_dialect_stay_as_they_are(source, dialect):
    """What is simply wrong has no advice about dialects."""
    error = refused(source, dialect)

    assert "likelyDialect" not in error.members
    assert "dialect" not in error.message.replace("unknown filter dialect", "")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("levels", range(1, 12))
@pytest.mark.parametrize("inner", [5, [], {"equals": 1}, {"exact": 1}], ids=str)
def test_any_depth_of_not_is_refused(dialect, levels, inner):
    """However deep the first other keyword is, and whatever stands there: a FilterError, never another one."""
    source = inner
    for _ in range(levels):
        source = {"not": source}

    refused(source, dialect)
    refused(json.dumps(source), dialect)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("type='x'", "cesql"),
        ("a=1 AND b=2", "cesql"),
        ("a==5", "`a=5`"),
        ("x=1&a=='b'", "`a=b`"),
        ("a=%27b%27", "'b'"),
        ("a=1", None),
        ('a="5"', None),
        ("brand=1&not=2", None),
        ("a=it's", None),
        ("", None),
    ],
)
def test_doubts(query, words):
    """A valid filter that is probably not what was meant gives a warning."""
    parse(query)
    found = doubt(query, "query-string")

    assert (found is None) is (words is None)
    assert words is None or words in found


@pytest.mark.parametrize("dialect", ["query-string", "cesql", "koncorde", "cloudevents"])
@pytest.mark.parametrize("depth", range(1, 12))
def test_nested_not_around_a_number_is_refused(dialect, depth):
    """However many `not`s surround it, a number is a filter in no dialect, with a clear error."""
    source = 5
    for _ in range(depth):
        source = {"not": source}

    if dialect in {"query-string", "cesql"}:
        source = json.dumps(source)

    assert refused(source, dialect).message


def test_messages_stay_short():
    """A huge filter in the wrong dialect is not repeated in its error."""
    for source in ('{"equals": {"a": "' + "x" * 60_000 + '"}}', "a>" + "5" * 60_000):
        error = refused(source)

        assert len(error.message) < 4 * KEY_CHARS_SHOWN
        assert len(str(error.members)) < 4 * KEY_CHARS_SHOWN
    assert likely_dialect("x" * QUERY_CHARS_MAX) is None
    assert suggested_term("a ==> 5") is None


def test_the_server_gives_the_same_errors():
    """`query_string.parse`, which the server calls with its own limit, gives the same error."""
    with pytest.raises(FilterError) as caught:
        parse_query('{"equals": {"a": 1}}', terms_max=3)

    assert caught.value.message == refused('{"equals": {"a": 1}}').message


@pytest.mark.parametrize(
    "text",
    [
        "a=" * 8000 + " x",
        "a=" + " " * 16_000 + "x'",
        "a " + " " * 16_000 + "x",
        "a=1;" * 4000 + " ",
    ],
    ids=["equals-signs", "blanks", "blanks-without-equals", "terms"],
)
def test_hints_take_linear_time(text):
    """No text makes the search for a better message try every way to read it."""
    started = process_time()

    likely_dialect(text)
    suggested_term(text)
    doubt(text, "query-string")

    assert process_time() - started < 0.5


REFUSED = [
    ({"equals": 1}, "koncorde"),
    # Refusals that wait for the rest of the filter, also inside another filter.
    (FAR := {"geoDistance": {"c": {"lat": 95, "lon": 0}, "distance": "1m"}}, "koncorde"),
    ({"select": {"field": "a", "index": 0, "query": FAR}}, "koncorde"),
    ("a>5", "query-string"),
    ("a=%zz", "query-string"),
    ("a = = 1", "cesql"),
    ([{"exact": 1}], "cloudevents"),
    ("", "no dialect"),
]


@pytest.mark.parametrize(("source", "dialect"), REFUSED)
def test_refusals_leave_no_cycle(source, dialect):
    """The error of a refused filter is freed at once, not when the cyclic collector runs."""
    code = f"""
import gc
from virta.filters import FilterError, parse
def refuse():
    try:
        parse({source!r}, {dialect!r})
    except FilterError:
        return
    raise AssertionError("it was accepted")
refuse()
gc.collect()
gc.disable()
refuse()
assert gc.collect() == 0, "something was left in a cycle"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
