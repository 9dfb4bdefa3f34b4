"""`virta log append | tail` as users meet them: the real command in its own process, its exit codes, its pipes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time

import pytest
from log_command import DEADLINE_S, VIRTA, call, report, run

import virta


def test_append_and_tail_lines(place):
    """Lines go in as values and come out again, the last one with or without its line break."""
    done = run("append", place, "--topic", "greetings", "--key", "k", stdin="one\ntwo\n\nfour")

    assert "appended 4 records" in done.stdout
    assert run("tail", place).stdout == "one\ntwo\n\nfour\n"
    with virta.open(place, read_only=True) as log:
        assert {(str(r.topic), str(r.key)) for r in log.read()} == {("greetings", "k")}


def test_append_report_as_json(place):
    """The report names offsets, size and the durability that was met."""
    done = run("append", place, "--topic", "t", "--json", "--durability", "fsync", stdin="a\nbc\n")

    assert json.loads(done.stdout) == {
        "records": 2, "bytes": 3, "first_offset": 0, "next_offset": 2, "durability": "fsync",
    }  # fmt: skip
    assert run("append", place, "--topic", "t", "-q", stdin="x\n").stdout == ""


def test_append_splits_keys(place):
    """With a separator each line brings its key; a line without one is refused by number."""
    run("append", place, "--topic", "t", "--key-separator", ":", stdin="a:1\nb:2:3\n")
    assert run("tail", place, "--format", "full").stdout.count("\tb\t2:3\n") == 1

    done = run("append", place, "--topic", "t", "--key-separator", ":", stdin="c:1\nno\n", code=2)
    assert done.stderr == "error: line 2: has no key separator ':'\n"


def test_append_cloudevents(place):
    """Events are checked, stored as they came and keyed by their partition key."""
    one = '{"specversion":"1.0","id":"1","source":"/s","type":"t","partitionkey":"p","data":{"n":1.10}}'
    two = '{"specversion":"1.0","id":2,"source":"/s","type":"t"}'
    run("append", place, "--topic", "c", "--format", "cloudevents", stdin=f"{one}\n\n{two}\n")

    with virta.open(place, read_only=True) as log:
        first, second = log.read()
    assert (first.key, first.value) == ("p", one.encode())
    assert json.loads(second.value)["id"] == "2"


def test_append_refuses_bad_events(place):
    """A bad event is one sentence with its line number; what was appended before is said."""
    good = '{"specversion":"1.0","id":"1","source":"/s","type":"t"}'
    options = (place, "--topic", "c", "--format", "cloudevents")

    done = run(
        "append", *options, "--batch", "1", stdin=f'{good}\n{{"id":"2","source":"/s"}}\n', code=2
    )
    assert re.fullmatch(
        r"error: line 2: required attribute .*\(appended before it: 1 record\)\n", done.stderr
    )
    assert run("append", *options, "--lenient", stdin='{"id":"2","source":"/s"}').returncode == 0
    assert (
        "line 1: the body is not valid JSON" in run("append", *options, stdin="nope", code=2).stderr
    )


def test_append_record_objects(place):
    """Record objects name their own topic and key; binary fields travel as Base64."""
    lines = [
        {"topic": "a", "key": "k", "value": "v"}, {"value": "only"}, {"topic_base64": "/w==", "value_base64": "AP8="},
        {"topic": "removed", "key": "k"},
    ]  # fmt: skip
    run(
        "append",
        place,
        "--format",
        "ndjson-records",
        "--topic",
        "default",
        stdin="\n".join(map(json.dumps, lines)),
    )

    with virta.open(place, read_only=True) as log:
        found = [(bytes(r.topic), bytes(r.key), r.value) for r in log.read()]
    assert found == [
        (b"a", b"k", b"v"),
        (b"default", b"", b"only"),
        (b"\xff", b"", b"\x00\xff"),
        (b"removed", b"k", b""),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: "), ("[1]", "line 1: "), ('{"value":"x"}', "line 1: has no topic"),
        ('{"topic":"t","value":5}', "line 1: its value is not a string"),
        ('{"topic":"t","value_base64":"!"}', "line 1: "),
    ],
)  # fmt: skip
def test_append_refuses_bad_record_objects(place, line, message):
    """Each malformed object is named by its line."""
    assert message in run("append", place, "--format", "ndjson-records", stdin=line, code=2).stderr


def test_append_refuses_what_the_log_refuses(place):
    """A value or topic over its limit is one sentence and exit code 2, and nothing is appended."""
    done = run("append", place, "--topic", "t" * 1025, stdin="x", code=2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1

    done = run("append", place, "--topic", "t", stdin=b"x" * (10 * 1024 * 1024 + 1), code=2)
    assert done.stderr.startswith("error: ")
    assert report("inspect", place)["next_offset"] == 0


def test_append_does_not_sit_on_lines(place):
    """A slow producer's line is in the log while its pipe is still open."""
    with subprocess.Popen(
        [VIRTA, "log", "append", place, "--topic", "t"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdin.write(b"early\n")
        process.stdin.flush()
        with virta.open(place, wait=DEADLINE_S, create=False, read_only=True) as log:
            record = next(iter(log.read(follow=True, timeout=DEADLINE_S)))
        assert record.value == b"early"
        assert process.poll() is None
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_append_batches(place):
    """--batch bounds what one append carries, so no batch is larger than asked."""
    run("append", place, "--topic", "t", "--batch", "7", stdin="x\n" * 100)

    assert report("verify", place)["batches"] >= 100 // 7
    assert report("inspect", place)["next_offset"] == 100


def values(done) -> list[int]:
    return [int(line.split()[1]) for line in done.stdout.splitlines()]


def test_tail_chooses(filled):
    """The last ten by default; -n, --from, --to and --topic choose others."""
    assert values(call("tail", filled)) == list(range(10, 20))
    assert values(call("tail", filled, "-n", 3)) == [17, 18, 19]
    assert values(call("tail", filled, "-n", 0)) == []
    assert values(call("tail", filled, "-n", 2, "--topic", "t0")) == [16, 18]
    assert values(call("tail", filled, "-n", 2, "--to", 5)) == [3, 4]
    assert values(call("tail", filled, "--from", "earliest")) == list(range(20))
    assert values(call("tail", filled, "--from", 15, "-n", 2)) == [15, 16]
    assert values(call("tail", filled, "--from", 15, "--to", 17)) == [15, 16]
    assert values(call("tail", filled, "--from", "latest")) == []
    assert values(call("tail", filled, "--from", "1h")) == list(range(20))
    assert values(call("tail", filled, "--from", "2999-01-01T00:00:00Z")) == []
    assert values(call("tail", filled, "--from", 17, "--topic", "t0", "--topic", "t1")) == [
        17,
        18,
        19,
    ]


def test_tail_formats(place):
    """Each format prints the same record its own way; a record stays on its line in `full`."""
    value = b'{"a":\n 1}'
    with virta.open(place) as log:
        log.append("t", b"\xff", value)
    record = json.loads(call("tail", place, "--format", "json").stdout)

    assert record.pop("time").endswith("Z")
    assert record == {"offset": 0, "topic": "t", "key_base64": "/w==", "value": value.decode()}
    assert call("tail", place).stdout_bytes == value + b"\n"
    assert call("tail", place, "--format", "raw").stdout_bytes == value
    assert call("tail", place, "--format", "event").stdout == '{"a":1}\n'
    assert call("tail", place, "--format", "full").stdout.count("\n") == 1
    with virta.open(place) as log:
        log.append("t", "", b"not json")
    assert "is not JSON" in call("tail", place, "--format", "event", code=2).stderr


def test_tail_as_a_consumer(filled):
    """A named consumer continues where it stopped; -n limits what it reads, and only that is committed."""
    assert len(call("tail", filled, "--consumer", "c", "-n", 5).stdout.splitlines()) == 5
    assert len(call("tail", filled, "--consumer", "c").stdout.splitlines()) == 15
    assert call("tail", filled, "--consumer", "c").stdout == ""
    consumer = report("inspect", filled)["consumers"][0]
    assert (consumer["name"], consumer["position"], consumer["lag"]) == ("c", 20, 0)
    assert values(call("tail", filled, "--from", "consumer:c")) == []


def test_tail_follows_until_interrupted(filled):
    """-f prints what is there, then what comes, and Ctrl-C ends it quietly with 130."""
    with subprocess.Popen(
        [VIRTA, "log", "tail", "-f", filled, "-n", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"value 19\n"
        with virta.open(filled) as log:
            log.append("t0", "", b"value 20")
        assert process.stdout.readline() == b"value 20\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (out, err, process.returncode) == (b"", b"", 130)


def test_tail_follow_ends_after_idle(filled):
    """--timeout ends a follower that sees nothing, also as a consumer that commits meanwhile."""
    begun = time.monotonic()
    assert (
        len(
            run(
                "tail", "-f", filled, "--from", "earliest", "--timeout", "300ms"
            ).stdout.splitlines()
        )
        == 20
    )
    assert (
        len(run("tail", "-f", filled, "--consumer", "c", "--timeout", "300ms").stdout.splitlines())
        == 20
    )
    assert time.monotonic() - begun < DEADLINE_S
    assert report("inspect", filled)["consumers"][0]["lag"] == 0


def test_tail_waits_for_the_log(place):
    """--wait waits for a log that is not there yet."""
    with subprocess.Popen(
        [VIRTA, "log", "tail", "-f", place, "--from", "earliest", "--wait", "30s"],
        stdout=subprocess.PIPE,
    ) as process:
        with virta.open(place) as log:
            log.append("t", "", b"first")
        assert process.stdout.readline() == b"first\n"
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130


def test_closed_pipe_is_quiet(place):
    """`tail | head` ends without a word, however much was left to print."""
    with virta.open(place, durability="none") as log:
        log.append_many([("t", "", b"x" * 100)] * 20_000)
    with subprocess.Popen(
        [VIRTA, "log", "tail", place, "--from", "earliest"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_errors_are_one_sentence(tmp_path, filled):
    """No log, a foreign directory, wrong usage: one sentence on stderr and the documented code."""
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "file").write_text("x")
    for code, args in (
        (3, ("tail", tmp_path / "none")),
        (3, ("inspect", foreign)),
        (3, ("append", tmp_path / "none", "--topic", "t", "--no-create")),
    ):
        done = run(*args, code=code)
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""
    for args in (
        ("tail",), ("tail", filled, "--from", "someday"), ("retain", filled, "--max-age", "soon"),
        ("retain", filled, "--max-bytes", "big"), ("append", filled), ("nothing",),
        ("tail", filled, "-f", "--to", "5"), ("import", filled, "-"), ("tail", filled, "-n", "-1"),
    ):  # fmt: skip
        assert "rror" in call(*args, code=2).stderr
    assert not (tmp_path / "none").exists()


@pytest.fixture
def retained(place):
    """Make a log whose first segments were removed; return the first remaining offset."""
    with virta.open(place, segment_bytes=4096, durability="none") as log:
        for n in range(100):
            log.append("t", "", b"%d" % n + bytes(200))
        log.retain(max_bytes=8000)
        return log.first_offset


@pytest.mark.parametrize("more", [(), ("--consumer", "c"), ("--follow", "--timeout", "50ms")])
def test_tail_over_a_gap(place, retained, more):
    """What retention removed is an error, or with --on-gap skip a line on stderr."""
    command = ("tail", place, "--format", "json", *more)
    if "--consumer" in more:
        with virta.open(place) as log, log.consumer("c", start=0):
            pass
    start = () if "--consumer" in more else ("--from", "0")
    refused = run(*command, *start, code=4)
    skipped = run(*command, *start, "--on-gap", "skip")

    assert (refused.stdout, "not there any more" in refused.stderr) == ("", True)
    assert refused.stderr.endswith(f"read from {retained}, or with --on-gap skip\n")
    offsets = [json.loads(line)["offset"] for line in skipped.stdout.splitlines()]
    assert offsets == list(range(retained, 100))
    assert skipped.stderr == f"gap: offsets 0 to {retained - 1} are no longer in the log\n"


def test_tail_over_a_gap_in_the_middle(place):
    """A repair's gap is reported once, also when the search for the last records goes back in steps."""
    with virta.open(place, durability="none") as log:
        ends = []
        for n in range(30):
            log.append("even" if n % 2 == 0 else "odd", "", b"value %d" % n)
            ends.append(log.bytes)
    (segment,) = place.glob("*.puro")
    with segment.open("r+b") as file:
        file.seek(ends[9] + 30)
        file.write(b"broken")
    (place / "control").unlink()
    with virta.open(place) as log:
        log.repair()
    refused = run("tail", place, "--topic", "odd", "-n", "15", code=4)
    skipped = run("tail", place, "--topic", "odd", "-n", "15", "--on-gap", "skip")

    assert "not there any more" in refused.stderr
    assert skipped.stdout.split() == [w for n in range(1, 30, 2) for w in ("value", str(n))]
    assert skipped.stderr == "gap: offsets 10 to 10 are no longer in the log\n"
