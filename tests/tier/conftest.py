"""Stores that tests ship to: a directory, and S3."""

from __future__ import annotations

import urllib.request
import uuid

import pytest

from s3_server import s3_environment, started_s3

pytest.importorskip("obstore", reason="object storage needs obstore")


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory):
    with started_s3(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def s3_url(s3_endpoint, monkeypatch):
    """Return the URL of a prefix in a new bucket."""
    for name, value in s3_environment(s3_endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = f"b{uuid.uuid4().hex}"
    request = urllib.request.Request(f"{s3_endpoint}/{bucket}", method="PUT")
    urllib.request.urlopen(request, timeout=10).close()
    return f"s3://{bucket}/logs/orders"


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3_url")
    return f"file://{tmp_path}/store"
