"""The log against a plain list: after any sequence of operations both have the same records."""

from __future__ import annotations

import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import virta

TOPICS = ["a", "b", "tö"]
records = st.tuples(
    st.sampled_from(TOPICS), st.sampled_from(["", "k1", "k2"]), st.binary(max_size=400)
)


class LogMachine(RuleBasedStateMachine):
    """`model` maps offsets to (topic, key, value); `first` is the lowest offset retention left."""

    @initialize(size=st.sampled_from([4096, 8192]))
    def start(self, size):
        self.path = tempfile.mkdtemp()
        self.log = virta.open(f"{self.path}/log", segment_bytes=size, durability="none")
        self.model: dict[int, tuple[bytes, bytes, bytes]] = {}
        self.end = self.first = self.committed = 0

    def teardown(self):
        if hasattr(self, "log"):
            self.log.close()
            shutil.rmtree(self.path)

    def _note(self, rows):
        for topic, key, value in rows:
            self.model[self.end] = (topic.encode(), key.encode(), value)
            self.end += 1

    @rule(rows=st.lists(records, min_size=1, max_size=12))
    def append_many(self, rows):
        assert self.log.append_many(rows) == self.end
        self._note(rows)

    @rule(row=records, durability=st.sampled_from(["none", "interval", "group", "fsync"]))
    def append(self, row, durability):
        done = self.log.append(*row, durability=durability)
        assert (done, done.durability) == (self.end, durability)
        self._note([row])

    @rule()
    def reopen(self):
        self.log.close()
        self.log = virta.open(f"{self.path}/log", durability="none", create=False)

    @rule()
    def another_handle(self):
        with virta.open(f"{self.path}/log") as other:
            assert other.append("a", "", b"other") == self.end
        self._note([("a", "", b"other")])

    @rule()
    def lose_the_hints(self):
        """Close, remove control page and indexes, open again."""
        self.log.close()
        for pattern in ("control", "*.pidx"):
            for path in self.log.path.glob(pattern):
                path.unlink()
        self.log = virta.open(f"{self.path}/log", durability="none")

    @rule(size=st.integers(0, 20_000))
    def retain(self, size):
        report = self.log.retain(max_bytes=size)
        assert report.first_offset == self.log.first_offset >= self.first
        self.first = report.first_offset
        self.model = {o: r for o, r in self.model.items() if o >= self.first}

    @precondition(lambda self: self.end > self.first)
    @rule()
    def compact(self):
        self.log.compact()
        sealed_end = self.log.segments()[-1].base
        newest = {(t, k): o for o, (t, k, _) in sorted(self.model.items()) if k}
        self.model = {
            o: (t, k, v)
            for o, (t, k, v) in self.model.items()
            if o >= sealed_end or not k or newest[t, k] == o
        }

    @rule()
    def consume(self):
        with self.log.consumer("c", on_gap="skip", partitions=3) as consumer:
            got = [r.offset for r in consumer]
            consumer.commit()
        assert got == [o for o in sorted(self.model) if o >= self.committed]
        self.committed = self.end

    @rule(start=st.integers(0, 200), size=st.integers(0, 50), topic=st.sampled_from(TOPICS))
    def read_a_part(self, start, size, topic):
        start += self.first
        got = [(r.offset, r.value) for r in self.log.read(topic, start=start, end=start + size)]
        assert got == [
            (o, v)
            for o, (t, _, v) in sorted(self.model.items())
            if start <= o < start + size and t == topic.encode()
        ]

    @invariant()
    def holds_the_same(self):
        if not hasattr(self, "log"):
            return
        got = {r.offset: (bytes(r.topic), bytes(r.key), r.value) for r in self.log.read()}
        assert got == self.model
        assert self.log.next_offset == self.end
        assert self.log.recovered == []

    @invariant()
    def is_sound(self):
        if hasattr(self, "log"):
            assert self.log.verify().problems == []


LogMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
class TestLogModel(LogMachine.TestCase):
    """Hypothesis' state machine as a test."""
