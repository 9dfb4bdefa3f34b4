"""Servers for the clients."""

from __future__ import annotations

import pytest
from server_harness import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests of a module: they use channels of their own."""
    with Server(tmp_path_factory.mktemp("data"), "--durability", "none") as running:
        yield running


@pytest.fixture
def start(tmp_path):
    """Start servers with flags of the test's own, on one directory."""
    running = []

    def start_one(*flags, data_dir=None, environ=None):
        made = Server(data_dir or tmp_path / "data", *flags, environ=environ)
        running.append(made)
        return made

    yield start_one
    for made in running:
        made.stop()
