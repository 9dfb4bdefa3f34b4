"""
The log in a few seconds: two writers, a follower, a consumer that resumes, and a kill -9 in mid-append.

    python examples/log_demo.py

Everything happens in a temporary directory that is removed afterwards.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import virta
from virta.event import Event

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Barrier

CITIES = {"weather": ("Oslo", "Lima", "Pune"), "traffic": ("Rome", "Cairo", "Quito")}
ROUNDS = 4
KILLED_BATCH = 2000
FOLLOW_S = 20.0

spawn = multiprocessing.get_context("spawn")


def say(text: str = "") -> None:
    print(text, flush=True)


def write_events(path: Path, topic: str, together: Barrier) -> None:
    """Append one CloudEvent per city each round, as one atomic batch."""
    with virta.open(path) as log:
        for round_number in range(ROUNDS):
            together.wait()
            events = [
                Event.new(
                    f"demo.{topic}", f"/{topic}", {"city": city, "value": 10 * round_number + index},
                    partitionkey=city,
                )
                for index, city in enumerate(CITIES[topic])
            ]  # fmt: skip
            log.append_many([(topic, event.partition_key, event.to_json()) for event in events])


def write_until_killed(path: Path, pipe: Connection) -> None:
    """Append without end, and send what was acknowledged after each append."""
    with virta.open(path) as log:
        while True:
            done = log.append_many([("flood", "", b"x" * 1000)] * KILLED_BATCH)
            pipe.send(done.offset + done.count)


def follow(path: Path, expected: int) -> None:
    """Print what two writer processes append."""
    say("1. Two processes append, this one follows")
    together = spawn.Barrier(len(CITIES))
    writers = [spawn.Process(target=write_events, args=(path, topic, together)) for topic in CITIES]
    for writer in writers:
        writer.start()
    with virta.open(path) as log, log.read(follow=True, timeout=FOLLOW_S) as reader:
        for record in islice(reader, expected):
            data = Event.from_json(record.value).data
            say(
                f"   offset {record.offset:2}  {record.topic!s:8} {data['city']:6} {data['value']:3}"
            )
    for writer in writers:
        writer.join()


def resume(path: Path, total: int) -> None:
    """Read some records as a named consumer, close it, and continue where it committed."""
    say("\n2. A named consumer resumes where it left off")
    for turn, count in (("first", 10), ("second", total)):
        with virta.open(path) as log, log.consumer("dashboard") as consumer:
            taken = [record.offset for record in islice(consumer, count)]
            consumer.commit()
            say(f"   {turn} visit: {len(taken)} records, offsets {taken[0]} to {taken[-1]}")


def kill(path: Path) -> None:
    """Kill a writer in mid-append: everything acknowledged is there, and no record is torn."""
    say("\n3. kill -9 in mid-append")
    ours, theirs = spawn.Pipe(duplex=False)
    victim = spawn.Process(target=write_until_killed, args=(path, theirs))
    victim.start()
    acknowledged = 0
    while acknowledged < 5 * KILLED_BATCH:
        acknowledged = ours.recv()
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join()
    while ours.poll():
        acknowledged = ours.recv()
    # A batch cut off by the kill is set aside; the log warns of it, and this demo prints it below.
    logging.getLogger("virta.log").setLevel(logging.ERROR)
    with virta.open(path) as log:
        found = log.next_offset
        problems = log.verify().problems
        for torn in log.recovered:
            size = torn.byte_to - torn.byte_from
            say(f"   {size} bytes of the batch it was writing were cut off and set aside")
        after = log.append("weather", "Oslo", b"{}")
        say(f"   offsets below {acknowledged} were acknowledged to the writer")
        say(
            f"   the reopened log ends at {found}, {len(problems)} damaged places: nothing acknowledged is lost"
        )
        say(f"   and goes on: offset {after.offset}, durability {after.durability}")
    assert found >= acknowledged
    assert not problems


def inspect(path: Path) -> None:
    say("\n4. What is there (virta log inspect)\n")
    from virta.cli import main  # noqa: PLC0415

    main(["log", "inspect", str(path)], standalone_mode=False)


def run() -> None:
    total = ROUNDS * sum(map(len, CITIES.values()))
    with tempfile.TemporaryDirectory(prefix="virta-demo-") as place:
        path = Path(place) / "events"
        say(f"A log is a directory: {path}\n")
        follow(path, total)
        resume(path, total)
        kill(path)
        inspect(path)
    say("\nNext: `virta log --help`, docs/log.md, docs/cli-log.md")


if __name__ == "__main__":
    run()
