"""
The matcher: which of a million standing queries does this event satisfy?

`Matcher` is one set of filters; `NamedMatchers` keeps one for each (index, collection). How it works:
docs/matching.md.
"""

from __future__ import annotations

from virta.match.collections import NamedMatchers
from virta.match.compile import Compiled, compile_filter
from virta.match.cost import FilterCost, filter_cost
from virta.match.engine import python_calls
from virta.match.matcher import Matcher
from virta.match.names import Match, NamedFilter

__all__ = [
    "Compiled",
    "FilterCost",
    "Match",
    "Matcher",
    "NamedFilter",
    "NamedMatchers",
    "compile_filter",
    "filter_cost",
    "python_calls",
]
