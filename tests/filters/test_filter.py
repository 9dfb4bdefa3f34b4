"""The public `Filter`: equal by meaning, whatever dialect it was written in, in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.filters import parse

queries = st.dictionaries(
    st.sampled_from("abc"), st.sampled_from(["1", "2", "x", "4"]), min_size=1
).map(lambda terms: [f"{name}={value}" for name, value in terms.items()])


@given(queries, st.randoms())
def test_the_order_does_not_matter(terms, random):
    """Two texts of one filter are equal, have one hash and one id, and serve as one key."""
    other = terms.copy()
    random.shuffle(other)
    one, same = parse("&".join(terms)), parse("&".join(other))

    assert one == same
    assert (hash(one), one.id, one.canonical()) == (hash(same), same.id, same.canonical())
    assert {one: 1}[same] == 1


@given(
    queries,
    st.fixed_dictionaries({}, optional=dict.fromkeys("abc", st.sampled_from([1, 2, 4, "x"]))),
)
def test_an_explanation_agrees_with_the_answer(terms, content):
    filter_, event = parse("&".join(terms)), {"id": "1", "source": "s", "data": content}

    assert filter_.explain(event).matches == filter_.matches(event)


def test_a_filter_is_not_its_text():
    filter_ = parse("a=1")

    assert filter_ != "a=1"
    assert filter_ != parse("a=2")
    assert repr(filter_).startswith("<Filter query-string {")


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_id_is_the_same_in_every_process(seed):
    """Strings hash differently in each process; ids are stored, and do not."""
    code = "from virta.filters import parse; print(parse('b=x&a=1').id)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert run.stdout.strip() == parse("a=1&b=x").id
    assert len(run.stdout.strip()) == 64
