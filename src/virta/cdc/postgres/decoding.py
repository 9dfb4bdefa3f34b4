"""Rows of pgoutput and COPY as rows of events: by relation, with converters for each column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virta.cdc.events import UNCHANGED, CapturedTable, Row
from virta.cdc.postgres import pgoutput

if TYPE_CHECKING:
    from virta.cdc.postgres.pgoutput import Relation, TupleData
    from virta.cdc.postgres.values import Converter, TypeTable


class DecodedTable:
    """A table at one point of the WAL: what to make of the values of its rows."""

    def __init__(
        self, server: str, schema: str, name: str, columns: list[dict[str, Any]], key: list[str],
        types: TypeTable,
    ) -> None:  # fmt: skip
        self.table = CapturedTable(server, schema, name, columns, key)
        self._parts: list[tuple[str, Converter, bool]] = [
            (column["name"], types.converter(column["typeOid"]), column["name"] in key)
            for column in columns
        ]

    def row(self, values: TupleData, before: Row | None = None) -> tuple[Row, list[str]]:
        """Return a row, and the columns whose value was not sent and is not in `before` either."""
        row: Row = {}
        unchanged: list[str] = []
        for (name, convert, _), value in zip(self._parts, values, strict=True):
            if value is None:
                row[name] = None
            elif value is pgoutput.UNCHANGED:
                if before is not None and before.get(name, UNCHANGED) != UNCHANGED:
                    row[name] = before[name]
                else:
                    row[name] = UNCHANGED
                    unchanged.append(name)
            else:
                row[name] = convert(value)
        return row, unchanged

    def old_row(self, values: TupleData, *, is_key: bool) -> Row:
        """Return the row before a change: with the identity of the default kind, its key only."""
        if not is_key:
            return self.row(values)[0]
        return {
            name: None if value is None else convert(value)  # type: ignore[arg-type]
            for (name, convert, in_key), value in zip(self._parts, values, strict=True)
            if in_key
        }


def relation_columns(relation: Relation, described: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of a relation, with what the catalog says of those that it has, too."""
    known = {column["name"]: column for column in described}
    columns = []
    for column in relation.columns:
        found = known.get(column.name)
        if found is None or found["typeOid"] != column.type_oid:
            found = {
                "name": column.name,
                "typeName": "",
                "typeOid": column.type_oid,
                "optional": True,
            }
        columns.append(found)
    return columns


def needs_reading(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> bool:
    """
    Return whether existing rows have other values after a change of columns, which PostgreSQL does not replicate.

    Columns that were added without a default are NULL, and columns that were dropped are not there any more: both
    follow from the columns alone.
    """
    before = {column["name"]: column for column in old}
    numbers = {column.get("attnum") for column in old}
    for column in new:
        was = before.get(column["name"])
        if was is None:
            renamed = column.get("attnum") is None or column["attnum"] in numbers
            if renamed or column.get("defaultValueExpression") is not None:
                return True
        elif any(was.get(part) != column.get(part) for part in ("typeOid", "typeName", "attnum")):
            return True
    return False
