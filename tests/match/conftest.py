"""Every test of the matcher runs on both engines; the native one is skipped visibly where it is not built."""

from __future__ import annotations

import pytest

from virta.match.engine import make_engine


@pytest.fixture(params=["plain", "native"])
def engine(request):
    return _built(request.param)


@pytest.fixture
def native_engine():
    """Of a test of what only the native engine has."""
    return _built("native")


def _built(name):
    try:
        make_engine(name)
    except ImportError as exc:
        pytest.skip(str(exc))
    return name
