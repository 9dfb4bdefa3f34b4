"""Log lines never make their writer wait: what cannot be written at once is dropped, and reported."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import threading

import pytest

from virta.log_lines import PIECE_BYTES, LogLines, log_stream

DEADLINE_S = 20.0


class Pipe:
    """A pipe of four pages, with LogLines at its writing end."""

    def __init__(self):
        self.reading, writing = os.pipe()
        self.file = os.fdopen(writing, "w")
        fcntl.fcntl(self.reading, fcntl.F_SETPIPE_SZ, 4 * PIECE_BYTES)
        self.lines = LogLines(self.file)

    def say(self, text):
        self.lines.write(text + "\n")
        self.lines.flush()

    def read(self):
        return os.read(self.reading, 1 << 20).decode().splitlines()


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    os.close(made.reading)
    made.file.close()


def test_lines_are_written_by_flush(pipe):
    pipe.lines.write("one")
    pipe.lines.write(" line\n")
    pipe.lines.flush()
    pipe.lines.flush()
    assert pipe.read() == ["one line"]


def test_a_reader_that_stands_still_costs_lines_not_time(pipe):
    """A writer that waited would not end at all: nobody reads until it has."""
    done = threading.Thread(target=lambda: [pipe.say("x" * 100) for _ in range(1000)], daemon=True)
    done.start()
    done.join(DEADLINE_S)
    assert not done.is_alive()
    written = pipe.read()
    assert 0 < len(written) < 1000

    pipe.say("again")

    said, again = pipe.read()
    assert json.loads(said) == {
        "level": "warning",
        "message": "log_lines_dropped",
        "lines": 1000 - len(written),
    }
    assert again == "again"
    assert pipe.lines.dropped == 0


def test_a_line_longer_than_the_pipe_is_cut_at_its_end_only(pipe):
    pipe.say("y" * 9 * PIECE_BYTES)
    cut = pipe.read()
    assert set(cut[0]) == {"y"}
    pipe.say("next")
    report, after = pipe.read()[1:]  # the end of the line that was cut comes first
    assert (json.loads(report)["lines"], after) == (1, "next")


def test_a_reader_that_exited_is_not_asked_again(pipe):
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.reading)  # closes the reading end
    for _ in range(3):
        pipe.say("nobody reads this")
    assert pipe.lines.dropped == 0


def test_a_full_disk_drops_lines():
    with open("/dev/full", "w") as full:
        lines = LogLines(full)
        for _ in range(3):
            lines.write("text\n")
            lines.flush()
        assert lines.dropped == 3


def test_lines_of_threads_do_not_mix(pipe):
    """The text of a line is collected by thread: `print` writes it and its end apart."""
    pipe.lines.write("mine")
    other = threading.Thread(target=pipe.say, args=("theirs",))
    other.start()
    other.join(DEADLINE_S)
    pipe.lines.write(" alone\n")
    pipe.lines.flush()
    assert pipe.read() == ["theirs", "mine alone"]


def test_logging_writes_through_it(pipe):
    handler = logging.StreamHandler(pipe.lines)
    handler.emit(logging.LogRecord("n", logging.INFO, __file__, 1, "said %s", ("ä",), None))
    assert pipe.read() == ["said ä"]


def test_a_stream_without_descriptor_is_used_as_it_is():
    """The half-made stream is finalized without an error, which Python 3.13 reports."""
    stream = io.StringIO()
    half = LogLines.__new__(LogLines)
    with pytest.raises(io.UnsupportedOperation):
        half.__init__(stream)

    half.flush()

    assert log_stream(stream) is stream
