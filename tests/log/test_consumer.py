"""Named consumers: positions survive, members share, and what was not committed comes again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import virta
from virta import errors
from virta.log import groups

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


def test_a_silent_member_loses_its_lease(log, monkeypatch):
    """Alive but silent for longer than its lease: others take over, its commit is refused."""
    fill(log, 50)
    silent = log.consumer("g", lease=20.0)
    taken = offsets(silent)
    assert len(taken) == 50
    later = groups.now_us() + 21_000_000
    monkeypatch.setattr(groups, "now_us", lambda: later)
    with log.consumer("g", lease=20.0) as eager:
        again = offsets(eager)
        assert again  # its fair share of what the silent one had
        with pytest.raises(errors.ConsumerError, match="silent for longer") as caught:
            silent.commit()
        assert caught.value.code == "consumer_lost"
        eager.commit()
    silent.close()


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
