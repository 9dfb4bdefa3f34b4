"""
A matcher as a file, and filters from their canonical form.

    line 1      {"virta": "matcher", "version": 1, "filters": n}
    one a filter {"filter": canonical form, "unnamed": times added without a name, "names": [[id, payload, metadata]]}
    last line   {"sha256": hex digest of everything before this line}

Invariant: a file is loaded whole or not at all. Each canonical form that was read is written again and compared, so
a filter loaded has the id it had. Files are replaced in one step and are private to their owner.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virta import files
from virta.errors import FilterError
from virta.filters import Filter
from virta.filters.cesql import computed_expression
from virta.filters.query_string import ZeroElement
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    And,
    Annulus,
    Box,
    Circle,
    Condition,
    Flat,
    JsonPattern,
    LikeText,
    Node,
    Not,
    Or,
    Polygon,
    Regexp,
    Select,
    ValueRange,
)
from virta.match.compile import Compiled, compile_filter
from virta.match.names import NamedFilter, Names, check_metadata, check_name

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 1

# Filters without a canonical form that an error names.
SHOWN_MAX = 3


def save(path: str | Path, names: Names, counts: dict[str, int]) -> None:
    """Write the filters (id -> times added) and names of a matcher to a file; the caller has its lock."""
    unknown = [id_ for id_ in counts if id_ not in names.forms]
    if unknown:
        shown = ", ".join(unknown[:SHOWN_MAX])
        raise FilterError(
            f"{len(unknown)} filters were added as Filter objects without an id, and the index alone cannot "
            f"be saved: {shown}; add them as text or with an id",
            code="not_saved",
        )
    lines = [_json({"virta": "matcher", "version": VERSION, "filters": len(counts)})]
    for filter_id, count in counts.items():
        owners = names.owners.get(filter_id, {}).values()
        entry = {
            "filter": json.loads(names.forms[filter_id]),
            "unnamed": count - len(owners),
            "names": [[one.id, one.payload, dict(one.metadata)] for one in owners],
        }
        try:
            lines.append(_json(entry))
        except (TypeError, ValueError, RecursionError) as exc:
            bad = ", ".join(one.id for one in owners)
            raise FilterError(
                f"a payload of {bad} is not JSON and cannot be saved: {exc}", code="not_saved"
            ) from exc
    data = "".join(f"{line}\n" for line in lines).encode()
    files.write_whole(path, data + f'{{"sha256":"{hashlib.sha256(data).hexdigest()}"}}\n'.encode())


def read(path: str | Path) -> Iterator[tuple[Compiled, int, list[NamedFilter]]]:
    """Yield each filter of a file, how often it was added without a name, and its names."""
    try:
        data = Path(path).read_bytes()
    except OSError as exc:
        raise FilterError(f"no saved matcher at {path}: {exc.strerror}", code="not_loaded") from exc
    body, _, last = data.rstrip(b"\n").rpartition(b"\n")
    body += b"\n"
    if last != f'{{"sha256":"{hashlib.sha256(body).hexdigest()}"}}'.encode():
        raise FilterError(f"{path} is damaged, or no saved matcher", code="not_loaded")
    lines = body.splitlines()
    header = json.loads(lines[0])
    if header.get("virta") != "matcher" or header.get("version") != VERSION:
        raise FilterError(
            f"{path} has version {header.get('version')}: this Virta reads version {VERSION}",
            code="not_loaded",
        )
    for line in lines[1:]:
        entry = json.loads(line)
        compiled = compile_filter(read_filter(_json(entry["filter"])))
        yield (
            compiled,
            entry["unnamed"],
            [
                NamedFilter(
                    check_name(name),
                    compiled.id,
                    payload,
                    check_metadata(metadata),
                    compiled.canonical,
                )
                for name, payload, metadata in entry["names"]
            ],
        )


def read_filter(canonical: str) -> Filter:
    """Return the filter of a canonical form."""
    filter_ = Filter(_node(json.loads(canonical)))
    if filter_.canonical() != canonical:
        raise FilterError(f"not a canonical form: {canonical:.200}", code="not_loaded")
    return filter_


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def _node(form: Any) -> Node:
    if isinstance(form, str):
        return EVERYTHING if form == "everything" else NOTHING
    ((name, content),) = form.items()
    if name == "not":
        return Not(_node(content))
    if name in ("and", "or"):
        return (And if name == "and" else Or)(tuple(map(_node, content)))
    path, value = content
    read_value = _VALUES.get(name)
    return Condition(
        tuple(map(_step, path)), name, value if read_value is None else read_value(value)
    )


def _step(step: Any) -> Any:
    if not isinstance(step, dict):
        return step
    ((kind, content),) = step.items()
    return Flat(content) if kind == "flat" else computed_expression(content)


# How the value of a condition is read; the others are plain JSON.
_VALUES: dict[str, Any] = {
    "opaque": lambda value: ZeroElement(
        tuple(map(_step, value["path"])), negative=value["contains"] == "-0.0"
    ),
    "range": lambda value: ValueRange(**value),
    "like": lambda value: LikeText(**value),
    "regexp": lambda value: Regexp(**value),
    "regexp_text": lambda value: Regexp(**value),
    "match": JsonPattern.of,
    "select": lambda value: Select(value["index"], _node(value["tree"])),
    "geo_distance": lambda value: Circle(**value),
    "geo_distance_range": lambda value: Annulus(**value),
    "geo_box": lambda value: Box(**value),
    "geo_polygon": lambda value: Polygon(tuple(map(tuple, value["points"]))),
}
