"""
All domains together: which job is best across them, and when something happens next.

Two heaps over domains, cleaned lazily like those inside a domain. Invariants: a domain with a start
or a deadline ahead has an alarm no later than that; a domain with a job to hand out has an offer no
worse than it. An alarm or offer that no longer holds is replaced when it comes to the top.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from virta.journal.domain import Domain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virta.journal.domain import Job


class Schedule:
    def __init__(self) -> None:
        self.domains: dict[bytes, Domain] = {}
        self.alarms: list[
            tuple[int, int, Domain]
        ] = []  # a heap, and always the same list; the first may no longer hold
        self._offers: list[tuple[int, int, int, int, Domain]] = []
        self._watchers: list[Callable[[Job], None]] = []
        self._tie = 0  # keeps domains out of comparisons

    def domain(self, name: bytes) -> Domain:
        """The domain of that name, made if need be."""
        place = self.domains.get(name)
        if place is None:
            place = self.domains[name] = Domain(name)
            place.watch = self._watch()
        return place

    def watch(self, moved: Callable[[Job], None]) -> None:
        """Have somebody told of every job that moves."""
        self._watchers.append(moved)
        self._watchers_changed()

    def unwatch(self, moved: Callable[[Job], None]) -> None:
        """No longer; whoever does not watch is no error."""
        self._watchers = [watcher for watcher in self._watchers if watcher != moved]
        self._watchers_changed()

    def _watchers_changed(self) -> None:
        for place in self.domains.values():
            place.watch = self._watch()

    def _watch(self) -> Callable[[Job], None] | None:
        """What a domain calls: nothing at all while nobody watches."""
        if len(self._watchers) > 1:
            return self._tell_all
        return self._watchers[0] if self._watchers else None

    def _tell_all(self, job: Job) -> None:
        for watcher in self._watchers:
            watcher(job)

    def sweep(self, place: Domain) -> None:
        """A domain nobody needs any more is forgotten; hosts come and go without bound."""
        if place.empty and self.domains.get(place.name) is place:
            del self.domains[place.name]

    def arm(self, place: Domain, time: int | None = None) -> None:
        """
        See to it that the domain is looked at when its next start or deadline comes.

        With `time` only that one is new; all before it have their alarm.
        """
        if time is None:
            time = place.earliest()
        if time is not None and (place.armed is None or time < place.armed):
            place.armed = time
            self._tie += 1
            heapq.heappush(self.alarms, (time, self._tie, place))

    def offer(self, place: Domain, job: Job | None = None) -> None:
        """Let the choice across domains know of a better head; with `job`, only that one is new."""
        if place.settings.paused:
            return
        rank = place.rank() if job is None else (job.priority, job.start, job.id)
        if rank is not None and (place.offered is None or rank < place.offered):
            place.offered = rank
            self._tie += 1
            heapq.heappush(self._offers, (*rank, self._tie, place))

    def head(self, domain: bytes) -> Job | None:
        """The best job of a domain, or of all of them; left where it is."""
        if domain:
            named = self.domains.get(domain)
            return None if named is None or named.settings.paused else named.head()
        offers = self._offers
        while offers:
            place = offers[0][4]
            if place.offered != offers[0][:3]:
                heapq.heappop(offers)  # a better one took its place
                continue
            job = None if place.settings.paused else place.head()
            if job is None:
                place.offered = None
                heapq.heappop(offers)
                continue
            rank = (job.priority, job.start, job.id)
            if place.offered == rank:
                return job
            place.offered = rank
            self._tie += 1
            heapq.heapreplace(offers, (*rank, self._tie, place))
        return None

    def wake_up(self, domain: bytes) -> int | None:
        """The earliest start or deadline of a domain, or of all of them."""
        if domain:
            named = self.domains.get(domain)
            return None if named is None else named.earliest()
        while self.alarms:
            time, _, place = self.alarms[0]
            if place.armed == time and place.earliest() == time:
                return time
            heapq.heappop(self.alarms)
            if place.armed == time:
                place.armed = None
                self.arm(place)
        return None

    def due(self, now: int) -> Iterator[Domain]:
        """Domains whose alarm has come; each must be armed again by whoever looks at it."""
        while self.alarms and self.alarms[0][0] <= now:
            time, _, place = heapq.heappop(self.alarms)
            if place.armed == time:
                place.armed = None
                yield place
