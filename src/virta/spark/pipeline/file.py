"""
Read a pipeline's TOML file into the dataclasses of `virta.spark.pipeline.model`.

Invariant: all errors of the file are reported here at once, before Spark starts, each as `file:line: message`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, Field, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from virta.spark.pipeline.checks import UNREADABLE, check
from virta.spark.pipeline.model import (
    Aggregate,
    Dedupe,
    Pipeline,
    PipelineError,
    Sink,
    Source,
    Spark,
    Where,
)
from virta.spark.pipeline.toml_lines import Place, find_lines, line_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FILE_BYTES_MAX = 1024 * 1024

TABLES: dict[str, Any] = {
    "source": Source,
    "dedupe": Dedupe,
    "filter": Where,
    "aggregate": Aggregate,
    "sink": Sink,
    "dead_letter": Sink,
    "spark": Spark,
}
LIKE = dict.fromkeys(("within", "window", "slide", "session", "late"), "10 minutes")
STAND_IN = Sink(kind="console")  # replaces a sink that could not be read, while the rest is checked
UNREAD_AGGREGATE = Aggregate(aggregates=UNREADABLE, window="1 minute")
# Placeholders for missing keys of a table, so that its other keys are checked.
MISSING_KEYS: dict[Any, dict[str, Any]] = {
    Where: {"match": "a=1"},
    Aggregate: {"aggregates": UNREADABLE},
    Sink: {"kind": "console"},
}
HEAD = {"name": str, "description": str, "checkpoint": str, "trigger": str}


def load(path: str | Path) -> Pipeline:
    """
    Read and check a pipeline file.

    Raises:
        PipelineError: its `problems` are `file:line: message`, in the order of lines.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as exc:
        raise PipelineError([f"{file}: cannot be read: {exc.strerror}"]) from exc
    if len(raw) > FILE_BYTES_MAX:
        raise PipelineError([f"{file}: {len(raw)} bytes, at most {FILE_BYTES_MAX}"])
    return loads(raw.decode("utf-8", "replace"), str(file), str(file.parent))


def nameless(path: str | Path) -> bool:
    """Return whether a TOML file has no [pipeline]: it belongs to another program."""
    try:
        document = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return not isinstance(document.get("pipeline"), dict)


def loads(text: str, name: str = "<pipeline>", directory: str = ".") -> Pipeline:
    """Read and check the text of a pipeline file; see `load`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        where = re.search(r"line (\d+)", str(exc))
        line = where[1] if where else text.count("\n") + 1  # "at end of document"
        raise PipelineError([f"{name}:{line}: {exc}"]) from exc
    lines = find_lines(text)
    problems: list[tuple[Place, str]] = []
    values = read_document(document, problems)
    problems += check_values(values, problems)
    if problems:
        found = sorted({(line_of(lines, place), message) for place, message in problems})
        raise PipelineError([f"{name}:{line}: {message}" for line, message in found])
    return Pipeline(**values, directory=directory, file=name, lines=lines)


def check_values(
    values: Mapping[str, Any], shape: Sequence[tuple[Place, str]]
) -> list[tuple[Place, str]]:
    """Return the errors of the values, without those that follow from a wrong shape."""
    broken = {place for place, _ in shape}
    # A table with an unknown name may be any of the missing ones.
    misnamed = any(len(place) == 1 and place[0] not in TABLES for place in broken - {("pipeline",)})
    columns = values.get("columns", {})
    if misnamed and not columns:
        columns = UNREADABLE
    whole = {
        **values,
        "name": values.get("name", "unnamed"),
        "columns": columns,
        "source": values.get("source") or Source(log="."),
        "filters": tuple(one or Where("a=1") for one in values.get("filters", ())),
        "sinks": tuple(one or STAND_IN for one in values.get("sinks", (STAND_IN,))),
    }
    for name, stand_in in (("aggregate", UNREAD_AGGREGATE), ("dead_letter", STAND_IN)):
        if name in values:
            whole[name] = values[name] or stand_in
    # Made without its own check: here the problems need their lines.
    draft = object.__new__(Pipeline)
    for spec in fields(Pipeline):
        object.__setattr__(draft, spec.name, whole.get(spec.name, default_of(spec)))
    if broken & {("aggregate", "window"), ("aggregate", "session")}:
        broken.add(("aggregate",))  # one of both is given
    return [problem for problem in check(draft) if problem[0] not in broken]


def default_of(spec: Field[Any]) -> Any:
    if spec.default is not MISSING:
        return spec.default
    return spec.default_factory() if spec.default_factory is not MISSING else None


def read_document(document: dict[str, Any], problems: list[tuple[Place, str]]) -> dict[str, Any]:
    """Return the arguments of Pipeline; shape errors go to `problems`."""
    known = {"pipeline", "columns", *TABLES}
    problems += [
        ((name,), f"unknown table {name!r}: choose from {', '.join(sorted(known))}")
        for name in document.keys() - known
    ]
    head = document.get("pipeline", {})
    values: dict[str, Any] = {}
    if not isinstance(head, dict) or "name" not in head:
        problems.append((("pipeline",), 'there is no pipeline name: [pipeline] name = "…"'))
    if not isinstance(head, dict):
        head = {}
    for key, value in head.items():
        if key not in HEAD:
            problems.append(
                (("pipeline", key), f"unknown key {key!r}: choose from {', '.join(HEAD)}")
            )
        elif not isinstance(value, str):
            problems.append((("pipeline", key), f"{key} is {value!r}: expected a string"))
        else:
            values[key] = value
    values["columns"] = read_texts(document.get("columns", {}), ("columns",), problems)
    for name in ("source", "dedupe", "aggregate", "dead_letter", "spark"):
        if name in document:
            values[name] = read_table(TABLES[name], document[name], (name,), problems)
    if "source" not in document:
        problems.append(((), "there is no [source]"))
    for name, plural in (("filter", "filters"), ("sink", "sinks")):
        tables = document.get(name, [])
        if not isinstance(tables, list):
            problems.append(((name,), f"write [[{name}]] (two brackets): there may be several"))
            continue
        values[plural] = tuple(
            read_table(TABLES[name], table, (name, i), problems) for i, table in enumerate(tables)
        )
    return values


def read_table(kind: Any, table: Any, place: Place, problems: list[tuple[Place, str]]) -> Any:
    """Return a dataclass of `kind` from the valid keys of a TOML table; None if it is not a table."""
    if isinstance(table, list):
        problems.append(((*place, 0), f"write [{place[0]}] (one bracket): there is only one"))
        return None
    if not isinstance(table, dict):
        problems.append((place, f"{place[0]} is {table!r}: expected a table"))
        return None
    hints = get_type_hints(kind)
    problems += [
        ((*place, key), f"unknown key {key!r}: choose from {', '.join(hints)}")
        for key in table.keys() - hints.keys()
    ]
    needed = [s.name for s in fields(kind) if s.default is s.default_factory is MISSING]
    problems += [
        ((*place, name), f"{place[0]} has no {name}") for name in needed if name not in table
    ]
    values = {}
    for key, value in table.items():
        if key in hints:
            found = read_value(hints[key], value, (*place, key), problems)
            if found is not None:
                values[key] = found
    stand_ins = {name: MISSING_KEYS[kind][name] for name in needed}
    return kind(**(stand_ins | values))


def read_value(hint: Any, value: Any, place: Place, problems: list[tuple[Place, str]]) -> Any:
    allowed = get_args(hint) or (hint,)
    if str(hint).startswith("tuple"):
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        problems.append((place, f"{place[-1]} is {value!r}: expected a list of strings"))
    elif "Mapping" in str(hint):
        return read_texts(value, place, problems)
    elif int in allowed:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        problems.append((place, f"{place[-1]} is {value!r}: expected a whole number"))
    elif isinstance(value, str):
        return value
    elif place[-1] == "start" and isinstance(value, int):
        return str(value)
    elif str(place[-1]).endswith("_time") and isinstance(value, date):  # TOML has a type for it
        return value.isoformat()
    else:
        such = f' such as "{LIKE[str(place[-1])]}"' if place[-1] in LIKE else ""
        problems.append((place, f"{place[-1]} is {value!r}: expected a string{such}"))
    return None


def read_texts(table: Any, place: Place, problems: list[tuple[Place, str]]) -> Mapping[str, str]:
    if not isinstance(table, dict):
        problems.append((place, f"{place[-1]} is {table!r}: expected a table of strings"))
        return UNREADABLE
    for key, value in table.items():
        if not isinstance(value, str | int | float | bool):
            problems.append(((*place, key), f"{key} is {value!r}: expected a string"))
    return {
        key: value if isinstance(value, str) else str(value).lower() for key, value in table.items()
    }
