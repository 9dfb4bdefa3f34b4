"""
Where a key of a TOML file stands: line numbers for messages about values.

`tomllib` checks the file and gives the values; this finds the lines. It reads only files `tomllib`
has accepted, so it need not understand all of TOML: headers, keys at the start of a line, and where a
value runs over several lines.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

Place = tuple[str | int, ...]  # ("sink", 1, "topic"): the key topic of the second [[sink]]

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]")
_KEY = re.compile(
    r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PART = re.compile(r"""[\w-]+|"[^"]*"|'[^']*'""")
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*$')


def find_lines(text: str) -> dict[Place, int]:
    """Return the line (from 1) of every table header and every key that begins a line."""
    lines: dict[Place, int] = {}
    counts: dict[str, int] = {}
    table: Place = ()
    depth, fence = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:
            if fence in line:
                fence = ""
            continue
        if depth == 0:
            header, key = _HEADER.match(line), _KEY.match(line)
            if header:
                table = header_place(header[1], header[2], counts)
                lines.setdefault(table, number)
                continue
            if key:
                lines[(*table, *parts(key[1]))] = number
        fence = open_fence(line)
        depth = max(0, depth + bracket_balance(line))
    return lines


def header_place(kind: str, name: str, counts: dict[str, int]) -> Place:
    place = parts(name)
    if kind == "[[":
        counts[name] = counts.get(name, -1) + 1
        return (*place, counts[name])
    return place


def parts(key: str) -> Place:
    return tuple(part.strip("\"'") for part in _PART.findall(key))


def open_fence(line: str) -> str:
    """Return the quotes of a multi-line string that begins on this line and does not end on it."""
    for fence in ('"""', "'''"):
        if line.count(fence) % 2:
            return fence
    return ""


def bracket_balance(line: str) -> int:
    bare = _STRING.sub("", line)
    return sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}")


def line_of(lines: Mapping[Place, int], place: Place) -> int:
    """Return the line of a place, or of the nearest table around it; 1 when there is none."""
    while place:
        if place in lines:
            return lines[place]
        place = place[:-1]
    return 1
