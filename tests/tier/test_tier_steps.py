"""SIGKILL before every single step of shipping, retention and restoring: nothing is lost, nothing is doubled."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import virta
from virta.errors import TierError
from virta.tier import Shipper, TierStore, restore_log, verify_store
from virta.tier.manifest import newest_manifest

CHILD = Path(__file__).parent / "kill_child.py"
# More steps than any action has; the last one ends by itself.
STEPS_MAX = 100


def fill(log, count):
    for number in range(count):
        log.append(f"t{number % 3}", f"k{number % 5}", b"%d " % number * 30, durability="none")
    log.flush()


def rows(path):
    with virta.open(path, read_only=True) as log:
        return [tuple(record) for record in log.read()]


@pytest.fixture
def killer():
    child = subprocess.Popen(
        [sys.executable, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def kill(step, action, folder):
        url = f"file://{folder}/store"
        child.stdin.write(f"{step} {action} {folder}/log {url} {folder}/restored\n")
        child.stdin.flush()
        answer = child.stdout.readline().strip()
        assert answer in {"0", str(int(signal.SIGKILL))}, answer
        return answer != "0"

    yield kill
    child.stdin.close()
    child.wait(30)
    child.stdout.close()


@pytest.fixture
def begun(tmp_path):
    """A log of several segments, shipped, and then continued: the next upload replaces chunks and adds segments."""
    folder = tmp_path / "begun"
    with virta.open(folder / "log", segment_bytes=4096) as log:
        fill(log, 60)
        with Shipper(log, TierStore(f"file://{folder}/store")) as shipper:
            shipper.ship()
        fill(log, 60)
    return folder


def each_step(killer, action, begun, tmp_path):
    """Yield a copy of what was begun after a kill before each step, until the action ends by itself."""
    for step in range(1, STEPS_MAX):
        folder = tmp_path / f"{action}-{step}"
        shutil.copytree(begun, folder)
        if action != "ship":  # shipped.json names the store of the copy
            url = f"file://{folder}/store"
            with virta.open(folder / "log") as log, Shipper(log, TierStore(url)) as shipper:
                shipper.ship()
        killed = killer(step, action, folder)
        yield folder
        shutil.rmtree(folder)
        if not killed:
            assert step > 3, "the action has hardly any step: nothing was tested"
            return
    raise AssertionError(f"{action} has more than {STEPS_MAX} steps")


@pytest.mark.slow
def test_shipping_killed_before_each_step(killer, begun, tmp_path):
    expected = rows(begun / "log")
    for folder in each_step(killer, "ship", begun, tmp_path):
        url = f"file://{folder}/store"
        assert verify_store(url).problems == []
        shipped = rows(url)
        assert shipped == expected[: len(shipped)]
        with virta.open(folder / "log") as log:
            assert [tuple(r) for r in log.read()] == expected
            with Shipper(log, TierStore(url), garbage_age_s=0) as shipper:
                assert shipper.ship().next == len(expected)
                shipper.collect_garbage(now=True)
        assert rows(url) == expected
        # Nothing is left that no manifest names.
        store = TierStore(url)
        names = {found.name for kind in ("segments", "tail") for found in store.list(kind)}
        assert names == newest_manifest(store).object_names


@pytest.mark.slow
def test_retention_killed_before_each_step(killer, begun, tmp_path):
    expected = rows(begun / "log")
    for folder in each_step(killer, "retain", begun, tmp_path):
        assert rows(folder / "log") == expected
        with virta.open(folder / "log") as log:
            log.retain(max_bytes=0)
            log.append("t", b"", b"more")
            assert log.verify().problems == []
            assert [tuple(r) for r in log.read()][:-1] == expected


@pytest.mark.slow
def test_restoring_killed_before_each_step(killer, begun, tmp_path):
    expected = rows(begun / "log")
    for folder in each_step(killer, "restore", begun, tmp_path):
        url, target = f"file://{folder}/store", folder / "restored"
        if (target / "META").exists():
            assert rows(target) == expected
        else:
            restore_log(url, target)
            assert rows(target) == expected
        with virta.open(target) as log:
            assert log.verify().problems == []
            assert log.append("t", b"", b"more") == len(expected)


def test_two_shippers_race_and_one_stops_with_a_sentence(tmp_path):
    """Both ship as fast as they can; the one that claimed first is fenced, and nothing of it is seen afterwards."""
    url = f"file://{tmp_path}/store"
    with virta.open(tmp_path / "log", segment_bytes=4096) as log:
        fill(log, 30)
        with Shipper(log, TierStore(url)) as shipper:
            shipper.ship()
    restore_log(url, tmp_path / "moved")
    started, stopped, refused = threading.Event(), [], set()

    def first():
        with virta.open(tmp_path / "log") as log, Shipper(log, TierStore(url)) as shipper:
            try:
                for _ in range(10_000):
                    log.append("first", b"", bytes(50), durability="none")
                    shipper.ship()
                    started.set()
            except TierError as exc:
                stopped.append(exc)

    thread = threading.Thread(target=first)
    thread.start()
    assert started.wait(30)
    with virta.open(tmp_path / "moved") as moved:
        second = Shipper(moved, TierStore(url))
        with pytest.raises(TierError, match="it is older than what was shipped"):
            second.start()  # the first one shipped more since: this copy must not win
        while (
            True
        ):  # follow the store until this copy has all of it, as a person would who moves a log
            shutil.rmtree(tmp_path / "again", ignore_errors=True)
            restore_log(url, tmp_path / "again")
            with virta.open(tmp_path / "again") as again:
                fill(again, 200)
                taker = Shipper(again, TierStore(url))
                try:
                    taker.start()
                except TierError as exc:
                    refused.add(exc.code)
                    continue
                thread.join(60)
                taker.ship()
                fill(again, 40)
                taker.ship()
                taker.close()
                expected = [tuple(r) for r in again.read()]
                break
    assert refused <= {"tier_ahead"}
    assert [exc.code for exc in stopped] == ["tier_fenced"]
    assert "this one stops. Run one shipper per log" in stopped[0].message
    assert verify_store(url).problems == []
    assert rows(url) == expected
