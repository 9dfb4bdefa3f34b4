"""
The fast half of the hub: native where it was built, plain Python or nothing otherwise.

`Keys` has a plain twin. `split` may decline any batch with None, and without the native half it is not
there: the server's intake then reads the batch event by event, with the same outcome. VIRTA_PLAIN=1 in
the environment asks for that; the tests run both.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from virta import native
from virta.hub import keys

if TYPE_CHECKING:
    from collections.abc import Callable

    # How many events, their records, the events one a line, the digests of their keys.
    Split = tuple[int, bytes, bytes, bytes]

_native = native.load("virta.hub._native")

NATIVE: Final = _native is not None
# Of one key, in what `split` returns.
DIGEST_BYTES: Final = 16

Keys: Any
split: Callable[[str, bytes, int, int, int], Split | None] | None

if _native is not None:
    _native.set_secret(os.urandom(16))
    Keys, split = _native.Keys, _native.split
else:
    Keys, split = keys.Keys, None
