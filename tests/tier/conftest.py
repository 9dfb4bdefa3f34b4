"""Stores that tests ship to: a directory, and S3 as moto serves it on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
import uuid

import pytest

pytest.importorskip("obstore", reason="object storage needs obstore")

STARTED_S_MAX = 60.0


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    """Run moto's S3 server in a process of its own; return its address."""
    pytest.importorskip("moto", reason="S3 tests need moto")
    from socket import create_server

    with create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    output = (tmp_path_factory.mktemp("moto") / "output").open("wb")
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=output,
        stderr=output,
    )
    endpoint = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + STARTED_S_MAX
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=1).close()
            break
        except OSError:
            assert server.poll() is None, "moto ended"
            assert time.monotonic() < deadline, "moto did not start"
    yield endpoint
    server.kill()
    server.wait()
    output.close()


@pytest.fixture
def s3_url(s3_endpoint, monkeypatch):
    """Return the URL of a prefix in a new bucket."""
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = f"b{uuid.uuid4().hex}"
    request = urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    return f"s3://{bucket}/logs/orders"


def s3_environment(endpoint):
    """Return the variables with which obstore finds a server and its credentials."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return f"file://{tmp_path}/store"


@pytest.fixture
def environment():
    """Return this process's environment for children."""
    return dict(os.environ)
