"""`virta log inspect | verify | repair | compact | retain`: reports for people and as JSON."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pytest
from log_command import call, report, run

import virta

if TYPE_CHECKING:
    from pathlib import Path


def test_inspect(filled):
    """Offsets, sizes, segments and consumers, for people and as JSON."""
    members = report("inspect", filled)
    assert (members["first_offset"], members["next_offset"]) == (0, 20)
    assert len(members["segments"]) == 1
    assert members["segments"][0]["state"] == "active"
    assert members["bytes"] == sum(f.stat().st_size for f in filled.glob("*.puro"))

    with virta.open(filled) as log, log.consumer("reader"):
        pass
    text = run("inspect", filled).stdout
    for word in (str(filled), members["id"], members["segments"][0]["name"], "reader", "lag"):
        assert word in text


def damage(place: Path) -> Path:
    """Flip one byte in the middle batch of a log of three."""
    with virta.open(place) as log:
        ends = []
        for n in range(3):
            log.append("t", "", b"value %d" % n)
            ends.append(log.bytes)
    segment = next(place.glob("*.puro"))
    with segment.open("r+b") as file:
        file.seek(ends[1] - 3)
        byte = file.read(1)[0]
        file.seek(ends[1] - 3)
        file.write(bytes([byte ^ 0xFF]))
    return segment


def test_verify_finds_and_repair_passes(place):
    """Damage is named with file, bytes and offsets, exit code 1; after repair the rest is readable."""
    segment = damage(place)
    done = run("verify", place, code=1)
    assert str(segment.name) in done.stdout
    problem = report("verify", place, code=1)["problems"][0]
    assert (problem["offset_from"], problem["offset_to"]) == (1, 2)
    assert problem["byte_from"] < problem["byte_to"]

    assert call("tail", place, "--from", "earliest", code=4).stderr.startswith("error: ")
    repaired = report("repair", place, code=1)
    assert repaired["offsets_lost"] == 1
    assert all((place / name).exists() for name in repaired["quarantined"])
    assert "no damage" in run("verify", place).stdout
    assert "nothing to repair" in run("repair", place).stdout
    with virta.open(place, read_only=True) as log:
        assert [r.value for r in log.read(on_gap="skip")] == [b"value 0", b"value 2"]


@pytest.mark.parametrize("which", [0, -1])
def test_verify_finds_damaged_headers_after_a_reboot(rolled, which):
    """Damage is also reported without a control page of this boot."""
    segment = sorted(rolled.glob("*.puro"))[which]
    with segment.open("r+b") as file:
        file.write(b"not a header")
    (rolled / "control").unlink()

    found = report("verify", rolled, code=1)

    assert [problem["reason"] for problem in found["problems"]] == ["bad-header"]
    assert found["clock_ahead_s"] == 0.0


def test_compact(rolled):
    """Compaction keeps the newest record of each key and says what it saved."""
    members = report("compact", rolled)

    assert members["records_after"] < members["records_before"]
    assert members["bytes_after"] < members["bytes_before"]
    assert "compacted" in run("compact", rolled).stdout
    newest = {}
    with virta.open(rolled, read_only=True) as log:
        for record in log.read():
            newest[bytes(record.key)] = int(record.value.split(b".")[0])
    assert newest == {b"k%d" % (n % 5): n for n in range(395, 400)}


def test_retain(rolled):
    """Sizes and ages are written as people write them; a dry run changes nothing."""
    before = report("inspect", rolled)
    planned = report("retain", rolled, "--max-bytes", "10KiB", "--dry-run")
    assert planned["dry_run"]
    assert report("inspect", rolled)["bytes"] == before["bytes"]

    done = report("retain", rolled, "--max-bytes", "10KiB")
    assert done["segments"] == planned["segments"] > 0
    after = report("inspect", rolled)
    assert after["first_offset"] == done["first_offset"] > 0
    assert after["bytes"] < before["bytes"]
    assert report("retain", rolled, "--max-age", "7d")["segments"] == 0
    assert "say what to drop" in run("retain", rolled, code=2).stderr


def test_inspect_shows_topics(filled):
    """Records, bytes, first and last record of each topic; names that do not print stay on their line."""
    with virta.open(filled) as log:
        log.append_many([("new\nline", "", b"v"), (b"\xff", "k", b"value")])
        times = {r.offset: r.time for r in log.read()}
    members = report("inspect", filled)

    assert [t.get("topic", t.get("topic_base64")) for t in members["topics"]] == [
        *("new\nline", "t0", "t1", "/w=="),
    ]
    t1 = members["topics"][2]
    assert (t1["records"], t1["first_offset"], t1["last_offset"]) == (10, 1, 19)
    assert t1["bytes"] == sum(2 + len(f"value {n}") for n in range(1, 20, 2))
    assert datetime.fromisoformat(t1["last_time"]) == times[19]
    assert members["topics_more"] is False
    text = run("inspect", filled).stdout.splitlines()
    (head,) = [line for line in text if line.startswith("topic ")]
    assert head.split() == [
        "topic",
        "first",
        "record",
        "last",
        "record",
        "records",
        "first",
        "last",
        "size",
    ]
    assert [line.split()[0] for line in text[text.index(head) + 1 :][:4]] == [
        *("new\\nline", "t0", "t1", "base64:/w=="),
    ]


def test_inspect_without_topics(filled):
    assert "topics" not in report("inspect", filled, "--no-topics")
    assert "last record  records" not in run("inspect", filled, "--no-topics").stdout


def test_inspect_of_many_topics(place):
    """People see the first hundred and how many there are."""
    with virta.open(place, durability="none") as log:
        log.append_many([(f"t{n:03}", "", b"") for n in range(150)])
    text = run("inspect", place).stdout

    assert "t099" in text
    assert "t100" not in text
    assert "the first 100 topics of 150" in text
    assert len(report("inspect", place)["topics"]) == 150
