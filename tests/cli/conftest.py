"""A server for the commands that talk to one."""

from __future__ import annotations

import pytest
from server_harness import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests of a module: they use channels of their own."""
    with Server(tmp_path_factory.mktemp("data"), "--durability", "none") as running:
        yield running
