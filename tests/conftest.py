"""What all tests share: where other people's vectors are, and both kernels of the log."""

from __future__ import annotations

import os
import signal
from asyncio.selector_events import BaseSelectorEventLoop
from pathlib import Path

import hypothesis
import pytest

from virta.log.engine import kernel, plain_kernel
from virta.log.format import codec, topic_table

ROOT = Path(__file__).parent.parent

# CI repeats itself, so that a red run is about the change; everywhere else new examples are tried each time.
# How long an example takes is the machine's affair: a stall of it is no fault of what is tested.
hypothesis.settings.register_profile(
    "virta",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    database=None if os.environ.get("CI") else hypothesis.settings.default.database,
    print_blob=True,
)
hypothesis.settings.load_profile("virta")

# A job in the background starts with SIGINT ignored, and so would every process our tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every Java of our tests is young when it ends: what its best compiler takes is never earned back (a third of it all).
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


def pytest_collection_modifyitems(items):
    """
    Put files with slow tests first: begun last, they would keep one process busy after the other has ended.

    Two tests with one id are refused: pytest-xdist would run one of them and say nothing of the other.
    """
    found = set()
    for item in items:
        if item.nodeid in found:
            raise pytest.UsageError(f"several tests have the id {item.nodeid}")
        found.add(item.nodeid)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


# Connections that were open when an event loop was closed.
LEFT_OPEN = []
close_loop = BaseSelectorEventLoop.close


def close_and_note(loop):
    LEFT_OPEN.extend(repr(one) for one in loop._transports.values() if one._sock is not None)
    close_loop(loop)


BaseSelectorEventLoop.close = close_and_note


@pytest.fixture(autouse=True)
def _loops_end_without_connections():
    """
    A test that ends an event loop before its connections are closed fails.

    Otherwise the ResourceWarning comes when the collector finds one, in whatever test runs then.
    """
    LEFT_OPEN.clear()
    yield
    assert LEFT_OPEN == [], "open when the event loop ended"


@pytest.fixture(scope="session")
def shared_vectors() -> Path:
    """Vectors that are not ours to ship; tests that need them are skipped where they are absent."""
    path = Path(os.environ.get("VIRTA_SHARED", ROOT.parent / "shared")) / "vectors"
    if not path.is_dir():
        pytest.skip(f"no shared vectors at {path}")
    return path


@pytest.fixture(params=["native", "plain"])
def either_kernel(request, monkeypatch):
    """Run the test with the native kernel and again with the plain one."""
    if request.param == "native":
        if not kernel.NATIVE:
            pytest.skip("the native kernel is not built")
    else:
        for name in ("encode", "walk", "read", "crc8", "crc32c"):
            monkeypatch.setattr(kernel, name, getattr(codec, name))
        monkeypatch.setattr(kernel, "Kernel", plain_kernel.Kernel)
        monkeypatch.setattr(kernel, "TopicTable", topic_table.TopicTable)
        monkeypatch.setattr(kernel, "find_places", topic_table.find_places)
    return request.param
