"""
Random everything against the native index, until the time is up: `make fuzz`.

Filters come and go, 40 of them CESQL expressions in each round; sources of every dialect are compiled by both engines;
events are matched as objects, as JSON and as JSON with broken bytes; programs are damaged before they are added, and
images before they are opened. The evaluator and the plain engine define the right answers; the sanitizers, with which
`make fuzz` builds the index, find memory errors. A failure prints the seed that repeats it.
"""

from __future__ import annotations

import json
import os
import tempfile

from cesql_randoms import CesqlRandoms
from randoms import Randoms
from source_randoms import SourceRandoms

import virta.match._core as core
from fuzz_rounds import repeat
from virta.errors import EventError, FilterError
from virta.filters import DIALECTS, parse
from virta.filters.cesql import evaluate
from virta.match import Matcher, compile_filter
from virta.match.compile import compile_source
from virta.match.engine import NativeEngine


def differential(randoms):
    """Adding, removing and matching agree with the evaluator."""
    matcher = Matcher(engine="native")
    live = {}
    for _ in range(6):
        for _ in range(15):
            filter_ = randoms.filter()
            live[matcher.add(filter_)] = filter_
        for id_ in list(live):
            if randoms.rng.random() < 0.3:
                while id_ in matcher:
                    matcher.remove(id_)
                del live[id_]
        for event in [randoms.event() for _ in range(6)]:
            wanted = {id_ for id_, filter_ in live.items() if filter_.matches(event)}
            text = json.dumps(event).encode()
            assert set(matcher.match(event)) == wanted, event
            assert set(matcher.match_many([text])[0]) == wanted, text
            (members,) = matcher.match_members([text], ("a", "b"))
            assert members is None or members[0] == len(wanted), text
    return matcher, live


def broken_json(randoms, matcher, live):
    """Damaged bytes: the same answer or the same refusal as the plain engine's."""
    plain = Matcher(engine="plain")
    plain.add_many(live.values())
    for _ in range(15):
        text = bytearray(json.dumps(randoms.event()).encode())
        for _ in range(randoms.rng.randint(0, 3)):
            text[randoms.rng.randrange(len(text))] = randoms.pick(
                b'{}[]",:0123456789eE.-\\u\x00\xff nt'
            )
        answers = [answer(engine, bytes(text)) for engine in (matcher, plain)]
        assert answers[0] == answers[1], bytes(text)
        (members,) = matcher.match_members([bytes(text)], ("a", "é"))
        if members is not None:  # it was read, so it was no error either
            assert isinstance(answers[0], set), bytes(text)
            assert members[0] == len(answers[0]), bytes(text)


def answer(matcher, text):
    try:
        return set(matcher.match(text))
    except EventError as exc:
        return exc.code


def broken_programs(randoms):
    """Damaged programs are refused or mean something else; they do no harm."""
    index = core.Index(
        search=lambda node, text, start: [],
        patterns=lambda node, number, text: None,
        point=lambda value: None,
        holds=lambda condition, root: True,
        parse=lambda data, position: json.loads(data),
        attribute=lambda event, name: "",
        text=lambda value: "",
    )
    events = [randoms.event() for _ in range(4)]
    digests = []
    for _ in range(40):
        compiled = compile_filter(randoms.filter())
        program, opaques = compiled.encoded
        damaged = bytearray(program)
        for _ in range(randoms.rng.randint(1, 3)):
            damaged[randoms.rng.randrange(len(damaged))] = randoms.rng.randrange(256)
        if randoms.rng.random() < 0.3:
            del damaged[randoms.rng.randrange(len(damaged)) :]
        try:
            index.add(compiled.digest, bytes(damaged), opaques)
            digests.append(compiled.digest)
        except ValueError:
            pass
        index.match(randoms.pick(events))
    for digest in digests:
        index.remove(digest)
    stats = index.stats()
    assert (len(index), stats["atoms"], stats["conditions"], stats["paths"]) == (0, 0, 0, 0), stats


def images(randoms):
    """A damaged image is none; a whole one is what was saved, and may be changed."""
    filters = {one.id: one for one in (randoms.filter() for _ in range(30))}
    engine = NativeEngine()
    assert engine.begin_image(randoms.rng.randrange(1 << 20))
    for filter_ in filters.values():
        engine.add(compile_filter(filter_))
    conditions = engine.conditions()
    with tempfile.TemporaryFile(buffering=0) as file:
        engine.save_image(file, bytes(32))
        del engine
        opened = NativeEngine()
        size = os.fstat(file.fileno()).st_size
        for at in [randoms.rng.randrange(size) for _ in range(10)]:
            byte = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte[0] ^ randoms.rng.randint(1, 255)]), at)
            assert opened.open_image(file, bytes(32), conditions) is None, at
            os.pwrite(file.fileno(), byte, at)
        assert opened.open_image(file, bytes(32), conditions)
    for _ in range(3):
        for event in [randoms.event() for _ in range(4)]:
            wanted = {id_ for id_, filter_ in filters.items() if filter_.matches(event)}
            assert set(opened.match(event)) == wanted, event
        for id_ in list(filters)[::2]:
            assert opened.remove(id_) == 0
            del filters[id_]
        for _ in range(10):
            filter_ = randoms.filter()
            if filter_.id not in filters:
                opened.add(compile_filter(filter_))
                filters[filter_.id] = filter_


def expressions(seed):
    """Random CESQL expressions: the index, the tree and the language agree on every event."""
    randoms = CesqlRandoms(seed)
    sources = {parse(text, "cesql").id: text for text in (randoms.expression() for _ in range(40))}
    matcher = Matcher(engine="native")
    matcher.add_many(sources.values(), dialect="cesql")
    for event in [randoms.event() for _ in range(10)]:
        wanted = {
            id_
            for id_, text in sources.items()
            if (found := evaluate(text, event))[0] is True and not found[1]
        }
        assert set(matcher.match(event)) == wanted, event
        assert set(matcher.match(json.dumps(event).encode())) == wanted, event
    for id_ in sources:
        matcher.remove(id_)
    stats = matcher.stats()
    assert (stats["atoms"], stats["conditions"], stats["paths"]) == (0, 0, 0), stats


def sources(seed):
    """Random and damaged sources: the native compiler gives what the plain one gives, errors too."""
    randoms = SourceRandoms(seed)
    for dialect in DIALECTS:
        for _ in range(60):
            source = randoms.source(dialect)
            native, plain = (compiled(source, dialect, engine) for engine in ("auto", "plain"))
            assert native == plain, (dialect, source)


def compiled(source, dialect, engine):
    try:
        found = compile_source(source, dialect, engine=engine)
    except FilterError as exc:
        return exc.code, exc.message
    return found.canonical, found.id, found.encoded


def one_round(seed):
    expressions(seed)
    sources(seed)
    randoms = Randoms(seed)
    broken_json(randoms, *differential(randoms))
    broken_programs(randoms)
    images(randoms)


if __name__ == "__main__":
    repeat(__doc__, one_round)
