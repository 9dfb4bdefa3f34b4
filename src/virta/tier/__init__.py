"""Object storage as the second home of a log: ship it while it is written, read it in place, restore it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virta.tier.history import TierHistory
    from virta.tier.restore import Restored, TierReport, restore_log, verify_store
    from virta.tier.shipper import Shipped, Shipper
    from virta.tier.store import TierStore, is_store_url

__all__ = [
    "Restored",
    "Shipped",
    "Shipper",
    "TierHistory",
    "TierReport",
    "TierStore",
    "is_store_url",
    "restore_log",
    "verify_store",
]

# Where each name is defined; loaded when first used, so that `virta.open` of a directory stays quick.
_HOMES = {
    "Restored": "restore",
    "Shipped": "shipper",
    "Shipper": "shipper",
    "TierHistory": "history",
    "TierReport": "restore",
    "TierStore": "store",
    "is_store_url": "store",
    "restore_log": "restore",
    "verify_store": "restore",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"virta.tier.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'virta.tier' has no attribute {name!r}")
