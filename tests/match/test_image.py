"""Images: an index as a file that processes share gives the answers of the index it was made of."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from itertools import accumulate

import pytest
from randoms import Randoms

from virta.filters import parse
from virta.match import Matcher, compile_filter
from virta.match.image import Programs, code_mark, heap_matcher, is_ours, shared_matcher

pytest.importorskip("virta.match._core")

FILTERS = 300
EVENTS = 60


def ends(texts, kind):
    return array(kind, accumulate(map(len, texts), initial=0))


def flat(events):
    """Events as JSON end to end, with one between them that is none."""
    texts = [json.dumps(event).encode() for event in events] + [b'{"a": ']
    return ends(texts, "i"), b"".join(texts)


def programs_of(filters):
    compiled = {one.id: one for one in map(compile_filter, filters)}.values()
    encoded = [one.encoded for one in compiled]
    return Programs(
        digests=b"".join(one.digest for one in compiled),
        ends=ends([program for program, _ in encoded], "q"),
        programs=b"".join(program for program, _ in encoded),
        opaques={i: opaques for i, (_, opaques) in enumerate(encoded) if opaques},
    )


def found(matcher, events):
    rows, numbers = matcher.match_flat(*flat(events))
    return sorted((row, matcher.id_of(number)) for row, number in zip(rows, numbers, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_an_image_answers_as_the_evaluator(tmp_path, seed):
    """Random filters of all kinds, made into an image, opened, then changed: always the evaluator's answers."""
    randoms = Randoms(5000 + seed)
    filters = {f.id: f for f in (randoms.filter() for _ in range(FILTERS))}
    events = [randoms.event() for _ in range(EVENTS)]
    programs = programs_of(filters.values())

    for _ in range(2):  # the one that makes it, and one that finds it
        matcher = shared_matcher(tmp_path / "set", lambda: programs)
        live = dict(filters)
        assert found(matcher, events) == answers(live, events)
        for id_ in list(live)[::2]:
            assert matcher.remove(id_)
            del live[id_]
        for _ in range(50):
            filter_ = randoms.filter()
            if filter_.id not in live:
                live[matcher.add(filter_)] = filter_
        assert found(matcher, events) == answers(live, events)
        del matcher
    assert len(list(tmp_path.glob("*.index"))) == 1


def answers(filters, events):
    return sorted(
        (row, id_)
        for row, event in enumerate(events)
        for id_, filter_ in filters.items()
        if filter_.matches(event)
    )


def test_flat_texts_equal_lists(engine):
    """Texts end to end give what a list of them gives; what is no JSON has no hits, whatever its neighbours."""
    randoms = Randoms(77)
    matcher = Matcher(engine=engine)
    filters = [randoms.filter() for _ in range(80)]
    matcher.add_many(filters)
    events = [randoms.event() for _ in range(40)]

    assert found(matcher, events) == answers({f.id: f for f in filters}, events)
    assert [len(part) for part in matcher.match_flat(array("i", [0]), b"")] == [0, 0]


def test_another_process_opens_the_image(tmp_path):
    """A process that never saw the filters maps the image and finds what its maker finds."""
    programs = programs_of([parse(f"n={n}&kind=~k{n % 7}") for n in range(500)])
    event = {"data": {"n": 33, "kind": "k5"}}
    matcher = shared_matcher(tmp_path / "set", lambda: programs)
    (image,) = tmp_path.glob("*.index")
    program = f"""
import sys
from pathlib import Path
from virta.match.image import Programs, code_mark, opened
matcher = opened(Path({str(image)!r}), code_mark(), Programs(b"", b"", b"", {{}}))
print(*sorted(matcher.match({event!r})))
"""

    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert out.stdout.split() == sorted(matcher.match(event))


def test_what_is_no_image_is_not_used(tmp_path):
    """Files of another build, cut files and files others may write to cost time, never an answer."""
    programs = programs_of([parse(f"n={n}") for n in range(50)])
    event = {"data": {"n": 7}}
    wanted = heap_matcher(programs).match(event)
    shared_matcher(tmp_path / "set", lambda: programs)
    (image,) = tmp_path.glob("*.index")
    good = image.read_bytes()

    for bad in (b"", good[:40], good[:-1], b"X" + good[1:], good.replace(code_mark(), bytes(32))):
        image.write_bytes(bad)
        assert shared_matcher(tmp_path / "set", lambda: programs).match(event) == wanted
    image.write_bytes(good)
    tmp_path.chmod(0o777)
    assert not is_ours(tmp_path)
    assert shared_matcher(tmp_path / "set", lambda: programs).match(event) == wanted


def test_two_images_at_one_address(tmp_path):
    """An image whose address is taken is not opened; the set is built on the heap instead."""
    programs = programs_of([parse(f"n={n}") for n in range(50)])
    first = shared_matcher(tmp_path / "set", lambda: programs)
    second = shared_matcher(tmp_path / "set", lambda: programs)

    assert first.match({"data": {"n": 7}}) == second.match({"data": {"n": 7}}) != []


def test_images_and_buffers_are_checked(tmp_path):
    """Wrong arguments are errors, not crashes."""
    index = Matcher(engine="native")._engine._index
    with pytest.raises(ValueError, match="do not fit"):
        index.match_flat(array("i", [0, 9]), b"{}", ())
    with pytest.raises(ValueError, match="do not fit"):
        index.match_flat(array("i", [2, 0]), b"{}", ())
    with pytest.raises(ValueError, match="do not fit"):
        index.add_flat(bytes(32), array("q", [0, 9]), b"", {})
    with pytest.raises(ValueError, match="not a program"):
        index.add_flat(bytes(32), array("q", [0, 4]), b"\1\0\0\0", {})
    with (tmp_path / "x").open("wb") as file:
        with pytest.raises(ValueError, match="after begin_image"):
            index.save(file, bytes(32))
        with pytest.raises(ValueError, match="32 bytes"):
            index.open(file, b"", ())
    index.add_flat(b"", array("q", [0]), b"", {})
    index.add(bytes(32), *compile_filter(parse("n=1")).encoded)
    with pytest.raises(ValueError, match="never used"):
        index.begin_image(1)
