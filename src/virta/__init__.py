"""Virta: the SQLite of event streams, with live queries, that grows into Spark."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virta.client import AsyncClient, Client
    from virta.log import Log, Record, open_async
    from virta.tier.opening import open  # noqa: A004

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Log", "Record", "__version__", "open", "open_async"]

# Where each name is defined; loaded when first used, so that `import virta` costs nothing.
_HOMES = {
    "AsyncClient": "virta.client",
    "Client": "virta.client",
    "Log": "virta.log",
    "Record": "virta.log",
    "open": "virta.tier.opening",
    "open_async": "virta.log",
}
# Packages that users import from: imported on first access, and always shown by `dir`.
_PACKAGES = (
    *("access", "client", "errors", "event", "filters", "journal"),
    *("log", "match", "outbox", "spark", "tier", "views"),
)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return import_module(f"virta.{name}")
    raise AttributeError(f"module 'virta' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, *(n for n in globals() if n.startswith("__"))})
