"""Reading through the tier is reading the directory, for random logs and whatever is removed from the directory."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

import virta
from virta.log.format import topic_lookup
from virta.tier import Shipper, TierStore

SEGMENT_BYTES = 4096
TOPICS = ["a", "b", "c", "quiet"]
ACTIONS = ["append", "ship", "retain", "restart", "compact", "recompress"]
STEPS = st.lists(st.sampled_from(ACTIONS), max_size=25)


class Story:
    """A log, its store, and every record that was ever appended."""

    def __init__(self, folder, rng):
        self.rng = rng
        self.store = TierStore(f"file://{folder}/store")
        self.log = virta.open(
            folder / "log",
            segment_bytes=SEGMENT_BYTES,
            durability="none",
            compression=rng.choice(["none", "zstd"]),
        )
        self.appended: list[tuple[int, str, bytes]] = []
        self.newest: dict[tuple[str, bytes], int] = {}
        self.compacted = False
        self.shipper = None
        self.restart()

    def restart(self):
        if self.shipper is not None:
            self.shipper.close()
        self.shipper = Shipper(self.log, self.store, garbage_age_s=0)
        self.shipper.start()

    def append(self):
        rng = self.rng
        for _ in range(rng.randrange(1, 20)):
            rows = []
            for _ in range(rng.choice((1, 1, 2, 6))):
                topic = rng.choice(TOPICS[:3] * 10 + TOPICS)
                # Half of it compresses well: both kinds of batches are in one log.
                size = rng.randrange(1, 200)
                rows.append(
                    (
                        topic,
                        b"k%d" % rng.randrange(12),
                        rng.choice([b"x" * size, rng.randbytes(size)]),
                    )
                )
            first = self.log.append_many(rows)
            for number, (topic, key, value) in enumerate(rows):
                self.newest[topic, key] = first + number
                self.appended.append((first + number, topic, value))

    def ship(self):
        self.shipper.ship()
        self.shipper.collect_garbage(now=True)

    def retain(self):
        self.log.retain(max_bytes=self.rng.randrange(3 * SEGMENT_BYTES))

    def compact(self):
        self.log.compact()
        self.compacted = True

    def recompress(self):
        self.log.compress_with(self.rng.choice(["none", "zstd"]))

    def check(self, rows):
        """Nothing is lost, nothing is doubled: all records, or with compaction at least the newest of each key."""
        if not self.compacted:
            assert rows == self.appended
            return
        newest = set(self.newest.values())
        assert [row for row in rows if row[0] in newest] == [
            row for row in self.appended if row[0] in newest
        ]
        assert set(rows) <= set(self.appended)
        assert [row[0] for row in rows] == sorted({row[0] for row in rows})


def rows_of(reader):
    return [(r.offset, str(r.topic, "utf-8"), bytes(r.value)) for r in reader]


def times_of(log):
    return [(r.offset, r.timestamp) for r in log.read(on_gap="skip")]


@settings(max_examples=40)
@given(STEPS, st.integers(0, 2**32))
def test_reading_through_the_tier_equals_the_whole_log(tmp_path_factory, steps, seed):
    """All records, by topics, from an offset, from a time, and following: the store and the directory agree."""
    before = topic_lookup.TOPIC_DENSE_BYTES
    topic_lookup.TOPIC_DENSE_BYTES = 1  # small segments use their topic index, too
    try:
        check(Story(tmp_path_factory.mktemp("log"), random.Random(seed)), steps)
    finally:
        topic_lookup.TOPIC_DENSE_BYTES = before


def check(story, steps):
    for step in steps:
        getattr(story, step)()
    story.append()
    story.shipper.ship()
    story.shipper.close()
    with story.log as log, virta.open(log.path) as through, virta.open(story.store.url) as remote:
        everything = rows_of(through.read(on_gap="skip"))
        story.check(everything)
        assert rows_of(remote.read(on_gap="skip")) == everything
        times = times_of(remote)
        assert times_of(through) == times
        for _ in range(4):
            topics = story.rng.sample([*TOPICS, "absent"], story.rng.choice((1, 1, 2, 3)))
            start = story.rng.randrange(log.next_offset + 1)
            end = story.rng.choice(
                (log.next_offset, story.rng.randrange(start, log.next_offset + 1))
            )
            wanted = [r for r in everything if r[1] in topics and start <= r[0] < end]
            at = story.rng.choice(times)[1]
            since = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=at)
            later = [row for row, (_, time) in zip(everything, times, strict=True) if time >= at]
            for opened in (through, remote):
                options = {"start": start, "end": end, "on_gap": "skip"}
                assert rows_of(opened.read(topics, **options)) == wanted
                assert rows_of(opened.read(start=since, on_gap="skip")) == later
        for opened in (through, remote):
            reader = opened.read(start=everything[0][0], follow=True, timeout=30, on_gap="skip")
            assert rows_of(next(reader) for _ in everything) == everything
            reader.close()
