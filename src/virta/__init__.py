"""Virta: the SQLite of event streams, with live queries, that grows into Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virta.client import AsyncClient, Client
    from virta.log import Log, Record, open, open_async  # noqa: A004

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "Log", "Record", "__version__", "open", "open_async"]


def __getattr__(name: str) -> Any:
    # Rooms are loaded when first used, so `import virta` costs nothing.
    if name in {"Log", "Record", "open", "open_async"}:
        from virta import log  # noqa: PLC0415

        return getattr(log, name)
    if name in {"AsyncClient", "Client"}:
        from virta import client  # noqa: PLC0415

        return getattr(client, name)
    raise AttributeError(f"module 'virta' has no attribute {name!r}")
