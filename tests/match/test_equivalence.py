"""The index agrees with the plain evaluator: random filters, random documents, every way in."""

from __future__ import annotations

import json
import random
import threading

import pytest
from randoms import Randoms

from virta.filters import parse
from virta.match import Matcher

ROUNDS = 12
FILTERS = 60
EVENTS = 40


def expected(filters, event):
    return {f.id for f in filters if f.matches(event)}


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_index_equals_evaluator(engine, seed):
    """For every filter and event, the index finds the filter exactly when the evaluator does."""
    randoms = Randoms(seed)
    filters = [randoms.filter() for _ in range(FILTERS)]
    events = [randoms.event() for _ in range(EVENTS)]
    matcher = Matcher(engine=engine)
    matcher.add_many(filters)

    for event in events:
        found = matcher.match(event)
        assert set(found) == expected(filters, event), event
        assert len(found) == len(set(found))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_json_equals_objects(engine, seed):
    """Bytes, lists of bytes, one buffer of lines and objects all give the same answers."""
    randoms = Randoms(1000 + seed)
    filters = [randoms.filter() for _ in range(FILTERS)]
    events = [randoms.event() for _ in range(EVENTS)]
    encoded = [json.dumps(event).encode() for event in events]
    matcher = Matcher(engine=engine)
    matcher.add_many(filters)

    expected_ids = [set(matcher.match(event)) for event in events]

    assert [set(matcher.match(data)) for data in encoded] == expected_ids
    assert [set(ids) for ids in matcher.match_many(encoded)] == expected_ids
    assert [set(ids) for ids in matcher.match_many(events)] == expected_ids
    assert [set(ids) for ids in matcher.match_many(b"\n".join(encoded))] == expected_ids
    numbers, offsets = matcher.match_many(encoded, output="uint32")
    found = [set(numbers[offsets[i] : offsets[i + 1]]) for i in range(len(events))]
    assert [{matcher.id_of(n) for n in ns} for ns in found] == expected_ids


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_removed_filters_do_not_match(engine, seed):
    """After any mix of additions and removals the index holds exactly what is left."""
    randoms = Randoms(2000 + seed)
    filters = {f.id: f for f in (randoms.filter() for _ in range(FILTERS))}
    events = [randoms.event() for _ in range(EVENTS // 2)]
    matcher = Matcher(engine=engine)
    live = {}
    for _ in range(4):
        for id_, filter_ in filters.items():
            if id_ in live and randoms.rng.random() < 0.6:
                assert matcher.remove(id_)
                del live[id_]
            elif id_ not in live and randoms.rng.random() < 0.6:
                matcher.add(filter_)
                live[id_] = filter_
        for event in events:
            assert set(matcher.match(event)) == expected(live.values(), event), event
    for id_ in live:
        matcher.remove(id_)

    assert len(matcher) == 0
    assert all(matcher.match(event) == [] for event in events)
    stats = matcher.stats()
    assert (stats["filters"], stats["conjunctions"], stats["unindexed"]) == (0, 0, 0)
    if engine == "native":
        assert (stats["atoms"], stats["conditions"], stats["paths"], stats["regexps"]) == (
            0,
            0,
            0,
            0,
        )


@pytest.mark.slow
def test_matching_while_filters_change(engine):
    """Threads that add and remove filters never disturb the filters that stay."""
    randoms = Randoms(7)
    steady = [randoms.filter() for _ in range(FILTERS)]
    steady_ids = {f.id for f in steady}
    moving = [f for f in (randoms.filter() for _ in range(300)) if f.id not in steady_ids]
    events = [randoms.event() for _ in range(EVENTS)]
    encoded = [json.dumps(event).encode() for event in events]
    matcher = Matcher(engine=engine)
    matcher.add_many(steady)
    wanted = [expected(steady, event) for event in events]
    failures: list[str] = []
    done = threading.Event()

    def churn(seed):
        rng = Randoms(seed).rng
        while not done.is_set():
            chosen = [rng.choice(moving) for _ in range(20)]
            ids = [matcher.add(f) for f in chosen]
            for id_ in ids:
                matcher.remove(id_)

    def check(batches):
        for turn in range(batches):
            if turn % 2:
                found = matcher.match_many(encoded)
            else:
                found = [matcher.match(event) for event in events]
            failures.extend(
                f"event {i}: {set(ids) & steady_ids ^ wanted[i]}"
                for i, ids in enumerate(found)
                if set(ids) & steady_ids != wanted[i]
            )

    batches = 60 if engine == "native" else 10
    writers = [threading.Thread(target=churn, args=(seed,)) for seed in (1, 2)]
    readers = [threading.Thread(target=check, args=(batches,)) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    done.set()
    for thread in writers:
        thread.join()

    assert failures == []
    assert len(matcher) == len(steady_ids)
    for event, ids in zip(events, wanted, strict=True):
        assert set(matcher.match(event)) == ids


def random_change(rng, kept):
    """Return the source of a filter that shares its values with many others, or one to remove."""
    if kept and rng.random() < 0.45:
        return None
    a, b = rng.randrange(4), rng.randrange(4)
    return rng.choice(
        [
            {"equals": {"a": a}},
            {"in": {"c": sorted({f"v{a}", f"v{b}"})}},
            {"equals": {"c": f"v{a}"}},
            {"and": [{"equals": {"a": a}}, {"range": {"b": {"gte": b}}}]},
            {"or": [{"equals": {"a": a}}, {"equals": {"b": b}}]},
            {"exists": f"tags[{rng.randrange(300)}]"},
            {"and": [{"exists": f"tags[{rng.randrange(300)}]"}, {"equals": {"b": b}}]},
        ]
    )


@pytest.mark.parametrize("seed", range(5))
def test_filters_come_and_go_on_the_same_values(engine, seed):
    """A value finds one filter, several, and one again; the elements of arrays are found all the while."""
    rng = random.Random(seed)
    matcher, kept = Matcher(engine=engine), {}
    for step in range(1500):
        source = random_change(rng, kept)
        if source is None:
            id_ = rng.choice(sorted(kept))
            filter_, count = kept[id_]
            matcher.remove(id_)
            kept[id_] = filter_, count - 1
            if count == 1:
                del kept[id_]
        else:
            filter_ = parse(source, "koncorde")
            kept[filter_.id] = filter_, kept.get(filter_.id, (filter_, 0))[1] + 1
            matcher.add(filter_)
        if step % 10:
            continue
        event = {"a": rng.randrange(5), "b": rng.randrange(5), "c": f"v{rng.randrange(5)}"}
        event["tags"] = rng.sample(range(400), 40)
        wanted = sorted(id_ for id_, (filter_, _) in kept.items() if filter_.matches(event))
        assert sorted(matcher.match(event)) == wanted
        assert sorted(matcher.match(json.dumps(event).encode())) == wanted
