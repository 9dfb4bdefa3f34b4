"""Filter sets: their files, which must be private, few and complete, and what both engines return."""

from __future__ import annotations

import os
import tempfile
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from virta.filters import parse
from virta.match import Matcher
from virta.native import load
from virta.spark.matching import filter_set
from virta.spark.matching.filter_set import (
    MatchError,
    joined,
    opened_set,
    own_directory,
    pack,
    texts_of,
    write_packed,
    write_set,
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A directory for temporary files of its own; the one for filter sets is to be in it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"virta-filters-{os.geteuid()}"


def test_a_directory_of_others_is_not_ours(machine):
    """Sets are unpickled, so nobody else may have made, or may write to, the directory they are kept in."""
    machine.mkdir(mode=0o700)
    machine.chmod(0o770)
    with pytest.raises(MatchError, match="only this user can write to"):
        own_directory()
    machine.rmdir()
    (machine.parent / "theirs").mkdir()
    machine.symlink_to(machine.parent / "theirs")
    with pytest.raises(MatchError, match="only this user can write to"):
        write_set({"a": parse("n=1")})
    machine.unlink()
    assert own_directory() == machine


def test_sets_do_not_pile_up(machine, monkeypatch):
    """What was not used for days goes, and what is too much; what cannot go keeps nothing else from going."""
    monkeypatch.setattr(filter_set, "SET_FILES_MAX", 4)
    (own_directory() / "folder").mkdir()
    (machine / "old").write_bytes(b"")
    os.utime(machine / "old", (1, 1))
    now = time.time()
    for age in range(6):
        (machine / f"f{age}").write_bytes(b"")
        os.utime(machine / f"f{age}", (now - 10 * age, now - 10 * age))
    os.utime(machine / "folder", (1, 1))
    own_directory()

    assert sorted(os.listdir(machine)) == ["f0", "f1", "f2", "f3", "folder"]


def test_threads_keep_one_set_at_once(tmp_path):
    """Threads that write the same set get the same file, and leave no other."""
    packed = pack({"a": parse("n=1")})
    with ThreadPoolExecutor(8) as pool:
        paths = set(
            pool.map(lambda _: write_packed(packed, "0" * 64, str(tmp_path / "d")), range(200))
        )

    assert [str(one) for one in (tmp_path / "d").iterdir()] == list(paths)


def test_a_set_others_may_write_to_is_copied(tmp_path, monkeypatch):
    """What could change after its digest was compared is read once, not mapped."""
    monkeypatch.setattr(filter_set, "_sets", OrderedDict())
    path = Path(write_set({"a": parse("n=1")}, str(tmp_path / "shared")))
    path.parent.chmod(0o777)
    found = opened_set(str(path))
    path.write_bytes(bytes(path.stat().st_size))

    assert found.pairs(joined([b'{"data": {"n": 1}}']))[1].to_pylist() == ["a"]


# What a filter set returns, with both engines.

DOCUMENTS = [b'{"a": 1}', b'{"a": 2, "b": "x"}', b"no json", b"", b"[1]", b'{"b": "x"}']


@pytest.fixture(params=["native", "plain"])
def opened(request, tmp_path, monkeypatch):
    """A function that opens the filter set of some named queries, on one engine."""
    if request.param == "plain":
        monkeypatch.setattr(filter_set, "Matcher", plain_matchers)
    elif load("virta.match._core") is None:
        pytest.skip("the native engine is not built")

    def make(**queries):
        filter_set._sets.clear()
        path = write_set({name: parse(query) for name, query in queries.items()}, str(tmp_path))
        return opened_set(path)

    return make


def plain_matchers(*, engine="plain"):
    return Matcher(engine="plain" if isinstance(engine, str) else engine)


def texts(values=DOCUMENTS):
    return texts_of(pa.array(values, pa.binary()), "event")


def test_pairs_of_row_and_name(opened):
    """Every hit once, by row; texts that are not JSON have none."""
    found = opened(one="../a=1", x="../b=x", some="../a=!5")
    rows, names = found.pairs(texts())

    pairs = list(zip(rows.to_pylist(), names.to_pylist(), strict=True))
    expected = {(0, "one"), (0, "some"), (1, "x"), (1, "some"), (4, "some"), (5, "x"), (5, "some")}
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    assert [row for row, _ in pairs] == sorted(row for row, _ in pairs)


def test_equal_filters_keep_all_their_names(opened):
    """Filters with one meaning are one program; each of their names gets its hit."""
    found = opened(first="../a=1&../b=x", second="../b=x&../a=1", third="../a=1")
    rows, names = found.pairs(texts([b'{"a": 1, "b": "x"}', b'{"a": 1}']))

    assert len(found.names) == 2
    assert sorted(zip(rows.to_pylist(), names.to_pylist(), strict=True)) == [
        (0, "first"),
        (0, "second"),
        (0, "third"),
        (1, "third"),
    ]


def test_hits_of_any_filter(opened):
    """One truth value per text."""
    assert opened(one="../a=1", x="../b=x").hits(texts()).tolist() == [
        *(True, True),
        *(False, False, False),
        True,
    ]


def test_sliced_and_null_values(opened):
    """An Arrow slice is matched from its own start, and null like an empty text."""
    found = opened(one="../a=1")
    column = pa.array([b"x", *DOCUMENTS, None], pa.binary())

    assert found.hits(texts_of(column, "event")).tolist() == [False, True] + [False] * 6
    assert found.hits(texts_of(column.slice(1, 2), "event")).tolist() == [True, False]
    assert found.hits(texts_of(pa.array(['{"a": 1}', None]), "event")).tolist() == [True, False]


def test_numbers_as_ids(opened):
    """Only filters that may use the id need events with their id as text."""
    event = b'{"id": 5, "source": "/s", "a": 1}'
    by_id = opened(five='../id="5"')

    assert by_id.sees_ids
    column = pa.array([event], pa.binary())
    assert by_id.hits(texts_of(column, "event", text_ids=True)).tolist() == [True]
    assert by_id.hits(texts_of(column, "event")).tolist() == [False]
    assert not opened(one="../a=1").sees_ids


def test_documents_of_koncorde(opened):
    """On `data` a filter sees the event's data with its id; what is no event matches nothing."""
    found = opened(one="../a=1", subject="../_id=s", own="../_id=mine")
    events = [
        b'{"id": "1", "source": "/s", "subject": "s", "data": {"a": 1}}',
        b'{"id": "1", "source": "/s", "data": {"_id": "mine"}}',
        b'{"a": 1}',
    ]
    rows, names = found.pairs(texts_of(pa.array(events, pa.binary()), "data"))

    assert sorted(zip(rows.to_pylist(), names.to_pylist(), strict=True)) == [
        (0, "one"),
        (0, "subject"),
        (1, "own"),
    ]


def test_a_small_set_travels_with_the_tasks(tmp_path, monkeypatch):
    """An executor that does not see the file gets the bytes with its task; a large set needs a shared directory."""
    from virta.spark.schemas import MATCH
    from virta.spark.source.options import read_options
    from virta.spark.source.source import SplitDecoder

    path = write_set({"paid": parse("status=paid")}, str(tmp_path / "driver"))
    options = read_options({"path": "log", "filters": path})
    decoder = SplitDecoder(options, MATCH)
    monkeypatch.setattr(filter_set, "SENT_BYTES_MAX", 10)
    large = SplitDecoder(options, MATCH)
    Path(path).unlink()
    monkeypatch.setattr(filter_set, "_sets", OrderedDict())
    monkeypatch.setattr(filter_set, "gettempdir", lambda: str(tmp_path))

    found = filter_set.opened_set(path, lambda: decoder.packed)

    assert found.hits(joined([b'{"data":{"status":"paid"}}', b"{}"])).tolist() == [True, False]
    assert large.packed is None
    with pytest.raises(MatchError, match="cannot be read"):
        filter_set.opened_set(path.replace("filters-", "filters-0"))
