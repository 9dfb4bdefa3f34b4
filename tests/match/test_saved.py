"""A matcher as a file: everything comes back, and a damaged file is refused whole."""

from __future__ import annotations

import json
import stat

import pytest
from randoms import Randoms

from virta.errors import FilterError
from virta.filters import Filter, parse
from virta.match import Matcher
from virta.match.saved import read_filter


def test_save_and_load(engine, tmp_path):
    """Names, payloads, metadata and counts come back."""
    matcher = Matcher(engine=engine)
    matcher.add("status=paid", id="a", payload={"to": [1]}, metadata={"tenant": "x"})
    matcher.add("status=paid", id="b")
    matcher.add({"equals": {"n": 5}}, dialect="koncorde", id="c", payload="é\ud800")
    unnamed = matcher.add("LENGTH(subject) > 3 AND n + 1 < 5", dialect="cesql")
    matcher.add("LENGTH(subject) > 3 AND n + 1 < 5", dialect="cesql")
    path = tmp_path / "matcher"
    matcher.save(path)

    loaded = Matcher.load(path, engine=engine)

    assert len(loaded) == len(matcher) == 3
    assert sorted(loaded.match({"data": {"status": "paid"}})) == ["a", "b"]
    assert loaded.get("a").payload == {"to": [1]}
    assert loaded.get("a").metadata == {"tenant": "x"}
    assert loaded.get("c").payload == "é\ud800"
    assert loaded.match({"subject": "abcd", "n": 3}) == [unnamed]
    assert [loaded.remove(unnamed) for _ in range(3)] == [True, True, False]
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    again = tmp_path / "again"
    loaded.add("LENGTH(subject) > 3 AND n + 1 < 5", dialect="cesql")
    loaded.add("LENGTH(subject) > 3 AND n + 1 < 5", dialect="cesql")
    loaded.save(again)
    assert sorted(again.read_text().splitlines()[1:-1]) == sorted(
        path.read_text().splitlines()[1:-1]
    )


def test_an_empty_matcher(engine, tmp_path):
    """No filters are a file too."""
    Matcher(engine=engine).save(tmp_path / "none")

    assert len(Matcher.load(tmp_path / "none", engine=engine)) == 0


def test_filters_without_text_are_refused(engine, tmp_path):
    """A filter of which the matcher has only the index cannot be saved: the error names it."""
    matcher = Matcher(engine=engine)
    id_ = matcher.add(parse("a=1"))

    with pytest.raises(FilterError, match=id_) as caught:
        matcher.save(tmp_path / "x")
    assert caught.value.code == "not_saved"
    assert not (tmp_path / "x").exists()
    matcher.add("a=1")
    matcher.save(tmp_path / "x")


def test_payloads_are_json(engine, tmp_path):
    """A payload that is not JSON cannot be saved: the error names it."""
    matcher = Matcher(engine=engine)
    matcher.add("a=1", id="odd", payload=object())

    with pytest.raises(FilterError, match="odd") as caught:
        matcher.save(tmp_path / "x")
    assert caught.value.code == "not_saved"


def test_damage_is_refused(tmp_path):
    """A cut or changed file, another file, a newer version or none at all: an error, no matcher."""
    matcher = Matcher()
    matcher.add("a=1", id="x")
    path = tmp_path / "matcher"
    matcher.save(path)
    data = path.read_bytes()
    changed = data.replace(b'"version":1', b'"version":2')
    for bad in (
        data[:-5],
        data[: len(data) // 2],
        data.replace(b'"x"', b'"y"'),
        b"",
        b"{}",
        changed,
    ):
        path.write_bytes(bad)
        with pytest.raises(FilterError) as caught:
            Matcher.load(path)
        assert caught.value.code == "not_loaded"
    with pytest.raises(FilterError, match="no saved matcher"):
        Matcher.load(tmp_path / "nothing")


def test_a_newer_version_is_refused(tmp_path):
    """A whole file of another version names both versions."""
    import hashlib

    body = b'{"virta":"matcher","version":2,"filters":0}\n'
    end = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}, separators=(",", ":"))
    (tmp_path / "new").write_bytes(body + end.encode() + b"\n")

    with pytest.raises(FilterError, match="version 2: this Virta reads version 1"):
        Matcher.load(tmp_path / "new")


def test_elements_that_are_zero():
    """The one opaque condition of the query-string dialect is read too."""
    filter_ = parse("a=[-0.0")

    assert "opaque" in filter_.canonical()
    assert read_filter(filter_.canonical()) == filter_


@pytest.mark.parametrize("seed", range(20))
def test_canonical_forms_are_read(seed):
    """The filter of a canonical form has that form, whatever its dialect."""
    randoms = Randoms(5000 + seed)
    for _ in range(40):
        filter_ = randoms.filter()
        assert read_filter(filter_.canonical()) == Filter(filter_.tree), filter_
