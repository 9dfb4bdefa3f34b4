"""Retention in `virta serve`: by age, by size, by channel; under load, with consumers."""

from __future__ import annotations

import json
import threading
import time

import pytest
from server_harness import event

import virta
from virta.errors import ConfigError
from virta.server.config_loader import load

SEGMENT_BYTES = 65_536


@pytest.fixture
def data_dir(tmp_path):
    """A data directory whose log has small segments."""
    path = tmp_path / "data"
    path.mkdir(mode=0o700)
    virta.open(path / "log", segment_bytes=SEGMENT_BYTES).close()
    return path


def fill(server, channel, count, first=0):
    """Publish events of about 2 KiB."""
    for start in range(first, first + count, 50):
        batch = [event(f"{channel}{n}", {"n": n, "pad": "x" * 2000}) for n in range(start, start + 50)]  # fmt: skip
        server.publish(channel, *batch)


def until(check, seconds=20.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := check():
            return found
    raise AssertionError("it did not happen in time")


def channels(server):
    return {c["name"]: c for c in server.request("GET", "/channels?limit=1000").json["channels"]}


def test_size_is_kept_under_load(start, data_dir):
    """The log shrinks to the limit while events come, and what is left is whole."""
    server = start("--retention-bytes", "200KiB", "--retention-interval-ms", 100, data_dir=data_dir)
    fill(server, "a", 400)

    until(
        lambda: channels(server)["a"]["firstOffset"] > 0
    )  # the figures of /stats may be a second old
    until(lambda: server.request("GET", "/stats").json["now"]["logBytes"] < 200 * 1024 + 2 * SEGMENT_BYTES)  # fmt: skip
    assert server.request("POST", "/health/verify").json["ok"]
    assert channels(server)["a"]["kept"] == "in 200KiB"


def test_age_removes_whole_segments(start, data_dir):
    """What is older than the age goes, except for the active segment."""
    server = start("--retention-age", "300ms", "--retention-interval-ms", 100, data_dir=data_dir)
    fill(server, "a", 200)

    until(lambda: len(server.request("GET", "/health").json["segments"]) <= 2)
    assert channels(server)["a"]["kept"] == "300ms"


def test_a_channel_has_its_own_age(start, data_dir):
    """Events of a matching channel go; the others stay with their offsets, and readers get on."""
    rule = "click*=300ms"
    server = start("--retention-channel", rule, "--retention-interval-ms", 100, data_dir=data_dir)
    for n in range(0, 200, 50):
        fill(server, "clicks", 50, n)
        fill(server, "orders", 50, n)

    until(lambda: channels(server).get("clicks", {"records": 0})["records"] < 60)
    server.publish("clicks", event("last"))  # in the active segment, which stays
    found = channels(server)

    assert found["orders"]["records"] == 200
    assert (found["clicks"]["kept"], found["orders"]["kept"]) == ("300ms", "for ever")
    server.stop()
    with virta.open(data_dir / "log") as log:
        orders = [
            json.loads(bytes(r.value))["data"]["n"] for r in log.read("orders", on_gap="skip")
        ]
        assert log.verify().problems == []
    assert orders == list(range(200))


@pytest.mark.parametrize("unread", [False, True])
def test_a_named_consumer_is_cut_only_if_allowed(start, data_dir, unread):
    """What a consumer has not read stays, unless --retention-unread is given."""
    flags = ["--retention-bytes", "100KiB", "--retention-interval-ms", 100]
    server = start(*flags, *(["--retention-unread"] if unread else []), data_dir=data_dir)
    with virta.open(data_dir / "log") as log, log.consumer("slow", start="earliest") as consumer:
        fill(server, "a", 300)
        if unread:
            until(lambda: log.first_offset > 0)
        else:
            fill(server, "b", 50)  # several intervals pass meanwhile
            assert log.first_offset == 0
            assert next(iter(consumer)).offset == 0


@pytest.mark.parametrize(
    "flags",
    [
        {"retention_age": "soon"},
        {"retention_bytes": "many"},
        {"retention_channel": ("clicks",)},
        {"retention_channel": ("clicks=often",)},
    ],
)
def test_wrong_rules_are_refused(flags):
    """The server does not start, and says what would be right."""
    with pytest.raises(ConfigError, match=r"it must be (a |PATTERN)"):
        load(flags)


def test_a_slow_consumer_under_load_misses_nothing(start, data_dir):
    """Retention follows it: what it has read goes, what it has not read stays, however much is published."""
    flags = ["--retention-bytes", "100KiB", "--retention-interval-ms", 100, "--durability", "none"]
    server = start(*flags, data_dir=data_dir)
    stop = threading.Event()

    def load():
        number = 0
        while not stop.is_set():
            fill(server, "a", 50, number)
            number += 50

    feeder = threading.Thread(target=load)
    feeder.start()
    read, cuts = [], set()
    try:
        with virta.open(data_dir / "log") as log, log.consumer("slow", start="earliest") as slow:
            for record in slow.read(follow=True, timeout=20):
                read.append(json.loads(bytes(record.value))["data"]["n"])
                assert log.first_offset <= record.offset
                if len(read) % 25 == 0:
                    slow.commit()
                    cuts.add(log.first_offset)
                    time.sleep(0.02)
                if len(read) >= 400 and len(cuts) > 2:
                    break
    finally:
        stop.set()
        feeder.join()

    assert read == list(range(len(read)))
    assert max(cuts) > 0
