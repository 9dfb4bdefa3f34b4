"""A server and a journal for the commands that use one, and logs for `virta log`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from journal_shell import Shell
from journal_support import daemon_thread
from server_harness import Server

import virta

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests of a module: they use channels of their own."""
    with Server(tmp_path_factory.mktemp("data"), "--durability", "none") as running:
        yield running


@pytest.fixture
def shell(tmp_path):
    """`virta journal` against a daemon of its own."""
    with daemon_thread(tmp_path / "journal") as daemon:
        yield Shell(daemon.address[1])


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def filled(place) -> Path:
    """Twenty records on two topics, keyed by their number modulo three."""
    with virta.open(place) as log:
        log.append_many([(f"t{n % 2}", f"k{n % 3}", b"value %d" % n) for n in range(20)])
    return place


@pytest.fixture
def rolled(place) -> Path:
    """A log of many small segments in which keys repeat."""
    with virta.open(place, segment_bytes=4096, durability="none") as log:
        for n in range(400):
            log.append("t", f"k{n % 5}", b"%d" % n + b"." * 100)
    return place
