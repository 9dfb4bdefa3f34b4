"""
Live views: the rows that satisfy a filter now, then every row that enters, changes or leaves.

    view = virta.views.open(log, "orders", "status=paid")

docs/views.md is the guide.
"""

from __future__ import annotations

from virta.views.embedded import LiveView, RowUpdate, open  # noqa: A004
from virta.views.limits import ViewLimits

__all__ = ["LiveView", "RowUpdate", "ViewLimits", "open"]
