"""Compile filters for an index: from a `Filter`, or from the source of a dialect."""

from __future__ import annotations

from virta.match.compile.compiled import Compiled, compile_filter
from virta.match.compile.source import compile_source

__all__ = ["Compiled", "compile_filter", "compile_source"]
