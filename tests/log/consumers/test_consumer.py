"""Named consumers: positions survive, members share, and what was not committed comes again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import virta
from virta import errors
from virta.log import reader
from virta.log.consumers import consumer as consumer_module
from virta.log.consumers import lag, members

pytestmark = pytest.mark.usefixtures("either_kernel")


@pytest.fixture
def log(tmp_path):
    with virta.open(tmp_path / "log", durability="none") as handle:
        yield handle


def fill(log, count, start=0, keys=23):
    log.append_many([("t", f"k{i % keys}", b"%d" % i) for i in range(start, start + count)])


def offsets(records):
    return [r.offset for r in records]


def test_a_position_is_kept(log):
    """A new member starts where the last one committed."""
    fill(log, 10)
    with log.consumer("billing") as consumer:
        assert offsets(consumer) == list(range(10))
        consumer.commit()
        assert (consumer.position, consumer.lag) == (10, 0)
    fill(log, 5, start=10)
    with log.consumer("billing") as consumer:
        assert consumer.lag == 5
        assert offsets(consumer) == list(range(10, 15))


def test_what_was_not_committed_comes_again(log):
    """At least once: nothing is lost by leaving without a commit."""
    fill(log, 10)
    with log.consumer("c") as consumer:
        assert len(offsets(consumer)) == 10
    with log.consumer("c") as consumer:
        assert offsets(consumer) == list(range(10))


def test_a_commit_covers_exactly_what_was_handed_out(log):
    """Committing in mid-batch keeps the rest."""
    fill(log, 10)
    with log.consumer("c") as consumer:
        for record in consumer:
            if record.offset == 3:
                consumer.commit()
                assert consumer.position == 4
                break
    with log.consumer("c") as consumer:
        assert offsets(consumer) == list(range(4, 10))


def test_the_start_applies_only_once(log):
    """`start` is for a consumer without a position."""
    fill(log, 10)
    with log.consumer("late", start="latest") as consumer:
        assert offsets(consumer) == []
    fill(log, 2, start=10)
    with log.consumer("late", start="earliest") as consumer:
        assert offsets(consumer) == [10, 11]


def test_topics_and_following(log):
    """A consumer of one topic follows, and its position passes what it does not want."""
    log.append_many([("a", "", b"1"), ("b", "", b"2"), ("a", "", b"3")])
    with log.consumer("c", topics="a") as consumer:
        assert [r.value for r in consumer.read(follow=True, timeout=0.01)] == [b"1", b"3"]
        consumer.commit()
        assert consumer.position == 3


def test_reading_from_a_consumers_position(log):
    """A plain read may start where a consumer stands."""
    fill(log, 10)
    with log.consumer("c") as consumer:
        list(consumer)
        consumer.commit()
        consumer.seek(6)
    assert offsets(log.read(start="c")) == [6, 7, 8, 9]
    assert offsets(log.read(start="consumer:c")) == [6, 7, 8, 9]


def test_two_members_share_the_work(log):
    """Every record goes to exactly one of two members, keys stay with their owner."""
    with log.consumer("g") as one, log.consumer("g") as two:
        one.commit()  # gives up half of what it took while it was alone
        two.commit()
        assert sorted(one.partitions + two.partitions) == list(range(16))
        assert len(one.partitions) == len(two.partitions) == 8
        fill(log, 1000)
        first, second = list(one), list(two)
        assert sorted(offsets(first) + offsets(second)) == list(range(1000))
        assert first
        assert second
        assert not {r.key for r in first} & {r.key for r in second}
        info = {i.name: i for i in log.consumers()}["g"]
        assert (info.members, info.partitions, info.lag) == (2, 16, 1000)
        one.commit()
        two.commit()
        assert one.position == 1000


def test_a_member_that_leaves_hands_over(log):
    """What it had not committed is delivered again to who stays; what it had is not."""
    fill(log, 100)
    two = log.consumer("g")
    with log.consumer("g") as one:
        two.commit()
        one.commit()
        mine = set(offsets(one))
        one.commit()
    theirs = offsets(two)
    two.commit()
    rest = offsets(two)
    assert not mine & set(theirs + rest)
    assert sorted(mine | set(theirs) | set(rest)) == list(range(100))
    two.close()


@pytest.fixture
def clock(monkeypatch):
    """The clock of the leases; `clock.now` is moved by hand, in seconds."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(members, "uptime_us", lambda: int(clock.now * 1e6))
    monkeypatch.setattr(consumer_module.time, "monotonic", clock.monotonic)
    return clock


def test_a_silent_member_loses_its_lease(log, clock):
    """Alive but silent for longer than its lease: others take over everything, its commit is refused."""
    fill(log, 50)
    silent = log.consumer("g", lease=20.0)
    taken = offsets(silent)
    assert len(taken) == 50
    clock.now += 27
    with log.consumer("g", lease=20.0) as eager:
        assert offsets(eager) == taken
        assert eager.partitions == tuple(range(16))
        (info,) = log.consumers()
        assert (info.members, info.hung) == (1, 1)
        with pytest.raises(
            errors.ConsumerError, match="for longer than its lease of 20 s"
        ) as caught:
            silent.commit()
        assert caught.value.code == "consumer_lost"
        eager.commit()
        assert eager.lag == 0
        # It is back: the work is shared again, and what was committed stays committed.
        clock.now += 1
        eager.commit()
        silent.commit()
        assert len(eager.partitions) == len(silent.partitions) == 8
        assert offsets(silent) == offsets(eager) == []
        assert log.consumers()[0][3:4] == (2,)
    silent.close()


def test_a_loss_noticed_while_reading_fails_the_commit(log, clock):
    """Also when the hung member asks for its next record first, its next commit says what was lost."""
    fill(log, 50)
    with log.consumer("g", lease=20.0) as silent:
        records = silent.read()
        next(records)
        clock.now += 27
        with log.consumer("g", lease=20.0) as eager:
            assert len(offsets(eager)) == 50
            assert list(records) == []  # not one record of partitions that it no longer has
            with pytest.raises(errors.ConsumerError, match="delivered again"):
                silent.commit()
            silent.commit()  # said once


def test_a_slow_handler_keeps_its_partitions(log, clock):
    """Asking for the next record within the lease is enough, however long all of them take together."""
    fill(log, 40)
    with log.consumer("g", lease=20.0) as slow, log.consumer("g", lease=20.0) as other:
        slow.commit()
        mine = slow.partitions
        assert len(mine) == 8
        for _ in slow:
            clock.now += 19
            list(other.read())
            other.commit()
        slow.commit()
        assert slow.partitions == mine
        assert slow.lag == 0


@pytest.mark.parametrize("step", [-3600, 3600])
def test_a_clock_step_expires_nothing(log, step, monkeypatch):
    """Leases are measured on the monotonic clock: active members keep their partitions."""
    with log.consumer("g") as one, log.consumer("g") as two:
        one.commit()
        two.commit()
        shares = one.partitions, two.partitions
        later = consumer_module.now_us() + step * 1_000_000
        monkeypatch.setattr(consumer_module, "now_us", lambda: later)
        one.commit()
        two.commit()
        assert (one.partitions, two.partitions) == shares


def test_after_a_step_back_a_hung_member_is_still_hung(log, clock, monkeypatch):
    """A wall clock that was set back must not keep a stopped member's partitions for it."""
    hung = log.consumer("g", lease=20.0)
    later = consumer_module.now_us() - 3_600_000_000
    monkeypatch.setattr(consumer_module, "now_us", lambda: later)
    clock.now += 27
    with log.consumer("g", lease=20.0) as eager:
        assert len(eager.partitions) == 16
    hung.close()


def test_hung_members_without_partitions_do_not_count(log, clock):
    """More members than partitions: one that never had any takes no share once it hangs."""
    first, second, third = (log.consumer("g", partitions=2, lease=20.0) for _ in range(3))
    for each in (first, second, third):
        each.commit()
    assert sorted(len(each.partitions) for each in (first, second, third)) == [0, 1, 1]
    clock.now += 27
    with log.consumer("g", lease=20.0) as living:
        assert living.partitions == (0, 1)
    for each in (first, second, third):
        each.close()


def test_a_bad_lease_says_so(log):
    """Zero would make every member hung at once."""
    for lease in (0, -1, float("nan"), float("inf"), True, "30"):
        with pytest.raises(errors.LogTypeError, match="lease must be"):
            log.consumer("c", lease=lease)


def test_two_members_leave_no_lag(log):
    """Each member skips the other's records, also after its own last one."""
    with log.consumer("g") as one, log.consumer("g") as two:
        one.commit()
        two.commit()
        fill(log, 300)
        for each in (one, two):
            for _ in each:
                each.commit()
        assert (one.lag, two.lag) == (0, 0)
        (info,) = log.consumers()
        assert (info.position, info.lag, info.lag_exact) == (300, 0, True)


def test_lag_counts_its_own_topics(log):
    """Other topics are no lag: not after its position, not between its records, not after it left."""
    log.append_many([("a", "k", b"1"), ("b", "k", b"2"), ("a", "k", b"3")])
    with log.consumer("c", topics="a") as consumer:
        assert consumer.lag == 2
        list(consumer)
        consumer.commit()
    log.append_many([("b", "k", b"%d" % i) for i in range(50)])
    assert log.consumers()[0].lag == 0
    log.append_many([("a", "x", b"4"), ("b", "", b"5")])
    assert log.consumers()[0].lag == 1
    assert log.consumers()[0].position == 3


def test_a_long_lag_is_a_bound(log, monkeypatch):
    """Counting stops after so many records; the rest counts as it is, and the report says so."""
    monkeypatch.setattr(lag, "LAG_RECORDS_MAX", 10)
    log.consumer("c", topics="a").close()
    for _ in range(30):
        log.append_many([("a", "", b"1"), ("b", "", b"2")])
    monkeypatch.setattr(reader, "READ_RECORDS_MAX", 4)
    (info,) = log.consumers()
    assert not info.lag_exact
    assert 30 <= info.lag < 60


def test_lag_over_sealed_segments_is_counted_by_their_indexes(tmp_path, monkeypatch):
    """It is exact however long it is, with and without topics, after compaction, and nothing sealed is read."""
    monkeypatch.setattr(lag, "LAG_RECORDS_MAX", 200)
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        log.consumer("all").close()
        log.consumer("some", topics=["a", "absent"]).close()
        for n in range(400):
            log.append_many([("a", f"k{n % 40}", b"%d" % n), ("b", f"k{n}", bytes(20))])
        assert len(log.segments()) > 5
        for _ in range(2):
            records = list(log.read())
            own = sum(record.topic == "a" for record in records)
            found = {info.name: (info.lag, info.lag_exact) for info in log.consumers()}
            assert found == {"all": (len(records), True), "some": (own, True)}
            log.compact()
        for file in (tmp_path / "log").glob("*.ptix"):
            file.unlink()
        with virta.open(tmp_path / "log", read_only=True) as other:
            assert {info.lag_exact for info in other.consumers()} == {False}
            assert all(info.lag >= found[info.name][0] for info in other.consumers())


def test_following_moves_past_other_topics(log):
    """A follower of one topic keeps its position near the end of a log that others fill."""
    with log.consumer("c", topics="a") as consumer:
        log.append_many([("b", "", b"%d" % i) for i in range(50)])
        assert list(consumer.read(follow=True, timeout=0.3)) == []
        assert log.consumers()[0].position == 50


def test_retention_removes_what_all_have_consumed(tmp_path):
    """Records of other topics after a consumer's last one do not block retention, and leave no gap."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        log.append("a", "k", b"first")
        with log.consumer("c", topics="a") as consumer:
            list(consumer)
            consumer.commit()
        for i in range(200):
            log.append("b", "k", b"%d" % i + bytes(30))
        sealed = len(log.segments()) - 1
        assert sealed > 2
        assert log.retain(consumed=True, dry_run=True).segments == sealed
        assert log.consumers()[0].position == 1
        assert log.retain(consumed=True).segments == sealed
        last = log.append("a", "k", b"second")
        with log.consumer("c", topics="a") as consumer:
            assert offsets(consumer) == [last]


def test_retention_moves_no_position_over_what_is_not_durable(tmp_path):
    """After a power cut those offsets could be given again, to records that the consumer would never see."""
    with virta.open(tmp_path / "log") as log:
        log.append("a", "k", b"first")
        with log.consumer("c", topics="a") as consumer:
            list(consumer)
            consumer.commit()
        for _ in range(50):
            log.append("b", "k", b"", durability="none")
        assert (log.durable_offset, log.next_offset) == (1, 51)
        log.retain(consumed=True)
        assert log.consumers()[0].position == 1
        log.flush()
        log.retain(consumed=True)
        assert log.consumers()[0].position == 51


def test_retention_keeps_what_is_not_consumed(tmp_path):
    """The first uncommitted record of the slowest partition is the limit."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        log.consumer("c", topics="a").close()
        for i in range(200):
            log.append("a" if i == 150 else "b", "k", b"%d" % i + bytes(30))
        log.retain(consumed=True)
        assert 0 < log.first_offset <= 150
        with log.consumer("c", topics="a") as consumer:
            assert offsets(consumer) == [150]


def test_positions_survive_a_torn_write(log):
    """One of a partition's two slots is damaged: the other one counts."""
    fill(log, 10)
    with log.consumer("c", partitions=1) as consumer:
        list(consumer)
        consumer.commit()
    fill(log, 10, start=10)
    with log.consumer("c", partitions=1) as consumer:
        list(consumer)
        consumer.commit()
    path = log.path / "groups" / "c.grp"
    for slot in (0, 1):
        data = bytearray(path.read_bytes())
        data[64 + 32 * slot] ^= 0xFF
        damaged = log.path / "groups" / f"d{slot}.grp"
        damaged.write_bytes(data)
    positions = {i.name: i.position for i in log.consumers()}
    assert positions["c"] == 20
    assert sorted([positions["d0"], positions["d1"]]) in ([10, 20], [20, 20])


def test_bad_groups_say_so(log):
    """A damaged file, another number of partitions, a closed consumer."""
    log.consumer("c", partitions=4).close()
    with pytest.raises(errors.ConsumerError, match="has 4 partitions"):
        log.consumer("c", partitions=5)
    assert log.consumers()[0].partitions == 4
    consumer = log.consumer("c")
    consumer.close()
    with pytest.raises(errors.LogClosedError):
        consumer.commit()
    path = log.path / "groups" / "c.grp"
    path.write_bytes(b"x" * 100)
    with pytest.raises(errors.ConsumerError, match="damaged"):
        log.consumer("c")


def test_a_gap_is_explicit(tmp_path):
    """Retention overtook the consumer: an error, or a skip by choice."""
    with virta.open(tmp_path / "log", segment_bytes=4096, durability="none") as log:
        consumer = log.consumer("slow")
        for i in range(200):
            log.append("t", "k", b"%d" % i + bytes(30))
        log.retain(max_bytes=0)
        first = log.first_offset
        assert first > 0
        with pytest.raises(errors.LogGapError):
            list(consumer)
        consumer.close()
        with log.consumer("slow", on_gap="skip") as consumer:
            assert offsets(consumer) == list(range(first, 200))


MEMBER = """
import sys, virta
log = virta.open(sys.argv[1], durability="none")
consumer = log.consumer("g")
print("ready", flush=True)
for record in consumer.read(follow=True):
    print(record.offset, flush=True)
"""


def test_a_killed_member_is_replaced_at_once(log):
    """SIGKILL: the kernel frees its number, the others take its partitions without waiting for the lease."""
    fill(log, 200)
    with subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(log.path)], stdout=subprocess.PIPE, text=True
    ) as member:
        assert member.stdout.readline() == "ready\n"
        assert int(member.stdout.readline()) >= 0
        os.kill(member.pid, signal.SIGKILL)
        member.wait()
    with log.consumer("g", lease=3600.0) as survivor:
        assert sorted(offsets(survivor)) == list(range(200))
