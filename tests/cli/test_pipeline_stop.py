"""`virta pipeline run` is told to stop by signals, which come in any moment."""

from __future__ import annotations

import signal
import sys

from virta.cli.pipeline import Stopping


def test_a_signal_while_another_one_is_heard():
    """The second handler runs inside of the first, wherever that is, and both return."""
    stopping = Stopping()
    came = []

    def tell(*_):
        stopping.set()

    def interrupt(frame, what, _):
        if frame.f_code is not Stopping.set.__code__:
            return None
        if what == "line" and len(came) < 3:
            came.append(frame.f_lineno)
            signal.raise_signal(signal.SIGUSR1)
        return interrupt

    before = signal.signal(signal.SIGUSR1, tell)
    traced = sys.gettrace()
    sys.settrace(interrupt)
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        sys.settrace(traced)
        signal.signal(signal.SIGUSR1, before)

    assert came
    assert stopping.is_set()
