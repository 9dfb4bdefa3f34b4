"""Hypothesis settings for a machine whose cores are shared: no deadlines, no speed checks."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "shared-cores", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared-cores")
