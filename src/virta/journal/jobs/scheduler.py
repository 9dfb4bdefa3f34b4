"""
All domains together: which job is best across them, and when something happens next.

Two heaps over domains, cleaned lazily like those inside a domain, so domains that come and go leave
nothing behind. Invariants: a domain with a start or a deadline ahead has an alarm no later than that; a
domain with a ready job has an offer no worse than it. An outdated alarm or offer is replaced when it
comes to the top.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from virta.journal.jobs.domain import HEAP_SLACK, Domain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virta.journal.jobs.domain import Offer
    from virta.journal.jobs.job import Job


class Scheduler:
    def __init__(self) -> None:
        self.domains: dict[bytes, Domain] = {}
        self.alarms: list[tuple[int, Domain]] = []  # the first may be outdated
        self._offers: list[Offer] = []  # the best job of each domain, the best domain first
        self._watchers: list[Callable[[Job], None]] = []

    def domain(self, name: bytes) -> Domain:
        """Return the domain of that name; create it if needed."""
        place = self.domains.get(name)
        if place is None:
            place = self.domains[name] = Domain(name)
            place.on_move = self._on_move()
        return place

    def close(self) -> None:
        """Break the cycle of jobs and domains, which the garbage collector does not see."""
        self._watchers = []
        for place in self.domains.values():
            place.close()

    def __del__(self) -> None:
        self.close()

    @property
    def watchers(self) -> int:
        """Return how many are called when a job moves."""
        return len(self._watchers)

    def watch(self, moved: Callable[[Job], None]) -> None:
        """Call `moved` with every job before it changes its state."""
        self._watchers.append(moved)
        self._watchers_changed()

    def unwatch(self, moved: Callable[[Job], None]) -> None:
        """Stop calling `moved`, if it is called at all."""
        self._watchers = [watcher for watcher in self._watchers if watcher != moved]
        self._watchers_changed()

    def _watchers_changed(self) -> None:
        for place in self.domains.values():
            place.on_move = self._on_move()

    def _on_move(self) -> Callable[[Job], None] | None:
        """Return what a domain calls: nothing without watchers, so that moving stays fast."""
        if len(self._watchers) > 1:
            return self._notify_all
        return self._watchers[0] if self._watchers else None

    def _notify_all(self, job: Job) -> None:
        for watcher in self._watchers:
            watcher(job)

    def sweep(self, place: Domain) -> None:
        """Forget a domain without jobs and settings; hosts come and go without bound."""
        if place.empty and self.domains.get(place.name) is place:
            del self.domains[place.name]
            place.close()

    def arm(self, place: Domain, time: int | None = None) -> None:
        """
        Make sure that the domain is visited at its next start or deadline.

        With `time` only that one is new; all others have their alarm.
        """
        if time is None:
            time = place.earliest()
        if time is not None and (place.alarm is None or time < place.alarm):
            place.alarm = time
            heappush(self.alarms, (time, place))
            if len(self.alarms) > 2 * len(self.domains) + HEAP_SLACK:
                self.alarms[:] = [item for item in self.alarms if item[1].alarm == item[0]]
                heapify(self.alarms)

    def offer(self, place: Domain, job: Job | None = None) -> None:
        """Add a domain's head to the choice across domains; with `job`, only that one is new."""
        if place.settings.paused:
            return
        if job is None and (job := place.head()) is None:
            return
        item = (job.priority, job.start, job.id, place)
        if place.offer is None or item < place.offer:
            place.offer = item
            heappush(self._offers, item)
            if len(self._offers) > 2 * len(self.domains) + HEAP_SLACK:
                self._offers = [item for item in self._offers if item[3].offer is item]
                heapify(self._offers)

    def head(self, domain: bytes) -> Job | None:
        """Return the best ready job of a domain, or of all of them, without removing it."""
        if domain:
            named = self.domains.get(domain)
            return None if named is None or named.settings.paused else named.head()
        offers = self._offers
        while offers:
            item = offers[0]
            place = item[3]
            if place.offer is not item:
                heappop(offers)  # replaced by a better one
                continue
            job = None if place.settings.paused else place.head()
            if job is None:
                place.offer = None
                heappop(offers)
                continue
            if job.id == item[2] and job.start == item[1] and job.priority == item[0]:
                return job
            place.offer = item = (job.priority, job.start, job.id, place)
            heapreplace(offers, item)
            if offers[0] is item:
                return job
        return None

    def wake_up(self, domain: bytes) -> int | None:
        """Return the earliest start or deadline of a domain, or of all of them."""
        if domain:
            named = self.domains.get(domain)
            return None if named is None else named.earliest()
        while self.alarms:
            time, place = self.alarms[0]
            if place.alarm == time and place.earliest() == time:
                return time
            heappop(self.alarms)
            if place.alarm == time:
                place.alarm = None
                self.arm(place)
        return None

    def pop_due(self, now: int) -> Iterator[Domain]:
        """Yield domains whose alarm time has come; the caller has to arm each of them again."""
        while self.alarms and self.alarms[0][0] <= now:
            time, place = heappop(self.alarms)
            if place.alarm == time:
                place.alarm = None
                yield place
