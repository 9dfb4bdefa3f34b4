"""
Koncorde's recorded answers, all of them.

Every vector must come out as recorded unless it shows a quirk that we do not keep; those are listed
below, by the name the specification gives them, with what we answer instead. A vector that differs for
no such reason fails, and so does a listed difference that is none.
"""

from __future__ import annotations

import itertools
import json
from decimal import Decimal

import pytest
from koncorde_vectors import kept, suite

from virta.errors import FilterError
from virta.filters.canonical import canonicalise, conjunctions
from virta.filters.koncorde.reader import convert_distance, convert_geopoint, parse
from virta.filters.tree import Condition

# Quirk -> why we differ. Vectors carry the name in `quirk`.
QUIRKS = {
    "impossible-predicate-pruning": "a pruning that is wrong about array values, or about 1 and '1', "
    "drops filters that can match; `quirkPairs` of the vector names the pairs, and there we match",
    "prototype-names": "fields named like members of JavaScript's Object are ordinary fields here",
    "range-epsilon": "bounds are compared strictly, not shifted by 1e-10",
    "geo-in-compound": "geographic conditions are allowed in every and, or, not",
    "validates-but-does-not-register": "`not select` and `not nothing` work; a box inside out is refused",
    "process-abort": "a latitude beyond the poles and a distance that is no number are refused",
    "internal-error": "a box that is null is refused as any other that is none",
}
# Vectors that show a quirk of the specification's list but do not carry its name.
UNTAGGED = {
    "scalar-filters-are-everything": {
        "cat-0002",
        "cat-0003",
        "cat-0004",
        "cat-0005",
        "cat-0006",
        "cat-0010",
        "suite-val-013",
    },
}
REFUSED_HERE = UNTAGGED["scalar-filters-are-everything"] | {
    "cat-0209",  # box inside out
    "cat-0237",  # latitude 95
    "cat-0238",  # distance abc5m
}
RANGE_EPSILON = {"hand-015": [[0], [0], [1, 2, 3], [1, 2, 3]]}


def vectors(kind):
    return kept().get(kind, [])


def suite_vectors(kind):
    found = suite()
    if found is None:
        pytest.skip("Koncorde's own test suite is not at hand (../shared/vectors)")
    return found.get(kind, [])


BOTH = pytest.mark.parametrize("source", [vectors, suite_vectors], ids=["kept", "suite"])


def read(source):
    """A filter as the product gets it: JSON text when it is a string, which text would be."""
    return parse(json.dumps(source) if isinstance(source, str) else source)


def expected_matches(vector):
    """The recorded answers, with the quirks set right."""
    if vector["id"] in RANGE_EPSILON:
        return RANGE_EPSILON[vector["id"]]
    expected = [set(found) for found in vector["expect"]]
    for pair in vector.get("quirkPairs", ()):
        if pair["withoutPruning"]:
            expected[pair["doc"]].add(pair["filter"])
        else:
            expected[pair["doc"]].discard(pair["filter"])
    return [sorted(found) for found in expected]


@BOTH
def test_match(source):
    """Each document matches the filters it should, by the tree as read and by its canonical form."""
    wrong = []
    for vector in source("match"):
        assert vector.get("quirk") is None or vector["quirk"] in QUIRKS, vector["id"]
        filters = [read(f) for f in vector["filters"]]
        canonical = [type(f)(canonicalise(f.tree)) for f in filters]
        for number, (document, expected) in enumerate(
            zip(vector["documents"], expected_matches(vector), strict=True)
        ):
            doc = document["doc"]
            if "docId" in document:
                doc = doc | {"_id": document["docId"]}
            for engine in (filters, canonical):
                found = [i for i, f in enumerate(engine) if f.matches(doc)]
                if found != expected:
                    wrong.append((vector["id"], number, found, expected))

    assert not wrong, f"{len(wrong)} wrong, first {wrong[:3]}"


@BOTH
def test_validate(source):
    """Filters are taken or refused as recorded, with message, keyword and path."""
    wrong = []
    for vector in source("validate"):
        assert vector.get("quirk") in {*QUIRKS, None, "plain-error"}, vector["id"]
        try:
            read(vector["filter"])
            found = None
        except FilterError as exc:
            found = {"message": exc.message, "keyword": exc.keyword, "path": exc.path}
        if not agrees(vector, found):
            wrong.append((vector["id"], found, vector.get("error")))

    assert not wrong, f"{len(wrong)} wrong, first {wrong[:3]}"


def agrees(vector, found):
    if vector["id"] in REFUSED_HERE:
        assert vector["valid"]
        return found is not None
    if vector.get("quirk") == "geo-in-compound":
        return found is None
    if vector.get("quirk") == "internal-error":
        return found is not None
    if vector["valid"] or found is None:
        return vector["valid"] and found is None
    expected = {"keyword": None, "path": None} | vector["error"]
    del expected["type"]
    if vector.get("engineSpecificMessage"):
        for each in (found, expected):
            each["message"] = each["message"].rpartition("(")[0]
    return found == expected


def test_refused_filters_are_no_more_than_the_listed():
    """The list of filters only we refuse has no dead entries."""
    valid = {v["id"] for v in kept()["validate"] if v["valid"]}

    assert {i for i in REFUSED_HERE if not i.startswith("suite-")} <= valid


def test_distance():
    """Distances in metres, or Koncorde's message."""
    for vector in vectors("distance"):
        if "error" in vector:
            with pytest.raises(FilterError) as caught:
                convert_distance(vector["input"])
            assert caught.value.message == vector["error"]["message"]
        else:
            assert convert_distance(vector["input"]) == vector["result"], vector["id"]


def test_geopoint():
    """Points in every notation; `{latLon: null}` is no point where Koncorde throws."""
    for vector in vectors("geopoint"):
        point = convert_geopoint(vector["input"])
        expected = vector.get("result")
        assert point == (None if expected is None else (expected["lat"], expected["lon"])), vector


@BOTH
def test_sequences_tell_filters_apart(source):
    """In recorded sessions two filters of an index have one id exactly where Koncorde gave them one."""
    for vector in source("sequence"):
        limit = vector.get("config", {}).get("maxConditions", 50)
        ids = {}
        for op in vector["ops"]:
            if op["op"] not in ("register", "normalize") or "error" in op:
                continue
            key = (parse(op["filter"], conditions_max=limit).id, op["index"])
            assert ids.setdefault(op["result"], key) == key, vector["id"]
        assert len(set(ids.values())) == len(ids), vector["id"]


# Vectors whose recorded normal form is not ours, and why.
NORMALIZE_DIFFERS = {
    "norm-0099": "pruned: contains and does not contain are about different elements",
    "norm-0152": "pruned: a value that is no array lacks an element",
    "norm-0220": "pruned: contains and does not contain are about different elements",
    "norm-0502": "pruned: contains and does not contain are about different elements",
    "norm-0554": "pruned: contains and does not contain are about different elements",
    "norm-0657": "x without 2 or x without 3 is x, which Koncorde does not see",
}


def test_normalize():
    """Koncorde's normal form, read as a filter, has the conjunctions of our canonical form."""
    wrong = {
        vector["id"]
        for vector in vectors("normalize")
        if terms(read(vector["filter"])) != terms(read(denormalized(vector["normalized"])))
    }

    assert wrong == set(NORMALIZE_DIFFERS)


def terms(filter_):
    """The conjunctions that no other covers, `in` lists spelled out as Koncorde does."""
    found = conjunctions(canonicalise(filter_.tree), limit=100_000)
    assert found is not None
    spelled_out = {
        frozenset(choice)
        for term in found
        for choice in itertools.product(
            *(
                [Condition(c.path, "eq", v) for v in c.value]
                if getattr(c, "op", "") == "in"
                else [c]
                for c in term
            )
        )
    }
    return {term for term in spelled_out if not any(other < term for other in spelled_out)}


def denormalized(subfilters):
    """The filter that Koncorde's normal form stands for."""
    return {"or": [{"and": [condition(c) for c in subfilter]} for subfilter in subfilters]}


def condition(normal):
    negated = normal.get("not", False)
    ((keyword, value),) = ((k, v) for k, v in normal.items() if k != "not")
    if keyword == "everything":
        return {"not": {"nothing": True}}
    if keyword == "exists":
        element = f"[{json.dumps(value['value'])}]" if value["array"] else ""
        value = value["path"].replace("[", "\\[").replace("]", "\\]") + element
    elif keyword == "geospatial":
        ((keyword, shape),) = value.items()
        value = spelled(keyword, shape)
    return {"not": {keyword: value}} if negated else {keyword: value}


def spelled(keyword, shapes):
    ((field, shape),) = shapes.items()
    if keyword == "geoPolygon":
        return {field: {"points": shape}}
    if keyword == "geoBoundingBox":
        return {field: shape}
    rest = {k: f"{Decimal(repr(v)):f} m" for k, v in shape.items() if k not in ("lat", "lon")}
    return {field: [shape["lat"], shape["lon"]], **rest}
