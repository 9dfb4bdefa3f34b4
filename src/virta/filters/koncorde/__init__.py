"""Koncorde's filter language (Kuzzle's real-time filters), as of its version 4.6."""

from __future__ import annotations

from virta.filters.koncorde.reader import parse

__all__ = ["parse"]
