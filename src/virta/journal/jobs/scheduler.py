"""
All domains together: which job is best across them, and when something happens next.

Two heaps over domains, cleaned lazily like those inside a domain, and rebuilt when most of it is stale:
domains that come and go leave nothing behind. Invariants: a domain with a start
or a deadline ahead has an alarm no later than that; a domain with a job to hand out has an offer no
worse than it. An alarm or offer that no longer holds is replaced when it comes to the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta.journal.jobs.domain import HEAP_SLACK, Domain
from virta.journal.jobs.heap import Heap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from virta.journal.jobs.domain import Job


class Schedule:
    def __init__(self) -> None:
        self.domains: dict[bytes, Domain] = {}
        self.alarms = Heap()  # by time; the first may no longer hold
        self.offers = Heap()  # by the rank of the head
        self._watchers: list[Callable[[Job], None]] = []

    def domain(self, name: bytes) -> Domain:
        """The domain of that name, made if need be."""
        place = self.domains.get(name)
        if place is None:
            place = self.domains[name] = Domain(name)
            place.watch = self._watch()
        return place

    def let_go(self) -> None:
        """It is over: end the cycle of jobs and domains, which collections of garbage do not see."""
        self._watchers = []
        for place in self.domains.values():
            place.watch = None
            place.let_go()

    def __del__(self) -> None:
        self.let_go()

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
            place.let_go()

    def arm(self, place: Domain, time: int | None = None) -> None:
        """
        See to it that the domain is looked at when its next start or deadline comes.

        With `time` only that one is new; all before it have their alarm.
        """
        if time is None:
            time = place.earliest()
        if time is not None and (place.armed is None or time < place.armed):
            place.armed = time
            self.alarms.push(0, time, 0, place)
            if len(self.alarms) > 2 * len(self.domains) + HEAP_SLACK:
                self.alarms.keep(lambda item: item[3].armed == item[1])

    def offer(self, place: Domain, job: Job | None = None) -> None:
        """Let the choice across domains know of a better head; with `job`, only that one is new."""
        if place.settings.paused:
            return
        rank = place.rank() if job is None else (job.priority, job.start, job.id)
        if rank is not None and (place.offered is None or rank < place.offered):
            place.offered = rank
            self.offers.push(*rank, place)
            if len(self.offers) > 2 * len(self.domains) + HEAP_SLACK:
                self.offers.keep(lambda item: item[3].offered == item[:3])

    def head(self, domain: bytes) -> Job | None:
        """The best job of a domain, or of all of them; left where it is."""
        if domain:
            named = self.domains.get(domain)
            return None if named is None or named.settings.paused else named.head()
        offers = self.offers
        while (item := offers.first()) is not None:
            place: Domain = item[3]
            if place.offered != item[:3]:
                offers.pop()  # a better one took its place
                continue
            job = None if place.settings.paused else place.head()
            if job is None:
                place.offered = None
                offers.pop()
                continue
            rank = (job.priority, job.start, job.id)
            if place.offered == rank:
                return job
            place.offered = rank
            offers.pop()
            offers.push(*rank, place)
        return None

    def wake_up(self, domain: bytes) -> int | None:
        """The earliest start or deadline of a domain, or of all of them."""
        if domain:
            named = self.domains.get(domain)
            return None if named is None else named.earliest()
        while (item := self.alarms.first()) is not None:
            time, place = item[1], item[3]
            if place.armed == time and place.earliest() == time:
                return time
            self.alarms.pop()
            if place.armed == time:
                place.armed = None
                self.arm(place)
        return None

    def due(self, now: int) -> Iterator[Domain]:
        """Domains whose alarm has come; each must be armed again by whoever looks at it."""
        while (time := self.alarms.time()) is not None and time <= now:
            place: Domain = self.alarms.pop()[3]
            if place.armed == time:
                place.armed = None
                yield place
