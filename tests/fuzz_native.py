"""
Run the differential tests of the native engines with new seeds until the time is up: `make fuzz`.

Damaged streams, commands of jobs, batches of events and tables of keys go through the native engine and
the plain one, which defines what is right. `make fuzz` builds the native code with sanitizers.
A failure prints the seed that repeats it.
"""

from __future__ import annotations

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
    str(HERE / place) for place in ("journal", "journal/protocol", "journal/serving", "hub")
]

import test_event_batch as batch  # noqa: E402
import test_journal_codec as codec  # noqa: E402
import test_journal_tcp as connections  # noqa: E402

from virta import native  # noqa: E402
from virta.journal.protocol.codec import native_codec  # noqa: E402

TESTS = (
    codec.test_both_engines_agree,
    batch.test_an_event_batch_is_never_anything_else,
    batch.test_the_tables_of_keys_agree,
)


def one_round(seed):
    for test in TESTS:
        hypothesis.seed(seed)(test)()
    with pytest.MonkeyPatch.context() as patch:
        connections.test_both_codecs_answer_alike(seed, patch)


def main():
    if not (native.load("virta.hub._native") is not None and native_codec is not None):
        raise SystemExit("the native halves are not built: there is nothing to compare with")
    repeat(__doc__, one_round)


if __name__ == "__main__":
    main()
