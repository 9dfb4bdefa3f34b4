"""One writer with a wrong clock: others are warned, and nothing but times is affected."""

from __future__ import annotations

import json
import logging
import time

import pytest
from click.testing import CliRunner

import virta
from virta.cli import main
from virta.log.engine import kernel, plain_kernel

DAY_S = 86_400


@pytest.fixture
def ahead(tmp_path, monkeypatch):
    """A log whose last writer's clock was a day ahead."""
    path = tmp_path / "log"
    with monkeypatch.context() as patch:
        # The plain kernel asks Python for the time.
        patch.setattr(kernel, "Kernel", plain_kernel.Kernel)
        real = time.time_ns
        patch.setattr(plain_kernel.time, "time_ns", lambda: real() + DAY_S * 10**9)
        with virta.open(path, durability="none") as log:
            log.append("t", "k", b"from tomorrow")
    return path


def test_opening_warns_once_with_both_times(ahead, caplog):
    """The warning has the record's time and the clock's; reading and appending work, times do not advance."""
    caplog.set_level(logging.WARNING, "virta.log")
    with virta.open(ahead, durability="none") as log:
        (warning,) = [r.getMessage() for r in caplog.records]
        assert warning.startswith(f"log_clock_ahead {ahead}: the newest record is stamped 20")
        assert "this machine's clock says 20" in warning
        assert DAY_S - 60 < log.clock_ahead <= DAY_S
        first = next(iter(log.read())).timestamp
        assert log.append("t", "k", b"now") == 1
        assert [r.timestamp for r in log.read()] == [first, first]
        assert log.verify().problems == []
        assert len(caplog.records) == 1


def test_a_running_writer_is_warned_at_its_next_segment(tmp_path, caplog, monkeypatch):
    """A handle that was already open warns when it rolls over."""
    path = tmp_path / "log"
    monkeypatch.setattr(kernel, "Kernel", plain_kernel.Kernel)
    with virta.open(path, durability="none", segment_bytes=4096) as log:
        log.append("t", "k", b"")
        with monkeypatch.context() as patch:
            real = time.time_ns
            patch.setattr(plain_kernel.time, "time_ns", lambda: real() + DAY_S * 10**9)
            log.append("t", "k", b"another writer's")
        for _ in range(20):
            log.append("t", "k", bytes(1000))
    assert len([r for r in caplog.records if "log_clock_ahead" in r.getMessage()]) == 1


def test_a_correct_clock_gives_no_warning(tmp_path, caplog):
    """Neither a warning nor a line."""
    with virta.open(tmp_path / "log") as log:
        log.append("t", "k", b"")
    with virta.open(tmp_path / "log") as log:
        assert log.clock_ahead == 0.0
    assert caplog.records == []
    done = CliRunner().invoke(main, ["log", "inspect", str(tmp_path / "log")])
    assert "clock " not in done.output


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_command_line_says_it(ahead, command):
    """In words, and as a number for programs; it is no damage."""
    done = CliRunner().invoke(main, ["log", command, str(ahead)])
    assert done.exit_code == 0
    assert "s ahead of this machine's clock, so a clock was wrong" in done.output
    done = CliRunner().invoke(main, ["log", command, str(ahead), "--json"])
    assert DAY_S - 60 < json.loads(done.output)["clock_ahead_s"] <= DAY_S
    (ahead / "control").unlink()  # by the segments alone
    done = CliRunner().invoke(main, ["log", command, str(ahead), "--json"])
    assert DAY_S - 60 < json.loads(done.output)["clock_ahead_s"] <= DAY_S


def test_a_time_that_no_calendar_has(tmp_path, monkeypatch, caplog):
    """A record from beyond the year 9999 can be warned of and shown, like any other."""
    path = tmp_path / "log"
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "Kernel", plain_kernel.Kernel)
        patch.setattr(plain_kernel.time, "time_ns", lambda: 15_000 * 365 * DAY_S * 10**9)
        with virta.open(path, durability="none") as log:
            log.append("t", "k", b"v")
    with virta.open(path, durability="none") as log:
        assert log.append("t", "k", b"now") == 1

    shown = CliRunner().invoke(main, ["log", "inspect", str(path)])

    assert "µs after 1970" in caplog.text
    assert shown.exit_code == 0, shown.output
    assert "µs" in shown.output
