"""The plain engine: the index in Python, which runs everywhere and is the reference for the native one."""

from __future__ import annotations

from virta.match.plain.engine import PlainEngine

__all__ = ["PlainEngine"]
