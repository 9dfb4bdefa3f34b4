"""Limits of live views; each is a setting of the server with the same name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ViewLimits:
    """What tables, views and consumers may use."""

    view_rows_max: int = 5_000_000  # rows of one table
    view_tables_max: int = 1000
    view_filters_max: int = 100_000  # distinct filters over all tables
    view_ring: int = 1_000_000  # touches that a table remembers, for consumers that resume
    view_pending_max: int = 10_000  # keys that wait for one consumer
    view_cache_bytes_max: int = 256 * 1024 * 1024  # values of rows that one table keeps in memory
    view_linger_s: float = 60.0  # a filter stands so long beyond its last consumer
    view_idle_s: float = 600.0  # a table stands so long beyond its last view
    view_save_s: float = 60.0  # between two writes of a table file
    view_stall_s: float = 300.0  # a consumer that takes nothing for so long is disconnected


DEFAULT_LIMITS = ViewLimits()
