"""
Names on filters: subscribers with a payload and metadata, any number of them on one filter.

The engine has each distinct filter once, with a count. Here are the names that refer to it. A filter that was also
added without a name is *shared*: it matches under its own id as well.

Changes take the lock. Matching reads without it: dictionaries are replaced or changed in one step, so a reader sees
a name before or after a change.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from virta.errors import FilterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from virta.filters import Filter

NAME_CHARS_MAX = 256
# Members of one name's metadata; each is compared at match time.
METADATA_MEMBERS_MAX = 64

# Memory of one canonical form beside its text, and of one name: measured.
FORM_BYTES = 150
NAME_BYTES = 700

_FILTER_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class NamedFilter:
    """A filter under a name; `metadata` restricts matching, `payload` is any value of the caller's."""

    id: str
    filter_id: str
    payload: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    canonical: str | None = None  # None for a filter that was added without a name

    @property
    def filter(self) -> Filter | None:
        """Return the filter, read from its canonical form."""
        if self.canonical is None:
            return None
        from virta.match.saved import read_filter  # noqa: PLC0415 - rarely needed

        return read_filter(self.canonical)

    def is_within(self, where: Mapping[str, Any]) -> bool:
        """Return whether the metadata has every member of `where`; true and 1 are different values, as in JSON."""
        metadata = self.metadata
        return all(
            name in metadata
            and metadata[name] == value
            and (metadata[name].__class__ is bool) == (value.__class__ is bool)
            for name, value in where.items()
        )


class Match(NamedTuple):
    """A filter that matched, and the sentences of the conditions that decided."""

    id: str
    filter_id: str
    payload: Any
    reasons: list[str]


class Names:
    """The names of one matcher, and the canonical forms of the filters that can be explained and saved."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.named: dict[str, NamedFilter] = {}
        self.owners: dict[str, dict[str, NamedFilter]] = {}  # filter id -> name -> named filter
        self.shared: set[str] = set()  # filters with names that were added without a name too
        self.forms: dict[str, str] = {}  # filter id -> canonical form

    def __bool__(self) -> bool:
        return bool(self.named)

    @property
    def bytes(self) -> int:
        """Return the estimated memory of names and canonical forms, without payloads."""
        forms = sum(map(len, list(self.forms.values())))
        return forms + len(self.forms) * FORM_BYTES + len(self.named) * NAME_BYTES

    # Changes; the caller has the lock.

    def put(self, one: NamedFilter, *, known: bool) -> NamedFilter | None:
        """Enter a name for a filter the engine knew already or not; return the one it replaces."""
        replaced = self.named.get(one.id)
        if known and one.filter_id not in self.owners:
            self.shared.add(one.filter_id)
        self.owners.setdefault(one.filter_id, {})[one.id] = one
        self.named[one.id] = one
        if replaced is not None and replaced.filter_id != one.filter_id:
            self._forget(replaced)
        return replaced

    def pop(self, name: str) -> NamedFilter | None:
        """Remove a name; return what it named."""
        one = self.named.pop(name, None)
        if one is not None:
            self._forget(one)
        return one

    def _forget(self, one: NamedFilter) -> None:
        owners = self.owners[one.filter_id]
        del owners[one.id]
        if not owners:
            del self.owners[one.filter_id]
            self.shared.discard(one.filter_id)

    def has_unnamed(self, filter_id: str) -> bool:
        """Return whether the engine's filter, if there is one, was added without a name."""
        return filter_id not in self.owners or filter_id in self.shared

    # Matching.

    def expand(self, found: Iterable[str]) -> list[str]:
        """Return the ids under which the filters found were added."""
        return [id_ for id_, _, _ in self._entries(found)]

    def select(
        self, found: Iterable[str], where: Mapping[str, Any] | None, limit: int | None
    ) -> list[tuple[str, str, NamedFilter | None]]:
        """Return (id, filter id, named filter or None), restricted to metadata and at most `limit`."""
        entries = self._entries(found)
        if where:
            entries = (one for one in entries if one[2] is not None and one[2].is_within(where))
        return list(islice(entries, limit))

    def _entries(self, found: Iterable[str]) -> Iterator[tuple[str, str, NamedFilter | None]]:
        owners, shared = self.owners, self.shared
        for filter_id in found:
            names = owners.get(filter_id)
            if names is None:
                yield filter_id, filter_id, None
                continue
            if filter_id in shared:
                yield filter_id, filter_id, None
            for one in list(names.values()):
                yield one.id, filter_id, one


def check_name(name: Any) -> str:
    """Return a name that `Matcher.add` accepts as an id; raise FilterError for others."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise FilterError(
            f"id {name!r}: expected a text of 1 to {NAME_CHARS_MAX} characters", code="bad_name"
        )
    if _FILTER_ID.fullmatch(name):
        raise FilterError(
            f"id {name!r}: 64 hex digits are the id of a filter without a name, choose another",
            code="bad_name",
        )
    return name


def check_id(id_: Any) -> str:
    """Return a name or a filter's id; raise FilterError for what is no text."""
    if not isinstance(id_, str):
        raise FilterError(f"an id is a text, got {type(id_).__name__} {id_!r:.80}", code="bad_name")
    return id_


def check_limit(limit: Any) -> None:
    """Raise ValueError for what cannot be the length of an answer."""
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise ValueError(f"limit {limit!r:.80}: expected a whole number from 0, or None")


def check_metadata(metadata: Any, what: str = "metadata") -> dict[str, Any]:
    """Return a copy of a name's metadata, or of a restriction to it: texts to scalars; raise FilterError for others."""
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or len(metadata) > METADATA_MEMBERS_MAX:
        raise FilterError(
            f"{what} {metadata!r:.80}: expected an object of at most {METADATA_MEMBERS_MAX} members",
            code="bad_metadata",
        )
    for name, value in metadata.items():
        if not isinstance(name, str) or not (
            value is None or isinstance(value, str | int | float | bool)
        ):
            raise FilterError(
                f"{what} {name!r:.80}: {value!r:.80}: expected a text, a number, a boolean or null",
                code="bad_metadata",
            )
    return dict(metadata)
