"""Spark registers the format `virta` by this module's name, in every session that can import it."""

from __future__ import annotations

from virta.spark.source.source import VirtaSource as DefaultSource

__all__ = ["DefaultSource"]
