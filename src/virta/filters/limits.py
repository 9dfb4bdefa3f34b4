"""
The limits of the filter languages.

Every filter is within them, so code behind the parser needs no checks of its own: recursion over a tree cannot
overflow, a pattern compiles in milliseconds, a canonical form is short.
"""

from __future__ import annotations

# Nodes above the deepest condition. Ten times what people write by hand, a tenth of Python's own
# recursion limit, so that walks over a tree can be recursive.
DEPTH_MAX = 100

# Conditions in one filter (an `in` list is one). Parsing, canonicalising and hashing this many
# stays under 100 ms; ten thousand do not.
CONDITIONS_MAX = 4096

# Values in one `in` list.
IN_VALUES_MAX = 65_536

# Characters in one regular expression. The worst of them (a row of Unicode classes) takes RE2 30 ms.
REGEXP_CHARS_MAX = 2048

# Bytes RE2 may use for one compiled pattern: x{1000}{1000} is refused, not attempted.
REGEXP_MEMORY_MAX = 4 << 20

# JSON values (scalars, arrays, objects) inside one `match` pattern, and how deep they may nest.
PATTERN_VALUES_MAX = 1000
PATTERN_DEPTH_MAX = DEPTH_MAX

# Objects and arrays inside one array of a `match` pattern: each may be tried on every element of a
# document's array.
PATTERN_COMPOUNDS_MAX = 32

# Characters of a field's name.
FIELD_CHARS_MAX = 10_000

# Vertices of one polygon; a point is tested against each.
POLYGON_POINTS_MAX = 10_000

# Bytes or characters of a filter given as text, checked before it is parsed.
TEXT_BYTES_MAX = 4 << 20

# Conjunctions that the index makes of one filter; above it, one branch is indexed and the whole tree
# verified.
CONJUNCTIONS_MAX = 64

assert DEPTH_MAX * 5 < 1000, "walks over a tree use up to five Python frames a level"
