"""
NEXMark events: persons, auctions and bids of an auction site, as CloudEvents.

    python bench/nexmark.py DIRECTORY [--events 1000000]    a log and the same events as JSON lines

After the published generator (Beam's and Flink's): of 50 events one is a person, three are auctions and 46 are bids;
every second bid is for the hottest auction, three of four sellers and bidders are hot; an auction is open for at most
a third of a second at 10,000 events a second. The same seed gives the same events. An event has about 370 bytes.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import virta

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 13
TOPICS = ("person", "auction", "bid")
PERSONS, AUCTIONS, CYCLE = 1, 3, 50  # of a cycle of events
FIRST_ID = 1000  # of persons and auctions
FIRST_CATEGORY, CATEGORIES = 10, 5
IN_FLIGHT, ACTIVE, LEAD = 100, 1000, 10
HOT = 100  # one id of a hundred is hot
RATE = 10_000  # events a second of event time
BEGIN_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
AUCTION_MS_MAX = 2 * IN_FLIGHT * CYCLE * 1000 // (AUCTIONS * RATE)
BATCH = 1000  # records of one append

STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = ("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle", "Kent", "Cheyenne")  # fmt: skip
FIRST = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")  # fmt: skip
LAST = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
NOISE = "".join(random.Random(SEED).choices("abcdefghijklmnopqrstuvwxyz ", k=4096))


def event_time(ms: int) -> str:
    """Return a time of the first day as RFC 3339, a few times as fast as datetime."""
    seconds, millis = divmod(ms - BEGIN_MS, 1000)
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    assert day < 28, "the generator writes events of January"
    return f"2026-01-{day + 1:02d}T{hour:02d}:{minute:02d}:{second:02d}.{millis:03d}Z"


class Generator:
    """Makes the events of a seed, one by one."""

    def __init__(self, seed: int = SEED) -> None:
        self.random = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self.random() * count)

    def noise(self, size: int) -> str:
        at = self.below(len(NOISE) - size)
        return NOISE[at : at + size]

    def records(self, count: int) -> Iterator[tuple[str, str, bytes]]:
        """Yield topic, key and value of each event."""
        for number in range(count):
            cycle, place = divmod(number, CYCLE)
            ms = BEGIN_MS + number * 1000 // RATE
            if place < PERSONS:
                yield self.person(number, cycle, event_time(ms))
            elif place < PERSONS + AUCTIONS:
                yield self.auction(number, cycle, place - PERSONS, ms)
            else:
                yield self.bid(number, cycle, event_time(ms))

    def person_of(self, cycle: int) -> int:
        """Return one of the active persons, or of those who will be soon."""
        active = min(cycle + 1, ACTIVE)
        return cycle + 1 - active + self.below(active + LEAD)

    def person(self, number: int, cycle: int, when: str) -> tuple[str, str, bytes]:
        me = FIRST_ID + cycle
        first, last = FIRST[self.below(len(FIRST))], LAST[self.below(len(LAST))]
        card = f"{self.below(10**8):08d} {self.below(10**8):08d}"
        data = (
            f'{{"id":{me},"name":"{first} {last}","emailAddress":"{first}.{last}@example.com",'
            f'"creditCard":"{card}","city":"{CITIES[self.below(len(CITIES))]}",'
            f'"state":"{STATES[self.below(len(STATES))]}","extra":"{self.noise(40)}"}}'
        )
        return event("person", number, str(me), when, data)

    def auction(self, number: int, cycle: int, place: int, ms: int) -> tuple[str, str, bytes]:
        me = FIRST_ID + cycle * AUCTIONS + place
        hot = self.below(4) > 0
        seller = FIRST_ID + (cycle // HOT * HOT if hot else self.person_of(cycle))
        opening = self.price()
        expires = event_time(ms + 1 + self.below(AUCTION_MS_MAX))
        data = (
            f'{{"id":{me},"itemName":"{self.noise(20)}","description":"{self.noise(100)}",'
            f'"initialBid":{opening},"reserve":{opening + self.price()},"expires":"{expires}",'
            f'"seller":{seller},"category":{FIRST_CATEGORY + self.below(CATEGORIES)},"extra":"{self.noise(180)}"}}'
        )
        return event("auction", number, str(me), event_time(ms), data)

    def bid(self, number: int, cycle: int, when: str) -> tuple[str, str, bytes]:
        last = cycle * AUCTIONS + AUCTIONS - 1
        if self.below(2) > 0:
            auction = last // HOT * HOT
        else:
            oldest = max(last - IN_FLIGHT, 0)
            auction = oldest + self.below(last - oldest + 1 + LEAD)
        bidder = cycle // HOT * HOT + 1 if self.below(4) > 0 else self.person_of(cycle)
        channel = CHANNELS[self.below(len(CHANNELS))]
        data = (
            f'{{"auction":{FIRST_ID + auction},"bidder":{FIRST_ID + bidder},"price":{self.price()},'
            f'"channel":"{channel}","url":"https://www.nexmark.com/{self.noise(12).replace(" ", "/")}/item.htm",'
            f'"extra":"{self.noise(75)}"}}'
        )
        return event("bid", number, str(FIRST_ID + auction), when, data)

    def price(self) -> int:
        """Return cents between one and a million units, evenly by their logarithm."""
        return round(10 ** (self.random() * 6) * 100)


def event(topic: str, number: int, key: str, when: str, data: str) -> tuple[str, str, bytes]:
    head = f'{{"specversion":"1.0","id":"{number}","source":"/nexmark","type":"nexmark.{topic}","time":"{when}"'
    return topic, key, f'{head},"datacontenttype":"application/json","data":{data}}}'.encode()


def last_events(count: int) -> Iterator[tuple[str, str, bytes]]:
    """
    Yield one event of each topic an hour after all others, which match no other event.

    A stream puts out windows and joins only when time goes on.
    """
    when = event_time(BEGIN_MS + count * 1000 // RATE + 3_600_000)
    yield event("person", count, "-1", when, '{"id":-1,"name":"","city":"","state":""}')
    closing = f'{{"id":-2,"seller":-2,"category":0,"expires":"{when}"}}'
    yield event("auction", count + 1, "-2", when, closing)
    yield event("bid", count + 2, "-3", when, '{"auction":-3,"bidder":-3,"price":0}')


def write(directory: Path, count: int, seed: int = SEED) -> int:
    """Write the log `log` and `person.jsonl`, `auction.jsonl`, `bid.jsonl`; return the bytes of the values."""
    directory.mkdir(parents=True, exist_ok=True)
    size = 0
    files = {topic: (directory / f"{topic}.jsonl").open("wb") for topic in TOPICS}
    with virta.open(directory / "log", durability="none", segment_bytes=64 << 20) as log:
        batch = []
        for record in Generator(seed).records(count):
            batch.append(record)
            size += len(record[2])
            files[record[0]].write(record[2] + b"\n")
            if len(batch) == BATCH:
                log.append_many(batch)
                batch.clear()
        if batch:
            log.append_many(batch)
    for file in files.values():
        file.close()
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    options = parser.parse_args()
    begun = time.perf_counter()
    size = write(options.directory, options.events)
    print(
        f"{options.events:,} events of {size / options.events:.0f} bytes in {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
