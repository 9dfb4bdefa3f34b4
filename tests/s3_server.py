"""S3 as moto serves it on loopback, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from socket import create_server

import pytest

from waiting import wait_until

STARTED_S_MAX = 60.0


@contextmanager
def started_s3(folder):
    """Start the server; yield its address. Skip the test where moto is not installed."""
    pytest.importorskip("moto", reason="S3 tests need moto")
    with create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    with (folder / "moto-output").open("wb") as output:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            wait_until(lambda: _answers(server, endpoint), "moto", seconds=STARTED_S_MAX)
            yield endpoint
        finally:
            server.kill()
            server.wait()


def _answers(server, endpoint):
    assert server.poll() is None, "moto ended"
    try:
        urllib.request.urlopen(endpoint, timeout=1).close()
    except OSError:
        return False
    return True


def s3_environment(endpoint):
    """Return the variables with which obstore finds a server and its credentials."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
