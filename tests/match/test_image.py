"""Images: an index as a file that processes share gives the answers of the index it was made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from array import array
from itertools import accumulate

import pytest
from randoms import Randoms

from virta.filters import parse
from virta.match import Matcher, compile_filter
from virta.match import image as images
from virta.match.engine import NativeEngine, make_engine
from virta.match.image import Programs, code_mark, heap_matcher, is_ours, set_mark, shared_matcher
from virta.native import load

if load("virta.match._core") is None:
    pytest.skip("needs the native engine", allow_module_level=True)

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
from virta.match.image import Programs, code_mark, opened, set_mark
programs = Programs({programs.digests!r}, b"", b"", {{}})
image = Path({str(image)!r})
matcher = opened(image, set_mark(code_mark(), image, programs), programs)
print(*sorted(matcher.match({event!r})))
"""

    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert out.stdout.split() == sorted(matcher.match(event))


@pytest.fixture
def made(tmp_path):
    """Programs, the image of them, and its mark; nobody has it mapped."""
    programs = programs_of([parse(f"n={n}&kind=~k{n % 7}") for n in range(20)])
    shared_matcher(tmp_path / "set", lambda: programs)
    (image,) = tmp_path.glob("*.index")
    return programs, image, set_mark(code_mark(), image, programs)


EVENT = {"data": {"n": 7, "kind": "k0"}}


def is_mapped(image):
    with open("/proc/self/maps") as maps:
        return str(image) in maps.read()


def test_every_byte_of_an_image_counts(made):
    """Wherever one byte differs (all of the head, every seventh of the rest), or is missing, there is no image."""
    programs, image, mark = made
    index = NativeEngine().index
    whole = image.read_bytes()
    with image.open("r+b", buffering=0) as file:
        for at in (*range(128), *range(128, len(whole), 7)):
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << at % 8]), at)
            assert index.open(file, mark, ()) is None, at
            os.pwrite(file.fileno(), whole[at : at + 1], at)
        for size in (0, 1, 40, 100, 4096, len(whole) - 1):
            file.truncate(size)
            assert index.open(file, mark, ()) is None, size
        os.pwrite(file.fileno(), whole, 0)
        assert index.open(file, mark, programs.conditions()) is True


def test_a_damaged_image_is_made_anew(made):
    """Cut files and files of another build cost time once, never an answer."""
    programs, image, mark = made
    wanted = heap_matcher(programs).match(EVENT)
    good = image.read_bytes()

    for bad in (b"", good[:40], good[:-1], b"X" + good[1:], good.replace(mark, bytes(32))):
        image.write_bytes(bad)
        matcher = shared_matcher(image.parent / "set", lambda: programs)
        assert is_mapped(image)
        assert matcher.match(EVENT) == wanted != []
        del matcher


def test_an_image_of_other_filters_is_not_used(made):
    """A good image under another set's name, or of other filters under this one, is not believed."""
    programs, image, _ = made
    others = programs_of([parse(f"n={n}") for n in range(50)])
    wanted = heap_matcher(others).match(EVENT)

    assert shared_matcher(image.parent / "set", lambda: others).match(EVENT) == wanted
    foreign = image.with_name(image.name.replace("set", "foreign"))
    image.rename(foreign)
    assert shared_matcher(image.parent / "foreign", lambda: programs).match(EVENT) != wanted


def test_what_others_may_write_to_is_not_used(made):
    """A file or a directory that others may write to, or that they own, is left alone."""
    programs, image, _ = made

    def is_used():
        matcher = shared_matcher(image.parent / "set", lambda: programs)
        assert matcher.match(EVENT) == heap_matcher(programs).match(EVENT) != []
        return is_mapped(image)

    assert is_used()
    image.chmod(0o620)
    assert not is_used()
    image.chmod(0o600)
    image.parent.chmod(0o777)
    assert not is_ours(image.parent)
    assert not is_used()
    image.parent.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(image, 12345, -1)
        assert not is_used()
        os.chown(image, 0, -1)
    elsewhere = image.with_suffix(".elsewhere")
    image.rename(elsewhere)
    elsewhere.chmod(0o666)
    image.symlink_to(elsewhere)
    assert not is_used()
    assert not is_mapped(elsewhere)


def test_what_is_mapped_stays_as_it_was(made):
    """A file that is replaced or removed is still there for those who have it; a child has changes of its own."""
    programs, image, _ = made
    matcher = shared_matcher(image.parent / "set", lambda: programs)
    wanted = matcher.match(EVENT)
    assert is_mapped(image)

    image.with_suffix(".new").write_bytes(b"something else")
    image.with_suffix(".new").replace(image)
    assert matcher.match(EVENT) == wanted
    image.unlink()
    reading, writing = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of threads, which the child does not need
        child = os.fork()
    if not child:
        for id_ in matcher.ids():
            matcher.remove(id_)
        added = matcher.add(parse("n=7"))
        os.write(writing, b"same" if matcher.match(EVENT) == [added] else b"differs")
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"same"
    assert matcher.match(EVENT) == wanted
    assert len(matcher) == 20


SCRIPT = """
import resource, sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from test_image import EVENT, is_mapped, programs_of
from virta.filters import parse
from virta.match.image import shared_matcher
if sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), -1))
programs = programs_of([parse(f"n={{n}}") for n in range(3000)])
matcher = shared_matcher(Path(sys.argv[1]), lambda: programs)
print(len(matcher.match(EVENT)), is_mapped(".index"))
"""


def start(path, *limit):
    command = [sys.executable, "-c", SCRIPT.format(tests=os.path.dirname(__file__)), path, *limit]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)


def test_processes_at_once_and_processes_short_of_memory(tmp_path):
    """The first process makes the image; without free address space the answers are the same."""
    both = [start(tmp_path / "set") for _ in range(2)]
    assert [one.communicate()[0].split() for one in both] == [["1", "True"]] * 2
    assert sorted(one.suffix for one in tmp_path.iterdir()) == [".index", ".lock"]

    small = start(tmp_path / "other", 4 << 30)
    assert small.communicate()[0].split() == ["1", "False"]


def test_images_do_not_pile_up(tmp_path, monkeypatch):
    """The least recently opened image goes when there are too many, and what a killed build left goes too."""
    monkeypatch.setattr(images, "IMAGES_MAX", 3)
    programs = programs_of([parse("n=7")])
    for number in range(5):
        (tmp_path / f"dead{number}.draft").write_bytes(b"half")
        shared_matcher(tmp_path / f"set{number}", lambda: programs)
        for past, image in enumerate(sorted(tmp_path.glob("*.index"))):
            os.utime(image, (past, past))
        if number >= 1:
            shared_matcher(tmp_path / "set1", lambda: programs)

    assert [one.name[:4] for one in sorted(tmp_path.glob("*.index"))] == ["set1", "set3", "set4"]
    assert not list(tmp_path.glob("*.draft"))


def test_a_set_may_change_before_it_is_saved(tmp_path):
    """What was added and removed again while an image is made leaves nothing outside it."""
    engine = NativeEngine()
    filters = [compile_filter(parse(f"n={n}&kind=~k{n}")) for n in range(400)]
    assert engine.begin_image(99)
    for one in filters:
        engine.add(one)
    for one in filters[::2]:
        engine.remove(one.id)
    for one in filters[:100:2]:
        engine.add(one)
    with (tmp_path / "image").open("w+b") as file:
        engine.save_image(file, bytes(32))
        wanted = engine.ids()
        del engine
        script = f"""
from virta.match.engine import NativeEngine
from virta.match import compile_filter
from virta.filters import parse
engine = NativeEngine()
assert engine.open_image(open({file.name!r}, "rb"), bytes(32), ())
assert len(engine.ids()) == {len(wanted)}
assert len(engine.match({{"data": {{"n": 3, "kind": "k3"}}}})) == 1
for id_ in engine.ids():
    assert engine.remove(id_) == 0
for n in range(400):
    engine.add(compile_filter(parse(f"n={{n}}&kind=~k{{n}}")))
assert len(engine.match({{"data": {{"n": 4, "kind": "k4"}}}})) == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_two_images_at_one_address(tmp_path):
    """An image whose address is taken is not opened; the set is built on the heap instead."""
    programs = programs_of([parse(f"n={n}") for n in range(50)])
    first = shared_matcher(tmp_path / "set", lambda: programs)
    second = shared_matcher(tmp_path / "set", lambda: programs)

    assert first.match({"data": {"n": 7}}) == second.match({"data": {"n": 7}}) != []


def test_images_and_buffers_are_checked(tmp_path):
    """Wrong arguments are errors, not crashes."""
    index = make_engine("native").index
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
