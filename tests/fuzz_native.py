"""
Run the differential tests of the native engines with new seeds until the time is up: `make fuzz`.

Damaged streams, commands of jobs, batches of events, tables of keys and steps of live views go through the
native engine and the plain one, which defines what is right. `make fuzz` builds the native code with sanitizers.
Cases come from a random number generator, in every tenth round also from Hypothesis, which chooses its values
better and needs far longer for each. A failure prints the seed that repeats it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import hypothesis
import pytest

from fuzz_rounds import repeat

HERE = Path(__file__).parent
# Before the tests are imported, which take it as it is then. Busy machines and sanitizers take the time they take.
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("fuzz")
sys.path += [
    str(HERE / place)
    for place in ("journal", "journal/protocol", "journal/serving", "hub", "views")
]

import test_event_batch as batch  # noqa: E402
import test_journal_codec as codec  # noqa: E402
import test_journal_tcp as connections  # noqa: E402
import test_view_engines as views  # noqa: E402

from virta import native  # noqa: E402
from virta.journal.protocol import messages as m  # noqa: E402
from virta.journal.protocol.codec import native_codec  # noqa: E402

TESTS = (
    codec.test_both_engines_agree,
    batch.test_an_event_batch_is_never_anything_else,
    batch.test_the_tables_of_keys_agree,
    views.test_changes_are_read_alike,
    views.test_stored_events_are_known,
    views.test_streams_are_alike,
    views.test_numbers_are_found_alike,
    views.test_members_are_found_alike,
    views.test_values_are_put_alike,
    views.test_rows_are_set_alike,
)
CASES = 200  # of each test, by the random number generator
HYPOTHESIS_EVERY = 10  # rounds


class Cases:
    """Random arguments of the tests."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def streams(self):
        rng = self._rng
        damage = [
            (rng.randrange(10**6), rng.randrange(256)) for _ in range(rng.choice([0, 0, 1, 3]))
        ]
        cuts = [rng.randrange(10**6) for _ in range(rng.randrange(5))]
        return self._several(self._request), self._several(self._reply), damage, cuts

    def event_batch(self):
        rng = self._rng
        names = ["source", "id", "data", "partitionkey", "type", "", "ä"]
        event = {"source": "s", "id": "i"}
        event |= {rng.choice(names): self._json(3) for _ in range(rng.randrange(4))}
        change = bytes([rng.choice(b'"\\,:[]{}0-.eu\x00\n\xff x')]) if rng.random() < 0.5 else None
        return event, rng.random() < 0.5, rng.random() < 0.5, rng.random(), change

    def key_table(self):
        rng = self._rng
        steps = []
        for _ in range(rng.randrange(40)):
            key, *keys = (rng.choice(["a", "b", "c", "d", "ä", "\ud800", ""]) for _ in range(5))
            keys = keys[: rng.randrange(5)]
            steps.append(
                rng.choice(
                    [
                        ("claim", key),
                        ("offset", key),
                        ("claim_all", keys),
                        ("release", keys),
                        ("commit_run", keys, rng.randrange(2**60)),
                        ("forget", rng.randrange(4)),
                    ]
                )
            )
        return steps, rng.randint(1, 6)

    def row_change(self):
        rng = self._rng
        event = {"subject": "k"} if rng.random() < 0.8 else {}
        for _ in range(rng.randrange(4)):
            value = rng.choice([self._json(3), "a.deleted", None, self._envelope()])
            event[rng.choice(["subject", "type", "data", "data", "id", "ä"])] = value
        change = bytes([rng.choice(b'"\\,:[]{}0-.eu\x00\n\xff x')]) if rng.random() < 0.5 else None
        return event, rng.random() < 0.5, rng.random(), change

    def _envelope(self):
        rng = self._rng
        found = {"op": rng.choice("cudtrx"), "source": self._json(1)}
        parts = [("before", self._json(2)), ("after", {"a": 1}), ("after", self._json(1))]
        return found | dict(rng.sample(parts, rng.randrange(3)))

    def view_frames(self):
        return self._several(self._view_frame), self._rng.random() < 0.5

    def _view_frame(self):
        rng = self._rng
        return views.ViewFrame(
            rng.choice(["row", "enter", "update", "leave"]),
            rng.choice([-2, -1, 0, self._u64() // 2]),
            rng.choice(["42", "a/b", self._text(12)]),
            self._u64() // 2,
            self._or_none(self._bytes),
            rng.choice(["", "changed", "deleted"]),
            {"rows": 1} if rng.random() < 0.1 else None,
        )

    def key_numbers(self):
        rng = self._rng
        keys = rng.choice([3, 30, len(views.NUMBER_KEYS)])
        return ([(rng.randrange(5), rng.randrange(keys)) for _ in range(rng.randrange(300))],)

    def member_sets(self):
        rng = self._rng

        def batch():
            few = [rng.randrange(rng.choice([10, 2**32])) for _ in range(6)]
            return [rng.choices(few, k=rng.choice([0, 1, 1, 1, 2])) for _ in range(20)]

        return ([batch() if rng.random() < 0.9 else None for _ in range(rng.randrange(6))],)

    def row_values(self):
        rng = self._rng
        runs = [
            [(rng.randrange(40), rng.randrange(90)) for _ in range(rng.randrange(6))]
            for _ in range(rng.randrange(9))
        ]
        return runs, rng.randrange(600)

    def row_steps(self):
        rng = self._rng
        queries = len(views.QUERIES)
        steps = [
            (
                [(rng.choice("klmnä"), rng.randrange(4), rng.randrange(3)) for _ in range(12)],
                rng.randrange(queries) if rng.random() < 0.1 else None,
            )
            for _ in range(rng.randrange(8))
        ]
        consumers = [rng.choices([None, True, False], k=rng.randrange(3)) for _ in range(queries)]
        return steps, consumers, rng.choice([3, 1000, 1000])

    def _several(self, make):
        return [make() for _ in range(self._rng.randrange(5))]

    def _u64(self):
        return self._rng.getrandbits(self._rng.choice([0, 1, 7, 8, 16, 32, 63, 64]))

    def _bytes(self):
        return self._rng.randbytes(self._rng.choice([0, 1, 20, 127, 128, 255, 256, 300]))

    def _or_none(self, make):
        return make() if self._rng.random() < 0.5 else None

    def _value(self):
        kind = self._rng.randrange(6)
        if kind == 0:
            return m.Value(0, b"")
        if self._rng.random() < 0.05:
            return m.Value(1, bytes(self._rng.randrange(65_000, 66_000)))
        return m.Value(kind, self._bytes())

    def _request(self):
        rng = self._rng
        query = rng.randrange(4)
        ranged = query == m.QUERY_RANGE
        return m.Request(
            rng.getrandbits(rng.choice([4, 16])),
            rng.getrandbits(16),
            rng.getrandbits(16) & m.REQUEST_FLAGS,
            self._u64(),
            self._or_none(self._u64),
            self._or_none(self._u64),
            rng.getrandbits(16) if ranged else self._or_none(lambda: rng.randrange(10)),
            self._bytes(),
            self._bytes() if ranged else b"",
            self._or_none(self._value),
            query,
        )

    def _reply(self):
        rng = self._rng
        flags = rng.getrandbits(16) & m.REPLY_FLAGS
        reply = m.Reply(rng.getrandbits(16), flags, self._u64(), self._or_none(self._u64))
        if rng.random() < 0.2:
            reply.error = self._text(300) or "e"
            return reply
        reply.query = rng.randrange(4)
        detailed = rng.random() < 0.5

        def pair():
            details = m.Details(self._u64(), self._u64(), size=rng.randrange(10))
            return m.Pair(self._bytes(), self._value(), details if detailed else None)

        if reply.query == m.QUERY_RANGE or rng.random() < 0.5:
            reply.pairs = self._several(pair)
        else:
            reply.pair = self._or_none(pair)
        reply.cursor = self._or_none(self._bytes)
        return reply

    def _text(self, length):
        characters = 'aZ0 "\\/\x00\x1f\x7fäß€\u2028\ufeff\U0001f600\U0010ffff'
        return "".join(self._rng.choices(characters, k=self._rng.randrange(length)))

    def _json(self, depth):
        rng = self._rng
        kind = rng.randrange(8 if depth else 6)
        if kind == 6:
            return [self._json(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {self._text(3): self._json(depth - 1) for _ in range(rng.randrange(4))}
        numbers = [
            0,
            -1,
            2**53 + 1,
            -(2**63),
            2**64,
            10**30,
            0.1,
            -0.0,
            1e308,
            5e-324,
            float("nan"),
        ]
        return (None, True, False, rng.choice(numbers), rng.random() * 10**6, self._text(6))[kind]


def one_round(seed):
    cases = Cases(seed)
    makers = (
        cases.streams,
        cases.event_batch,
        cases.key_table,
        cases.row_change,
        cases.row_change,
        cases.view_frames,
        cases.key_numbers,
        cases.member_sets,
        cases.row_values,
        cases.row_steps,
    )
    for test, make in zip(TESTS, makers, strict=True):
        for _ in range(CASES):
            test.hypothesis.inner_test(*make())
        if seed % HYPOTHESIS_EVERY == 0:
            hypothesis.seed(seed)(test)()
    with pytest.MonkeyPatch.context() as patch:
        connections.test_both_codecs_answer_alike(seed, patch)


def main():
    built = [native.load(f"virta.{package}._native") for package in ("hub", "views")]
    if None in built or native_codec is None:
        raise SystemExit("the native halves are not built: there is nothing to compare with")
    repeat(__doc__, one_round)


if __name__ == "__main__":
    main()
