"""Fixtures of the crash tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def memory():
    """A directory in memory where there is one: thousands of small logs are made and destroyed."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="virta-crash-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)
