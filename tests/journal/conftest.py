"""Hypothesis settings for a machine whose cores are shared, and both engines of the protocol."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from virta.journal.clients import client
from virta.journal.protocol import codec

settings.register_profile(
    "shared-cores",
    deadline=None,
    # All examples of a test use the same engine.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("shared-cores")


@pytest.fixture(params=["native", "plain"])
def engine(request, monkeypatch):
    """Run the test with the native codec and exchange, and again with the plain ones."""
    if request.param == "plain":
        monkeypatch.setattr(codec, "native_codec", None)
        monkeypatch.setattr(client, "exchange", None)
    elif codec.native_codec is None:
        pytest.skip("the native module is not built")
    return request.param
