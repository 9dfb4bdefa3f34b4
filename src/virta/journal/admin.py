"""
The administration: domain settings, recurring jobs, dead letters, figures.

Settings and recurring jobs are ordinary persistent values under `virta:domain:<domain>` and
`virta:cron:<name>` (JSON), so they are logged, copied and listed like any value, and the largest
timestamp wins; `virta:ran:<name>` is kept by the journal itself. Everything else is a command: a SET of `virta:admin` whose value is a JSON object
`{"do": ..., ...}`; the answer is the JSON value of the reply's pair. Nothing else lives under `virta:`.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from virta.journal.jobs.domain import DEFAULTS, DomainSettings
from virta.journal.jobs.failures import last_failure, read_failures, reason_text
from virta.journal.jobs.job import DEAD, STATE_NAMES, WORKING, Job, host_of
from virta.journal.jobs.recurring import Cron, CronSchedule
from virta.journal.jobs.table import LIST_MAX, TOTAL_NAMES
from virta.journal.protocol.messages import (
    DATA,
    PERSIST,
    VALUE_DATA_BYTES_MAX,
    Function,
    Pair,
    RefusedError,
    Reply,
    Request,
    Type,
    Value,
)
from virta.journal.protocol.rules import CLOCK_SKEW_US_MAX

if TYPE_CHECKING:
    from virta.journal.engine import JournalEngine
    from virta.journal.sessions import Session

RESERVED = b"virta:"
DOMAIN_PREFIX = b"virta:domain:"
CRON_PREFIX = b"virta:cron:"
RAN_PREFIX = b"virta:ran:"  # when a recurring job with `catch_up` was last due
# A clock that goes back by more than this was set, and what is due by it has to be worked out anew.
CLOCK_BACK_US = 1_000_000
CRONS_MAX = 10_000
READ_ONLY = frozenset({"stats", "list", "show", "recurring", "export"})
LIMIT_MAX = 1 << 53
DELAY_S_MAX = 3650 * 86_400
NESTED = "the JSON is nested too deeply: 900 levels are always readable"
PAYLOAD_SHOWN_BYTES_MAX = 64 * 1024  # of one job that is shown
# Runs of a recurring job that are listed: so many, and more if they are in the next hour.
NEXT_RUNS, NEXT_RUNS_MAX = 5, 60
HOUR_US = 3600 * 1_000_000
# Runs beyond the first ones in one list, since each takes some microseconds.
LISTED_RUNS_MAX = 2000
T = TypeVar("T")


class AdminCommand(msgspec.Struct, forbid_unknown_fields=True):
    """One administrative command; which fields count depends on `do`."""

    do: str
    domain: str = ""
    state: str = ""
    uri: str = ""
    key: str = ""
    reason: str = ""
    limit: Annotated[int, Meta(le=LIMIT_MAX)] = 100
    offset: Annotated[int, Meta(le=LIMIT_MAX)] = 0
    delay: Annotated[float, Meta(le=DELAY_S_MAX)] | None = None
    traceback: str = ""
    dead: bool = False  # of a failure: do not try again
    settings: dict[str, Any] = {}


class Admin:
    def __init__(self, engine: JournalEngine) -> None:
        self._engine = engine
        self._crons: dict[bytes, tuple[Cron, CronSchedule, int]] = {}
        self._due: list[tuple[int, bytes]] = []
        self._ticked = 0
        self._was_primary = False

    # Settings as values.

    def refuse_reserved(self, key: bytes) -> None:
        if key.startswith(RESERVED):
            raise RefusedError("bad-settings", "keys under virta: are only set and deleted")

    def check(self, request: Request, *, copied: bool) -> None:
        """Refuse an invalid setting; only daemons may set what the journal keeps for itself."""
        key, value = request.key, request.value
        assert value is not None
        if request.timeout is not None:
            raise RefusedError("bad-flags", "settings do not expire")
        if key.startswith(DOMAIN_PREFIX) and len(key) > len(DOMAIN_PREFIX):
            if key != key.lower() and not copied:
                raise RefusedError("bad-settings", f"{key[:60]!r}: domains are in lower case")
            problem = _decode_settings(value, DomainSettings).problem()
            if problem:
                raise RefusedError("bad-settings", problem)
        elif key.startswith(CRON_PREFIX) and len(key) > len(CRON_PREFIX):
            cron = _decode_settings(value, Cron)
            CronSchedule(cron.schedule)
            if not 0 <= cron.priority <= 255:
                raise RefusedError("bad-priority", f"{cron.priority} is not from 0 to 255")
            if not cron.domain:
                host_of(cron.uri.encode())
            if key not in self._crons and len(self._crons) >= CRONS_MAX:
                raise RefusedError("too-large", f"there are {CRONS_MAX} recurring jobs already")
        elif not (copied and key.startswith(RAN_PREFIX)):
            raise RefusedError(
                "bad-settings", f"{key[:60]!r} is not virta:domain:… or virta:cron:…"
            )

    def applied(self, key: bytes, value: Value, now: int) -> None:
        """Apply a setting that was checked and stored."""
        if key.startswith(DOMAIN_PREFIX):
            name = key[len(DOMAIN_PREFIX) :].lower()
            self._engine.jobs.configure(name, _decode_settings(value, DomainSettings))
        elif key.startswith(CRON_PREFIX):
            cron = _decode_settings(value, Cron)
            schedule = CronSchedule(cron.schedule)
            self._expect(key, cron, schedule, now)

    def _expect(self, key: bytes, cron: Cron, schedule: CronSchedule, now: int) -> None:
        due = schedule.after(now)
        self._crons[key] = (cron, schedule, due)
        heapq.heappush(self._due, (due, key))

    def removed(self, keys: list[bytes]) -> None:
        for key in keys:
            if key.startswith(DOMAIN_PREFIX):
                self._engine.jobs.configure(key[len(DOMAIN_PREFIX) :].lower(), DomainSettings())
            elif key.startswith(CRON_PREFIX):
                self._crons.pop(key, None)
                self._forget(RAN_PREFIX + key[len(CRON_PREFIX) :])

    def restored(self, now: int) -> None:
        """Apply the settings that were restored with the store."""
        store = self._engine.store
        for key in list(store.keys.scan(RESERVED, b"virta;")):
            entry = store.live(key, now)
            if entry is not None:
                self.applied(key, store.value(entry), now)

    # Recurring jobs.

    def tick(self, now: int) -> None:
        if now < self._ticked - CLOCK_BACK_US:
            self.expect_all(now)
        self._ticked = now
        if self._engine.primary and not self._was_primary:
            self._catch_up_all(now)
        self._was_primary = self._engine.primary
        while self._due and self._due[0][0] <= now:
            due, key = heapq.heappop(self._due)
            cron, schedule, expected = self._crons.get(key, (None, None, None))
            if cron is None or schedule is None or expected != due:
                continue
            self._expect(key, cron, schedule, now)
            if self._engine.primary:
                self._push(cron, due, now)
                if cron.catch_up == "once":
                    self._remember(RAN_PREFIX + key[len(CRON_PREFIX) :], due, now)

    def expect_all(self, now: int) -> None:
        """Compute again when each recurring job is due."""
        for key, (cron, schedule, _) in list(self._crons.items()):
            self._expect(key, cron, schedule, now)

    def _catch_up_all(self, now: int) -> None:
        for key, (cron, schedule, _) in self._crons.items():
            if cron.catch_up == "once":
                self._catch_up(key, cron, schedule, now)

    def _catch_up(self, key: bytes, cron: Cron, schedule: CronSchedule, now: int) -> None:
        """Push once for all the times that passed while no daemon ran, dated by the last one."""
        ran = RAN_PREFIX + key[len(CRON_PREFIX) :]
        store = self._engine.store
        # A time from a clock that was far ahead says nothing about the times since.
        known = [
            entry.timestamp
            for entry in map(store.stored, (key, ran))
            if entry is not None and entry.timestamp <= now + CLOCK_SKEW_US_MAX
        ]
        missed = schedule.latest(now)
        if missed > max(known, default=now):
            self._push(cron, missed, now)
            self._remember(ran, missed, now)

    def _push(self, cron: Cron, due: int, now: int) -> None:
        """
        Push a recurring job. Its due time is the command's timestamp: every daemon would push the same.

        A clock that is set back repeats nothing, unless it was so far ahead that it must have been wrong:
        then the job would not be pushed until that time comes again.
        """
        payload = None if cron.payload is None else Value(Type.STRING, cron.payload.encode())
        uri = cron.uri.encode()
        waiting = self._engine.jobs.find(uri)
        last = self._engine.jobs.last_command(uri)
        timestamp = last + 1 if last > now + CLOCK_SKEW_US_MAX else due
        # One that waits for its turn keeps its place, or a busy domain would never get to it.
        start = min(waiting.start, due) if waiting and waiting.state != WORKING else due
        try:
            self._engine.jobs.push(
                uri,
                cron.domain.encode(),
                timestamp,
                now,
                priority=cron.priority,
                start=start,
                payload=payload,
                persist=True,
            )
        except RefusedError:
            return  # the journal is full; the next time comes

    def _remember(self, key: bytes, due: int, now: int) -> None:
        """Store when a recurring job was last due, on every daemon."""
        engine = self._engine
        if engine.store.set(key, Value(Type.VOID, b""), due, now, persist=True):
            entry = engine.store.stored(key)
            if entry is not None:
                engine.replication.value_changed(entry)

    def _forget(self, key: bytes) -> None:
        """Delete what `_remember` stored, here or on any daemon."""
        engine = self._engine
        entry = engine.store.stored(key)
        if entry is not None and not entry.tombstone:
            engine.store.delete(key, entry.timestamp + 1, engine.clock())
            engine.replication.key_removed(key)

    def next_event(self) -> int | None:
        return self._due[0][0] if self._due else None

    # Commands.

    def run(self, request: Request, session: Session, now: int) -> Reply:
        assert request.value is not None
        command = _decode_settings(request.value, AdminCommand)
        action = getattr(self, f"_do_{command.do}", None)
        if action is None:
            raise RefusedError("unknown-function", f"there is no command {command.do[:40]!r}")
        answer = action(command, session, now)
        # Reading must not wait for copies of other changes: a starting peer exports before it accepts any.
        reads = command.do in READ_ONLY or (command.do == "configure" and not command.settings)
        flags = DATA | (PERSIST if self._engine.wants_log and not reads else 0)
        if command.do == "export":
            # A page may end with the largest value there is, which with its key is too large for one.
            cuts = range(0, len(answer) or 1, VALUE_DATA_BYTES_MAX)
            parts = [answer[at : at + VALUE_DATA_BYTES_MAX] for at in cuts]
            pairs = [Pair(b"", Value(Type.BUFFER, part)) for part in parts]
            return Reply(request.identifier, flags, now, pairs=pairs)
        value = Value(Type.STRING, msgspec.json.encode(answer))
        return Reply(request.identifier, flags, now, pair=Pair(b"", value))

    def _do_stats(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        jobs, store = self._engine.jobs, self._engine.store
        jobs.tick(now)
        places = list(jobs.domains.values())
        totals = jobs.counts()
        shown = places if not command.domain else [_find_domain(places, command.domain)]
        return {
            "keys": len(store),
            "memory_bytes": store.memory_bytes,
            "memory_bytes_max": store.memory_bytes_max,
            "values_spilled": store.spilled,
            "disk_bytes": self._engine.disk_bytes(),
            "jobs": dict(zip(STATE_NAMES, totals, strict=False)),
            "oldest_ready_seconds": jobs.oldest_ready(now) / 1e6,
            "totals": dict(zip(TOTAL_NAMES, jobs.totals, strict=True)),
            "domains_count": len(places),
            "domains": [
                _domain_stats(place, jobs, now) for place in shown[: min(command.limit, LIST_MAX)]
            ],
            "recurring": len(self._crons),
            "requests": self._engine.handled,
            "primary": self._engine.primary,
        }

    def _do_list(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        if command.state and command.state not in STATE_NAMES[: DEAD + 1]:
            raise RefusedError(
                "bad-settings", f"state {command.state!r} is not one of {STATE_NAMES[:5]}"
            )
        self._engine.jobs.tick(now)
        jobs = self._engine.jobs.listed(
            domain=command.domain.encode(),
            state=command.state,
            limit=max(command.limit, 0),
            offset=max(command.offset, 0),
        )
        return {"jobs": [_job_view(job) for job in jobs]}

    def _do_show(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        self._engine.jobs.tick(now)
        name = (command.key or command.uri).encode()
        if not name:
            raise RefusedError("key-missing", "the uri or the key of a job")
        job = self._engine.jobs.find(name) or self._engine.jobs.dead(name)
        if job is None:
            raise RefusedError("does-not-exist")
        view = _job_view(job)
        if job.payload is not None:
            shown = job.payload.data[:PAYLOAD_SHOWN_BYTES_MAX]
            view["payload"] = shown.decode(errors="replace")
        view["max_attempts"] = job.domain.settings.max_attempts
        view["failures"] = [failure._asdict() for failure in read_failures(job.reason)]
        return view

    def _do_recurring(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        """All recurring jobs, each with its next runs in microseconds: five, and those of the next hour."""
        found = []
        left = LISTED_RUNS_MAX
        for key, (cron, schedule, due) in sorted(self._crons.items())[:LIST_MAX]:
            runs = [due]
            while len(runs) < NEXT_RUNS:
                runs.append(schedule.after(runs[-1]))
            while left and len(runs) < NEXT_RUNS_MAX and runs[-1] < now + HOUR_US:
                runs.append(schedule.after(runs[-1]))
                left -= 1
            name = key[len(CRON_PREFIX) :].decode(errors="replace")
            found.append({"name": name, **msgspec.to_builtins(cron), "next": runs})
        return {"recurring": found}

    def _do_export(self, command: AdminCommand, session: Session, now: int) -> bytes:
        """Return everything stored as requests, page by page, for another daemon; offset 0 starts over."""
        return self._engine.export.page(session, now, again=command.offset == 0)

    def _do_fail(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        self._engine.jobs.tick(now)
        job = self._engine.jobs.find_text(command.key)
        if job is None:
            raise RefusedError("does-not-exist", "that attempt is over")
        delay = None if command.delay is None else int(max(command.delay, 0) * 1_000_000)
        reason = reason_text(command.reason, command.traceback)
        self._engine.jobs.fail(job, reason, now, delay=delay, dead=command.dead)
        return _job_view(job)

    def _do_kick(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        jobs = self._engine.jobs
        if not command.uri and not command.domain:
            raise RefusedError("key-missing", "the uri of a job or a domain")
        if not command.uri:
            return {"kicked": jobs.kick(command.domain.encode(), command.limit, now)}
        job = jobs.find(command.uri.encode())
        if job is None:
            raise RefusedError("does-not-exist")
        jobs.kick_job(job, now)
        return {"kicked": 1}

    def _do_requeue(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        chosen = self._dead(command)
        for job in chosen:
            self._engine.jobs.requeue(job, now)
        return {"requeued": len(chosen)}

    def _do_drop(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:  # noqa: ARG002
        chosen = self._dead(command)
        for job in chosen:
            self._engine.jobs.drop(job, now)
        return {"dropped": len(chosen)}

    def _dead(self, command: AdminCommand) -> list[Job]:
        if command.uri:
            job = self._engine.jobs.dead(command.uri.encode())
            if job is None:
                raise RefusedError("does-not-exist", "no dead job of that uri")
            return [job]
        return self._engine.jobs.listed(
            domain=command.domain.encode(), state="dead", limit=max(command.limit, 0)
        )

    def _do_configure(self, command: AdminCommand, session: Session, now: int) -> dict[str, Any]:
        """Change some settings of a domain and keep the others; return all of them."""
        if not command.domain:
            raise RefusedError("key-missing", "the domain")
        key = DOMAIN_PREFIX + command.domain.encode().lower()
        entry = self._engine.store.live(key, now)
        current = (
            DomainSettings()
            if entry is None
            else _decode_settings(self._engine.store.value(entry), DomainSettings)
        )
        merged = {**msgspec.to_builtins(current), **command.settings}
        if not command.settings:
            return merged  # a query: a domain without settings stays without
        stored = dict(merged)
        if stored["retry_delay_max"] == DEFAULTS.retry_delay_max:
            # Daemons from before this setting refuse it: as a copy, and in a directory that they open again.
            del stored["retry_delay_max"]
        value = Value(Type.STRING, msgspec.json.encode(stored))
        # Without a timestamp it gets one later than what is stored.
        reply = self._engine.handle(Request(Function.SET, key=key, value=value), session)
        if reply.error:
            raise RefusedError(reply.error.partition(":")[0], reply.error.partition(": ")[2])
        return merged


def _decode_settings(value: Value, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(value.data, type=kind)
    except msgspec.DecodeError as error:
        raise RefusedError("bad-settings", str(error)[:200]) from error
    except RecursionError as error:
        raise RefusedError("bad-settings", NESTED) from error


def _find_domain(places: list[Any], domain: str) -> Any:
    for place in places:
        if place.name == domain.encode().lower():
            return place
    raise RefusedError("does-not-exist", f"no jobs and no settings in domain {domain[:60]!r}")


def _domain_stats(place: Any, jobs: Any, now: int) -> dict[str, Any]:
    return {
        "domain": place.name.decode(errors="replace"),
        **dict(zip(STATE_NAMES, place.counts, strict=False)),
        "done": jobs.done_in.get(place.name, 0),
        "oldest_ready_seconds": place.oldest_ready(now) / 1e6,
        "settings": msgspec.to_builtins(place.settings),
    }


def _job_view(job: Job) -> dict[str, Any]:
    view: dict[str, Any] = {
        "uri": job.uri.decode(errors="replace"),
        "key": job.key().decode(errors="replace"),
        "domain": job.domain.name.decode(errors="replace"),
        "state": STATE_NAMES[job.state],
        "priority": job.priority,
        "start": job.start,
        "timestamp": job.timestamp,
        "attempts": job.attempts,
        "persist": job.persist,
        "payload_bytes": len(job.payload.data) if job.payload else 0,
    }
    if job.reason:
        view["reason"], traceback = last_failure(job.reason)
        if traceback:
            view["traceback"] = traceback
    if job.worked_until:
        view["died" if job.state == DEAD else "worked_until"] = job.worked_until
    return view
