"""Lines of files and pipes: as they arrive, with limits, and with the place of what is wrong."""

from __future__ import annotations

import io
import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.cli import input_lines
from virta.cli.input_lines import (
    LineTooLongError,
    filter_lines,
    read_documents,
    read_filters,
    read_lines,
)
from virta.cli.report import InputError


def written(tmp_path, text, name="input"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b""))), st.booleans())
def test_lines_of_memory(lines, ends):
    """All lines come back in order, whether or not the last one has an end."""
    text = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    expected = text.split(b"\n")
    if expected[-1] == b"":
        expected.pop()

    found = [line for batch in read_lines(io.BytesIO(text)) for line in batch]

    assert found == expected


@given(st.integers(0, 50), st.integers(1, 7))
def test_lists_have_at_most_so_many_lines(count, most):
    """`count_max` bounds every list, and only the last may be shorter in a file."""
    text = b"".join(b"%d\n" % n for n in range(count))
    batches = list(read_lines(io.BytesIO(text), most))

    assert [len(batch) for batch in batches[:-1]] == [most] * max(0, len(batches) - 1)
    assert sum(map(len, batches)) == count


def test_lines_of_a_slow_pipe_come_at_once():
    """A line is yielded although fewer than `count_max` have arrived."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as stream, os.fdopen(writing, "wb", 0) as pipe:
        lines = read_lines(stream, 100)
        pipe.write(b"one\n")
        assert next(lines) == [b"one"]
        pipe.write(b"two\nthr")
        assert next(lines) == [b"two"]
        pipe.write(b"ee")
        pipe.close()
        assert list(lines) == [[b"three"]]


def test_a_pipe_with_much_input_fills_its_lists():
    """What waits in the pipe is put together up to `count_max`."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as stream:
        with os.fdopen(writing, "wb", 0) as pipe:
            pipe.write(b"x\n" * 1000)
        sizes = [len(batch) for batch in read_lines(stream, 400)]

    assert sizes == [400, 400, 200]


def test_a_line_has_a_limit(monkeypatch):
    """The error names the line; it is found while the line arrives, not at its end."""
    monkeypatch.setattr(input_lines, "LINE_BYTES_MAX", 100)
    monkeypatch.setattr(input_lines, "READ_BYTES", 64)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as stream, os.fdopen(writing, "wb", 0) as pipe:
        sender = threading.Thread(target=pipe.write, args=(b"short\n" + b"x" * 300,))
        sender.start()
        with pytest.raises(LineTooLongError, match="line 2 is longer than") as refused:
            list(read_lines(stream))
        sender.join()

    assert refused.value.number == 1


def test_filters_with_their_lines(tmp_path):
    """Blank lines are skipped where a blank is no filter; numbers count all lines."""
    text = '{"equals":{"a":1}}\n\n{"equals":{"b":2}}\r\n'
    found = list(read_filters(written(tmp_path, text), "koncorde"))

    assert [number for number, _ in found] == [0, 2]
    assert found[1][1].matches({"b": 2})


def test_an_empty_query_matches_everything(tmp_path):
    """In the query-string dialect a blank line is a filter."""
    lines = list(filter_lines(written(tmp_path, "a=1\n\n"), "query-string"))

    assert lines == [(0, "a=1"), (1, "")]


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    """Editors on other systems write one."""
    lines = list(filter_lines(written(tmp_path, b"\xef\xbb\xbfa=1\n"), "query-string"))

    assert lines == [(0, "a=1")]


def test_a_refused_filter_names_its_line_and_the_likely_dialect(tmp_path):
    """The sentence counts how many of the rest look like the same other dialect."""
    text = "\n".join(json.dumps({"equals": {"a": n}}) for n in range(3))
    with pytest.raises(InputError) as refused:
        list(read_filters(written(tmp_path, text), "cesql"))

    assert "line 1 (filter 0)" in refused.value.message
    assert "try --dialect koncorde" in refused.value.message
    assert refused.value.exit_code == 2


def test_documents_are_counted_through_all_files(tmp_path):
    """A document knows its file and its line; blank lines count and are left out."""
    paths = [written(tmp_path, '{"a":1}\n\n{"a":2}', "one"), written(tmp_path, "3\n", "two")]
    found = [document for batch in read_documents(paths) for document in batch]

    assert [(d.number, d.line_number, d.value()) for d in found] == [
        (0, 0, {"a": 1}),
        (2, 2, {"a": 2}),
        (3, 0, 3),
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{", "line 1 (document 0): not JSON"),
        (b"\xff", "line 1 (number 0): not UTF-8 at byte 1"),
        (b"[" * 100_000, "line 1 (document 0): nested too deeply"),
    ],
)
def test_bad_documents_are_named(tmp_path, text, sentence):
    """The sentence has the file, the line in both counts, and what is wrong."""
    path = written(tmp_path, text)
    ((document,),) = read_documents([path])
    with pytest.raises(InputError) as refused:
        document.value()

    assert refused.value.message.startswith(f"{path}, ")
    assert sentence in refused.value.message


def test_a_file_that_cannot_be_read(tmp_path):
    """One sentence, exit code 2."""
    for path in (str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(InputError, match=f"cannot read {path}: "):
            list(read_documents([path]))
