"""
The number of the row of each key.

`KeyNumbers(keys)` is a mapping from a key to its number; `keys[number]` is the key, a list that its owner keeps: the key
is there before it is stored here, and until it is removed here. The native form reads it to compare keys, so it needs
8 bytes a slot where a dictionary needs an entry and a number.
"""

from __future__ import annotations

from typing import Any, Final

from virta import native

_native = native.load("virta.views._native")


class PlainKeyNumbers(dict[str, int]):
    """A dictionary."""

    def __init__(self, keys: list[str | None]) -> None:  # noqa: ARG002 - it has the keys itself
        super().__init__()


KeyNumbers: Final[Any] = PlainKeyNumbers if _native is None else _native.KeyNumbers
