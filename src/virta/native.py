"""
The choice between native and plain code, made once per process.

Each package with a native extension also has a plain Python engine with the same behaviour. `load` returns the
extension where it is built. With `VIRTA_PLAIN=1` in the environment it returns None for all of them.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

MODULES: Final = (
    "virta.log._native",
    "virta.match._core",
    "virta.hub._native",
    "virta.views._native",
    "virta.journal._native",
    "virta.spark._arrow",
    "virta.spark._jsoncols",
    "virta.spark._variant",
)
PLAIN: Final = os.environ.get("VIRTA_PLAIN") == "1"


def load(name: str) -> ModuleType | None:
    """Return a native module of `MODULES`, or None if it is not built or `VIRTA_PLAIN=1` is set."""
    assert name in MODULES, name
    if PLAIN:
        return None
    try:
        return import_module(name)
    except ImportError:
        return None
