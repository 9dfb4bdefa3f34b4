"""The log of a capture and its state file: where a capture goes on after anything."""

from __future__ import annotations

import json
import threading

import pytest

import virta
from virta.cdc import change_log, status_file
from virta.cdc.change_log import ChangeLog
from virta.cdc.running import run_capture
from virta.cdc.state import StateFile, TableState, check_name, read_state
from virta.errors import CaptureError


def opened(folder, name="shop", kind="sqlite"):
    return ChangeLog(folder, name, kind)


def records(*values, topic="shop.main.orders"):
    return [(topic, b"k", value.encode()) for value in values]


def stored(folder, topic="shop.main.orders"):
    with virta.open(folder / "log", read_only=True) as log:
        return [bytes(record.value).decode() for record in log.read(topic)]


class TestPosition:
    """Every batch ends with the position it reaches."""

    def test_it_is_in_the_log_without_the_state_file(self, tmp_path):
        """A crash before the file was saved: the log alone says where to go on."""
        one = opened(tmp_path)
        assert one.fresh
        one.add(records("a", "b"))
        one.append({"seq": 2})
        one.close()

        again = opened(tmp_path)
        assert again.position == {"seq": 2}
        assert not again.fresh
        again.close()
        assert stored(tmp_path) == ["a", "b"]

    def test_the_newest_one_counts(self, tmp_path):
        one = opened(tmp_path)
        for number in range(5):
            one.add(records(str(number)))
            one.append({"seq": number})
            if number == 2:
                one.save()
        one.close()

        again = opened(tmp_path)
        assert again.state.position == {"seq": 2}  # of the file
        assert again.position == {"seq": 4}  # of the log
        again.close()

    def test_names_have_positions_of_their_own(self, tmp_path):
        for name in ("shop", "bank"):
            one = opened(tmp_path, name)
            one.append({"name": name})
            one.close()

        one = opened(tmp_path, "shop")
        assert one.position == {"name": "shop"}
        one.close()

    def test_what_was_collected_and_not_appended_is_not_there(self, tmp_path):
        one = opened(tmp_path)
        one.add(records("open transaction"))
        assert one.pending == 1
        one.discard()
        one.append({"seq": 1})
        one.add(records("lost with the process"))
        one.close()

        assert stored(tmp_path) == []

    def test_it_survives_the_retention_of_the_log(self, tmp_path, monkeypatch):
        """The batch with the position may be removed; the state file has it."""
        one = opened(tmp_path)
        one.append({"seq": 7})
        one.save()
        monkeypatch.setattr(type(one.log), "first_offset", property(lambda log: log.next_offset))
        one.close()

        again = opened(tmp_path)
        assert again.position == {"seq": 7}
        again.close()

    def test_forget_starts_again(self, tmp_path):
        """Tables are to be read, and are emptied first: the log has their rows."""
        one = opened(tmp_path)
        one.state.database = "x"
        one.state.tables["orders"] = TableState([], ["id"], complete=True)
        one.append({"seq": 7})
        one.forget()
        one.close()

        again = opened(tmp_path)
        assert (again.position, again.state.database, again.fresh) == ({}, "", False)
        assert not again.state.tables["orders"].complete
        again.close()


class TestBatches:
    """Memory is bounded, and only what is on disk is confirmed."""

    @pytest.mark.parametrize(("limit", "value"), [("BATCH_RECORDS", 3), ("BATCH_BYTES", 60)])
    def test_a_batch_is_full_by_number_or_bytes(self, tmp_path, monkeypatch, limit, value):
        monkeypatch.setattr(change_log, limit, value)
        one = opened(tmp_path)
        added = 0
        while not one.full:
            one.add(records("v"))
            added += 1
        assert added in {3, 4}
        one.append({})
        assert not one.full
        assert (one.changes, one.batches) == (added, 1)
        one.close()

    def test_sync_waits_for_the_disk_once(self, tmp_path, monkeypatch):
        one = opened(tmp_path)
        flushes = []
        real = type(one.log).flush
        monkeypatch.setattr(type(one.log), "flush", lambda log: flushes.append(1) or real(log))
        one.sync()
        one.append({"seq": 1})
        one.sync()
        one.sync()
        assert len(flushes) == 1
        one.close()

    def test_the_state_is_saved_after_the_log_was_synced(self, tmp_path, monkeypatch):
        """A file that is ahead of the log would lose changes."""
        one = opened(tmp_path)
        order = []
        monkeypatch.setattr(type(one.log), "flush", lambda _: order.append("log"))
        monkeypatch.setattr(StateFile, "save", lambda _: order.append("file"))
        one.append({"seq": 1})
        one.save()
        assert order == ["log", "file"]
        one.close()


class TestRefusals:
    """A state that does not fit is a sentence that says what to do."""

    def test_a_second_process(self, tmp_path):
        one = opened(tmp_path)
        with pytest.raises(CaptureError, match="another process captures changes as 'shop'") as error:  # fmt: skip
            opened(tmp_path)
        assert error.value.code == "capture_running"
        opened(tmp_path, "bank").close()
        one.close()
        opened(tmp_path).close()  # released

    def test_another_kind_of_database(self, tmp_path):
        one = opened(tmp_path)
        one.save()
        one.close()
        with pytest.raises(CaptureError, match="belongs to a capture of sqlite, not postgresql"):
            opened(tmp_path, kind="postgresql")

    def test_another_log(self, tmp_path):
        one = opened(tmp_path)
        one.save()
        one.close()
        (tmp_path / "log").rename(tmp_path / "old")
        with pytest.raises(CaptureError, match="was written for another log"):
            opened(tmp_path)

    def test_a_log_that_is_shorter_than_the_state_says(self, tmp_path):
        one = opened(tmp_path)
        one.append({"seq": 1})
        one.state.offset = 10_000
        one.state.position = {"seq": 1}
        one.state.log = one.log.id
        one.file.save()
        one.close()
        with pytest.raises(CaptureError, match="has 10000 records, but it has"):
            opened(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"kind":1}', b"\xff"])
    def test_a_damaged_file(self, tmp_path, content):
        one = opened(tmp_path)
        one.save()
        one.close()
        (tmp_path / "cdc" / "shop.json").write_bytes(content)
        with pytest.raises(CaptureError, match="remove it, and every table is read again") as error:
            opened(tmp_path)
        assert error.value.code == "capture_state_invalid"
        (tmp_path / "cdc" / "shop.json").unlink()
        opened(tmp_path).close()

    @pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "-a", "\u00e4", "a" * 64])
    def test_a_name_that_is_no_part_of_a_channel(self, name):
        with pytest.raises(CaptureError, match="letters, digits, _ or -"):
            check_name(name)

    @pytest.mark.parametrize("name", ["a", "_a-1", "A" * 63])
    def test_names(self, name):
        check_name(name)


def test_the_state_file_keeps_tables(tmp_path):
    one = opened(tmp_path)
    one.state.tables["orders"] = TableState(
        [{"name": "id"}], ["id"], read_at="10:20:", read_lsn=7, complete=True, number=3
    )
    one.save()
    one.close()

    assert read_state(tmp_path, "shop").tables["orders"].read_lsn == 7
    assert read_state(tmp_path, "nothing") is None


class TestStatusFile:
    """Figures for metrics and the console; a missing or damaged one is no figure."""

    def test_the_last_one_counts(self, tmp_path):
        opened(tmp_path).close()
        for lag in (5, 7):
            status_file.write(tmp_path, "shop", lag_bytes=lag)
        found = status_file.read(tmp_path, "shop")
        assert found["lag_bytes"] == 7
        assert found["time"].endswith("Z")

    @pytest.mark.parametrize("content", [None, b"", b"{", b"\xff"])
    def test_nothing(self, tmp_path, content):
        opened(tmp_path).close()
        if content is not None:
            (tmp_path / "cdc" / "shop.status").write_bytes(content)
        assert status_file.read(tmp_path, "shop") == {}

    def test_a_shorter_status_replaces_a_longer_one(self, tmp_path):
        opened(tmp_path).close()
        status_file.write(tmp_path, "shop", text="x" * 500)
        status_file.write(tmp_path, "shop", n=1)
        assert json.loads((tmp_path / "cdc" / "shop.status").read_bytes())["n"] == 1


class Attempts:
    """Captures that fail as the list says: None succeeds."""

    def __init__(self, *outcomes, changes=1):
        self.outcomes = list(outcomes)
        self.closed = 0
        self._changes = changes

    def make(self):
        attempts, error = self, self.outcomes.pop(0)

        class One:
            changes = attempts._changes

            def run(self, stopping, *, until_caught_up=False):
                if error is not None:
                    raise error

            def close(self):
                attempts.closed += 1

        return One()


class TestRunning:
    """A database that is not reachable is tried again; anything else ends the capture."""

    @pytest.fixture(autouse=True)
    def no_waits(self, monkeypatch):
        self.waits = []
        monkeypatch.setattr(threading.Event, "wait", lambda _, seconds: self.waits.append(seconds))

    def error(self, *, retry):
        return CaptureError("no database", code="capture_database_failed", retry=retry)

    def test_it_is_tried_again(self, caplog):
        attempts = Attempts(*[self.error(retry=True)] * 3, None)
        assert run_capture(attempts.make, threading.Event()) == 4
        assert attempts.closed == 4
        assert len(self.waits) == 3
        assert "no database" in caplog.text

    def test_waits_grow_while_nothing_is_captured(self):
        attempts = Attempts(*[self.error(retry=True)] * 12, None, changes=0)
        run_capture(attempts.make, threading.Event())
        assert self.waits[-1] > self.waits[0]
        assert max(self.waits) <= 15

    def test_waits_start_again_when_something_was_captured(self):
        attempts = Attempts(*[self.error(retry=True)] * 12, None, changes=1)
        run_capture(attempts.make, threading.Event())
        assert max(self.waits) < 1

    def test_what_cannot_pass_is_raised(self):
        attempts = Attempts(self.error(retry=False))
        with pytest.raises(CaptureError):
            run_capture(attempts.make, threading.Event())
        assert attempts.closed == 1

    def test_a_stop_ends_the_tries(self):
        stopping = threading.Event()
        stopping.set()
        assert run_capture(Attempts().make, stopping) == 0
