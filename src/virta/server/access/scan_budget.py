"""
The budget of each principal for scanned filters.

The index finds most filters by a condition: an event that does not satisfy it never reaches them. A filter without such
a condition (`status=!paid` alone) is tested by every event. A principal may have a limited number of them, over its
streams, views, registered filters and webhooks together; clients without a credential share one budget. Equal filters
in one place count once, as the index has them once.

Stored filters and webhooks are counted when the server starts, never refused. All methods are called in the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from virta.errors import RequestError
from virta.hub.event_matcher import matches_everything
from virta.match import filter_cost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.filters import Filter

# Where filters stand; a label of the metrics.
STREAM, VIEW, REGISTERED, WEBHOOK = PLACES = ("stream", "view", "registered", "webhook")
CODE = "scanned-filter-budget"
# Filters whose cost is remembered; computing one takes about 0.1 ms.
COSTS_MAX = 4096


class FilterPlace(NamedTuple):
    """Where filters are in an index: one of PLACES, and the name of the channel or subscription."""

    kind: str
    name: str


class ScanCost(NamedTuple):
    """What every event pays for a filter."""

    scans: int  # simple scanned filters that cost as much
    python: int  # conditions evaluated in Python

    @property
    def counted(self) -> bool:
        return bool(self.scans or self.python)


_FREE = ScanCost(0, 0)
_Key: TypeAlias = tuple[str, FilterPlace, str]  # principal, place, id of the filter


class ScanLease:
    """Filters that are counted until `release`."""

    __slots__ = ("_budget", "_keys")

    def __init__(self, budget: ScanBudget, keys: list[_Key]) -> None:
        self._budget = budget
        self._keys = keys

    def release(self) -> None:
        """Count the filters no longer; a second call does nothing."""
        keys, self._keys = self._keys, []
        for key in keys:
            self._budget.remove(key)


class ScanBudget:
    """Counts the scanned filters of each principal."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._used: dict[str, int] = {}  # by principal
        self._entries: dict[_Key, tuple[ScanCost, int]] = {}  # and how often
        self._known: dict[str, ScanCost] = {}  # by the filter's id
        self._nothing = ScanLease(self, [])  # most consumers have this one
        # For /metrics, by the kind of place.
        self.filters = dict.fromkeys(PLACES, 0)
        self.python_conditions = dict.fromkeys(PLACES, 0)
        self.refused = 0

    def used(self, principal: str) -> int:
        """Return how much of its budget a principal uses."""
        return self._used.get(principal, 0)

    def cost(self, filter_: Filter) -> ScanCost:
        """Return what every event pays for a filter; nothing if it matches everything."""
        if matches_everything(filter_):
            return _FREE
        known = self._known.get(filter_.id)
        if known is None:
            if len(self._known) >= COSTS_MAX:
                self._known.clear()
            cost = filter_cost(filter_)
            known = ScanCost(cost.scans, len(cost.python))
            if not known.counted:
                known = _FREE  # most filters: one object for all of them
            self._known[filter_.id] = known
        return known

    def reserve(self, principal: str, place: FilterPlace, filters: Iterable[Filter]) -> ScanLease:
        """
        Count filters of a principal until the lease is released.

        Raises:
            RequestError: 403, they are beyond the budget.
        """
        costs = self._costs(principal, place, filters)
        new = sum(cost.scans for key, cost in costs.items() if key not in self._entries)
        if self._limit is not None and new and self.used(principal) + new > self._limit:
            self.refused += 1
            raise self._refusal(principal, new)
        return self._reserve_costs(costs)

    def charge(self, principal: str, place: FilterPlace, filters: Iterable[Filter]) -> ScanLease:
        """Count stored filters; nothing is refused."""
        return self._reserve_costs(self._costs(principal, place, filters))

    def remove(self, key: _Key) -> None:
        """Count a filter once less."""
        cost, count = self._entries[key]
        if count > 1:
            self._entries[key] = (cost, count - 1)
            return
        del self._entries[key]
        self._count(key, cost, -1)

    def _costs(
        self, principal: str, place: FilterPlace, filters: Iterable[Filter]
    ) -> dict[_Key, ScanCost]:
        costs = [(filter_, self.cost(filter_)) for filter_ in filters]
        return {(principal, place, f.id): cost for f, cost in costs if cost.counted}

    def _reserve_costs(self, costs: dict[_Key, ScanCost]) -> ScanLease:
        if not costs:
            return self._nothing
        for key, cost in costs.items():
            known = self._entries.get(key)
            self._entries[key] = (cost, 1 if known is None else known[1] + 1)
            if known is None:
                self._count(key, cost, 1)
        return ScanLease(self, list(costs))

    def _count(self, key: _Key, cost: ScanCost, sign: int) -> None:
        principal, place, _ = key
        self.filters[place.kind] += sign * bool(cost.scans)
        self.python_conditions[place.kind] += sign * cost.python
        used = self.used(principal) + sign * cost.scans
        if used:
            self._used[principal] = used
        else:
            self._used.pop(principal, None)

    def _refusal(self, principal: str, new: int) -> RequestError:
        used, limit = self.used(principal), self._limit
        return RequestError(
            403,
            CODE,
            f"every event would have to test this filter, because no condition finds it: it counts {new}, {principal} "
            f"uses {used} of {limit} (--max-scanned-filters-per-principal) in its streams, views, registered filters "
            "and webhooks. Add a condition that an index can look up, such as an equality, a range or a prefix "
            "(`type=order&status=!paid` instead of `status=!paid`), in every alternative; "
            "`virta filter explain --cost` prices a filter",
            counts=new,
            used=used,
            limit=limit,
        )
