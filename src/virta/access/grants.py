"""
Rights as data: a grant allows verbs on names that fit a pattern, for events that satisfy a row filter.

    {"verbs": ["read", "publish"], "pattern": "orders.*", "filter": "tenant=42", "dialect": "query-string"}

A principal has a list of grants. If several fit a verb and a name, each adds to what is allowed: their row
filters are joined by `or`, and one without a filter allows every event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from virta.access.patterns import EVERYTHING, NamePattern
from virta.errors import AccessError, FilterError
from virta.filters import DIALECTS, Filter, parse
from virta.filters.tree import any_of

VERBS: Final = ("read", "publish", "jobs", "filters", "webhooks", "pipelines", "admin")
GRANTS_MAX: Final = 100  # of one principal
DIALECT_DEFAULT: Final = "query-string"
# Filters of this dialect apply to an event's data, those of all others to the event.
DOCUMENT_DIALECT: Final = "koncorde"
# Answers of one principal that are kept; names come from requests.
KEPT_MAX: Final = 1024
_MEMBERS: Final = frozenset({"verbs", "pattern", "filter", "dialect"})


@dataclass(frozen=True)
class Grant:
    """Verbs on the names that fit a pattern; `filter` limits them to some events."""

    verbs: frozenset[str]
    pattern: NamePattern
    filter: Filter | None = None
    source: Any = None  # of the filter, as it was written
    dialect: str = DIALECT_DEFAULT

    def describe(self) -> dict[str, Any]:
        """Return the grant as JSON."""
        verbs = [verb for verb in VERBS if verb in self.verbs]
        described: dict[str, Any] = {"verbs": verbs, "pattern": self.pattern.text}
        if self.filter is not None:
            described |= {"filter": self.source, "dialect": self.dialect}
        return described


def make_grant(
    verbs: list[str], pattern: str, filter_: Any = None, dialect: str = DIALECT_DEFAULT
) -> Grant:
    """
    Return a grant.

    Raises:
        AccessError: an unknown verb, or an invalid pattern or filter.
    """
    unknown = [verb for verb in verbs if verb not in VERBS]
    if unknown or not verbs:
        raise _invalid(f"{unknown[0] if unknown else verbs!r} is no verb: {', '.join(VERBS)}")
    if filter_ is None:
        return Grant(frozenset(verbs), NamePattern(pattern))
    if dialect not in DIALECTS:
        raise _invalid(f"{dialect!r} is no dialect: {', '.join(DIALECTS)}")
    try:
        parsed = parse(filter_, dialect)
    except FilterError as error:
        raise _invalid(f"the row filter {filter_!r} is invalid: {error.message}") from error
    return Grant(frozenset(verbs), NamePattern(pattern), parsed, filter_, dialect)


def read_grants(value: Any) -> tuple[Grant, ...]:
    """
    Read grants from JSON: a list of objects.

    Raises:
        AccessError: they are not as the module describes them.
    """
    if not isinstance(value, list) or len(value) > GRANTS_MAX:
        raise _invalid(f"grants are a list of at most {GRANTS_MAX} objects")
    found = []
    for one in value:
        if not isinstance(one, dict) or not _MEMBERS.issuperset(one):
            raise _invalid(f"a grant is an object with {', '.join(sorted(_MEMBERS))}")
        verbs, pattern = one.get("verbs"), one.get("pattern")
        if not isinstance(verbs, list) or not all(isinstance(verb, str) for verb in verbs):
            raise _invalid("`verbs` of a grant is a list of texts")
        if not isinstance(pattern, str):
            raise _invalid("`pattern` of a grant is a text")
        dialect = one.get("dialect", DIALECT_DEFAULT)
        if not isinstance(dialect, str):
            raise _invalid("`dialect` of a grant is a text")
        found.append(make_grant(verbs, pattern, one.get("filter"), dialect))
    return tuple(found)


@dataclass(frozen=True)
class GrantedAccess:
    """What a principal may do with one name: everything, or what satisfies the row filter."""

    row_filter: Filter | None = None


class Rights:
    """The grants of one principal."""

    def __init__(self, grants: tuple[Grant, ...]) -> None:
        documents = {g.dialect == DOCUMENT_DIALECT for g in grants if g.filter is not None}
        if len(documents) > 1:
            raise _invalid("either all row filters of a principal are Koncorde filters, or none is")
        self.grants = grants
        self._kept: dict[tuple[str, str], GrantedAccess | None] = {}

    def permission(self, verb: str, name: str) -> GrantedAccess | None:
        """Return what is allowed; None if nothing is."""
        key = (verb, name)
        try:
            return self._kept[key]
        except KeyError:
            pass
        found = _access_of([g for g in self._with(verb) if g.pattern.matches(name)])
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        self._kept[key] = found
        return found

    def allows_whole(self, verb: str, name: str) -> bool:
        """Return whether a name is allowed, without a row filter."""
        found = self.permission(verb, name)
        return found is not None and found.row_filter is None

    def covers(self, verb: str, name: str) -> bool:
        """Return whether a name and every name below it is allowed, without a row filter."""
        return any(g.filter is None and g.pattern.covers(name) for g in self._with(verb))

    def has(self, verb: str) -> bool:
        """Return whether a verb is allowed on some names."""
        return any(True for _ in self._with(verb))

    def has_all(self, verb: str) -> bool:
        """Return whether a verb is allowed on all names, without a row filter."""
        return any(g.filter is None and g.pattern.is_everything for g in self._with(verb))

    def describe(self) -> list[dict[str, Any]]:
        return [grant.describe() for grant in self.grants]

    def _with(self, verb: str) -> list[Grant]:
        return [grant for grant in self.grants if verb in grant.verbs]


def _access_of(grants: list[Grant]) -> GrantedAccess | None:
    if not grants:
        return None
    filters = [grant.filter for grant in grants if grant.filter is not None]
    if len(filters) < len(grants):
        return GrantedAccess()
    if len(filters) == 1:
        return GrantedAccess(filters[0])
    return GrantedAccess(Filter(any_of([f.tree for f in filters]), dialect=filters[0].dialect))


def _invalid(message: str) -> AccessError:
    return AccessError(message, code="invalid-grant")


ALL_RIGHTS: Final = Rights((make_grant(list(VERBS), EVERYTHING),))
