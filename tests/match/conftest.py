"""Every test of the matcher runs on both engines; the native one is skipped visibly where it is not built."""

from __future__ import annotations

import pytest

from virta.match.engine import make_engine


@pytest.fixture(params=["plain", "native"])
def engine(request):
    try:
        make_engine(request.param)
    except ImportError as exc:
        pytest.skip(str(exc))
    return request.param
