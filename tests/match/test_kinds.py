"""Every keyword, operator and function of every dialect is evaluated by the index, and found by a condition."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from virta.filters import parse
from virta.match import Matcher, filter_cost

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import match_cliffs as cliffs

KINDS = [
    *cliffs.query_string(),
    *cliffs.koncorde(),
    *cliffs.cesql(),
    *cliffs.cloudevents(),
]
# A negation alone holds for nearly every event: nothing finds it.
SCANNED = {"! alone", "not alone", "not select", "not match objects"}


@pytest.mark.parametrize("kind", KINDS, ids=[f"{kind[0]} {kind[1]}" for kind in KINDS])
def test_no_kind_leaves_the_index(kind, engine):
    """Natively no part runs in Python, only negations alone are scanned, and the answers are the evaluator's."""
    dialect, name, make = kind
    rng = random.Random(name)
    filters = {}
    for number in range(40):
        filter_ = parse(make(number, rng), dialect)
        filters[filter_.id] = filter_
    matcher = Matcher(engine=engine)
    matcher.add_many(filters.values())

    for filter_ in list(filters.values())[:5]:
        cost = filter_cost(filter_)
        assert cost.python == ()
        assert (cost.kind == "scanned") == (name in SCANNED)
    if engine == "native":
        assert matcher.stats()["python_conditions"] == 0
    for _ in range(40):
        event = (cliffs.document if dialect == "koncorde" else cliffs.event)(rng)
        wanted = {id_ for id_, filter_ in filters.items() if filter_.matches(event)}
        assert set(matcher.match(event)) == set(matcher.match(json.dumps(event))) == wanted


def test_each_word_of_the_languages_has_a_kind():
    """A function, keyword or comparison that is added to a dialect is priced and measured, too."""
    from virta.filters import cloudevents
    from virta.filters.cesql.functions import FUNCTIONS
    from virta.filters.koncorde import geo, reader

    words = {"koncorde": {*reader.LEAVES, *reader.OPERANDS, *geo.READERS}}
    words["cesql"] = {*FUNCTIONS}
    words["cloudevents"] = {*cloudevents.COMPARISONS}
    for dialect, wanted in words.items():
        rng = random.Random(1)
        written = " ".join(json.dumps(make(0, rng)) for d, _, make in KINDS if d == dialect)
        assert [word for word in wanted if word not in written] == []
